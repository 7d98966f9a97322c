//! One task of a worker: all the ways in which a lock is used, as the seed has it.

use std::{num::NonZeroU32, pin::pin, sync::Arc, time::Duration};

use lockkit::{Guard, Lock, Locker, Mode};
use tokio::{
    task::JoinSet,
    time::{sleep, timeout},
};

use super::{
    Random, Sharing,
    client::{Client, Held},
};
use lockkit_testkit::{
    BoxError,
    faults::poll_until,
    history::{Recorder, What},
};

/// How long to wait for a lock, at most, in milliseconds.
const PATIENCE: u64 = 1500;
/// How many permits there are. The nemesis catches as many.
const PERMITS: NonZeroU32 = NonZeroU32::new(2).expect("not zero");
/// How often a holder that is caught asks its guard.
const ASK_EVERY: Duration = Duration::from_millis(15);

/// What came of an acquisition; `None` if it was given up.
type Came = Option<lockkit::Result<Option<Guard>>>;

pub(crate) struct Hand {
    pub(crate) number: usize,
    pub(crate) locker: Locker,
    /// The locks to fight for.
    pub(crate) keys: Vec<String>,
    /// What is used in all modes, if anything is.
    pub(crate) sharing: Option<Sharing>,
    /// The locks that nobody else asks for.
    pub(crate) own: Vec<String>,
    pub(crate) ttl: Duration,
    pub(crate) rest_ms: u64,
    pub(crate) random: Random,
    pub(crate) recorder: Arc<Recorder>,
    pub(crate) register: Client,
    pub(crate) owners: u64,
}

impl Hand {
    /// Each way once, so that no run is without: another one for each task of a worker.
    pub(crate) async fn begin(&mut self) -> Result<(), BoxError> {
        match self.number % 3 {
            0 => self.nest().await,
            1 => self.hold_many().await,
            _ => {
                let lock = self.locker.lock(self.key()?).ttl(self.ttl);
                let op = self.recorder.ask(acquire(&self.key()?, None))?;
                // Polled once: it is on its way, and nobody waits for it.
                let came = polled(1, lock.acquire_within(Duration::from_millis(PATIENCE))).await;
                self.came(op, came).await?;
                Ok(())
            }
        }
    }

    pub(crate) async fn round(&mut self) -> Result<(), BoxError> {
        let sharing = self.sharing.clone();
        match (self.random.below(12), sharing) {
            (0 | 1, _) => self.nest().await?,
            (2, _) => self.hold_many().await?,
            (3 | 4, Some(Sharing { lock, .. })) => self.read(&lock).await?,
            (5, Some(Sharing { lock, .. })) => self.queue(&lock).await?,
            (6 | 7, Some(Sharing { permits, .. })) => self.take_permit(&permits).await?,
            _ => self.fight().await?,
        }
        sleep(self.random.millis(0, self.rest_ms)).await;
        Ok(())
    }

    /// One of the locks that all fight for, and what it protects.
    async fn fight(&mut self) -> Result<(), BoxError> {
        let key = self.pick()?;
        let lock = self.locker.lock(&key).ttl(self.ttl);
        self.fight_for(&key, &lock).await
    }

    async fn fight_for(&mut self, key: &str, lock: &Lock) -> Result<(), BoxError> {
        let Some(held) = self.acquire(acquire(key, None), lock).await? else { return Ok(()) };
        self.use_it(key, &held).await?;
        self.end(held).await
    }

    /// The lock that is shared, in strict order among readers and writers.
    async fn queue(&mut self, key: &str) -> Result<(), BoxError> {
        let lock = self.locker.rw_lock(key).write().ttl(self.ttl);
        self.fight_for(key, &lock).await
    }

    /// Reads what the shared lock protects, beside other readers.
    async fn read(&mut self, key: &str) -> Result<(), BoxError> {
        let lock = self.locker.rw_lock(key).read().ttl(self.ttl);
        let Some(held) = self.acquire(acquire_as(key, Mode::Shared), &lock).await? else { return Ok(()) };
        self.register.claim(key, held.guard.fence().get()).await?;
        self.stay(key, Mode::Shared, &held).await?;
        self.end(held).await
    }

    /// One of a few permits. Now and then all of them, as an exclusive lock, which alone may write.
    async fn take_permit(&mut self, key: &str) -> Result<(), BoxError> {
        let mode = Mode::Permit { limit: PERMITS };
        if self.random.below(4) == 0 {
            let lock = self.locker.lock(key).fifo().ttl(self.ttl);
            return self.fight_for(key, &lock).await;
        }
        let lock = self.locker.semaphore(key, PERMITS).ttl(self.ttl);
        let Some(held) = self.acquire(acquire_as(key, mode), &lock).await? else { return Ok(()) };
        // A permit's fence is no admission: nothing is claimed with it.
        self.stay(key, mode, &held).await?;
        self.end(held).await
    }

    /// Holds for a while, writes nothing, and asks the guard. Says whether it was held to the end.
    async fn stay(&mut self, key: &str, mode: Mode, held: &Held) -> Result<bool, BoxError> {
        for _ in 0..=self.random.below(3) {
            sleep(self.random.millis(1, 12)).await;
            if self.random.below(8) == 0 {
                held.renew(&self.recorder).await?;
            }
            if !held.ask(&self.recorder)? {
                return Ok(false);
            }
        }
        self.pass(key, mode, held).await?;
        Ok(true)
    }

    /// The same with an owner that acquires the lock several times, and gives its guards back in any order.
    async fn nest(&mut self) -> Result<(), BoxError> {
        let key = self.pick()?;
        self.owners += 1;
        let (owner, number) = (self.locker.owner(), self.owners);
        let lock = owner.lock(&key).ttl(self.ttl);
        let mut guards = Vec::new();
        guards.extend(self.acquire(acquire(&key, Some(number)), &lock).await?);
        if guards.is_empty() {
            return Ok(());
        }
        for _ in 0..=self.random.below(2) {
            guards.extend(self.acquire(acquire(&key, Some(number)), &lock).await?);
        }
        let user = self.random.below(guards.len() as u64) as usize;
        self.use_it(&key, &guards[user]).await?;
        while !guards.is_empty() {
            let held = guards.swap_remove(self.random.below(guards.len() as u64) as usize);
            self.end(held).await?;
            for other in &guards {
                other.ask(&self.recorder)?;
            }
        }
        // All are gone: what the owner acquires now is another lease.
        if self.random.below(2) == 0
            && let Some(again) = self.acquire(acquire(&key, Some(number)), &lock).await?
        {
            self.end(again).await?;
        }
        Ok(())
    }

    /// All the locks that are this task's alone, at once, at times for longer than a lease.
    async fn hold_many(&mut self) -> Result<(), BoxError> {
        let mut asking = JoinSet::new();
        for key in self.own.clone() {
            let (lock, recorder) = (self.locker.lock(&key).ttl(self.ttl), Arc::clone(&self.recorder));
            asking.spawn(async move {
                let op = recorder.ask(acquire(&key, None))?;
                let came = lock.acquire_within(Duration::from_millis(PATIENCE)).await;
                heard(&recorder, op, Some(came))
            });
        }
        let mut all = Vec::new();
        while let Some(asked) = asking.join_next().await {
            all.extend(asked??);
        }
        let long = self.random.below(4) == 0;
        sleep(if long { self.ttl + self.ttl / 4 } else { self.random.millis(5, 200) }).await;
        for held in &all {
            held.ask(&self.recorder)?;
        }
        for held in all {
            self.end(held).await?;
        }
        Ok(())
    }

    /// Acquires in one of the ways in which people do.
    async fn acquire(&mut self, what: What, lock: &Lock) -> Result<Option<Held>, BoxError> {
        let wait = self.random.millis(50, PATIENCE);
        let op = self.recorder.ask(what)?;
        let came = match self.random.below(10) {
            // Given up after some time, whatever has come of it.
            0 => timeout(self.random.millis(0, 30), lock.acquire_within(wait)).await.ok(),
            // Given up at one of its awaits.
            1 => polled(1 + self.random.below(6), lock.acquire_within(wait)).await,
            // Begun, and then forgotten for a while.
            2 => {
                let mut future = pin!(lock.acquire_within(wait));
                match timeout(self.random.millis(0, 15), &mut future).await {
                    Ok(came) => Some(came),
                    Err(_) => {
                        sleep(self.random.millis(20, 600)).await;
                        if self.random.below(3) == 0 { None } else { Some(future.await) }
                    }
                }
            }
            3 => Some(lock.try_acquire().await),
            _ => Some(lock.acquire_within(wait).await),
        };
        self.came(op, came).await
    }

    async fn came(&mut self, op: u64, came: Came) -> Result<Option<Held>, BoxError> {
        let failed = matches!(came, Some(Err(_)));
        let held = heard(&self.recorder, op, came)?;
        if failed {
            sleep(self.random.millis(5, 50)).await;
        }
        Ok(held)
    }

    /// Works under the lock as a service without fences would: it asks its guard before it writes, and not again. The
    /// fence is shown on the side, so that both kinds of service can be compared.
    async fn use_it(&mut self, key: &str, held: &Held) -> Result<(), BoxError> {
        let fence = held.guard.fence().get();
        let (version, twin) = self.register.claim(key, fence).await?;
        if !self.stay(key, Mode::Exclusive, held).await? {
            return Ok(());
        }
        let op = self.recorder.ask(What::Write { key: key.to_owned(), fence })?;
        let admitted = self.register.write(key, fence, version, twin).await?;
        self.recorder.hear(op, if admitted { What::Written } else { What::Refused })?;
        Ok(())
    }

    /// Waits for as long as the register likes. What the guard says meanwhile is for the history only: the holder is past
    /// its check.
    async fn pass(&mut self, key: &str, mode: Mode, held: &Held) -> Result<(), BoxError> {
        let mut passed = pin!(self.register.pass(key, mode));
        loop {
            tokio::select! {
                passed = &mut passed => {
                    held.ask(&self.recorder)?;
                    return passed;
                }
                () = sleep(ASK_EVERY) => drop(held.ask(&self.recorder)?),
            }
        }
    }

    async fn end(&mut self, held: Held) -> Result<(), BoxError> {
        if self.random.below(4) == 0 {
            held.drop(&self.recorder)?;
        } else {
            held.release(&self.recorder).await?;
        }
        Ok(())
    }

    fn pick(&mut self) -> Result<String, BoxError> {
        Ok(self.random.pick(&self.keys).ok_or("no keys")?.clone())
    }

    fn key(&self) -> Result<String, BoxError> {
        Ok(self.keys.first().ok_or("no keys")?.clone())
    }
}

fn acquire(key: &str, owner: Option<u64>) -> What {
    What::Acquire { key: key.to_owned(), within: None, owner, mode: Mode::Exclusive }
}

fn acquire_as(key: &str, mode: Mode) -> What {
    What::Acquire { key: key.to_owned(), within: None, owner: None, mode }
}

/// Records what came of an acquisition.
fn heard(recorder: &Recorder, grant: u64, came: Came) -> Result<Option<Held>, BoxError> {
    let (heard, held) = match came {
        Some(Ok(Some(guard))) => (What::Granted { fence: guard.fence().get() }, Some(Held { guard, grant })),
        Some(Ok(None)) => (What::Contended, None),
        Some(Err(error)) => (What::Failed { error: error.to_string() }, None),
        None => (What::Cancelled, None),
    };
    recorder.hear(grant, heard)?;
    Ok(held)
}

/// Polls a future so many times, if that takes no longer than anybody's patience, and drops it.
async fn polled<F: Future>(times: u64, future: F) -> Option<F::Output> {
    let times = times.try_into().expect("few");
    timeout(Duration::from_millis(PATIENCE), poll_until(pin!(future), times, || {})).await.ok().flatten()
}
