//! Two stores on one clock, of which the new one can be cut off.

use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Waker},
    time::Duration,
};

use async_trait::async_trait;
use lockkit_core::{
    Clock, Error, ErrorKind, Fence, LockKey, LockStore, MemoryStore, Result, ShiftedClock,
    migrate::{Migration, Phase, PhaseRecord, Side, Start},
    store::{Record, Records, Swap},
};
use lockkit_testkit::{Alter, Altered};

pub(crate) const START: Start = Start {
    max_ttl: Duration::from_secs(2),
    fresh: Duration::from_millis(500),
    home_is_durable: false,
    fence_above: Fence::NONE,
};
pub(crate) const NAME: &str = "lockkit/migration";

/// Two stores on one clock, of which the new one can be cut off.
pub(crate) struct World {
    pub(crate) clock: Arc<ShiftedClock>,
    pub(crate) old: MemoryStore,
    pub(crate) new: MemoryStore,
    pub(crate) is_cut_off: Arc<AtomicBool>,
    pub(crate) migration: Migration,
}

/// A store that may be cut off, and each of whose records takes its time.
#[derive(Debug)]
pub(crate) struct Away {
    pub(crate) inner: MemoryStore,
    pub(crate) is_cut_off: Arc<AtomicBool>,
    pub(crate) why: ErrorKind,
}

pub(crate) struct SlowRecords<'a>(Box<dyn Records + 'a>);

/// The records of a store that can't be asked. One that does not let this user read them is as far away as one that is down, and no sign
/// of a wrong store.
pub(crate) struct NoRecords(pub(crate) ErrorKind);

#[async_trait]
impl Records for NoRecords {
    async fn read(&self, _: &LockKey) -> Result<Option<Record>> {
        Err(Error::new(self.0, "no answer, or no permission"))
    }

    async fn compare_and_set(&self, _: &LockKey, _: Option<&Record>, _: Option<&Record>) -> Result<Swap> {
        Err(Error::new(self.0, "no answer, or no permission"))
    }
}

#[async_trait]
impl Records for SlowRecords<'_> {
    async fn read(&self, name: &LockKey) -> Result<Option<Record>> {
        tokio::task::yield_now().await;
        let answer = self.0.read(name).await;
        tokio::task::yield_now().await;
        answer
    }

    async fn compare_and_set(&self, name: &LockKey, seen: Option<&Record>, new: Option<&Record>) -> Result<Swap> {
        tokio::task::yield_now().await;
        let answer = self.0.compare_and_set(name, seen, new).await;
        tokio::task::yield_now().await;
        answer
    }
}

#[async_trait]
impl Alter for Away {
    fn inner(&self) -> &dyn LockStore {
        &self.inner
    }

    fn records(&self) -> Vec<Box<dyn Records + '_>> {
        match self.is_cut_off.load(Ordering::SeqCst) {
            true => vec![Box::new(NoRecords(self.why))],
            false => self.inner.records().into_iter().map(|of| Box::new(SlowRecords(of)) as Box<dyn Records>).collect(),
        }
    }
}

impl World {
    pub(crate) fn new() -> Self {
        let clock = Arc::new(ShiftedClock::default());
        let [old, new] = [(), ()].map(|()| MemoryStore::with_clock(Arc::clone(&clock) as Arc<dyn Clock>));
        let is_cut_off = Arc::new(AtomicBool::new(false));
        let away = |store: &MemoryStore, is_cut_off| {
            Arc::new(Altered(Away { inner: store.clone(), is_cut_off, why: ErrorKind::Denied }))
        };
        let migration = Migration::new(away(&old, Arc::default()), away(&new, Arc::clone(&is_cut_off)));
        Self { clock, old, new, is_cut_off, migration }
    }

    pub(crate) async fn started() -> Result<Self> {
        let world = Self::new();
        world.migration.start(START).await?;
        Ok(world)
    }

    pub(crate) async fn step(&self, goal: Phase) -> Result<PhaseRecord> {
        let step = self.migration.step(goal, |drain| self.clock.advance(drain.left)).await?;
        step.copied.map(|()| step.record)
    }

    pub(crate) async fn records(&self) -> Result<[Option<PhaseRecord>; 2]> {
        Ok([read(&self.old, Side::Old).await?, read(&self.new, Side::New).await?])
    }
}

pub(crate) async fn read(store: &MemoryStore, at: Side) -> Result<Option<PhaseRecord>> {
    let found = store.records()[0].read(&LockKey::new(NAME)?).await?;
    found.map(|record| PhaseRecord::from_record(&record, at)).transpose()
}

/// Whether it has a record of whatever migration.
pub(crate) async fn has_record(store: &MemoryStore) -> Result<bool> {
    Ok(store.records()[0].read(&LockKey::new(NAME)?).await?.is_some())
}

pub(crate) async fn write(store: &MemoryStore, at: Side, record: Option<&PhaseRecord>) -> Result<()> {
    let (name, records) = (LockKey::new(NAME)?, store.records());
    let seen = records[0].read(&name).await?;
    let new = record.map(|record| record.to_record(at)).transpose()?;
    assert_eq!(records[0].compare_and_set(&name, seen.as_ref(), new.as_ref()).await?, Swap::Done);
    Ok(())
}

/// Polls so often, as long as it is under way; whether it has ended.
pub(crate) fn poll_times(mut future: std::pin::Pin<&mut impl Future>, times: usize) -> bool {
    (0..times).any(|_| future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready())
}
