//! A private server per test, and short names for requests.

use std::time::{Duration, Instant};

pub(crate) use lockkit_core::store::join_all;
use lockkit_core::{
    AcquireRequest, Attempt, Claim, Contention, Fence, Hold, HolderInfo, LockKey, LockStore, LossReason, Mode, Order,
    Query, Release, Renewal, Renewed, Result, Token,
};
use lockkit_redis::{RedisConfig, RedisStore};
use lockkit_testkit::{
    faults::ServerClock,
    servers::{Keep, RedisFlavor, RedisOptions, RedisServer},
};

/// What docs/backends/redis.md asks for on one server, with inspection.
pub(crate) const PERMISSIONS: &str = "+evalsha +eval +get +set +del +incrby +pexpire +pttl +time +publish +subscribe \
                                      +unsubscribe +type +info +scan +pubsub";

/// What it asks for besides, for readers, permits and order.
pub(crate) const QUEUE_PERMISSIONS: &str = "+exists +hdel +hget +hset +pexpireat +zadd +zcard +zrange +zrangebyscore +zrank \
                                            +zrem +zscore";

pub(crate) const TTL: Duration = Duration::from_secs(10);

/// A server for one test.
pub(crate) struct Server(RedisServer);

impl Server {
    pub(crate) async fn start() -> Self {
        Self::start_with(&[]).await
    }

    pub(crate) async fn start_with(args: &[&str]) -> Self {
        Self::of(RedisOptions::default().args(args.iter().copied())).await
    }

    /// Its wall clock can be moved.
    pub(crate) async fn start_on(clock: &ServerClock) -> Self {
        Self::of(RedisOptions::default().clock(clock)).await
    }

    async fn of(options: RedisOptions) -> Self {
        Self(RedisServer::start(options.flavor(flavor())).await.expect("a server"))
    }

    pub(crate) fn port(&self) -> u16 {
        self.0.port()
    }

    pub(crate) fn url(&self, rest: &str) -> String {
        format!("{}/{rest}", self.0.url())
    }

    pub(crate) fn config(&self) -> RedisConfig {
        RedisConfig::new("127.0.0.1", self.port())
    }

    pub(crate) async fn store(&self) -> RedisStore {
        RedisStore::connect(self.config()).await.expect("connect")
    }

    /// A connection that is not lockkit's.
    pub(crate) fn raw(&self) -> redis::Connection {
        redis::Client::open(self.url("")).and_then(|client| client.get_connection()).expect("raw connection")
    }

    pub(crate) async fn freeze(&self) {
        self.0.freeze().await.expect("freeze");
    }

    pub(crate) fn thaw(&self) {
        self.0.thaw().expect("thaw");
    }

    pub(crate) async fn kill(&self) {
        self.0.kill().await.expect("kill");
    }

    pub(crate) async fn restart(&self) {
        self.0.restart(Keep::Nothing).await.expect("restart");
    }
}

/// The server that is to be tested.
pub(crate) fn flavor() -> RedisFlavor {
    let program = std::env::var_os("LOCKKIT_REDIS_SERVER");
    program.map_or_else(RedisFlavor::default, |path| RedisFlavor::At(path.into()))
}

/// Runs a raw command.
pub(crate) fn raw<T: redis::FromRedisValue>(connection: &mut redis::Connection, command: &str) -> T {
    let mut parts = command.split(' ');
    let mut request = redis::cmd(parts.next().expect("command"));
    parts.for_each(|part| {
        request.arg(part);
    });
    request.query(connection).expect("raw command")
}

pub(crate) fn claim(name: &str) -> Claim {
    let key = LockKey::new(name).expect("name");
    Claim { key, token: Token::random().expect("token"), mode: Mode::Exclusive }
}

pub(crate) fn request(claim: &Claim, wait: Duration) -> AcquireRequest {
    AcquireRequest { wait, ..AcquireRequest::new(claim.clone(), TTL, HolderInfo::new("test: holder")) }
}

pub(crate) fn renewal(claim: &Claim) -> Renewal {
    Renewal { claim: claim.clone(), ttl: TTL, depth: 1, fence_floor: None, holder: None }
}

pub(crate) async fn attempt(store: &RedisStore, claim: &Claim) -> Result<Attempt> {
    store.acquire(&request(claim, Duration::ZERO)).await
}

pub(crate) async fn hold(store: &RedisStore, claim: &Claim) -> Hold {
    granted(attempt(store, claim).await.expect("acquire"))
}

/// Waits in order until it is granted.
pub(crate) async fn in_order(store: &RedisStore, claim: &Claim) -> Hold {
    let request = AcquireRequest { order: Order::Fifo, ..request(claim, TTL) };
    loop {
        if let Attempt::Granted(hold) = store.acquire(&request).await.expect("acquire") {
            return hold;
        }
    }
}

pub(crate) async fn until_one_waits(store: &RedisStore, claim: &Claim) {
    eventually_async("somebody waits", async || {
        let states = store.inspect(&Query::Keys(vec![claim.key.clone()])).await.expect("inspect");
        states[0].waiters == Some(1)
    })
    .await;
}

pub(crate) fn granted(attempt: Attempt) -> Hold {
    match attempt {
        Attempt::Granted(hold) => hold,
        other => panic!("not granted: {other:?}"),
    }
}

pub(crate) fn contended(attempt: Attempt) -> Contention {
    match attempt {
        Attempt::Contended(contention) => contention,
        other => panic!("not contended: {other:?}"),
    }
}

pub(crate) async fn renew(store: &RedisStore, renewal: &Renewal) -> Result<Renewed> {
    let mut answers = store.renew(std::slice::from_ref(renewal)).await;
    assert_eq!(answers.len(), 1);
    answers.remove(0)
}

pub(crate) fn held(renewed: Result<Renewed>) -> Hold {
    match renewed.expect("renew") {
        Renewed::Held(hold) => hold,
        other @ Renewed::Lost(_) => panic!("lost: {other:?}"),
    }
}

pub(crate) fn lost(renewed: Result<Renewed>) -> LossReason {
    match renewed.expect("renew") {
        Renewed::Lost(reason) => reason,
        Renewed::Held(hold) => panic!("held: {hold:?}"),
    }
}

pub(crate) async fn free(store: &RedisStore, claim: &Claim) {
    let released = store.release(claim).await.expect("release");
    assert!(matches!(released, Release::Released { .. }), "{released:?}");
}

pub(crate) fn fence(hold: &Hold) -> Fence {
    assert!(hold.fence > Fence::NONE);
    hold.fence
}

/// The number of clients that the server knows to be subscribed to the lock.
pub(crate) fn subscribers(connection: &mut redis::Connection, name: &str) -> u32 {
    raw::<(String, u32)>(connection, &format!("PUBSUB NUMSUB lockkit:{name}")).1
}

/// Waits until something becomes true.
pub(crate) async fn eventually(what: &str, mut is_true: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_true() {
        assert!(start.elapsed() < Duration::from_secs(5), "never: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// The same for something that takes asking.
pub(crate) async fn eventually_async(what: &str, mut is_true: impl AsyncFnMut() -> bool) {
    let start = Instant::now();
    while !is_true().await {
        assert!(start.elapsed() < Duration::from_secs(5), "never: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// A server that is not a `Server`, such as a sentinel.
pub(crate) struct RedisServerAt(pub(crate) std::net::SocketAddr);

impl RedisServerAt {
    pub(crate) fn command(&self, command: &str) {
        let client = redis::Client::open(format!("redis://{}", self.0)).expect("address");
        raw::<redis::Value>(&mut client.get_connection().expect("raw connection"), command);
    }
}
