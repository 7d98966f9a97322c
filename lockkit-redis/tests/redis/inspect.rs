//! Who holds what, as others see it.

use std::time::Duration;

use lockkit_core::{LockKey, LockStore, Mode, Query};
use lockkit_redis::RedisStore;

use crate::support::*;

fn key(name: &str) -> LockKey {
    LockKey::new(name).expect("name")
}

#[tokio::test]
async fn keys_are_answered_in_order_also_the_free_ones() {
    let server = Server::start().await;
    let store = server.store().await;
    let (mine, gone) = (claim("b"), claim("c"));
    let grant = hold(&store, &mine).await;
    let last = hold(&store, &gone).await;
    free(&store, &gone).await;
    let mut connection = server.raw();
    raw::<()>(&mut connection, "SET lockkit:d foreign PX 60000");
    raw::<i32>(&mut connection, "RPUSH lockkit:e x");
    let states = store.inspect(&Query::Keys(["c", "b", "a", "d", "e"].map(key).into())).await.expect("inspect");
    let names: Vec<_> = states.iter().map(|state| state.key.as_str()).collect();
    assert_eq!(names, ["c", "b", "a", "d", "e"]);
    assert!(states[0].holders.is_empty() && states[0].fence == Some(last.fence));
    let holder = &states[1].holders[0];
    assert_eq!((holder.token, holder.depth, holder.fence), (Some(mine.token), 1, Some(grant.fence)));
    assert_eq!((holder.mode, holder.info.as_str()), (Mode::Exclusive, "test: holder"));
    assert!(holder.remaining.is_some_and(|left| left <= TTL && left > TTL - Duration::from_secs(2)));
    assert!(states[2].holders.is_empty() && states[2].fence.is_none() && states[2].waiters == Some(0));
    let foreign = &states[3].holders[0];
    assert_eq!((foreign.token, foreign.info.as_str(), foreign.fence), (None, "a client that is not lockkit", None));
    assert!(states[4].holders[0].info.as_str().contains("list"));
    assert!(store.inspect(&Query::Keys(Vec::new())).await.expect("inspect").is_empty());
}

#[tokio::test]
async fn a_prefix_finds_what_is_held_sorted() {
    let server = Server::start().await;
    for prefix in ["lockkit:", ""] {
        let store = RedisStore::connect(server.config().prefix(prefix)).await.expect("connect");
        raw::<()>(&mut server.raw(), "FLUSHALL");
        let names = ["a*c", "a*b", "a{1}", "abc", "a", "b", "{a}:fence", "lockkit:esc:a"];
        for name in names {
            hold(&store, &claim(name)).await;
        }
        let released = claim("a-released");
        hold(&store, &released).await;
        free(&store, &released).await;
        raw::<i32>(&mut server.raw(), &format!("HSET {prefix}ahash f v"));
        let find = async |start: &str| {
            let states = store.inspect(&Query::Prefix(start.to_owned())).await.expect("inspect");
            states.into_iter().map(|state| state.key.as_str().to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(find("a").await, ["a", "a*b", "a*c", "abc", "a{1}"], "{prefix:?}");
        assert_eq!(find("a*").await, ["a*b", "a*c"]);
        assert_eq!(find("a{").await, ["a{1}"]);
        assert_eq!(find("{").await, ["{a}:fence"]);
        assert_eq!(find("lockkit:e").await, ["lockkit:esc:a"]);
        assert_eq!(find("").await.len(), names.len());
        assert!(find("zzz").await.is_empty());
    }
}

#[tokio::test]
async fn many_locks_are_read_in_pages() {
    let server = Server::start().await;
    let store = server.store().await;
    for i in 0..3000 {
        hold(&store, &claim(&format!("k{i:04}"))).await;
    }
    let states = store.inspect(&Query::Prefix("k".into())).await.expect("inspect");
    assert_eq!(states.len(), 3000);
    assert!(states.is_sorted_by(|a, b| a.key < b.key));
}

#[tokio::test]
async fn waiters_are_counted() {
    let server = Server::start().await;
    let (holder, waiter) = (server.store().await, server.store().await);
    hold(&holder, &claim("a")).await;
    let waiting = tokio::spawn(async move { waiter.acquire(&request(&claim("a"), TTL)).await });
    let mut connection = server.raw();
    eventually("a subscription", async || subscribers(&mut connection, "a") == 1).await;
    let states = holder.inspect(&Query::Keys(vec![key("a")])).await.expect("inspect");
    assert_eq!(states[0].waiters, Some(1));
    waiting.abort();
}
