//! Many tasks, a store that fails in every way, futures dropped at every moment: whoever believed to hold a lock did so
//! alone, fences grew, and in the end nothing is left.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use lockkit_core::{
    AcquireRequest, Attempt, Claim, Clock, Error, ErrorKind, Fence, HandOver, LockStore, Locker, MemoryStore, Moment,
    Outcome, Query, Release, Renewal, Renewed, Result, SystemClock,
};
use lockkit_testkit::{Alter, Altered};

/// A store that fails before, after and long before the effect.
#[derive(Debug)]
struct Flaky {
    inner: MemoryStore,
    dice: Dice,
}

#[derive(Debug)]
struct Dice(AtomicU64);

impl Dice {
    fn roll(&self, sides: u64) -> u64 {
        // SplitMix64: good enough, and reproducible from the seed but for scheduling.
        let mut z = self.0.fetch_add(0x9E37_79B9_7F4A_7C15, Ordering::Relaxed);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % sides
    }
}

fn down() -> Error {
    Error::new(ErrorKind::Unavailable, "down")
}

#[async_trait]
impl Alter for Flaky {
    fn inner(&self) -> &dyn LockStore {
        &self.inner
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        match self.dice.roll(20) {
            0 => return Err(down()),
            1 => {
                drop(self.inner.acquire(request).await);
                return Err(down().unknown_effect());
            }
            2 => {
                let (inner, request) = (self.inner.clone(), AcquireRequest { wait: Duration::ZERO, ..request.clone() });
                let later = Duration::from_millis(self.dice.roll(30));
                tokio::spawn(async move {
                    tokio::time::sleep(later).await;
                    drop(inner.acquire(&request).await);
                });
                return Err(Error::new(ErrorKind::TimedOut, "late").unknown_effect());
            }
            3 => tokio::time::sleep(Duration::from_millis(self.dice.roll(5))).await,
            _ => {}
        }
        self.inner.acquire(request).await
    }

    async fn renew(&self, renewals: &[Renewal]) -> Vec<Result<Renewed>> {
        match self.dice.roll(5) {
            0 => renewals.iter().map(|_| Err(down())).collect(),
            1 => {
                drop(self.inner.renew(renewals).await);
                renewals.iter().map(|_| Err(down().unknown_effect())).collect()
            }
            2 => {
                tokio::time::sleep(Duration::from_millis(self.dice.roll(150))).await;
                self.inner.renew(renewals).await
            }
            _ => self.inner.renew(renewals).await,
        }
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        match self.dice.roll(10) {
            0 => return Err(down()),
            1 => {
                drop(self.inner.release(claim).await);
                return Err(down().unknown_effect());
            }
            _ => {}
        }
        self.inner.release(claim).await
    }
}

/// When somebody surely believed to hold a lock, and with which fence.
type Beliefs = Arc<Mutex<Vec<(usize, Moment, Moment, Fence)>>>;

const KEYS: usize = 3;

async fn worker(lockers: Vec<Locker>, dice: Arc<Dice>, beliefs: Beliefs, until: Moment) {
    while SystemClock.now() < until {
        let key = dice.roll(KEYS as u64) as usize;
        let mut lock = lockers[dice.roll(lockers.len() as u64) as usize].lock(format!("key {key}"));
        lock = lock.ttl(Duration::from_millis([100, 150][dice.roll(2) as usize]));
        if dice.roll(4) == 0 {
            lock = lock.no_renewal();
        }
        let got = match dice.roll(4) {
            0 => lock.try_acquire().await,
            1 => lock.acquire_within(Duration::from_millis(dice.roll(60))).await,
            2 => lock.acquire().await.map(Some),
            _ => {
                let patience = Duration::from_micros(dice.roll(20_000));
                tokio::time::timeout(patience, lock.acquire()).await.unwrap_or_else(|_| Err(down())).map(Some)
            }
        };
        let guard = match got {
            Ok(Some(guard)) => guard,
            Ok(None) => continue,
            // Nothing else went wrong, least of all in this process.
            Err(error) => {
                assert!(error.is_retryable(), "{error}");
                continue;
            }
        };
        let start = SystemClock.now();
        match dice.roll(10) {
            0 => tokio::time::sleep(Duration::from_millis(dice.roll(250))).await,
            1..4 => tokio::task::yield_now().await,
            _ => {}
        }
        let end = SystemClock.now();
        if guard.is_held() {
            beliefs.lock().expect("unpoisoned").push((key, start, end, guard.fence()));
        }
        match dice.roll(3) {
            0 => drop(guard),
            1 => drop(guard.release().await),
            _ => drop(tokio::time::timeout(Duration::from_micros(dice.roll(200)), guard.release()).await),
        }
    }
}

async fn storm(seed: u64) {
    let store = MemoryStore::new();
    let dice = Arc::new(Dice(AtomicU64::new(seed)));
    let locker = |rule| {
        let flaky = Flaky { inner: store.clone(), dice: Dice(AtomicU64::new(dice.roll(u64::MAX))) };
        Locker::builder(Altered(flaky)).hand_over(rule).patience(Duration::from_millis(200)).build()
    };
    let lockers = vec![locker(HandOver::default()), locker(HandOver::default()), locker(HandOver::OFF)];
    let beliefs = Beliefs::default();
    let until = SystemClock.now() + Duration::from_secs(4);
    let workers: Vec<_> = (0..24)
        .map(|_| tokio::spawn(worker(lockers.clone(), Arc::clone(&dice), Arc::clone(&beliefs), until)))
        .collect();
    for worker in workers {
        worker.await.expect("a worker panicked");
    }
    let mut beliefs = std::mem::take(&mut *beliefs.lock().expect("unpoisoned"));
    assert!(beliefs.len() > 200, "only {} locks were held", beliefs.len());
    beliefs.sort_by_key(|(key, start, ..)| (*key, *start));
    for pair in beliefs.windows(2).filter(|pair| pair[0].0 == pair[1].0) {
        let ((key, _, end, before), (_, start, _, after)) = (pair[0], pair[1]);
        assert!(end <= start, "two believed to hold key {key} at once, with fences {before} and {after}");
        assert!(before < after, "fence {after} came after {before} for key {key}");
    }
    for locker in &lockers {
        locker.shutdown(Duration::from_secs(10)).await.expect("releases hang");
    }
    tokio::time::sleep(Duration::from_millis(300)).await;
    let left = store.inspect(&Query::Prefix(String::new())).await.expect("asked");
    assert!(left.is_empty(), "left behind: {left:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_storm_on_two_threads() {
    let seed = SystemClock.now().as_nanos();
    println!("seed {seed}");
    storm(seed).await;
}

#[tokio::test]
async fn a_storm_on_one_thread() {
    let seed = SystemClock.now().as_nanos();
    println!("seed {seed}");
    storm(seed).await;
}

/// Two processes, each with one task that takes the lock again at once. Whoever had it is at work already when the other
/// is only being woken.
#[tokio::test]
async fn a_loop_does_not_keep_the_lock_to_itself() -> Result<()> {
    const GRANTS: usize = 60;
    let store = MemoryStore::new();
    let grants = Arc::new(Mutex::new(Vec::new()));
    let mut loops = Vec::new();
    for who in 0..2 {
        let (locker, grants) = (Locker::new(store.clone()), Arc::clone(&grants));
        loops.push(tokio::spawn(async move {
            while grants.lock().expect("unpoisoned").len() < GRANTS {
                let guard = locker.lock("hot").acquire().await?;
                grants.lock().expect("unpoisoned").push(who);
                tokio::time::sleep(Duration::from_millis(3)).await;
                assert_eq!(guard.release().await?, Outcome::Released);
            }
            Ok::<_, lockkit_core::Error>(())
        }));
    }
    for task in loops {
        task.await.expect("no panic")?;
    }
    let first = grants.lock().expect("unpoisoned").iter().filter(|who| **who == 0).count();
    assert!((GRANTS / 4..=GRANTS * 3 / 4).contains(&first), "one had {first} of {GRANTS} grants");
    Ok(())
}
