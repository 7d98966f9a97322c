//! Replies that are spoilt on their way, on every store: no panic, an end within the bound, and a store that knows the truth
//! again when they are not spoilt any more.
//!
//! A spoilt reply that by chance reads like an answer can't be told from one, so answers are not judged here. `PROPTEST_CASES`
//! says how many are tried.

use std::{
    sync::{Arc, Mutex, Once},
    time::Duration,
};

use lockkit::{
    Fence, HolderInfo,
    mysql::{MySqlConfig, schema},
    store::{AcquireRequest, Attempt, Claim, LockStore, Query, Renewal},
};
use lockkit_testkit::{
    calls::claim,
    faults::Proxy,
    servers::{MySqlOptions, MySqlServer, RedisOptions, RedisServer, ZooKeeperFlavor, ZooKeeperServer, hosts},
};
use proptest::{
    collection::vec,
    prelude::*,
    test_runner::{Config, TestCaseError, TestRunner},
};
use tokio::{
    runtime::{Builder, Runtime},
    time::timeout,
};

/// A few seconds for each store, unless `PROPTEST_CASES` says otherwise.
const CASES: u32 = 60;
/// ZooKeeper's take longer: some need a session to end.
const ZOOKEEPER_CASES: u32 = 15;
/// Each call has a bound of half a second, or two if it has to connect first; the machine may be busy.
const BOUND: Duration = Duration::from_secs(30);
/// How often a store may fail when all is well again.
const TRIES: u32 = 20;

/// The threads that panicked. Those of a test, and of its runtime, have its name.
static PANICS: Mutex<Vec<String>> = Mutex::new(Vec::new());
static COUNTING: Once = Once::new();

/// What is done to a piece of a reply. Places are taken modulo its length.
#[derive(Clone, Debug)]
enum Spoil {
    Flip(usize, u8),
    Set(usize, u8),
    Cut(usize),
    Insert(usize, Vec<u8>),
    Remove(usize, usize),
    Twice,
    Lose,
}

impl Spoil {
    fn apply(&self, mut bytes: Vec<u8>) -> Vec<u8> {
        let length = bytes.len().max(1);
        match self {
            Self::Flip(at, bit) => bytes[at % length] ^= 1 << (bit % 8),
            Self::Set(at, byte) => bytes[at % length] = *byte,
            Self::Cut(at) => bytes.truncate(at % length),
            Self::Insert(at, more) => drop(bytes.splice(at % length..at % length, more.iter().copied())),
            Self::Remove(at, count) => drop(bytes.drain(at % length..(at % length + count).min(bytes.len()))),
            Self::Twice => bytes.extend_from_within(..),
            Self::Lose => bytes.clear(),
        }
        bytes
    }
}

/// Anything anywhere, mostly near the beginning, where lengths and kinds are.
fn spoil() -> BoxedStrategy<Spoil> {
    let place = || prop_oneof![3 => 0..24_usize, 1 => 0..2000_usize];
    prop_oneof![
        8 => byte(place()),
        2 => place().prop_map(Spoil::Cut),
        2 => (place(), vec(any::<u8>(), 1..9)).prop_map(|(at, more)| Spoil::Insert(at, more)),
        2 => (place(), 1..9_usize).prop_map(|(at, count)| Spoil::Remove(at, count)),
        1 => Just(Spoil::Twice),
        1 => Just(Spoil::Lose),
    ]
    .boxed()
}

/// What spoils the header of an answer of ZooKeeper (length, number of the request, transaction, error, in 20 bytes), or
/// loses or repeats it, and puts no other number in the place of the number of items of a list. The driver reserves memory
/// for as many items as an answer announces, and a process that asks for gigabytes ends; docs/backends/zookeeper.md says so.
fn spoil_of_header() -> BoxedStrategy<Spoil> {
    let field = || (0..3_usize).prop_map(|field| 4 * field);
    let fields = || (1..3_usize).prop_map(|fields| 4 * fields);
    prop_oneof![
        8 => byte(0..20_usize),
        2 => (0..17_usize).prop_map(Spoil::Cut),
        2 => (field(), fields().prop_flat_map(|length| vec(any::<u8>(), length)))
            .prop_map(|(at, more)| Spoil::Insert(at, more)),
        2 => (field(), fields()).prop_map(|(at, count)| Spoil::Remove(at, count)),
        1 => Just(Spoil::Twice),
        1 => Just(Spoil::Lose),
    ]
    .boxed()
}

/// Another byte in a place.
fn byte(place: impl Strategy<Value = usize>) -> impl Strategy<Value = Spoil> {
    let byte = prop_oneof![Just(0), Just(0xff), Just(0x7f), Just(0x80), any::<u8>()];
    (place, any::<bool>(), any::<u8>(), byte).prop_map(
        |(at, flips, bit, byte)| {
            if flips { Spoil::Flip(at, bit) } else { Spoil::Set(at, byte) }
        },
    )
}

#[derive(Clone, Copy, Debug)]
enum Call {
    Connect,
    AcquireHeld,
    AcquireFree,
    Wait,
    Renew,
    Release,
    Inspect,
    InspectPrefix,
    InspectQueue,
}

fn call() -> impl Strategy<Value = Call> {
    proptest::sample::select(vec![
        Call::Connect,
        Call::AcquireHeld,
        Call::AcquireFree,
        Call::Wait,
        Call::Renew,
        Call::Release,
        Call::Inspect,
        Call::InspectPrefix,
        Call::InspectQueue,
    ])
}

/// Spoils replies of a server: in turn each piece with one of these, for as long as there are any.
fn spoilt_replies(
    name: &str,
    runtime: &Runtime,
    upstream: std::net::SocketAddr,
    cases: u32,
    spoil: &BoxedStrategy<Spoil>,
    through: impl Fn(String) -> String,
) {
    COUNTING.call_once(|| {
        let report = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            // A driver panics on some packets, of which the store makes errors. What it does not catch ends the test.
            if info.location().is_none_or(|location| !location.file().contains("/registry/src/")) {
                let name = std::thread::current().name().unwrap_or_default().to_owned();
                PANICS.lock().expect("unpoisoned").push(name);
                report(info);
            }
        }));
    });
    let cases = if std::env::var_os("PROPTEST_CASES").is_some() { Config::default().cases } else { cases };
    let mut runner =
        TestRunner::new(Config { cases, failure_persistence: None, max_shrink_iters: 100, ..Config::default() });
    let held = claim("held");
    // It outlives the test.
    let holder = runtime.block_on(async {
        let holder = connect(&through(upstream.to_string())).await.expect("connect");
        let granted = holder.acquire(&request(&held, Duration::ZERO)).await.expect("acquire");
        assert!(matches!(granted, Attempt::Granted(_)), "{granted:?}");
        holder
    });
    let judged = runner.run(&(vec(spoil.clone(), 1..4), call(), any::<bool>()), |(spoilt, call, warm)| {
        let case = runtime.block_on(async {
            let proxy = Proxy::start(upstream).await.map_err(|error| error.to_string())?;
            let url = through(proxy.addr().to_string());
            one_case(&proxy, &url, &held, spoilt, call, warm).await
        });
        case.map_err(TestCaseError::fail)?;
        let panicked = PANICS.lock().expect("unpoisoned").iter().any(|thread| thread == name);
        prop_assert!(!panicked, "a panic");
        Ok(())
    });
    drop(holder);
    judged.unwrap_or_else(|broken| panic!("{broken}"));
}

async fn one_case(
    proxy: &Proxy,
    url: &str,
    held: &Claim,
    spoilt: Vec<Spoil>,
    call: Call,
    warm: bool,
) -> Result<(), String> {
    let spoil = |proxy: &Proxy| {
        let mut spoilt = spoilt.clone().into_iter();
        proxy.rewrite_replies(move |bytes| match spoilt.next() {
            Some(spoil) if !bytes.is_empty() => spoil.apply(bytes),
            _ => bytes,
        });
    };
    if matches!(call, Call::Connect) {
        spoil(proxy);
        let connected = timeout(BOUND, lockkit::open(url)).await.map_err(|_| "connecting does not end")?;
        drop(connected);
        proxy.heal();
        let store = connect(url).await?;
        return knows_the_truth(&store, held).await;
    }
    let store = connect(url).await?;
    let mine = claim("free");
    if warm {
        // Statements are prepared by now, and names known.
        drop(store.acquire(&request(&mine, Duration::ZERO)).await);
    }
    spoil(proxy);
    let asked = async {
        match call {
            Call::Connect => {}
            Call::AcquireHeld => drop(store.acquire(&request(&claim("held"), Duration::ZERO)).await),
            Call::AcquireFree => drop(store.acquire(&request(&mine, Duration::ZERO)).await),
            Call::Wait => drop(store.acquire(&request(&claim("held"), Duration::from_millis(20))).await),
            Call::Renew => {
                let ttl = Duration::from_secs(20);
                drop(
                    store
                        .renew(&[Renewal { fence_floor: Some(Fence::new(7)), ..Renewal::new(mine.clone(), ttl) }])
                        .await,
                );
            }
            Call::Release => drop(store.release(&mine).await),
            Call::Inspect => drop(store.inspect(&Query::Keys(vec![held.key.clone(), mine.key.clone()])).await),
            Call::InspectPrefix => drop(store.inspect(&Query::Prefix(String::new())).await),
            Call::InspectQueue => drop(store.inspect(&Query::Queue(held.key.clone())).await),
        }
    };
    timeout(BOUND, asked).await.map_err(|_| format!("{call:?} does not end"))?;
    proxy.heal();
    knows_the_truth(&store, held).await?;
    for _ in 0..TRIES {
        if timeout(BOUND, store.release(&mine)).await.map_err(|_| "a release does not end")?.is_ok() {
            return Ok(());
        }
    }
    Err("nothing is released any more".to_owned())
}

/// A client, when nothing is spoilt. The machine may be busy.
async fn connect(url: &str) -> Result<Arc<dyn LockStore>, String> {
    let mut last = String::new();
    for _ in 0..TRIES {
        match lockkit::open(url).await {
            Ok(store) => return Ok(store),
            Err(error) => last = format!("connect: {error}"),
        }
    }
    Err(last)
}

fn runtime(name: &str) -> Runtime {
    Builder::new_multi_thread().enable_all().thread_name(name).build().expect("a runtime")
}

/// Asks for the holder of the lock, and for the lock, which must be refused.
async fn knows_the_truth(store: &Arc<dyn LockStore>, held: &Claim) -> Result<(), String> {
    let mut last = String::new();
    for _ in 0..TRIES {
        let query = Query::Keys(vec![held.key.clone()]);
        match timeout(BOUND, store.inspect(&query)).await.map_err(|_| "an inspection does not end")? {
            Ok(states) => {
                let tokens: Vec<_> =
                    states.iter().flat_map(|state| &state.holders).map(|holder| holder.token).collect();
                if tokens != [Some(held.token)] {
                    return Err(format!("it is told that {states:?}"));
                }
                let rival = claim("held");
                match store.acquire(&request(&rival, Duration::ZERO)).await {
                    Ok(Attempt::Granted(hold)) => return Err(format!("a held lock was granted: {hold:?}")),
                    Ok(Attempt::Contended(_)) => {
                        _ = store.release(&rival).await;
                        return Ok(());
                    }
                    Err(error) => last = error.to_string(),
                }
            }
            Err(error) => last = error.to_string(),
        }
    }
    Err(format!("it does not recover: {last}"))
}

fn request(claim: &Claim, wait: Duration) -> AcquireRequest {
    AcquireRequest { wait, ..AcquireRequest::new(claim.clone(), Duration::from_secs(300), HolderInfo::new("fuzz")) }
}

#[test]
fn redis() {
    let runtime = runtime("redis");
    let server = runtime.block_on(RedisServer::start(RedisOptions::default())).expect("a server");
    spoilt_replies("redis", &runtime, server.addr(), CASES, &spoil(), |addr| format!("redis://{addr}?timeout=500ms"));
}

/// One node of three gives the spoilt replies.
#[test]
fn redlock() {
    let runtime = runtime("redlock");
    let servers = runtime.block_on(RedisServer::start_many(3, RedisOptions::default())).expect("servers");
    let url = |addr| format!("redlock://{addr},{}?timeout=500ms&delayed_restart=no", hosts(&servers[1..]));
    spoilt_replies("redlock", &runtime, servers[0].addr(), CASES, &spoil(), url);
}

#[test]
fn mariadb() {
    let runtime = runtime("mariadb");
    let options = MySqlOptions::default().init(schema::ddl(MySqlConfig::TABLE).expect("ddl"));
    let options = options.args(["--innodb-flush-log-at-trx-commit=2"]);
    let server = runtime.block_on(MySqlServer::start(options)).expect("a server");
    let url = |addr| format!("mysql://root@{addr}/{}?timeout=500ms", MySqlServer::DATABASE);
    spoilt_replies("mariadb", &runtime, server.addr(), CASES, &spoil(), url);
}

#[test]
fn zookeeper() {
    let runtime = runtime("zookeeper");
    let server = runtime.block_on(ZooKeeperServer::start(ZooKeeperFlavor::Installed)).expect("a server");
    let url = |addr| format!("zk://{addr}?timeout=500ms&session=4s");
    spoilt_replies("zookeeper", &runtime, server.addr(), ZOOKEEPER_CASES, &spoil_of_header(), url);
}
