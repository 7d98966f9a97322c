//! A chart of curves. No I/O.

use std::ops::Range;

use maud::{Markup, PreEscaped, html};
use plotters::prelude::SVGBackend;
use plotters::{
    chart::ChartBuilder,
    coord::{
        Shift,
        combinators::IntoLogRange as _,
        ranged1d::{Ranged, ValueFormatter},
    },
    drawing::{DrawingArea, DrawingAreaErrorKind, IntoDrawingArea as _},
    series::LineSeries,
    style::{Color as _, IntoFont as _, RGBColor},
};

use super::COLOURS;
use crate::{
    report::{Axis, Curve},
    stats::grouped,
};

const SIZE: (u32, u32) = (760, 360);
/// What the style replaces, as it does the colour of each store's line: what is drawn in the colour of the text.
pub(super) const TEXT: RGBColor = RGBColor(0, 1, 0);
pub(super) const GRID: RGBColor = RGBColor(0, 2, 0);

pub(super) type Drawn<'a> =
    Result<(), DrawingAreaErrorKind<<SVGBackend<'a> as plotters::prelude::DrawingBackend>::ErrorType>>;

/// What stands for the line of a store, until the style replaces it.
fn line_of(number: usize) -> RGBColor {
    RGBColor(u8::try_from(number % COLOURS + 1).unwrap_or(u8::MAX), 0, 0)
}

/// A chart, and the same as a table; nothing where no store has a measurement.
pub(super) fn figure(curve: &Curve, stores: &[String]) -> Markup {
    let Some(svg) = svg(curve) else { return html! {} };
    let measured = || stores.iter().zip(&curve.lines).filter(|(_, line)| !line.is_empty());
    let names = measured().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(", ");
    let says = format!(
        "{}: {} against {}, for {names}. The same is in the table below.",
        curve.title,
        curve.y.title(),
        curve.x
    );
    html! {
        figure id=(format!("chart-{}", curve.id)) {
            figcaption { (curve.title) }
            div.wide tabindex="0" role="img" aria-label=(says) { (PreEscaped(svg)) }
            details {
                summary { "The same as a table" }
                (table(curve, stores))
            }
        }
    }
}

fn table(curve: &Curve, stores: &[String]) -> Markup {
    let measured = || stores.iter().zip(&curve.lines).filter(|(_, line)| !line.is_empty());
    let cell = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), grouped);
    html! {
        div.wide tabindex="0" role="region" aria-label=(format!("{}, as a table", curve.title)) { table {
            @match curve.y {
                Axis::Share(_) => {
                    thead { tr { th scope="col" { (curve.y.title()) } @for percent in [10.0, 50.0, 90.0, 99.0, 99.9] { th scope="col" { (percent) } } } }
                    @for (store, line) in measured() {
                        tr { th scope="row" { (store) ", " (curve.x) }
                            @for percent in [10.0, 50.0, 90.0, 99.0, 99.9] {
                                td { (cell(line.iter().find(|(_, y)| *y == percent).map(|(x, _)| *x))) }
                            } }
                    }
                }
                Axis::Magnitude(_) => {
                    @let xs: Vec<f64> = measured().max_by_key(|(_, line)| line.len()).map(|(_, line)| line.iter().map(|(x, _)| *x).collect()).unwrap_or_default();
                    thead { tr { th scope="col" { (curve.x) } @for x in &xs { th scope="col" { (grouped(*x)) } } } }
                    @for (store, line) in measured() {
                        tr { th scope="row" { (store) ", " (curve.y.title()) }
                            @for x in &xs { td { (cell(line.iter().find(|(at, _)| at == x).map(|(_, y)| *y))) } } }
                    }
                }
            }
        } }
    }
}

fn svg(curve: &Curve) -> Option<String> {
    let points = || curve.lines.iter().flatten();
    let x = range(points().map(|(x, _)| *x))?;
    let mut out = String::new();
    {
        let area = SVGBackend::with_string(&mut out, SIZE).into_drawing_area();
        let drawn = match curve.y {
            Axis::Share(_) => draw(&area, curve, x, 0.0..100.0),
            Axis::Magnitude(_) => {
                let y = range(points().map(|(_, y)| *y))?;
                draw(&area, curve, x, y.log_scale())
            }
        };
        // It is drawn into a string, which takes everything.
        drawn.ok()?;
    }
    Some(out)
}

/// Whole decades are easy to read, but waste space: the least and the most, and a little around them.
fn range(values: impl Iterator<Item = f64>) -> Option<Range<f64>> {
    let (least, most) =
        values.filter(|value| *value > 0.0).fold((f64::INFINITY, 0.0_f64), |(l, m), x| (l.min(x), m.max(x)));
    (most > 0.0).then_some(least / 1.2..most * 1.2)
}

fn draw<'a, Y>(area: &DrawingArea<SVGBackend<'a>, Shift>, curve: &Curve, x: Range<f64>, y: Y) -> Drawn<'a>
where
    Y: plotters::coord::ranged1d::AsRangedCoord<Value = f64>,
    Y::CoordDescType: Ranged<ValueType = f64> + ValueFormatter<f64>,
{
    let font = ("sans-serif", 14).into_font().color(&TEXT);
    let mut chart = ChartBuilder::on(area)
        .margin(10)
        // The last label may stand at the very edge.
        .margin_right(30)
        .x_label_area_size(44)
        .y_label_area_size(70)
        .build_cartesian_2d(x.log_scale(), y)?;
    chart
        .configure_mesh()
        .x_desc(curve.x)
        .y_desc(curve.y.title())
        // Within one decade, each unit of it would have a label.
        .x_labels(5)
        .y_labels(6)
        .x_label_formatter(&|x| grouped(*x))
        .y_label_formatter(&|y| grouped(*y))
        .label_style(font.clone())
        .axis_desc_style(font)
        .axis_style(TEXT)
        .bold_line_style(GRID)
        .light_line_style(GRID.mix(0.0))
        .draw()?;
    for (number, line) in curve.lines.iter().enumerate().filter(|(_, line)| !line.is_empty()) {
        chart.draw_series(LineSeries::new(line.iter().copied(), line_of(number).stroke_width(2)))?;
    }
    area.present()
}
