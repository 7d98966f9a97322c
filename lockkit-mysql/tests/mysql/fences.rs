//! Fences, as far as they are this store's own.

use std::{
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use lockkit_core::{ErrorKind, Fence, FenceClock, FenceRequest, LockStore};

use crate::support::{Ctx, TTL, attempt, claim, free, hold, request, rival, tests};

tests! {
    large_fences_are_exact
    a_counter_that_fell_back_is_made_good_by_the_clock
    without_the_clock_the_counter_goes_on_by_one
    a_repeated_claim_has_the_grant_on_record
    many_clients_on_one_row_get_ordered_fences
}

/// The server computes the fence of integers of several kinds; none of it may pass through a float.
async fn large_fences_are_exact(ctx: Arc<Ctx>) {
    let (store, mine) = (ctx.store().await, claim());
    for floor in [(1 << 53) + 1, (1 << 61) + 1, (1 << 62) - (1 << 40) - 5] {
        let mut asked = request(&rival(&mine));
        asked.fence = FenceRequest { floor: Fence::new(floor), span: 1, clock: FenceClock::Store };
        match store.acquire(&asked).await.expect("acquire") {
            lockkit_core::Attempt::Granted(hold) => assert_eq!(hold.fence.get(), floor + 1),
            other => panic!("{other:?}"),
        }
        free(&store, &asked.claim).await;
    }
    // One just below the end would make the first grant the last.
    for floor in [1 << 62, (1 << 62) - 5] {
        let mut asked = request(&mine);
        asked.fence.floor = Fence::new(floor);
        assert_eq!(store.acquire(&asked).await.expect_err("too far").kind(), ErrorKind::InvalidInput);
    }
}

/// A crash that lost the last commits leaves an old counter behind.
async fn a_counter_that_fell_back_is_made_good_by_the_clock(ctx: Arc<Ctx>) {
    let (store, mut raw, mine) = (ctx.store().await, ctx.raw().await, claim());
    let before = hold(&store, &mine).await.fence;
    free(&store, &mine).await;
    let back = "UPDATE resource_lock SET fence_last = 5, fence = 5 WHERE resource_name = ?";
    sqlx::query(back).bind(mine.key.as_str().as_bytes()).execute(&mut raw).await.expect("fall back");
    let after = hold(&store, &rival(&mine)).await.fence;
    assert!(after > before, "{after} after {before}");
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("clock");
    assert!(now.abs_diff(Duration::from_micros(after.get())) < Duration::from_secs(60), "{after} is no time");
}

async fn without_the_clock_the_counter_goes_on_by_one(ctx: Arc<Ctx>) {
    let (store, mine) = (ctx.store().await, claim());
    for expected in [1, 2, 3] {
        let mut asked = request(&rival(&mine));
        asked.fence = FenceRequest { floor: Fence::NONE, span: 1, clock: FenceClock::Floor };
        match store.acquire(&asked).await.expect("acquire") {
            lockkit_core::Attempt::Granted(hold) => assert_eq!(hold.fence.get(), expected),
            other => panic!("{other:?}"),
        }
        free(&store, &asked.claim).await;
    }
}

async fn a_repeated_claim_has_the_grant_on_record(ctx: Arc<Ctx>) {
    let (store, mine) = (ctx.store().await, claim());
    let mut asked = request(&mine);
    asked.fence.span = 65;
    let lockkit_core::Attempt::Granted(first) = store.acquire(&asked).await.expect("acquire") else {
        panic!("it was free")
    };
    let deeper = lockkit_core::Renewal { depth: 3, ..lockkit_core::Renewal::new(mine.clone(), TTL) };
    drop(store.renew(&[deeper]).await.remove(0).expect("renew"));
    let again = hold(&store, &mine).await;
    assert_eq!((again.fence, again.span, again.depth), (first.fence, 65, 3));
    assert!(again.until > first.until);
}

async fn many_clients_on_one_row_get_ordered_fences(ctx: Arc<Ctx>) {
    let (name, last) = (claim(), Arc::new(std::sync::Mutex::new(0)));
    let mut tasks = Vec::new();
    for _ in 0..8 {
        let (store, name, last) = (ctx.store().await, name.clone(), Arc::clone(&last));
        tasks.push(tokio::spawn(async move {
            let mut grants = 0;
            while grants < 40 {
                let mine = rival(&name);
                if let lockkit_core::Attempt::Granted(hold) = attempt(&store, &mine).await.expect("no error") {
                    {
                        let mut last = last.lock().expect("unpoisoned");
                        assert!(hold.fence.get() > *last, "{} after {last}", hold.fence);
                        *last = hold.fence.get();
                    }
                    grants += 1;
                    free(&store, &mine).await;
                }
            }
        }));
    }
    for task in tasks {
        task.await.expect("ordered");
    }
}
