//! A store whose records are on several nodes.

use std::{
    future::Future,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::{Context, Poll, Waker},
};

use async_trait::async_trait;
use lockkit_core::{
    Clock, Error, ErrorKind, LockKey, LockStore, MemoryStore, Result, ShiftedClock,
    migrate::{Dual, Migration, Phase, PhaseRecord, Side},
    store::{Record, Records, Swap},
};
use lockkit_testkit::{Alter, Altered};

use crate::world::{Away, NoRecords, START, poll_times, read, write};

/// Those of a store that takes no writes any more.
struct ReadOnly<'a>(Box<dyn Records + 'a>);

#[async_trait]
impl Records for ReadOnly<'_> {
    async fn read(&self, name: &LockKey) -> Result<Option<Record>> {
        self.0.read(name).await
    }

    async fn compare_and_set(&self, _: &LockKey, _: Option<&Record>, _: Option<&Record>) -> Result<Swap> {
        Err(Error::new(ErrorKind::Unavailable, "it takes no writes"))
    }
}

/// A store whose records are on three nodes, of which one can be cut off.
#[derive(Clone, Debug, Default)]
struct Quorum {
    inner: MemoryStore,
    nodes: [MemoryStore; 3],
    cut_off: Arc<AtomicUsize>,
    /// How many nodes take no writes.
    read_only: Arc<AtomicUsize>,
}

#[async_trait]
impl Alter for Quorum {
    fn inner(&self) -> &dyn LockStore {
        &self.inner
    }

    fn records(&self) -> Vec<Box<dyn Records + '_>> {
        let mut records: Vec<_> = self.nodes.iter().flat_map(MemoryStore::records).collect();
        for record in records.iter_mut().rev().take(self.read_only.load(Ordering::SeqCst)) {
            let inner = std::mem::replace(record, Box::new(NoRecords(ErrorKind::Unavailable)));
            *record = Box::new(ReadOnly(inner));
        }
        for record in records.iter_mut().take(self.cut_off.load(Ordering::SeqCst)) {
            *record = Box::new(NoRecords(ErrorKind::Unavailable));
        }
        records
    }
}

/// From a quorum to a store that can be cut off, in the phase new.
struct FromQuorum {
    clock: Arc<ShiftedClock>,
    old: Quorum,
    is_cut_off: Arc<AtomicBool>,
    migration: Migration,
    first: PhaseRecord,
}

impl FromQuorum {
    async fn moved() -> Result<Self> {
        let clock = Arc::new(ShiftedClock::default());
        let store = || MemoryStore::with_clock(Arc::clone(&clock) as Arc<dyn Clock>);
        let (old, is_cut_off) = (Quorum { inner: store(), ..Quorum::default() }, Arc::<AtomicBool>::default());
        let new = Away { inner: store(), is_cut_off: Arc::clone(&is_cut_off), why: ErrorKind::Unavailable };
        let migration = Migration::new(Arc::new(Altered(old.clone())), Arc::new(Altered(new)));
        let first = migration.start(START).await?;
        let moved = Self { clock, old, is_cut_off, migration, first };
        for phase in [Phase::Both, Phase::New] {
            moved.step(phase).await?;
        }
        Ok(moved)
    }

    async fn step(&self, goal: Phase) -> Result<()> {
        let step = self.migration.step(goal, |drain| self.clock.advance(drain.left)).await?;
        step.copied
    }

    fn client(&self) -> impl Future<Output = Result<Dual>> {
        let is_cut_off = Arc::clone(&self.is_cut_off);
        let new = Away { inner: MemoryStore::new(), is_cut_off, why: ErrorKind::Unavailable };
        Dual::connect(Arc::new(Altered(self.old.clone())), Arc::new(Altered(new)))
    }
}

/// Each of the two would be tolerated by itself. The node that remembers is out of reach of nobody.
#[tokio::test(start_paused = true)]
async fn a_node_that_lost_its_record_has_no_say() -> Result<()> {
    let moved = FromQuorum::moved().await?;
    // Of the two that answer first, one missed all changes, and the other one has been restarted without its data.
    write(&moved.old.nodes[0], Side::Old, Some(&moved.first)).await?;
    write(&moved.old.nodes[1], Side::Old, None).await?;
    moved.is_cut_off.store(true, Ordering::SeqCst);
    assert_eq!(moved.client().await?.phase(), Phase::New, "the third one remembers");
    write(&moved.old.nodes[2], Side::Old, None).await?;
    let error = moved.client().await.expect_err("one of three is no majority");
    assert!(error.is_retryable(), "{error}");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_node_that_missed_a_change_gets_it_with_the_next_command() -> Result<()> {
    let moved = FromQuorum::moved().await?;
    write(&moved.old.nodes[2], Side::Old, Some(&moved.first)).await?;
    moved.step(Phase::New).await?;
    assert_eq!(read(&moved.old.nodes[2], Side::Old).await?.map(|record| record.phase), Some(Phase::New));
    Ok(())
}

/// Nodes of a quorum that take no writes any more while a migration is started.
#[tokio::test(start_paused = true)]
async fn a_record_at_too_few_nodes_is_an_error() -> Result<()> {
    for polls in 0..100 {
        let (inner, new) = (MemoryStore::new(), Quorum::default());
        let old = Away { inner, is_cut_off: Arc::default(), why: ErrorKind::Unavailable };
        let migration = Migration::new(Arc::new(Altered(old)), Arc::new(Altered(new.clone())));
        let mut starts = pin!(migration.start(START));
        if poll_times(starts.as_mut(), polls) {
            assert!(polls > 4, "it was never in the middle");
            return Ok(());
        }
        new.read_only.store(2, Ordering::SeqCst);
        let started = starts.await;
        let mut copies = 0;
        for node in &new.nodes {
            copies += u32::from(read(node, Side::New).await?.is_some());
        }
        assert!(started.is_err() || copies >= 2, "started after {polls} polls, with {copies} of 3 copies");
    }
    panic!("it never ended");
}

#[tokio::test(start_paused = true)]
async fn a_node_that_is_away_keeps_the_end_away() -> Result<()> {
    let moved = FromQuorum::moved().await?;
    let migration = moved.migration.clone().fences_are_set();
    let finishes = || migration.finish(|drain| moved.clock.advance(drain.left));
    moved.old.cut_off.store(1, Ordering::SeqCst);
    assert!(finishes().await.is_err());
    moved.old.cut_off.store(0, Ordering::SeqCst);
    assert_eq!(moved.migration.state().await?.record.phase, Phase::New, "it is as it was");
    finishes().await?;
    for node in &moved.old.nodes {
        assert!(read(node, Side::Old).await?.is_some_and(|record| record.is_over));
    }
    Ok(())
}

/// Nodes of a quorum take no writes any more while the migration is finished: it is over, and says so until all have heard.
#[tokio::test(start_paused = true)]
async fn an_end_that_not_all_nodes_heard_of_is_brought_there() -> Result<()> {
    for nodes in 1..=3 {
        let moved = FromQuorum::moved().await?;
        let migration = moved.migration.clone().fences_are_set();
        let finishes = || migration.finish(|drain| moved.clock.advance(drain.left));
        moved.old.read_only.store(nodes, Ordering::SeqCst);
        assert!(finishes().await.expect_err("nodes take no writes").is_retryable());
        assert_eq!(migration.state().await.expect_err("over").kind(), ErrorKind::Misconfigured);
        assert_eq!(moved.client().await.expect_err("over").kind(), ErrorKind::Misconfigured);
        // Also where the other store has been in many others.
        let store = || MemoryStore::with_clock(Arc::clone(&moved.clock) as Arc<dyn Clock>);
        let [third, fourth] = [store(), store()];
        let others = Migration::new(Arc::new(third.clone()), Arc::new(fourth)).fences_are_set();
        for _ in 0..5 {
            others.start(START).await?;
            others.finish(|drain| moved.clock.advance(drain.left)).await?;
        }
        for third in [third, store()] {
            let next = Migration::new(Arc::new(Altered(moved.old.clone())), Arc::new(third)).start(START).await;
            assert_eq!(next.expect_err("the last one is in the way").kind(), ErrorKind::Misconfigured);
        }
        moved.old.read_only.store(0, Ordering::SeqCst);
        finishes().await?;
        for node in &moved.old.nodes {
            assert!(read(node, Side::Old).await?.is_some_and(|record| record.is_over));
        }
        finishes().await?;
    }
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_quorum_of_which_a_node_fell_back_is_noticed() -> Result<()> {
    let clock = Arc::new(ShiftedClock::default());
    let (old, new) = (MemoryStore::with_clock(Arc::clone(&clock) as Arc<dyn Clock>), Quorum::default());
    let migration = Migration::new(Arc::new(old), Arc::new(Altered(new.clone())));
    let first = migration.start(START).await?;
    migration.step(Phase::Both, |_| ()).await?.copied?;
    let (mut told, mut is_fallen) = (0, false);
    let step = migration.step(Phase::New, |drain| {
        told += u32::from(drain.left > drain.whole / 2);
        if !std::mem::replace(&mut is_fallen, true) {
            for node in &new.nodes[..2] {
                let written = pin!(write(node, Side::New, Some(&first))).poll(&mut Context::from_waker(Waker::noop()));
                assert!(matches!(written, Poll::Ready(Ok(()))));
            }
        }
        clock.advance(drain.left);
    });
    assert_eq!(step.await?.record.phase, Phase::New);
    assert_eq!(told, 2, "clients may have read the old phase at the two, so that the drain begins anew");
    Ok(())
}
