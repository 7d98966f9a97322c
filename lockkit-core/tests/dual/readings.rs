//! How the record is read.

use std::{
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use lockkit_core::{
    Attempt, Clock, LockKey, LockStore, MemoryStore, Query, Result, ShiftedClock,
    migrate::{Dual, Migration, Start},
    store::{Record, Records, Swap},
};
use lockkit_testkit::{Alter, Altered, faults::poll_until};
use tokio::{
    runtime::Builder,
    sync::{Notify, Semaphore},
    time::timeout,
};

use crate::world::{HeldUp, START, TTL, World, request};

/// Reading the record is hardly ever waited for at the slower store. A question that is dropped costs many stores a connection.
#[tokio::test]
async fn a_slow_store_is_asked_once_at_a_time_and_may_answer() -> Result<()> {
    let world = World::started().await?;
    let slow = Slow::new(&world.new);
    let dual = Dual::connect(Arc::new(world.old.clone()), Arc::new(Altered(slow.clone()))).await?;
    for asked in [2, 3] {
        for name in ["x", "y"] {
            world.clock.advance(START.fresh);
            assert!(matches!(dual.acquire(&request(name)).await?, Attempt::Granted(_) | Attempt::Contended(_)));
        }
        assert_eq!(slow.begun.load(Ordering::SeqCst), asked, "one at a time");
        slow.left.add_permits(1);
        timeout(TTL, slow.ended.notified()).await.expect("nobody broke it off");
    }
    Ok(())
}

/// A caller that waits for it, for the other store is away, and gives up.
#[tokio::test]
async fn a_question_that_nobody_waits_for_any_more_is_led_to_its_end() -> Result<()> {
    let world = World::started().await?;
    let old = HeldUp::new(world.old.clone());
    let slow = Slow::new(&world.new);
    let dual = Dual::connect(Arc::new(Altered(old.clone())), Arc::new(Altered(slow.clone()))).await?;
    old.is_cut_off.store(true, Ordering::SeqCst);
    world.clock.advance(START.fresh);
    let nothing = Query::Keys(Vec::new());
    assert!(poll_until(pin!(dual.inspect(&nothing)), 2, || ()).await.is_none(), "it waits for the record");
    slow.left.add_permits(1);
    timeout(TTL, slow.ended.notified()).await.expect("nobody broke it off");
    Ok(())
}

/// A store that answers as many questions for a record as it may.
#[derive(Clone, Debug)]
struct Slow {
    inner: MemoryStore,
    begun: Arc<AtomicU64>,
    left: Arc<Semaphore>,
    ended: Arc<Notify>,
}

impl Slow {
    /// It answers the first one.
    fn new(inner: &MemoryStore) -> Self {
        let (begun, left, ended) = (Arc::default(), Arc::new(Semaphore::new(1)), Arc::default());
        Self { inner: inner.clone(), begun, left, ended }
    }
}

#[async_trait]
impl Alter for Slow {
    fn inner(&self) -> &dyn LockStore {
        &self.inner
    }

    fn records(&self) -> Vec<Box<dyn Records + '_>> {
        vec![Box::new(self.clone())]
    }
}

#[async_trait]
impl Records for Slow {
    async fn read(&self, name: &LockKey) -> Result<Option<Record>> {
        self.begun.fetch_add(1, Ordering::SeqCst);
        self.left.acquire().await.expect("it is open").forget();
        if self.begun.load(Ordering::SeqCst) > 1 {
            self.ended.notify_one();
        }
        self.inner.records()[0].read(name).await
    }

    async fn compare_and_set(&self, name: &LockKey, seen: Option<&Record>, new: Option<&Record>) -> Result<Swap> {
        self.inner.records()[0].compare_and_set(name, seen, new).await
    }
}

/// Its record is asked for where it was made, until that turns out to come to nothing.
#[test]
fn a_client_made_on_a_runtime_that_nobody_drives_reads_the_record_elsewhere() {
    let [home, other] = [(), ()].map(|()| Builder::new_current_thread().enable_all().build().expect("a runtime"));
    let clock = Arc::new(ShiftedClock::default());
    let [old, new] = [(), ()].map(|()| MemoryStore::with_clock(Arc::clone(&clock) as Arc<dyn Clock>));
    let start = Start { fresh: Duration::from_secs(60), ..START };
    let dual = home.block_on(async {
        Migration::new(Arc::new(old.clone()), Arc::new(new.clone())).start(start).await.expect("start");
        Dual::connect(Arc::new(old), Arc::new(new)).await.expect("connect")
    });
    clock.advance(start.fresh);
    let granted = async { while !matches!(dual.acquire(&request("x")).await, Ok(Attempt::Granted(_))) {} };
    other.block_on(async { timeout(start.fresh / 3, granted).await }).expect("it asks where it is used");
}
