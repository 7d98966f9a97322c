//! A chart of who held a lock when: a lane for each process. No I/O.

use maud::{Markup, PreEscaped, html};
use plotters::prelude::SVGBackend;
use plotters::{
    chart::{ChartBuilder, ChartContext},
    coord::{cartesian::Cartesian2d, types::RangedCoordf64},
    drawing::IntoDrawingArea as _,
    element::{Cross, PathElement, Rectangle, Text},
    style::{
        Color as _, IntoFont as _, RGBColor,
        text_anchor::{HPos, Pos, VPos},
    },
};

use super::chart::{Drawn, GRID, TEXT};
use crate::timeline::{Ending, Timeline};

const WIDTH: u32 = 760;
/// A lane, and what is above and below all of them.
const LANE: u32 = 34;
const AROUND: u32 = 82;
/// What the style replaces.
const HELD: RGBColor = RGBColor(0, 3, 0);
const FAULT: RGBColor = RGBColor(0, 4, 0);
const BAD: RGBColor = RGBColor(0, 5, 0);
/// The mark of a loss that was told, and of a write that was refused: it is seen on every bar.
const TOLD: RGBColor = RGBColor(0, 6, 0);
/// From the middle of a lane to the edge of a bar.
const HALF: f64 = 0.28;

type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;

/// The charts of all faults, and what their marks mean.
pub(super) fn section(timelines: &[Timeline]) -> Markup {
    html! {
        section #timelines aria-labelledby="timelines-title" {
            h2 #timelines-title { "Who held the lock when" }
            p { "Several processes fight for one lock. One of them keeps it, and then comes the fault, at 0 s. A bar is the time in which a "
                "process believed to hold the lock: from when it heard of its grant until it last asked and was told so." }
            ul.legend {
                li { span.key.held {} "believes to hold the lock" }
                li { span.key.fault {} "the fault: in the lane of the process that it meets, or in all if it meets a server" }
                li { span.key.told {} "was told that the lock is lost" }
                li { span.key.refused { "×" } "late write, refused by its fence" }
                li { span.key.clash {} "two believe at once" }
            }
            @for of_fault in timelines.chunk_by(|one, other| one.fault == other.fault) {
                h3 { (of_fault[0].fault.title()) }
                @for timeline in of_fault { (figure(timeline)) }
            }
        }
    }
}

fn figure(timeline: &Timeline) -> Markup {
    let says = timeline.sentences();
    let label = format!("{}: {}. {says} The same is in the table below.", timeline.store, timeline.fault.title());
    html! {
        figure {
            figcaption { (timeline.store) }
            p.small.bad[!timeline.overlaps.is_empty()] { (says) }
            @if let Some(svg) = svg(timeline) { div.wide tabindex="0" role="img" aria-label=(label) { (PreEscaped(svg)) } }
            details {
                summary { "The same as a table" }
                (table(timeline))
            }
        }
    }
}

fn table(timeline: &Timeline) -> Markup {
    let seconds = |at: f64| format!("{at:.3}");
    let late = |process: usize, fence: u64| {
        timeline.refused.iter().filter(|refusal| (refusal.process, refusal.fence) == (process, fence)).count()
    };
    html! {
        div.wide tabindex="0" role="region" aria-label={ "Who held the lock when, as a table" } { table {
            thead { tr { @for head in ["process", "from, in s", "until, in s", "told, in s", "fence", "late writes", "how it ended"] { th scope="col" { (head) } } } }
            @for belief in &timeline.beliefs {
                tr {
                    th scope="row" { (timeline.processes[belief.process]) }
                    td { (seconds(belief.from)) } td { (seconds(belief.until)) }
                    td { @if let Ending::Lost { told, .. } = belief.end { (seconds(told)) } }
                    td { (belief.fence) } td { (late(belief.process, belief.fence)) } td { (belief.end.text()) }
                }
            }
        } }
    }
}

fn svg(timeline: &Timeline) -> Option<String> {
    let mut out = String::new();
    // It is drawn into a string, which takes everything.
    draw(timeline, &mut out).ok()?;
    Some(out)
}

fn draw<'a>(timeline: &Timeline, out: &'a mut String) -> Drawn<'a> {
    let lanes = timeline.processes.len();
    let size = (WIDTH, LANE * u32::try_from(lanes).unwrap_or(0) + AROUND);
    let area = SVGBackend::with_string(out, size).into_drawing_area();
    let font = ("sans-serif", 14).into_font().color(&TEXT);
    // The first lane is the topmost.
    let mut chart = ChartBuilder::on(&area)
        .margin(10)
        .x_label_area_size(44)
        .y_label_area_size(80)
        .build_cartesian_2d(left(timeline)..timeline.span.1, lanes as f64 - 0.5..-0.5)?;
    chart
        .configure_mesh()
        .disable_y_mesh()
        .disable_y_axis()
        .x_desc("since the fault, in s")
        .x_labels(10)
        .x_label_formatter(&|x| format!("{x:.1}").trim_end_matches(".0").to_owned())
        .label_style(font.clone())
        .axis_desc_style(font.clone())
        .axis_style(TEXT)
        .bold_line_style(GRID)
        .light_line_style(GRID.mix(0.0))
        .draw()?;
    draw_fault(&mut chart, timeline)?;
    draw_beliefs(&mut chart, timeline)?;
    draw_refusals(&mut chart, timeline)?;
    // The names stand left of the axis.
    let beside = font.pos(Pos::new(HPos::Right, VPos::Center));
    for (lane, name) in timeline.processes.iter().enumerate() {
        let (x, y) = chart.backend_coord(&(left(timeline), lane as f64));
        area.draw(&Text::new(name.clone(), (x - 8, y), beside.clone()))?;
    }
    area.present()
}

/// The lane of the process that meets with the fault, or those of all if a server does, for as long as it lasts.
fn draw_fault<'b>(chart: &mut Chart<'_, 'b>, timeline: &Timeline) -> Drawn<'b> {
    let last = timeline.processes.len() as f64 - 0.5;
    let until = timeline.over.unwrap_or(timeline.span.1).max(shortest(timeline));
    let (top, bottom) = timeline.victim.map_or((-0.5, last), |victim| (victim as f64 - 0.5, victim as f64 + 0.5));
    chart.draw_series([Rectangle::new([(0.0, top), (until, bottom)], FAULT.filled())])?;
    chart.draw_series([PathElement::new([(0.0, -0.5), (0.0, last)], FAULT.stroke_width(2))])?;
    Ok(())
}

fn draw_beliefs<'b>(chart: &mut Chart<'_, 'b>, timeline: &Timeline) -> Drawn<'b> {
    let bar = |process: usize, from: f64, until: f64, colour: RGBColor| {
        let (lane, from) = (process as f64, from.max(left(timeline)));
        let until = until.max(from + shortest(timeline));
        Rectangle::new([(from, lane - HALF), (until, lane + HALF)], colour.filled())
    };
    chart.draw_series(
        timeline
            .beliefs
            .iter()
            .filter(|one| one.until > left(timeline))
            .map(|one| bar(one.process, one.from, one.until, HELD)),
    )?;
    let clashes = timeline.overlaps.iter().flat_map(|one| one.processes.map(|process| (process, one)));
    chart.draw_series(clashes.map(|(process, one)| bar(process, one.from, one.until, BAD)))?;
    let told = timeline.beliefs.iter().filter_map(|one| match one.end {
        Ending::Lost { told, .. } => Some((told, one.process as f64)),
        _ => None,
    });
    chart.draw_series(
        told.map(|(at, lane)| PathElement::new([(at, lane - 0.45), (at, lane + 0.45)], TOLD.stroke_width(3))),
    )?;
    Ok(())
}

fn draw_refusals<'b>(chart: &mut Chart<'_, 'b>, timeline: &Timeline) -> Drawn<'b> {
    let crosses = timeline.refused.iter().map(|refusal| (refusal.at, refusal.process as f64));
    chart.draw_series(crosses.map(|at| Cross::new(at, 6, TOLD.stroke_width(2))))?;
    Ok(())
}

/// What is shorter is drawn as long as this, to be seen.
fn shortest(timeline: &Timeline) -> f64 {
    (timeline.span.1 - left(timeline)) / 300.0
}

/// Where the chart begins: the processes come one after the other, and for how long they fight before the fault is of no interest.
fn left(timeline: &Timeline) -> f64 {
    timeline.span.0.max(-2.0)
}
