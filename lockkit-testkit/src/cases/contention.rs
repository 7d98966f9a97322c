//! Many that want the same lock.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use lockkit_core::{HandOver, Locker, Outcome};
use tokio::task::JoinSet;

use super::{CaseResult, Ctx, LONG, answered, cases, fencing_claimed, resource::Resource, take, take_in_the_end};
use crate::BoxError;

cases! { "contention":
    a_crowd_loses_no_update [NOTHING] "50 tasks of 5 clients increment a counter under one lock: none is lost, no fence is stale."
    without_hand_over_no_update_is_lost [NOTHING] "The same with local hand-over off."
    everyone_gets_a_turn [NOTHING] "Clients that all want a lock all the time all get it."
    the_waiting_time_is_kept [NOTHING] "acquire_within gives up in time and leaves nothing behind."
    zero_wait_is_a_try [NOTHING] "acquire_within(0) asks once."
}

async fn crowd(ctx: &Ctx, rule: HandOver) -> CaseResult {
    let (resource, name) = (Arc::new(Resource::default()), ctx.name());
    let mut tasks = Vec::new();
    for _ in 0..5 {
        let locker = Locker::shared_builder(ctx.store().await?).hand_over(rule).build();
        for _ in 0..10 {
            let (lock, resource) = (locker.lock(&name).ttl(LONG), Arc::clone(&resource));
            let fenced = fencing_claimed(&locker);
            tasks.push(tokio::spawn(async move {
                for _ in 0..10 {
                    let guard = lock.acquire().await?;
                    assert!(!fenced || resource.admit(guard.fence()), "fence {} is stale", guard.fence());
                    resource.increment().await;
                    assert_eq!(guard.release().await?, Outcome::Released);
                }
                Ok::<_, lockkit_core::Error>(())
            }));
        }
    }
    for task in tasks {
        task.await??;
    }
    assert_eq!(resource.count(), 500, "updates were lost");
    Ok(())
}

async fn a_crowd_loses_no_update(ctx: Ctx) -> CaseResult {
    crowd(&ctx, HandOver::default()).await
}

async fn without_hand_over_no_update_is_lost(ctx: Ctx) -> CaseResult {
    crowd(&ctx, HandOver::OFF).await
}

/// How often each client got the lock from another. How often it had it in a row, by local hand-over, says more of its share of the
/// processor than of the lock.
#[derive(Default)]
struct Turns {
    of_client: [AtomicU64; 3],
    last: AtomicUsize,
}

impl Turns {
    fn take(&self, client: usize) {
        if self.last.swap(client, Relaxed) != client {
            self.of_client[client].fetch_add(1, Relaxed);
        }
    }

    fn of_client(&self) -> [u64; 3] {
        self.of_client.each_ref().map(|turns| turns.load(Relaxed))
    }

    fn all(&self) -> u64 {
        self.of_client().iter().sum()
    }
}

async fn everyone_gets_a_turn(ctx: Ctx) -> CaseResult {
    let (name, turns) = (ctx.name(), Arc::new(Turns::default()));
    // All connect before one begins: turns that a client takes while it is alone say nothing.
    let mut lockers = Vec::new();
    for _ in 0..3 {
        lockers.push(ctx.locker().await?);
    }
    // Few turns would judge by chance. Where each takes long, 60 will do.
    let (begun, most, enough, long) = (Instant::now(), 200, 60, Duration::from_secs(10));
    let mut tasks = JoinSet::new();
    for client in (0..9).map(|task| task % 3) {
        let (lock, turns) = (lockers[client].lock(&name).ttl(LONG), Arc::clone(&turns));
        tasks.spawn(async move {
            while turns.all() < if begun.elapsed() < long { most } else { enough } {
                let guard = lock.acquire().await?;
                turns.take(client);
                tokio::task::yield_now().await;
                assert_eq!(guard.release().await?, Outcome::Released);
            }
            Ok::<_, lockkit_core::Error>(())
        });
    }
    let ended = async {
        while let Some(ended) = tasks.join_next().await {
            ended??;
        }
        Ok::<_, BoxError>(())
    };
    let ended = tokio::time::timeout(LONG * 2, ended).await;
    let of_client = turns.of_client();
    ended.map_err(|_| format!("the lock does not go from one client to another: {of_client:?}"))??;
    let least = of_client.into_iter().min().unwrap_or(0);
    assert!(least * 20 >= turns.all(), "one client starved: {of_client:?}");
    Ok(())
}

async fn the_waiting_time_is_kept(ctx: Ctx) -> CaseResult {
    let (mine, other, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    let guard = take(&mine, &name, LONG).await?;
    for locker in [&mine, &other] {
        let asked = Instant::now();
        let refused = locker.lock(&name).acquire_within(Duration::from_millis(500)).await?;
        assert!(refused.is_none(), "a held lock was granted");
        let waited = asked.elapsed();
        assert!((Duration::from_millis(495)..LONG / 2).contains(&waited), "waited {waited:?}");
    }
    assert_eq!(guard.release().await?, Outcome::Released);
    // A quorum undoes in the background what it asked for last, and the release may be under way at one node as well: a try may be refused.
    let free = take_in_the_end(&other, &name, LONG).await?;
    assert_eq!(free.release().await?, Outcome::Released);
    Ok(())
}

async fn zero_wait_is_a_try(ctx: Ctx) -> CaseResult {
    let (mine, other, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    let once = async |locker: &Locker| {
        let lock = locker.lock(&name);
        answered(|| lock.acquire_within(Duration::ZERO)).await
    };
    assert!(once(&mine).await?.is_some_and(|guard| guard.is_held()));
    let guard = mine.lock(&name).ttl(LONG).acquire_within(Duration::from_secs(5)).await?;
    assert!(guard.is_some());
    assert!(once(&other).await?.is_none(), "a held lock was granted");
    Ok(())
}
