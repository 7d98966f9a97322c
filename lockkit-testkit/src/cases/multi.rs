//! Several locks that are held together.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use lockkit_core::{ErrorKind, LossReason, MultiLock, Outcome, Release};
use tokio::time::timeout;

use super::{CaseResult, Ctx, answered, assert_taken, cases, seen, take, take_in_the_end};
use crate::BoxError;

cases! { "multi":
    all_are_had_or_none [NOTHING] "Of several locks all are had or none: while another has one, a try leaves the others free; after its release all are had."
    one_that_is_lost_is_the_loss_of_all [NOTHING] "When one of several locks is lost, their guard says so and drops its work; its release gives the others back."
    clients_wait_in_no_circle [NOTHING] "Clients that name the same locks in different orders do not wait for each other: each has all of them, one at a time."
}

/// How long anything awaited may take. Not how long it does take.
const PATIENCE: Duration = Duration::from_secs(30);
/// A loss is noticed with a renewal, after a third of it. Longer than a test waits for a lock that should be free.
const TTL: Duration = Duration::from_secs(12);

fn names(ctx: &Ctx) -> [String; 3] {
    [ctx.name(), ctx.name(), ctx.name()]
}

async fn all_are_had_or_none(ctx: Ctx) -> CaseResult {
    let (names, other) = (names(&ctx), ctx.locker().await?);
    let several = ctx.locker().await?.multi(&names);
    let [first, middle, last] = &names;
    let held = take(&other, middle, TTL).await?;
    assert!(answered(|| several.try_acquire()).await?.is_none(), "all are had, although another has one");
    for free in [first, last] {
        let taken = take_in_the_end(&other, free, TTL).await?;
        assert_eq!(taken.release().await?, Outcome::Released);
    }
    assert_eq!(held.release().await?, Outcome::Released);
    let all = timeout(PATIENCE, several.acquire()).await??;
    assert!(all.is_held());
    for name in &names {
        assert_taken(&other, name).await?;
    }
    assert_eq!(all.release().await?, Outcome::Released);
    for name in &names {
        drop(take_in_the_end(&other, name, TTL).await?);
    }
    Ok(())
}

async fn one_that_is_lost_is_the_loss_of_all(ctx: Ctx) -> CaseResult {
    let (names, mine, other) = (names(&ctx), ctx.locker().await?, ctx.locker().await?);
    let all = MultiLock::new(names.iter().map(|name| mine.lock(name).ttl(TTL))).acquire().await?;
    let lost = &names[1];
    let token =
        seen(&other.lock(lost)).await?.holders.first().and_then(|holder| holder.token).ok_or("no holder is shown")?;
    // What was broken by a request without an answer is gone when it is asked again.
    let broken = answered(|| other.break_lock(lost, token)).await?;
    assert!(matches!(broken, Release::Released { .. } | Release::NotHeld(LossReason::Gone)), "{broken:?}");
    let worked = timeout(2 * TTL, all.run(std::future::pending::<()>())).await;
    let stopped = worked.map_err(|_| "the work goes on although a lock is lost")?;
    assert_eq!(stopped.expect_err("it never ends").kind(), ErrorKind::Lost);
    assert!(!all.is_held() && all.remaining().is_zero(), "it did not notice");
    assert!(matches!(all.release().await?, Outcome::NotHeld(_)));
    for name in &names {
        drop(take_in_the_end(&other, name, TTL).await?);
    }
    Ok(())
}

async fn clients_wait_in_no_circle(ctx: Ctx) -> CaseResult {
    let (mut names, inside) = (names(&ctx), Arc::new(AtomicU32::new(0)));
    let (mut all, mut clients) = (Vec::new(), Vec::new());
    for _ in 0..names.len() {
        names.rotate_left(1);
        all.push(ctx.locker().await?.multi(&names));
    }
    // They begin together.
    for several in all {
        let inside = Arc::clone(&inside);
        clients.push(tokio::spawn(async move {
            for _ in 0..3 {
                let all = several.acquire().await?;
                assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two have all of them");
                tokio::time::sleep(Duration::from_millis(10)).await;
                inside.fetch_sub(1, Ordering::SeqCst);
                assert_eq!(all.release().await?, Outcome::Released);
            }
            Ok::<_, BoxError>(())
        }));
    }
    for client in clients {
        timeout(PATIENCE, client).await.map_err(|_| "they wait in a circle")???;
    }
    Ok(())
}
