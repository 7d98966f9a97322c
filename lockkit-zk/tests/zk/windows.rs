//! Locks that are kept when their holder is done.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use lockkit_core::{
    Claim, Effect, ErrorKind, Fence, LockStore, LossReason, Mode, Query, Release, Renewal, Renewed, StoreInfo, Token,
};
use lockkit_testkit::faults::{Direction, Proxy, poll_until};
use lockkit_zk::{ZkConfig, ZkStore};
use zookeeper_client::{Acls, Client, CreateMode};

use crate::support::*;

const HOUR: Duration = Duration::from_secs(3600);
/// For what ends while a test waits for it.
const SHORT: Duration = Duration::from_millis(1500);

/// What is in the list of all windows.
async fn listed(raw: &Client) -> usize {
    children(raw, "%kept").await.len()
}

/// Writes a record and an entry of the list by hand.
async fn write_down(raw: &Client, name: &str, record: &str) {
    let (token, persistent) = (claim(name).token, CreateMode::Persistent.with_acls(Acls::anyone_all()));
    for path in [format!("/lockkit/{name}"), "/lockkit/%kept".to_owned()] {
        raw.mkdir(&path, &CreateMode::Container.with_acls(Acls::anyone_all())).await.expect("mkdir");
    }
    let (path, entry) = (format!("/lockkit/{name}/~kept-{}", token.reveal()), listed_path(&token));
    raw.create(&path, record.as_bytes(), &persistent).await.expect("the record");
    raw.create(&entry, name.as_bytes(), &persistent).await.expect("the entry");
}

/// The path of an entry that is due since 1970.
fn listed_path(token: &Token) -> String {
    format!("/lockkit/%kept/{:020}-{}", 1, token.reveal())
}

async fn is_kept(store: &ZkStore, name: &str) -> bool {
    let mine = claim(name);
    let is_kept = is_contended(&attempt(store, &mine).await.expect("ask"));
    if !is_kept {
        free(store, &mine).await;
    }
    is_kept
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_record_of_a_window_stands_beside_the_queue_until_it_is_over() {
    let server = Server::start().await;
    let (store, other, raw) = (server.store().await, server.store().await, server.raw().await);
    let holder = claim("a");
    let held = hold(&store, &holder).await;
    let asked = keeping(&holder, SHORT);
    let kept = granted(store.acquire(&asked).await.expect("keep"));
    let after = held.fence.offset(held.span);
    assert_eq!((kept.fence, kept.span), (after, 1), "it is the next of those that the holder's node stands for");
    let (record, hex) = (format!("~kept-{}", asked.claim.token.reveal()), asked.claim.token.reveal());
    assert_eq!(children(&raw, "a").await, std::slice::from_ref(&record));
    let (data, stat) = raw.get_data(&format!("/lockkit/a/{record}")).await.expect("the record");
    let text = String::from_utf8(data).expect("text");
    let due = children(&raw, "%kept").await.remove(0).strip_suffix(&format!("-{hex}")).map(str::parse::<u64>);
    let due = due.expect("in the list").expect("a number");
    assert_eq!((text, stat.ephemeral_owner), (format!("kept:1501:{due}:{}:test: holder", kept.fence), 0));
    let started = Instant::now();
    let next = claim("a");
    let waited = other.acquire(&request(&next, Duration::from_secs(20))).await;
    assert!(granted(waited.expect("acquire")).fence > kept.fence);
    assert!(started.elapsed() < SHORT + Duration::from_secs(2), "it was {:?} late", started.elapsed());
    assert_eq!((children(&raw, "a").await.len(), listed(&raw).await), (1, 0), "nothing is left of the window");
    free(&other, &next).await;
}

/// Who waits behind the holder takes its end for the news that the lock is free, if nothing else is said.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_waits_for_the_holder_waits_for_the_window() {
    let server = Server::start().await;
    let (store, other, raw) = (server.store().await, server.store().await, server.raw().await);
    for mode in [Mode::Exclusive, Mode::Shared, permit(2)] {
        let holder = claim("a");
        hold(&store, &holder).await;
        let waiter = Waiter::queue(&other, &raw, claim_as(mode, "a")).await;
        // Its watches are set by then.
        waiter.waits().await;
        let started = Instant::now();
        let kept = granted(store.acquire(&keeping(&holder, SHORT)).await.expect("keep"));
        let next = waiter.granted().await;
        assert!(started.elapsed() >= SHORT, "{mode}: granted after {:?}", started.elapsed());
        assert!(next.fence > kept.fence, "{mode}: {} after {}", next.fence, kept.fence);
        free(&other, &next.claim).await;
        assert!(children(&raw, "a").await.is_empty());
    }
}

/// The one before it goes, and the lock is not free for all that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_waits_behind_another_waits_for_the_window_when_that_one_gives_up() {
    let server = Server::start().await;
    let (store, other, raw) = (server.store().await, server.store().await, server.raw().await);
    // It gives up by itself, or another client ends its wait.
    for by in [&store, &other] {
        let kept = keep(&store, "a", HOUR).await;
        let first = Waiter::queue(&store, &raw, claim("a")).await;
        let second = Waiter::queue(&other, &raw, claim("a")).await;
        second.waits().await;
        assert_eq!(by.release(&first.claim).await.expect("release"), Release::NotHeld(LossReason::Taken));
        second.waits().await;
        // Its end is heard by who waits for that.
        assert_eq!(store.release(&kept.claim).await.expect("release"), Release::Released { waiters: Some(1) });
        let next = second.granted().await;
        free(&other, &next.claim).await;
        assert_eq!((children(&raw, "a").await.len(), listed(&raw).await), (0, 0));
    }
}

/// Who takes the same lock again and again without contention does not read the queue any more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_window_is_seen_where_the_list_of_the_queue_is_spared() {
    let server = Server::start().await;
    let (store, other) = (server.store().await, server.store().await);
    for by in [&store, &other] {
        for _ in 0..8 {
            let mine = claim("a");
            hold(&store, &mine).await;
            free(&store, &mine).await;
        }
        let kept = keep(by, "a", HOUR).await;
        for _ in 0..3 {
            assert!(is_kept(&store, "a").await, "the window was overlooked");
        }
        free(&store, &kept.claim).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_window_is_shown_with_what_is_left_and_with_those_that_wait() {
    let server = Server::start().await;
    let (store, other, raw) = (server.store().await, server.store().await, server.raw().await);
    let kept = keep(&store, "a", HOUR).await;
    let waiter = Waiter::queue(&other, &raw, claim_as(Mode::Shared, "a")).await;
    for query in [Query::Keys(vec![kept.claim.key.clone()]), Query::Queue(kept.claim.key.clone())] {
        let state = other.inspect(&query).await.expect("inspect").remove(0);
        let holder = &state.holders[0];
        assert_eq!((holder.token, holder.fence, state.waiters), (Some(kept.claim.token), Some(kept.fence), Some(1)));
        let left = holder.remaining.expect("it ends by time");
        assert!(left <= HOUR + Duration::from_millis(1) && left > HOUR - Duration::from_secs(60), "{left:?}");
        assert!(state.queue.is_none_or(|queue| queue[0].mode == Mode::Shared && queue.len() == 1));
    }
    let renewal = Renewal::new(kept.claim.clone(), TTL);
    let error = store.renew(&[renewal]).await.remove(0).expect_err("it ends by time");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Unsupported, Effect::None));
    free(&other, &kept.claim).await;
    let reader = waiter.granted().await;
    free(&other, &reader.claim).await;
    keep(&store, "a", Duration::from_millis(1)).await;
    tokio::time::sleep(Duration::from_millis(20)).await;
    let query = Query::Keys(vec![kept.claim.key.clone()]);
    assert!(store.inspect(&query).await.expect("inspect")[0].holders.is_empty(), "it is over");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_window_that_is_broken_late_was_over() {
    let server = Server::start().await;
    let store = server.store().await;
    let kept = keep(&store, "a", Duration::from_millis(1)).await;
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert_eq!(store.release(&kept.claim).await.expect("release"), Release::NotHeld(LossReason::Gone));
    assert_eq!(store.release(&kept.claim).await.expect("release"), Release::NotHeld(LossReason::Gone));
}

/// By a newer lockkit, or spoilt: nobody knows when it ends, so it keeps all out until somebody ends it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_window_that_can_not_be_read_is_shown_and_broken() {
    let server = Server::start().await;
    let (store, raw) = (server.store().await, server.raw().await);
    keep(&store, "a", HOUR).await;
    let spoilt = keep(&store, "b", HOUR).await.claim;
    let path = format!("/lockkit/b/~kept-{}", spoilt.token.reveal());
    raw.set_data(&path, b"kept2:1:2:3:newer", None).await.expect("write");
    let states = store.inspect(&Query::Prefix(String::new())).await.expect("inspect");
    assert_eq!(states.iter().map(|state| state.key.as_str()).collect::<Vec<_>>(), ["a", "b"]);
    let [holder] = &states[1].holders[..] else { panic!("{states:?}") };
    assert_eq!((holder.token, holder.info.as_str()), (Some(spoilt.token), "kept2:1:2:3:newer"));
    assert_eq!((holder.fence, holder.remaining), (None, None));
    let mine = claim("b");
    assert_eq!(attempt(&store, &mine).await.expect_err("it is kept").kind(), ErrorKind::Unexpected);
    assert!(matches!(store.release(&mine).await.expect("release"), Release::NotHeld(_)));
    free(&store, &spoilt).await;
    assert!(!is_kept(&store, "b").await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_look_at_many_windows_asks_for_the_time_once() {
    let server = Server::start().await;
    let (store, raw) = (server.store().await, server.raw().await);
    for name in 0..20 {
        write_down(&raw, &format!("kept-{name}"), "kept:3600000:1:7:test").await;
    }
    let look = async || {
        assert_eq!(store.inspect(&Query::Prefix("kept".to_owned())).await.expect("inspect").len(), 20);
        let nodes = raw.list_children("/lockkit").await.expect("list");
        let own = nodes.iter().find(|node| node.starts_with("%session-")).expect("it asked for the time");
        raw.check_stat(&format!("/lockkit/{own}")).await.expect("stat").expect("the node").version
    };
    assert_eq!((look().await, look().await), (0, 1));
}

/// By its token alone, in another session. Its fences may be written down, and take all the room that there is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_has_the_token_of_a_lease_may_have_its_lock_kept() {
    let server = Server::start().await;
    let (store, other) = (server.store().await, server.store().await);
    let mut highest = Fence::NONE;
    for (floor, span) in [(0, 1), (0, 128), (0, 5000), (1 << 52, 65), (0, 128)] {
        for by in [&store, &other] {
            let holder = claim("a");
            let mut asked = request(&holder, Duration::ZERO);
            (asked.fence.floor, asked.fence.span) = (Fence::new(floor.max(highest.get())), span);
            let held = granted(store.acquire(&asked).await.expect("acquire"));
            let kept = granted(by.acquire(&keeping(&holder, HOUR)).await.expect("keep"));
            assert!(kept.fence >= held.fence.offset(span), "{} is one of the {span} from {}", kept.fence, held.fence);
            assert!(is_contended(&by.acquire(&keeping(&holder, HOUR)).await.expect("ask")), "it was taken twice");
            free(by, &kept.claim).await;
            let next = claim("a");
            let last = hold(&store, &next).await;
            assert!(last.fence > kept.fence, "{} after {}", last.fence, kept.fence);
            free(&store, &next).await;
            highest = if floor == 0 { Fence::NONE } else { last.fence };
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_a_holder_keeps_a_lock() {
    let server = Server::start().await;
    let (store, other, raw) = (server.store().await, server.store().await, server.raw().await);
    let keep_out = async |from: &Claim| is_contended(&store.acquire(&keeping(from, HOUR)).await.expect("ask"));
    assert!(keep_out(&claim("a")).await, "a lock that was never used");
    let (theirs, reader) = (claim("a"), claim_as(Mode::Shared, "b"));
    hold(&other, &theirs).await;
    hold(&other, &reader).await;
    let beside = claim_as(Mode::Shared, "b");
    hold(&store, &beside).await;
    let waiter = Waiter::queue(&store, &raw, claim("a")).await;
    assert!(keep_out(&waiter.claim).await && keep_out(&claim("a")).await, "another holds it");
    assert!(keep_out(&reader).await && keep_out(&beside).await, "the place of a reader");
    let kept = keep(&store, "c", HOUR).await;
    let first = Waiter::queue(&store, &raw, claim("c")).await;
    assert!(keep_out(&first.claim).await, "it waits for the window");
    // All that was refused is as it was.
    for (store, claim) in [(&other, &theirs), (&other, &reader), (&store, &beside)] {
        assert!(matches!(renew(store, claim).await, Ok(Renewed::Held(_))), "{claim:?}");
    }
    free(&other, &theirs).await;
    free(&store, &kept.claim).await;
    for waiter in [waiter, first] {
        let next = waiter.granted().await;
        free(&store, &next.claim).await;
    }
    let asked = keeping(&theirs, StoreInfo::LONGEST_KEPT + Duration::from_secs(1));
    assert_eq!(store.acquire(&asked).await.expect_err("refused").kind(), ErrorKind::InvalidInput);
}

/// A request is dropped at each of its awaits, and made again, as the core does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_to_keep_that_is_dropped_at_any_moment_is_settled_by_the_next() {
    let server = Server::start().await;
    let (other, raw) = (server.store().await, server.raw().await);
    let (store, proxy) = server.proxied(Duration::from_secs(20)).await;
    for is_first in [true, false] {
        for step in 0..10 {
            let place = format!("dropped after {step} round trips, the first time: {is_first}");
            let holder = claim("a");
            let held = hold(&store, &holder).await;
            if is_first && listed(&raw).await == 0 {
                // The transaction is refused, and it has to be made before the next one.
                drop(raw.delete("/lockkit/%kept", None).await);
            }
            let asked = keeping(&holder, HOUR);
            let lag = Duration::from_millis(20);
            proxy.delay(Direction::ToClient, lag);
            drop(tokio::time::timeout(lag / 2 + lag * step, store.acquire(&asked)).await);
            proxy.heal();
            let kept = insist("keep", async || store.acquire(&asked).await).await;
            let kept = granted(kept);
            assert_eq!(kept.fence, held.fence.offset(1), "{place}");
            assert!(is_kept(&other, "a").await, "{place}");
            assert_eq!(children(&raw, "a").await.len(), 1, "{place}");
            free(&other, &kept.claim).await;
            assert!(is_contended(&store.acquire(&asked).await.expect("ask")), "{place}: what was ended came back");
            assert_eq!((children(&raw, "a").await.len(), listed(&raw).await), (0, 0), "{place}");
        }
    }
}

/// The same at each poll of a claim that waits for a window, or removes one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_is_dropped_at_a_window_leaves_nothing_behind() {
    let server = Server::start().await;
    let (store, other, raw) = (server.store().await, server.store().await, server.raw().await);
    for window in [HOUR, Duration::from_millis(1)] {
        for polls in 1..12 {
            let kept = keep(&other, "a", window).await;
            tokio::time::sleep(Duration::from_millis(10)).await;
            let mine = claim("a");
            let asked = request(&mine, Duration::from_millis(100));
            let mut asking = std::pin::pin!(store.acquire(&asked));
            drop(poll_until(asking.as_mut(), polls, || {}).await);
            _ = store.release(&mine).await.expect("release");
            assert_eq!(is_kept(&store, "a").await, window == HOUR, "dropped at poll {polls}");
            let holds = other.release(&kept.claim).await.expect("release");
            assert_eq!(matches!(holds, Release::Released { .. }), window == HOUR, "dropped at poll {polls}");
            assert!(children(&raw, "a").await.iter().all(|node| !node.contains(&mine.token.reveal()[..8])));
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_is_kept_though_the_reply_is_lost() {
    let server = Server::start().await;
    let (other, raw) = (server.store().await, server.raw().await);
    let (store, proxy) = server.proxied(Duration::from_secs(20)).await;
    // So that the transaction is the first that it asks for.
    let before = keep(&store, "before", HOUR).await;
    free(&store, &before.claim).await;
    for _ in 0..3 {
        let holder = claim("a");
        let held = hold(&store, &holder).await;
        let asked = keeping(&holder, HOUR);
        proxy.drop_reply_after(format!("~kept-{}", &asked.claim.token.reveal()[..8]), 1);
        let error = store.acquire(&asked).await.expect_err("the answer was lost");
        assert_eq!(error.effect(), Effect::Unknown, "{error}");
        proxy.dropped().await;
        assert!(is_kept(&other, "a").await, "it was done");
        let kept = granted(insist("keep", async || store.acquire(&asked).await).await);
        assert_eq!(kept.fence, held.fence.offset(1));
        // What comes late from the holder changes nothing.
        assert_eq!(lost(renew(&other, &holder).await), LossReason::Taken);
        assert_eq!(other.release(&holder).await.expect("release"), Release::NotHeld(LossReason::Taken));
        free(&other, &kept.claim).await;
        assert!(children(&raw, "a").await.is_empty());
    }
}

/// To ask for it each time would cost a write through the leader, which is refused.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_list_of_all_windows_is_made_only_where_it_is_missing() {
    let server = Server::start().await;
    let (raw, proxy) = (server.raw().await, Proxy::start(server.0.addr()).await.expect("proxy"));
    let store = connect(ZkConfig::new([proxy.addr().to_string()])).await;
    // The kind of the request, which makes a container, the length of the path, and the path.
    let creation = [&[0, 0, 0, 19, 0, 0, 0, 14], "/lockkit/%kept".as_bytes()].concat();
    let count = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&count);
    proxy.rewrite_requests(move |requests| {
        let creations = requests.windows(creation.len()).filter(|part| *part == creation).count();
        counted.fetch_add(creations, Ordering::Relaxed);
        requests
    });
    for times in 1..=2 {
        for name in ["a", "b", "c"] {
            let kept = keep(&store, name, HOUR).await;
            assert_eq!((listed(&raw).await, count.load(Ordering::Relaxed)), (1, times), "{name}");
            free(&store, &kept.claim).await;
        }
        // As the servers do with an empty one.
        raw.delete("/lockkit/%kept", None).await.expect("the list");
    }
}

/// What is left in the list is removed when it is due.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_break_is_told_though_the_list_gives_no_answer() {
    let server = Server::start().await;
    let proxy = Proxy::start(server.0.addr()).await.expect("proxy");
    let store = connect(ZkConfig::new([proxy.addr().to_string()])).await;
    let kept = keep(&store, "a", HOUR).await;
    proxy.drop_reply_after("%kept/", 1);
    let released = store.release(&kept.claim).await.expect("the record is gone");
    assert_eq!(released, Release::Released { waiters: Some(0) });
    proxy.dropped().await;
}

/// The holder's session ends before it is done: then nothing is kept. A window outlives the session of whoever left it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_window_outlives_its_session_and_a_crash_keeps_nothing() {
    let server = Server::start().await;
    let other = server.store().await;
    let (store, proxy) = server.proxied(Duration::from_secs(4)).await;
    let (crashes, kept) = (locker(&store).lock("crashes").keep_for(HOUR), keep(&store, "done", HOUR).await);
    let guard = crashes.acquire().await.expect("acquire");
    proxy.blackhole();
    let next = claim("crashes");
    let waited = other.acquire(&request(&next, Duration::from_secs(30))).await;
    granted(waited.expect("acquire"));
    assert!(matches!(guard.lost().await, LossReason::Expired | LossReason::Unreachable));
    assert!(is_kept(&other, "done").await, "it ended with its session");
    free(&other, &kept.claim).await;
}

/// No claim comes to remove their records.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_kept_once_leaves_nothing_behind() {
    let server = Server::start_with(&["-Dznode.container.checkIntervalMs=50"]).await;
    let (store, other, raw) = (server.store().await, server.store().await, server.raw().await);
    for name in 0..20 {
        keep(&store, &format!("once-{name}"), Duration::from_millis(1)).await;
    }
    tokio::time::sleep(Duration::from_millis(20)).await;
    for name in 0..4 {
        keep(&other, &format!("longer-{name}"), HOUR).await;
    }
    assert_eq!(listed(&raw).await, 4, "those that are not over");
    for name in 0..20 {
        assert!(children(&raw, &format!("once-{name}")).await.is_empty(), "{name}");
    }
    let locks = async || raw.list_children("/lockkit").await.expect("children").len();
    eventually("the servers remove what is empty", async || locks().await < 10).await;
    assert!(is_kept(&store, "longer-0").await);
}

/// So whoever has a lock kept does not wait long for that, however far away the server is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_windows_that_are_removed_are_asked_for_together() {
    let server = Server::start().await;
    let (raw, proxy) = (server.raw().await, Proxy::start(server.0.addr()).await.expect("proxy"));
    let store = connect(ZkConfig::new([proxy.addr().to_string()])).await;
    for name in 0..16 {
        write_down(&raw, &format!("once-{name}"), "kept:1:1:7:test").await;
    }
    // A trip for each of two reads and two deletions of all would take longer than one operation may.
    proxy.delay(Direction::ToClient, Duration::from_millis(50));
    keep(&store, "a", HOUR).await;
    assert_eq!(listed(&raw).await, 1, "the one that is not over");
}

/// As that of another user may be, or what others wrote.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_window_that_can_not_be_read_keeps_no_others_from_being_removed() {
    let server = Server::start().await;
    let (store, raw) = (server.store().await, server.raw().await);
    let spoilt = keep(&store, "spoilt", SHORT).await.claim.token.reveal();
    raw.set_data(&format!("/lockkit/spoilt/~kept-{spoilt}"), b"else", None).await.expect("write");
    let persistent = CreateMode::Persistent.with_acls(Acls::anyone_all());
    for no_lock in ["", "/../"] {
        raw.create(&listed_path(&claim("a").token), no_lock.as_bytes(), &persistent).await.expect("an entry");
    }
    // It is the first that is due.
    tokio::time::sleep(SHORT).await;
    for name in 0..4 {
        keep(&store, &format!("once-{name}"), Duration::from_millis(1)).await;
    }
    tokio::time::sleep(Duration::from_millis(20)).await;
    keep(&store, "longer", HOUR).await;
    assert_eq!(listed(&raw).await, 4, "those that can't be read, and the one that is not over");
}

/// The list is one for all locks, and each user's nodes are for that user alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_users_windows_are_in_nobodys_way() {
    let (server, open) = (Server::start().await, CreateMode::Container.with_acls(Acls::anyone_all()));
    server.raw().await.mkdir("/lockkit", &open).await.expect("the root");
    let [first, second] =
        [("shop", "a"), ("mill", "b")].map(|(user, lock)| (server.config().digest_auth(user, "x"), lock));
    for (config, lock) in [first, second] {
        let store = connect(config).await;
        let kept = keep(&store, lock, HOUR).await;
        assert!(is_kept(&store, lock).await);
        free(&store, &kept.claim).await;
        keep(&store, lock, Duration::from_millis(1)).await;
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert!(!is_kept(&store, lock).await);
    }
}

/// Through the core, with several processes that want the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_many_that_start_a_job_one_does_it_in_each_window() {
    let server = Server::start().await;
    let url = server.0.url();
    let done = Arc::new(std::sync::Mutex::new(Vec::new()));
    let started = Instant::now();
    let mut hosts = Vec::new();
    for _ in 0..4 {
        let (url, done) = (url.clone(), Arc::clone(&done));
        hosts.push(tokio::spawn(async move {
            let store = connect(ZkConfig::from_url(&url).expect("url")).await;
            let job = locker(&store).lock("job").keep_for(SHORT);
            while started.elapsed() < SHORT * 4 {
                if let Some(guard) = job.try_acquire().await.expect("ask") {
                    done.lock().expect("unpoisoned").push((Instant::now(), guard.fence()));
                    assert_eq!(guard.release().await.expect("release"), lockkit_core::Outcome::Released);
                }
            }
        }));
    }
    for host in hosts {
        host.await.expect("no panic");
    }
    let done = done.lock().expect("unpoisoned");
    assert!(done.len() >= 3, "{} times in four windows", done.len());
    for pair in done.windows(2) {
        // A moment passes between the grant and the look at the clock.
        let gap = pair[1].0 - pair[0].0;
        assert!(gap + Duration::from_millis(50) >= SHORT, "twice within {gap:?}");
        assert!(pair[1].1 > pair[0].1, "the fence fell");
    }
}
