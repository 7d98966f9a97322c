//! A picture of a violation: who believed in what, when, and which faults were under way.

use std::{collections::BTreeMap, fmt::Write};

use super::{History, Violation, What};

const WIDTH: f64 = 960.0;
/// Where the time begins, behind the names.
const LEFT: f64 = 110.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 64.0;
const LANE: f64 = 34.0;
/// For the times and the legend.
const BELOW: f64 = 52.0;
const LEGEND: &str =
    "bar: believes \u{b7} tick: told that it holds \u{b7} green dot: admitted by the resource \u{b7} red dot: refused";
const STYLE: &str = "text{font:12px system-ui,sans-serif;fill:#1b1f24}.small{font-size:10px;fill:#57606a}\
                     .title{font-size:14px;font-weight:600}.hold{fill:#8ac4e8;stroke:#0969a2}\
                     .bad{fill:#f4a6a0;stroke:#b3261e}.fault{fill:#fff1c9;stroke:#c9a227;stroke-dasharray:3}\
                     .yes{stroke:#0b4f71}.write{fill:#1a7f37}.refused{fill:#b3261e}.lane{stroke:#d0d7de}\
                     .clash{fill:#b3261e;opacity:.18}";

/// Draws the time around a violation as an SVG picture that needs nothing else.
///
/// A lane for each process that had anything to do with the lock: bars are beliefs (red for those of the violation) with
/// their fences, ticks the moments at which the holder was told that it still held, dots what it wrote (green if the
/// resource took it, red if it was refused). Faults lie behind them in yellow.
#[must_use]
pub fn timeline(history: &History, violation: &Violation) -> String {
    let picture = Picture::of(history, violation);
    let height = TOP + LANE * picture.lanes.len() as f64 + BELOW;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\">\
         <style>{STYLE}</style><rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n"
    );
    // Writing to a string does not fail.
    _ = picture.draw(&mut svg, violation, height);
    svg + "</svg>\n"
}

struct Picture {
    from: u64,
    to: u64,
    lanes: BTreeMap<String, Lane>,
    faults: Vec<(u64, u64, String)>,
}

#[derive(Default)]
struct Lane {
    holds: Vec<Bar>,
    told: Vec<u64>,
    writes: Vec<(u64, bool)>,
}

struct Bar {
    op: u64,
    fence: u64,
    from: u64,
    to: u64,
}

impl Picture {
    fn of(history: &History, violation: &Violation) -> Self {
        let first = violation.parties.iter().map(|party| party.from).min().unwrap_or(violation.at);
        let last = violation.parties.iter().map(|party| party.to).max().unwrap_or(violation.at).max(violation.until);
        // A quarter more on both sides, and never so little that nothing can be seen.
        let margin = ((last - first) / 4).max(5_000_000);
        let mut picture =
            Self { from: first.saturating_sub(margin), to: last + margin, lanes: BTreeMap::new(), faults: Vec::new() };
        picture.collect(history, violation);
        picture
    }

    fn collect(&mut self, history: &History, violation: &Violation) {
        let mut keys: BTreeMap<(&str, u64), &str> = BTreeMap::new();
        let mut asks: BTreeMap<(&str, u64), (u64, u64)> = BTreeMap::new();
        let mut faults: BTreeMap<(&str, u64), (u64, &str)> = BTreeMap::new();
        for event in history.events().iter().filter(|event| event.at <= self.to) {
            let id = (event.process.as_str(), event.op);
            match &event.what {
                What::Acquire { key, .. } => drop(keys.insert(id, key)),
                What::Granted { fence } if keys.get(&id) == Some(&violation.key.as_str()) => {
                    let bar = Bar { op: event.op, fence: *fence, from: event.at, to: event.at };
                    self.lanes.entry(event.process.clone()).or_default().holds.push(bar);
                }
                What::Ask { grant } | What::Renew { grant } => drop(asks.insert(id, (*grant, event.at))),
                What::Held => {
                    let lane = self.lanes.get_mut(&event.process);
                    if let (Some((grant, at)), Some(lane)) = (asks.remove(&id), lane)
                        && let Some(bar) = lane.holds.iter_mut().find(|bar| bar.op == grant)
                    {
                        bar.to = bar.to.max(at);
                        lane.told.push(at);
                    }
                }
                What::Updated { key, by, admitted, .. } | What::Claimed { key, by, admitted, .. }
                    if *key == violation.key =>
                {
                    self.lanes.entry(by.clone()).or_default().writes.push((event.at, *admitted));
                }
                What::Fault { note } => drop(faults.insert(id, (event.at, note))),
                What::Healed => {
                    if let Some((from, note)) = faults.remove(&id) {
                        self.faults.push((from, event.at, note.to_owned()));
                    }
                }
                _ => {}
            }
        }
        let open = faults.into_values().map(|(from, note)| (from, self.to, note.to_owned()));
        self.faults.extend(open);
        let (from, to) = (self.from, self.to);
        self.faults.retain(|(begin, end, _)| *begin <= to && *end >= from);
        for party in &violation.parties {
            self.lanes.entry(party.process.clone()).or_default();
        }
        for lane in self.lanes.values_mut() {
            lane.holds.retain(|bar| bar.from <= to && bar.to >= from);
            lane.told.retain(|at| *at >= from);
            lane.writes.retain(|(at, _)| *at >= from);
        }
        let takes_part = |name: &String| violation.parties.iter().any(|party| party.process == *name);
        self.lanes.retain(|name, lane| takes_part(name) || !lane.holds.is_empty() || !lane.writes.is_empty());
    }

    fn x(&self, at: u64) -> f64 {
        let share = at.clamp(self.from, self.to).saturating_sub(self.from) as f64 / (self.to - self.from) as f64;
        LEFT + share * (WIDTH - LEFT - RIGHT)
    }

    fn draw(&self, svg: &mut String, violation: &Violation, height: f64) -> std::fmt::Result {
        let bottom = height - BELOW + 8.0;
        let title = format!("{}: {}", violation.rule, violation.key);
        writeln!(svg, "<text class=\"title\" x=\"12\" y=\"20\">{}</text>", escape(&title))?;
        writeln!(svg, "<text x=\"12\" y=\"38\">{}</text>", escape(&violation.text))?;
        for (from, to, note) in &self.faults {
            let (x, width) = (self.x(*from), (self.x(*to) - self.x(*from)).max(1.0));
            let tall = bottom - TOP + 16.0;
            writeln!(
                svg,
                "<rect class=\"fault\" x=\"{x:.1}\" y=\"{:.1}\" width=\"{width:.1}\" height=\"{tall:.1}\"/>",
                TOP - 16.0
            )?;
            writeln!(svg, "<text class=\"small\" x=\"{:.1}\" y=\"{:.1}\">{}</text>", x + 3.0, TOP - 5.0, escape(note))?;
        }
        if violation.until > violation.at {
            let (x, width) = (self.x(violation.at), self.x(violation.until) - self.x(violation.at));
            writeln!(
                svg,
                "<rect class=\"clash\" x=\"{x:.1}\" y=\"{TOP}\" width=\"{width:.1}\" height=\"{:.1}\"/>",
                bottom - TOP
            )?;
        }
        for (number, (name, lane)) in self.lanes.iter().enumerate() {
            self.draw_lane(svg, violation, name, lane, TOP + LANE * number as f64)?;
        }
        writeln!(svg, "<text class=\"small\" x=\"{LEFT}\" y=\"{:.1}\">{LEGEND}</text>", height - 8.0)?;
        self.draw_axis(svg, violation, bottom)
    }

    fn draw_lane(&self, svg: &mut String, violation: &Violation, name: &str, lane: &Lane, y: f64) -> std::fmt::Result {
        let base = y + LANE;
        writeln!(svg, "<text x=\"12\" y=\"{:.1}\">{}</text>", y + 21.0, escape(name))?;
        writeln!(
            svg,
            "<line class=\"lane\" x1=\"{LEFT}\" x2=\"{}\" y1=\"{base:.1}\" y2=\"{base:.1}\"/>",
            WIDTH - RIGHT
        )?;
        for bar in &lane.holds {
            let blamed = violation.parties.iter().any(|party| party.process == name && party.grant == Some(bar.op));
            let (x, width) = (self.x(bar.from), (self.x(bar.to) - self.x(bar.from)).max(2.0));
            let class = if blamed { "bad" } else { "hold" };
            writeln!(
                svg,
                "<rect class=\"{class}\" x=\"{x:.1}\" y=\"{:.1}\" width=\"{width:.1}\" height=\"18\" rx=\"3\"><title>grant {} fence {}</title></rect>",
                y + 8.0,
                bar.op,
                bar.fence
            )?;
            if blamed || width > 130.0 {
                writeln!(
                    svg,
                    "<text class=\"small\" x=\"{:.1}\" y=\"{:.1}\">fence {}</text>",
                    x + 3.0,
                    y + 20.0,
                    bar.fence
                )?;
            }
        }
        for at in &lane.told {
            let x = self.x(*at);
            writeln!(
                svg,
                "<line class=\"yes\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{:.1}\" y2=\"{:.1}\"/>",
                y + 22.0,
                y + 28.0
            )?;
        }
        for (at, admitted) in &lane.writes {
            let class = if *admitted { "write" } else { "refused" };
            writeln!(svg, "<circle class=\"{class}\" cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\"/>", self.x(*at), y + 31.0)?;
        }
        Ok(())
    }

    fn draw_axis(&self, svg: &mut String, violation: &Violation, bottom: f64) -> std::fmt::Result {
        for step in 0..=4_u64 {
            let at = self.from + (self.to - self.from) / 4 * step;
            let anchor = if step == 4 { "end" } else { "start" };
            writeln!(
                svg,
                "<text class=\"small\" text-anchor=\"{anchor}\" x=\"{:.1}\" y=\"{:.1}\">{:.3} s</text>",
                self.x(at),
                bottom + 18.0,
                violation.seconds(at)
            )?;
        }
        Ok(())
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
