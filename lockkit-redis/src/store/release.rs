//! Ending a lease.

use lockkit_core::{Claim, LossReason, Release, Result, store::Sent};
use redis::Value;

use crate::{
    client::node::Route,
    store::RedisStore,
    wire::{error, request::Request},
};

impl RedisStore {
    pub(crate) async fn release_claim(&self, claim: &Claim) -> Result<Release> {
        self.info.admit_mode(claim.mode)?;
        let mut route = self.nodes.route(&self.names.lock(&claim.key)).await?;
        loop {
            match self.release_at(&route, claim).await {
                Ok(release) => return Ok(release),
                Err(e) => route = self.nodes.follow(route, e).await?,
            }
        }
    }

    async fn release_at(&self, Route { node, asking, .. }: &Route, claim: &Claim) -> Result<Release> {
        let lock = self.names.lock(&claim.key);
        let request = Request::release(&lock, &claim.token);
        let connection = node.dialer.connection().await?;
        let reply = connection.request(request, None, *asking, self.timeout).await?;
        match reply {
            Value::Int(-1) => Ok(Release::NotHeld(LossReason::Gone)),
            Value::Int(-2) => Ok(Release::NotHeld(LossReason::Taken)),
            Value::Int(-3) => Ok(Release::Released { waiters: None }),
            Value::Int(receivers @ 0..) => {
                let others = receivers - i64::from(node.subscriptions.is_subscribed(&lock));
                // A member of a cluster counts only those who listen at it.
                Ok(Release::Released { waiters: Some(u32::try_from(others).unwrap_or(0)) })
            }
            _ => Err(error::odd_reply(Sent::Yes)),
        }
    }
}
