//! Rule R2: a token whose release may have been sent is never asked for again.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use lockkit_core::{
    AcquireRequest, Attempt, Claim, Contention, Error, ErrorKind, LockStore, Locker, MemoryStore, Release, Result,
    StoreInfo, Token, Waiting,
};
use lockkit_testkit::{Alter, Altered, WithInfo};

/// What becomes of an acquisition.
#[derive(Clone, Copy, Debug)]
enum Fate {
    /// It takes effect, and its answer is lost.
    AnswerLost,
    /// It takes effect, and its answer comes when the lease is as good as over.
    AnswerLate,
    /// The store undoes it and says so.
    Burnt,
    /// Another is said to have the lock.
    Refused,
    /// The same, and by when that is heard, its turn has come.
    ItsTurn,
    /// It is refused before it is sent.
    NotSent,
    /// It has no answer, and takes effect after its release: a server that stood still had it in a buffer.
    EffectLate,
}

/// How late that is: after some releases.
const LATE: Duration = Duration::from_millis(400);

/// What a store was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asked {
    Acquire(Token),
    Release(Token),
}

/// The memory store, of which the first acquisitions meet a fate. It keeps a record of what it is asked.
#[derive(Clone, Debug)]
struct Fateful {
    inner: Altered<WithInfo<MemoryStore>>,
    fates: Arc<Mutex<VecDeque<Fate>>>,
    /// Whether releases come through.
    releases: Arc<AtomicBool>,
    asked: Arc<Mutex<Vec<Asked>>>,
}

impl Fateful {
    fn new(waiting: Waiting, fates: impl IntoIterator<Item = Fate>) -> Self {
        Self::with_info(fates, |info| info.capability.waiting = waiting)
    }

    fn with_info(fates: impl IntoIterator<Item = Fate>, change: impl FnOnce(&mut StoreInfo)) -> Self {
        Self {
            inner: Altered::with_info(MemoryStore::new(), change),
            fates: Arc::new(Mutex::new(fates.into_iter().collect())),
            releases: Arc::new(AtomicBool::new(true)),
            asked: Arc::default(),
        }
    }

    fn asked(&self) -> Vec<Asked> {
        self.asked.lock().expect("unpoisoned").clone()
    }

    fn tokens(&self) -> Vec<Token> {
        let token = |asked: Asked| if let Asked::Acquire(token) = asked { Some(token) } else { None };
        self.asked().into_iter().filter_map(token).collect()
    }
}

#[async_trait]
impl Alter for Fateful {
    fn inner(&self) -> &dyn LockStore {
        &self.inner
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        self.asked.lock().expect("unpoisoned").push(Asked::Acquire(request.claim.token));
        let fate = self.fates.lock().expect("unpoisoned").pop_front();
        let lost = Error::new(ErrorKind::TimedOut, "no answer").unknown_effect();
        match fate {
            None => self.inner.acquire(request).await,
            Some(Fate::AnswerLost) => self.inner.acquire(request).await.and(Err(lost)),
            Some(Fate::AnswerLate) => {
                let attempt = self.inner.acquire(request).await?;
                let Attempt::Granted(mut hold) = attempt else { return Ok(attempt) };
                hold.until = self.inner.info().clock.now();
                Ok(Attempt::Granted(hold))
            }
            Some(fate @ (Fate::Burnt | Fate::Refused | Fate::ItsTurn)) => {
                if matches!(fate, Fate::ItsTurn) {
                    self.inner.acquire(request).await?;
                }
                let burnt = matches!(fate, Fate::Burnt);
                Ok(Attempt::Contended(Contention { retry_after: Some(Duration::ZERO), holder: None, burnt }))
            }
            Some(Fate::EffectLate) => {
                let (inner, request) = (self.inner.clone(), request.clone());
                tokio::spawn(async move {
                    tokio::time::sleep(LATE).await;
                    inner.acquire(&request).await
                });
                Err(lost)
            }
            Some(Fate::NotSent) => Err(Error::new(ErrorKind::Unavailable, "connection refused")),
        }
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        self.asked.lock().expect("unpoisoned").push(Asked::Release(claim.token));
        if !self.releases.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::Unavailable, "connection refused"));
        }
        self.inner.release(claim).await
    }
}

#[tokio::test(start_paused = true)]
async fn a_new_token_after_an_unknown_outcome() -> Result<()> {
    for fate in [Fate::AnswerLost, Fate::AnswerLate] {
        let store = Fateful::new(Waiting::Notify, [fate]);
        let guard = Locker::new(Altered(store.clone())).lock("x").acquire().await?;
        let (asked, tokens) = (store.asked(), store.tokens());
        assert_ne!(tokens.first(), tokens.last(), "{fate:?}: {asked:?}");
        assert_eq!(tokens.last(), Some(&guard.token()));
        assert!(asked.contains(&Asked::Release(tokens[0])), "{fate:?} left a lease behind: {asked:?}");
    }
    Ok(())
}

/// Also on a store of which one half has sessions, as that of a migration may be: the other half tells nothing by them.
#[tokio::test]
async fn what_takes_effect_after_its_release_is_released_once_more() -> Result<()> {
    for session in [None, Some(Duration::from_secs(60))] {
        let store = Fateful::with_info([Fate::EffectLate], |info| info.capability.liveness.session = session);
        let locker = Locker::new(Altered(store.clone()));
        assert!(locker.lock("x").ttl(10 * LATE).try_acquire().await.is_err());
        // It would lapse after eleven times that, and others be woken.
        let other = Locker::new(store.inner.clone()).lock("x");
        tokio::time::sleep(2 * LATE).await;
        let guard = other.acquire_within(6 * LATE).await?;
        assert!(guard.is_some(), "a lease was left behind, with sessions of {session:?}");
        locker.shutdown(30 * LATE).await?;
    }
    Ok(())
}

/// A claim that queues is asked for again under the same token: the answer that one request's lease was released says nothing of
/// another request, which is still on its way.
#[tokio::test]
async fn what_takes_effect_after_the_release_of_an_earlier_request_is_released_once_more() -> Result<()> {
    for fate in [Fate::AnswerLost, Fate::EffectLate, Fate::ItsTurn] {
        let unheard = [fate, Fate::EffectLate].into_iter().chain(std::iter::repeat_n(Fate::NotSent, 1_000));
        let store = Fateful::new(Waiting::Queue, unheard);
        let locker = Locker::new(Altered(store.clone()));
        assert!(locker.lock("x").ttl(10 * LATE).acquire_within(LATE / 4).await.is_err());
        let [first, second, ..] = store.tokens()[..] else { panic!("it was not asked twice") };
        assert_eq!(first, second, "its place is its token");
        let other = Locker::new(store.inner.clone()).lock("x");
        tokio::time::sleep(2 * LATE).await;
        assert!(other.acquire_within(6 * LATE).await?.is_some(), "{fate:?}: a lease was left behind");
        locker.shutdown(30 * LATE).await?;
    }
    Ok(())
}

/// What the store releases late, by whatever way, is the old token's lease: the new one stays.
#[tokio::test(start_paused = true)]
async fn a_release_that_arrives_late_ends_no_other_lease() -> Result<()> {
    for fate in [Fate::AnswerLost, Fate::AnswerLate, Fate::Burnt] {
        let store = Fateful::new(Waiting::Notify, [fate]);
        let locker = Locker::new(Altered(store.clone()));
        let guard = locker.lock("x").acquire().await?;
        let [first, ..] = store.tokens()[..] else { panic!("nothing was asked") };
        locker.break_lock("x", first).await?;
        assert!(Locker::new(store.inner.clone()).lock("x").try_acquire().await?.is_none(), "{fate:?}: two holders");
        drop(guard);
    }
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_new_token_after_the_store_burnt_one() -> Result<()> {
    for waiting in [Waiting::Notify, Waiting::Poll, Waiting::Queue] {
        let store = Fateful::new(waiting, [Fate::Burnt, Fate::Burnt]);
        let _guard = Locker::new(Altered(store.clone())).lock("x").acquire().await?;
        let tokens = store.tokens();
        assert_eq!(tokens.len(), 3, "{waiting:?}");
        assert!(tokens[0] != tokens[1] && tokens[1] != tokens[2] && tokens[0] != tokens[2], "{waiting:?}");
    }
    Ok(())
}

/// What a store undoes after its refusal, whether it says so or not, ends no later attempt of the same acquisition.
#[tokio::test(start_paused = true)]
async fn a_new_token_after_each_refusal_unless_it_keeps_a_place() -> Result<()> {
    for (waiting, keeps) in [(Waiting::Notify, false), (Waiting::Poll, false), (Waiting::Queue, true)] {
        let store = Fateful::new(waiting, [Fate::Refused, Fate::Refused]);
        let guard = Locker::new(Altered(store.clone())).lock("x").acquire().await?;
        let tokens = store.tokens();
        assert_eq!((tokens.len(), tokens.last()), (3, Some(&guard.token())), "{waiting:?}");
        for (one, next) in tokens.iter().zip(&tokens[1..]) {
            assert_eq!(one == next, keeps, "{waiting:?}: {tokens:?}");
        }
    }
    Ok(())
}

/// A place in a queue is the token's: a new one would have to stand at the end.
#[tokio::test(start_paused = true)]
async fn a_claim_that_queues_keeps_its_token_through_an_error() -> Result<()> {
    let store = Fateful::new(Waiting::Queue, [Fate::NotSent, Fate::AnswerLost]);
    let _guard = Locker::new(Altered(store.clone())).lock("x").acquire().await?;
    let [first, second, third] = store.tokens()[..] else { panic!("three acquisitions: {:?}", store.asked()) };
    assert!(first == second && second == third);
    Ok(())
}

/// The lease of an earlier claim of the same acquisition, of which nobody heard, is in the way: that is no answer that
/// another had the lock (rule R6). Once it is released, what the store says counts.
#[tokio::test]
async fn its_own_earlier_claim_is_no_other_holder() -> Result<()> {
    for fate in [Fate::AnswerLost, Fate::AnswerLate] {
        let store = Fateful::new(Waiting::Notify, [fate]);
        store.releases.store(false, Ordering::SeqCst);
        let locker = Locker::new(Altered(store.clone()));
        let wait = Duration::from_millis(200);
        let answer = locker.lock("x").acquire_within(wait).await;
        assert_eq!(answer.expect_err("nobody else ever asked").kind(), ErrorKind::TimedOut, "{fate:?}");

        store.releases.store(true, Ordering::SeqCst);
        let guard = locker.lock("x").acquire().await?;
        store.fates.lock().expect("unpoisoned").push_back(Fate::NotSent);
        let other = Locker::new(Altered(store.clone()));
        assert!(other.lock("x").acquire_within(wait).await?.is_none(), "{fate:?}: held, and nothing is left in doubt");
        drop(guard);
    }
    Ok(())
}
