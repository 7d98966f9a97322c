//! Who goes first, where a store says that it keeps an order.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use lockkit_core::Outcome as Ended;

use super::{Ctx, LONG, Outcome, cases, take, wait_for_waiters};

cases! { "fairness":
    waiters_are_served_as_they_came [FIFO] "Waiters of different clients get the lock in the order in which they came."
    a_try_does_not_overtake [FIFO] "Who tries to get the lock while it changes hands does not get it before who waits for it."
}

async fn waiters_are_served_as_they_came(ctx: Ctx) -> Outcome {
    let (mine, name) = (ctx.locker().await?, ctx.name());
    let guard = take(&mine, &name, LONG).await?;
    let served = Arc::new(Mutex::new(Vec::new()));
    let mut waiters = Vec::new();
    for number in 0..5 {
        let (lock, served) = (ctx.locker().await?.lock(&name).ttl(LONG).fifo(), Arc::clone(&served));
        waiters.push(tokio::spawn(async move {
            let guard = lock.acquire_within(LONG).await?;
            // Noted while it holds the lock, so that the notes have the order of the grants.
            served.lock().expect("unpoisoned").push(number);
            match guard {
                Some(guard) => guard.release().await.map(|ended| ended == Ended::Released),
                None => Ok(false),
            }
        }));
        // Only who came before the next one sets out has a claim to be served before.
        wait_for_waiters(&mine.lock(&name), number + 1).await?;
    }
    assert_eq!(guard.release().await?, Ended::Released);
    for waiter in waiters {
        assert!(waiter.await??, "a waiter was left behind");
    }
    let served = served.lock().expect("unpoisoned");
    assert_eq!(*served, [0, 1, 2, 3, 4], "they were served in another order than they came");
    Ok(())
}

async fn a_try_does_not_overtake(ctx: Ctx) -> Outcome {
    let (mine, first, late, name) = (ctx.locker().await?, ctx.locker().await?, ctx.locker().await?, ctx.name());
    let guard = take(&mine, &name, LONG).await?;
    let served = Arc::new(AtomicBool::new(false));
    let (lock, is_served) = (first.lock(&name).ttl(LONG).fifo(), Arc::clone(&served));
    let waiter = tokio::spawn(async move {
        let guard = lock.acquire_within(LONG).await?;
        is_served.store(true, Ordering::SeqCst);
        match guard {
            Some(guard) => guard.release().await.map(|ended| ended == Ended::Released),
            None => Ok(false),
        }
    });
    wait_for_waiters(&mine.lock(&name), 1).await?;
    let releasing = tokio::spawn(guard.release());
    let (lock, asked) = (late.lock(&name).ttl(LONG).fifo(), Instant::now());
    let guard = loop {
        if let Some(guard) = lock.try_acquire().await? {
            break guard;
        }
        assert!(asked.elapsed() < Duration::from_secs(10), "the lock was never free");
    };
    assert!(served.load(Ordering::SeqCst), "a try overtook the waiter");
    assert_eq!(guard.release().await?, Ended::Released);
    assert_eq!(releasing.await??, Ended::Released);
    assert!(waiter.await??, "the waiter was left behind");
    Ok(())
}
