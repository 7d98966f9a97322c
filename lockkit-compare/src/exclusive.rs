//! What is measured of a lock, whoever it is from: taking it and giving it back.

use lockkit::{Guard, Lock};

use crate::error::Result;

/// A lock that one holder has at a time.
pub(crate) trait Exclusive: Clone + Send + Sync + 'static {
    /// The lock in the hands of a holder.
    type Held: Send;

    /// Waits until the lock is granted.
    fn take(&self) -> impl Future<Output = Result<Self::Held>> + Send;

    /// The fence of this grant, of a lock that has them.
    fn fence(held: &Self::Held) -> Option<u64>;

    fn give_back(held: Self::Held) -> impl Future<Output = Result<()>> + Send;
}

impl Exclusive for Lock {
    type Held = Guard;

    async fn take(&self) -> Result<Guard> {
        Ok(self.acquire().await?)
    }

    fn fence(held: &Guard) -> Option<u64> {
        Some(held.fence().get())
    }

    async fn give_back(held: Guard) -> Result<()> {
        let _ = held.release().await?;
        Ok(())
    }
}
