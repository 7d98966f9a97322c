//! One run: a store, some faults, and the verdict on what happened.

use std::{fs, io, path::PathBuf, sync::Arc, time::Duration};

use lockkit::{Fencing, Locker, Mode};
use lockkit_testkit::{
    BoxError,
    faults::ServerClock,
    history::{History, Recorder, Report, Rule, What, check, timeline},
};
use tokio::{
    sync::Semaphore,
    task::JoinSet,
    time::{sleep, timeout},
};

use crate::{
    arena::Arena,
    fault::{Fault, a_lease_may_linger, fences_hold},
    target::{Kind, Setup},
};

/// What a lock may take to be had again, beyond the ttl: connections are made anew, sessions expire on a grid, and the
/// machine is busy.
const SLACK: Duration = Duration::from_secs(4);

/// So many locks at once are many for one process.
const MANY: u64 = 8;

/// In so many runs each worker must have done everything.
const ENOUGH: usize = 8;

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
    /// How many guards said, while a fault went on, that their lock is lost.
    pub(crate) lost_meanwhile: u64,
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
    let cut_short = match go_through(&arena, faults).await {
        Ok(cut_short) => cut_short,
        Err(error) => {
            // Whoever has to find out why wants to see what there is.
            _ = arena.heal().await;
            let files = arena.workers.stop().await.unwrap_or_default();
            let kept = History::read(files.iter().chain([&arena.history_file("nemesis")]))
                .and_then(|history| keep(&stem(arena.kind, faults, arena.seed()), &history));
            let kept = kept.map_or_else(|error| error.to_string(), |path| path.display().to_string());
            return Err(
                format!("{error}\n  history: {kept}\n  again: the same command with --seed {}", arena.seed()).into()
            );
        }
    };
    let mut files = arena.workers.stop().await?;
    let fencing = probe(&arena).await?;
    files.extend(["nemesis", "probe"].map(|name| arena.history_file(name)));
    let mut events = History::read(&files)?.events().to_vec();
    events.extend(arena.register.record());
    let history = History::new(events);
    let lost_meanwhile = lost_meanwhile(&history);
    let (kind, faults, report) = (arena.kind, faults.to_vec(), check(&history));
    Ok((Row { kind, faults, report, fencing, cut_short, lost_meanwhile }, history))
}

/// Returns why one of two faults was cut short, if it was.
async fn go_through(arena: &Arena, faults: &[Fault]) -> Result<Option<String>, BoxError> {
    let mut cut_short = None;
    if let Some(sabotage) = arena.setup.sabotage {
        sabotage.happens(arena).await?;
    }
    match faults {
        [one] => arena.inflict(*one).await?,
        [one, two] => {
            // Each may spoil what the other needs, such as a running server. What fails for any other reason, fails the run.
            let done = tokio::join!(arena.inflict(*one), arena.inflict(*two));
            for (trouble, mine, other) in [(done.0.err(), *one, *two), (done.1.err(), *two, *one)] {
                let Some(trouble) = trouble else { continue };
                if !trouble.is_due_to(mine, other) {
                    return Err(format!("{}: {trouble}, which {} does not explain", mine.name(), other.name()).into());
                }
                cut_short.get_or_insert(format!("{}: {trouble}", mine.name()));
            }
        }
        _ => return Err("one fault, or two".into()),
    }
    arena.heal().await?;
    arena.progress(8).await?;
    Ok(cut_short)
}

/// How many guards said, while a fault went on, that their lock is lost.
fn lost_meanwhile(history: &History) -> u64 {
    let (mut faults, mut lost) = (0_u32, 0);
    for event in history.events() {
        match event.what {
            What::Fault { .. } => faults += 1,
            What::Healed => faults = faults.saturating_sub(1),
            What::Lost { .. } if faults > 0 => lost += 1,
            _ => {}
        }
    }
    lost
}

/// All is well again, and nobody uses the locks: each must be had within its ttl, and some slack.
async fn probe(arena: &Arena) -> Result<Fencing, BoxError> {
    let recorder = Recorder::create("probe", &arena.history_file("probe"))?;
    let (within, ttl) = (arena.kind.ttl() + SLACK, arena.kind.ttl());
    // Side by side, but not so many at once that they wait for each other.
    let (turns, mut asking) = (Arc::new(Semaphore::new(16)), JoinSet::new());
    let locker = Locker::shared_builder(lockkit::open(&arena.direct_url()).await?).build();
    for (number, key) in arena.keys().into_iter().enumerate() {
        // One of its own for each, lest it look like somebody who holds many.
        let recorder = recorder.another(format!("probe-{number}"));
        let (turns, lock) = (Arc::clone(&turns), locker.lock(&key).ttl(ttl));
        asking.spawn(async move {
            let _turn = turns.acquire().await?;
            let op = recorder.ask(What::Acquire {
                key,
                within: Some(within.as_nanos() as u64),
                owner: None,
                mode: Mode::Exclusive,
            })?;
            let had = timeout(within + SLACK, async {
                loop {
                    match lock.acquire().await {
                        Ok(guard) => break guard,
                        Err(_) => sleep(Duration::from_millis(20)).await,
                    }
                }
            });
            let Ok(guard) = had.await else {
                recorder.hear(op, What::Failed { error: "nothing but errors".into() })?;
                return Ok(());
            };
            recorder.hear(op, What::Granted { fence: guard.fence().get() })?;
            let end = recorder.ask(What::Release { grant: op })?;
            drop(guard);
            recorder.hear(end, What::Dropped)?;
            Ok::<_, BoxError>(())
        });
    }
    while let Some(asked) = asking.join_next().await {
        asked??;
    }
    _ = locker.shutdown(SLACK).await;
    Ok(locker.info().capability.fencing)
}

/// What the store claims must hold, and what must show itself has.
pub(crate) fn judge(row: &Row) -> Result<(), Verdict> {
    let excludes = !row.faults.iter().any(|fault| fault.may_overlap());
    let orders = fences_hold(row.fencing, &row.faults);
    let claimed = |rule: Rule| match rule {
        Rule::Overlap | Rule::Rival => excludes,
        Rule::FenceOrder | Rule::Resource => orders,
        // It follows from the two together.
        Rule::Superseded => excludes && orders,
        Rule::Liveness | Rule::Reach => !a_lease_may_linger(&row.faults),
        Rule::Answer | Rule::Order | Rule::Record => true,
    };
    if let Some(place) = row.report.violations.iter().position(|violation| claimed(violation.rule)) {
        return Err(Verdict::Violation(place));
    }
    let (report, is_shown) = (&row.report, row.report.lost_on_twins > 0);
    if row.fencing != Fencing::None && report.unfenced > 0 {
        return Err(Verdict::Broken("a lock was granted without a fence"));
    }
    if let [fault] = row.faults[..]
        && let Some(missing) = must_show(fault, row)
    {
        return Err(Verdict::Broken(missing));
    }
    // Who is past its check when its lease ends learns of that, though too late.
    if claimed(Rule::Overlap) && is_shown && report.lost == 0 {
        return Err(Verdict::Broken("the unfenced twin lost an update, and no guard said that its lock was lost"));
    }
    Ok(())
}

/// What a fault must have done, and has not. What the servers themselves can tell, the nemesis has asked them.
fn must_show(fault: Fault, row: &Row) -> Option<&'static str> {
    let report = &row.report;
    if fault.shows_on_twin() && report.lost_on_twins == 0 {
        return Some("the unfenced twin lost no update: the nemesis is broken");
    }
    if fault.costs_a_lease() && row.lost_meanwhile == 0 {
        return Some("no guard said that its lock was lost: the nemesis is broken");
    }
    None
}

/// Whether the workers have done all that they can do, in the runs of one store. In a single run on a busy machine it may
/// not come to that.
pub(crate) fn work_was_done(rows: &[Row]) -> Result<(), String> {
    for kind in Kind::ALL {
        let reports: Vec<_> = rows.iter().filter(|row| row.kind == kind).map(|row| &row.report).collect();
        let sum = |count: fn(&Report) -> u64| reports.iter().map(|report| count(report)).sum::<u64>();
        let done = [
            ("nested", sum(|report| report.nested), 1),
            ("cancelled", sum(|report| report.cancelled), 1),
            ("dropped", sum(|report| report.dropped), 1),
            ("shared", sum(|report| report.shared), if kind.has_every_mode() { MANY } else { 0 }),
            ("handed over", sum(|report| report.handed_over), 1),
            ("held at once", reports.iter().map(|report| report.most_held as u64).max().unwrap_or(0), MANY),
        ];
        if let Some((what, count, least)) = done.iter().find(|(_, count, least)| count < least)
            && reports.len() >= ENOUGH
        {
            return Err(format!(
                "the workers are broken: in {} runs of {} {count} locks were {what}, and {least} must be",
                reports.len(),
                kind.name()
            ));
        }
    }
    Ok(())
}

#[derive(Debug)]
pub(crate) enum Verdict {
    /// A rule was broken that the store claims to keep; its place in the report.
    Violation(usize),
    Broken(&'static str),
}

/// The error, with the history and a picture for whoever has to find out.
fn with_evidence(row: &Row, history: &History, verdict: &Verdict, seed: u64) -> BoxError {
    let stem = stem(row.kind, &row.faults, seed);
    let mut text = match verdict {
        Verdict::Broken(why) => (*why).to_owned(),
        Verdict::Violation(place) => {
            let violation = &row.report.violations[*place];
            let picture = dir().join(format!("{stem}.svg"));
            let drawn = fs::create_dir_all(dir()).and_then(|()| fs::write(&picture, timeline(history, violation)));
            let shown = drawn.map_or_else(|error| error.to_string(), |()| picture.display().to_string());
            format!("{violation}\n  ({} violations in all; picture: {shown})", row.report.violations.len())
        }
    };
    text += &keep(&stem, history)
        .map_or_else(|error| format!("\n{error}"), |path| format!("\n  history: {}", path.display()));
    (text + &format!("\n  again: the same command with --seed {seed}")).into()
}

fn dir() -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("faults")
}

fn stem(kind: Kind, faults: &[Fault], seed: u64) -> String {
    let names: Vec<_> = faults.iter().map(|fault| fault.name()).collect();
    format!("{}-{}-{seed}", kind.name(), names.join("+"))
}

fn keep(stem: &str, history: &History) -> io::Result<PathBuf> {
    let path = dir().join(format!("{stem}.jsonl"));
    fs::create_dir_all(dir())?;
    fs::write(&path, history.to_lines())?;
    Ok(path)
}
