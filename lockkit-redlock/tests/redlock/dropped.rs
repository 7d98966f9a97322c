//! Calls whose futures are dropped at each of their awaits, while the replies of all nodes are held back.
//!
//! The caller then releases the claim, as the core does (rule R8). After that no lease of it is left at any node, nor comes to
//! be, and questions whose answers are known get these answers.

use std::{future::Future, pin::pin, time::Duration};

use lockkit_core::{AcquireRequest, Attempt, Claim, Fence, LockStore, Query, Release, Renewal, Renewed};
use lockkit_redlock::RedlockStore;
use lockkit_testkit::faults::{Direction, poll_until};

use crate::support::{Cluster, claim, contended, free, hold, refused_to_wait, request};

/// A call that waits for replies that are held back makes no step for so long.
const STALL: Duration = Duration::from_millis(15);
/// No call is polled more often.
const MOST_POLLS: u32 = 60;
/// Nothing lapses during the test.
const LONG: Duration = Duration::from_secs(120);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    AcquireFree,
    AcquireHeld,
    /// At the rendezvous, which grants nothing.
    Wait,
    /// At the rendezvous, which grants when the replies are held back already.
    WaitAndGet,
    Renew,
    Release,
    Inspect,
}

/// What is known: a lock that this client holds, and one that another does.
struct Scene {
    cluster: Cluster,
    store: RedlockStore,
    other: RedlockStore,
    mine: (Claim, Fence),
    theirs: Claim,
}

impl Scene {
    async fn open() -> Self {
        let cluster = Cluster::start(3).await;
        let (store, other) = (cluster.client().await, cluster.observer().await);
        let (mine, theirs) = (claim("mine"), claim("theirs"));
        let fence = hold_long(&store, &mine).await;
        hold_long(&other, &theirs).await;
        cluster.until_held_at("mine", 3).await;
        cluster.until_held_at("theirs", 3).await;
        Self { cluster, store, other, mine: (mine, fence), theirs }
    }

    /// Drops a call at its `polls`th poll. Whether it got that far.
    async fn drop_at(&self, call: Call, polls: u32) -> bool {
        let Self { store, other, .. } = self;
        let mut asked = AcquireRequest { ttl: LONG, ..request(&claim(&format!("{call:?}{polls}"))) };
        let name = asked.claim.key.as_str().to_owned();
        let held = Claim { key: asked.claim.key.clone(), ..claim("-") };
        match call {
            Call::AcquireFree | Call::Renew | Call::Inspect => {}
            Call::Release => drop(hold_long(store, &asked.claim).await),
            Call::AcquireHeld | Call::Wait | Call::WaitAndGet => {
                hold_long(other, &held).await;
                self.cluster.until_held_at(&name, 3).await;
            }
        }
        if matches!(call, Call::Wait | Call::WaitAndGet) {
            asked.wait = LONG;
            refused_to_wait(store, &Claim { key: asked.claim.key.clone(), ..claim("-") }).await;
        }
        let renewal = Renewal::new(self.mine.0.clone(), LONG);
        let dropped = match call {
            Call::Renew => self.leave(store.renew(&[renewal]), polls, async {}).await,
            Call::Release => self.leave(store.release(&asked.claim), polls, async {}).await,
            Call::Inspect => self.leave(store.inspect(&self.known()), polls, async {}).await,
            Call::WaitAndGet => self.leave(store.acquire(&asked), polls, free(other, &held)).await,
            _ => self.leave(store.acquire(&asked), polls, async {}).await,
        };
        if !matches!(call, Call::Renew | Call::Inspect) {
            let released = store.release(&asked.claim).await;
            assert!(released.is_ok(), "{released:?}");
        }
        match call {
            Call::AcquireHeld | Call::Wait => {
                self.cluster.until_held_at(&name, 3).await;
                free(other, &held).await;
            }
            _ => {}
        }
        self.cluster.until_held_at(&name, 0).await;
        tokio::time::sleep(Duration::from_millis(2)).await;
        assert_eq!(self.cluster.held_at(&name).await, 0, "it came back");
        dropped
    }

    /// Polls a call until just before its `polls`th poll, holds back what nodes answer, does what comes `then`, and drops the
    /// call when it makes no step any more. Whether it was dropped.
    async fn leave<T>(&self, call: impl Future<Output = T>, polls: u32, then: impl Future<Output = ()>) -> bool {
        let proxies = &self.cluster.proxies;
        let answer = {
            let mut call = pin!(call);
            let hold = || proxies.iter().for_each(|proxy| proxy.hold(Direction::ToClient));
            let mut answer =
                tokio::time::timeout(STALL * 4, poll_until(call.as_mut(), polls, hold)).await.ok().flatten();
            if answer.is_none() {
                hold();
                then.await;
                answer = tokio::time::timeout(STALL, call).await.ok();
            }
            answer
        };
        proxies.iter().for_each(|proxy| proxy.heal());
        answer.is_none()
    }

    fn known(&self) -> Query {
        Query::Keys(vec![self.mine.0.key.clone(), self.theirs.key.clone(), claim("nobody's").key])
    }

    /// Asks everything whose answer is known.
    async fn ask(&self) {
        let Self { store, mine: (mine, fence), theirs, .. } = self;
        let renewal = |claim: &Claim| Renewal::new(claim.clone(), LONG);
        let answers = store.renew(&[renewal(mine), renewal(theirs), renewal(&claim("nobody's"))]).await;
        assert!(
            matches!(&answers[..], [Ok(Renewed::Held(mine)), _, Ok(Renewed::Lost(_))] if mine.fence == *fence),
            "{answers:?}"
        );
        let states = store.inspect(&self.known()).await.expect("inspect");
        let tokens: Vec<_> = states.iter().map(|state| state.holders.first().and_then(|holder| holder.token)).collect();
        assert_eq!(tokens, [Some(mine.token), Some(theirs.token), None]);
        contended(store, &Claim { key: theirs.key.clone(), ..claim("-") }).await;
        let new = claim("new");
        assert!(hold(store, &new).await.fence > *fence);
        free(store, &new).await;
        assert!(matches!(store.release(&new).await.expect("release"), Release::NotHeld(_)));
        self.cluster.until_held_at("new", 0).await;
    }
}

async fn hold_long(store: &RedlockStore, claim: &Claim) -> Fence {
    match store.acquire(&AcquireRequest { ttl: LONG, ..request(claim) }).await.expect("acquire") {
        Attempt::Granted(hold) => hold.fence,
        Attempt::Contended(other) => panic!("not granted: {other:?}"),
    }
}

async fn dropped_everywhere(calls: &[Call]) {
    let scene = Scene::open().await;
    for call in calls {
        for polls in 1.. {
            println!("{call:?} dropped at poll {polls}");
            let dropped = scene.drop_at(*call, polls).await;
            scene.ask().await;
            // A call that waits is never done by itself: it makes few steps.
            if !dropped || matches!(call, Call::Wait | Call::WaitAndGet) && polls > 12 {
                break;
            }
            assert!(polls < MOST_POLLS, "{call:?} does not end");
        }
    }
    free(&scene.store, &scene.mine.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_acquisition_leaves_nothing() {
    dropped_everywhere(&[Call::AcquireFree, Call::AcquireHeld]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wait_at_the_rendezvous_leaves_nothing() {
    dropped_everywhere(&[Call::Wait, Call::WaitAndGet]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_release_a_renewal_and_a_look_leave_nothing() {
    dropped_everywhere(&[Call::Release, Call::Renew, Call::Inspect]).await;
}

/// The acquisition and its release wait for the same new connection, and either may be sent first.
#[tokio::test(flavor = "multi_thread")]
async fn an_acquisition_without_a_connection_leaves_nothing() {
    let cluster = Cluster::start(3).await;
    let store = cluster.client().await;
    for round in 0..30 {
        let (name, asked) = (format!("a{round}"), claim(&format!("a{round}")));
        let asked = AcquireRequest { ttl: LONG, ..request(&asked) };
        for proxy in &cluster.proxies {
            proxy.blackhole();
            proxy.cut().await;
        }
        drop(tokio::time::timeout(STALL, store.acquire(&asked)).await);
        let (released, ()) = tokio::join!(store.release(&asked.claim), async {
            tokio::time::sleep(STALL).await;
            cluster.proxies.iter().for_each(|proxy| proxy.heal());
        });
        // As the core does, until there is an answer.
        let mut released = released;
        while released.is_err() {
            released = store.release(&asked.claim).await;
        }
        cluster.until_held_at(&name, 0).await;
        tokio::time::sleep(Duration::from_millis(2)).await;
        cluster.until_held_at(&name, 0).await;
    }
}
