//! Leases that are let go of at a store which ends none by time: those that nobody takes up end all the same.

mod paused;

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use lockkit_core::{
    AcquireRequest, Attempt, ErrorKind, Guard, Liveness, LockStore, Locker, MemoryStore, Result, Resume, StoreInfo,
};
use lockkit_testkit::{Alter, Altered};
use tokio::time::{Instant, sleep};

use crate::paused::paused_store;

const TTL: Duration = Duration::from_secs(10);
/// As long as a test thinks of.
const SESSION: Duration = Duration::from_secs(300);

/// A store on which a lease lasts for as long as the session, whatever was asked for.
#[derive(Clone, Debug)]
struct WithSessions {
    inner: MemoryStore,
    info: StoreInfo,
}

impl WithSessions {
    fn new(inner: MemoryStore) -> Arc<Altered<Self>> {
        let mut info = inner.info().clone();
        info.capability.liveness = Liveness { ttl: None, session: Some(SESSION) };
        info.capability.resume = Resume::WhileSession;
        Arc::new(Altered(Self { inner, info }))
    }
}

#[async_trait]
impl Alter for WithSessions {
    fn inner(&self) -> &dyn LockStore {
        &self.inner
    }

    fn info(&self) -> &StoreInfo {
        &self.info
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        self.inner.acquire(&AcquireRequest { ttl: SESSION, ..request.clone() }).await
    }
}

async fn take(locker: &Locker) -> Result<Guard> {
    locker.lock("x").ttl(TTL).acquire().await
}

/// How long the lock is another's from now on.
async fn until_free(locker: &Locker) -> Result<Duration> {
    let since = Instant::now();
    while locker.lock("x").try_acquire().await?.is_none() {
        sleep(Duration::from_millis(10)).await;
    }
    Ok(since.elapsed())
}

#[tokio::test(start_paused = true)]
async fn what_nobody_takes_up_is_released_when_its_ttl_is_over() -> Result<()> {
    let store = WithSessions::new(paused_store());
    let (giver, other) = (Locker::shared_builder(store.clone()).build(), Locker::shared_builder(store).build());
    let token = take(&giver).await?.detach()?;
    // The process is not done with it when its locker is. Nor does that wait for what somebody else may do.
    giver.shutdown(TTL / 10).await?;
    drop(giver);
    let lasted = until_free(&other).await?;
    assert!((TTL..TTL * 2).contains(&lasted), "it lasted for {lasted:?}");
    assert!(other.lock("x").resume(token).await?.is_none(), "it is over");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn what_was_taken_up_is_not_released_with_what_was_let_go_of() -> Result<()> {
    let store = WithSessions::new(paused_store());
    let (giver, other) = (Locker::shared_builder(store.clone()).build(), Locker::shared_builder(store).build());
    let token = take(&giver).await?.detach()?;
    sleep(TTL / 2).await;
    let guard = other.lock("x").ttl(TTL).resume(token).await?.expect("it is there");
    sleep(TTL * 2).await;
    guard.renew().await?;
    assert!(giver.lock("x").try_acquire().await?.is_none(), "it is held");
    Ok(())
}

/// Its runtime has ended, which was to release it when its time is up: the next one does so at once.
#[test]
fn what_was_let_go_of_ends_with_the_runtime_that_is_to_end_it() -> Result<()> {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let store = WithSessions::new(MemoryStore::new());
    let (first, giver) = (runtime(), Locker::shared_builder(store).build());
    first.block_on(async { take(&giver).await?.detach() })?;
    drop(first);
    runtime().block_on(async {
        assert!(giver.lock("x").acquire_within(TTL / 2).await?.is_some(), "nobody ends it");
        Ok(())
    })
}

/// A store that does as much as one with sessions says so.
#[tokio::test]
async fn a_store_like_one_with_sessions_promises_no_more() -> Result<()> {
    let mut capability = MemoryStore::new().info().capability.clone();
    for (resume, is_there) in [(Resume::UntilTtl, true), (Resume::WhileSession, true), (Resume::None, false)] {
        capability.resume = resume;
        let store = MemoryStore::new().like(&capability);
        assert_eq!(store.info().capability.resume, resume);
        match take(&Locker::new(store)).await?.detach() {
            Ok(_) => assert!(is_there),
            Err(error) => assert_eq!((error.kind(), is_there), (ErrorKind::Unsupported, false)),
        }
    }
    Ok(())
}
