//! A lease that this process did not acquire, or let go of: taken up again by its token.

use std::sync::Arc;

use super::{Engine, Lease, Phase, Terms, lease::useful};
use crate::{
    Claim, Error, ErrorKind, Fence, Hold, Holder, Liveness, LossReason, Mode, Order, Query, Renewal, Renewed, Result,
    Token,
};

impl Engine {
    /// Takes up a lease by its claim; `None` if the claim does not hold the lock.
    pub(crate) async fn resume(self: &Arc<Self>, claim: Claim, terms: Terms) -> Result<Option<Arc<Lease>>> {
        self.check_open()?;
        let start = self.now();
        let info = self.store.info();
        let about = |error: Error| error.at("resume", Some(&claim.key), &info.name);
        info.admit_terms(claim.mode, Order::Any, terms.ttl).map_err(about)?;
        let unsupported = |message: &str| Err(about(Error::new(ErrorKind::Unsupported, message)));
        if info.capability.liveness == Liveness::Session {
            return unsupported("a lease that ends with its session can't be taken up by another one");
        }
        if claim.mode != Mode::Exclusive {
            // Others that hold the lock too may be granted the same fence meanwhile.
            return unsupported("only an exclusive lease can be taken up");
        }
        let Some(fence) = self.fence_above(&claim).await? else { return Ok(None) };
        let holder = Some(self.settings.holder.clone());
        let renewal = Renewal { claim: claim.clone(), ttl: terms.ttl, depth: 1, fence_floor: Some(fence), holder };
        let hold = match self.store.renew(&[renewal]).await.pop() {
            Some(Ok(Renewed::Held(hold))) => hold,
            Some(Ok(Renewed::Lost(_))) => return Ok(None),
            Some(Err(error)) => return Err(error),
            None => return Err(about(Error::new(ErrorKind::Unexpected, "no answer to a renewal"))),
        };
        if hold.until.since(self.now()) < useful(terms.ttl) {
            let message = "the store took so long to renew the lease that too little is left of it";
            return Err(about(Error::new(ErrorKind::TimedOut, message).unknown_effect()));
        }
        // With one fence of its own: those of the grant belong to the former holder.
        let lease = self.admit(Hold { fence, span: 1, ..hold }, terms, None);
        self.note_granted(&lease, start, false);
        Ok(Some(lease))
    }

    /// A fence above all that were given out for the lock; `None` if the claim does not hold it.
    async fn fence_above(&self, claim: &Claim) -> Result<Option<Fence>> {
        let states = self.store.inspect(&Query::Keys(vec![claim.key.clone()])).await?;
        let Some(state) = states.into_iter().next() else { return Ok(None) };
        let is_ours = |holder: &&Holder| holder.token == Some(claim.token) && holder.mode == claim.mode;
        let Some(holder) = state.holders.iter().find(is_ours) else { return Ok(None) };
        Ok(state.fence.max(holder.fence).map(|last| last.offset(1)))
    }

    /// Lets go of a lease that stays at the store until its ttl is over.
    pub(crate) fn detach(self: &Arc<Self>, lease: &Arc<Lease>) -> Result<Token> {
        let about = |error: Error| error.at("detach", Some(&lease.claim.key), &self.store.info().name);
        if self.store.info().capability.liveness == Liveness::Session {
            let message = "a lease that ends with its session can't outlive its holder";
            return Err(about(Error::new(ErrorKind::Unsupported, message)));
        }
        if let Phase::Lost(reason) = self.look(lease) {
            return Err(about(lost(reason)));
        }
        let now = self.now();
        let mut state = lease.state();
        if state.depth > 1 {
            return Err(about(Error::new(ErrorKind::InvalidInput, "the owner has nested holds of the lease")));
        }
        if !state.is_live() {
            return Err(about(lost(LossReason::Gone)));
        }
        state.release();
        self.timers.remove(lease, &state);
        let seat = state.seat.take();
        drop(state);
        if let Some(seat) = &seat {
            self.queues.ended(seat);
        }
        self.note_released(lease, true, now);
        Ok(lease.claim.token)
    }
}

fn lost(reason: LossReason) -> Error {
    Error::new(ErrorKind::Lost, format!("the lease was lost: {reason}"))
}
