//! Many leases on a store that renews a few thousand a second: after an alarm for all of them, and after the process
//! stood still, none is lost that could be saved.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use lockkit_core::{
    Claim, Error, ErrorKind, Guard, LockStore, Locker, LossReason, Outcome, Release, Renewal, Renewed, Result,
};
use lockkit_sim::SimStore;
use lockkit_testkit::{Alter, Altered};
use tokio::time::{Instant, advance, sleep, sleep_until};

const TTL: Duration = Duration::from_secs(30);
/// How many leases the store renews in a second.
const RATE: u32 = 3_300;
const LEASES: usize = 12_000;

/// A store that works off renewals one after the other, also those that nobody waits for any more.
#[derive(Clone, Debug)]
struct Slow {
    inner: SimStore,
    /// Locks whose name starts with this are on a server that does not answer; the store gives up on it after a while.
    dead: Option<(&'static str, Duration)>,
    busy_until: Arc<Mutex<Instant>>,
    at_once: Arc<AtomicUsize>,
    most_at_once: Arc<AtomicUsize>,
    releases: Arc<AtomicUsize>,
    most_releases: Arc<AtomicUsize>,
}

impl Slow {
    fn new() -> Self {
        Self {
            inner: SimStore::new(),
            dead: None,
            busy_until: Arc::new(Mutex::new(Instant::now())),
            at_once: Arc::default(),
            most_at_once: Arc::default(),
            releases: Arc::default(),
            most_releases: Arc::default(),
        }
    }

    /// When the store will have done with so many more.
    fn done(&self, renewals: usize) -> Instant {
        let mut busy_until = self.busy_until.lock().expect("unpoisoned");
        let work = Duration::from_secs(1) * u32::try_from(renewals).expect("few") / RATE;
        *busy_until = Instant::now().max(*busy_until) + work;
        *busy_until
    }
}

#[async_trait]
impl Alter for Slow {
    fn inner(&self) -> &dyn LockStore {
        &self.inner
    }

    async fn renew(&self, renewals: &[Renewal]) -> Vec<Result<Renewed>> {
        let _asked = Asked::new(&self.at_once, &self.most_at_once, renewals.len());
        sleep_until(self.done(renewals.len())).await;
        let mut answers = self.inner.renew(renewals).await;
        if let Some((dead, bound)) = self.dead {
            let is_dead = |renewal: &Renewal| renewal.claim.key.as_str().starts_with(dead);
            let lost = answers.iter_mut().zip(renewals).filter(|(_, renewal)| is_dead(renewal));
            if lost.map(|(answer, _)| *answer = Err(silence())).count() > 0 {
                sleep(bound).await;
            }
        }
        answers
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        let _asked = Asked::new(&self.releases, &self.most_releases, 1);
        sleep(Duration::from_millis(10)).await;
        self.inner.release(claim).await
    }
}

fn silence() -> Error {
    Error::new(ErrorKind::TimedOut, "no answer").unknown_effect()
}

/// Counts what is asked for and not answered.
struct Asked<'a>(&'a AtomicUsize, usize);

impl<'a> Asked<'a> {
    fn new(count: &'a AtomicUsize, most: &AtomicUsize, more: usize) -> Self {
        most.fetch_max(count.fetch_add(more, Ordering::SeqCst) + more, Ordering::SeqCst);
        Self(count, more)
    }
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(self.1, Ordering::SeqCst);
    }
}

/// Leases whose renewals are spread over the time between two of them, as those of a service are.
async fn many(locker: &Locker, leases: usize, ttl: Duration) -> Result<Vec<Guard>> {
    let mut guards = Vec::with_capacity(leases);
    for number in 0..leases {
        guards.push(locker.lock(format!("{ttl:?}/{number}")).ttl(ttl).acquire().await?);
        if number % 120 == 119 {
            sleep(ttl / 3 / u32::try_from(leases / 120).expect("few")).await;
        }
    }
    sleep(ttl).await;
    assert_eq!(lost(&guards), 0, "before anything happened");
    Ok(guards)
}

fn lost(guards: &[Guard]) -> usize {
    guards.iter().filter(|guard| !guard.is_held()).count()
}

fn raise_all(locker: &Locker) {
    locker.info().alarm.as_ref().expect("an alarm").raise_all();
}

#[tokio::test(start_paused = true)]
async fn an_alarm_for_all_loses_none() -> Result<()> {
    let store = Slow::new();
    let locker = Locker::new(Altered(store.clone()));
    let guards = many(&locker, LEASES, TTL).await?;
    raise_all(&locker);
    sleep(TTL * 2).await;
    assert_eq!(lost(&guards), 0, "of {LEASES}");
    let most = store.most_at_once.load(Ordering::SeqCst);
    assert!(most <= 2_048, "{most} were asked for at once");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_pause_of_the_process_loses_none() -> Result<()> {
    let locker = Locker::new(Altered(Slow::new()));
    let guards = many(&locker, LEASES, TTL).await?;
    advance(Duration::from_secs(12)).await;
    sleep(TTL * 2).await;
    assert_eq!(lost(&guards), 0, "of {LEASES}");
    Ok(())
}

/// The earliest deadline comes first: only those are lost whose deadline is past, or comes before the first answers.
#[tokio::test(start_paused = true)]
async fn after_a_long_pause_those_are_saved_that_can_be() -> Result<()> {
    let store = Slow::new();
    let locker = Locker::new(Altered(store.clone()));
    let guards = many(&locker, LEASES, TTL).await?;
    advance(Duration::from_secs(25)).await;
    let soon = Duration::from_millis(100);
    let (gone, doomed) = (lost(&guards), guards.iter().filter(|guard| guard.remaining() < soon).count());
    assert!(gone > 1_000 && doomed < LEASES * 3 / 4, "{gone} are lost, {doomed} will be");
    sleep(TTL * 2).await;
    assert!(lost(&guards) <= doomed, "{} of {LEASES} were lost, not {doomed}", lost(&guards));
    let most = store.most_releases.load(Ordering::SeqCst);
    assert!((1..=64).contains(&most), "{most} lost leases were released at once");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn long_leases_do_not_cost_the_short_ones_their_deadline() -> Result<()> {
    let locker = Locker::new(Altered(Slow::new()));
    let long = many(&locker, 8_000, TTL).await?;
    let short = many(&locker, 240, Duration::from_millis(1500)).await?;
    raise_all(&locker);
    sleep(Duration::from_secs(10)).await;
    advance(Duration::from_millis(700)).await;
    sleep(TTL * 2).await;
    assert_eq!((lost(&long), lost(&short)), (0, 0));
    Ok(())
}

/// All leases end at about the same time, and those that can't be saved come first.
#[tokio::test(start_paused = true)]
async fn leases_in_doubt_are_asked_for_beside_the_others() -> Result<()> {
    let ttl = Duration::from_secs(6);
    let mut store = Slow::new();
    store.dead = Some(("dead", ttl / 4));
    let locker = Locker::new(Altered(store));
    let (mut dead, mut live) = (Vec::new(), Vec::new());
    // More than the calls of one lane are about.
    for number in 0..2_400 {
        dead.push(locker.lock(format!("dead/{number}")).ttl(ttl).acquire().await?);
    }
    for number in 0..600 {
        live.push(locker.lock(format!("live/{number}")).ttl(ttl).acquire().await?);
    }
    sleep(ttl * 3).await;
    assert_eq!((lost(&dead), lost(&live)), (dead.len(), 0));
    Ok(())
}

/// The calls for long leases, each of which may take three seconds, are not in the way of leases that do not last that long.
#[tokio::test(start_paused = true)]
async fn calls_for_long_leases_leave_room_for_short_ones() -> Result<()> {
    let mut store = Slow::new();
    store.dead = Some(("long", Duration::from_secs(5)));
    let locker = Locker::new(Altered(store));
    let (mut long, mut short) = (Vec::new(), Vec::new());
    for number in 0..1_500 {
        long.push(locker.lock(format!("long/{number}")).ttl(TTL).acquire().await?);
    }
    for number in 0..10 {
        short.push(locker.lock(format!("short/{number}")).ttl(Duration::from_secs(1)).acquire().await?);
    }
    sleep(TTL / 2).await;
    assert_eq!((lost(&long), lost(&short)), (0, 0));
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn what_was_lost_is_noticed_soon_after_an_alarm_for_all() -> Result<()> {
    let store = Slow::new();
    let locker = Locker::new(Altered(store.clone()));
    let guards = many(&locker, LEASES, TTL).await?;
    for guard in guards.iter().step_by(1_000) {
        store.inner.expire(guard.key().as_str()).await?;
    }
    raise_all(&locker);
    let start = Instant::now();
    for guard in guards.iter().step_by(1_000) {
        assert_eq!(guard.lost().await, LossReason::Gone);
    }
    // The store needs 3.6 s for all of them.
    assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
    assert_eq!(lost(&guards), LEASES.div_ceil(1_000));
    Ok(())
}

/// As in a cluster of which one server is away.
#[tokio::test(start_paused = true)]
async fn leases_whose_server_is_silent_cost_no_others() -> Result<()> {
    let ttl = Duration::from_secs(6);
    let mut store = Slow::new();
    store.dead = Some(("5s", ttl / 4));
    let locker = Locker::new(Altered(store.clone()));
    let whole = many(&locker, 1_200, ttl).await?;
    let mut dead = Vec::new();
    for number in 0..240 {
        dead.push(locker.lock(format!("5s/{number}")).ttl(ttl - Duration::from_secs(1)).acquire().await?);
    }
    sleep(ttl * 3).await;
    assert_eq!((lost(&dead), lost(&whole)), (dead.len(), 0));
    Ok(())
}

/// Two guards of an owner are released at once: what writes the depth for the one comes behind the release of the other.
#[tokio::test(start_paused = true)]
async fn a_nested_hold_was_held_also_when_the_last_release_overtakes_its_own() -> Result<()> {
    let store = Slow::new();
    let lock = Locker::new(Altered(store.clone())).owner().lock("x");
    let (outer, inner) = (lock.acquire().await?, lock.acquire().await?);
    *store.busy_until.lock().expect("unpoisoned") += Duration::from_millis(100);
    let nested = tokio::spawn(inner.release());
    // Its renewal is on its way.
    tokio::task::yield_now().await;
    assert_eq!(outer.release().await?, Outcome::Released);
    assert_eq!(nested.await.expect("no panic")?, Outcome::Released);
    Ok(())
}
