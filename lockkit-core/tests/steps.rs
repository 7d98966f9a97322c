//! The steps of a migration: what may be done when, by whom, and what is left if whoever does it is killed.

use std::{
    future::Future,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use async_trait::async_trait;
use lockkit_core::{
    Claim, Clock, Error, ErrorKind, Fence, FenceAbove, LockKey, LockStore, Locker, MemoryStore, Release, Result,
    ShiftedClock, StoreInfo,
    migrate::{Dual, Fences, Migration, Phase, PhaseRecord, Side, Start},
    store::{Record, Records, Swap},
};
use lockkit_testkit::{Alter, Altered};

const START: Start = Start {
    max_ttl: Duration::from_secs(2),
    fresh: Duration::from_millis(500),
    home_is_durable: false,
    fence_above: Fence::NONE,
};
const NAME: &str = "lockkit/migration";

/// Two stores on one clock, of which the new one can be cut off.
struct World {
    clock: Arc<ShiftedClock>,
    old: MemoryStore,
    new: MemoryStore,
    is_cut_off: Arc<AtomicBool>,
    migration: Migration,
}

/// A store that may be cut off, and each of whose records takes its time.
#[derive(Debug)]
struct Away {
    inner: MemoryStore,
    is_cut_off: Arc<AtomicBool>,
    why: ErrorKind,
}

struct SlowRecords<'a>(Box<dyn Records + 'a>);

/// The records of a store that can't be asked. One that does not let this user read them is as far away as one that is down, and no sign
/// of a wrong store.
struct NoRecords(ErrorKind);

#[async_trait]
impl Records for NoRecords {
    async fn read(&self, _: &LockKey) -> Result<Option<Record>> {
        Err(Error::new(self.0, "no answer, or no permission"))
    }

    async fn compare_and_set(&self, _: &LockKey, _: Option<&Record>, _: Option<&Record>) -> Result<Swap> {
        Err(Error::new(self.0, "no answer, or no permission"))
    }
}

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
    fn new() -> Self {
        let clock = Arc::new(ShiftedClock::default());
        let [old, new] = [(), ()].map(|()| MemoryStore::with_clock(Arc::clone(&clock) as Arc<dyn Clock>));
        let is_cut_off = Arc::new(AtomicBool::new(false));
        let away = |store: &MemoryStore, is_cut_off| {
            Arc::new(Altered(Away { inner: store.clone(), is_cut_off, why: ErrorKind::Denied }))
        };
        let migration = Migration::new(away(&old, Arc::default()), away(&new, Arc::clone(&is_cut_off)));
        Self { clock, old, new, is_cut_off, migration }
    }

    async fn started() -> Result<Self> {
        let world = Self::new();
        world.migration.start(START).await?;
        Ok(world)
    }

    async fn step(&self, goal: Phase) -> Result<PhaseRecord> {
        let step = self.migration.step(goal, |drain| self.clock.advance(drain.left)).await?;
        step.copied.map(|()| step.record)
    }

    async fn records(&self) -> Result<[Option<PhaseRecord>; 2]> {
        Ok([read(&self.old, Side::Old).await?, read(&self.new, Side::New).await?])
    }
}

async fn read(store: &MemoryStore, at: Side) -> Result<Option<PhaseRecord>> {
    let found = store.records()[0].read(&LockKey::new(NAME)?).await?;
    found.map(|record| PhaseRecord::from_record(&record, at)).transpose()
}

async fn write(store: &MemoryStore, at: Side, record: Option<&PhaseRecord>) -> Result<()> {
    let (name, records) = (LockKey::new(NAME)?, store.records());
    let seen = records[0].read(&name).await?;
    let new = record.map(|record| record.to_record(at)).transpose()?;
    assert_eq!(records[0].compare_and_set(&name, seen.as_ref(), new.as_ref()).await?, Swap::Done);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_start_can_be_repeated_and_another_can_not_begin() -> Result<()> {
    let world = World::new();
    let error = world.migration.state().await.expect_err("nothing is there");
    assert_eq!(error.kind(), ErrorKind::Misconfigured);
    let first = world.migration.start(START).await?;
    assert_eq!((first.phase, first.home, first.epoch), (Phase::Old, Side::Old, 1));
    assert_eq!(world.records().await?, [Some(first.clone()), Some(first.clone())]);
    assert_eq!(world.migration.start(START).await?, first);
    let longer = Start { max_ttl: START.max_ttl * 2, ..START };
    assert_eq!(world.migration.start(longer).await.expect_err("other settings").kind(), ErrorKind::Misconfigured);
    let elsewhere = Migration::new(Arc::new(world.old.clone()), Arc::new(MemoryStore::new()));
    assert_eq!(elsewhere.start(START).await.expect_err("another store").kind(), ErrorKind::Misconfigured);
    let same = Migration::new(Arc::new(world.old.clone()), Arc::new(world.old.clone()));
    assert_eq!(same.start(START).await.expect_err("one store").kind(), ErrorKind::InvalidInput);
    Ok(())
}

/// Polls so often, as long as it is under way; whether it has ended.
fn poll_times(mut future: std::pin::Pin<&mut impl Future>, times: usize) -> bool {
    (0..times).any(|_| future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready())
}

/// Of a store that loses the answers to releases, so that whoever wants a lock to be free has to ask again.
#[derive(Debug)]
struct Forgetful {
    inner: MemoryStore,
    is_asked: AtomicBool,
    info: StoreInfo,
}

#[async_trait]
impl Alter for Forgetful {
    fn inner(&self) -> &dyn LockStore {
        &self.inner
    }

    fn info(&self) -> &StoreInfo {
        &self.info
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        if !self.is_asked.swap(true, Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::Unavailable, "connection refused").unknown_effect());
        }
        self.inner.release(claim).await
    }
}

/// Where leases end with the session, the locks for the migration's own use are always the same.
#[tokio::test(start_paused = true)]
async fn what_a_migrator_has_asked_for_is_released_in_the_end() -> Result<()> {
    let (old, new) = (MemoryStore::new(), MemoryStore::new());
    let mut info = old.info().clone();
    info.capability.liveness.session = Some(Duration::from_secs(10));
    let old = Forgetful { inner: old, is_asked: AtomicBool::new(false), info };
    let migration = Migration::new(Arc::new(Altered(old)), Arc::new(new));
    assert!(migration.start(START).await.expect_err("the release got lost").is_retryable());
    tokio::time::sleep(Duration::from_secs(2)).await;
    migration.start(START).await?;
    Ok(())
}

/// Polls a call so often, has another migrator finish the migration then, and lets the call go on. Whether it was over by then.
async fn finished_after<T>(polls: usize, world: &World, call: impl Future<Output = Result<T>>) -> Result<bool> {
    let mut call = pin!(call);
    if poll_times(call.as_mut(), polls) {
        return Ok(true);
    }
    world.migration.clone().fences_are_set().finish(|drain| world.clock.advance(drain.left)).await?;
    let ends = world.records().await?;
    assert!(ends.iter().flatten().all(|record| record.is_over));
    drop(call.await);
    assert_eq!(world.records().await?, ends, "after {polls} polls");
    Ok(false)
}

/// Whoever moves a migration on may stand still for long at any await, and find that it was finished meanwhile.
#[tokio::test(start_paused = true)]
async fn what_was_finished_stays_so() -> Result<()> {
    for home_lost_it in [false, true] {
        for steps in [false, true] {
            for polls in 0.. {
                let world = World::started().await?;
                if home_lost_it {
                    write(&world.old, Side::Old, None).await?;
                }
                let is_over = if steps {
                    let copied = async { world.migration.shadow(true).await?.copied };
                    finished_after(polls, &world, copied).await?
                } else {
                    finished_after(polls, &world, world.migration.settle()).await?
                };
                if is_over {
                    assert!(polls > 4, "it was never in the middle");
                    break;
                }
            }
        }
    }
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn clients_of_other_stores_are_refused() -> Result<()> {
    let world = World::new();
    let connect = async |old: &MemoryStore, new: &MemoryStore| {
        Dual::connect(Arc::new(old.clone()), Arc::new(new.clone())).await.map(drop)
    };
    let refused = |outcome: Result<()>| assert_eq!(outcome.expect_err("refused").kind(), ErrorKind::Misconfigured);
    refused(connect(&world.old, &world.new).await);
    world.migration.start(START).await?;
    connect(&world.old, &world.new).await?;
    refused(connect(&world.new, &world.old).await);
    refused(connect(&world.old, &MemoryStore::new()).await);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn only_a_step_back_goes_without_a_drain() -> Result<()> {
    let world = World::started().await?;
    let drained = async |goal: Phase| {
        let mut whole = Duration::ZERO;
        let told = |drain: lockkit_core::migrate::Drain| {
            whole = drain.whole;
            world.clock.advance(drain.left);
        };
        let before = world.clock.now();
        let step = world.migration.step(goal, told).await?;
        assert!(world.clock.now().since(before) >= whole);
        Result::Ok((whole, step.record))
    };
    let leap = world.migration.step(Phase::New, |_| ()).await.expect_err("a leap");
    assert_eq!(leap.kind(), ErrorKind::InvalidInput);
    assert_eq!(drained(Phase::Both).await?.0, Duration::ZERO);
    // The home is a store that may lose what it confirmed: so even the step back waits (rule M16).
    let (whole, old) = drained(Phase::Old).await?;
    assert_eq!(
        (whole, old.floor),
        (old.drain(), Fence::NONE),
        "what was granted in both was carried into the old store"
    );
    assert_eq!(drained(Phase::Both).await?.0, Duration::ZERO);
    let (whole, new) = drained(Phase::New).await?;
    assert_eq!(whole, new.drain());
    assert!(new.floor > Fence::NONE && new.epoch == 5);
    assert_eq!(drained(Phase::New).await?, (Duration::ZERO, new), "nothing is done twice");
    Ok(())
}

/// The migrator is killed at each moment at which it waits for something, in every step; another goes on.
#[tokio::test(start_paused = true)]
async fn whoever_goes_on_after_a_killed_migrator_finds_a_sound_state() -> Result<()> {
    for goals in [
        &[Phase::Both][..],
        &[Phase::Both, Phase::Old],
        &[Phase::Both, Phase::New],
        &[Phase::Both, Phase::New, Phase::Both],
    ] {
        let (last, before) = goals.split_last().expect("a step");
        for killed_at in 0.. {
            let world = World::started().await?;
            for goal in before {
                world.step(*goal).await?;
            }
            let from = world.migration.state().await?.record;
            let is_done = {
                let advance = |drain: lockkit_core::migrate::Drain| world.clock.advance(drain.left);
                let mut step = pin!(world.migration.step(*last, advance));
                let mut is_done = false;
                for _ in 0..=killed_at {
                    let polled = step.as_mut().poll(&mut Context::from_waker(Waker::noop()));
                    is_done = is_done || matches!(polled, Poll::Ready(_));
                    if is_done {
                        break;
                    }
                    tokio::time::advance(Duration::from_secs(1)).await;
                }
                is_done
            };
            let [old, new] = world.records().await?.map(|record| record.expect("no record is ever removed"));
            assert!(old.epoch >= new.epoch, "the home is first");
            for found in [&old, &new] {
                assert!(found.epoch >= from.epoch && [from.phase, *last].contains(&found.phase));
            }
            assert!(old.epoch <= from.epoch + 1 && !(old.phase == Phase::New && new.phase == Phase::Old));
            let after = world.step(*last).await?;
            // A change that was not copied is written anew.
            let renewed = u64::from(old.epoch != new.epoch && old.phase == *last);
            assert_eq!((after.phase, after.epoch), (*last, from.epoch + 1 + renewed), "killed at {killed_at}");
            assert_eq!(world.records().await?, [Some(after.clone()), Some(after)]);
            if is_done {
                break;
            }
        }
    }
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_store_that_fell_back_is_lifted_and_the_drain_begins_anew() -> Result<()> {
    let world = World::started().await?;
    let first = world.migration.state().await?.record;
    let both = world.step(Phase::Both).await?;
    let mut told = 0;
    // In the middle of the drain the new store falls back by one change.
    let mut is_fallen = false;
    let step = world.migration.step(Phase::New, |drain| {
        told += u32::from(drain.left > drain.whole / 2);
        if !std::mem::replace(&mut is_fallen, true) {
            let written =
                pin!(write(&world.new, Side::New, Some(&first))).poll(&mut Context::from_waker(Waker::noop()));
            assert!(matches!(written, Poll::Ready(Ok(()))));
        }
        world.clock.advance(drain.left);
    });
    let step = step.await?;
    assert_eq!((step.record.phase, step.record.epoch), (Phase::New, both.epoch + 2), "Both was written anew");
    assert_eq!(told, 2, "one drain for each time at which both stores were seen to have the record");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_store_that_fell_back_is_noticed_though_another_migrator_has_lifted_it() -> Result<()> {
    let world = World::started().await?;
    let first = world.migration.state().await?.record;
    world.step(Phase::Both).await?;
    let another = Migration::new(Arc::new(world.old.clone()), Arc::new(world.new.clone()));
    let (mut told, mut is_fallen) = (0, false);
    let step = world.migration.step(Phase::New, |drain| {
        told += u32::from(drain.left > drain.whole / 2);
        if !std::mem::replace(&mut is_fallen, true) {
            let fall_back = async {
                write(&world.new, Side::New, Some(&first)).await?;
                another.settle().await
            };
            let lifted = pin!(fall_back).poll(&mut Context::from_waker(Waker::noop()));
            assert!(matches!(lifted, Poll::Ready(Ok(record)) if record.phase == Phase::Both));
        }
        world.clock.advance(drain.left);
    });
    assert_eq!(step.await?.record.phase, Phase::New);
    assert_eq!(told, 2, "clients may have read the old phase again, so that the drain begins anew");
    Ok(())
}

/// The other one stands still at any place of its look, and the store falls back meanwhile.
#[tokio::test(start_paused = true)]
async fn a_store_that_falls_back_while_another_migrator_looks_is_noticed() -> Result<()> {
    for polls in 0.. {
        let world = World::started().await?;
        let first = world.migration.state().await?.record;
        world.step(Phase::Both).await?;
        let slow = |inner: &MemoryStore| {
            let (is_cut_off, why) = (Arc::default(), ErrorKind::Denied);
            Arc::new(Altered(Away { inner: inner.clone(), is_cut_off, why }))
        };
        let another = Migration::new(slow(&world.old), slow(&world.new));
        let (mut told, mut is_fallen, mut is_over) = (0, false, false);
        let step = world.migration.step(Phase::New, |drain| {
            told += u32::from(drain.left > drain.whole / 2);
            if !std::mem::replace(&mut is_fallen, true) {
                let mut settling = pin!(another.settle());
                is_over = poll_times(settling.as_mut(), polls);
                assert!(poll_times(pin!(write(&world.new, Side::New, Some(&first))), 1));
                assert!(is_over || poll_times(settling.as_mut(), 1000));
            }
            world.clock.advance(drain.left);
        });
        assert_eq!(step.await?.record.phase, Phase::New);
        assert_eq!(told, 2, "clients may have read the old phase again, so that the drain begins anew: {polls} polls");
        if is_over {
            assert!(polls > 4, "it was never in the middle");
            return Ok(());
        }
    }
    Ok(())
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
        let next =
            Migration::new(Arc::new(Altered(moved.old.clone())), Arc::new(MemoryStore::new())).start(START).await;
        assert_eq!(next.expect_err("the last one is in the way").kind(), ErrorKind::Misconfigured);
        moved.old.read_only.store(0, Ordering::SeqCst);
        finishes().await?;
        for node in &moved.old.nodes {
            assert!(read(node, Side::Old).await?.is_some_and(|record| record.is_over));
        }
        assert_eq!(finishes().await.expect_err("over").kind(), ErrorKind::Misconfigured);
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

#[tokio::test(start_paused = true)]
async fn two_who_move_it_on_exclude_each_other() -> Result<()> {
    let world = World::started().await?;
    let back = world.step(Phase::Both).await?.next(Phase::Old, Fence::NONE)?;
    let advance = world.migration.step(Phase::New, |drain| {
        // The other goes back meanwhile.
        for (at, store) in [(Side::Old, &world.old), (Side::New, &world.new)] {
            let written = pin!(write(store, at, Some(&back))).poll(&mut Context::from_waker(Waker::noop()));
            assert!(matches!(written, Poll::Ready(Ok(()))));
        }
        world.clock.advance(drain.left);
    });
    let error = advance.await.expect_err("it is in the phase old by now");
    assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
    assert_eq!(world.migration.state().await?.record.phase, Phase::Old);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn fences_that_were_set_are_no_afterthought() -> Result<()> {
    let world = World::new();
    let above = |number: u64| Start { fence_above: Fence::new(number), ..START };
    let first = world.migration.start(above(1 << 40)).await?;
    for start in [above(1 << 40), above(1 << 30), START] {
        assert_eq!(world.migration.start(start).await?, first);
    }
    let error = world.migration.start(above(1 << 41)).await.expect_err("fences up to that may have been given");
    assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error}");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_store_that_is_away_stops_all_but_the_state() -> Result<()> {
    let world = World::started().await?;
    world.is_cut_off.store(true, Ordering::SeqCst);
    let state = world.migration.state().await?;
    assert!(matches!(state.has, [Ok(true), Err(_)]));
    assert!(world.migration.step(Phase::Both, |_| ()).await.is_err());
    assert_eq!(world.migration.state().await?.record.phase, Phase::Old);
    world.is_cut_off.store(false, Ordering::SeqCst);
    world.step(Phase::Both).await?;
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn holders_are_told_apart_and_keep_the_end_away() -> Result<()> {
    let world = World::started().await?;
    let plain = Locker::new(world.old.clone());
    let dual = Locker::new(Dual::connect(Arc::new(world.old.clone()), Arc::new(world.new.clone())).await?);
    let (theirs, ours) = (plain.lock("a").acquire().await?, dual.lock("b").ttl(START.max_ttl).acquire().await?);
    let seen = world.migration.holders().await?;
    let of = |name: &str| seen.iter().find(|seen| seen.key.as_str() == name).map(|seen| (seen.side, seen.phase));
    assert_eq!((of("a"), of("b")), (Some((Side::Old, None)), Some((Side::Old, Some(Phase::Old)))));
    assert!(seen.iter().all(|seen| !seen.holder.info.as_str().contains('~')));
    let advance = |drain: lockkit_core::migrate::Drain| world.clock.advance(drain.left);
    assert_eq!(world.migration.finish(advance).await.expect_err("b is held").kind(), ErrorKind::Unavailable);
    for guard in [theirs, ours] {
        assert_eq!(guard.release().await?, lockkit_core::Outcome::Released);
    }
    world.step(Phase::Both).await?;
    assert_eq!(world.migration.finish(advance).await.expect_err("both").kind(), ErrorKind::InvalidInput);
    world.step(Phase::New).await?;
    world.migration.clone().fences_are_set().finish(advance).await?;
    let [old, new] = world.records().await?.map(|record| record.expect("no record is ever removed"));
    assert!(old == new && old.is_over);
    assert_eq!(world.migration.finish(advance).await.expect_err("over").kind(), ErrorKind::Misconfigured);
    assert_eq!(world.step(Phase::Both).await.expect_err("over").kind(), ErrorKind::Misconfigured);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_step_between_other_stores_is_refused() -> Result<()> {
    let world = World::started().await?;
    let between = |old: &MemoryStore, new: &MemoryStore| Migration::new(Arc::new(old.clone()), Arc::new(new.clone()));
    let elsewhere = MemoryStore::with_clock(Arc::clone(&world.clock) as Arc<dyn Clock>);
    for wrong in [between(&world.old, &elsewhere), between(&elsewhere, &world.new), between(&world.new, &world.old)] {
        let error = wrong.step(Phase::Both, |_| ()).await.expect_err("not the stores that it was started with");
        assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error}");
        assert_eq!(world.migration.state().await?.record.phase, Phase::Old);
        assert_eq!(read(&elsewhere, Side::Old).await?, None);
    }
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn others_who_hold_locks_stop_a_step_unless_told_otherwise() -> Result<()> {
    let world = World::started().await?;
    let theirs = Locker::new(world.old.clone()).lock("a").acquire().await?;
    let error = world.migration.step(Phase::Both, |_| ()).await.expect_err("a plain client holds a");
    assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error}");
    let step = world.migration.clone().despite_others().step(Phase::Both, |_| ()).await?;
    assert_eq!(step.record.phase, Phase::Both);
    // One that comes in the middle of the drain is seen after it.
    assert_eq!(theirs.release().await?, lockkit_core::Outcome::Released);
    let late = Locker::new(world.old.clone());
    let mut guard = None;
    let error = world.migration.step(Phase::New, |drain| {
        if guard.is_none() {
            let lock = late.lock("late").no_renewal();
            let got = pin!(lock.try_acquire()).poll(&mut Context::from_waker(Waker::noop()));
            guard = if let Poll::Ready(Ok(got)) = got { got } else { None };
        }
        world.clock.advance(drain.left);
    });
    assert_eq!(error.await.expect_err("a plain client came").kind(), ErrorKind::Misconfigured);
    assert!(guard.is_some());
    assert_eq!(world.migration.state().await?.record.phase, Phase::Both);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn with_a_durable_home_the_way_back_needs_the_home_alone() -> Result<()> {
    let world = World::new();
    world.migration.start(Start { home_is_durable: true, ..START }).await?;
    world.step(Phase::Both).await?;
    world.is_cut_off.store(true, Ordering::SeqCst);
    let step = world.migration.step(Phase::Old, |_| panic!("no drain")).await?;
    assert_eq!(step.record.phase, Phase::Old);
    assert!(step.copied.is_err());
    world.is_cut_off.store(false, Ordering::SeqCst);
    // Repeated, it tells the other store.
    let told = world.step(Phase::Old).await?;
    assert_eq!(world.records().await?, [Some(told.clone()), Some(told)]);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_store_is_left_to_itself_once_its_fences_are_above_all_others() -> Result<()> {
    let world = World::started().await?;
    assert_eq!(world.migration.fences().await?, Fences::Higher);
    world.step(Phase::Both).await?;
    assert_eq!(world.migration.fences().await.expect_err("both").kind(), ErrorKind::InvalidInput);
    let floor = world.step(Phase::New).await?.floor;
    let advance = |drain: lockkit_core::migrate::Drain| world.clock.advance(drain.left);
    let Fences::HigherIn(time) = world.migration.fences().await? else { panic!("the floor is ahead of the clocks") };
    assert!(time > Duration::from_secs(3000) && time < Duration::from_secs(4000), "{time:?}");
    let error = world.migration.finish(advance).await.expect_err("its fences would fall");
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    world.migration.clone().fences_are_set().finish(advance).await?;
    let after = Locker::new(FenceAbove::new(floor, world.new.clone())).lock("never used").acquire().await?;
    assert!(after.fence() > floor);
    Ok(())
}

/// What is left of a migration is no obstacle to the next one, and tells it how far epochs and fences have got.
#[tokio::test(start_paused = true)]
async fn the_next_migration_goes_on_from_the_end_of_the_last_one() -> Result<()> {
    let world = World::started().await?;
    let advance = |drain: lockkit_core::migrate::Drain| world.clock.advance(drain.left);
    for phase in [Phase::Both, Phase::New, Phase::Both, Phase::Old] {
        world.step(phase).await?;
    }
    let late = world.migration.state().await?.record;
    world.migration.clone().fences_are_set().finish(advance).await?;
    let dual = || Dual::connect(Arc::new(world.old.clone()), Arc::new(world.new.clone()));
    assert!(dual().await.expect_err("over").to_string().contains("connect to the old store by itself"));
    let again = world.migration.start(START).await?;
    assert_eq!((again.epoch, again.floor, again.phase), (late.epoch + 2, late.floor, Phase::Old));
    assert!(again.floor > Fence::NONE && !again.is_of(&late));
    assert_eq!(world.records().await?, [Some(again.clone()), Some(again)]);
    // A client of the last one acts on nothing any more.
    assert_eq!(dual().await?.phase(), Phase::Old);
    world.migration.clone().fences_are_set().finish(advance).await?;

    // The old store of one can be the new one of another.
    let third = MemoryStore::with_clock(Arc::clone(&world.clock) as Arc<dyn Clock>);
    let onwards = Migration::new(Arc::new(third.clone()), Arc::new(world.old.clone()));
    assert_eq!(onwards.state().await.expect_err("not started").kind(), ErrorKind::Misconfigured);
    assert_eq!(onwards.finish(advance).await.expect_err("not started").kind(), ErrorKind::Misconfigured);
    let error = Dual::connect(Arc::new(third.clone()), Arc::new(world.old.clone())).await.expect_err("not started");
    assert!(error.to_string().contains("start one"), "{error}");
    let started = onwards.start(START).await?;
    assert_eq!(onwards.step(Phase::Both, advance).await?.record.epoch, started.epoch + 1);
    assert_eq!(world.migration.start(START).await.expect_err("it is in use").kind(), ErrorKind::Misconfigured);
    Ok(())
}

/// A command that stood still since before the migration was finished, and another began, writes nothing.
#[tokio::test(start_paused = true)]
async fn a_command_of_a_migration_that_is_over_writes_nothing() -> Result<()> {
    for starts in [false, true] {
        for polls in 0.. {
            let world = World::new();
            let slow = |inner: &MemoryStore| {
                let (is_cut_off, why) = (Arc::default(), ErrorKind::Denied);
                Arc::new(Altered(Away { inner: inner.clone(), is_cut_off, why }))
            };
            let another = Migration::new(slow(&world.old), slow(&world.new));
            if !starts {
                world.migration.start(START).await?;
                write(&world.old, Side::Old, None).await?;
            }
            let mut call = pin!(async { if starts { another.start(START).await } else { another.settle().await } });
            if poll_times(call.as_mut(), polls) {
                assert!(polls > 4, "it was never in the middle");
                break;
            }
            // Locks that the other asked for by the way are free by then.
            world.clock.advance(Duration::from_secs(60));
            if starts {
                world.migration.start(START).await?;
            }
            world.migration.clone().fences_are_set().finish(|drain| world.clock.advance(drain.left)).await?;
            world.migration.start(START).await?;
            let after = world.records().await?;
            drop(call.await);
            assert_eq!(world.records().await?, after, "after {polls} polls");
        }
    }
    Ok(())
}

/// Its home has its record by then, and the other store was in another migration meanwhile.
#[tokio::test(start_paused = true)]
async fn a_start_that_stood_still_is_not_written_over_a_later_end() -> Result<()> {
    let mut was_between = false;
    for polls in 0.. {
        let world = World::new();
        let mut start = pin!(world.migration.start(START));
        if poll_times(start.as_mut(), polls) {
            assert!(was_between, "it was never in the middle");
            return Ok(());
        }
        if let [Some(_), None] = world.records().await? {
            was_between = true;
            let third = MemoryStore::with_clock(Arc::clone(&world.clock) as Arc<dyn Clock>);
            let onwards = Migration::new(Arc::new(world.new.clone()), Arc::new(third)).fences_are_set();
            onwards.start(START).await?;
            onwards.finish(|drain| world.clock.advance(drain.left)).await?;
            let end = world.records().await?;
            let error = start.await.expect_err("the new store was in use");
            assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error}");
            assert_eq!(world.records().await?, end, "after {polls} polls");
        }
    }
    Ok(())
}
