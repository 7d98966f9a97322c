//! One run: a store, some faults, and the verdict on what happened.

use std::{fs, path::PathBuf, time::Duration};

use lockkit::{Fencing, Locker};
use lockkit_testkit::{
    BoxError,
    faults::ServerClock,
    history::{History, Recorder, Report, Rule, What, check, timeline},
};
use tokio::time::{sleep, timeout};

use crate::{
    arena::Arena,
    fault::{Fault, a_lease_may_linger, fences_hold},
    target::{Kind, Setup},
};

/// What a lock may take to be had again, beyond the ttl: connections are made anew, sessions expire on a grid, and the
/// machine is busy.
const SLACK: Duration = Duration::from_secs(4);

/// What a run may take, from a nemesis that is stuck itself.
const LONGEST: Duration = Duration::from_secs(300);

/// What came out of a run.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) kind: Kind,
    pub(crate) faults: Vec<Fault>,
    pub(crate) report: Report,
    pub(crate) fencing: Fencing,
    /// Why one of two faults did not run its course, for the other spoilt what it needs.
    pub(crate) cut_short: Option<String>,
}

impl Row {
    /// What broke the fenced resource.
    pub(crate) fn corrupted(&self) -> usize {
        self.report.count(Rule::Resource)
    }
}

/// Runs faults at once against a store, and judges what happened.
pub(crate) async fn run(kind: Kind, faults: &[Fault], clock: Option<ServerClock>, seed: u64) -> Result<Row, BoxError> {
    let clock = clock.filter(|_| faults.iter().any(|fault| fault.needs_clock()));
    let forgetful = faults.iter().any(|fault| fault.needs_forgetful());
    let arena = Arena::open(kind, Setup { clock, forgetful, sabotage: None }, seed).await?;
    let (row, history) =
        timeout(LONGEST, observe(arena, faults)).await.map_err(|_| "the run did not come to an end")??;
    judge(&row).map_err(|verdict| with_evidence(&row, &history, &verdict, seed))?;
    Ok(row)
}

/// Inflicts faults, heals, and collects what all who took part have recorded.
pub(crate) async fn observe(arena: Arena, faults: &[Fault]) -> Result<(Row, History), BoxError> {
    let mut cut_short = None;
    match faults {
        [one] => arena.inflict(*one).await?,
        [one, two] => {
            // Each may spoil what the other needs, such as a running server. What counts is what comes of it.
            let (one, two) = tokio::join!(arena.inflict(*one), arena.inflict(*two));
            cut_short = one.err().or(two.err()).map(|error| error.to_string());
        }
        _ => return Err("one fault, or two".into()),
    }
    arena.heal().await?;
    arena.progress(8).await?;
    let mut files = arena.crew.dismiss().await?;
    let fencing = probe(&arena).await?;
    files.extend(["nemesis", "probe"].map(|name| arena.history_file(name)));
    let mut events = History::read(&files)?.events().to_vec();
    events.extend(arena.register.record());
    let history = History::new(events);
    Ok((Row { kind: arena.kind, faults: faults.to_vec(), report: check(&history), fencing, cut_short }, history))
}

/// All is well again, and nobody uses the locks: each must be had within its ttl, and some slack.
async fn probe(arena: &Arena) -> Result<Fencing, BoxError> {
    let recorder = Recorder::create("probe", &arena.history_file("probe"))?;
    let within = arena.kind.ttl() + SLACK;
    let mut fencing = Fencing::None;
    for key in arena.keys() {
        let key = key.to_owned();
        let op =
            recorder.ask(What::Acquire { key: key.clone(), within: Some(within.as_nanos() as u64), owner: None })?;
        let had = timeout(within + SLACK, async {
            loop {
                match acquire(arena, &key).await {
                    Ok(had) => break had,
                    Err(_) => sleep(Duration::from_millis(20)).await,
                }
            }
        });
        match had.await {
            Ok((fence, claim)) => {
                fencing = claim;
                recorder.hear(op, What::Granted { fence })?;
            }
            Err(_) => recorder.hear(op, What::Failed { error: "nothing but errors".into() })?,
        }
    }
    Ok(fencing)
}

async fn acquire(arena: &Arena, key: &str) -> Result<(u64, Fencing), BoxError> {
    let locker = Locker::shared_builder(lockkit::open(&arena.direct_url()).await?).build();
    let guard = locker.lock(key).ttl(arena.kind.ttl()).acquire().await?;
    let fence = guard.fence().get();
    _ = guard.release().await?;
    Ok((fence, locker.info().capability.fencing))
}

/// What the store claims must hold, and what must show itself has.
pub(crate) fn judge(row: &Row) -> Result<(), Verdict> {
    let excludes = !row.faults.iter().any(|fault| fault.may_overlap());
    let orders = fences_hold(row.fencing, &row.faults);
    let claimed = |rule: Rule| match rule {
        Rule::Overlap => excludes,
        Rule::FenceOrder | Rule::Resource => orders,
        // It follows from the two together.
        Rule::Superseded => excludes && orders,
        Rule::Liveness => !a_lease_may_linger(&row.faults),
        Rule::Answer | Rule::Record => true,
    };
    if let Some(place) = row.report.violations.iter().position(|violation| claimed(violation.rule)) {
        return Err(Verdict::Violation(place));
    }
    let is_shown = row.report.lost_on_twins > 0;
    match row.faults[..] {
        [fault] if fault.shows_on_twin() && !is_shown => {
            Err(Verdict::Broken("the unfenced twin lost no update: the nemesis is broken"))
        }
        // Who is past its check when its lease ends learns of that, though too late.
        _ if claimed(Rule::Overlap) && is_shown && row.report.lost == 0 => {
            Err(Verdict::Broken("the unfenced twin lost an update, and no guard said that its lock was lost"))
        }
        _ => Ok(()),
    }
}

#[derive(Debug)]
pub(crate) enum Verdict {
    /// A rule was broken that the store claims to keep; its place in the report.
    Violation(usize),
    Broken(&'static str),
}

/// The error, with the history and a picture for whoever has to find out.
fn with_evidence(row: &Row, history: &History, verdict: &Verdict, seed: u64) -> BoxError {
    let names: Vec<_> = row.faults.iter().map(|fault| fault.name()).collect();
    let stem = format!("{}-{}-{seed}", row.kind.name(), names.join("+"));
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("faults");
    let (lines, picture) = (dir.join(format!("{stem}.jsonl")), dir.join(format!("{stem}.svg")));
    let mut text = match verdict {
        Verdict::Broken(why) => (*why).to_owned(),
        Verdict::Violation(place) => {
            let violation = &row.report.violations[*place];
            let drawn = fs::create_dir_all(&dir).and_then(|()| fs::write(&picture, timeline(history, violation)));
            let shown = drawn.map_or_else(|error| error.to_string(), |()| picture.display().to_string());
            format!("{violation}\n  ({} violations in all; picture: {shown})", row.report.violations.len())
        }
    };
    let kept = fs::create_dir_all(&dir).and_then(|()| fs::write(&lines, history.to_lines()));
    text += &kept.map_or_else(|error| format!("\n{error}"), |()| format!("\n  history: {}", lines.display()));
    (text + &format!("\n  again: the same command with --seed {seed}")).into()
}
