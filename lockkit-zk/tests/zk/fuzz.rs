//! Whatever lies in a lock's directory: no panic, no grant beside somebody who came before, an error of its kind.
//! `PROPTEST_CASES` says how many directories are tried.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use lockkit_core::{Attempt, Claim, Effect, Error, ErrorKind, LockStore, Mode, Query, Release, Renewed};
use lockkit_zk::ZkStore;
use proptest::{
    collection::{btree_map, vec},
    prelude::*,
    sample::select,
    test_runner::{Config, TestRunner},
};
use tokio::runtime::Runtime;
use zookeeper_client::{Acls, Client, CreateMode};

use crate::support::*;

/// A few seconds, unless `PROPTEST_CASES` says otherwise.
const CASES: u32 = 150;

/// What comes after the token: ours, and what looks like it.
const KINDS: &[&str] = &[
    "lock-",
    "lock-",
    "read-lock-",
    "read-lock-",
    "permit2-lock-",
    "permit2-lock-",
    "permit02-lock-",
    "read-",
    "permit3-lock-",
];

/// The names and the data of what lies there.
type Nodes = BTreeMap<String, Vec<u8>>;

fn nodes() -> impl Strategy<Value = Nodes> {
    let token = "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}";
    // None is between 1 and 5, which ours may get: of two nodes with one number nobody can tell by their names which holds.
    let number = select(vec![
        "0000000000",
        "0000000007",
        "0000000009",
        "0000000100",
        "2147483647",
        "-2147483648",
        "-000000001",
        "",
        "x",
        "99999999999",
        "0000000000lock-",
        " 1",
        "９",
    ]);
    let name = prop_oneof![
        4 => (token, select(KINDS.to_vec()), number.clone())
            .prop_map(|(token, kind, number)| format!("_c_{token}-{kind}{number}")),
        2 => (select(vec!["lock-", "x-lock-", "f0__lock__", "f0__rlock__", "_c_lock-", "_c_", "READ", "lock-lock-"]), number)
            .prop_map(|(mark, number)| format!("{mark}{number}")),
        3 => Just("~fence".to_owned()),
        1 => select(vec!["~", "~fence2", "zebra", "ä", "!", "lock", "-", "_c_é"]).prop_map(str::to_owned),
    ];
    let number =
        select(vec!["0", "1", "-1", "+5", "65", "4294967296", "9223372036854775807", "18446744073709551615", "x", ""]);
    let value = prop_oneof![
        3 => (number.clone(), number.clone(), number.clone(), "\\PC{0,3}")
            .prop_map(|(depth, span, fence, holder)| format!("lockkit:{depth}:{span}:{fence}:{holder}").into_bytes()),
        3 => (select(vec!["offset", "last", "", "Offset"]), number).prop_map(|(kind, number)| format!("{kind}:{number}").into_bytes()),
        1 => "lockkit:revoked:[0-9a-f]{0,33}".prop_map(String::into_bytes),
        2 => vec(any::<u8>(), 0..30),
    ];
    btree_map(name, value, 0..5)
}

#[test]
fn whatever_lies_in_a_directory_is_no_lease_of_ours() {
    let runtime = Runtime::new().expect("a runtime");
    let (_server, store, raw) = runtime.block_on(async {
        let server = Server::start().await;
        let (store, raw) = (server.store().await, server.raw().await);
        (server, store, raw)
    });
    let cases = if std::env::var_os("PROPTEST_CASES").is_some() { Config::default().cases } else { CASES };
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    let (mut number, about) = (0, prop::option::of(select(vec!["", "lockkit:revoked:", "lockkit:revoked:x", "a"])));
    let modes = select(vec![Mode::Exclusive, Mode::Shared, permit(2)]);
    let next = std::cell::RefCell::new(&mut number);
    TestRunner::new(config)
        .run(&(nodes(), about, modes), |(nodes, about, mode)| {
            **next.borrow_mut() += 1;
            let name = format!("fuzz-{}", next.borrow());
            runtime.block_on(judge(&store, &raw, claim_as(mode, &name), &nodes, about)).map_err(TestCaseError::fail)
        })
        .unwrap_or_else(|broken| panic!("{broken}"));
}

/// Whether this node, which was there first, goes before any that comes, by Curator's rule.
fn is_ahead(node: &str) -> bool {
    let key = ["lock-", "__lock__", "__rlock__"].into_iter().find_map(|mark| Some(node.rsplit_once(mark)?.1));
    let key = key.unwrap_or(node);
    node != "~fence" && (key <= "0000000000" || key.starts_with('-'))
}

/// Whether none of those before a claim of this mode lets it hold beside itself, by the rules of the queue.
fn is_taken(nodes: &Nodes, mode: Mode) -> bool {
    let ahead: Vec<_> = nodes.keys().filter(|node| is_ahead(node)).collect();
    let are_all = |kind: &str| {
        ahead.iter().all(|node| node.starts_with("_c_") && node.get(39..).is_some_and(|rest| rest.starts_with(kind)))
    };
    match mode {
        Mode::Shared => !are_all("-read-lock-"),
        Mode::Permit { .. } => ahead.len() > 1 || !are_all("-permit2-lock-"),
        _ => !ahead.is_empty(),
    }
}

/// Whether the first permit before a claim of this mode has another limit.
fn disagrees(nodes: &Nodes, mode: Mode) -> bool {
    let kind =
        |node: &String| node.get(39..).and_then(|rest| rest.split_once("-lock-")).map(|(kind, _)| kind.to_owned());
    let ahead = nodes.keys().filter(|node| is_ahead(node) && node.starts_with("_c_"));
    let permits = ahead.filter(|node| matches!(kind(node).as_deref(), Some("-permit2" | "-permit3")));
    let first = permits.min_by_key(|node| (node.rsplit_once("lock-").map(|(_, number)| number.to_owned()), *node));
    mode == permit(2) && first.and_then(kind).as_deref() == Some("-permit3")
}

/// Judges the answers of a client about a lock whose directory has these nodes.
async fn judge(
    store: &Arc<ZkStore>,
    raw: &Client,
    mine: Claim,
    nodes: &Nodes,
    about: Option<&str>,
) -> Result<(), String> {
    let says = |error: Error| error.to_string();
    let name = mine.key.as_str();
    let (lock, options) = (format!("/lockkit/{name}"), CreateMode::Persistent.with_acls(Acls::anyone_all()));
    let container = CreateMode::Container.with_acls(Acls::anyone_all());
    raw.mkdir(&lock, &container).await.map_err(|error| error.to_string())?;
    for (node, data) in nodes {
        raw.create(&format!("{lock}/{node}"), data, &options).await.map_err(|error| format!("{node:?}: {error}"))?;
    }
    if let Some(about) = about {
        raw.set_data(&lock, about.as_bytes(), None).await.map_err(|error| error.to_string())?;
    }
    let is_taken = is_taken(nodes, mine.mode);
    let answer = store.acquire(&request(&mine, Duration::from_millis(2))).await;
    let (is_granted, is_clear) = match answer {
        Ok(Attempt::Granted(hold)) if !is_taken => {
            match renew(store, &mine).await.map_err(says)? {
                Renewed::Held(again) if again.fence == hold.fence => {}
                other => return Err(format!("{hold:?} was granted, and renewed: {other:?}")),
            }
            (true, true)
        }
        Ok(Attempt::Contended(_)) if nodes.keys().any(|node| node != "~fence") => (false, true),
        // A permit of another limit: the node is gone again.
        Err(error) if disagrees(nodes, mine.mode) => (false, error.kind() == ErrorKind::InvalidInput),
        // A record that says nothing, or the last fence that there is. The node is there until the claim is released.
        Err(error)
            if nodes.contains_key("~fence")
                && !matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::TimedOut) =>
        {
            (false, error.effect() == Effect::None)
        }
        other => return Err(format!("{other:?}")),
    };
    for query in [Query::Keys(vec![mine.key.clone()]), Query::Prefix(name.to_owned())] {
        let states = store.inspect(&query).await.map_err(|error| format!("inspected: {error}"))?;
        let mut holders = states.iter().filter(|state| state.key == mine.key).flat_map(|state| &state.holders);
        if is_clear && is_granted != holders.any(|holder| holder.token == Some(mine.token))
            || states
                .iter()
                .flat_map(|state| &state.holders)
                .any(|holder| holder.info.as_str().contains(char::is_control))
        {
            return Err(format!("granted: {is_granted}, and shown: {states:?}"));
        }
    }
    match store.release(&mine).await.map_err(says)? {
        Release::Released { .. } if is_granted => {}
        Release::NotHeld(_) if !is_granted => {}
        Release::Released { .. } if !is_clear => {}
        other => return Err(format!("granted: {is_granted}, and released: {other:?}")),
    }
    let left = children(raw, name).await;
    let ours = left.iter().filter(|node| !nodes.contains_key(*node) && *node != "~fence").count();
    if ours > 0 || nodes.keys().any(|node| !left.contains(node)) { Err(format!("left: {left:?}")) } else { Ok(()) }
}
