//! A lease that this process did not acquire, or let go of: taken up again by its token.

use std::sync::Arc;

use tokio::time::sleep;

use super::{
    Engine, Lease, LeaseStatus, Terms,
    reaper::{Certainty, Owed, PendingRelease},
};
use crate::{
    AcquireRequest, Attempt, Claim, Effect, Error, ErrorKind, LossReason, Mode, Moment, Order, Result, Resume, Token,
};

/// The answer where leases can't be let go of.
const NO_OTHER: &str = "a lease of this store can't be taken up by another client";

impl Engine {
    /// Takes the place of a lease, by a claim of its own; `None` if the claim does not hold the lock. A lease that was
    /// granted, and can't be used after all, is released in the background.
    pub(crate) async fn resume(self: &Arc<Self>, claim: Claim, terms: Terms) -> Result<Option<Arc<Lease>>> {
        let info = self.store.info();
        let unsupported = |message: &str| {
            let error = Error::new(ErrorKind::Unsupported, message);
            Err(error.at("resume", Some(&claim.key), &info.name))
        };
        if info.capability.resume == Resume::None {
            return unsupported(NO_OTHER);
        }
        if claim.mode != Mode::Exclusive {
            return unsupported("only an exclusive lease can be taken up");
        }
        let mine = Claim { token: Token::random()?, ..claim.clone() };
        self.replace("resume", claim.token, mine, terms).await
    }

    /// Makes the lease of a writer that of a reader, in one step at the store. If that fails, both are released in the background.
    pub(crate) async fn downgrade(self: &Arc<Self>, lease: &Arc<Lease>) -> Result<Arc<Lease>> {
        const WHAT: &str = "downgrade";
        let (writer, info) = (&lease.claim, self.store.info());
        let about = |error: Error| error.at(WHAT, Some(&writer.key), &info.name);
        if !info.capability.downgrades || !info.capability.shared {
            let message = "the store can't turn a writer's lease into a reader's";
            return Err(about(Error::new(ErrorKind::Unsupported, message)));
        }
        let reader = Claim { token: Token::random()?, mode: Mode::Shared, ..writer.clone() };
        let mut undo = self.undo(writer, self.lasts(lease));
        self.let_lie(lease, WHAT)?;
        undo.arm_release(Certainty::of(&lease.state(), self.now()), None);
        // Above the writer's own, which need not be the first of the grant.
        let fence_above = lease.terms.fence_above.max(lease.fence);
        let terms = Terms { keep_for: None, fence_above, ..lease.terms };
        let replaced = self.replace(WHAT, writer.token, reader, terms).await?;
        // A refusal may also mean that the server grants nothing for now: then the writer's lease is still there.
        let replaced = replaced.ok_or_else(|| about(lost(LossReason::Gone)))?;
        undo.released();
        replaced.state().request = lease.state().request;
        Ok(replaced)
    }

    /// Takes the place of the lease with the token `from`, by the claim `mine`; `None` if that lease does not have the lock.
    async fn replace(
        self: &Arc<Self>,
        what: &'static str,
        from: Token,
        mine: Claim,
        terms: Terms,
    ) -> Result<Option<Arc<Lease>>> {
        self.check_open()?;
        let start = self.now();
        let info = self.store.info();
        let about = |error: Error| error.at(what, Some(&mine.key), &info.name);
        terms.check(mine.mode, Order::Any, info).map_err(about)?;
        let mut request = AcquireRequest::new(mine.clone(), terms.ttl, self.settings.holder.clone());
        (request.fence.floor, request.from) = (terms.fence_above, Some(from));
        let mut undo = self.undo(&mine, terms.ttl);
        self.check_open()?;
        undo.arm(false);
        match self.heard_of(&request, start, self.store.acquire(&request).await) {
            Ok(Attempt::Granted(hold)) if self.is_useful(&hold, terms.ttl, self.now()) => {
                self.check_open().map_err(|e| about(e.unknown_effect()))?;
                undo.granted();
                let lease = self.admit(hold, terms, None);
                self.note_granted(&lease, start, false);
                Ok(Some(lease))
            }
            Ok(Attempt::Granted(_)) => {
                let message = "the store took so long to grant the lease that too little is left of it";
                Err(about(Error::new(ErrorKind::TimedOut, message).unknown_effect()))
            }
            Ok(Attempt::Contended(_)) => {
                undo.unchanged();
                Ok(None)
            }
            Err(error) => {
                if error.effect() == Effect::None {
                    undo.unchanged();
                } else {
                    undo.in_doubt();
                }
                Err(about(error))
            }
        }
    }

    /// Lets go of a lease that stays at the store until its ttl is over. Where only the end of its session or a release would end it, it is
    /// released then.
    pub(crate) fn detach(self: &Arc<Self>, lease: &Arc<Lease>) -> Result<Token> {
        const WHAT: &str = "detach";
        let resume = self.store.info().capability.resume;
        if resume == Resume::None {
            let error = Error::new(ErrorKind::Unsupported, NO_OTHER);
            return Err(error.at(WHAT, Some(&lease.claim.key), &self.store.info().name));
        }
        self.let_lie(lease, WHAT)?;
        if resume == Resume::WhileSession {
            self.at_home(LetGo::new(self, lease).end_in_time());
        }
        Ok(lease.claim.token)
    }

    /// Ends an exclusive lease in this process, and leaves what the store has.
    fn let_lie(self: &Arc<Self>, lease: &Arc<Lease>, what: &'static str) -> Result<()> {
        let about = |error: Error| error.at(what, Some(&lease.claim.key), &self.store.info().name);
        if lease.claim.mode != Mode::Exclusive {
            return Err(about(Error::new(ErrorKind::Unsupported, "only an exclusive lease can be taken up again")));
        }
        if let LeaseStatus::Lost(reason) = self.look(lease) {
            return Err(about(lost(reason)));
        }
        let now = self.now();
        let state = lease.state();
        if state.depth > 1 {
            return Err(about(Error::invalid("the owner has nested holds of the lease")));
        }
        if state.kept_until().is_some() {
            let message =
                "a lock that is to be kept from others when it is released can't be left or shared before that";
            return Err(about(Error::invalid(message)));
        }
        if !state.is_live() {
            return Err(about(lost(LossReason::Gone)));
        }
        drop(self.end_here(lease, state, now));
        Ok(())
    }
}

/// A lease that was let go of at a store that does not end it by time. A shutdown does not wait for it.
struct LetGo {
    engine: Arc<Engine>,
    /// `None` once it is being released.
    left: Option<PendingRelease>,
    at: Moment,
}

impl LetGo {
    fn new(engine: &Arc<Engine>, lease: &Lease) -> Self {
        let now = engine.now();
        let (lapse, certainty) = (engine.lapse_of(engine.lasts(lease)), Certainty::of(&lease.state(), now));
        let left = Some(PendingRelease::new(lease.claim.clone(), lapse, certainty, None));
        Self { engine: Arc::clone(engine), left, at: now + lease.terms.ttl }
    }

    /// Releases it when its time is up. Whoever has taken it up has another token, of which this release ends nothing.
    async fn end_in_time(mut self) {
        sleep(self.at.since(self.engine.now())).await;
        if let Some(left) = self.left.take() {
            self.engine.reap(left, None);
        }
    }
}

impl Drop for LetGo {
    fn drop(&mut self) {
        // Its runtime has ended. The next one releases it, early rather than never.
        drop(self.left.take().map(|left| Owed::new(&self.engine, left)));
    }
}

fn lost(reason: LossReason) -> Error {
    Error::new(ErrorKind::Lost, format!("the lease was lost: {reason}"))
}
