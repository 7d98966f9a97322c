//! One leader among many candidates, for code that is not async.

use std::{ops::Deref, time::Duration};

use lockkit_core::{Leader, LossReason, Outcome, OwnThread, Result, Token};
use tokio::time::timeout;

use super::{Guard, wait};

/// A [`lockkit::Election`](crate::Election) for code that is not async.
///
/// ```
/// # fn main() -> lockkit::Result<()> {
/// let election = lockkit::blocking::connect("memory:")?.election("scheduler");
/// let term = election.campaign()?;
/// let mut steps = ["once", "twice"].into_iter();
/// // Each step belongs to the leader of this term; what it is sent to refuses those of earlier terms.
/// while let Some(step) = steps.next().filter(|_| term.is_held()) {
///     println!("{step} {}", term.fence());
/// }
/// term.resign()?;
/// # Ok(()) }
/// ```
///
/// It has no `lead`: nobody can stop a thread that is at work when the term is over. Ask [`is_held`](crate::Term::is_held) before each
/// step, and have the resource check the [fence](crate::Term::fence).
#[derive(Clone, Debug)]
#[must_use]
pub struct Election {
    pub(super) election: lockkit_core::Election,
    pub(super) thread: OwnThread,
}

/// A [`lockkit::Term`](crate::Term) for code that is not async: its number, and whether the candidate believes that it leads, are told by
/// that one. The lease is renewed on the locker's thread.
#[derive(Debug)]
#[must_use = "dropping a term resigns"]
pub struct Term {
    term: lockkit_core::Term,
    thread: OwnThread,
}

/// [`lockkit::Leaders`](crate::Leaders) for code that is not async.
#[derive(Debug)]
pub struct Leaders {
    leaders: lockkit_core::Leaders,
    thread: OwnThread,
}

impl Election {
    /// How long a leader that has crashed is waited for: [`lockkit::Election::ttl`](crate::Election::ttl).
    pub fn ttl(self, ttl: Duration) -> Self {
        Self { election: self.election.ttl(ttl), thread: self.thread }
    }

    /// Waits until this candidate leads.
    ///
    /// # Errors
    /// As [`lockkit::Election::campaign`](crate::Election::campaign).
    pub fn campaign(&self) -> Result<Term> {
        wait(&self.thread, self.election.campaign()).map(|term| self.term(term))
    }

    /// Leads if nobody else does.
    ///
    /// # Errors
    /// As [`lockkit::Election::try_campaign`](crate::Election::try_campaign).
    pub fn try_campaign(&self) -> Result<Option<Term>> {
        Ok(wait(&self.thread, self.election.try_campaign())?.map(|term| self.term(term)))
    }

    /// The one that leads at this moment, by what the store says: [`lockkit::Election::leader`](crate::Election::leader).
    ///
    /// # Errors
    /// As [`lockkit::Election::leader`](crate::Election::leader).
    pub fn leader(&self) -> Result<Option<Leader>> {
        wait(&self.thread, self.election.leader())
    }

    /// Tells of each change of the leader that is seen by asking so often: [`lockkit::Election::observe`](crate::Election::observe).
    pub fn observe(&self, every: Duration) -> Leaders {
        Leaders { leaders: self.election.observe(every), thread: self.thread.clone() }
    }

    /// Leads in the place of the candidate that [handed over](Term::hand_over):
    /// [`lockkit::Election::take_over`](crate::Election::take_over).
    ///
    /// # Errors
    /// As [`lockkit::Election::take_over`](crate::Election::take_over).
    pub fn take_over(&self, token: Token) -> Result<Option<Term>> {
        Ok(wait(&self.thread, self.election.take_over(token))?.map(|term| self.term(term)))
    }

    fn term(&self, term: lockkit_core::Term) -> Term {
        Term { term, thread: self.thread.clone() }
    }
}

impl Term {
    /// Waits until the term is over, but no longer than `within`.
    #[must_use]
    pub fn lost_within(&self, within: Duration) -> Option<LossReason> {
        wait(&self.thread, async { timeout(within, self.term.lost()).await.ok() })
    }

    /// The lease of the term, for code that takes guards: [`lockkit::Term::into_guard`](crate::Term::into_guard).
    pub fn into_guard(self) -> Guard {
        Guard { guard: self.term.into_guard(), thread: self.thread }
    }

    /// Ends the term, so that the next candidate leads: [`lockkit::Term::resign`](crate::Term::resign).
    ///
    /// # Errors
    /// As [`Guard::release`].
    pub fn resign(self) -> Result<Outcome> {
        let Self { term, thread } = self;
        wait(&thread, term.resign())
    }

    /// Ends the term, and lets the candidate that is given this token lead next: [`lockkit::Term::hand_over`](crate::Term::hand_over).
    ///
    /// # Errors
    /// As [`lockkit::Term::hand_over`](crate::Term::hand_over).
    pub fn hand_over(self) -> Result<Token> {
        self.term.hand_over()
    }
}

impl Deref for Term {
    type Target = lockkit_core::Term;

    fn deref(&self) -> &Self::Target {
        &self.term
    }
}

impl Leaders {
    /// Waits until the leader is another than the last one that was told, or there is none: [`lockkit::Leaders::next`](crate::Leaders::next).
    /// Where a thread is not to wait for ever, see [`next_within`](Self::next_within).
    ///
    /// # Errors
    /// As [`lockkit::Leaders::next`](crate::Leaders::next). It can be called again.
    #[expect(clippy::should_implement_trait, reason = "it has no end, and its errors do not end it")]
    pub fn next(&mut self) -> Result<Option<Leader>> {
        wait(&self.thread, self.leaders.next())
    }

    /// The same, but no longer than `within`; `None` if there was no other until then.
    ///
    /// # Errors
    /// As [`next`](Self::next).
    pub fn next_within(&mut self, within: Duration) -> Result<Option<Option<Leader>>> {
        wait(&self.thread, async { timeout(within, self.leaders.next()).await.ok().transpose() })
    }
}
