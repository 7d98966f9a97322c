//! Slots that move from one member of a cluster to another while locks are asked for.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use lockkit_core::{AcquireRequest, Attempt, Claim, LockStore, Locker, Mode};
use lockkit_redis::{RedisConfig, RedisStore};
use lockkit_testkit::{
    faults::ServerClock,
    servers::{Keep, RedisCluster, RedisOptions, RedisServer},
};

use crate::support::*;

/// Names of locks at each of the three.
const EVERYWHERE: [&str; 3] = ["460", "2", "1"];

async fn store(all: &RedisCluster, options: &str) -> RedisStore {
    RedisStore::from_url(&format!("{}?prefix=&{options}", all.url())).await.expect("connect")
}

fn short(claim: &Claim) -> AcquireRequest {
    AcquireRequest { ttl: Duration::from_secs(1), ..request(claim, Duration::ZERO) }
}

/// Asks until the members grant: right after they took over they don't.
async fn until_granted(store: &RedisStore, name: &str) {
    let mine = claim(name);
    eventually("a grant", async || matches!(store.acquire(&short(&mine)).await.expect("acquire"), Attempt::Granted(_)))
        .await;
    free(store, &mine).await;
}

async fn at_once(store: &RedisStore, name: &str) {
    let mine = claim(name);
    granted(store.acquire(&short(&mine)).await.expect("acquire"));
    free(store, &mine).await;
}

/// The hash tag of the first member's note about its epoch. A lock of that name lies in the same slot.
async fn tag_of_note(all: &RedisCluster) -> Option<String> {
    let keys = all.members()[0].command(&["KEYS", "*:reign"]).await.expect("KEYS");
    let (_, rest) = keys.split_once('{')?;
    Some(rest.split_once('}')?.0.to_owned())
}

/// Moves the slot of the first member's note to the second; the name of a lock in that slot.
async fn move_note(all: &RedisCluster) -> String {
    let tag = tag_of_note(all).await.expect("a note");
    let slot = all.slot_of(&tag).await.expect("slot");
    all.move_slot(slot, 0, 1).await.expect("move");
    tag
}

/// The first member has taken over from its replica, some time ago. So a client that finds no note of when would pause.
async fn was_promoted(all: &RedisCluster) {
    for index in [3, 0] {
        let member = &all.members()[index];
        let start = Instant::now();
        // A replica that is not in sync yet refuses, or gives up after 5 s.
        while !member.command(&["ROLE"]).await.expect("ROLE").starts_with("master") {
            assert!(start.elapsed() < Duration::from_secs(60), "never takes over");
            _ = member.command(&["CLUSTER", "FAILOVER"]).await;
            tokio::time::sleep(Duration::from_secs(2)).await;
        }
        all.until_primary(index).await.expect("takes over");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grants_go_on_while_slots_move() {
    let all = RedisCluster::start(flavor(), true).await.expect("servers");
    was_promoted(&all).await;
    let store = Arc::new(store(&all, "max_ttl=3s").await);
    for name in EVERYWHERE {
        until_granted(&store, name).await;
    }
    let (done, rounds) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let load = {
        let (store, done, rounds) = (Arc::clone(&store), Arc::clone(&done), Arc::clone(&rounds));
        tokio::spawn(async move {
            while !done.load(Ordering::Relaxed) {
                for name in ["4gY", "2", "1"] {
                    at_once(&store, name).await;
                }
                rounds.fetch_add(1, Ordering::Relaxed);
            }
        })
    };
    for _ in 0..3 {
        // Whoever asks for a lock that has moved learns of it.
        let moved = move_note(&all).await;
        at_once(&store, &moved).await;
        at_once(&store, "460").await;
        eventually("a note", async || tag_of_note(&all).await.is_some()).await;
        let late = self::store(&all, "max_ttl=3s").await;
        at_once(&late, "4Iu").await;
    }
    let before = rounds.load(Ordering::Relaxed);
    eventually("grants", async || rounds.load(Ordering::Relaxed) > before + 10).await;
    done.store(true, Ordering::Relaxed);
    load.await.expect("nothing was in the way");
}

/// Keys that have left a slot on its way, or never were there, are not asked for at either member.
#[tokio::test]
async fn the_note_is_kept_elsewhere_while_its_slot_is_on_its_way() {
    let all = RedisCluster::start(flavor(), true).await.expect("servers");
    at_once(&store(&all, "failover_pause=no").await, "460").await;
    let tag = tag_of_note(&all).await.expect("a note");
    let (slot, note) = (all.slot_of(&tag).await.expect("slot").to_string(), format!("lockkit:esc:{{{tag}}}:reign"));
    let (from, to) = (&all.members()[0], &all.members()[1]);
    let (from_id, to_id) = (from.command(&["CLUSTER", "MYID"]), to.command(&["CLUSTER", "MYID"]));
    let (from_id, to_id) = (from_id.await.expect("id"), to_id.await.expect("id"));
    to.command(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &from_id]).await.expect("import");
    from.command(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &to_id]).await.expect("migrate");
    let port = to.port().to_string();
    from.command(&["MIGRATE", "127.0.0.1", &port, &note, "0", "5000"]).await.expect("migrate");
    for options in ["failover_pause=no", "failover_pause=no&replicas=1"] {
        let (store, mine) = (store(&all, options).await, claim("460"));
        hold(&store, &mine).await;
        held(renew(&store, &renewal(&mine)).await);
        free(&store, &mine).await;
    }
}

/// The note is still there, but not what is written to see replicas acknowledge it.
#[tokio::test]
async fn replicas_are_asked_while_the_slot_of_the_note_is_on_its_way() {
    let all = RedisCluster::start(flavor(), true).await.expect("servers");
    let (store, mine) = (store(&all, "failover_pause=no&replicas=1").await, claim("460"));
    let tag = tag_of_note(&all).await.expect("a note");
    let slot = all.slot_of(&tag).await.expect("slot").to_string();
    let to = all.members()[1].command(&["CLUSTER", "MYID"]).await.expect("id");
    all.members()[0].command(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &to]).await.expect("migrate");
    // After an hour in which nothing was granted it is gone.
    all.members()[0].command(&["DEL", &format!("lockkit:esc:{{{tag}}}:written")]).await.expect("DEL");
    hold(&store, &mine).await;
    held(renew(&store, &renewal(&mine)).await);
    free(&store, &mine).await;
}

#[tokio::test]
async fn no_alarm_is_raised_for_locks_that_stay() {
    const TTL: Duration = Duration::from_secs(50);
    let all = RedisCluster::start(flavor(), false).await.expect("servers");
    let locker = Locker::new(store(&all, "failover_pause=no").await);
    let started = Instant::now();
    let guard = locker.lock("460").ttl(TTL).acquire().await.expect("acquire");
    let asker = locker.lock("elsewhere");
    for _ in 0..3 {
        let moved = move_note(&all).await;
        _ = locker.lock(moved.as_str()).acquire().await.expect("acquire").release().await.expect("release");
        _ = asker.acquire().await.expect("acquire").release().await.expect("release");
    }
    // An alarm has every lease renewed at once.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let left: u128 = all.members()[0].command(&["PTTL", "460"]).await.expect("PTTL").parse().expect("number");
    assert!(guard.is_held() && left <= (TTL - started.elapsed()).as_millis() + 100, "renewed: {left} ms are left");
}

/// It has its place from a member that is not the one that grants: nobody hears it there until it asks again.
#[tokio::test]
async fn a_waiter_whose_slot_moved_can_renew_what_it_is_granted() {
    let all = RedisCluster::start(flavor(), false).await.expect("servers");
    let slot = all.slot_of("460").await.expect("slot");
    let (holds, waits) = (store(&all, "failover_pause=no").await, store(&all, "failover_pause=no").await);
    for (mode, from, to) in [(Mode::Exclusive, 0, 1), (Mode::Shared, 1, 0)] {
        let (theirs, mine) = (claim("460"), Claim { mode, ..claim("460") });
        in_order(&holds, &theirs).await;
        let moves = async {
            until_one_waits(&holds, &mine).await;
            all.move_slot(slot, from, to).await.expect("move");
            free(&holds, &theirs).await;
        };
        let (hold, ()) = tokio::join!(in_order(&waits, &mine), moves);
        assert_eq!(held(renew(&waits, &renewal(&mine)).await).fence, hold.fence, "{mode:?}");
        free(&waits, &mine).await;
    }
}

/// The ends of leases that share a lock are moments of the clock of the member that granted them. Here that was behind. The other one is full.
#[tokio::test]
async fn a_lease_that_is_shared_lasts_where_its_slot_goes() {
    let all = RedisCluster::start(flavor(), false).await.expect("servers");
    let slot = all.slot_of("460").await.expect("slot");
    let store = store(&all, "failover_pause=no").await;
    let reads = || Claim { mode: Mode::Shared, ..claim("460") };
    let (first, second, writes) = (reads(), reads(), claim("460"));
    for claim in [&first, &second] {
        hold(&store, claim).await;
    }
    let set_back = "for _, token in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do redis.call('ZINCRBY', KEYS[1], -60000, token) end";
    all.members()[0].command(&["EVAL", set_back, "1", "{460}:members:fence"]).await.expect("EVAL");
    all.move_slot(slot, 0, 1).await.expect("move");
    let memory = async |most: &str| {
        all.members()[1].command(&["CONFIG", "SET", "maxmemory", most]).await.expect("CONFIG");
    };
    memory("1").await;
    for claim in [&first, &second] {
        contended(attempt(&store, &writes).await.expect("acquire"));
        free(&store, claim).await;
    }
    memory("0").await;
    hold(&store, &writes).await;
}

/// How many connections each member has had, as told over connections that are there all the time.
fn connections(all: &mut [redis::Connection]) -> Vec<u32> {
    let count = |connection| {
        let info: String = raw(connection, "INFO stats");
        let line = info.lines().find_map(|line| line.strip_prefix("total_connections_received:")).expect("total");
        line.trim().parse().expect("number")
    };
    all.iter_mut().map(count).collect()
}

fn raw_connection(server: &RedisServer) -> redis::Connection {
    redis::Client::open(server.url()).and_then(|client| client.get_connection()).expect("raw connection")
}

#[tokio::test]
async fn the_map_is_asked_for_over_the_connections_that_there_are() {
    let all = RedisCluster::start(flavor(), true).await.expect("servers");
    let store = store(&all, "failover_pause=no").await;
    for name in EVERYWHERE {
        at_once(&store, name).await;
    }
    let mut members: Vec<_> = all.members().iter().map(raw_connection).collect();
    all.move_slot(5, 0, 1).await.expect("move");
    let before = connections(&mut members);
    at_once(&store, "460").await;
    at_once(&store, "4gY").await;
    assert_eq!(connections(&mut members), before);
}

#[tokio::test]
async fn a_member_without_slots_is_connected_to_once() {
    let all = RedisCluster::start(flavor(), false).await.expect("servers");
    let store = store(&all, "failover_pause=no").await;
    let mine = claim("460");
    hold(&store, &mine).await;
    let (new, bus) = lone_member().await;
    let port = new.port().to_string();
    all.members()[0].command(&["CLUSTER", "MEET", "127.0.0.1", &port, &bus]).await.expect("meet");
    let id = new.command(&["CLUSTER", "MYID"]).await.expect("id");
    eventually("all know each other", async || {
        let here = all.members()[0].command(&["CLUSTER", "NODES"]).await.expect("NODES");
        let there = new.command(&["CLUSTER", "INFO"]).await.expect("INFO");
        here.lines().any(|line| line.starts_with(&id) && !line.contains("handshake")) && there.contains("state:ok")
    })
    .await;
    let from = all.members()[0].command(&["CLUSTER", "MYID"]).await.expect("id");
    new.command(&["CLUSTER", "SETSLOT", "5", "IMPORTING", &from]).await.expect("import");
    all.members()[0].command(&["CLUSTER", "SETSLOT", "5", "MIGRATING", &id]).await.expect("migrate");
    let words = ["MIGRATE", "127.0.0.1", &port, "", "0", "5000", "KEYS", "460", "{460}:fence"];
    all.members()[0].command(&words).await.expect("migrate");
    let mut members = [raw_connection(&new)];
    let before = connections(&mut members)[0];
    for _ in 0..5 {
        // Not granted, in whichever way.
        let asked = attempt(&store, &claim("460")).await;
        assert!(!matches!(asked, Ok(Attempt::Granted(_))), "{asked:?}");
    }
    free(&store, &mine).await;
    let made = connections(&mut members)[0] - before;
    assert!(made <= 1, "{made} connections");
    for (server, index) in [(&new, 3), (&all.members()[0], 0)] {
        server.command(&["CLUSTER", "SETSLOT", "5", "NODE", &id]).await.unwrap_or_else(|e| panic!("{index}: {e}"));
    }
    eventually("a grant at the new member", async || attempt(&store, &mine).await.is_ok()).await;
}

/// A server of a cluster that it has not met yet, and the port of its bus.
async fn lone_member() -> (RedisServer, String) {
    lone_member_with(RedisOptions::default()).await
}

async fn lone_member_with(options: RedisOptions) -> (RedisServer, String) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("bind");
    let bus = listener.local_addr().expect("address").port().to_string();
    drop(listener);
    let options = options.flavor(flavor());
    let options = options.args(["--cluster-enabled", "yes", "--cluster-port", &bus, "--cluster-node-timeout", "2000"]);
    (RedisServer::start(options).await.expect("a server"), bus)
}

async fn serve_all(server: &RedisServer) {
    let slots: Vec<String> = (0..16384).map(|slot| slot.to_string()).collect();
    let words: Vec<&str> = ["CLUSTER", "ADDSLOTS"].into_iter().chain(slots.iter().map(String::as_str)).collect();
    server.command(&words).await.expect("slots");
    until_whole(server).await;
}

async fn until_whole(server: &RedisServer) {
    eventually("a cluster", async || {
        server.command(&["CLUSTER", "INFO"]).await.expect("INFO").contains("cluster_state:ok")
    })
    .await;
}

/// The server tells its uptime by its clock. Restarted with a late one that is set right later, it seems to be old.
#[tokio::test]
async fn a_clock_that_is_set_forward_after_a_restart_ends_no_pause() {
    let clock = ServerClock::build().expect("a C compiler");
    let (server, _) = lone_member_with(RedisOptions::default().clock(&clock)).await;
    serve_all(&server).await;
    let url = format!("redis+cluster://{}?max_ttl=3s", server.addr());
    let store = RedisStore::from_url(&url).await.expect("connect");
    until_granted(&store, "a").await;
    let waits = async |store: &RedisStore| {
        let contention = contended(store.acquire(&short(&claim("a"))).await.expect("acquire"));
        let left = contention.retry_after.expect("known");
        assert!(left > Duration::from_secs(1), "{left:?}");
        assert!(contention.holder.expect("holder").as_str().contains("another server took over"));
    };
    let restart = async |hours: u64| {
        server.restart(Keep::Data).await.expect("restart");
        clock.forward(Duration::from_secs(3600 * hours)).expect("set");
        until_whole(&server).await;
    };
    restart(1).await;
    eventually("the end of the connection", async || store.acquire(&short(&claim("a"))).await.is_ok()).await;
    waits(&store).await;
    until_granted(&store, "a").await;
    // A client that comes now has only the server's word; but one that knows better corrects it for all.
    restart(2).await;
    let new = async || RedisStore::from_url(&url).await.expect("connect");
    granted(new().await.acquire(&short(&claim("b"))).await.expect("acquire"));
    eventually("the end of the connection", async || store.acquire(&short(&claim("a"))).await.is_ok()).await;
    waits(&store).await;
    waits(&new().await).await;
    until_granted(&store, "a").await;
    at_once(&new().await, "a").await;
}

/// Waits until the clock is so far into a second.
async fn until_millis(wanted: u32) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("clock").subsec_millis();
    tokio::time::sleep(Duration::from_millis(((1000 + wanted - now) % 1000).into())).await;
}

/// The uptime is the difference of two truncated seconds: a process that is 0.1 s old can say 1.
#[tokio::test]
async fn a_young_server_pauses_for_the_whole_of_the_longest_ttl() {
    const LONGEST: Duration = Duration::from_millis(3500);
    // Late in a second, which it takes for the beginning of that second.
    until_millis(600).await;
    let started = Instant::now();
    let (server, _) = lone_member().await;
    serve_all(&server).await;
    // Early in one, so that its clock has just gone on.
    until_millis(10).await;
    let url = format!("redis+cluster://{}?max_ttl=3500ms", server.addr());
    let store = RedisStore::from_url(&url).await.expect("connect");
    until_granted(&store, "a").await;
    assert!(started.elapsed() > LONGEST, "granted after {:?}", started.elapsed());
}

/// Whoever asks for the map of the slots may stop there for as long as it likes.
#[tokio::test]
async fn nobody_waits_for_a_caller_that_stands_still() {
    let all = RedisCluster::start(flavor(), false).await.expect("servers");
    let config = RedisConfig::from_url(&format!("{}?failover_pause=no", all.url())).expect("url");
    let store = RedisStore::new(config).expect("a store");
    let (standing, mine) = (claim("a"), claim("b"));
    let mut stands_still = Box::pin(attempt(&store, &standing));
    assert!(tokio::time::timeout(Duration::ZERO, &mut stands_still).await.is_err(), "it has to ask first");
    let asked = tokio::time::timeout(Duration::from_secs(10), attempt(&store, &mine)).await;
    granted(asked.expect("it waits for the other").expect("acquire"));
    granted(stands_still.await.expect("acquire"));
}
