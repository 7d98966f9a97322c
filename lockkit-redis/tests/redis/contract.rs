//! Rules R1 to R12 as far as one healthy server goes.

use std::{num::NonZeroU32, sync::Arc, time::Duration};

use lockkit_core::{
    Clock, Effect, ErrorKind, Fence, FenceClock, FenceRequest, HolderInfo, LockStore, LossReason, Mode, Release,
    ShiftedClock, Token,
};
use lockkit_redis::RedisStore;

use crate::support::*;

const HOUR: i64 = 3600; // in seconds
const WEEK: i64 = 7 * 24 * 3600; // in seconds

#[tokio::test]
async fn the_same_claim_again_is_the_same_grant() {
    let server = Server::start().await;
    let store = server.store().await;
    let mine = claim("a");
    let first = hold(&store, &mine).await;
    let mut connection = server.raw();
    raw::<i32>(&mut connection, "PEXPIRE lockkit:a 500");
    let mut again = request(&mine, Duration::ZERO);
    again.fence = FenceRequest { span: 7, ..FenceRequest::default() };
    let again = granted(store.acquire(&again).await.expect("acquire"));
    assert_eq!((again.fence, again.span, again.depth), (first.fence, 1, 1));
    assert!(again.until >= first.until);
    assert!(raw::<u64>(&mut connection, "PTTL lockkit:a") > 9000, "the lease was extended");
}

#[tokio::test]
async fn a_held_lock_is_contended_and_nothing_changes() {
    let server = Server::start().await;
    let store = server.store().await;
    hold(&store, &claim("a")).await;
    let mut connection = server.raw();
    let before: (String, String) = raw(&mut connection, "MGET lockkit:a {lockkit:a}:fence");
    let contention = contended(attempt(&store, &claim("a")).await.expect("acquire"));
    assert_eq!(contention.holder.expect("holder").as_str(), "test: holder");
    assert!(contention.retry_after.is_some_and(|wait| wait <= TTL && wait > TTL - Duration::from_secs(1)));
    let after: (String, String) = raw(&mut connection, "MGET lockkit:a {lockkit:a}:fence");
    assert_eq!(before, after);
}

#[tokio::test]
async fn the_validity_is_counted_from_the_sending() {
    let server = Server::start().await;
    let clock = Arc::new(ShiftedClock::default());
    let store = RedisStore::connect(server.config().clock(clock.clone())).await.expect("connect");
    let before = clock.now();
    let hold = hold(&store, &claim("a")).await;
    let after = clock.now();
    assert!(hold.until >= before + TTL && hold.until <= after + TTL);
    clock.advance(Duration::from_secs(3600));
    assert!(store.info().clock.now() > hold.until);
}

#[tokio::test]
async fn foreign_hands_change_nothing() {
    let server = Server::start().await;
    let store = server.store().await;
    let (mine, theirs) = (claim("a"), claim("a"));
    hold(&store, &mine).await;
    let mut connection = server.raw();
    raw::<i32>(&mut connection, "PEXPIRE lockkit:a 5000");
    assert_eq!(store.release(&theirs).await.expect("release"), Release::NotHeld(LossReason::Taken));
    assert_eq!(lost(renew(&store, &renewal(&theirs)).await), LossReason::Taken);
    assert!(raw::<u64>(&mut connection, "PTTL lockkit:a") <= 5000);
    free(&store, &mine).await;
    assert_eq!(store.release(&mine).await.expect("release"), Release::NotHeld(LossReason::Gone));
}

#[tokio::test]
async fn a_renewal_extends_but_never_creates() {
    let server = Server::start().await;
    let store = server.store().await;
    let mine = claim("a");
    let grant = hold(&store, &mine).await;
    let mut connection = server.raw();
    raw::<i32>(&mut connection, "PEXPIRE lockkit:a 500");
    let extended = held(renew(&store, &renewal(&mine)).await);
    assert_eq!((extended.fence, extended.span, extended.depth), (grant.fence, 1, 1));
    assert!(raw::<u64>(&mut connection, "PTTL lockkit:a") > 9000);
    raw::<i32>(&mut connection, "DEL lockkit:a");
    assert_eq!(lost(renew(&store, &renewal(&mine)).await), LossReason::Gone);
    assert_eq!(raw::<i32>(&mut connection, "EXISTS lockkit:a"), 0);
    hold(&store, &claim("a")).await;
    assert_eq!(lost(renew(&store, &renewal(&mine)).await), LossReason::Taken);
}

#[tokio::test]
async fn a_renewal_writes_the_depth_and_keeps_the_rest() {
    let server = Server::start().await;
    let store = server.store().await;
    let mine = claim("a");
    let mut wanted = request(&mine, Duration::ZERO);
    wanted.holder = HolderInfo::new("a:b:1:2:3");
    wanted.fence.span = 5;
    let grant = granted(store.acquire(&wanted).await.expect("acquire"));
    for depth in [3, 3, 12, 1] {
        let deeper = held(renew(&store, &lockkit_core::Renewal { depth, ..renewal(&mine) }).await);
        assert_eq!((deeper.fence, deeper.span, deeper.depth), (grant.fence, 5, depth));
        let mut connection = server.raw();
        let value: String = raw(&mut connection, "GET lockkit:a");
        assert_eq!(value, format!("{}:{depth}:{}:5:a:b:1:2:3", mine.token.reveal(), grant.fence));
        assert!(raw::<u64>(&mut connection, "PTTL lockkit:a") > 9000);
    }
    let again = hold(&store, &mine).await;
    assert_eq!((again.fence, again.span), (grant.fence, 5));
}

#[tokio::test]
async fn many_renewals_are_answered_one_by_one() {
    let server = Server::start().await;
    let store = server.store().await;
    let mut renewals = Vec::new();
    for i in 0..3000_u32 {
        let mine = claim(&format!("k{i}"));
        if i % 3 == 0 {
            hold(&store, &mine).await;
        } else if i % 3 == 1 {
            hold(&store, &claim(&format!("k{i}"))).await;
        }
        let ttl = if i % 5 == 0 { TTL / 2 } else { TTL };
        renewals.push(lockkit_core::Renewal { ttl, ..renewal(&mine) });
    }
    renewals[1].ttl = Duration::from_millis(1);
    renewals[2].claim.mode = Mode::Shared;
    let answers = store.renew(&renewals).await;
    for (i, (answer, renewal)) in answers.into_iter().zip(&renewals).enumerate() {
        match i {
            1 => assert_eq!(answer.expect_err("ttl").kind(), ErrorKind::InvalidInput),
            2 => assert_eq!(lost(answer), LossReason::Gone, "nobody shares it"),
            _ if i % 3 == 0 => assert_eq!(held(answer).claim, renewal.claim),
            _ if i % 3 == 1 => assert_eq!(lost(answer), LossReason::Taken),
            _ => assert_eq!(lost(answer), LossReason::Gone),
        }
    }
    assert!(store.renew(&[]).await.is_empty());
}

#[tokio::test]
async fn fences_grow_by_their_span_and_above_the_floor() {
    let server = Server::start().await;
    let store = server.store().await;
    let grant = async |floor, span, clock| {
        let mine = claim("a");
        let mut wanted = request(&mine, Duration::ZERO);
        wanted.fence = FenceRequest { floor: Fence::new(floor), span, clock };
        let grant = granted(store.acquire(&wanted).await.expect("acquire"));
        free(&store, &mine).await;
        assert_eq!(grant.span, span);
        fence(&grant).get()
    };
    let first = grant(0, 1, FenceClock::Store).await;
    let clock = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("clock").as_micros();
    assert!(u128::from(first).abs_diff(clock) < 5_000_000, "starts at the clock: {first}");
    assert_eq!(grant(0, 10, FenceClock::Store).await, first + 1);
    assert_eq!(grant(0, 1, FenceClock::Store).await, first + 11);
    assert_eq!(grant(first + 11, 1, FenceClock::Floor).await, first + 12, "exactly what was proposed");
    assert_eq!(grant(first + 5, 1, FenceClock::Floor).await, first + 13);
    assert_eq!(grant(first + 1_000_000_000_000, 3, FenceClock::Floor).await, first + 1_000_000_000_001);
    assert_eq!(grant(0, 1, FenceClock::Store).await, first + 1_000_000_000_004);
    assert_eq!(grant(first + 2_000_000_000_000, 1, FenceClock::Store).await, first + 2_000_000_000_001);
}

#[tokio::test]
async fn a_new_counter_on_the_floors_clock_starts_just_above_the_floor() {
    let server = Server::start().await;
    let store = server.store().await;
    for (name, floor, expected) in [("a", 0, 1), ("b", 41, 42)] {
        let mut wanted = request(&claim(name), Duration::ZERO);
        wanted.fence = FenceRequest { floor: Fence::new(floor), span: 4, clock: FenceClock::Floor };
        assert_eq!(granted(store.acquire(&wanted).await.expect("acquire")).fence, Fence::new(expected));
        let stored: u64 = raw(&mut server.raw(), &format!("GET {{lockkit:{name}}}:fence"));
        assert_eq!(stored, expected + 3, "the last of the span");
    }
}

#[tokio::test]
async fn a_counter_expires_an_hour_after_it_began() {
    let server = Server::start().await;
    let store = server.store().await;
    let mine = claim("a");
    let mut connection = server.raw();
    raw::<()>(&mut connection, "CONFIG RESETSTAT");
    hold(&store, &mine).await;
    let calls: String = raw(&mut connection, "INFO commandstats");
    assert!(calls.contains("cmdstat_set:calls=2,"), "the counter and the lock: {calls}");
    assert!(!calls.contains("cmdstat_pexpire"), "a new counter takes one call: {calls}");
    let left: i64 = raw(&mut connection, "TTL {lockkit:a}:fence");
    assert!((HOUR - 60..=HOUR).contains(&left), "{left}");
    free(&store, &mine).await;
    raw::<i32>(&mut connection, "EXPIRE {lockkit:a}:fence 100");
    hold(&store, &claim("a")).await;
    assert!(raw::<i64>(&mut connection, "TTL {lockkit:a}:fence") <= 100, "a grant does not prolong it");
}

/// Clients that propose the fences, as those of a quorum do, may have clocks that differ by more than an hour.
#[tokio::test]
async fn a_counter_on_the_floors_clock_expires_a_week_after_the_clock_passed_it() {
    let server = Server::start().await;
    let (store, mut connection) = (server.store().await, server.raw());
    let ahead = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("clock").as_micros()
        + u128::from(Duration::from_secs(1000).as_micros() as u64);
    let mut wanted = request(&claim("b"), Duration::ZERO);
    wanted.fence = FenceRequest { floor: Fence::new(ahead as u64), span: 1, clock: FenceClock::Floor };
    granted(store.acquire(&wanted).await.expect("acquire"));
    let left: i64 = raw(&mut connection, "TTL {lockkit:b}:fence");
    assert!((WEEK + 990..=WEEK + 1002).contains(&left), "{left}");
}

#[tokio::test]
async fn a_renewal_raises_the_counter_only_while_the_lease_is_mine() {
    let server = Server::start().await;
    let store = server.store().await;
    let mine = claim("a");
    let grant = hold(&store, &mine).await;
    let floor = grant.fence.offset(1000);
    let raising = lockkit_core::Renewal { fence_floor: Some(floor), ..renewal(&mine) };
    assert_eq!(held(renew(&store, &raising).await).fence, grant.fence);
    let mut connection = server.raw();
    assert_eq!(raw::<u64>(&mut connection, "GET {lockkit:a}:fence"), floor.get());
    let lower = lockkit_core::Renewal { fence_floor: Some(Fence::new(1)), ..renewal(&mine) };
    held(renew(&store, &lower).await);
    assert_eq!(raw::<u64>(&mut connection, "GET {lockkit:a}:fence"), floor.get());
    raw::<i32>(&mut connection, "DEL {lockkit:a}:fence");
    held(renew(&store, &lower).await);
    let anew: u64 = raw(&mut connection, "GET {lockkit:a}:fence");
    assert!(anew > grant.fence.get(), "{anew}: others may have had fences above the lease's own");
    free(&store, &mine).await;
    let next = hold(&store, &claim("a")).await;
    assert!(next.fence > grant.fence);
    assert_eq!(lost(renew(&store, &raising).await), LossReason::Taken);
    assert_eq!(raw::<u64>(&mut connection, "GET {lockkit:a}:fence"), next.fence.get());
}

#[tokio::test]
async fn a_counter_that_goes_with_the_clock_is_kept_anew_in_time() {
    let server = Server::start().await;
    let (store, mut connection) = (server.store().await, server.raw());
    let mut next = async |floor: u64, span: u32| {
        let mine = claim("a");
        let fence = FenceRequest { floor: Fence::new(floor), span, clock: FenceClock::Floor };
        let wanted = lockkit_core::AcquireRequest { fence, ..request(&mine, Duration::ZERO) };
        assert_eq!(granted(store.acquire(&wanted).await.expect("acquire")).fence, Fence::new(floor + 1));
        free(&store, &mine).await;
        let left: i64 = raw(&mut connection, "TTL {lockkit:a}:fence");
        raw::<i32>(&mut connection, "EXPIRE {lockkit:a}:fence 100");
        left
    };
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("clock").as_micros() as u64;
    // The beginning of a thousand seconds.
    let begin = now / 1_000_000_000 * 1_000_000_000;
    assert!(next(begin + 7, 1).await >= WEEK - 5, "it is new");
    assert!(next(begin + 999_000_000, 1).await <= 100, "it was kept already");
    assert!(next(begin + 1_000_000_000, 1).await >= WEEK - 5, "the next thousand seconds have begun");
    assert!(next(begin + 1_500_000_000, 2_000_000_000).await >= WEEK - 5, "its last fence is beyond them");
    // Beyond the day around now nothing is taken for granted.
    let ahead = begin + 100_000_000_000;
    for floor in [ahead + 1, ahead + 2] {
        assert!(next(floor, 1).await >= WEEK + 90_000, "a hundred thousand seconds ahead of the clock");
    }
}

/// Else the next one would start at the clock, below what was given out.
#[tokio::test]
async fn a_counter_that_leaps_ahead_of_the_clock_is_kept_until_an_hour_past_it() {
    let server = Server::start().await;
    let store = server.store().await;
    for leap in 1..=3 {
        let mine = claim("a");
        let fence = FenceRequest { span: u32::MAX, ..FenceRequest::default() };
        let wanted = lockkit_core::AcquireRequest { fence, ..request(&mine, Duration::ZERO) };
        granted(store.acquire(&wanted).await.expect("acquire"));
        free(&store, &mine).await;
        let left: i64 = raw(&mut server.raw(), "TTL {lockkit:a}:fence");
        let past = left - leap * i64::from(u32::MAX) / 1_000_000;
        assert!((HOUR - 60..=HOUR + 5).contains(&past), "{left} s after {leap}");
    }
}

#[tokio::test]
async fn a_key_of_another_type_is_named_and_left_alone() {
    for clock in [FenceClock::Store, FenceClock::Floor] {
        let server = Server::start().await;
        let store = server.store().await;
        let mut connection = server.raw();
        raw::<i32>(&mut connection, "HSET lockkit:a f v");
        raw::<i32>(&mut connection, "RPUSH {lockkit:b}:fence v");
        raw::<()>(&mut connection, "SET {lockkit:c}:fence x1 EX 100");
        raw::<()>(&mut connection, "SET {lockkit:d}:fence 9007199254740990 EX 100");
        for (name, hint) in [("a", "hash"), ("b", "list"), ("c", "no number"), ("d", "2^53")] {
            let fence = FenceRequest { floor: Fence::new(7), span: 2, clock };
            let wanted = lockkit_core::AcquireRequest { fence, ..request(&claim(name), Duration::ZERO) };
            let error = store.acquire(&wanted).await.expect_err(name);
            assert_eq!((error.kind(), error.effect()), (ErrorKind::Unexpected, Effect::None), "{error}");
            assert!(error.message().contains(hint), "{error}");
        }
        let half_done = "EXISTS lockkit:b lockkit:c lockkit:d {lockkit:a}:fence";
        assert_eq!(raw::<i32>(&mut connection, half_done), 0, "no lock half done");
        assert_eq!(raw::<i32>(&mut connection, "DBSIZE"), 4);
        assert_eq!(raw::<String>(&mut connection, "GET {lockkit:c}:fence"), "x1");
        for name in ["c", "d"] {
            assert!((1..=100).contains(&raw::<i32>(&mut connection, &format!("TTL {{lockkit:{name}}}:fence"))));
        }
        let mine = claim("a");
        assert_eq!(store.release(&mine).await.expect("release"), Release::NotHeld(LossReason::Taken));
        assert_eq!(lost(renew(&store, &renewal(&mine)).await), LossReason::Taken);
    }
}

#[tokio::test]
async fn plain_set_nx_clients_exclude_us_and_we_them() {
    let server = Server::start().await;
    let store = RedisStore::from_url(&server.url("?prefix=")).await.expect("connect");
    let mut connection = server.raw();
    raw::<()>(&mut connection, "SET job their-token NX PX 60000");
    let contention = contended(attempt(&store, &claim("job")).await.expect("acquire"));
    // Whose it is must not be shown: the value is its token.
    assert_eq!(contention.holder.expect("holder").as_str(), "a client that is not lockkit");
    assert_eq!(store.release(&claim("job")).await.expect("release"), Release::NotHeld(LossReason::Taken));
    raw::<i32>(&mut connection, "DEL job");
    let mine = claim("job");
    hold(&store, &mine).await;
    assert_eq!(raw::<Option<String>>(&mut connection, "SET job their-token NX PX 60000"), None);
    free(&store, &mine).await;
    assert_eq!(raw::<Option<String>>(&mut connection, "SET job their-token NX"), Some("OK".into()));
    let contention = contended(attempt(&store, &claim("job")).await.expect("acquire"));
    assert_eq!(contention.retry_after, None, "a lock without expiry");
}

#[tokio::test]
async fn every_name_is_a_lock_of_its_own() {
    let names = [
        "a",
        "A",
        "a ",
        " a",
        "a\n",
        "a\0",
        "é",
        "e\u{301}",
        "{a}",
        "{a}b",
        "a}b",
        "{}a",
        "{a}:fence",
        "{{a}}:fence",
        "{a}:{a}:fence",
        "a%7B",
        "a{",
        "lockkit:esc:a",
        "lockkit:esc:{a}:fence",
        "*",
        "a/b",
        "a:b",
        "💥",
    ];
    for prefix in ["", "p:"] {
        let server = Server::start().await;
        let store = RedisStore::connect(server.config().prefix(prefix)).await.expect("connect");
        let mut claims = Vec::new();
        for name in names {
            let mine = claim(name);
            hold(&store, &mine).await;
            claims.push(mine);
        }
        assert_eq!(raw::<usize>(&mut server.raw(), "DBSIZE"), 2 * names.len());
        for mine in &claims {
            free(&store, mine).await;
        }
        let long = claim(&"{".repeat(512));
        hold(&store, &long).await;
        free(&store, &long).await;
    }
}

#[tokio::test]
async fn what_the_store_can_not_do_it_refuses() {
    let server = Server::start().await;
    let store = server.store().await;
    let wanted = || request(&claim("a"), Duration::ZERO);
    let mut exchange = wanted();
    let permit = Mode::Permit { limit: NonZeroU32::MIN };
    (exchange.claim.mode, exchange.from) = (permit, Some(Token::random().expect("token")));
    assert_eq!(store.acquire(&exchange).await.expect_err("refused").kind(), ErrorKind::Unsupported);
    let mut requests = [wanted(), wanted(), wanted(), wanted()];
    requests[0].ttl = Duration::from_millis(99);
    requests[1].ttl = Duration::from_secs(301);
    requests[2].fence.span = 0;
    requests[3].fence.floor = Fence::new(u64::MAX);
    for invalid in &requests {
        let error = store.acquire(invalid).await.expect_err("invalid");
        assert_eq!((error.kind(), error.effect()), (ErrorKind::InvalidInput, Effect::None), "{error}");
    }
    assert_eq!(raw::<i32>(&mut server.raw(), "DBSIZE"), 0);
}

#[tokio::test]
async fn a_lease_lapses_on_the_servers_clock() {
    let server = Server::start().await;
    let store = server.store().await;
    let mine = claim("a");
    let first = hold(&store, &mine).await;
    let mut connection = server.raw();
    raw::<()>(&mut connection, "PEXPIRE lockkit:a 1");
    eventually("it lapses", async || raw::<u32>(&mut connection, "EXISTS lockkit:a") == 0).await;
    let second = hold(&store, &claim("a")).await;
    assert!(second.fence > first.fence);
    assert_eq!(store.release(&mine).await.expect("release"), Release::NotHeld(LossReason::Taken));
}

/// Many renewals share a script, and what goes wrong with one is no matter of the others.
#[tokio::test]
async fn each_renewal_has_an_answer_of_its_own() {
    let server = Server::start().await;
    let (store, mut connection) = (server.store().await, server.raw());
    let claims: Vec<_> = (0..10).map(|i| claim(&i.to_string())).collect();
    for claim in &claims {
        hold(&store, claim).await;
    }
    let mut renewals: Vec<_> = claims.iter().map(renewal).collect();
    raw::<()>(&mut connection, "SET {lockkit:0}:fence mangled");
    renewals[0].fence_floor = Some(Fence::new(1));
    let mangled = format!("SET lockkit:1 {}:mangled PX 10000", claims[1].token.reveal());
    raw::<()>(&mut connection, &mangled);
    renewals[1].depth = 2;
    let mut answers = store.renew(&renewals).await.into_iter();
    let error = answers.next().expect("an answer").expect_err("the counter is no number");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Unexpected, Effect::Unknown), "{error}");
    assert_eq!(lost(answers.next().expect("an answer")), LossReason::Taken, "it is no lease any more");
    assert_eq!(answers.len(), 8);
    answers.for_each(|answer| _ = held(answer));
}
