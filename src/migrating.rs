//! The store of a service that moves from one store to another.

use std::{
    fmt,
    sync::{Arc, OnceLock},
    time::Duration,
};

use async_trait::async_trait;
use lockkit_core::{
    AcquireRequest, Attempt, Capability, Claim, Error, ErrorKind, Fencing, HolderInfo, KeyState, Liveness, LockKey,
    LockStore, Query, Release, Renewal, Renewed, Result, StoreInfo, SystemClock, Waiting,
    migrate::Dual,
    store::{Reconnections, Record, Records, SingleFlight, Swap},
};

use crate::target::{fence_above, open_one};

/// How long a call waits for a store that could not be reached when the service started.
const PATIENCE: Duration = Duration::from_secs(2);

/// Connects to the two stores of a migration that was started with `lockkit migrate start`, and makes one store of them: a service
/// uses it in the place of the old store, is deployed once, and moves as `lockkit migrate advance` says. See `docs/migration.md`.
///
/// One of the two may be out of reach, so that a service can start while the store that is not needed in the present phase is away;
/// connecting to it is tried again whenever it is needed. [`open`](crate::open) and [`connect`](crate::connect()) take the
/// same as `migrate:?from=URL&to=URL`, with both URLs as they are; the first `&to=` divides them.
///
/// This process [signs on](Dual::sign_on), so that `lockkit migrate status` shows it, as `program@host:pid`.
///
/// # Errors
/// As [`connect`](crate::connect()), for either store, or for both if they can't be reached; `Misconfigured` if the stores have no record of a
/// migration between them.
///
/// # Examples
/// ```no_run
/// # async fn example() -> lockkit::Result<()> {
/// use lockkit::Locker;
///
/// let store = lockkit::migrating("redis://old.example", "mysql://app:secret@new.example/locks").await?;
/// let locker = Locker::shared_builder(store).build();
/// # Ok(()) }
/// ```
pub async fn migrating(from: &str, to: &str) -> Result<Arc<dyn LockStore>> {
    let [old, new] = stores_of_migration(from, to).await?;
    let store = Arc::new(Dual::connect(old, new).await?);
    store.sign_on(HolderInfo::this_process());
    Ok(store)
}

/// Connects to the two stores, of which one may be out of reach: that one is connected to when it is needed. For
/// [`Migration::new`](crate::migrate::Migration::new), as `lockkit migrate` has it.
///
/// # Errors
/// As [`connect`](crate::connect()), for either store, or for both if they can't be reached.
pub async fn stores_of_migration(from: &str, to: &str) -> Result<[Arc<dyn LockStore>; 2]> {
    for url in [from, to] {
        if let (_, Some(_)) = fence_above(url)? {
            let why = "with a migration, fence_above is said when it is started: lockkit migrate start --fence-above";
            return Err(Error::invalid(why));
        }
    }
    Ok(match (open_one(from).await, open_one(to).await) {
        (Ok(old), Ok(new)) => [old, new],
        (Ok(old), Err(error)) if error.is_retryable() => [old, Late::of(to)],
        (Err(error), Ok(new)) if error.is_retryable() => [Late::of(from), new],
        (Err(error), _) | (_, Err(error)) => return Err(error),
    })
}

/// A store that could not be reached yet. Until it was, it is said to be able to do as little as any.
struct Late {
    url: String,
    unknown: StoreInfo,
    store: OnceLock<Arc<dyn LockStore>>,
    opening: SingleFlight<Arc<dyn LockStore>>,
}

impl Late {
    fn of(url: &str) -> Arc<dyn LockStore> {
        let unknown = StoreInfo {
            scheme: "late",
            name: "a store that could not be reached yet".into(),
            capability: Capability::exclusive(
                Waiting::Poll,
                // Its leases may be of either kind: nothing may count on time to end them.
                Liveness { ttl: None, session: Some(Duration::from_secs(20)) },
                Fencing::BestEffort,
            ),
            clock: Arc::new(SystemClock),
            alarm: None,
            reconnections: Reconnections::default(),
            warnings: Arc::default(),
        };
        Arc::new(Self { url: url.to_owned(), unknown, store: OnceLock::new(), opening: SingleFlight::new() })
    }

    async fn store(&self) -> Result<&Arc<dyn LockStore>> {
        if let Some(store) = self.store.get() {
            return Ok(store);
        }
        let url = self.url.clone();
        let opened = self.opening.get(|_| true, PATIENCE, || async move { open_one(&url).await }).await?;
        self.unknown.reconnections.follow(opened.info().reconnections.clone());
        Ok(self.store.get_or_init(|| opened))
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl LockStore for Late {
    fn info(&self) -> &StoreInfo {
        self.store.get().map_or(&self.unknown, |store| store.info())
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        self.store().await?.acquire(request).await
    }

    async fn renew(&self, renewals: &[Renewal]) -> Vec<Result<Renewed>> {
        match self.store().await {
            Ok(store) => store.renew(renewals).await,
            Err(error) => renewals.iter().map(|_| Err(error.clone())).collect(),
        }
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        self.store().await?.release(claim).await
    }

    async fn inspect(&self, query: &Query) -> Result<Vec<KeyState>> {
        self.store().await?.inspect(query).await
    }

    fn records(&self) -> Vec<Box<dyn Records + '_>> {
        self.store.get().map_or_else(|| vec![Box::new(self) as Box<dyn Records>], |store| store.records())
    }
}

/// Until the store is there: what is asked has it opened, and fails; then the store itself is asked.
#[async_trait]
impl Records for Late {
    async fn read(&self, _: &LockKey) -> Result<Option<Record>> {
        self.store().await?;
        Err(just_opened())
    }

    async fn compare_and_set(&self, _: &LockKey, _: Option<&Record>, _: Option<&Record>) -> Result<Swap> {
        self.store().await?;
        Err(just_opened())
    }
}

fn just_opened() -> Error {
    Error::new(ErrorKind::Unavailable, "the store has only just been reached: ask again")
}

impl fmt::Debug for Late {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The URL may have a password in it.
        f.debug_struct("Late").field("store", &self.store.get()).finish_non_exhaustive()
    }
}
