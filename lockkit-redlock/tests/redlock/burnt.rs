//! Nodes that burn the token of a claim that they refuse (rule R2).

use std::{
    collections::HashSet,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use lockkit_core::{
    AcquireRequest, Attempt, Contention, Error, ErrorKind, LockStore, Locker, MemoryStore, Release, Result, Token,
    store::unpoisoned,
};
use lockkit_redlock::{Node, RedlockConfig, RedlockStore};
use lockkit_testkit::{Alter, Altered};

use crate::support::*;

/// A node that burns each token that it refuses, and counts how often it is asked with such a one.
#[derive(Debug)]
struct Burning {
    inner: MemoryStore,
    burnt: Mutex<HashSet<Token>>,
    asked_again: Arc<AtomicU32>,
    /// Whether its refusals come when the others have decided.
    is_late: bool,
}

#[async_trait]
impl Alter for Burning {
    fn inner(&self) -> &dyn LockStore {
        &self.inner
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        let token = request.claim.token;
        if unpoisoned(&self.burnt).contains(&token) {
            self.asked_again.fetch_add(1, Ordering::SeqCst);
        }
        let answer = self.inner.acquire(request).await?;
        Ok(match answer {
            Attempt::Contended(contention) => {
                unpoisoned(&self.burnt).insert(token);
                if self.is_late {
                    others_go_on().await;
                }
                Attempt::Contended(Contention { burnt: true, ..contention })
            }
            granted @ Attempt::Granted(_) => granted,
        })
    }
}

/// All is on this thread, and waits for nothing else.
async fn others_go_on() {
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
}

fn burning(stores: &[MemoryStore], is_late: bool) -> (RedlockStore, Arc<AtomicU32>) {
    let asked_again = Arc::new(AtomicU32::new(0));
    let node = |inner: &MemoryStore| {
        let (inner, asked_again) = (inner.clone(), Arc::clone(&asked_again));
        Node::new(Arc::new(Altered(Burning { inner, burnt: Mutex::default(), asked_again, is_late })))
    };
    let nodes = stores.iter().map(node).collect();
    (RedlockStore::new(nodes, RedlockConfig::new()).expect("a quorum"), asked_again)
}

/// The one at which a client waits for the lock: its refusal counts among the answers of the others.
#[tokio::test]
async fn a_node_that_burnt_the_token_while_it_was_waited_for_is_not_asked_again() {
    let stores = memories(3);
    let (store, asked_again) = burning(&stores, false);
    let (other, theirs) = (quorum(&stores), claim("a"));
    hold(&other, &theirs).await;
    refused_to_wait(&store, &claim("a")).await;
    let waits = AcquireRequest { wait: TTL / 40, ..request(&claim("a")) };
    let answer = store.acquire(&waits).await.expect("acquire");
    assert!(matches!(&answer, Attempt::Contended(Contention { burnt: true, .. })), "{answer:?}");
    free(&other, &theirs).await;
    let mine = hold_in_time(&store, "a").await;
    assert!(matches!(store.release(&mine).await.expect("release"), Release::Released { .. }));
    assert_eq!(asked_again.load(Ordering::SeqCst), 0, "a node was asked again with a token that it had burnt");
}

/// It does not have the lease that a majority granted, and does not get it.
#[tokio::test]
async fn a_node_that_burnt_the_token_is_not_healed() {
    for is_late in [false, true] {
        let stores = memories(3);
        let (store, asked_again) = burning(&stores, is_late);
        let (theirs, mine) = (claim("a"), claim("a"));
        hold(&stores[2], &theirs).await;
        hold(&store, &mine).await;
        others_go_on().await;
        others_go_on().await;
        free(&stores[2], &theirs).await;
        assert!(is_held(&store, &mine).await);
        others_go_on().await;
        assert_eq!(asked_again.load(Ordering::SeqCst), 0, "a node was asked again with a token that it had burnt");
        free(&store, &mine).await;
    }
}

/// What it burnt is known although too few others answered.
#[tokio::test]
async fn a_node_that_burnt_the_token_while_the_others_failed_is_not_asked_again() {
    #[derive(Debug)]
    struct Failing(MemoryStore);

    #[async_trait]
    impl Alter for Failing {
        fn inner(&self) -> &dyn LockStore {
            &self.0
        }

        async fn acquire(&self, _: &AcquireRequest) -> Result<Attempt> {
            Err(Error::new(ErrorKind::Unavailable, "out of reach"))
        }
    }

    let (stores, asked_again) = (memories(3), Arc::new(AtomicU32::new(0)));
    hold(&stores[0], &claim("a")).await;
    let burning = Burning {
        inner: stores[0].clone(),
        burnt: Mutex::default(),
        asked_again: Arc::clone(&asked_again),
        is_late: false,
    };
    let failing = |store: &MemoryStore| Node::new(Arc::new(Altered(Failing(store.clone()))));
    let nodes = vec![Node::new(Arc::new(Altered(burning))), failing(&stores[1]), failing(&stores[2])];
    let store = RedlockStore::new(nodes, RedlockConfig::new()).expect("a quorum");
    let locker = Locker::builder(store).patience(Duration::from_millis(500)).build();
    locker.lock("a").ttl(TTL).acquire().await.expect_err("no majority can be asked");
    assert_eq!(asked_again.load(Ordering::SeqCst), 0, "a node was asked again with a token that it had burnt");
}
