//! Files, explanations, pictures, and how long it takes.

use lockkit_testkit::history::{History, What, timeline};

use crate::script::Script;

#[test]
fn a_violation_is_explained_and_drawn() {
    let mut script = Script::new(3);
    script.traffic(6);
    let at = script.later();
    script.push(at, "nemesis", 1, What::Fault { note: "FLUSHALL <all>".into() });
    let fence = script.fence + 10;
    let old = script.acquire("w1", fence);
    script.claim("w1", fence, true);
    script.is_held("w1", old);
    let new = script.acquire("w2", fence + 1);
    script.claim("w2", fence + 1, true);
    script.is_held("w1", old);
    let base = script.version;
    script.write("w1", fence, false, base);
    script.hear("nemesis", 1, What::Healed);
    script.is_held("w2", new);
    script.release("w2", new);
    script.fence += 100;
    script.traffic(2);
    let (history, report) = script.check();
    let [violation] = &report.violations[..] else { panic!("{:?}", report.violations) };
    let text = violation.to_string();
    for part in ["two holders at once", "w1 ", "w2 ", "grant ", &format!("fence {fence}"), " s to "] {
        assert!(text.contains(part), "{text}");
    }
    let svg = timeline(&history, violation);
    for part in ["<svg ", "FLUSHALL &lt;all&gt;", "class=\"bad\"", "class=\"refused\"", "</svg>"] {
        assert!(svg.contains(part), "no {part} in {svg}");
    }
    // Whoever wants to look at it.
    if let Some(path) = std::env::var_os("LOCKKIT_TIMELINE") {
        std::fs::write(path, svg).expect("write");
    }
}

#[test]
fn a_history_survives_its_files() {
    let mut script = Script::new(11);
    script.traffic(20);
    let (history, _) = script.check();
    let dir = tempfile::tempdir().expect("directory");
    let path = dir.path().join("history.jsonl");
    // The last line of a process that was killed.
    std::fs::write(&path, history.to_lines() + "{\"at\":12,\"proc").expect("write");
    let read = History::read([&path]).expect("read");
    assert_eq!(read.events(), history.events());
    std::fs::write(&path, "nonsense\n").expect("write");
    assert!(History::read([&path]).expect_err("nonsense").to_string().contains("line 1"));
}

/// A million events take a moment, not a minute: the rules sort, and search nothing.
#[test]
fn a_long_history_is_judged_at_once() {
    let mut script = Script::new(1);
    script.traffic(40_000);
    let start = std::time::Instant::now();
    let (_, report) = script.check();
    assert_eq!((report.grants, report.violations.len()), (40_000, 0));
    assert!(start.elapsed() < std::time::Duration::from_secs(20), "{:?}", start.elapsed());
}
