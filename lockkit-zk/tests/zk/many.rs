//! More nodes than the driver can watch anew on another connection.

use std::{
    pin::pin,
    sync::Arc,
    time::{Duration, Instant},
};

use lockkit_core::{Claim, Effect, LockStore, LossReason, Outcome, Release, Renewal, Renewed};
use lockkit_testkit::faults::{Direction, poll_until};
use lockkit_zk::ZkStore;
use tokio::{
    runtime::{Builder, Runtime},
    task::JoinSet,
};

use crate::support::*;

/// Their paths, of more than half a KiB each, are together more than twice what the driver announces in one request.
const LOCKS: usize = 600;

fn claims() -> Vec<Claim> {
    (0..LOCKS).map(|number| claim(&format!("{number:0>500}"))).collect()
}

async fn hold_all(store: &Arc<ZkStore>, claims: &[Claim]) {
    let mut tasks = JoinSet::new();
    for some in claims.chunks(LOCKS / 16) {
        let (store, some) = (Arc::clone(store), some.to_vec());
        tasks.spawn(async move {
            for claim in some {
                hold(&store, &claim).await;
            }
        });
    }
    tasks.join_all().await;
}

/// One renewal for all.
async fn renew_all(store: &ZkStore, claims: &[Claim]) -> lockkit_core::Result<Vec<Renewed>> {
    let renewal = |claim: &Claim| Renewal::new(claim.clone(), TTL);
    let renewals: Vec<_> = claims.iter().map(renewal).collect();
    store.renew(&renewals).await.into_iter().collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reconnection_with_many_leases_costs_none() {
    let server = Server::start().await;
    let (store, proxy) = server.proxied(Duration::from_secs(20)).await;
    let claims = claims();
    hold_all(&store, &claims).await;
    // The first renewal watches nodes.
    insist("renew", async || renew_all(&store, &claims).await).await;
    for round in 0..2 {
        proxy.cut().await;
        // A renewal need not ask anything so soon after the one before.
        let another = claim(&format!("another {round}"));
        insist("acquire", async || attempt(&store, &another).await.map(granted)).await;
        let renewed = insist("renew", async || renew_all(&store, &claims).await).await;
        let lost = renewed.iter().filter(|renewed| !matches!(renewed, Renewed::Held(_))).count();
        assert_eq!(lost, 0, "leases were lost that nobody took");
    }

    // Whether or not there is a watch on its node.
    let other = server.store().await;
    for claim in [&claims[0], &claims[LOCKS - 1]] {
        free(&other, claim).await;
        let mut renewed = None;
        eventually("the loss is noticed", async || {
            renewed = Some(insist("renew", async || renew(&store, claim).await).await);
            !matches!(renewed, Some(Renewed::Held(_)))
        })
        .await;
        assert_eq!(renewed.map(|renewed| lost(Ok(renewed))), Some(LossReason::Revoked));
    }
}

/// Each lease that is not watched is looked at whenever it is renewed. A request for each would take longer than the leases
/// of a hundred thousand last.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_without_watches_are_renewed_with_few_requests() {
    let server = Server::start().await;
    let (store, claims) = (server.store().await, claims());
    hold_all(&store, &claims).await;
    // The first renewal watches nodes.
    insist("renew", async || renew_all(&store, &claims).await).await;
    let before = received(&server).await;
    let renewed = insist("renew", async || renew_all(&store, &claims).await).await;
    assert!(renewed.iter().all(|renewed| matches!(renewed, Renewed::Held(_))));
    // Some 400 leases are not watched. Signs of life and the four-letter words count, too.
    let requests = received(&server).await - before;
    assert!((5..40).contains(&requests), "{requests} requests");
}

/// A look that nobody waits for any more answers no other question.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_renewal_of_leases_without_watches_answers_no_other() {
    let server = Server::start().await;
    let (store, proxy) = server.proxied(Duration::from_secs(20)).await;
    let (claims, nobodys) = (claims(), claim("nobody's"));
    hold_all(&store, &claims).await;
    // The first renewal watches nodes.
    insist("renew", async || renew_all(&store, &claims).await).await;
    let mut polls = 0;
    loop {
        polls += 1;
        let ended = {
            let mut call = pin!(renew_all(&store, &claims));
            poll_until(call.as_mut(), polls, || proxy.hold(Direction::ToClient)).await.is_some()
        };
        proxy.heal();
        let mut asked = claims.clone();
        asked.insert(0, nobodys.clone());
        let answers = insist("renew", async || renew_all(&store, &asked).await).await;
        let held = answers.iter().filter(|renewed| matches!(renewed, Renewed::Held(_))).count();
        assert!(matches!(answers[0], Renewed::Lost(_)), "poll {polls}: {:?}", answers[0]);
        assert_eq!(held, LOCKS, "poll {polls}: leases were lost that nobody took");
        if ended {
            break;
        }
    }
    assert!(polls > 1, "it was never dropped");
}

/// How many requests the server has received.
async fn received(server: &Server) -> u64 {
    let said = server.0.word("mntr").await.expect("mntr");
    let line = said.lines().find_map(|line| line.strip_prefix("zk_packets_received\t")).expect("a count");
    line.trim().parse().expect("a number")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reconnection_with_many_waiters_costs_no_lease() {
    let server = Server::start().await;
    let (store, proxy) = server.proxied(Duration::from_secs(20)).await;
    let (other, raw, mine, claims) = (server.store().await, server.raw().await, claim("mine"), claims());
    hold(&store, &mine).await;
    hold_all(&other, &claims).await;
    let (waiting, mut waiters) = (locker(&store), JoinSet::new());
    for claim in &claims {
        let lock = waiting.lock(claim.key.as_str());
        waiters.spawn(async move { lock.acquire_within(Duration::from_secs(60)).await });
    }
    for claim in &claims {
        eventually("it queues", async || children(&raw, claim.key.as_str()).await.len() == 2).await;
    }
    proxy.cut().await;
    let renewed = insist("renew", async || renew(&store, &mine).await).await;
    assert!(matches!(renewed, Renewed::Held(_)), "{renewed:?}");
    for claim in &claims {
        let released = other.release(claim).await.expect("release");
        assert!(matches!(released, Release::Released { .. }), "{released:?}");
    }
    while let Some(waiter) = waiters.join_next().await {
        drop(waiter.expect("no panic").expect("acquire").expect("granted"));
    }
}

/// How many nodes clients watch.
async fn watches(server: &Server) -> usize {
    let said = server.0.word("wchs").await.expect("wchs");
    said.trim().rsplit(':').next().and_then(|count| count.parse().ok()).expect("a count")
}

/// A release wakes one client, and what that asks does not grow with the queue, but for the list of its names when it comes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hand_over_costs_the_same_however_many_wait() {
    let server = Server::start().await;
    let holder = locker(&server.store().await);
    let mut lockers = Vec::new();
    for _ in 0..10 {
        lockers.push(locker(&server.store().await));
    }
    for waiters in [10, 100, 1000] {
        let guard = holder.lock("a").fifo().acquire().await.expect("acquire");
        let mut tasks = JoinSet::new();
        for number in 0..waiters {
            let lock = lockers[number % 10].lock("a").fifo();
            tasks.spawn(async move {
                let guard = lock.acquire().await.expect("acquire");
                assert_eq!(guard.release().await.expect("release"), Outcome::Released);
            });
            // Each asks for the list of all names before it watches the one ahead of it. A thousand lists at once take a busy
            // server longer than requests are waited for, and would still be on their way when the lock is handed over.
            if tasks.len() % 50 == 0 || tasks.len() == waiters {
                eventually("they wait", async || watches(&server).await >= tasks.len()).await;
            }
        }
        let (before, begun) = (received(&server).await, Instant::now());
        assert_eq!(guard.release().await.expect("release"), Outcome::Released);
        while let Some(served) = tasks.join_next().await {
            served.expect("served");
        }
        let each = (received(&server).await - before) / waiters as u64;
        println!("{waiters} waiters: {each} requests for each, {:?} for all", begun.elapsed());
        assert!(each <= 6, "{each} requests for each of {waiters}");
    }
}

/// The bound on an operation is one for all of them, and not one for each. Here nobody drives the runtime of the session.
#[test]
fn many_renewals_that_nobody_answers_end_in_time() {
    const BOUND: Duration = Duration::from_millis(500);
    let servers = Runtime::new().expect("a runtime");
    let sessions = Builder::new_current_thread().enable_all().build().expect("a runtime");
    let server = servers.block_on(Server::start());
    let claims: Vec<_> = (0..50).map(|number| claim(&number.to_string())).collect();
    let store = sessions.block_on(async {
        let store = connect(server.config().timeout(BOUND)).await;
        for claim in &claims {
            hold(&store, claim).await;
        }
        store
    });
    let renewal = |claim: &Claim| Renewal { depth: 2, ..Renewal::new(claim.clone(), TTL) };
    let renewals: Vec<_> = claims.iter().map(renewal).collect();
    let asked = Instant::now();
    for answer in servers.block_on(store.renew(&renewals)) {
        let error = answer.expect_err("nobody answers");
        assert_eq!(error.effect(), Effect::Unknown, "{error}");
    }
    assert!(asked.elapsed() < BOUND * 4, "it took {:?}", asked.elapsed());
    // It ends its processes on a runtime.
    servers.block_on(async { drop(server) });
}
