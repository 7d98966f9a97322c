//! The comparison as one page for a browser, which needs nothing else. No I/O.

mod chart;
mod lanes;
mod verdict;

use maud::{DOCTYPE, Markup, PreEscaped, html};
use serde_json::json;

use super::{Report, Setting, Verdict, method, rows::Cell};
use crate::{group::Group, stats::grouped};

const STYLE: &str = include_str!("style.css");
const QUESTIONS: &str = include_str!("questions.js");
/// Lines, in colours that people with any colour vision tell apart (Okabe and Ito, <https://jfly.uni-koeln.de/color/>), as the style knows them.
const COLOURS: usize = 16;

impl Report {
    /// The page for people: tables, charts, and a few questions that sort the stores. It loads nothing from anywhere, and its
    /// tables and charts need no script.
    #[must_use]
    pub fn as_html(&self) -> String {
        let page = html! {
            (DOCTYPE)
            html lang="en" {
                head {
                    meta charset="utf-8";
                    meta name="viewport" content="width=device-width, initial-scale=1";
                    meta name="color-scheme" content="light dark";
                    title { "Comparison of lock stores" }
                    style { (PreEscaped(STYLE)) }
                }
                body {
                    header {
                        h1 { "Comparison of lock stores" }
                        p.setting { (self.setting.line()) }
                        @if let Some(scope) = self.setting.scope() { p.setting { (scope) } }
                        @if let Some(interrupted) = &self.setting.interrupted { p.verdict.bad role="status" { (interrupted.sentence()) } }
                        p.verdict.bad[self.verdict != Verdict::Sound] role="status" { (self.verdict_line()) }
                        nav aria-label="Sections" {
                            a href="#guarantees" { "Guarantees" } " · " a href="#questions" { "Which one for us?" } " · "
                            @if self.has_charts() { a href="#charts" { "Charts" } " · " }
                            @if !self.timelines.is_empty() { a href="#timelines" { "Who held the lock when" } " · " }
                            a href="#figures" { "All figures" } " · "
                            @if self.setting.has(&[Group::Compliance]) { a href="#cases" { "Compliance cases" } " · " }
                            a href="#method" { "How it was measured" }
                        }
                    }
                    main {
                        (self.what_changed())
                        (verdict::guarantees(self))
                        (self.questions())
                        @if self.has_charts() { (self.charts()) }
                        @if !self.timelines.is_empty() { (lanes::section(&self.timelines)) }
                        (self.figures())
                        @if self.setting.has(&[Group::Compliance]) { (verdict::cases(self)) }
                        (method(&self.setting))
                    }
                    script type="application/json" id="facts" { (PreEscaped(self.facts_for_script())) }
                    script { (PreEscaped(QUESTIONS)) }
                }
            }
        };
        page.into_string()
    }

    fn verdict_line(&self) -> String {
        match &self.verdict {
            Verdict::Sound if self.facts.iter().all(|facts| facts.overlaps.is_none()) => {
                "Whether a lock lets two in at once was not measured.".to_owned()
            }
            // What a store says of itself is no fault, but not to be denied either.
            Verdict::Sound if self.timelines.iter().any(|timeline| !timeline.overlaps.is_empty()) => {
                "No lock let two in at once in this comparison, but where a server came back without its locks."
                    .to_owned()
            }
            Verdict::Sound => "No lock let two in at once in this comparison.".to_owned(),
            verdict => format!("{verdict}."),
        }
    }

    fn what_changed(&self) -> Markup {
        let Some(changes) = &self.changes else { return html! {} };
        html! {
            section #changes aria-labelledby="changes-title" {
                h2 #changes-title { "Since the comparison of " (changes.since) }
                ul {
                    @for change in &changes.figures { li.bad[change.worse] { a href=(format!("#{}", change.id)) { (change.line()) } } }
                    li { (changes.within_noise) " figures did not change by more than the noise of their rounds" }
                    @for note in &changes.notes { li { (note) } }
                }
            }
        }
    }

    fn questions(&self) -> Markup {
        let choice = |name: &str, value: &str, text: &str, chosen: bool| {
            html! { label { input type="radio" name=(name) value=(value) checked[chosen]; " " (text) } }
        };
        let tick = |name: &str, value: &str, text: &str| {
            html! { label { input type="checkbox" name=(name) value=(value); " " (text) } }
        };
        let schemes = [
            ("redis", "Redis or Valkey"),
            ("redlock", "several independent Redis servers"),
            ("mysql", "MySQL or MariaDB"),
            ("zk", "ZooKeeper"),
        ];
        html! {
            section #questions aria-labelledby="questions-title" {
                h2 #questions-title { "Which one for us?" }
                p { "Your answers sort the stores of this comparison by what was measured here and by what each store guarantees. "
                    "They are kept in the address of the page, so that you can pass it on." }
                noscript { p { "The questions need JavaScript; everything else on this page does not." } }
                form #answers {
                    fieldset { legend { "Which processes share a lock?" }
                        (choice("where", "any", "those of several machines, or several on one", true))
                        (choice("where", "one", "only the tasks of one process", false)) }
                    fieldset { legend { "Does the resource that the lock protects refuse a smaller fence than it has seen?" }
                        (choice("fences", "no", "no, or we do not know", true))
                        (choice("fences", "yes", "yes", false)) }
                    fieldset { legend { "Must a lock hold when a server loses data that it had confirmed (a failover to a replica that lags, a lost disk)?" }
                        (choice("loss", "no", "no, that may be repaired afterwards", true))
                        (choice("loss", "yes", "yes", false)) }
                    // There is nothing to answer it with where nothing was measured.
                    @if self.setting.has(&[Group::Alone]) { fieldset { legend { "How long may acquire and release take together, in the median?" }
                        (choice("time", "", "as long as they need", true))
                        (choice("time", "10000", "10 ms", false))
                        (choice("time", "2000", "2 ms", false))
                        (choice("time", "500", "0.5 ms", false)) } }
                    fieldset { legend { "What do you need beside exclusive locks?" }
                        (tick("kind", "fifo", "strict order of arrival"))
                        (tick("kind", "shared", "readers and writers"))
                        (tick("kind", "downgrades", "writers that become readers without a gap"))
                        (tick("kind", "permits", "semaphores"))
                        (tick("kind", "resume", "a lease that outlives its process"))
                        (tick("kind", "keeps", "a job once per window")) }
                    fieldset { legend { "What do you run already?" }
                        @for (scheme, name) in schemes { (tick("run", scheme, name)) } }
                }
                p #note aria-live="polite" {}
                ol #answer aria-label="Stores, best first" {}
            }
        }
    }

    fn facts_for_script(&self) -> String {
        let facts = self.own().map(|(name, facts)| {
            json!({
                "name": name, "scheme": facts.traits.scheme, "inProcess": facts.traits.in_process, "fencing": facts.traits.fencing,
                "afterLoss": facts.after_loss().text(), "keepsAfterLoss": facts.keeps_after_loss(),
                "fifo": facts.traits.fifo, "shared": facts.traits.shared, "permits": facts.traits.permits, "resume": facts.traits.resume,
                "keeps": facts.traits.keeps, "downgrades": facts.traits.downgrades,
                "pair": facts.pair_micros, "overlaps": facts.overlaps,
                "failedCases": facts.cases.values().map(|cases| cases.failed).sum::<usize>(),
            })
        });
        // A name must not end the element that it is in.
        json!(facts.collect::<Vec<_>>()).to_string().replace('<', "\\u003c")
    }

    fn has_charts(&self) -> bool {
        self.curves.iter().any(|curve| curve.lines.iter().any(|line| !line.is_empty()))
    }

    fn charts(&self) -> Markup {
        html! {
            section #charts aria-labelledby="charts-title" {
                h2 #charts-title { "Charts" }
                ul.legend {
                    @for (number, store) in self.stores.iter().enumerate() {
                        li { span class=(format!("swatch s{}", number % COLOURS)) {} (store) }
                    }
                }
                @for curve in &self.curves { (chart::figure(curve, &self.stores)) }
            }
        }
    }

    fn figures(&self) -> Markup {
        html! {
            section #figures aria-labelledby="figures-title" {
                h2 #figures-title { "All figures" }
                p { "The small numbers are the least and the most that one round of the measure showed." }
                div.wide tabindex="0" role="region" aria-labelledby="figures-title" {
                    table {
                        thead { tr { th scope="col" { "Measure" } th scope="col" { "Unit" } @for store in &self.stores { th scope="col" { (store) } } } }
                        @for group in self.rows.chunk_by(|row, next| row.group == next.group) {
                            tr { th.group colspan=(self.stores.len() + 2) scope="colgroup" { (group[0].group) } }
                            @for row in group {
                                tr id=(row.id) {
                                    th scope="row" { (row.title.trim()) }
                                    td.unit { (row.unit) }
                                    @for cell in &row.cells { td { (figure(cell)) } }
                                }
                            }
                        }
                    }
                }
                @for note in self.notes() { p.small { (note) } }
                @for how in &self.missing { p.small { "Not compared: " (how) } }
            }
        }
    }
}

fn figure(cell: &Cell) -> Markup {
    let range = match cell {
        Cell::Number(figure) => figure.range,
        _ => None,
    };
    html! {
        (cell.text())
        @if let Some((least, most)) = range { br; small { (grouped(least)) " – " (grouped(most)) } }
    }
}

fn method(setting: &Setting) -> Markup {
    html! {
        section #method aria-labelledby="method-title" {
            h2 #method-title { "How it was measured" }
            p { (code(method::ALL)) }
            dl { @for (name, how) in method::of(setting) { dt { (name) } dd { (code(how)) } } }
        }
    }
}

/// Text in which what stands between backticks is code.
fn code(text: &str) -> Markup {
    html! {
        @for (number, part) in text.split('`').enumerate() {
            @if number % 2 == 1 { code { (part) } } @else { (part) }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{
        plan::{Options, Plan},
        results::{Counts, Results},
        stats::Latencies,
    };

    fn report(name: &str) -> Report {
        let mut store = Results::default();
        let mut round = Latencies::new();
        (1..=1000).for_each(|micros| round.record(Duration::from_micros(micros)));
        store.acquire.add(round.clone());
        store.pair.add(round.clone());
        store.pair.add(round);
        store.by_keys.extend([(1, vec![10.0]), (64, vec![500.0])]);
        store.compliance = Some(Counts { passed: 3, groups: [("fencing", [3, 0, 1])].into(), ..Counts::default() });
        let plan = Plan::new(Options::default());
        Report::new(vec![(name.into(), store), ("other".into(), Results::default())], &plan, Vec::new(), Duration::ZERO)
    }

    #[test]
    fn the_page_is_whole_and_loads_nothing() {
        let page = report("redis 7").as_html();
        for id in ["guarantees", "questions", "charts", "figures", "cases", "method", "pair_p50", "facts"] {
            assert_eq!(page.matches(&format!("id=\"{id}\"")).count(), 1, "{id}");
        }
        assert_eq!(page.matches("<svg").count(), 2, "a chart for each curve that has a line");
        for loads in ["src=", "http:", "@import", "url(", "<link"] {
            let elsewhere = page.replace("http://www.w3.org/2000/svg", "");
            assert!(!elsewhere.contains(loads), "{loads}");
        }
        // Each link within the page has its goal.
        for link in page.split("href=\"#").skip(1) {
            let goal = link.split('"').next().unwrap_or_default();
            assert!(page.contains(&format!("id=\"{goal}\"")), "{goal}");
        }
    }

    #[test]
    fn a_name_is_text_and_never_markup() {
        let page = report("</script><b>&").as_html();
        assert!(!page.contains("<b>") && page.contains("&lt;b&gt;&amp;"), "{page}");
        assert_eq!(page.matches("</script>").count(), 2);
    }
}
