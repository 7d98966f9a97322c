//! Several locks that are held together.

use std::{
    future::{Future, poll_fn},
    pin::Pin,
    sync::Arc,
    task::Poll,
    time::Duration,
};

use tokio::sync::OnceCell;

use crate::{
    Error, Guard, Lock, LossReason, Outcome, Result, Status,
    engine::BackgroundTask,
    store::{Identity, join_all},
};

/// Several locks, of one store or of several: all of them are held, or none.
///
/// They are taken one after the other, in an order that is the same for all who want any of them: of one store by name, and
/// among stores by their [identities](crate::store::identity). So no two wait for each other, whatever order they name the locks
/// in, as long as nobody holds one lock of a set while it asks for others, and all name a lock through the same prefix. A
/// lock that is named twice is taken once.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> lockkit_core::Result<()> {
/// use lockkit_core::{Locker, MemoryStore};
///
/// let locker = Locker::new(MemoryStore::new());
/// let both = locker.multi(["account/2", "account/1"]).acquire().await?;
/// let fences: Vec<_> = both.guards().iter().map(|guard| guard.fence()).collect();
/// assert!(locker.lock("account/1").try_acquire().await?.is_none());
/// both.release().await?;
/// # assert_eq!(fences.len(), 2);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[must_use]
pub struct MultiLock {
    locks: Vec<Lock>,
    /// The places of the locks, without those that are there twice, in the order in which they are taken.
    order: OnceCell<Vec<usize>>,
}

/// Locks that are held together. Dropping it releases all of them in the background.
#[derive(Debug)]
#[must_use = "dropping the guard releases the locks"]
pub struct MultiGuard {
    /// In the order in which they were named.
    guards: Vec<Guard>,
}

impl MultiLock {
    /// These locks, each with its own settings; they may be of several lockers.
    pub fn new(locks: impl IntoIterator<Item = Lock>) -> Self {
        Self { locks: locks.into_iter().collect(), order: OnceCell::new() }
    }

    /// Acquires all of them, waiting as long as it takes. Those that were taken are held, and renewed, while it waits for the others.
    ///
    /// # Errors
    /// As those of [`Lock::acquire`], for any of them; those that were taken are released. [`Lost`](crate::ErrorKind::Lost) as soon as one is lost
    /// while another is waited for. `InvalidInput` for no lock at all, for one that is named twice in different modes, and for one that
    /// is [kept](Lock::keep_for) for a time. With
    /// locks of several stores also those of [`identity`](crate::store::identity): all nodes of a quorum have to be up once for that.
    ///
    /// # Cancellation
    /// As [`Lock::acquire`]; those that were taken are released in the background. As long as the future is kept without being polled, they are
    /// held and renewed: drop what you do not poll.
    pub async fn acquire(&self) -> Result<MultiGuard> {
        let order = self.order().await?;
        let _under_way = self.under_way();
        let mut taken = Vec::new();
        for place in order {
            let guard = while_held(&taken, self.locks[*place].acquire()).await?;
            taken.push((*place, guard));
        }
        MultiGuard::of(taken).held()
    }

    /// Acquires all of them if all are free.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire), but without patience.
    ///
    /// # Cancellation
    /// As [`acquire`](Self::acquire).
    pub async fn try_acquire(&self) -> Result<Option<MultiGuard>> {
        self.acquire_within(Duration::ZERO).await
    }

    /// Acquires all of them if that is possible within `wait`; `None` if another had one all the while. By then those that were
    /// taken are released, as far as the stores could be told. It does not count how long it takes to ask several stores, once, for their
    /// [identities](crate::store::identity).
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire).
    ///
    /// # Cancellation
    /// As [`acquire`](Self::acquire).
    pub async fn acquire_within(&self, wait: Duration) -> Result<Option<MultiGuard>> {
        let order = self.order().await?;
        let _under_way = self.under_way();
        // Of locks on several clocks, the first one's counts. There is one, or they had no order.
        let now = || self.locks[0].now();
        let (started, mut taken) = (now(), Vec::new());
        for place in order {
            let waited = now().since(started);
            let answer = while_held(&taken, self.locks[*place].acquire_within_rest(wait, waited)).await?;
            match answer {
                Some(guard) => taken.push((*place, guard)),
                None => {
                    // If a store can't be told, that goes on in the background.
                    drop(MultiGuard::of(taken).release().await);
                    return Ok(None);
                }
            }
        }
        MultiGuard::of(taken).held().map(Some)
    }

    /// Has a shutdown wait until what was taken is given back. To be dropped after that.
    fn under_way(&self) -> Vec<BackgroundTask> {
        self.locks.iter().map(Lock::under_way).collect()
    }

    async fn order(&self) -> Result<&Vec<usize>> {
        self.order.get_or_try_init(|| self.sort()).await
    }

    async fn sort(&self) -> Result<Vec<usize>> {
        let Some(first) = self.locks.first() else {
            return Err(Error::invalid("a lock of several has at least one"));
        };
        if let Some(kept) = self.locks.iter().find(|lock| lock.is_kept()) {
            // Those that are given back because another was not to be had would be kept.
            let message = format!("the lock {:?} is one of several: it can't be kept for a time", kept.key()?.as_str());
            return Err(Error::invalid(message));
        }
        // One store need not be told from others.
        let mut stores: Vec<(&Lock, Option<Identity>)> = vec![(first, None)];
        if !self.locks.iter().all(|lock| is_same(lock, first)) {
            stores.clear();
            for lock in &self.locks {
                if !stores.iter().any(|(known, _)| is_same(lock, known)) {
                    stores.push((lock, Some(lock.store_identity().await?)));
                }
            }
        }
        let store_of = |lock: &Lock| stores.iter().find(|(known, _)| is_same(lock, known)).and_then(|(_, id)| *id);
        let mut order = Vec::with_capacity(self.locks.len());
        for (place, lock) in self.locks.iter().enumerate() {
            order.push((store_of(lock), lock.key()?, place));
        }
        order.sort();
        for pair in order.windows(2) {
            let [(store, key, one), (next_store, next_key, other)] = pair else { continue };
            if (store, key) == (next_store, next_key) && self.locks[*one].mode() != self.locks[*other].mode() {
                return Err(Error::invalid(format!("the lock {:?} is named twice, in different modes", key.as_str())));
            }
        }
        order.dedup_by(|one, other| (one.0, &one.1) == (other.0, &other.1));
        Ok(order.into_iter().map(|(_, _, place)| place).collect())
    }
}

impl MultiGuard {
    fn of(mut taken: Vec<(usize, Guard)>) -> Self {
        taken.sort_by_key(|(place, _)| *place);
        Self { guards: taken.into_iter().map(|(_, guard)| guard).collect() }
    }

    /// The same if none was lost meanwhile: the first may have been while the last was waited for.
    fn held(self) -> Result<Self> {
        self.ensure(Duration::ZERO).map(|()| self)
    }

    /// The guard of each lock, in the order in which they were named. Each has a fence of its own.
    pub fn guards(&self) -> &[Guard] {
        &self.guards
    }

    /// Whether all of them are believed to be held. If one is lost, the whole is.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.guards.iter().all(Guard::is_held)
    }

    /// What is left of the first lease to end if it is not renewed; zero once one is lost.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.guards.iter().map(Guard::remaining).min().unwrap_or_default()
    }

    /// As [`Guard::ensure`], for each of them.
    ///
    /// # Errors
    /// [`Lost`](crate::ErrorKind::Lost) if one is lost, or less is left of it.
    pub fn ensure(&self, min: Duration) -> Result<()> {
        self.guards.iter().try_for_each(|guard| guard.ensure(min))
    }

    /// Returns when the first of them is lost, and why.
    pub async fn lost(&self) -> LossReason {
        let (_, reason) = first_loss(self.guards.iter().collect()).await;
        reason
    }

    /// Runs `work` for as long as all of them are held, as [`Guard::run`] does.
    ///
    /// # Errors
    /// [`Lost`](crate::ErrorKind::Lost) if the work was stopped.
    ///
    /// # Cancellation
    /// Drops `work`; the locks stay held.
    pub async fn run<F: Future + Send>(&self, work: F) -> Result<F::Output>
    where
        F::Output: Send,
    {
        let mut work: Pin<Box<dyn Future<Output = Result<F::Output>> + Send + '_>> = Box::pin(async { Ok(work.await) });
        for guard in &self.guards {
            work = Box::pin(async { guard.run(work).await? });
        }
        work.await
    }

    /// Releases all of them, side by side, and tells how they stood: `NotHeld` if any of them was not held.
    ///
    /// # Errors
    /// As [`Guard::release`], for any of them; the others are released all the same.
    ///
    /// # Cancellation
    /// The releases go on in the background.
    pub async fn release(self) -> Result<Outcome> {
        // A store that does not answer must not keep the locks of another.
        let answers = join_all(self.guards.into_iter().map(Guard::release)).await;
        answers.into_iter().try_fold(Outcome::Released, |sum, answer| {
            let outcome = answer?;
            Ok(if sum == Outcome::Released { outcome } else { sum })
        })
    }
}

/// Waits for one more lock, for as long as those that were taken before it are held: all are to be held, or none.
async fn while_held<T: Send>(taken: &[(usize, Guard)], acquiring: impl Future<Output = Result<T>> + Send) -> Result<T> {
    let guards = taken.iter().map(|(_, guard)| guard).collect();
    tokio::select! {
        biased;
        answer = acquiring => answer,
        (guard, reason) = first_loss(guards) => Err(guard.lost_error(reason)),
    }
}

/// Returns when the first of these is lost: which one, and why. Without any, it stays pending.
async fn first_loss(guards: Vec<&Guard>) -> (&Guard, LossReason) {
    let mut losses: Vec<_> = guards.into_iter().map(|guard| (guard, Box::pin(guard.lost()))).collect();
    poll_fn(|cx| {
        for (guard, loss) in &mut losses {
            if let Poll::Ready(reason) = loss.as_mut().poll(cx) {
                return Poll::Ready((*guard, reason));
            }
            if let Status::Lost(reason) = guard.status() {
                return Poll::Ready((*guard, reason));
            }
        }
        Poll::Pending
    })
    .await
}

/// Whether two locks are of one store, as far as this process knows: it may have two clients of one.
fn is_same(one: &Lock, other: &Lock) -> bool {
    std::ptr::addr_eq(Arc::as_ptr(one.store()), Arc::as_ptr(other.store()))
}
