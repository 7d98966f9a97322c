//! A holder that is going to be killed or frozen.

use lockkit::{Clock, SystemClock};

use super::{Answer, Keep, Orders};
use crate::error::Result;

/// Holds the lock, and says for each order whether it still believes so, until the one to end.
pub(super) async fn run(job: Keep, store: Option<&str>, mut orders: Orders) -> Result<Answer> {
    let locker = super::connect(store).await?;
    let guard = locker.lock(&job.key).ttl(job.ttl).acquire().await?;
    super::say(&Answer::Took { at: SystemClock.now().as_nanos() })?;
    while orders.next().await? {
        super::say(&Answer::Believes { held: guard.is_held() })?;
    }
    drop(guard);
    Ok(Answer::Finished)
}
