//! The shadow of the phase old: the new store is asked for what the old one has granted, too, and its answers decide nothing.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{
    runtime::Handle,
    sync::{Semaphore, watch},
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};

use super::{
    pair::aside,
    record::unmark,
    tally::{Answer, Answers},
};
use crate::{
    AcquireRequest, Attempt, Claim, Effect, HolderInfo, LockStore, Renewal, Renewed, Token, store::unpoisoned,
};

/// How many leases one client has in the shadow at once, with those that it is about to give back. A store that does not answer must
/// not fill the memory.
const MOST: usize = 4096;
/// How often a release is repeated that was not answered; where no time ends a lease, with growing pauses up to the longest.
const AGAIN: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// What a client has at the new store in the shadow.
///
/// Each lease has a token of its own, and nothing of it is in the [claims](super::claims) that decide: all that it can do is to be
/// in the way of another for a while, at a store where nobody is waited for.
#[derive(Debug)]
pub(super) struct Shadow {
    leases: Mutex<HashMap<Token, ShadowLease>>,
    is_used: AtomicBool,
    /// The runtime that the store was connected on: those that locks are taken on may end. Without one nothing is followed.
    home: Option<Handle>,
    /// Which migration it is.
    id: Token,
    room: Arc<Semaphore>,
    pub(super) answers: Arc<Answers>,
}

/// A lease that follows the one of the old store. It is given back once the sender is dropped.
#[derive(Debug)]
struct ShadowLease {
    renewals: watch::Sender<Duration>,
    followed: JoinHandle<()>,
}

impl Shadow {
    pub(super) fn new(id: Token) -> Self {
        Self {
            leases: Mutex::default(),
            is_used: AtomicBool::new(false),
            home: Handle::try_current().ok(),
            id,
            room: Arc::new(Semaphore::new(MOST)),
            answers: Arc::default(),
        }
    }

    /// Has a lease of the old store followed by one of the new `store`, or renews the one that follows it.
    pub(super) fn follow(
        &self,
        store: &Arc<dyn LockStore>,
        claim: &Claim,
        ttl: Duration,
        holder: impl FnOnce() -> HolderInfo,
    ) {
        let Some(home) = &self.home else { return };
        self.is_used.store(true, Ordering::Release);
        let mut leases = self.leases();
        if let Some(lease) = leases.get(&claim.token) {
            lease.renewals.send_replace(ttl);
            return;
        }
        let Ok(place) = Arc::clone(&self.room).try_acquire_owned() else {
            self.answers.note(Answer::Failed);
            return;
        };
        let (renewals, renewed) = watch::channel(ttl);
        let (store, answers) = (Arc::clone(store), Arc::clone(&self.answers));
        let (claim, room) = (claim.clone(), Arc::clone(&self.room));
        let (token, follower) = (claim.token, Follower { store, answers, room, claim, holder: holder(), id: self.id });
        let followed = home.spawn(async move {
            follower.run(renewed).await;
            drop(place);
        });
        leases.insert(token, ShadowLease { renewals, followed });
    }

    /// Gives back what follows a lease, in the background.
    pub(super) fn end(&self, claim: &Claim) {
        drop(self.take(claim));
    }

    /// The same, and waits until it is given back, for as long as `bound`.
    pub(super) async fn end_within(&self, claim: &Claim, bound: Duration) {
        let Some(ShadowLease { renewals, followed }) = self.take(claim) else { return };
        drop(renewals);
        drop(timeout(bound, followed).await);
    }

    fn take(&self, claim: &Claim) -> Option<ShadowLease> {
        // Nobody pays for a shadow that there never was.
        if self.is_used.load(Ordering::Acquire) { self.leases().remove(&claim.token) } else { None }
    }

    fn leases(&self) -> MutexGuard<'_, HashMap<Token, ShadowLease>> {
        unpoisoned(&self.leases)
    }
}

impl Drop for Shadow {
    fn drop(&mut self) {
        self.room.close();
    }
}

/// Takes and gives back a lease of the new store.
struct Follower {
    store: Arc<dyn LockStore>,
    answers: Arc<Answers>,
    /// Closed when the migration is not used any more.
    room: Arc<Semaphore>,
    claim: Claim,
    holder: HolderInfo,
    id: Token,
}

impl Follower {
    async fn run(mut self, mut renewals: watch::Receiver<Duration>) {
        let ttl = *renewals.borrow_and_update();
        // Twice: a client that had the lock before may be about to give it back.
        for last in [false, true] {
            // Random numbers fail on no system that has given the first one.
            let Ok(token) = Token::random() else { return };
            self.claim.token = token;
            let asked = Instant::now();
            match self.store.acquire(&self.request(ttl)).await {
                Ok(Attempt::Granted(_)) => {
                    self.answers.note(Answer::Granted(asked.elapsed()));
                    self.renew(&mut renewals).await;
                    return self.give_back(ttl).await;
                }
                Ok(Attempt::Contended(contention)) => {
                    if !contention.burnt {
                        self.give_back(ttl).await;
                    }
                    if !last {
                        sleep(aside(ttl)).await;
                    } else if !is_own(contention.holder.as_ref(), &self.id) {
                        self.answers.note(Answer::Refused);
                    }
                }
                Err(error) => {
                    self.answers.note(Answer::Failed);
                    if error.effect() == Effect::Unknown {
                        self.give_back(ttl).await;
                    }
                    return;
                }
            }
        }
    }

    fn request(&self, ttl: Duration) -> AcquireRequest {
        AcquireRequest { wait: aside(ttl), ..AcquireRequest::new(self.claim.clone(), ttl, self.holder.clone()) }
    }

    /// Renews the lease whenever that of the old store is renewed, until that is released, or was not renewed for twice as long as it
    /// lasts: nobody may come any more to say that it is over.
    async fn renew(&self, renewals: &mut watch::Receiver<Duration>) {
        let mut ttl = *renewals.borrow();
        while let Ok(Ok(())) = timeout(2 * ttl, renewals.changed()).await {
            ttl = *renewals.borrow_and_update();
            let renewal = Renewal::new(self.claim.clone(), ttl);
            match self.store.renew(&[renewal]).await.pop() {
                Some(Ok(Renewed::Held(_))) => {}
                Some(Ok(Renewed::Lost(_))) => return self.answers.note(Answer::Lost),
                Some(Err(_)) | None => self.answers.note(Answer::Failed),
            }
        }
    }

    /// Releases it, and again until that is answered: in both stores it would be in the way. Leases that end by time have lapsed then; any
    /// other is released until the store answers, or goes with its session when the migration is not used any more.
    async fn give_back(&self, ttl: Duration) {
        let lapse = self.store.info().capability.liveness.session.is_none().then(|| Instant::now() + 2 * ttl);
        let mut pause = AGAIN;
        while self.store.release(&self.claim).await.is_err() {
            if lapse.map_or(self.room.is_closed(), |lapse| Instant::now() >= lapse) {
                return;
            }
            sleep(pause).await;
            if lapse.is_none() {
                pause = (2 * pause).min(LONGEST_PAUSE);
            }
        }
    }
}

/// Whether it is another client of the migration that has the lock: one that is about to give it back, or was killed. That is what
/// the phase both has to do with as well, and says nothing against the store.
pub(super) fn is_own(holder: Option<&HolderInfo>, id: &Token) -> bool {
    holder.is_some_and(|holder| unmark(holder, id).1.is_some())
}
