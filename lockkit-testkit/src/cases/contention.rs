//! Many that want the same lock.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use lockkit_core::{HandOver, Locker, Outcome};

use super::{CaseResult, Ctx, LONG, cases, fencing_claimed, resource::Resource, take};

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

async fn everyone_gets_a_turn(ctx: Ctx) -> CaseResult {
    let name = ctx.name();
    // Turns take round trips, and a few of them are shared by chance: where trips are long, more time is needed to judge.
    let first = ctx.locker().await?;
    let begun = Instant::now();
    assert_eq!(take(&first, &name, LONG).await?.release().await?, Outcome::Released);
    let until = Instant::now() + Duration::from_secs(2).max(begun.elapsed() * 100).min(Duration::from_secs(10));
    let mut clients = Vec::new();
    for _ in 0..3 {
        let lock = ctx.locker().await?.lock(&name).ttl(LONG);
        let tasks: Vec<_> = (0..3)
            .map(|_| {
                let lock = lock.clone();
                tokio::spawn(async move {
                    let mut turns = 0_u64;
                    while Instant::now() < until {
                        let guard = lock.acquire().await?;
                        turns += 1;
                        tokio::task::yield_now().await;
                        assert_eq!(guard.release().await?, Outcome::Released);
                    }
                    Ok::<_, lockkit_core::Error>(turns)
                })
            })
            .collect();
        clients.push(tasks);
    }
    let mut turns = Vec::new();
    for tasks in clients {
        let mut sum = 0;
        for task in tasks {
            sum += task.await??;
        }
        turns.push(sum);
    }
    let (least, total) = (turns.iter().min().copied().unwrap_or(0), turns.iter().sum::<u64>());
    assert!(least * 20 >= total, "one client starved: {turns:?}");
    Ok(())
}

async fn the_waiting_time_is_kept(ctx: Ctx) -> CaseResult {
    let (mine, other, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    let guard = take(&mine, &name, LONG).await?;
    for locker in [&mine, &other] {
        let asked = Instant::now();
        assert!(locker.lock(&name).acquire_within(Duration::from_millis(500)).await?.is_none());
        let waited = asked.elapsed();
        assert!((Duration::from_millis(495)..Duration::from_millis(1500)).contains(&waited), "waited {waited:?}");
    }
    assert_eq!(guard.release().await?, Outcome::Released);
    let free = take(&other, &name, LONG).await?;
    assert_eq!(free.release().await?, Outcome::Released);
    Ok(())
}

async fn zero_wait_is_a_try(ctx: Ctx) -> CaseResult {
    let (mine, other, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    assert!(mine.lock(&name).acquire_within(Duration::ZERO).await?.is_some_and(|guard| guard.is_held()));
    let guard = mine.lock(&name).ttl(LONG).acquire_within(Duration::from_secs(5)).await?;
    assert!(guard.is_some());
    assert!(other.lock(&name).acquire_within(Duration::ZERO).await?.is_none());
    Ok(())
}
