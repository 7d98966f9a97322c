//! Operations that are given up while their answers are on their way, and what the store says after that.

use std::time::Duration;

use lockkit_core::{AcquireRequest, HolderInfo, LockStore, LossReason, Query, Release, Renewal, Renewed};
use lockkit_redis::{RedisConfig, RedisStore};
use lockkit_testkit::faults::{Direction, Proxy};

use crate::support::*;

/// What is given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Left {
    /// Making the connection: the login, and what is asked of the server before it is used.
    Connection,
    Try,
    /// A subscription, and the acquisition behind it.
    Wait,
    Renewals,
    Release,
    Keys,
    Prefix,
    Check,
}

const ALL: [Left; 8] =
    [Left::Connection, Left::Try, Left::Wait, Left::Renewals, Left::Release, Left::Keys, Left::Prefix, Left::Check];

/// Does something, whatever the answer is.
async fn ask(store: &RedisStore, what: Left, name: &str) {
    let mine = claim(name);
    match what {
        Left::Connection | Left::Try => _ = attempt(store, &mine).await,
        Left::Wait => _ = store.acquire(&request(&claim("waited for"), TTL)).await,
        Left::Renewals => _ = store.renew(&[renewal(&mine), renewal(&claim("waited for"))]).await,
        Left::Release => _ = store.release(&mine).await,
        Left::Keys => _ = store.inspect(&Query::Keys(vec![mine.key])).await,
        Left::Prefix => _ = store.inspect(&Query::Prefix(String::new())).await,
        Left::Check => _ = store.check().await,
    }
}

/// Asks the store things that have one right answer each, all at once. `direct` talks to the server by itself.
async fn known_answers(store: &RedisStore, direct: &RedisStore, round: &str) {
    let (theirs, ours, free_one) = (claim(&format!("{round} theirs")), claim(&format!("{round} ours")), claim("free"));
    let holder = HolderInfo::new(&format!("holder of {round}"));
    let before = granted(
        direct
            .acquire(&AcquireRequest { holder: holder.clone(), ..request(&theirs, Duration::ZERO) })
            .await
            .expect("direct"),
    );
    let grant = hold(direct, &ours).await;
    let foreign = claim(theirs.key.as_str());
    let prefix = Query::Prefix(round.to_owned());
    let keys = Query::Keys(vec![theirs.key.clone(), ours.key.clone(), free_one.key.clone()]);
    let renewals: Vec<Renewal> = [&ours, &foreign, &free_one].into_iter().map(renewal).collect();
    let (tried, again, renewed, taken, gone, states, listed) = tokio::join!(
        attempt(store, &foreign),
        attempt(store, &ours),
        store.renew(&renewals),
        store.release(&foreign),
        store.release(&free_one),
        store.inspect(&keys),
        store.inspect(&prefix),
    );
    assert_eq!(contended(tried.expect("try")).holder, Some(holder.clone()), "{round}");
    assert_eq!(granted(again.expect("again")).fence, grant.fence, "{round}: the same claim");
    match &renewed[..] {
        [Ok(Renewed::Held(hold)), Ok(Renewed::Lost(LossReason::Taken)), Ok(Renewed::Lost(LossReason::Gone))] => {
            assert_eq!((hold.fence, &hold.claim), (grant.fence, &ours), "{round}");
        }
        other => panic!("{round}: {other:?}"),
    }
    assert_eq!(taken.expect("release"), Release::NotHeld(LossReason::Taken), "{round}");
    assert_eq!(gone.expect("release"), Release::NotHeld(LossReason::Gone), "{round}");
    for (states, fences) in [
        (states, vec![Some(before.fence), Some(grant.fence), None]),
        (listed, vec![Some(grant.fence), Some(before.fence)]),
    ] {
        let told: Vec<_> =
            states.expect("inspect").iter().map(|state| state.holders.first().and_then(|h| h.fence)).collect();
        assert_eq!(told, fences, "{round}");
    }
    free(store, &theirs).await;
    free(store, &ours).await;
}

/// With more of its kind, with messages in between, and on a server that has forgotten the scripts.
#[tokio::test]
async fn a_late_answer_is_nobody_elses() {
    let server = Server::start().await;
    let (direct, mut admin) = (server.store().await, server.raw());
    let proxy = Proxy::start(([127, 0, 0, 1], server.port()).into()).await.expect("a proxy");
    for (what, others, forgotten) in
        ALL.into_iter().flat_map(|what| [(what, 1, false), (what, 30, false), (what, 30, true)])
    {
        let round = format!("{what:?} {others} {forgotten}");
        let store = RedisStore::new(RedisConfig::new("127.0.0.1", proxy.addr().port())).expect("a store");
        let waited_for = claim("waited for");
        hold(&direct, &waited_for).await;
        if what != Left::Connection {
            known_answers(&store, &direct, &format!("{round} before")).await;
        }
        if forgotten {
            raw::<()>(&mut admin, "SCRIPT FLUSH");
        }
        proxy.hold(Direction::ToClient);
        let names: Vec<String> = (0..others).map(|i| format!("{round} {i}")).collect();
        let asked = join_all(names.iter().map(|name| ask(&store, what, name)));
        assert!(tokio::time::timeout(Duration::from_millis(30), asked).await.is_err(), "{round}: it is held back");
        // A message, if somebody listens, goes between the answers.
        free(&direct, &waited_for).await;
        let (behind, late) = (format!("{round} behind"), format!("{round} late"));
        tokio::join!(known_answers(&store, &direct, &behind), async {
            tokio::time::sleep(Duration::from_millis(20)).await;
            proxy.release(Direction::ToClient);
        });
        known_answers(&store, &direct, &late).await;
    }
}
