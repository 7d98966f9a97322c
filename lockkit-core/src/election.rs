//! One leader among many candidates.

use std::{future::Future, time::Duration};

use tokio::time::{Instant, sleep_until};

use crate::{ErrorKind, Fence, Guard, HolderInfo, KeyState, Lock, LossReason, Outcome, Result, Token};

/// An election: of all candidates one leads at a time, for as long as it keeps its lease, and everybody can see which.
///
/// It is the exclusive lock of this name, held for long. The number of a term is its fence: each term has a higher one than all
/// before it, as far as the store's [fences](crate::Fencing) promise, so that a resource which [checks fences](crate::fenced) refuses a
/// former leader. The name of a candidate, which is all that observers learn of it, is the
/// [holder](crate::LockerBuilder::holder) of its locker: an address, say.
///
/// Where the store has [that order](Lock::fifo), the candidate that asked first leads next.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> lockkit_core::Result<()> {
/// use lockkit_core::{Locker, MemoryStore};
///
/// let election = Locker::new(MemoryStore::new()).election("scheduler");
/// let last = election.lead(|term| async move { schedule_jobs(term).await }).await?;
/// let term = election.campaign().await?;
/// assert!(term.fence() > last);
/// assert_eq!(election.leader().await?.and_then(|leader| leader.term), Some(term.fence()));
/// term.resign().await?;
/// # Ok(()) }
/// # async fn schedule_jobs(term: lockkit_core::Fence) -> lockkit_core::Fence { term }
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct Election {
    lock: Lock,
}

/// The time for which a candidate leads: until it resigns, hands over, or loses its lease. Dropping it resigns in the background.
#[derive(Debug)]
#[must_use = "dropping a term resigns"]
pub struct Term {
    guard: Guard,
}

/// A candidate that leads, as others see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leader {
    /// Its name, as it gave it.
    pub info: HolderInfo,
    /// The number of its term; `None` if it is not a lockkit client, or the store has no fences. A quorum may show another one than
    /// [`Term::fence`], because its nodes count apart; so may a migration, once the lease was taken along to the new store.
    pub term: Option<Fence>,
    /// What is left of its lease on the store's clock if it is not renewed; `None` if the lease does not end by time.
    pub remaining: Option<Duration>,
}

/// Tells when another leads.
#[derive(Debug)]
pub struct Leaders {
    lock: Lock,
    every: Duration,
    /// When the store is asked next.
    next: Instant,
    /// What was told last; `None` before that.
    told: Option<Option<(HolderInfo, Option<Fence>)>>,
}

impl Election {
    pub(crate) fn new(lock: Lock) -> Self {
        Self { lock }
    }

    /// How long a leader that has crashed is waited for: [`Lock::ttl`].
    pub fn ttl(self, ttl: Duration) -> Self {
        Self { lock: self.lock.ttl(ttl) }
    }

    /// Waits until this candidate leads.
    ///
    /// # Errors
    /// As [`Lock::acquire`].
    ///
    /// # Cancellation
    /// As [`Lock::acquire`]: it is a candidate no more.
    pub async fn campaign(&self) -> Result<Term> {
        Ok(Term { guard: self.lock.acquire().await? })
    }

    /// Leads if nobody else does.
    ///
    /// # Errors
    /// As [`Lock::try_acquire`].
    ///
    /// # Cancellation
    /// As [`Lock::try_acquire`].
    pub async fn try_campaign(&self) -> Result<Option<Term>> {
        Ok(self.lock.try_acquire().await?.map(|guard| Term { guard }))
    }

    /// Does the work of a leader: campaigns, and runs what `work` gives for the number of the term. It is dropped before the lease can
    /// lapse, as by [`Guard::run`]; then this campaigns again. When it ends by itself, its output is returned, and the term is over.
    ///
    /// # Errors
    /// As [`campaign`](Self::campaign), at any time: when the store is away for longer than the
    /// [patience](crate::LockerBuilder::patience), say. Call it again after a pause if the error is
    /// [retryable](crate::Error::is_retryable). [`Lost`](ErrorKind::Lost) if the work ended, and the store then said that the lease
    /// was not held any more: another may have led at the same time, and what the work gave is dropped.
    ///
    /// # Cancellation
    /// The work is dropped, and the term ends in the background.
    pub async fn lead<F: Future>(&self, mut work: impl FnMut(Fence) -> F) -> Result<F::Output> {
        loop {
            let term = self.campaign().await?;
            match term.guard.run(work(term.fence())).await {
                Ok(output) => {
                    let not_held = term.guard.lost_at_release().await;
                    return not_held.map_or(Ok(output), Err);
                }
                Err(error) if error.kind() == ErrorKind::Lost => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// The one that leads at this moment, by what the store says. After a [hand-over](Term::hand_over) that is the former leader until
    /// another has taken over.
    ///
    /// # Errors
    /// As [`Lock::inspect`].
    pub async fn leader(&self) -> Result<Option<Leader>> {
        self.lock.inspect().await.map(leader)
    }

    /// Tells of each change of the leader that is seen by asking so often.
    ///
    /// At least a millisecond passes between two questions, and at most a day.
    pub fn observe(&self, every: Duration) -> Leaders {
        let every = every.clamp(Duration::from_millis(1), Duration::from_secs(24 * 60 * 60));
        Leaders { lock: self.lock.clone(), every, next: Instant::now(), told: None }
    }

    /// Leads in the place of the candidate that [handed over](Term::hand_over), with a higher term; `None` if its lease has ended
    /// since, or the token was used before.
    ///
    /// # Errors
    /// As [`Lock::resume`].
    ///
    /// # Cancellation
    /// As [`Lock::resume`].
    pub async fn take_over(&self, token: Token) -> Result<Option<Term>> {
        Ok(self.lock.resume(token).await?.map(|guard| Term { guard }))
    }
}

impl Term {
    /// The number of the term, to be sent with everything that a leader does.
    #[must_use]
    pub fn fence(&self) -> Fence {
        self.guard.fence()
    }

    /// Whether the candidate believes that it leads: what [`Guard`] says of such a belief goes for this one.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.guard.is_held()
    }

    /// Returns when the term is over, and why; at the latest when the lease can lapse.
    pub async fn lost(&self) -> LossReason {
        self.guard.lost().await
    }

    /// The lease of the term.
    pub fn guard(&self) -> &Guard {
        &self.guard
    }

    /// The lease of the term, for code that takes guards. The term lasts as long as it.
    pub fn into_guard(self) -> Guard {
        self.guard
    }

    /// Ends the term, so that the next candidate leads.
    ///
    /// # Errors
    /// As [`Guard::release`].
    ///
    /// # Cancellation
    /// As [`Guard::release`].
    pub async fn resign(self) -> Result<Outcome> {
        self.guard.release().await
    }

    /// Ends the term, and lets one candidate alone lead next: the one that is given this token, and
    /// [takes over](Election::take_over) while the lease lasts. Nobody gets in between. If none does in time, all can.
    ///
    /// # Errors
    /// As [`Guard::detach`]. The term is over then, as by dropping it.
    pub fn hand_over(self) -> Result<Token> {
        self.guard.detach()
    }
}

impl Leaders {
    /// Waits until the leader is another than the last one that this returned, or there is none; the first call returns at once. A leader
    /// that comes and goes between two questions to the store is not seen.
    ///
    /// # Errors
    /// As [`Lock::inspect`]. It can be called again.
    ///
    /// # Cancellation
    /// The next call tells what this one would have. A question that was dropped is asked again when its time has come.
    pub async fn next(&mut self) -> Result<Option<Leader>> {
        loop {
            sleep_until(self.next).await;
            // Before the question, which may be dropped.
            self.next = Instant::now() + self.every;
            let leader = leader(self.lock.inspect().await?);
            let seen = leader.as_ref().map(|leader| (leader.info.clone(), leader.term));
            if self.told.as_ref() != Some(&seen) {
                self.told = Some(seen);
                return Ok(leader);
            }
        }
    }
}

fn leader(state: KeyState) -> Option<Leader> {
    let holder = state.holders.into_iter().next()?;
    Some(Leader { info: holder.info, term: holder.fence, remaining: holder.remaining })
}
