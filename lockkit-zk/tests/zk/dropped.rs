//! Futures that are dropped while the servers' answers are on their way: whatever was under way, the next answers are right,
//! and nothing is left behind.

use std::{pin::Pin, sync::Arc, time::Duration};

use lockkit_core::{
    Attempt, Claim, Fence, Hold, LockStore, Query, Release, Renewal, Renewed,
    fenced::{Admission, FencedResource},
};
use lockkit_testkit::faults::{Direction, poll_until};
use lockkit_zk::{ZkConfig, ZkStore, fenced::ZkResource};

use crate::support::*;

/// How long each answer takes.
const LAG: Duration = Duration::from_millis(30);
/// How many round trips an operation may get along before it is dropped.
const STEPS: u32 = 7;

/// What an operation works on.
#[derive(Clone)]
struct World {
    store: Arc<ZkStore>,
    config: ZkConfig,
    other: Arc<ZkStore>,
    resource: ZkResource,
    /// Held by the store.
    held: Claim,
    /// Held by another store.
    theirs: Claim,
    /// A lock that nobody holds, and a place in the queue of the lock that the other store holds.
    free: Claim,
    behind: Claim,
    /// The fences of what the two stores hold.
    fence: Fence,
    their_fence: Fence,
}

type Operation = fn(World) -> Pin<Box<dyn Future<Output = ()> + Send>>;

const OPERATIONS: &[(&str, Operation)] = &[
    ("acquire a free lock", |w| Box::pin(async move { drop(attempt(&w.store, &w.free).await) })),
    ("try a held lock", |w| Box::pin(async move { drop(attempt(&w.store, &w.behind).await) })),
    ("wait", |w| Box::pin(async move { drop(w.store.acquire(&request(&w.behind, TTL)).await) })),
    ("be the next", |w| {
        Box::pin(async move {
            let asked = request(&w.behind, TTL);
            let (waited, ()) = tokio::join!(w.store.acquire(&asked), async {
                tokio::time::sleep(LAG * 2).await;
                drop(w.other.release(&w.theirs).await);
            });
            drop(waited);
        })
    }),
    ("renew", |w| Box::pin(async move { again(&w, 1, None).await })),
    ("renew with a new count", |w| Box::pin(async move { again(&w, 2, None).await })),
    ("raise the fence", |w| Box::pin(async move { again(&w, 1, Some(w.fence.offset(1_000_000))).await })),
    ("release", |w| Box::pin(async move { drop(w.store.release(&w.held).await) })),
    ("release what was never asked for", |w| Box::pin(async move { drop(w.store.release(&w.free).await) })),
    ("inspect", |w| Box::pin(async move { drop(w.store.inspect(&Query::Prefix(String::new())).await) })),
    ("write with a fence", |w| Box::pin(async move { drop(w.resource.write(w.their_fence, b"dropped").await) })),
    ("read what is fenced", |w| Box::pin(async move { drop(w.resource.read().await) })),
    ("connect", |w| Box::pin(async move { drop(ZkStore::connect(w.config).await) })),
];

async fn again(world: &World, depth: u32, fence_floor: Option<Fence>) {
    let renewal = Renewal { claim: world.held.clone(), ttl: TTL, depth, fence_floor, holder: None };
    drop(world.store.renew(&[renewal]).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_dropped_on_its_way_leaves_nothing_behind() {
    let server = Server::start().await;
    let (raw, other) = (server.raw().await, server.store().await);
    let (store, proxy) = server.proxied(Duration::from_secs(20)).await;
    let config = ZkConfig::new([proxy.addr().to_string()]).timeout(Duration::from_millis(500));
    let resource = ZkResource::connect(config.clone(), "/fenced").await.expect("connect");
    let reader = ZkResource::connect(server.config(), "/fenced").await.expect("connect");
    for (name, operation) in OPERATIONS {
        for step in 0..STEPS {
            let place = format!("{name}, dropped after {step} round trips");
            let (held, theirs) = (claim("held"), claim("theirs"));
            let (mine, foreign) = (hold(&store, &held).await, hold(&other, &theirs).await);
            let (free, behind) = (claim("free"), claim("theirs"));
            let (fence, their_fence) = (mine.fence, foreign.fence);
            let [store, other] = [&store, &other].map(Arc::clone);
            let (config, resource) = (config.clone(), resource.clone());
            let world = World { store, config, other, resource, held, theirs, free, behind, fence, their_fence };

            proxy.delay(Direction::ToClient, LAG);
            drop(tokio::time::timeout(LAG / 2 + LAG * step, operation(world.clone())).await);
            proxy.heal();

            // As the core does with a claim that it does not know the outcome of.
            for dropped in [&world.free, &world.behind] {
                world.store.release(dropped).await.unwrap_or_else(|e| panic!("{place}: {e}"));
            }
            if *name != "be the next" {
                assert_holder(&world.store, &foreign, &place).await;
            }
            if *name != "release" {
                // The count that is written is the one that is asked for, also when it was another for a moment.
                for depth in [3, 1] {
                    let renewal = Renewal { depth, ..Renewal::new(world.held.clone(), TTL) };
                    match world.store.renew(&[renewal]).await.remove(0) {
                        Ok(Renewed::Held(hold)) => assert_eq!((hold.fence, hold.depth), (mine.fence, depth), "{place}"),
                        lost => panic!("{place}: {lost:?}"),
                    }
                }
                assert_holder(&world.other, &mine, &place).await;
            }
            let next = claim("next");
            let granted = hold(&world.store, &next).await;
            assert!(granted.fence > foreign.fence, "{place}: {} is an old fence", granted.fence);
            assert_holder(&world.other, &granted, &place).await;
            free_all(&world, &next, &place).await;
            let value = place.clone().into_bytes();
            assert_eq!(
                world.resource.write(granted.fence, &value).await.expect("write"),
                Admission::Admitted,
                "{place}"
            );
            assert_eq!(reader.read().await.expect("read"), Some(value), "{place}");
            for lock in ["held", "theirs", "free", "next"] {
                let left: Vec<_> = children(&raw, lock).await.into_iter().filter(|node| node != "~fence").collect();
                assert!(left.is_empty(), "{place}: {left:?} is left of {lock}");
            }
        }
    }
}

/// Who is asked sees this holder and no other.
async fn assert_holder(store: &ZkStore, hold: &Hold, place: &str) {
    let state = store.inspect(&Query::Keys(vec![hold.claim.key.clone()])).await.expect("inspect").remove(0);
    let seen = &state.holders[0];
    let expected = (Some(hold.claim.token), Some(hold.fence), 1);
    assert_eq!((seen.token, seen.fence, seen.depth), expected, "{place}: {state:?}");
}

async fn free_all(world: &World, next: &Claim, place: &str) {
    for (store, claim) in [(&world.store, next), (&world.store, &world.held), (&world.other, &world.theirs)] {
        let released = store.release(claim).await.unwrap_or_else(|e| panic!("{place}: {e}"));
        let is_next = matches!(released, Release::Released { .. });
        assert!(is_next || claim.token != next.token, "{place}: {released:?}");
    }
}

/// The servers never remove a container in which nobody ever was.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_acquisition_leaves_no_directory() {
    let server = Server::start_with(&["-Dznode.container.checkIntervalMs=50"]).await;
    let raw = server.raw().await;
    let (store, proxy) = server.proxied(Duration::from_secs(20)).await;
    // So that the root is there.
    hold(&store, &claim("held")).await;
    proxy.delay(Direction::ToClient, LAG);
    for polls in 1..=6 {
        let mine = claim(&format!("fresh-{polls}"));
        let asked = request(&mine, Duration::ZERO);
        let mut asking = Box::pin(store.acquire(&asked));
        _ = poll_until(asking.as_mut(), polls, || {}).await;
        drop(asking);
        insist("release", async || store.release(&mine).await).await;
    }
    proxy.heal();
    eventually("they are removed", async || {
        let locks = raw.list_children(ZkConfig::BASE).await.expect("list");
        !locks.iter().any(|lock| lock.starts_with("fresh-"))
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_undone_try_is_not_taken_for_a_place_in_the_queue() {
    let server = Server::start().await;
    let (other, raw) = (server.store().await, server.raw().await);
    let (store, proxy) = server.proxied(Duration::from_secs(20)).await;
    let theirs = claim("a");
    hold(&other, &theirs).await;
    let asked = insist("ask", async || attempt(&store, &claim("a")).await).await;
    let Attempt::Contended(contention) = asked else { panic!("two holders") };
    assert!(contention.burnt, "its node was deleted");
    let mine = claim("a");
    proxy.drop_reply_after(format!("_c_{}-", &mine.token.reveal()[..8]), 2);
    attempt(&store, &mine).await.expect_err("the answer to the deletion was lost");
    proxy.dropped().await;
    let answer = insist("wait", async || store.acquire(&request(&mine, TTL)).await).await;
    assert!(matches!(&answer, Attempt::Contended(contention) if contention.burnt), "{answer:?}");
    assert_eq!(children(&raw, "a").await.len(), 1);
    free(&other, &theirs).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_whose_node_was_deleted_burns_its_token() {
    let server = Server::start().await;
    let (store, other, raw) = (server.store().await, server.store().await, server.raw().await);
    let (theirs, mine) = (claim("a"), claim("a"));
    hold(&other, &theirs).await;
    let waiting = request(&mine, TTL);
    let (answer, ()) = tokio::join!(store.acquire(&waiting), async {
        eventually("it queues", async || children(&raw, "a").await.len() == 2).await;
        assert!(matches!(other.release(&mine).await.expect("release"), Release::NotHeld(_)));
        free(&other, &theirs).await;
    });
    let answer = answer.expect("ask");
    assert!(matches!(&answer, Attempt::Contended(contention) if contention.burnt), "{answer:?}");
    assert!(children(&raw, "a").await.is_empty());
}

/// How a claim is asked for that is released while nobody polls the call.
#[derive(Clone, Copy, Debug)]
enum Asked {
    /// In a directory that has to be made.
    Anew,
    /// In a directory that is there.
    Simply,
    /// After a call whose reply was lost.
    Again,
    /// Behind a holder who leaves when the claim was released.
    Behind,
}

/// As the core does when others wait behind a task that is not polled.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_released_while_nobody_polls_it_is_not_granted() {
    let server = Server::start().await;
    let (raw, other) = (server.raw().await, server.store().await);
    let (store, proxy) = server.proxied(Duration::from_secs(20)).await;
    for asked in [Asked::Anew, Asked::Simply, Asked::Again, Asked::Behind] {
        for polls in 1..=10 {
            let place = format!("{asked:?}, released after {polls} polls");
            let name = if matches!(asked, Asked::Anew) { format!("anew-{polls}") } else { "a".to_owned() };
            let (mine, theirs) = (claim(&name), claim(&name));
            if !matches!(asked, Asked::Anew) {
                hold(&other, &theirs).await;
            }
            if !matches!(asked, Asked::Anew | Asked::Behind) {
                free(&other, &theirs).await;
            }
            if matches!(asked, Asked::Again) {
                proxy.drop_reply_after(format!("_c_{}-", &mine.token.reveal()[..8]), 1);
                attempt(&store, &mine).await.expect_err("its reply was lost");
                proxy.dropped().await;
            }
            let request = request(&mine, TTL);
            let mut asking = std::pin::pin!(store.acquire(&request));
            // Behind a holder it is polled until it waits.
            let polled = tokio::time::timeout(LAG * 10, poll_until(asking.as_mut(), polls, || {})).await;
            let has_answered = matches!(polled, Ok(Some(_)));
            insist("release", async || store.release(&mine).await).await;
            if matches!(asked, Asked::Behind) {
                free(&other, &theirs).await;
            }
            if !has_answered {
                let answer = asking.await;
                assert!(!matches!(answer, Ok(Attempt::Granted(_))), "{place}: {answer:?}");
            }
            assert!(children(&raw, &name).await.is_empty(), "{place}: its node is left");
        }
    }
}

/// The release is under way, and nobody has heard an answer to it, when the acquisition is polled on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_about_to_be_released_is_not_granted() {
    let server = Server::start().await;
    let (store, raw) = (server.store().await, server.raw().await);
    for queued in [false, true] {
        for polls in 1..=4 {
            let place = format!("behind another: {queued}, released after {polls} polls");
            let (mine, theirs) = (claim("a"), claim("a"));
            hold(&store, &theirs).await;
            if !queued {
                free(&store, &theirs).await;
            }
            let request = request(&mine, TTL);
            let mut asking = std::pin::pin!(store.acquire(&request));
            let polled = tokio::time::timeout(LAG * 10, poll_until(asking.as_mut(), polls, || {})).await;
            let has_answered = matches!(polled, Ok(Some(_)));
            if queued {
                free(&store, &theirs).await;
            }
            // The answers come to what was asked; nobody takes note of them.
            tokio::time::sleep(LAG).await;
            let mut releasing = std::pin::pin!(store.release(&mine));
            let released = poll_until(releasing.as_mut(), 1, || {}).await;
            tokio::time::sleep(LAG).await;
            if !has_answered {
                let answer = asking.await;
                assert!(!matches!(answer, Ok(Attempt::Granted(_))), "{place}: {answer:?}");
            }
            match released {
                Some(released) => drop(released.expect("release")),
                None => drop(releasing.await.expect("release")),
            }
            eventually("its node goes", async || children(&raw, "a").await.is_empty()).await;
        }
    }
}
