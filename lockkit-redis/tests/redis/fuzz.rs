//! Whatever lies at the keys of a lock, and whatever is said in place of an answer: no panic, no grant that is none, an error
//! of its kind. `PROPTEST_CASES` says how many are tried.

use std::{cell::RefCell, sync::Arc, time::Duration};

use lockkit_core::{Attempt, Claim, Error, ErrorKind, Fence, LockStore, Locker, LossReason, Query, Release, Renewed};
use lockkit_redis::RedisStore;
use lockkit_testkit::{
    faults::Proxy,
    servers::{RedisOptions, RedisServer},
};
use proptest::{
    collection::vec,
    prelude::*,
    sample::select,
    test_runner::{Config, TestRunner},
};
use tokio::{runtime::Runtime, time::timeout};

use crate::support::*;

/// A few seconds, unless `PROPTEST_CASES` says otherwise.
fn runner(cases: u32) -> TestRunner {
    let cases = if std::env::var_os("PROPTEST_CASES").is_some() { Config::default().cases } else { cases };
    TestRunner::new(Config { cases, failure_persistence: None, ..Config::default() })
}

/// Bytes that a client could have left, or that could confuse the reading of a lease.
fn odd_bytes() -> impl Strategy<Value = Vec<u8>> {
    let number =
        select(vec!["0", "1", "-1", "00", "4294967295", "4294967296", "9007199254740993", "9223372036854775807"]);
    let big = select(vec![
        "9223372036854775808",
        "18446744073709551615",
        "99999999999999999999",
        "1e3",
        "0x1",
        " 1",
        "1.5",
        "",
    ]);
    let number = prop_oneof![number, big];
    let token = prop_oneof![3 => "[0-9a-f]{32}", 1 => "[0-9a-fA-F]{0,34}"];
    let lease = (token, number.clone(), number.clone(), number.clone(), "(@[0-9a-f]{0,9})?", "\\PC{0,4}")
        .prop_map(|(token, depth, fence, span, mark, holder)| format!("{token}:{depth}:{fence}:{span}{mark}:{holder}"));
    prop_oneof![
        4 => lease.prop_map(String::into_bytes),
        2 => number.prop_map(|number| number.as_bytes().to_vec()),
        2 => vec(any::<u8>(), 0..80),
    ]
}

/// What is found at a key.
#[derive(Clone, Debug)]
enum Found {
    Nothing,
    Text(Vec<u8>),
    /// Something else than a string, made by this command.
    Other(&'static str),
}

fn found() -> impl Strategy<Value = Found> {
    prop_oneof![
        1 => Just(Found::Nothing),
        6 => odd_bytes().prop_map(Found::Text),
        1 => select(vec!["RPUSH k 1", "HSET k f 1", "ZADD k 1 1", "SADD k 1", "XADD k * f 1", "SETBIT k 7 1", "PFADD k 1"])
            .prop_map(Found::Other),
    ]
}

fn plant(raw: &mut redis::Connection, key: &str, found: &Found, ttl: Option<u64>) {
    match found {
        Found::Nothing => return,
        Found::Text(bytes) => redis::cmd("SET").arg(key).arg(bytes).exec(raw).expect("SET"),
        Found::Other(command) => {
            let mut parts = command.split(' ');
            let mut request = redis::cmd(parts.next().expect("a command"));
            parts.skip(1).fold(request.arg(key), redis::Cmd::arg).exec(raw).expect("a value");
        }
    }
    if let Some(ttl) = ttl {
        redis::cmd("PEXPIRE").arg(key).arg(ttl).exec(raw).expect("PEXPIRE");
    }
}

#[test]
fn whatever_lies_at_the_keys_is_no_lease_of_ours() {
    let runtime = Runtime::new().expect("a runtime");
    let server = runtime.block_on(Server::start());
    let (store, raw) = (Arc::new(runtime.block_on(server.store())), RefCell::new(server.raw()));
    let ttl = prop::option::of(select(vec![60_000_u64, 1 << 40, 1 << 53, i64::MAX as u64 / 2]));
    let holds = (found(), found(), ttl);
    runner(120)
        .run(&holds, |(lock, counter, ttl)| {
            let mut raw = raw.borrow_mut();
            plant(&mut raw, "lockkit:a", &lock, ttl);
            plant(&mut raw, "{lockkit:a}:fence", &counter, ttl);
            let judged = runtime.block_on(judge(&store, !matches!(lock, Found::Nothing)));
            redis::cmd("FLUSHALL").exec(&mut raw).expect("FLUSHALL");
            judged.map_err(TestCaseError::fail)
        })
        .unwrap_or_else(|broken| panic!("{broken}"));
}

/// Judges the answers of a client about a lock with these values at its keys.
async fn judge(store: &Arc<RedisStore>, is_taken: bool) -> Result<(), String> {
    let mine = claim("a");
    let waiting = store.acquire(&request(&mine, Duration::from_millis(2))).await;
    match (waiting, is_taken) {
        (Ok(Attempt::Contended(_)) | Err(_), true) => {}
        (Ok(Attempt::Granted(hold)), false) => granted_for_good(store, &mine, hold.fence).await?,
        // A counter that can't be counted on.
        (Err(error), false)
            if matches!(error.kind(), ErrorKind::Unexpected | ErrorKind::InvalidInput | ErrorKind::Misconfigured) =>
        {
            is_free(store).await?;
        }
        (other, _) => return Err(format!("{other:?}")),
    }
    if is_taken {
        let through_core = Locker::new(Arc::clone(store)).lock("a").acquire_within(Duration::from_millis(2)).await;
        if let Ok(Some(guard)) = through_core {
            return Err(format!("a guard: {guard:?}"));
        }
        match renew(store, &renewal(&mine)).await {
            Ok(Renewed::Lost(LossReason::Taken)) => {}
            other => return Err(format!("renewed: {other:?}")),
        }
        match store.release(&mine).await {
            Ok(Release::NotHeld(LossReason::Taken)) => {}
            other => return Err(format!("released: {other:?}")),
        }
    }
    for query in [Query::Keys(vec![mine.key.clone()]), Query::Prefix(String::new())] {
        let states = store.inspect(&query).await.map_err(|error| format!("inspected: {error}"))?;
        let shown = states.iter().flat_map(|state| &state.holders).map(|holder| holder.info.as_str());
        if shown.into_iter().any(|holder| holder.contains(char::is_control)) {
            return Err(format!("{states:?}"));
        }
    }
    Ok(())
}

/// A grant is one until it is released, and the next one has a higher fence.
async fn granted_for_good(store: &RedisStore, mine: &Claim, fence: Fence) -> Result<(), String> {
    let says = |error: Error| error.to_string();
    match renew(store, &renewal(mine)).await.map_err(says)? {
        Renewed::Held(hold) if hold.fence == fence => {}
        other => return Err(format!("{fence} was granted, and renewed: {other:?}")),
    }
    store.release(mine).await.map_err(says)?;
    let next = claim("a");
    match attempt(store, &next).await {
        Ok(Attempt::Granted(hold)) if hold.fence > fence => {}
        // What is left of the numbers.
        Err(error) if error.message().contains("2^53") => return Ok(()),
        other => return Err(format!("{fence} was granted, and then {other:?}")),
    }
    store.release(&next).await.map_err(says).map(drop)
}

async fn is_free(store: &RedisStore) -> Result<(), String> {
    let state = store.inspect(&Query::Keys(vec![claim("a").key])).await.map_err(|error| error.to_string())?;
    if state.iter().all(|state| state.holders.is_empty()) { Ok(()) } else { Err(format!("left: {state:?}")) }
}

/// A reply of the protocol, whatever it means.
fn reply() -> impl Strategy<Value = Vec<u8>> {
    let number =
        select(vec!["0", "1", "-1", "2", "65", "1795163327687740", "9223372036854775807", "-9223372036854775808"]);
    let leaf = prop_oneof![
        4 => number.prop_map(|number| format!(":{number}\r\n").into_bytes()),
        3 => odd_bytes().prop_map(|bytes| [format!("${}\r\n", bytes.len()).as_bytes(), &bytes, b"\r\n"].concat()),
        4 => select(vec![
            "_\r\n", "$-1\r\n", "*-1\r\n", "#t\r\n", ",1.5\r\n", ",nan\r\n", "(99999999999999999999999\r\n", "+OK\r\n", "+\r\n",
            "-ERR x\r\n", "-NOSCRIPT x\r\n", "-MOVED 1 127.0.0.1:1\r\n", "-ASK x\r\n", "-READONLY x\r\n", "-\r\n", "=5\r\ntxt:a\r\n",
            "-NOAUTH x\r\n", "-BUSY x\r\n", "-LOADING x\r\n", "!3\r\nERR\r\n", "-TRYAGAIN\r\n", "-CLUSTERDOWN x\r\n",
        ]).prop_map(|text| text.as_bytes().to_vec()),
    ];
    leaf.prop_recursive(3, 12, 4, |inner| {
        (select(vec!["*", "~", "%", ">"]), vec(inner, 0..5)).prop_map(|(kind, parts)| {
            let (count, parts) =
                if kind == "%" { (parts.len() / 2, &parts[..parts.len() / 2 * 2]) } else { (parts.len(), &parts[..]) };
            [format!("{kind}{count}\r\n").into_bytes(), parts.concat()].concat()
        })
    })
}

#[test]
fn whatever_is_said_in_place_of_an_answer_is_no_grant() {
    let runtime = Runtime::new().expect("a runtime");
    let server = runtime.block_on(RedisServer::start(RedisOptions::default().flavor(flavor()))).expect("a server");
    let (proxy, holder, held) = runtime.block_on(async {
        let proxy = Proxy::start(server.addr()).await.expect("a proxy");
        let holder = RedisStore::from_url(&server.url()).await.expect("connect");
        let held = claim("held");
        let mut asked = request(&held, Duration::ZERO);
        asked.ttl = Duration::from_secs(300);
        granted(holder.acquire(&asked).await.expect("acquire"));
        (proxy, holder, held)
    });
    let said = (prop_oneof![3 => reply().prop_map(|reply| [b"*1\r\n", &reply[..]].concat()), 1 => reply()], 0..4_u8);
    runner(50)
        .run(&said, |(said, what)| {
            runtime.block_on(async {
                let url = format!("redis://{}?timeout=300ms", proxy.addr());
                let store = RedisStore::from_url(&url).await.map_err(|error| TestCaseError::fail(error.to_string()))?;
                let mine = claim("held");
                let mut says = Some(said.clone());
                proxy.rewrite_replies(move |bytes| says.take().unwrap_or(bytes));
                let bound = Duration::from_secs(20);
                let mut broken = None;
                let ended = timeout(bound, async {
                    match what {
                        0 => match attempt(&store, &mine).await {
                            Ok(Attempt::Granted(hold)) => broken = Some(format!("{hold:?}")),
                            Ok(Attempt::Contended(_)) | Err(_) => {}
                        },
                        1 => match renew(&store, &renewal(&mine)).await {
                            Ok(Renewed::Held(hold)) => broken = Some(format!("{hold:?}")),
                            Ok(Renewed::Lost(_)) | Err(_) => {}
                        },
                        2 => drop(store.release(&mine).await),
                        _ => drop(store.inspect(&Query::Keys(vec![mine.key.clone()])).await),
                    }
                });
                prop_assert!(ended.await.is_ok(), "no end");
                proxy.heal();
                prop_assert!(broken.is_none(), "{broken:?}");
                // And the store goes on, on this connection or on another.
                let goes_on = insist(&store, &held).await;
                prop_assert!(goes_on.is_ok(), "{goes_on:?}");
                Ok(())
            })
        })
        .unwrap_or_else(|broken| panic!("{broken}"));
    drop(holder);
}

/// The lock is still the holder's, and the store says so in the end.
async fn insist(store: &RedisStore, held: &Claim) -> Result<(), String> {
    let mut last = String::new();
    for _ in 0..20 {
        match store.inspect(&Query::Keys(vec![held.key.clone()])).await {
            Ok(states)
                if states.iter().flat_map(|state| &state.holders).any(|holder| holder.token == Some(held.token)) =>
            {
                return Ok(());
            }
            Ok(states) => return Err(format!("{states:?}")),
            Err(error) => last = error.to_string(),
        }
    }
    Err(last)
}
