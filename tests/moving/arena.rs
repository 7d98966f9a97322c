//! Two stores, the workers that use both as one, and what they recorded.

use std::{process::Stdio, time::Duration};

use lockkit::migrate::{Migration, Phase, Start, Tally};
use lockkit_testkit::{
    BoxError,
    history::{History, Report, Rule, check},
};
use tokio::{
    process::Command,
    time::{sleep, timeout},
};

use crate::{
    MIGRATOR, WORKER,
    servers::{Kind, Servers},
    storm::{Orders, Register, Workers},
};

pub(crate) const TTL: Duration = Duration::from_millis(1500);
pub(crate) const START: Start = Start {
    max_ttl: Duration::from_secs(2),
    fresh: Duration::from_millis(500),
    home_is_durable: false,
    fence_above: lockkit::Fence::NONE,
};

const KEYS: [&str; 2] = ["account/1", "account/2"];

/// How long the workers may take to go on. Not how long they do take.
const PATIENCE: Duration = Duration::from_secs(40);

/// Everything that takes part in one run.
#[derive(Debug)]
pub(crate) struct Arena {
    pub(crate) stores: [Servers; 2],
    pub(crate) migration: Migration,
    pub(crate) register: Register,
    pub(crate) workers: Workers,
    dir: tempfile::TempDir,
}

impl Arena {
    /// A migration that has been started, between two stores on servers of their own, or on the same ones, and its workers.
    pub(crate) async fn open(old: Kind, new: Kind, workers: usize) -> Result<Self, BoxError> {
        let first = Servers::start(old, 0).await?;
        let second = if old == new { first.beside().await? } else { Servers::start(new, 1).await? };
        let stores = [first, second];
        let migration = Migration::new(lockkit::open(&stores[0].url()).await?, lockkit::open(&stores[1].url()).await?);
        migration.start(START).await?;
        let dir = tempfile::Builder::new().prefix("lockkit-moving-").tempdir()?;
        let arena = Self { stores, migration, register: Register::start().await?, workers: Workers::new(WORKER), dir };
        for number in 1..=workers {
            arena.start(&format!("w{number}"))?;
        }
        arena.progress(20).await?;
        Ok(arena)
    }

    /// Starts a worker.
    pub(crate) fn start(&self, name: &str) -> Result<(), BoxError> {
        let [old, new] = [0, 1].map(|place: usize| self.stores[place].proxied_url());
        Ok(self.workers.start(Orders {
            url: format!("migrate:?from={old}&to={new}"),
            register: self.register.addr(),
            keys: KEYS.map(str::to_owned).into(),
            ttl_ms: TTL.as_millis() as u64,
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
        Ok(check(&History::new(events)))
    }
}

/// Whether everything that every store here claims was kept.
pub(crate) fn judge(report: &Report) -> Result<(), BoxError> {
    // A worker that was killed may keep its lock for as long as its lease lasts, and both stores need a while then.
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
