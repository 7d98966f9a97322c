//! What a store says of itself, and what it refuses for that.

use std::{sync::Arc, time::Duration};

use crate::{
    AcquireRequest, Alarm, Capability, Clock, Error, ErrorKind, Fence, FenceClock, Fencing, Mode, Order, Renewal,
    Renewed, Result, Resume, store::Reconnections,
};

/// What a store is.
#[derive(Clone, Debug)]
pub struct StoreInfo {
    /// The scheme of its URL, such as `redis`.
    pub scheme: &'static str,
    /// A name for messages, without secrets, such as `redis` or `redis 127.0.0.1:6379`.
    pub name: Arc<str>,
    /// What it can do.
    pub capability: Capability,
    /// The clock of [`Hold::until`](crate::Hold::until), shared with the core.
    pub clock: Arc<dyn Clock>,
    /// Where the store makes itself heard when it learns, unasked, that something happened to leases; `None` if it only
    /// ever learns that when it is asked.
    pub alarm: Option<Alarm>,
    /// How often what was sent may have been overtaken by what was sent later.
    pub reconnections: Reconnections,
    /// What puts locks at risk here, as far as connecting showed: a line each, without secrets.
    pub warnings: Arc<[String]>,
}

impl StoreInfo {
    /// Shorter leases would be over before anything could be done under them.
    pub const SHORTEST_TTL: Duration = Duration::from_millis(100);

    /// The longest on stores that end leases by time, unless they are set to less: so long others wait for a lock whose holder died. On
    /// some it is the time for which a token that is of no use any more has to be known.
    pub const LONGEST_TTL: Duration = Duration::from_secs(5 * 60);

    /// For how long a lock can be kept from others when its holder is done, where nobody renews the lease: 400 days, for a job
    /// that is due once a year.
    pub const LONGEST_KEPT: Duration = Duration::from_secs(400 * 24 * 60 * 60);

    /// With this many releases without an answer, nothing more is asked of a store where leases end with a session.
    pub const MOST_OWED: usize = 10_000;

    /// Refuses a request for what the store's [`Capability`] does not offer (rule R12), and one that no store can grant. A
    /// store calls it before it asks its servers for anything.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] for a mode or an order that the store does not know, and for [fences from the
    /// floor](FenceClock::Floor) in a queue; [`ErrorKind::InvalidInput`] for a ttl beyond its limits, and for a grant without fences.
    pub fn admit(&self, request: &AcquireRequest) -> Result<()> {
        if request.fence.span == 0 {
            return Err(Error::invalid("a grant owns at least one fence"));
        }
        if request.fence.clock == FenceClock::Floor && request.is_in_order() {
            return Err(self.lacks("locks that are shared or in order with fences that begin at a floor"));
        }
        let may_replace = match request.claim.mode {
            Mode::Exclusive if request.keeps => self.capability.keeps,
            Mode::Exclusive => self.capability.resume > Resume::None,
            Mode::Shared => self.capability.downgrades,
            Mode::Permit { .. } => false,
        };
        if request.from.is_some() && !may_replace {
            return Err(self.lacks("grants that take over another lease"));
        }
        if request.from.is_some_and(|from| from == request.claim.token || !request.wait.is_zero()) {
            let message = "a grant that takes over another lease has a token of its own, and does not wait";
            return Err(Error::invalid(message));
        }
        if request.keeps && (request.from.is_none() || request.claim.mode != Mode::Exclusive) {
            return Err(Error::invalid("a lock is kept in the place of an exclusive lease"));
        }
        let ttl = match &self.capability.liveness.ttl {
            Some(range) if request.keeps && request.ttl <= Self::LONGEST_KEPT => request.ttl.min(*range.end()),
            // What is left of a window may be shorter than a lease.
            None if request.keeps => request.ttl.max(Self::SHORTEST_TTL),
            Some(_) | None => request.ttl,
        };
        self.admit_terms(request.claim.mode, request.order, ttl)
    }

    /// The same for the mode of a claim that is renewed or released.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] for a mode that the store does not know.
    pub fn admit_mode(&self, mode: Mode) -> Result<()> {
        let is_known = match mode {
            Mode::Exclusive => true,
            Mode::Shared => self.capability.shared,
            Mode::Permit { .. } => self.capability.permits,
        };
        if is_known { Ok(()) } else { Err(self.lacks(&format!("the mode {mode}"))) }
    }

    /// The same for how long a lease is to last. Where only the end of a session ends it, it may be as long as one likes.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] for a ttl beyond the store's limits.
    pub fn admit_ttl(&self, ttl: Duration) -> Result<()> {
        let message = match &self.capability.liveness.ttl {
            Some(range) if !range.contains(&ttl) => {
                format!("the ttl must lie between {:?} and {:?}; it is {ttl:?}", range.start(), range.end())
            }
            None if ttl < Self::SHORTEST_TTL => {
                format!("the ttl must be at least {:?}, not {ttl:?}", Self::SHORTEST_TTL)
            }
            Some(_) | None => return Ok(()),
        };
        Err(Error::invalid(message))
    }

    /// Refuses to leave more behind where leases end with a session, given how many releases are still to be answered: only an answer
    /// ends a lease there.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] if there are [`MOST_OWED`](Self::MOST_OWED).
    pub fn admit_owed(&self, owed: usize) -> Result<()> {
        if self.capability.liveness.session.is_none() || owed < Self::MOST_OWED {
            return Ok(());
        }
        let what = format!("{owed} releases have not been answered yet: until the store answers, no lock is asked for");
        Err(Error::new(ErrorKind::Unavailable, what))
    }

    /// The answers to these renewals, in order. An error names its lock and this store from now on.
    #[must_use]
    pub fn renewals_at(&self, renewals: &[Renewal], answers: Vec<Result<Renewed>>) -> Vec<Result<Renewed>> {
        let named = renewals.iter().zip(answers);
        named.map(|(renewal, answer)| answer.map_err(|e| e.at("renew", Some(&renewal.claim.key), &self.name))).collect()
    }

    pub(crate) fn admit_keep_for(&self, mode: Mode, keep_for: Duration) -> Result<()> {
        if mode != Mode::Exclusive || !self.capability.keeps {
            return Err(self.lacks("locks that are kept when their holder is done"));
        }
        if keep_for > Self::LONGEST_KEPT {
            let days = Self::LONGEST_KEPT.as_secs() / 86_400;
            return Err(Error::invalid(format!("a lock can be kept for at most {days} days")));
        }
        Ok(())
    }

    pub(crate) fn admit_fence_above(&self, fence: Fence) -> Result<()> {
        let has_none = fence > Fence::NONE && self.capability.fencing == Fencing::None;
        if has_none { Err(self.lacks("fences")) } else { Ok(()) }
    }

    pub(crate) fn admit_terms(&self, mode: Mode, order: Order, ttl: Duration) -> Result<()> {
        self.admit_mode(mode)?;
        if order == Order::Fifo && !self.capability.fifo {
            return Err(self.lacks("first-come-first-served locks"));
        }
        self.admit_ttl(ttl)
    }

    fn lacks(&self, what: &str) -> Error {
        Error::new(ErrorKind::Unsupported, format!("{} does not do {what}", self.scheme))
    }
}
