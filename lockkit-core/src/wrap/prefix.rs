//! A store whose names all begin with a prefix in the store that it wraps.

use async_trait::async_trait;

use crate::{
    AcquireRequest, Attempt, Claim, Error, Hold, KeyState, LockKey, LockStore, Query, Release, Renewal, Renewed,
    Result, StoreInfo,
    store::{Record, Records, Swap},
};

/// Puts a prefix before every name, so that services, tenants or tests can share a store without sharing locks.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> lockkit_core::Result<()> {
/// use lockkit_core::{Locker, MemoryStore, Prefix};
///
/// let store = MemoryStore::new();
/// let billing = Locker::new(Prefix::new("billing/", store.clone())?);
/// let _guard = billing.lock("nightly").acquire().await?;
/// assert!(Locker::new(store).lock("billing/nightly").try_acquire().await?.is_none());
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Prefix<S> {
    prefix: String,
    inner: S,
    info: StoreInfo,
}

impl<S: LockStore> Prefix<S> {
    /// Wraps `inner`.
    ///
    /// # Errors
    /// [`InvalidInput`](crate::ErrorKind::InvalidInput) if the prefix leaves no room for names.
    pub fn new(prefix: impl Into<String>, inner: S) -> Result<Self> {
        let prefix = prefix.into();
        let mut info = inner.info().clone();
        info.capability.max_key_bytes = info.capability.max_key_bytes.saturating_sub(prefix.len());
        if info.capability.max_key_bytes == 0 {
            return Err(Error::invalid(format!("a prefix of {} bytes leaves no room for names", prefix.len())));
        }
        Ok(Self { prefix, inner, info })
    }

    fn key(&self, key: &LockKey) -> Result<LockKey> {
        LockKey::new(format!("{}{key}", self.prefix))
    }

    fn claim(&self, claim: &Claim) -> Result<Claim> {
        Ok(Claim { key: self.key(&claim.key)?, ..claim.clone() })
    }
}

fn restore(hold: Hold, key: &LockKey) -> Hold {
    Hold { claim: Claim { key: key.clone(), ..hold.claim }, ..hold }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl<S: LockStore> LockStore for Prefix<S> {
    fn info(&self) -> &StoreInfo {
        &self.info
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        let inner = AcquireRequest { claim: self.claim(&request.claim)?, ..request.clone() };
        Ok(match self.inner.acquire(&inner).await? {
            Attempt::Granted(hold) => Attempt::Granted(restore(hold, &request.claim.key)),
            Attempt::Contended(contention) => Attempt::Contended(contention),
        })
    }

    async fn renew(&self, renewals: &[Renewal]) -> Vec<Result<Renewed>> {
        let inner: Result<Vec<_>> = renewals
            .iter()
            .map(|renewal| Ok(Renewal { claim: self.claim(&renewal.claim)?, ..renewal.clone() }))
            .collect();
        let answers = match inner {
            Ok(inner) => self.inner.renew(&inner).await,
            Err(error) => return renewals.iter().map(|_| Err(error.clone())).collect(),
        };
        let restored = answers.into_iter().zip(renewals).map(|(answer, renewal)| {
            answer.map(|renewed| match renewed {
                Renewed::Held(hold) => Renewed::Held(restore(hold, &renewal.claim.key)),
                Renewed::Lost(reason) => Renewed::Lost(reason),
            })
        });
        restored.collect()
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        self.inner.release(&self.claim(claim)?).await
    }

    async fn inspect(&self, query: &Query) -> Result<Vec<KeyState>> {
        let inner = match query {
            Query::Keys(keys) => Query::Keys(keys.iter().map(|key| self.key(key)).collect::<Result<_>>()?),
            Query::Prefix(prefix) => Query::Prefix(format!("{}{prefix}", self.prefix)),
            Query::Queue(key) => Query::Queue(self.key(key)?),
        };
        let states = self.inner.inspect(&inner).await?;
        // A lock whose whole name is the prefix belongs to the wrapped store's own users: it has no name in here.
        let named = states.into_iter().filter_map(|state| {
            let key = LockKey::new(state.key.as_str().strip_prefix(&self.prefix)?).ok()?;
            Some(KeyState { key, ..state })
        });
        Ok(named.collect())
    }

    fn records(&self) -> Vec<Box<dyn Records + '_>> {
        let inside = |inner| Box::new(PrefixRecords { of: self, inner }) as Box<dyn Records>;
        self.inner.records().into_iter().map(inside).collect()
    }
}

/// The records of the wrapped store whose names have the prefix.
struct PrefixRecords<'a, S> {
    of: &'a Prefix<S>,
    inner: Box<dyn Records + 'a>,
}

#[async_trait]
impl<S: LockStore> Records for PrefixRecords<'_, S> {
    async fn read(&self, name: &LockKey) -> Result<Option<Record>> {
        self.inner.read(&self.of.key(name)?).await
    }

    async fn compare_and_set(&self, name: &LockKey, seen: Option<&Record>, new: Option<&Record>) -> Result<Swap> {
        self.inner.compare_and_set(&self.of.key(name)?, seen, new).await
    }
}
