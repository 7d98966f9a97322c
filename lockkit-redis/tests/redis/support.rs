//! A private server per test, and short names for requests.

use std::time::Duration;

pub(crate) use lockkit_core::store::join_all;
use lockkit_core::{AcquireRequest, Attempt, Claim, Fence, Hold, HolderInfo, LockStore, Order, Query, Renewal, Result};
use lockkit_redis::{RedisConfig, RedisStore};
pub(crate) use lockkit_testkit::calls::{
    claim, contended, eventually, eventually_within, free, granted, held, lost, renew,
};
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

pub(crate) fn request(claim: &Claim, wait: Duration) -> AcquireRequest {
    AcquireRequest { wait, ..AcquireRequest::new(claim.clone(), TTL, HolderInfo::new("test: holder")) }
}

pub(crate) fn renewal(claim: &Claim) -> Renewal {
    Renewal::new(claim.clone(), TTL)
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
    eventually("somebody waits", async || {
        let states = store.inspect(&Query::Keys(vec![claim.key.clone()])).await.expect("inspect");
        states[0].waiters == Some(1)
    })
    .await;
}

pub(crate) fn fence(hold: &Hold) -> Fence {
    assert!(hold.fence > Fence::NONE);
    hold.fence
}

/// The number of clients that the server knows to be subscribed to the lock.
pub(crate) fn subscribers(connection: &mut redis::Connection, name: &str) -> u32 {
    raw::<(String, u32)>(connection, &format!("PUBSUB NUMSUB lockkit:{name}")).1
}

/// A server that is not a `Server`, such as a sentinel.
pub(crate) struct RedisServerAt(pub(crate) std::net::SocketAddr);

impl RedisServerAt {
    pub(crate) fn command(&self, command: &str) {
        let client = redis::Client::open(format!("redis://{}", self.0)).expect("address");
        raw::<redis::Value>(&mut client.get_connection().expect("raw connection"), command);
    }
}
