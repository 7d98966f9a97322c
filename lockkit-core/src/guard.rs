//! What a holder holds.

use std::{
    future::Future,
    pin::{Pin, pin},
    sync::Arc,
    task::Poll,
    time::Duration,
};

use crate::{
    Error, ErrorKind, Fence, LockKey, LossReason, LossSignal, Owner, Result, Token,
    engine::{Engine, Lease, LeaseStatus},
    yielding::is_requested,
};

/// A held lock: a **belief with a deadline**, not a proof.
///
/// What a guard can promise: at the moment when it was asked, by this process's clock, the lease was still this
/// holder's, provided that the store kept what it had acknowledged and that clocks run at like rates. What it can't
/// promise: that a write which starts now lands before the lease ends. No lock service can, for a process may stop
/// between the check and the write. Only a resource that checks the [fence](Self::fence) gives proof.
///
/// The lease is renewed in the background until the guard is released, dropped, or lost. Dropping it ends the belief
/// at once and releases the lease in the background; [`release`](Self::release) also tells how it went.
#[derive(Debug)]
#[must_use = "dropping a guard releases the lock"]
pub struct Guard {
    engine: Arc<Engine>,
    lease: Arc<Lease>,
    /// The owner in whose name it is held.
    owner: Option<Owner>,
    ended: bool,
}

/// What a guard believes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// The lease is held.
    Held,
    /// The last renewal failed; the lease is held until its deadline.
    Suspect,
    /// The lease is lost. This is final.
    Lost(LossReason),
}

/// How a release went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a lock that was not held any more means that the work done under it may have overlapped with another's"]
pub enum Outcome {
    /// The lease was held until now.
    Released,
    /// The lease was no longer held: the work done under it may have overlapped with another holder's.
    NotHeld(LossReason),
}

impl Guard {
    pub(crate) fn new(engine: Arc<Engine>, lease: Arc<Lease>, owner: Option<Owner>) -> Self {
        Self { engine, lease, owner, ended: false }
    }

    /// The request by which the former holder was asked to yield, and which may still be there.
    pub(crate) fn has_asked(&self, request: Token) {
        self.lease.state().request = Some(request);
    }

    /// The lock's name.
    #[must_use]
    pub fn key(&self) -> &LockKey {
        &self.lease.claim.key
    }

    /// The fencing token: greater than that of every earlier holder, but for readers, which may have that of others they share the lock
    /// with. That of a permit is an order and no admission: others that are smaller are still held.
    #[must_use]
    pub fn fence(&self) -> Fence {
        self.lease.fence
    }

    /// The token that proves ownership to the store. For tools; whoever has it can end the lease.
    ///
    /// It is that of this hold alone: from now on the lease is not handed over to another task of this process at its end.
    #[must_use]
    pub fn token(&self) -> Token {
        self.lease.state().token_is_known = true;
        self.lease.claim.token
    }

    /// The token as a test of the engine compares it with what the store shows, of all leases: none of them would be handed over if it
    /// asked for [`token`](Self::token).
    #[doc(hidden)]
    #[must_use]
    pub fn token_to_compare(&self) -> Token {
        self.lease.claim.token
    }

    /// What is left of the lease if it is not renewed; zero once it is lost.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        match self.status() {
            Status::Held | Status::Suspect => self.lease.state().deadline().since(self.engine.now()),
            Status::Lost(_) => Duration::ZERO,
        }
    }

    /// What is believed of the lease. The deadline is checked here and at every other use, so that a process that was
    /// frozen or suspended learns of a loss before it does anything.
    #[must_use]
    pub fn status(&self) -> Status {
        match self.engine.look(&self.lease) {
            LeaseStatus::Held => Status::Held,
            LeaseStatus::Suspect => Status::Suspect,
            LeaseStatus::Lost(reason) => Status::Lost(reason),
            // A nested hold of the same owner can't have ended what this one still holds.
            LeaseStatus::Released => Status::Lost(LossReason::Gone),
        }
    }

    /// Whether the lease is believed to be held.
    #[must_use]
    pub fn is_held(&self) -> bool {
        !matches!(self.status(), Status::Lost(_))
    }

    /// Checks that at least `min` of the lease is left, before a step that takes about so long.
    ///
    /// # Errors
    /// [`Lost`](crate::ErrorKind::Lost) if the lease is lost or less is left.
    pub fn ensure(&self, min: Duration) -> Result<()> {
        if let Status::Lost(reason) = self.status() {
            return Err(self.lost_error(reason));
        }
        let left = self.remaining();
        if left < min {
            let message = format!("only {left:?} of the lease is left, {min:?} is needed");
            return Err(Error::new(ErrorKind::Lost, message).at("ensure", Some(self.key()), self.store_name()));
        }
        Ok(())
    }

    /// Returns when the lease is lost, and why; at the latest at its deadline, also if the locker's runtime has ended. Stays
    /// pending as long as it is held.
    pub async fn lost(&self) -> LossReason {
        // A nested hold of the same owner can't have ended what this one still holds.
        self.loss_signal().lost().await.unwrap_or(LossReason::Gone)
    }

    /// A signal of the end of this hold, to be kept by others than the one that has the guard.
    pub fn loss_signal(&self) -> LossSignal {
        LossSignal::new(&self.engine, &self.lease)
    }

    /// Extends the lease now by its full ttl.
    ///
    /// # Errors
    /// [`Lost`](crate::ErrorKind::Lost) if it is no longer held; other kinds when the store could not be asked, in
    /// which case the lease lasts until its deadline as before.
    ///
    /// # Cancellation
    /// The lease may have been extended.
    pub async fn renew(&self) -> Result<()> {
        self.ensure(Duration::ZERO)?;
        match self.engine.renew_now(&self.lease).await? {
            None => self.ensure(Duration::ZERO),
            Some(reason) => Err(self.lost_error(reason)),
        }
    }

    /// Runs `work` for as long as the lease is held. If it is lost, `work` is dropped first, before the lease can
    /// lapse: a twentieth of the ttl (at most 500 ms) before that, or when the time of
    /// [`max_hold`](crate::Lock::max_hold) is up.
    ///
    /// The work must yield now and then for that: a future that blocks its thread can't be stopped by anyone.
    ///
    /// # Errors
    /// [`Lost`](crate::ErrorKind::Lost) if the work was stopped.
    ///
    /// # Cancellation
    /// Drops `work`; the lock stays held.
    pub async fn run<F: Future>(&self, work: F) -> Result<F::Output> {
        let margin = (self.lease.ttl / 20).min(Duration::from_millis(500));
        // In a box so that it can be dropped before the error is returned.
        let mut work = Some(Box::pin(work));
        let mut lost = pin!(self.stop_signal(margin));
        std::future::poll_fn(move |cx| {
            // The order matters: after a freeze the work must not be polled once more.
            if let Poll::Ready(reason) = lost.as_mut().poll(cx) {
                work = None;
                return Poll::Ready(Err(self.lost_error(reason)));
            }
            if let Status::Lost(reason) = self.status() {
                work = None;
                return Poll::Ready(Err(self.lost_error(reason)));
            }
            match work.as_mut().map(|work| Pin::as_mut(work).poll(cx)) {
                Some(Poll::Ready(output)) => Poll::Ready(Ok(output)),
                Some(Poll::Pending) | None => Poll::Pending,
            }
        })
        .await
    }

    /// Ends the hold and tells how it stood. What the store has to do goes on in the background if it fails or this
    /// future is dropped; from the call on this process no longer believes in the lease.
    ///
    /// When the lease goes to another task of this process, the answer is this process's belief: it was held until
    /// its deadline. So it is for a nested hold whose owner has released the last one before the store answered. Otherwise
    /// it is the store's.
    ///
    /// # Errors
    /// When the store could not be asked. The lease then ends by the background release or by its ttl; a lock that was to be
    /// [kept](crate::Lock::keep_for) may not be, if it is the ttl.
    ///
    /// # Cancellation
    /// The release goes on in the background.
    pub async fn release(mut self) -> Result<Outcome> {
        self.ended = true;
        let outcome = self.engine.release(&self.lease).await?;
        Ok(outcome.map_or(Outcome::Released, Outcome::NotHeld))
    }

    /// Keeps the lock from all others for at least this long after it was granted, as [`Lock::keep_for`](crate::Lock::keep_for) does from the
    /// beginning; zero: not at all. It goes for all guards of an [owner](crate::Owner).
    ///
    /// # Errors
    /// As for [`Lock::keep_for`](crate::Lock::keep_for); [`Lost`](crate::ErrorKind::Lost) if the lease is lost.
    pub fn keep_for(&self, at_least: Duration) -> Result<()> {
        let info = self.engine.store.info();
        if !at_least.is_zero() {
            let refused = info.admit_keep_for(self.lease.claim.mode, at_least);
            refused.map_err(|error| error.at("keep", Some(self.key()), &info.name))?;
        }
        self.ensure(Duration::ZERO)?;
        let is_set = self.lease.state().keep_for(at_least);
        // Else it was lost since the look at it.
        if is_set { Ok(()) } else { self.ensure(Duration::ZERO) }
    }

    /// Ends the hold as [`release`](Self::release) does, and others may have the lock at once, although it was to be
    /// [kept](crate::Lock::keep_for) from them: the work failed, and another may try it in the same window of time. With other guards of the
    /// [owner](crate::Owner), when the last of them ends. After a loss it is too late: the lock is being kept.
    ///
    /// # Errors
    /// As [`release`](Self::release).
    ///
    /// # Cancellation
    /// As [`release`](Self::release).
    pub async fn release_early(self) -> Result<Outcome> {
        self.lease.state().keep_for(Duration::ZERO);
        self.release().await
    }

    /// Ends the hold. An error if it was not held any more; that the store could not be asked is none.
    pub(crate) async fn lost_at_release(mut self) -> Option<Error> {
        self.ended = true;
        let outcome = self.engine.release(&self.lease).await;
        outcome.ok().flatten().map(|reason| self.lost_error(reason))
    }

    /// Lets go of the lease without ending it: nobody renews it any more, and the store keeps it until its ttl is over. With
    /// the token, [`Lock::resume`](crate::Lock::resume) takes it up again before that, here or in another process, while no
    /// other client can get in between: to restart a service, or to hand work over to the next stage.
    ///
    /// Not everywhere does the lease outlive this process: where [`Capability::resume`](crate::Capability) is
    /// [`WhileSession`](crate::Resume::WhileSession) (ZooKeeper) the ttl counts from this call, and the lease ends before that with the
    /// session of this client. The locker ends it in the background when its ttl is over, also when it was [shut
    /// down](crate::Locker::shutdown) or dropped meanwhile. If its runtime ends before that, it ends the lease early, when it is used
    /// next; one that is never used again leaves it until the session ends.
    ///
    /// # Errors
    /// `Unsupported` where no lease can be taken up ([`Resume::None`](crate::Resume): a migration), and for shared ones
    /// and permits; `Lost` if the lease was lost; `InvalidInput` while the [owner](crate::Owner) has other guards of it, and for a
    /// lock that is to be [kept from others](crate::Lock::keep_for). This hold is ended then, as by dropping it.
    pub fn detach(mut self) -> Result<Token> {
        let token = self.engine.detach(&self.lease)?;
        self.ended = true;
        Ok(token)
    }

    /// Makes this writer a reader, of a [readers-writer lock](crate::Locker::rw_lock), without a gap: no other writer gets in
    /// between, also none that waits. Those readers follow at once that wait first in the queue. The hold that is returned is a new one,
    /// with a token of its own and a higher fence, so that late writes under the former fence are refused by a resource that checks it
    /// ([`SeenFences`](crate::fenced::SeenFences)).
    ///
    /// ```
    /// # use lockkit_core::{Locker, MemoryStore, Outcome};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> lockkit_core::Result<()> {
    /// let prices = Locker::new(MemoryStore::new()).rw_lock("prices");
    /// let writer = prices.write().acquire().await?;
    /// // Writes, and goes on with what it wrote, beside other readers.
    /// let reader = writer.downgrade().await?;
    /// let beside = prices.read().try_acquire().await?.expect("readers share the lock");
    /// assert_eq!(reader.release().await?, Outcome::Released);
    /// # assert_eq!(beside.release().await?, Outcome::Released);
    /// # Ok(()) }
    /// ```
    ///
    /// There is no way back: two readers that both wait to become writers would wait for each other for ever. A reader releases its hold,
    /// and asks for that of a writer.
    ///
    /// # Errors
    /// `Unsupported` where the store can't do it ([`Capability::downgrades`](crate::Capability): a quorum), and for readers and permits; `Lost` if
    /// the lease was lost; `InvalidInput` while the [owner](crate::Owner) has other guards of it, or if the lock is to be
    /// [kept](crate::Lock::keep_for); else those of [`Lock::try_acquire`](crate::Lock::try_acquire). The hold has ended then, and is released
    /// in the background.
    ///
    /// # Cancellation
    /// The hold has ended, and is released in the background, as that of a reader or of a writer.
    pub async fn downgrade(mut self) -> Result<Self> {
        let lease = self.engine.downgrade(&self.lease).await?;
        self.ended = true;
        if let Some(owner) = &self.owner {
            owner.adopt(&lease);
        }
        Ok(Self::new(Arc::clone(&self.engine), lease, self.owner.take()))
    }

    /// Whether somebody that waits for the lock [asks its holder to yield](crate::Lock::ask_to_yield). It asks the store once, so that work in
    /// steps can look after each of them, and release the lock at a moment that suits it. Of several holders that share the lock, all
    /// are asked.
    ///
    /// # Errors
    /// As [`Lock::inspect`](crate::Lock::inspect).
    pub async fn yield_requested(&self) -> Result<bool> {
        let own = self.lease.state().request;
        self.engine.heard(is_requested(&*self.engine.store, self.key(), own).await)
    }

    /// Returns when the lease is lost, or about to be within `margin` for want of a renewal.
    async fn stop_signal(&self, margin: Duration) -> LossReason {
        // A timer stands still while the machine sleeps, and is late by at most this afterwards.
        let awake = (margin / 2).clamp(Duration::from_millis(50), Duration::from_secs(1));
        let mut lost = pin!(self.lost());
        loop {
            if let Status::Lost(reason) = self.status() {
                return reason;
            }
            let (end, reason) = self.lease.state().last_call(margin);
            let left = end.since(self.engine.now());
            if left.is_zero() {
                return reason;
            }
            tokio::select! {
                reason = &mut lost => return reason,
                () = tokio::time::sleep(left.min(awake)) => {}
            }
        }
    }

    pub(crate) fn lost_error(&self, reason: LossReason) -> Error {
        Error::new(ErrorKind::Lost, reason.to_string()).at("hold", Some(self.key()), self.store_name())
    }

    fn store_name(&self) -> &Arc<str> {
        &self.engine.store.info().name
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if !self.ended {
            self.engine.let_go(&self.lease);
        }
    }
}
