//! What happens when servers and networks fail. Each case has a private server.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use lockkit_core::{Error, ErrorKind, Locker, LossReason, Outcome, Query, Renewed, Status};

use super::{
    CaseResult, Ctx, LONG, SHORT, cases, fencing_claimed, grant, grant_at_once, locker, renew, request,
    resource::Resource, seen, take, take_in_the_end,
};
use crate::faults::Direction;

cases! { "faults":
    a_lost_reply_is_asked_again [SERVER_TTL] "When the reply to an acquire is lost, asking again gets the lock, with one lease left at the store (R1, R2)."
    a_lost_reply_leaves_nothing [SERVER_TTL] "When the reply to an acquire is lost and the caller gives up, the lock is freed (R6, R8)."
    a_late_reply_is_no_grant [SERVER] "A reply that comes after the ttl grants nothing (R4)."
    validity_counts_from_the_request [SERVER_TTL] "However late the reply comes, a lease is valid for its ttl from the request on (R4)."
    a_frozen_holder_knows_when_it_wakes [SERVER_TTL] "A process frozen past its lease finds it lost before it does anything."
    a_frozen_server_grants_nothing_twice [SERVER] "When the server stands still for two ttls, no two guards are valid at once."
    a_partitioned_holder_loses_in_time [SERVER_TTL] "A holder cut off from the server knows by its deadline; healing brings nothing back."
    a_black_holed_connection_is_replaced [SERVER] "A connection that swallows everything is given up for a new one."
    forgotten_scripts_are_sent_again [SERVER] "A server that forgot its caches is served as before."
    a_storm_of_cuts_loses_no_update [SERVER] "Connections cut again and again: no update is lost, no fence is stale."
    a_deleted_lock_is_lost [SERVER] "A lock that an administrator deleted is lost at the next renewal."
    a_killed_server_is_an_error [SERVER] "While the server is down, acquiring fails as unavailable, and works again after it came back."
    a_killed_server_denies_nothing [SERVER] "While the server is down, renewing, releasing and inspecting fail; nothing is said to be lost (R6)."
    a_held_lock_survives_a_restart_with_data [SERVER] "A server killed and restarted with its data within the ttl costs its holders nothing."
    a_restart_without_data_is_noticed [SERVER_TTL] "A server restarted empty: the holder learns of its loss by the next renewal."
}

async fn a_lost_reply_is_asked_again(ctx: Ctx) -> CaseResult {
    let server = ctx.server().await?;
    let (proxied, proxy) = server.open_through_proxy().await?;
    let (mine, name) = (locker(proxied), ctx.name());
    let before = take(&mine, &name, LONG).await?;
    assert_eq!(before.release().await?, Outcome::Released);
    proxy.drop_reply_after(name.as_bytes().to_vec(), 1);
    let lock = mine.lock(&name).ttl(LONG);
    let (guard, ()) = tokio::join!(lock.acquire_within(Duration::from_secs(10)), proxy.dropped());
    let guard = guard?.ok_or("its own lease kept it out")?;
    let state = server.open().await?.inspect(&Query::Keys(vec![guard.key().clone()])).await?;
    assert_eq!(state[0].holders.len(), 1);
    assert_eq!(state[0].holders[0].token, Some(guard.token()));
    assert_eq!(state[0].holders[0].fence.unwrap_or_default(), guard.fence());
    assert_eq!(guard.release().await?, Outcome::Released);
    Ok(())
}

async fn a_lost_reply_leaves_nothing(ctx: Ctx) -> CaseResult {
    let server = ctx.server().await?;
    let (proxied, proxy) = server.open_through_proxy().await?;
    let (mine, other, name) = (locker(proxied), locker(server.open().await?), ctx.name());
    // Warm up, so that what is dropped is the reply to the lock's request and not to the connection's first words.
    assert_eq!(take(&mine, &name, LONG).await?.release().await?, Outcome::Released);
    proxy.drop_reply_after(name.as_bytes().to_vec(), 1);
    let error = mine.lock(&name).ttl(LONG).try_acquire().await.expect_err("its reply was lost");
    assert!(error.is_retryable(), "{error}");
    let free = other.lock(&name).ttl(LONG).acquire_within(LONG / 2).await?;
    assert!(free.is_some(), "the lease of an unknown acquisition was left behind");
    Ok(())
}

async fn a_late_reply_is_no_grant(ctx: Ctx) -> CaseResult {
    let server = ctx.server().await?;
    let (proxied, proxy) = server.open_through_proxy().await?;
    let (mine, other, name) = (locker(proxied), locker(server.open().await?), ctx.name());
    assert_eq!(take_in_the_end(&mine, &name, SHORT).await?.release().await?, Outcome::Released);
    proxy.delay(Direction::ToClient, SHORT * 2);
    let error = mine.lock(&name).ttl(SHORT).try_acquire().await.expect_err("the reply came after the ttl");
    assert!(matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::Unavailable), "{error}");
    assert!(other.lock(&name).ttl(LONG).acquire_within(SHORT + Duration::from_secs(6)).await?.is_some());
    Ok(())
}

async fn validity_counts_from_the_request(ctx: Ctx) -> CaseResult {
    let server = ctx.server().await?;
    let (slow, proxy) = server.open_through_proxy().await?;
    let (other, key) = (server.open().await?, ctx.key()?);
    // Another client has the lock first: what a store does in the background when it meets a new name may need the
    // connection when it matters.
    let mut first = request(&key, LONG)?;
    grant(&other, &mut first).await?;
    other.release(&first.claim).await?;
    // Warm up, so that what is held back is the reply and not the first words of a connection or of a script.
    let mut before = request(&key, LONG)?;
    grant(&slow, &mut before).await?;
    renew(&slow, &before.claim, LONG, 1).await?;
    slow.release(&before.claim).await?;
    let query = Query::Keys(vec![key.clone()]);
    let mine = request(&key, LONG)?;
    for round in ["acquire", "renew"] {
        proxy.hold(Direction::ToClient);
        let (store, asked) = (Arc::clone(&slow), mine.clone());
        let asking = tokio::spawn(async move {
            match round {
                // Not asked again: that would be another request, from which it may count.
                "acquire" => grant_at_once(&store, &asked).await.map(|hold| hold.until),
                _ => match renew(&store, &asked.claim, LONG, 2).await? {
                    Renewed::Held(hold) => Ok(hold.until),
                    Renewed::Lost(reason) => Err(format!("lost: {reason}").into()),
                },
            }
        });
        // As soon as the effect shows, the request was sent: from here on no time may be counted.
        let depth = if round == "acquire" { 1 } else { 2 };
        while !other.inspect(&query).await?[0].holders.iter().any(|by| by.depth == depth) {
            assert!(!asking.is_finished(), "{round}: it ended before its effect showed: {:?}", asking.await);
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        let latest = slow.info().clock.now() + LONG;
        proxy.release(Direction::ToClient);
        let until = asking.await??;
        let late = until.since(latest);
        assert!(late.is_zero(), "{round}: valid until {late:?} later than request + ttl");
    }
    Ok(())
}

async fn a_frozen_holder_knows_when_it_wakes(ctx: Ctx) -> CaseResult {
    let server = ctx.server().await?;
    let (store, other, name) = (server.open().await?, locker(server.open().await?), ctx.name());
    let frozen_name = name.clone();
    // A runtime of one thread that is blocked stands still as a whole process: no renewal, no timer, no wake-up.
    let (taken, is_taken) = tokio::sync::oneshot::channel();
    let (thaw, is_thawed) = std::sync::mpsc::channel::<()>();
    let frozen = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async move {
            let guard = take_in_the_end(&locker(store), &frozen_name, SHORT).await.expect("it is free");
            taken.send(guard.fence()).expect("the case goes on");
            is_thawed.recv().expect("the case goes on");
            let ran = guard.run(async { "the work went on" }).await;
            (guard.status(), ran.map_err(|error| error.kind()))
        })
    });
    let stale = is_taken.await?;
    let next = other.lock(&name).ttl(LONG).acquire_within(SHORT + Duration::from_secs(6)).await?.ok_or("never free")?;
    thaw.send(())?;
    let (status, ran) = tokio::task::spawn_blocking(move || frozen.join()).await?.map_err(|_| "it panicked")?;
    assert!(matches!(status, Status::Lost(_)), "{status:?}");
    assert_eq!(ran, Err(ErrorKind::Lost));
    let resource = Resource::default();
    assert!(resource.admit(next.fence()));
    assert!(!fencing_claimed(&other) || !resource.admit(stale), "the stale fence was admitted");
    Ok(())
}

async fn a_frozen_server_grants_nothing_twice(ctx: Ctx) -> CaseResult {
    let server = ctx.server().await?;
    let (mine, other, name) = (locker(server.open().await?), patient(server.open().await?), ctx.name());
    let guard = take_in_the_end(&mine, &name, SHORT).await?;
    let lock = other.lock(&name).ttl(SHORT);
    let waiter = tokio::spawn(async move { lock.acquire_within(Duration::from_secs(30)).await });
    server.freeze().await?;
    let frozen = Instant::now();
    // No renewal that was answered was sent later than this: it believes until then at the longest.
    tokio::time::sleep_until((frozen + SHORT).into()).await;
    assert!(!guard.is_held(), "it believes longer than its ttl");
    assert_eq!(guard.lost().await, LossReason::Unreachable);
    tokio::time::sleep_until((frozen + SHORT * 2).into()).await;
    server.thaw().await?;
    let next = waiter.await??.ok_or("the lock was never granted again")?;
    assert!(!guard.is_held(), "a lost guard came back");
    assert!(next.is_held());
    Ok(())
}

async fn a_partitioned_holder_loses_in_time(ctx: Ctx) -> CaseResult {
    let server = ctx.server().await?;
    let (proxied, proxy) = server.open_through_proxy().await?;
    let (mine, other, name) = (locker(proxied), locker(server.open().await?), ctx.name());
    let guard = take_in_the_end(&mine, &name, SHORT).await?;
    proxy.blackhole();
    let cut = Instant::now();
    tokio::time::sleep_until((cut + SHORT).into()).await;
    assert!(!guard.is_held(), "it believes longer than its ttl");
    assert_eq!(guard.lost().await, LossReason::Unreachable);
    let next = other.lock(&name).ttl(LONG).acquire_within(SHORT + Duration::from_secs(6)).await?.ok_or("never free")?;
    proxy.heal();
    // Whatever the healed connection still carries must neither hurt the new holder nor bring back the old one.
    assert!(mine.lock(&name).acquire_within(Duration::from_secs(3)).await.map_or(true, |guard| guard.is_none()));
    assert!(next.is_held() && !guard.is_held());
    let state = seen(&other.lock(&name)).await?;
    assert_eq!(state.holders[0].token, Some(next.token()));
    Ok(())
}

async fn a_black_holed_connection_is_replaced(ctx: Ctx) -> CaseResult {
    let server = ctx.server().await?;
    let (proxied, proxy) = server.open_through_proxy().await?;
    let (mine, name) = (patient(proxied), ctx.name());
    assert_eq!(take(&mine, &name, LONG).await?.release().await?, Outcome::Released);
    let opened = proxy.connections();
    proxy.hold(Direction::ToServer);
    let lock = mine.lock(&name).ttl(SHORT);
    let asked = tokio::time::timeout(Duration::from_secs(10), lock.try_acquire()).await;
    let error = asked.map_err(|_| "a call has no bound of its own")?.expect_err("nothing comes through");
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    let lock = mine.lock(&name).ttl(Duration::from_secs(4));
    let waiting = tokio::spawn(async move { lock.acquire_within(Duration::from_secs(30)).await });
    // The old connection stays black; a new one would do.
    while proxy.connections() <= opened {
        assert!(!waiting.is_finished(), "it gave up on a connection that it could have replaced");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    proxy.heal();
    assert!(waiting.await??.is_some());
    Ok(())
}

async fn forgotten_scripts_are_sent_again(ctx: Ctx) -> CaseResult {
    let server = ctx.server().await?;
    let (store, key) = (server.open().await?, ctx.key()?);
    let mut mine = request(&key, LONG)?;
    server.forget_caches().await?;
    grant(&store, &mut mine).await?;
    server.forget_caches().await?;
    assert!(matches!(renew(&store, &mine.claim, LONG, 1).await?, Renewed::Held(_)));
    server.forget_caches().await?;
    assert_eq!(store.inspect(&Query::Keys(vec![key])).await?[0].holders.len(), 1);
    server.forget_caches().await?;
    assert!(matches!(store.release(&mine.claim).await?, lockkit_core::Release::Released { .. }));
    Ok(())
}

async fn a_storm_of_cuts_loses_no_update(ctx: Ctx) -> CaseResult {
    let server = ctx.server().await?;
    let (resource, name, storm) = (Arc::new(Resource::default()), ctx.name(), Arc::new(AtomicBool::new(true)));
    let mut workers = Vec::new();
    for _ in 0..4 {
        let (mine, resource, name) = (patient(server.open().await?), Arc::clone(&resource), name.clone());
        let storm = Arc::clone(&storm);
        workers.push(tokio::spawn(async move {
            let (mut done, fenced) = (0_u64, fencing_claimed(&mine));
            while storm.load(Ordering::SeqCst) {
                let guard = match mine.lock(&name).ttl(Duration::from_secs(2)).acquire().await {
                    Ok(guard) => guard,
                    Err(error) if error.is_retryable() => continue,
                    Err(error) => return Err(error),
                };
                if guard.is_held() {
                    assert!(!fenced || resource.admit(guard.fence()), "fence {} is stale", guard.fence());
                    resource.increment().await;
                    done += 1;
                }
                drop(guard.release().await);
            }
            Ok::<_, Error>(done)
        }));
    }
    let until = Instant::now() + Duration::from_secs(3);
    while Instant::now() < until {
        server.cut_clients().await?;
        tokio::time::sleep(Duration::from_millis(30)).await;
    }
    storm.store(false, Ordering::SeqCst);
    let mut done = 0;
    for worker in workers {
        done += worker.await??;
    }
    assert!(done > 0, "nothing was done");
    assert_eq!(resource.count(), done, "updates were lost");
    let after = locker(server.open().await?).lock(&name).acquire_within(Duration::from_secs(8)).await?;
    assert!(after.is_some(), "the lock was left held");
    Ok(())
}

async fn a_deleted_lock_is_lost(ctx: Ctx) -> CaseResult {
    let server = ctx.server().await?;
    let (mine, name) = (locker(server.open().await?), ctx.name());
    let guard = take(&mine, &name, LONG).await?;
    server.delete(&name).await?;
    let error = guard.renew().await.err().ok_or("it did not notice")?;
    assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
    assert_eq!(guard.lost().await, LossReason::Gone);
    assert_eq!(guard.release().await?, Outcome::NotHeld(LossReason::Gone));
    Ok(())
}

async fn a_killed_server_is_an_error(ctx: Ctx) -> CaseResult {
    let server = ctx.server().await?;
    let store = server.open().await?;
    let (mine, name) = (Locker::shared_builder(store).patience(Duration::from_millis(300)).build(), ctx.name());
    assert_eq!(take(&mine, &name, LONG).await?.release().await?, Outcome::Released);
    server.kill().await?;
    for round in 0..3 {
        let asked = Instant::now();
        let error = if round == 0 {
            mine.lock(&name).try_acquire().await.expect_err("the server is down")
        } else {
            mine.lock(&name).acquire().await.expect_err("the server is down")
        };
        assert!(matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::TimedOut), "{error}");
        assert!(asked.elapsed() < Duration::from_secs(10), "it took {:?} to say so", asked.elapsed());
    }
    server.restart(true).await?;
    let guard = mine.lock(&name).ttl(LONG).acquire_within(Duration::from_secs(10)).await?;
    assert!(guard.is_some());
    Ok(())
}

async fn a_killed_server_denies_nothing(ctx: Ctx) -> CaseResult {
    let server = ctx.server().await?;
    let (store, key) = (server.open().await?, ctx.key()?);
    let mut mine = request(&key, LONG)?;
    grant(&store, &mut mine).await?;
    server.kill().await?;
    // The first call may find the old connection broken, the second finds no new one.
    for _ in 0..2 {
        let renewed = renew(&store, &mine.claim, LONG, 1).await.map(|answer| format!("{answer:?}"));
        let released = store.release(&mine.claim).await.map(|answer| format!("{answer:?}"));
        let seen = store.inspect(&Query::Keys(vec![key.clone()])).await;
        for answer in [renewed.map_err(drop), released.map_err(drop), seen.map(|s| format!("{s:?}")).map_err(drop)] {
            assert!(answer.is_err(), "{answer:?} was answered while the server was down");
        }
    }
    Ok(())
}

async fn a_held_lock_survives_a_restart_with_data(ctx: Ctx) -> CaseResult {
    let server = ctx.server().await?;
    // How long a restart takes on this machine decides what is well within a ttl.
    let begun = Instant::now();
    server.kill().await?;
    server.restart(true).await?;
    let ttl = Duration::from_secs(4).max(begun.elapsed() * 5);
    let (mine, name) = (locker(server.open().await?), ctx.name());
    let guard = take(&mine, &name, ttl).await?;
    server.kill().await?;
    server.restart(true).await?;
    // Until the server says that it is, or the ttl is over.
    while let Err(error) = guard.renew().await {
        assert!(error.is_retryable(), "{error}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(guard.release().await?, Outcome::Released);
    Ok(())
}

async fn a_restart_without_data_is_noticed(ctx: Ctx) -> CaseResult {
    let server = ctx.server().await?;
    // As above: a lease that is over when the server is back was not lost with its data.
    let begun = Instant::now();
    server.kill().await?;
    server.restart(true).await?;
    let ttl = Duration::from_secs(4).max(begun.elapsed() * 5);
    let (mine, name) = (locker(server.open().await?), ctx.name());
    let guard = take(&mine, &name, ttl).await?;
    let (fence, fenced) = (guard.fence(), fencing_claimed(&mine));
    server.kill().await?;
    server.restart(false).await?;
    let reason = tokio::time::timeout(ttl, guard.lost()).await.map_err(|_| "it did not notice")?;
    assert_eq!(reason, LossReason::Gone);
    let next = mine.lock(&name).ttl(LONG).acquire_within(Duration::from_secs(8)).await?.ok_or("never free")?;
    assert!(!fenced || next.fence() > fence, "{} came after {fence}", next.fence());
    Ok(())
}

/// A locker that goes on asking for longer than any fault here lasts.
fn patient(store: Arc<dyn lockkit_core::LockStore>) -> Locker {
    Locker::shared_builder(store).patience(Duration::from_secs(30)).build()
}
