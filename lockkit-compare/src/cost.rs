//! What held locks and waiters cost the servers.

use std::{sync::Arc, time::Duration};

use lockkit::{LockStore, Locker};
use tokio::task::JoinSet;

use crate::{
    error::{Error, Result},
    meter::{Meter, Watched},
    plan::{Plan, Sizes},
    results::{Figure, ServerCost, Share},
    targets::Target,
    worker::{ABREAST, TAKEN_WITHIN, acquire_all},
};

/// How long a lock lasts that is waited for. It is first renewed after some nine seconds, so that this does not count as the waiters' cost.
const AWAITED_TTL: Duration = Duration::from_secs(30);
/// How long waiters are left alone first. Those that ask again and again do so at a slower and slower pace, which is the slowest after
/// that time.
const SETTLE: Duration = Duration::from_secs(1);
/// How long releases may take in the end.
const END_WITHIN: Duration = Duration::from_secs(30);

/// Measures a store, with clients of its own.
pub(crate) async fn of(target: &Target, key: &str, plan: &Plan) -> Result<ServerCost> {
    let holder = lockkit::open(target.url()).await?;
    let mut waiting = Vec::new();
    for _ in 0..Plan::WAITERS {
        waiting.push(lockkit::open(target.url()).await?);
    }
    server_cost(&Meter::of(target), holder, waiting, &format!("{key}/cost"), plan.cost).await
}

/// One client holds locks; then it holds one, which each of the others waits for. All are connected from the beginning, and that they
/// are costs nobody anything here.
async fn server_cost(
    meter: &Meter,
    holder: Arc<dyn LockStore>,
    waiting: Vec<Arc<dyn LockStore>>,
    key: &str,
    sizes: Sizes,
) -> Result<ServerCost> {
    let waiting: Vec<_> = waiting.into_iter().map(locker).collect();
    for (number, waiter) in waiting.iter().enumerate() {
        drop(acquire_all(waiter, &format!("{key}/warm-up/{number}"), 1, sizes.ttl).await?);
    }
    let first = locker(Arc::clone(&holder));
    // As many at once as later, so that the connections and their buffers are there.
    drop(acquire_all(&first, &format!("{key}/warm-up"), ABREAST, sizes.ttl).await?);
    let idle = meter.watch(sizes.idle).await?;
    let guards = acquire_all(&first, &format!("{key}/held"), sizes.locks, sizes.ttl).await?;
    let held = meter.watch(sizes.held).await?;
    let left = guards.iter().filter(|guard| guard.is_held()).count();
    drop(guards);
    first.shutdown(END_WITHIN).await?;
    let locks = share(left, &held, &idle);
    // Until the buffers of all these releases are gone.
    tokio::time::sleep(sizes.idle).await;
    let (number, before) = (waiting.len(), Watched { bytes: meter.bytes().await?.into_iter().collect(), ..idle });
    let awaited = awaited(meter, holder, waiting, key, sizes.awaited).await?;
    Ok(ServerCost { locks, waiters: share(number, &awaited, &before) })
}

fn locker(store: Arc<dyn LockStore>) -> Locker {
    Locker::shared_builder(store).patience(TAKEN_WITHIN).build()
}

/// Watches the servers while a lock is held that others wait for.
async fn awaited(
    meter: &Meter,
    holder: Arc<dyn LockStore>,
    waiting: Vec<Locker>,
    key: &str,
    time: Duration,
) -> Result<Watched> {
    let name = format!("{key}/awaited");
    let holder = locker(holder);
    let guard = holder.lock(&name).ttl(AWAITED_TTL).acquire().await?;
    let mut waiters = JoinSet::new();
    for waiter in &waiting {
        let lock = waiter.lock(&name).ttl(AWAITED_TTL);
        waiters.spawn(async move { lock.acquire().await });
    }
    let watching = async {
        tokio::time::sleep(SETTLE).await;
        meter.watch(time).await
    };
    let watched = tokio::select! {
        watched = watching => watched?,
        Some(ended) = waiters.join_next() => {
            let _ = ended??;
            return Err(Error::internal("a waiter got a lock that was held"));
        }
    };
    waiters.shutdown().await;
    let _ = guard.release().await?;
    for locker in waiting.into_iter().chain([holder]) {
        locker.shutdown(END_WITHIN).await?;
    }
    Ok(watched)
}

/// What one of so many costs, above what the servers did and had without them.
fn share(number: usize, with: &Watched, without: &Watched) -> Share {
    Share {
        // What is done in bursts, such as every few seconds, is only in the mean.
        requests: above(number, mean, &with.requests, &without.requests),
        micros: above(number, mean, &with.micros, &without.micros),
        // Servers give each request a buffer, and some keep it for a while: what is always there is the least.
        bytes: above(number, least, &with.bytes, &without.bytes),
    }
}

/// By how much the one is above the other, for each of so many. The range is that of the parts.
fn above(number: usize, of: fn(&[f64]) -> Option<f64>, with: &[f64], without: &[f64]) -> Option<Figure> {
    if number == 0 {
        return None;
    }
    // Below zero is what the servers did beside, and no cost.
    let each = |with: f64, without: f64| (with - without).max(0.0) / number as f64;
    let most = |parts: &[f64]| parts.iter().copied().reduce(f64::max);
    let ends = [each(least(with)?, most(without)?), each(most(with)?, least(without)?)];
    Some(Figure::new(each(of(with)?, of(without)?), ends))
}

fn mean(parts: &[f64]) -> Option<f64> {
    (!parts.is_empty()).then(|| parts.iter().sum::<f64>() / parts.len() as f64)
}

fn least(parts: &[f64]) -> Option<f64> {
    parts.iter().copied().reduce(f64::min)
}

#[cfg(test)]
mod tests {
    use async_trait::async_trait;
    use lockkit::{
        redis::RedisStore,
        store::{AcquireRequest, Attempt, Contention},
    };
    use lockkit_testkit::{
        Alter, Altered,
        servers::{RedisOptions, RedisServer},
    };

    use super::*;
    use crate::targets::{PrivateServer, Targets};

    /// A store whose waiters are not woken, but ask every two milliseconds.
    #[derive(Debug)]
    struct Asking(RedisStore);

    #[async_trait]
    impl Alter for Asking {
        fn inner(&self) -> &dyn LockStore {
            &self.0
        }

        async fn acquire(&self, request: &AcquireRequest) -> lockkit::Result<Attempt> {
            Ok(match self.0.acquire(&AcquireRequest { wait: Duration::ZERO, ..request.clone() }).await? {
                Attempt::Contended(contention) => {
                    Attempt::Contended(Contention { retry_after: Some(Duration::from_millis(2)), ..contention })
                }
                granted => granted,
            })
        }
    }

    /// A private server with the meter of it.
    async fn metered() -> (String, Meter, Targets) {
        let redis = RedisServer::start(RedisOptions::default()).await.expect("redis");
        let (url, mut targets) = (redis.url(), Targets::default());
        targets.start("redis".to_owned(), url.clone(), vec![PrivateServer::forgetful(redis)]);
        (url, Meter::of(&targets.list()[0]), targets)
    }

    fn sizes(locks: usize) -> Sizes {
        let millis = Duration::from_millis;
        Sizes { locks, ttl: millis(1500), idle: millis(300), held: millis(1100), awaited: millis(500) }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_waiter_that_asks_all_the_time_costs_more_than_one_that_is_woken() {
        let (url, meter, _server) = metered().await;
        let mut requests = Vec::new();
        for asks in [false, true] {
            let mut stores: Vec<Arc<dyn LockStore>> = Vec::new();
            for _ in 0..6 {
                let store = RedisStore::from_url(&url).await.expect("store");
                stores.push(if asks { Arc::new(Altered(Asking(store))) } else { Arc::new(store) });
            }
            let holder = stores.pop().expect("one of six");
            let cost =
                server_cost(&meter, holder, stores, &format!("asks {asks}"), sizes(1000)).await.expect("measured");
            // Each lock is renewed once in half a second; that is one command in a script or more.
            let renewals = cost.locks.requests.expect("told").value;
            assert!((1.5..20.0).contains(&renewals), "{renewals}");
            let bytes = cost.locks.bytes.expect("told").value;
            assert!((50.0..5000.0).contains(&bytes), "{bytes}");
            requests.push(cost.waiters.requests.expect("told").value);
        }
        let [woken, asking] = requests[..] else { panic!("{requests:?}") };
        assert!(woken < 20.0 && asking > 100.0, "{requests:?}");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn nobody_costs_nothing() {
        let (url, meter, _server) = metered().await;
        let holder = lockkit::open(&url).await.expect("store");
        let cost = server_cost(&meter, holder, Vec::new(), "nobody", sizes(0)).await.expect("measured");
        assert!(cost.locks.requests.is_none() && cost.waiters.bytes.is_none(), "{cost:?}");
    }

    #[test]
    fn a_share_is_what_there_was_above_the_idle_server() {
        let with = Watched { requests: vec![10.0, 30.0], micros: vec![5.0], bytes: vec![1000.0, 5000.0] };
        let idle = Watched { requests: vec![2.0, 6.0], micros: vec![7.0], bytes: vec![900.0, 600.0] };
        let told = share(2, &with, &idle);
        // The mean; for memory the least.
        assert_eq!(told.requests, Some(Figure { value: 8.0, range: Some((2.0, 14.0)) }));
        assert_eq!(told.bytes, Some(Figure { value: 200.0, range: Some((50.0, 2200.0)) }));
        assert_eq!(told.micros.map(|figure| figure.value), Some(0.0), "less is no cost");
        let untold = share(2, &with, &Watched { micros: Vec::new(), ..idle });
        assert_eq!((untold.micros, untold.requests), (None, told.requests));
    }
}
