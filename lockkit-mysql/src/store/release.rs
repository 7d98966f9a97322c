//! Ending a lease.

use lockkit_core::{Claim, Release, Result, store::Sent};

use crate::{
    client::{connection::Bound, pool::Lane},
    store::{MySqlStore, named_lock_queue, renew, why_not},
    wire::name::to_column,
};

impl MySqlStore {
    pub(crate) async fn release_claim(&self, claim: &Claim) -> Result<Release> {
        self.info.admit_mode(claim.mode)?;
        self.grants.forget(&claim.token);
        let bound = Bound::new(self.timeout);
        let named_lock = self.queues.named_lock_of(&claim.key, &claim.token);
        // The release follows every statement that was sent for the claim and given up: one of those could take the lock after it.
        self.pool.settled(&claim.token, bound).await?;
        let mut connection = self.pool.connection(Lane::Reserved, bound).await?;
        let token = claim.token.as_bytes().as_slice();
        let statement = |question| self.statements.release().bind(question).bind(to_column(&claim.key)).bind(token);
        let (done, question) = connection.execute(statement, Some(claim.token)).await?;
        match done.rows_affected() {
            1 if renew::is_answer(&done, question) => {
                named_lock_queue::release(named_lock);
                Ok(Release::Released { waiters: None })
            }
            0 if renew::is_answer(&done, question) => {
                let found = self.look_after(&mut connection, &claim.key).await?;
                Ok(Release::NotHeld(why_not(found.as_ref().and_then(|lock| lock.lease.as_ref()))))
            }
            _ => Err(connection.out_of_step(Sent::Yes)),
        }
    }
}
