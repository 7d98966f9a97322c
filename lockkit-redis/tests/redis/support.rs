//! A private server per test, and short names for requests.

use std::{
    net::TcpListener,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use lockkit_core::{
    AcquireRequest, Attempt, Claim, Contention, Fence, FenceRequest, Hold, HolderInfo, LockKey, LockStore, LossReason,
    Mode, Order, Release, Renewal, Renewed, Result, Token,
};
use lockkit_redis::{RedisConfig, RedisStore};

pub(crate) const TTL: Duration = Duration::from_secs(10);

/// A server that dies with this value.
pub(crate) struct Server {
    child: Child,
    port: u16,
    options: Vec<String>,
}

impl Server {
    pub(crate) fn start() -> Self {
        Self::start_with(&[])
    }

    pub(crate) fn start_with(options: &[&str]) -> Self {
        let port = TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr()).expect("port").port();
        let options = options.iter().map(|option| (*option).to_owned()).collect();
        let mut server = Self { child: spawn(port, &options), port, options };
        server.await_ready();
        server
    }

    pub(crate) fn url(&self, rest: &str) -> String {
        format!("redis://127.0.0.1:{}/{rest}", self.port)
    }

    pub(crate) fn config(&self) -> RedisConfig {
        RedisConfig::new("127.0.0.1", self.port)
    }

    pub(crate) async fn store(&self) -> RedisStore {
        RedisStore::connect(self.config()).await.expect("connect")
    }

    /// A connection that is not lockkit's.
    pub(crate) fn raw(&self) -> redis::Connection {
        redis::Client::open(self.url("")).and_then(|client| client.get_connection()).expect("raw connection")
    }

    pub(crate) fn signal(&self, signal: &str) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args([signal, &pid]).status().expect("kill").success());
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().expect("kill");
        self.child.wait().expect("wait");
    }

    pub(crate) fn restart(&mut self) {
        self.child = spawn(self.port, &self.options);
        self.await_ready();
    }

    fn await_ready(&mut self) {
        let start = Instant::now();
        while std::net::TcpStream::connect(("127.0.0.1", self.port)).is_err() {
            assert!(start.elapsed() < Duration::from_secs(10), "the server does not start");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

fn spawn(port: u16, options: &Vec<String>) -> Child {
    let program = std::env::var("LOCKKIT_REDIS_SERVER").unwrap_or_else(|_| "redis-server".to_owned());
    Command::new(program)
        .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"])
        .args(options)
        .stdout(Stdio::null())
        .spawn()
        .expect("start the server")
}

impl Drop for Server {
    fn drop(&mut self) {
        _ = self.child.kill();
        _ = self.child.wait();
    }
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
    AcquireRequest {
        claim: claim.clone(),
        ttl: TTL,
        wait,
        order: Order::Any,
        fence: FenceRequest::default(),
        holder: HolderInfo::new("test: holder"),
    }
}

pub(crate) fn renewal(claim: &Claim) -> Renewal {
    Renewal { claim: claim.clone(), ttl: TTL, depth: 1, fence_floor: None }
}

pub(crate) async fn attempt(store: &RedisStore, claim: &Claim) -> Result<Attempt> {
    store.acquire(&request(claim, Duration::ZERO)).await
}

pub(crate) async fn hold(store: &RedisStore, claim: &Claim) -> Hold {
    granted(attempt(store, claim).await.expect("acquire"))
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
