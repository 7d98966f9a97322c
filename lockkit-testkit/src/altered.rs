//! Stores for tests that answer as another one does, but for what a test alters.

use async_trait::async_trait;
use lockkit_core::{
    AcquireRequest, Attempt, Claim, KeyState, LockStore, Query, Release, Renewal, Renewed, Result, StoreInfo,
    store::Records,
};
use tokio::task::yield_now;

/// Another store with some of its answers altered. Wrapped in [`Altered`], it is a store.
///
/// An answer that is not altered is the other store's. That is for tests alone: [`LockStore`] has no default methods, for a
/// wrapper in production that lacks one would silently bypass what it wraps.
///
/// ```
/// use async_trait::async_trait;
/// use lockkit_core::{Claim, Error, ErrorKind, LockStore, MemoryStore, Release, Result};
/// use lockkit_testkit::{Alter, Altered};
///
/// #[derive(Debug)]
/// struct NeverReleases(MemoryStore);
///
/// #[async_trait]
/// impl Alter for NeverReleases {
///     fn inner(&self) -> &dyn LockStore {
///         &self.0
///     }
///
///     async fn release(&self, _: &Claim) -> Result<Release> {
///         Err(Error::new(ErrorKind::Unavailable, "connection refused"))
///     }
/// }
///
/// let locker = lockkit_core::Locker::new(Altered(NeverReleases(MemoryStore::new())));
/// ```
#[async_trait]
pub trait Alter: std::fmt::Debug + Send + Sync + 'static {
    /// The other store.
    fn inner(&self) -> &dyn LockStore;

    /// As [`LockStore::info`].
    fn info(&self) -> &StoreInfo {
        self.inner().info()
    }

    /// As [`LockStore::acquire`].
    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        self.inner().acquire(request).await
    }

    /// As [`LockStore::renew`].
    async fn renew(&self, renewals: &[Renewal]) -> Vec<Result<Renewed>> {
        self.inner().renew(renewals).await
    }

    /// As [`LockStore::release`].
    async fn release(&self, claim: &Claim) -> Result<Release> {
        self.inner().release(claim).await
    }

    /// As [`LockStore::inspect`].
    async fn inspect(&self, query: &Query) -> Result<Vec<KeyState>> {
        self.inner().inspect(query).await
    }

    /// As [`LockStore::records`].
    fn records(&self) -> Vec<Box<dyn Records + '_>> {
        self.inner().records()
    }
}

/// The store that an [`Alter`] describes.
#[derive(Clone, Debug)]
pub struct Altered<T>(pub T);

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl<T: Alter> LockStore for Altered<T> {
    fn info(&self) -> &StoreInfo {
        self.0.info()
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        self.0.acquire(request).await
    }

    async fn renew(&self, renewals: &[Renewal]) -> Vec<Result<Renewed>> {
        self.0.renew(renewals).await
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        self.0.release(claim).await
    }

    async fn inspect(&self, query: &Query) -> Result<Vec<KeyState>> {
        self.0.inspect(query).await
    }

    fn records(&self) -> Vec<Box<dyn Records + '_>> {
        self.0.records()
    }
}

/// A store that says something else of itself; made by [`Altered::with_info`].
#[derive(Clone, Debug)]
pub struct WithInfo<S> {
    inner: S,
    info: StoreInfo,
}

impl<S: LockStore> Altered<WithInfo<S>> {
    /// The store `inner`, which says of itself what `change` makes of its [`StoreInfo`].
    pub fn with_info(inner: S, change: impl FnOnce(&mut StoreInfo)) -> Self {
        let mut info = inner.info().clone();
        change(&mut info);
        Self(WithInfo { inner, info })
    }
}

#[async_trait]
impl<S: LockStore> Alter for WithInfo<S> {
    fn inner(&self) -> &dyn LockStore {
        &self.inner
    }

    fn info(&self) -> &StoreInfo {
        &self.info
    }
}

/// A store each of whose answers takes one poll before it has its effect, and one after: for tests that drop a future, or stop polling it, at
/// each place where that can be.
#[derive(Clone, Debug)]
pub struct Slow<S>(pub S);

#[async_trait]
impl<S: LockStore> Alter for Slow<S> {
    fn inner(&self) -> &dyn LockStore {
        &self.0
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        slowly(self.0.acquire(request)).await
    }

    async fn renew(&self, renewals: &[Renewal]) -> Vec<Result<Renewed>> {
        slowly(self.0.renew(renewals)).await
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        slowly(self.0.release(claim)).await
    }

    async fn inspect(&self, query: &Query) -> Result<Vec<KeyState>> {
        slowly(self.0.inspect(query)).await
    }
}

async fn slowly<T>(answer: impl Future<Output = T> + Send) -> T {
    yield_now().await;
    let answer = answer.await;
    yield_now().await;
    answer
}
