//! A lease that this process did not acquire, or let go of: taken up again by its token.

use std::sync::Arc;

use super::{Engine, Lease, Phase, Terms};
use crate::{Claim, Error, ErrorKind, Fence, Hold, LossReason, Mode, Order, Query, Renewal, Renewed, Result, Token};

impl Engine {
    /// Takes up a lease by its claim; `None` if the claim does not hold the lock, or is about to be released.
    pub(crate) async fn resume(self: &Arc<Self>, claim: Claim, terms: Terms) -> Result<Option<Arc<Lease>>> {
        self.check_open()?;
        let start = self.now();
        let info = self.store.info();
        let about = |error: Error| error.at("resume", Some(&claim.key), &info.name);
        info.admit_terms(claim.mode, Order::Any, terms.ttl).map_err(about)?;
        let unsupported = |message: &str| Err(about(Error::new(ErrorKind::Unsupported, message)));
        if !info.capability.resume {
            return unsupported("a lease that may end with its session can't be taken up by another one");
        }
        if claim.mode != Mode::Exclusive {
            // Others that hold the lock too may be granted the same fence meanwhile.
            return unsupported("only an exclusive lease can be taken up");
        }
        if self.outstanding.is_owed(&claim.token) {
            // It is burnt (rule R2): the release would end what is taken up.
            return Ok(None);
        }
        let renew = async |fence_floor, holder| {
            let renewal = Renewal { claim: claim.clone(), ttl: terms.ttl, depth: 1, fence_floor, holder };
            match self.store.renew(&[renewal]).await.pop() {
                Some(Ok(Renewed::Held(hold))) => Ok(Some(hold)),
                Some(Ok(Renewed::Lost(_))) => Ok(None),
                Some(Err(error)) => Err(error),
                None => Err(about(Error::new(ErrorKind::Unexpected, "no answer to a renewal"))),
            }
        };
        // Which fences the grant owns; the former holder may have had any of them. A store whose counter lapsed makes it anew.
        let Some(hold) = renew(Some(Fence::new(1)), None).await? else { return Ok(None) };
        let fence = self.fence_above(&hold).await?;
        // The counter is raised before anybody has the fence.
        let Some(hold) = renew(Some(fence), Some(self.settings.holder.clone())).await? else { return Ok(None) };
        if !self.is_useful(&hold, terms.ttl, self.now()) {
            let message = "the store took so long to renew the lease that too little is left of it";
            return Err(about(Error::new(ErrorKind::TimedOut, message).unknown_effect()));
        }
        // A shutdown meanwhile does not wait for this; the lease stays at the store for its ttl.
        self.check_open()?;
        let lease = self.admit(Hold { fence, span: 1, ..hold }, terms, None);
        self.note_granted(&lease, start, false);
        Ok(Some(lease))
    }

    /// A fence above all that were given out for the lock which this grant has.
    async fn fence_above(&self, hold: &Hold) -> Result<Fence> {
        let state = self.store.inspect(&Query::Keys(vec![hold.claim.key.clone()])).await?.pop();
        // The counter may have been raised above the grant, by another resumption.
        let last = state.and_then(|state| state.fence).max(Some(hold.fence.offset(hold.span.saturating_sub(1))));
        Ok(last.unwrap_or(hold.fence).offset(1))
    }

    /// Lets go of a lease that stays at the store until its ttl is over.
    pub(crate) fn detach(self: &Arc<Self>, lease: &Arc<Lease>) -> Result<Token> {
        let about = |error: Error| error.at("detach", Some(&lease.claim.key), &self.store.info().name);
        if !self.store.info().capability.resume {
            let message = "a lease that may end with its session can't outlive its holder";
            return Err(about(Error::new(ErrorKind::Unsupported, message)));
        }
        if let Phase::Lost(reason) = self.look(lease) {
            return Err(about(lost(reason)));
        }
        let now = self.now();
        let state = lease.state();
        if state.depth > 1 {
            return Err(about(Error::new(ErrorKind::InvalidInput, "the owner has nested holds of the lease")));
        }
        if !state.is_live() {
            return Err(about(lost(LossReason::Gone)));
        }
        drop(self.end_here(lease, state, now));
        Ok(lease.claim.token)
    }
}

fn lost(reason: LossReason) -> Error {
    Error::new(ErrorKind::Lost, format!("the lease was lost: {reason}"))
}
