//! The store on the primary that sentinels name.

use std::{
    num::NonZeroU32,
    sync::Arc,
    time::{Duration, Instant},
};

use lockkit_core::{
    AcquireRequest, Attempt, Claim, Effect, ErrorKind, Fencing, LockStore, Mode, Query, Release, Renewal, Renewed,
};
use lockkit_redis::{RedisConfig, RedisStore, diagnose};
use lockkit_testkit::{
    faults::{Direction, Proxy},
    servers::{RedisOptions, RedisSentinels, RedisServer},
};

use crate::support::*;

async fn servers() -> RedisSentinels {
    RedisSentinels::start(flavor()).await.expect("servers")
}

async fn store(all: &RedisSentinels, options: &str) -> RedisStore {
    RedisStore::from_url(&format!("{}?failover_pause=no{options}", all.url())).await.expect("connect")
}

#[tokio::test]
async fn the_five_questions_are_answered() {
    let all = servers().await;
    let (store, other) = (store(&all, "").await, Arc::new(store(&all, "").await));
    let mine = claim("a");
    let first = hold(&store, &mine).await;
    assert_eq!(hold(&store, &mine).await.fence, first.fence, "the same claim is the same grant");
    let floor = first.fence.offset(10);
    held(renew(&store, &Renewal { depth: 2, fence_floor: Some(floor), ..renewal(&mine) }).await);
    let states = other.inspect(&Query::Prefix(String::new())).await.expect("inspect");
    assert_eq!(states.len(), 1, "the note of the epoch is no lock: {states:?}");
    assert_eq!((states[0].holders[0].depth, states[0].holders[0].info.as_str()), (2, "test: holder"));
    assert_eq!((states[0].holders[0].fence, states[0].fence), (Some(first.fence), Some(floor)));
    let (waiter, wanted) = (Arc::clone(&other), request(&claim("a"), TTL));
    let waiting = tokio::spawn(async move { waiter.acquire(&wanted).await });
    until_one_waits(&store, &mine).await;
    assert_eq!(store.release(&mine).await.expect("release"), Release::Released { waiters: Some(1) });
    let next = granted(waiting.await.expect("task").expect("acquire"));
    assert!(next.fence > floor);
    let value = all.servers()[0].command(&["GET", "lockkit:a"]).await.expect("GET");
    assert!(value.contains(":1@"), "marked with the epoch: {value}");
}

#[tokio::test]
async fn what_it_can_do_is_said() {
    let config = RedisConfig::sentinel([("a", 1), ("b", 2)], "orders").max_ttl(Duration::from_secs(7));
    let store = RedisStore::new(config).expect("no I/O");
    let info = store.info();
    assert_eq!((info.scheme, &*info.name), ("redis+sentinel", "redis orders of a:1,b:2"));
    assert_eq!(info.capability.fencing, Fencing::BestEffort);
    let longest = info.capability.liveness.ttl.as_ref().map(|ttl| *ttl.end());
    assert_eq!(longest, Some(Duration::from_secs(7)));
    let error = store.acquire(&request(&claim("a"), Duration::ZERO)).await.expect_err("too long");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::InvalidInput, Effect::None), "{error}");
}

#[tokio::test]
async fn a_server_that_just_started_is_waited_for() {
    let all = servers().await;
    let store = RedisStore::from_url(&all.url()).await.expect("connect");
    let contention = contended(attempt(&store, &claim("a")).await.expect("acquire"));
    let left = contention.retry_after.expect("known");
    assert!(left > Duration::from_secs(30) && left < Duration::from_secs(61), "{left:?}");
    assert!(contention.holder.expect("holder").as_str().contains("another server took over"));
    // A second client sees the same pause, not a new one, whatever others think of pauses.
    hold(&self::store(&all, "").await, &claim("b")).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    let second = RedisStore::from_url(&all.url()).await.expect("connect");
    let later = contended(attempt(&second, &claim("a")).await.expect("acquire")).retry_after.expect("known");
    assert!(later < left, "{later:?} is not less than {left:?}");
}

#[tokio::test]
async fn sentinels_may_be_down_or_silent() {
    let all = servers().await;
    all.sentinels()[0].kill().await.expect("kill");
    all.sentinels()[1].freeze().await.expect("freeze");
    let store = store(&all, "&timeout=1s").await;
    let mine = claim("a");
    hold(&store, &mine).await;
    all.sentinels()[2].kill().await.expect("kill");
    held(renew(&store, &renewal(&mine)).await);
    let error = RedisStore::from_url(&format!("{}?timeout=500ms", all.url())).await.expect_err("no sentinel");
    assert!(matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::TimedOut), "{error}");
    assert_eq!(error.effect(), Effect::None);
    free(&store, &mine).await;
}

#[tokio::test]
async fn an_unknown_primary_is_misconfigured() {
    let all = servers().await;
    let url = all.url().replace(RedisSentinels::PRIMARY, "no-such-name");
    let error = RedisStore::from_url(&url).await.expect_err("unknown");
    assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error}");
    assert!(error.message().contains("no-such-name") && error.to_string().lines().count() == 1, "{error}");
}

#[tokio::test]
async fn a_planned_switch_is_heard_of() {
    let all = servers().await;
    let store = store(&all, "").await;
    let mine = claim("a");
    hold(&store, &mine).await;
    // The former primary stays alive, and nothing is asked of it meanwhile.
    let sentinel = RedisServerAt(all.sentinels()[0].addr());
    sentinel.command("SENTINEL FAILOVER lockkit");
    all.until_primary(1).await.expect("takes over");
    let start = Instant::now();
    let grant = loop {
        match attempt(&store, &claim("b")).await {
            Ok(attempt) => break granted(attempt),
            Err(e) => assert!(e.is_retryable() && start.elapsed() < Duration::from_secs(10), "{e}"),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    assert_eq!(all.servers()[1].command(&["EXISTS", "lockkit:b"]).await.expect("EXISTS"), "1", "{grant:?}");
}

/// A failover that has promoted the second server and is not over, for a replica is frozen. The first is still a primary, and the
/// sentinel that leads the failover still shows it as the one, at the epoch of the new one.
struct HalfWay {
    all: RedisSentinels,
    /// Before the sentinels; the first leads the failover.
    proxies: Vec<Proxy>,
    url: String,
}

impl HalfWay {
    async fn start() -> Self {
        let half_way = Self::prepare().await;
        half_way.fail_over().await;
        half_way
    }

    /// As it is before the failover.
    async fn prepare() -> Self {
        let all = RedisSentinels::start_with_bystander(flavor()).await.expect("servers");
        all.be_slow().await.expect("settings");
        for server in all.servers().iter().chain(all.bystander()) {
            RedisServerAt(server.addr()).command("ACL SETUSER app on >pw ~* &* +@all");
        }
        let mut proxies = Vec::new();
        for sentinel in all.sentinels() {
            proxies.push(Proxy::start(sentinel.addr()).await.expect("proxy"));
        }
        let addresses: Vec<_> = proxies.iter().map(|proxy| proxy.addr().to_string()).collect();
        let url =
            format!("redis+sentinel://app:pw@{}/{}?failover_pause=no", addresses.join(","), RedisSentinels::PRIMARY);
        Self { all, proxies, url }
    }

    async fn fail_over(&self) {
        self.all.bystander().expect("started").freeze().await.expect("freeze");
        self.all.command(0, &["SENTINEL", "FAILOVER", RedisSentinels::PRIMARY]).await.expect("failover");
        self.until_named(1, "GET-MASTER-ADDR-BY-NAME").await;
    }

    async fn store(&self) -> RedisStore {
        RedisStore::from_url(&self.url).await.expect("connect")
    }

    /// Waits until this answer of a sentinel has the port of the server that was promoted.
    async fn until_named(&self, sentinel: usize, question: &str) {
        let port = self.all.servers()[1].port().to_string();
        eventually_within(Duration::from_secs(30), &format!("sentinel {sentinel} names the new primary"), async || {
            self.says(sentinel, question).await.lines().any(|line| line == port)
        })
        .await;
    }

    async fn says(&self, sentinel: usize, question: &str) -> String {
        self.all.command(sentinel, &["SENTINEL", question, RedisSentinels::PRIMARY]).await.expect("answer")
    }

    async fn is_primary(&self, server: usize) -> bool {
        self.all.servers()[server].command(&["ROLE"]).await.expect("ROLE").starts_with("master")
    }

    /// The numbers of the stores' connections to the server that was promoted.
    async fn connections(&self) -> Vec<String> {
        let list = self.all.servers()[1].command(&["CLIENT", "LIST"]).await.expect("CLIENT LIST");
        let of_stores = list.lines().filter(|line| line.contains(" user=app "));
        of_stores.filter_map(|line| line.split(' ').next()).map(str::to_owned).collect()
    }
}

#[tokio::test]
async fn a_server_that_is_being_replaced_is_not_believed_in() {
    let half_way = HalfWay::start().await;
    // The leader's answer comes last of a majority.
    half_way.proxies[0].delay(Direction::ToClient, Duration::from_millis(20));
    half_way.proxies[2].refuse(true);
    let names: Vec<_> = (0..20).map(|index| format!("lock {index}")).collect();
    for name in &names {
        let store = half_way.store().await;
        hold(&store, &claim(name)).await;
    }
    for name in &names {
        let there = half_way.all.servers()[0].command(&["EXISTS", &format!("lockkit:{name}")]).await.expect("EXISTS");
        assert_eq!(there, "0", "{name} was granted by the former primary");
    }
    let former = half_way.all.servers()[0].port().to_string();
    assert!(half_way.says(0, "MASTER").await.lines().any(|line| line == former), "the failover is over");
    assert!(half_way.is_primary(0).await, "the former primary could not grant anything");
}

/// A sentinel that was told of another primary has no epoch, as the others have none before the first failover.
#[tokio::test]
async fn which_sentinel_answers_last_decides_nothing() {
    let all = servers().await;
    let stranger = RedisServer::start(RedisOptions::default().flavor(flavor())).await.expect("a server");
    let mut proxies = Vec::new();
    for (sentinel, delay) in all.sentinels().iter().zip([0, 100, 20]) {
        let proxy = Proxy::start(sentinel.addr()).await.expect("proxy");
        proxy.delay(Direction::ToClient, Duration::from_millis(delay));
        proxies.push(proxy);
    }
    let addresses: Vec<_> = proxies.iter().map(|proxy| proxy.addr().to_string()).collect();
    let url =
        format!("redis+sentinel://{}/{}?failover_pause=no&timeout=2s", addresses.join(","), RedisSentinels::PRIMARY);
    all.command(2, &["SENTINEL", "REMOVE", RedisSentinels::PRIMARY]).await.expect("remove");
    let port = stranger.port().to_string();
    let words = ["SENTINEL", "MONITOR", RedisSentinels::PRIMARY, "127.0.0.1", &port, "2"];
    all.command(2, &words).await.expect("monitor");
    hold(&RedisStore::from_url(&url).await.expect("a majority names it"), &claim("a")).await;
    assert_eq!(all.servers()[0].command(&["EXISTS", "lockkit:a"]).await.expect("EXISTS"), "1");
    proxies[1].refuse(true);
    let error = RedisStore::from_url(&url).await.expect_err("one against one");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, Effect::None), "{error}");
}

/// A sentinel that is behind says nothing against the server that the others have named already.
#[tokio::test]
async fn what_is_known_already_is_no_news() {
    let half_way = HalfWay::start().await;
    half_way.proxies[2].refuse(true);
    let store = half_way.store().await;
    let mine = claim("a");
    hold(&store, &mine).await;
    let connections = half_way.connections().await;
    assert_eq!(connections.len(), 1, "{connections:?}");
    // A sentinel is lost, so all are asked again; the leader's answer comes last.
    half_way.proxies[0].delay(Direction::ToClient, Duration::from_millis(20));
    half_way.proxies[1].cut().await;
    eventually("the sentinels are asked again", async || {
        held(renew(&store, &renewal(&mine)).await);
        half_way.proxies[1].connections() == 1
    })
    .await;
    half_way.proxies[0].heal();
    let former = half_way.all.servers()[0].port().to_string();
    assert!(half_way.says(0, "MASTER").await.lines().any(|line| line == former), "the failover is over");
    // The failover ends, and the leader announces what everybody knows.
    half_way.all.bystander().expect("started").thaw().expect("thaw");
    half_way.until_named(0, "MASTER").await;
    held(renew(&store, &renewal(&mine)).await);
    assert_eq!(half_way.connections().await, connections, "a healthy connection was given up");
}

/// Has the store renew on a runtime of its own until this is true, and ends that runtime.
fn renew_elsewhere(store: &RedisStore, mine: &Claim, what: &str, mut is_true: impl FnMut() -> bool) {
    let until_true = async {
        eventually(what, async || {
            held(renew(store, &renewal(mine)).await);
            is_true()
        })
        .await;
    };
    tokio::task::block_in_place(|| {
        let other = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        other.block_on(until_true);
    });
}

/// The former primary still answers, and is not to be believed.
async fn hears_of_a_failover(half_way: &HalfWay, store: &RedisStore, mine: &Claim) {
    half_way.fail_over().await;
    eventually("the store hears of the failover", async || {
        !matches!(renew(store, &renewal(mine)).await, Ok(Renewed::Held(_)))
    })
    .await;
    assert!(half_way.is_primary(0).await, "the former primary could not renew anything");
}

/// Two sentinels that answer with a delay, and a store that listens to them.
async fn two_slow_sentinels() -> (HalfWay, RedisStore) {
    let half_way = HalfWay::prepare().await;
    half_way.proxies[2].refuse(true);
    half_way.proxies[..2].iter().for_each(|proxy| proxy.delay(Direction::ToClient, Duration::from_millis(50)));
    let store = half_way.store().await;
    (half_way, store)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_is_listened_to_outlives_the_runtime_that_had_the_sentinels_asked() {
    let (half_way, store) = two_slow_sentinels().await;
    let mine = claim("a");
    hold(&store, &mine).await;
    half_way.proxies[0].cut().await;
    let (other, mut is_asked) = (&half_way.proxies[1], false);
    renew_elsewhere(&store, &mine, "the sentinels have answered", || {
        is_asked |= other.connections() == 2;
        is_asked && other.connections() == 1
    });
    hears_of_a_failover(&half_way, &store, &mine).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_sentinels_are_asked_though_the_runtime_of_the_operation_ends_meanwhile() {
    let (half_way, store) = two_slow_sentinels().await;
    let mine = claim("a");
    hold(&store, &mine).await;
    for proxy in &half_way.proxies[..2] {
        proxy.cut().await;
    }
    renew_elsewhere(&store, &mine, "the sentinels are asked again", || half_way.proxies[0].connections() > 0);
    hears_of_a_failover(&half_way, &store, &mine).await;
}

#[tokio::test]
async fn sentinels_have_a_login_of_their_own() {
    let options = RedisOptions::default();
    let all = RedisSentinels::start_with(options, flavor()).await.expect("servers");
    for sentinel in all.sentinels() {
        let sentinel = RedisServerAt(sentinel.addr());
        sentinel.command("ACL SETUSER watch on >sentinel-secret +@all allchannels");
        sentinel.command("ACL SETUSER default off");
    }
    let url = format!("{}?failover_pause=no", all.url());
    let error = RedisStore::from_url(&url).await.expect_err("no login");
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    let wrong = format!("{url}&sentinel_user=watch&sentinel_password=wrong-secret");
    let error = RedisStore::from_url(&wrong).await.expect_err("wrong");
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    assert!(!format!("{error} {error:?}").contains("secret"), "{error:?}");
    let store = RedisStore::from_url(&format!("{url}&sentinel_user=watch&sentinel_password=sentinel-secret")).await;
    hold(&store.expect("connect"), &claim("a")).await;
}

#[tokio::test]
async fn a_primary_that_goes_on_alone_is_warned_of() {
    let all = servers().await;
    let warned = |store: &RedisStore| store.warnings().iter().any(|warning| warning.contains("min-replicas-to-write"));
    assert!(warned(&store(&all, "").await));
    assert!(!warned(&store(&all, "&replicas=1").await));
    all.servers()[0].command(&["CONFIG", "SET", "min-replicas-to-write", "1"]).await.expect("set");
    assert!(!warned(&store(&all, "").await));
}

/// A note that left with its slot, and came back, can give one run of a server two epochs, each with clients. Neither takes the other's
/// moments for those of another clock, which would keep who is dead among the holders.
#[tokio::test]
async fn a_permit_of_the_dead_comes_back_whatever_epochs_the_others_know() {
    let all = servers().await;
    let primary = &all.servers()[0];
    let before = store(&all, "").await;
    let mode = Mode::Permit { limit: NonZeroU32::MIN.saturating_add(2) };
    let [dead, one, other, next] = [(); 4].map(|()| Claim { mode, ..claim("a") });
    hold(&before, &one).await;
    let note = primary.command(&["KEYS", "*reign"]).await.expect("KEYS");
    let said = primary.command(&["GET", &note]).await.expect("GET");
    primary.command(&["SET", &note, &format!("ffffffff{}", &said[8..])]).await.expect("SET");
    let after = store(&all, "").await;
    hold(&after, &other).await;
    let value = primary.command(&["HGET", "{lockkit:a}:leases:fence", &other.token.reveal()]).await.expect("HGET");
    assert!(value.contains("@ffffffff:"), "the other epoch: {value}");
    let short = AcquireRequest { ttl: Duration::from_millis(500), ..request(&dead, Duration::ZERO) };
    granted(before.acquire(&short).await.expect("acquire"));
    let asked = Instant::now();
    while let Attempt::Contended(_) = attempt(&after, &next).await.expect("acquire") {
        assert!(asked.elapsed() < Duration::from_secs(5), "its permit never lapses");
        held(renew(&before, &renewal(&one)).await);
        held(renew(&after, &renewal(&other)).await);
    }
}

#[tokio::test]
async fn one_server_is_no_sentinel() {
    let server = RedisServer::start(RedisOptions::default()).await.expect("server");
    let error = RedisStore::from_url(&format!("redis+sentinel://{}/x", server.addr())).await.expect_err("no sentinel");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Misconfigured, Effect::None), "{error}");
}

/// The permissions that docs/backends/redis.md asks for are enough, and without INFO it is said what is missing.
#[tokio::test]
async fn the_documented_permissions_suffice() {
    const COMMANDS: &str = "+evalsha +eval +get +set +del +incrby +pexpire +pttl +time +publish +subscribe \
                            +unsubscribe +type +scan +pubsub +wait";
    let all = servers().await;
    let primary = RedisServerAt(all.servers()[0].addr());
    primary.command(&format!("ACL SETUSER app on >pw ~lockkit:* ~{{lockkit:* &lockkit:* {COMMANDS}"));
    let url = all.url().replace("//", "//app:pw@") + "?failover_pause=no&replicas=1";
    let error = RedisStore::from_url(&url).await.expect_err("no INFO");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Denied, Effect::None), "{error}");
    primary.command("ACL SETUSER app +info");
    let store = RedisStore::from_url(&url).await.expect("connect");
    let mine = claim("a");
    hold(&store, &mine).await;
    held(renew(&store, &renewal(&mine)).await);
    contended(store.acquire(&request(&claim("a"), Duration::from_millis(20))).await.expect("acquire"));
    assert_eq!(store.inspect(&Query::Prefix(String::new())).await.expect("inspect").len(), 1);
    free(&store, &mine).await;
}

#[tokio::test]
async fn a_forgotten_script_is_sent_again() {
    let all = servers().await;
    let store = store(&all, "").await;
    let mine = claim("a");
    let forget = async || all.servers()[0].command(&["SCRIPT", "FLUSH"]).await.expect("flush");
    hold(&store, &mine).await;
    forget().await;
    held(renew(&store, &renewal(&mine)).await);
    forget().await;
    contended(store.acquire(&request(&claim("a"), Duration::from_millis(10))).await.expect("acquire"));
    forget().await;
    free(&store, &mine).await;
}

/// A server that was promoted before it was in sync with its primary takes a new replication id once more for its first replica, and then does
/// not seem to have taken over.
#[tokio::test]
async fn a_promotion_that_its_first_replica_hides_is_waited_for() {
    let all = servers().await;
    let options = || RedisOptions::default().flavor(flavor());
    let primary = RedisServer::start(options().args(["--replicaof", "127.0.0.1", "1"])).await.expect("server");
    let told = async |what| primary.command(&["INFO", what]).await.expect("INFO");
    let is_old = |info: &str| {
        let uptime = info.lines().find_map(|line| line.strip_prefix("uptime_in_seconds:")).expect("an uptime");
        uptime.trim().parse::<u64>().expect("a number") > 3
    };
    eventually("it is older than any lease", async || is_old(&told("server").await)).await;
    primary.command(&["REPLICAOF", "NO", "ONE"]).await.expect("promoted");
    let port = primary.port().to_string();
    let _replica = RedisServer::start(options().args(["--replicaof", "127.0.0.1", &port])).await.expect("server");
    eventually("the promotion is forgotten", async || {
        told("replication").await.contains(&format!("master_replid2:{}", "0".repeat(40)))
    })
    .await;
    for sentinel in 0..all.sentinels().len() {
        all.command(sentinel, &["SENTINEL", "MONITOR", "other", "127.0.0.1", &port, "2"]).await.expect("monitor");
    }
    let (addresses, _) = all.url().rsplit_once('/').map(|(all, name)| (all.to_owned(), name.len())).expect("a name");
    let store = RedisStore::from_url(&format!("{addresses}/other?max_ttl=2s")).await.expect("connect");
    let short = AcquireRequest { ttl: Duration::from_secs(1), ..request(&claim("a"), Duration::ZERO) };
    contended(store.acquire(&short).await.expect("acquire"));
}

/// A primary without replicas takes a new replication id after that time, and then does not seem to have taken over.
#[tokio::test]
async fn a_server_that_forgets_too_soon_that_it_took_over_is_refused() {
    let options = RedisOptions::default().flavor(flavor()).args(["--repl-backlog-ttl", "5"]);
    let all = RedisSentinels::start_with(options, flavor()).await.expect("servers");
    let url = |options| format!("{}?{options}", all.url());
    let error = RedisStore::from_url(&url("max_ttl=10s")).await.expect_err("it forgets");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Unsupported, Effect::None), "{error}");
    assert!(error.message().contains("repl-backlog-ttl is 5 s"), "{error}");
    let findings = diagnose(&RedisConfig::from_url(&url("max_ttl=10s")).expect("url")).await.expect("findings");
    assert!(findings.iter().any(|finding| finding.code == "backlog"), "{findings:?}");
    for options in ["max_ttl=4s", "failover_pause=no"] {
        RedisStore::from_url(&url(options)).await.expect("connect");
    }
}
