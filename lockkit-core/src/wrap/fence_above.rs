//! A store whose every grant carries a fence above a number.

use async_trait::async_trait;

use crate::{
    AcquireRequest, Attempt, Claim, Fence, FenceRequest, KeyState, LockStore, Query, Release, Renewal, Renewed, Result,
    StoreInfo, store::Records,
};

/// Grants strictly above a fence, whatever the store itself would give: for services that came from another store, whose
/// fences were higher. All clients of the store need it, for as long as they use it; with [`connect`](https://docs.rs/lockkit) it is
/// the option `fence_above=NUMBER` of any URL. A store without fences grants nothing then (`Unsupported`).
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> lockkit_core::Result<()> {
/// use lockkit_core::{Fence, FenceAbove, Locker, MemoryStore};
///
/// let before = Fence::new(4_000_000_000_000_000);
/// let locker = Locker::new(FenceAbove::new(before, MemoryStore::new()));
/// assert!(locker.lock("invoice/42").acquire().await?.fence() > before);
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct FenceAbove<S> {
    floor: Fence,
    inner: S,
}

impl<S: LockStore> FenceAbove<S> {
    /// Wraps `inner`.
    pub fn new(floor: Fence, inner: S) -> Self {
        Self { floor, inner }
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl<S: LockStore> LockStore for FenceAbove<S> {
    fn info(&self) -> &StoreInfo {
        self.inner.info()
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        let fence = FenceRequest { floor: request.fence.floor.max(self.floor), ..request.fence };
        self.info().admit_fence_above(fence.floor)?;
        self.inner.acquire(&AcquireRequest { fence, ..request.clone() }).await
    }

    async fn renew(&self, renewals: &[Renewal]) -> Vec<Result<Renewed>> {
        self.inner.renew(renewals).await
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        self.inner.release(claim).await
    }

    async fn inspect(&self, query: &Query) -> Result<Vec<KeyState>> {
        self.inner.inspect(query).await
    }

    fn records(&self) -> Vec<Box<dyn Records + '_>> {
        self.inner.records()
    }
}
