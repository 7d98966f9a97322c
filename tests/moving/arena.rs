//! Two stores, the workers that use both as one, and what they recorded.

use std::{
    fs,
    path::Path,
    process::Stdio,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use lockkit::{
    Clock, SystemClock,
    migrate::{Migration, Phase, Start, Tally},
    store::unpoisoned,
};
use lockkit_testkit::{
    BoxError,
    history::{Event, History, Report, Rule, What, check_reach},
};
use tokio::{
    process::Command,
    time::{sleep, timeout},
};

use crate::{
    MIGRATOR, WORKER,
    clients::Bad,
    servers::{House, Kind, Store},
    storm::{Orders, Register, Workers},
};

pub(crate) const TTL: Duration = Duration::from_millis(1500);
pub(crate) const START: Start = Start {
    max_ttl: Duration::from_secs(2),
    fresh: Duration::from_millis(500),
    home_is_durable: false,
    fence_above: lockkit::Fence::NONE,
};

/// Has the trials tell for how long a lock was out of reach, and keep their histories in this directory.
const FIGURES: &str = "LOCKKIT_MOVING_FIGURES";

const KEYS: [&str; 2] = ["account/1", "account/2"];

/// How long the workers may take to go on. Not how long they do take.
const PATIENCE: Duration = Duration::from_secs(40);

/// How much longer than a lease may be in the way of others a lock may be out of reach. In the order of the terms: what a client read
/// of the phase; the longest pause between two questions; the old store, the new one and the old one again, each of which may take
/// a quarter of the ttl; and the longest time for which a worker leaves an acquisition alone that it has begun.
const SLACK: Duration = Duration::from_millis(500 + 500 + 3 * 1500 / 4 + 600);

/// Everything that takes part in one run.
#[derive(Debug)]
pub(crate) struct Arena {
    pub(crate) stores: [Store; 2],
    pub(crate) migration: Migration,
    pub(crate) register: Register,
    pub(crate) workers: Workers,
    ttl: Duration,
    rest_ms: u64,
    /// What befell workers and stores.
    troubles: Mutex<Vec<Event>>,
    dir: tempfile::TempDir,
}

/// Something that befell a worker, or all of them, and is not over yet.
#[derive(Debug)]
pub(crate) struct Trouble {
    of: String,
    op: u64,
}

impl Arena {
    /// A migration that has been started between two stores, and its workers.
    pub(crate) async fn open(house: &Arc<House>, old: Kind, new: Kind, workers: usize) -> Result<Self, BoxError> {
        let mut arena = Self::empty(house, old, new, TTL, START).await?;
        // Two processors serve a few that ask all the time, and a crowd of those that rest.
        arena.rest_ms *= if workers > 5 { 8 } else { 1 };
        for number in 1..=workers {
            arena.start(&format!("w{number}"))?;
        }
        arena.progress(20).await?;
        Ok(arena)
    }

    /// A migration that has been started, and nobody there who works.
    pub(crate) async fn empty(
        house: &Arc<House>,
        old: Kind,
        new: Kind,
        ttl: Duration,
        start: Start,
    ) -> Result<Self, BoxError> {
        let stores = [Box::pin(house.store(old)).await?, Box::pin(house.store(new)).await?];
        let migration = Migration::new(lockkit::open(&stores[0].url()).await?, lockkit::open(&stores[1].url()).await?);
        migration.start(start).await?;
        let dir = tempfile::Builder::new().prefix("lockkit-moving-").tempdir()?;
        let (register, workers) = (Register::start().await?, Workers::new(WORKER));
        Ok(Self { stores, migration, register, workers, ttl, rest_ms: 8, troubles: Mutex::default(), dir })
    }

    /// Starts a worker.
    pub(crate) fn start(&self, name: &str) -> Result<(), BoxError> {
        self.start_with("", name)
    }

    /// Starts a worker whose client leaves something out.
    pub(crate) fn start_bad(&self, bad: Bad, name: &str) -> Result<(), BoxError> {
        self.start_with(bad.mark(), name)
    }

    fn start_with(&self, mark: &str, name: &str) -> Result<(), BoxError> {
        let [old, new] = [0, 1].map(|place: usize| self.stores[place].proxied_url());
        Ok(self.workers.start(Orders {
            url: format!("{mark}migrate:?from={old}&to={new}"),
            register: self.register.addr(),
            keys: KEYS.map(str::to_owned).into(),
            // The store of a migration has exclusive locks only.
            sharing: None,
            ttl_ms: self.ttl.as_millis() as u64,
            rest_ms: self.rest_ms,
            seed: 0,
            history: self.dir.path().join(name),
            name: name.to_owned(),
        })?)
    }

    /// Waits until the workers have written so many times more.
    pub(crate) async fn progress(&self, writes: u64) -> Result<(), BoxError> {
        let goal = self.register.writes() + writes;
        let reached = timeout(PATIENCE, self.register.reached(goal)).await;
        reached.map_err(|_| format!("the workers came to a stand: no {writes} writes within {PATIENCE:?}").into())
    }

    pub(crate) async fn step(&self, goal: Phase) -> Result<(), BoxError> {
        let step = self.migration.step(goal, |_| ()).await?;
        Ok(step.copied?)
    }

    /// Has the workers try the new store out, and waits until they have.
    pub(crate) async fn shadow(&self) -> Result<(), BoxError> {
        let asked = async || {
            let clients = self.migration.clients().await?;
            Result::<_, BoxError>::Ok(Tally::sum(clients.iter().map(|client| client.tally)).granted)
        };
        let before = asked().await?;
        self.migration.shadow(true).await?.copied?;
        self.progress(15).await?;
        let tried = async {
            while asked().await? <= before {
                sleep(Duration::from_millis(50)).await;
            }
            Result::<(), BoxError>::Ok(())
        };
        timeout(PATIENCE, tried).await.map_err(|_| "the workers have not asked the new store")?
    }

    /// Stops a worker in its tracks.
    pub(crate) async fn freeze(&self, name: &str) -> Result<Trouble, BoxError> {
        let trouble = self.trouble(name, "stands still");
        self.workers.freeze(name).await?;
        Ok(trouble)
    }

    /// Lets it go on.
    pub(crate) fn thaw(&self, trouble: Trouble) -> Result<(), BoxError> {
        self.workers.thaw(&trouble.of)?;
        self.over(trouble);
        Ok(())
    }

    pub(crate) async fn kill(&self, name: &str) -> Result<(), BoxError> {
        self.trouble(name, "killed");
        self.workers.kill(name).await?;
        Ok(())
    }

    /// Notes what befalls a worker, or with a name that is none, all of them.
    pub(crate) fn trouble(&self, of: &str, note: &str) -> Trouble {
        let mut troubles = unpoisoned(&self.troubles);
        let op = troubles.len() as u64;
        troubles.push(event(of, op, What::Fault { note: note.to_owned() }));
        Trouble { of: of.to_owned(), op }
    }

    pub(crate) fn over(&self, trouble: Trouble) {
        let mut troubles = unpoisoned(&self.troubles);
        troubles.push(event(&trouble.of, trouble.op, What::Healed));
    }

    /// A process that moves the migration on.
    pub(crate) fn migrator(&self, goal: Phase) -> Result<tokio::process::Child, BoxError> {
        let mut command = Command::new(std::env::current_exe()?);
        let [old, new] = [0, 1].map(|place: usize| self.stores[place].url());
        command.env(MIGRATOR, format!("{goal} {old} {new}"));
        Ok(command.stdin(Stdio::null()).stdout(Stdio::null()).kill_on_drop(true).spawn()?)
    }

    /// Sends the workers home, and judges what they recorded.
    pub(crate) async fn end(self) -> Result<Report, BoxError> {
        let files = self.workers.stop().await?;
        let mut events = History::read(&files)?.events().to_vec();
        events.extend(self.register.record());
        events.extend(self.troubles.into_inner().unwrap_or_else(PoisonError::into_inner));
        let lapse = self.stores.iter().map(|store| store.kind.lapse(self.ttl)).max().unwrap_or(self.ttl);
        let (history, within) = (History::new(events), lapse + SLACK);
        let report = check_reach(&history, within);
        if let Some(dir) = std::env::var_os(FIGURES) {
            let pair = self.stores.each_ref().map(|store| store.kind.name()).join(" to ");
            let (longest, grants) = (report.out_of_reach.unwrap_or_default(), report.grants);
            eprintln!("{pair}: {grants} grants, out of reach for {longest:?} at most, {within:?} allowed");
            fs::write(Path::new(&dir).join(format!("{pair} {grants}.jsonl")), history.to_lines())?;
        }
        Ok(report)
    }
}

fn event(process: &str, op: u64, what: What) -> Event {
    Event { at: SystemClock.now().as_nanos(), process: process.to_owned(), op, what }
}

/// Whether everything that every store here claims was kept, and no lock was out of reach for long.
pub(crate) fn judge(report: &Report) -> Result<(), BoxError> {
    // Nobody says here of an acquisition by when it must succeed.
    if let Some(violation) = report.violations.iter().find(|violation| violation.rule != Rule::Liveness) {
        return Err(format!("{violation}\n  ({} violations in all)", report.violations.len()).into());
    }
    Ok(())
}

/// What a migrator does: to be killed at any moment.
pub(crate) async fn migrate(orders: &str) -> Result<(), BoxError> {
    let [goal, old, new] = orders.split(' ').collect::<Vec<_>>()[..] else { return Err("bad orders".into()) };
    let goals = [Phase::Old, Phase::Both, Phase::New];
    let goal = goals.into_iter().find(|phase| phase.to_string() == goal).ok_or("no phase")?;
    let migration = Migration::new(lockkit::open(old).await?, lockkit::open(new).await?);
    migration.step(goal, |_| ()).await?.copied?;
    Ok(())
}

/// Kills migrators that go to `goal`, each a little later than the one before, until one is done first.
pub(crate) async fn killed_at_every_moment(arena: &Arena, goal: Phase) -> Result<u32, BoxError> {
    let drain = arena.migration.state().await?.record.drain();
    for killed in 0.. {
        let mut migrator = arena.migrator(goal)?;
        // The first steps are a few milliseconds each; then comes the drain, and what comes after it.
        let after = Duration::from_millis(15) * killed + if killed % 4 == 3 { drain } else { Duration::ZERO };
        tokio::select! {
            status = migrator.wait() => {
                let status = status?;
                return if status.success() { Ok(killed) } else { Err(format!("the migrator failed: {status}").into()) };
            }
            () = sleep(after) => migrator.kill().await?,
        }
        // Whatever it left: the workers go on.
        arena.progress(5).await?;
    }
    Ok(0)
}
