//! A store's servers, the workers, and what stands between them.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use lockkit_testkit::{BoxError, faults::Proxy, history::Recorder, servers::Keep};
use tokio::time::timeout;

use crate::{
    WORKER,
    sabotage::Sabotage,
    storm::{Caught, Orders, Prey, Random, Register, Sharing, Workers},
    target::{Kind, Setup, Target},
    trouble::Trouble,
};

const WORKERS: usize = 4;
const KEYS: [&str; 2] = ["account/1", SHARED];

/// The lock that readers share, where the store has readers.
pub(crate) const SHARED: &str = "account/2";

/// The semaphore, where the store has permits.
const PERMITS: &str = "permits/1";

/// How long a step of a nemesis may take before it must be broken. The slowest is the end of a session on a busy machine.
const STEP: Duration = Duration::from_secs(30);

/// Everything that takes part in one run.
#[derive(Debug)]
pub(crate) struct Arena {
    pub(crate) kind: Kind,
    pub(crate) setup: Setup,
    pub(crate) target: Target,
    pub(crate) register: Register,
    pub(crate) workers: Workers,
    /// For each worker its own proxies, one for each server.
    pub(crate) proxies: Vec<Vec<Proxy>>,
    pub(crate) nemesis: Recorder,
    dir: tempfile::TempDir,
    seed: u64,
}

impl Arena {
    pub(crate) async fn open(kind: Kind, setup: Setup, seed: u64) -> Result<Self, BoxError> {
        let dir = tempfile::Builder::new().prefix("lockkit-faults-").tempdir()?;
        let target = Target::start(kind, &setup).await?;
        let mut proxies = Vec::new();
        for _ in 0..WORKERS {
            let mut own = Vec::new();
            for process in target.processes() {
                own.push(Proxy::start(process.addr()).await?);
            }
            proxies.push(own);
        }
        let nemesis = Recorder::create("nemesis", &dir.path().join("nemesis"))?;
        let (register, workers) = (Register::start().await?, Workers::new(WORKER));
        let arena = Self { kind, setup, target, register, workers, proxies, nemesis, dir, seed };
        for (index, proxies) in arena.proxies.iter().enumerate() {
            let addresses: Vec<_> = proxies.iter().map(Proxy::addr).collect();
            arena.workers.start(arena.orders(format!("w{}", index + 1), &addresses))?;
        }
        arena.progress(30).await?;
        Ok(arena)
    }

    fn orders(&self, name: String, addresses: &[SocketAddr]) -> Orders {
        let url = match self.setup.sabotage {
            Some(Sabotage::Bypass) => self.direct_url(),
            Some(sabotage) => sabotage.spoil(&self.target.url(addresses)),
            None => self.target.url(addresses),
        };
        Orders {
            url,
            register: self.register.addr(),
            keys: KEYS.map(str::to_owned).into(),
            sharing: self.kind.has_every_mode().then(|| Sharing { lock: SHARED.into(), permits: PERMITS.into() }),
            ttl_ms: self.kind.ttl().as_millis() as u64,
            rest_ms: 8,
            seed: self.seed,
            history: self.dir.path().join(&name),
            name,
        }
    }

    /// The names of all locks: those that are fought for, and each worker's own.
    pub(crate) fn keys(&self) -> Vec<String> {
        let workers = (1..=WORKERS).map(|number| self.orders(format!("w{number}"), &[]));
        let permits = self.kind.has_every_mode().then_some(PERMITS);
        let shared = KEYS.into_iter().chain(permits).map(str::to_owned);
        shared.chain(workers.flat_map(|orders| orders.own_keys())).collect()
    }

    /// The store's URL through the proxies of one worker.
    pub(crate) fn proxied_url(&self, worker: usize) -> String {
        let addresses: Vec<_> = self.proxies[worker].iter().map(Proxy::addr).collect();
        self.target.url(&addresses)
    }

    /// The store's URL without proxies.
    pub(crate) fn direct_url(&self) -> String {
        let addresses: Vec<_> = self.target.processes().iter().map(|process| process.addr()).collect();
        self.target.url(&addresses)
    }

    /// What all choices come from.
    pub(crate) fn seed(&self) -> u64 {
        self.seed
    }

    /// A file for one more history.
    pub(crate) fn history_file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Waits until the workers have written so many times more.
    pub(crate) async fn progress(&self, writes: u64) -> Result<(), Trouble> {
        let goal = self.register.writes() + writes;
        let reached = timeout(STEP, self.register.reached(goal)).await;
        reached.map_err(|_| Trouble::Stuck(format!("the workers came to a stand: no {writes} writes within {STEP:?}")))
    }

    /// Catches a holder between its check and its write.
    pub(crate) async fn catch(&self) -> Result<Caught, Trouble> {
        self.catch_a(Prey::Writer).await
    }

    /// Catches such a holder between its check and its end.
    pub(crate) async fn catch_a(&self, prey: Prey) -> Result<Caught, Trouble> {
        let caught = timeout(STEP, self.register.catch(prey)).await;
        caught.map_err(|_| Trouble::Stuck("no holder could be caught".to_owned()))
    }

    /// Waits until somebody else has written what the caught holder is about to overwrite.
    pub(crate) async fn overtaken(&self, caught: &Caught) -> Result<(), Trouble> {
        let overtaken = timeout(STEP, self.register.overtaken(caught)).await;
        overtaken.map_err(|_| {
            Trouble::Stuck(format!("nobody overtook {}, which is caught: the nemesis is broken", caught.worker))
        })
    }

    /// The proxies of a worker. One that was started anew, `w1.2`, goes through those of its predecessor.
    pub(crate) fn proxies_of(&self, worker: &str) -> &[Proxy] {
        let number = worker.trim_start_matches('w').split('.').next().and_then(|number| number.parse::<usize>().ok());
        number.and_then(|number| self.proxies.get(number - 1)).map_or(&[], Vec::as_slice)
    }

    pub(crate) fn all_proxies(&self) -> impl Iterator<Item = &Proxy> {
        self.proxies.iter().flatten()
    }

    /// Kills a worker and starts another in its place.
    pub(crate) async fn replace(&self, worker: &str) -> Result<(), BoxError> {
        let old = self.workers.kill(worker).await?;
        let (first, times) = old.name.split_once('.').unwrap_or((&old.name, "1"));
        let name = format!("{first}.{}", times.parse::<u32>()? + 1);
        let history = self.dir.path().join(&name);
        Ok(self.workers.start(Orders { name, history, ..old })?)
    }

    /// Undoes every fault that lasts.
    pub(crate) async fn heal(&self) -> Result<(), BoxError> {
        self.all_proxies().for_each(Proxy::heal);
        if let Target::Ensemble(ensemble) = &self.target {
            ensemble.unsilence();
        }
        for name in self.workers.names() {
            // One that does not stand still does not mind.
            _ = self.workers.thaw(&name);
        }
        if let Some(clock) = &self.setup.clock {
            clock.set_right()?;
        }
        for process in self.target.processes() {
            if process.is_running() {
                process.thaw()?;
            } else {
                process.restart(Keep::Data).await?;
            }
        }
        Ok(())
    }

    /// Numbers for a purpose of this run.
    pub(crate) fn random(&self, purpose: &str) -> Random {
        Random::new(self.seed, purpose)
    }
}
