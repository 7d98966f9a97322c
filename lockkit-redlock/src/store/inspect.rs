//! Who holds what, as a majority shows it.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use crate::{
    client::{calls::Calls, quorum::Quorum},
    config::RedlockConfig,
    store::RedlockStore,
    wire::error::NodeErrors,
};
use lockkit_core::{
    Effect, Error, Fence, Holder, HolderInfo, KeyState, LockKey, LockStore, Query, Result, Token, store::Sent,
};
use tokio::time::Instant;

/// Asks all nodes, and lays their answers on top of each other.
///
/// All answers are waited for, not just a majority: the one or two nodes that do not have a lease would otherwise make
/// it look as if nobody had it. After the node timeout a majority is enough, and is waited for longer: waiting takes no time from any
/// lease, and an error would tell the caller less.
pub(crate) async fn inspect(store: &RedlockStore, query: &Query) -> Result<Vec<KeyState>> {
    let (quorum, query) = (&store.quorum, Arc::new(query.clone()));
    let mut calls = Calls::with_capacity(quorum.nodes.len());
    for node in 0..quorum.nodes.len() {
        let (quorum, query) = (Arc::clone(quorum), Arc::clone(&query));
        calls.add(node, async move { quorum.nodes[node].store().inspect(&query).await });
    }
    let limit = quorum.config.node_timeout.unwrap_or(RedlockConfig::LONGEST_TIMEOUT);
    let longer = RedlockConfig::PATIENCE.saturating_sub(limit);
    let (all, begun) = (quorum.nodes.len(), Instant::now());
    let (mut views, mut errors) = (Vec::new(), NodeErrors::default());
    // At last those that have come together with the answer that made a majority.
    for (limit, enough) in [(limit, all), (longer, quorum.majority), (Duration::ZERO, all)] {
        calls.limit(limit);
        while views.len() < enough
            && views.len() + calls.unheard() >= quorum.majority
            && let Some((node, answer)) = calls.next().await
        {
            match answer {
                Ok(view) => views.push(view),
                Err(error) => errors.push(quorum.nodes[node].name(), error),
            }
        }
    }
    let waited = Duration::from_millis(u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX));
    for node in calls.pending() {
        errors.push(quorum.nodes[node].name(), Error::no_answer(waited, Sent::ReadOnly));
    }
    if views.len() < quorum.majority {
        return Err(errors.into_error(views.len(), quorum.nodes.len(), Effect::None));
    }
    let silent = quorum.nodes.len() - views.len();
    Ok(match &*query {
        Query::Keys(keys) => {
            let of_key = |at: usize| views.iter().filter_map(move |view| view.get(at)).collect();
            keys.iter().enumerate().map(|(at, key)| merge(quorum, key, of_key(at), silent)).collect()
        }
        Query::Queue(key) => vec![merge(quorum, key, views.iter().flatten().collect(), silent)],
        Query::Prefix(_) => {
            let mut by_key: BTreeMap<&LockKey, Vec<&KeyState>> = BTreeMap::new();
            for state in views.iter().flatten() {
                by_key.entry(&state.key).or_default().push(state);
            }
            let merged = by_key.into_iter().map(|(key, states)| merge(quorum, key, states, silent));
            merged.filter(|state| !state.holders.is_empty()).collect()
        }
    })
}

/// A client is a holder if it holds the lock at a majority, or might for all that is known of nodes that did not answer.
fn merge(quorum: &Quorum, key: &LockKey, states: Vec<&KeyState>, silent: usize) -> KeyState {
    let mut by_holder: Vec<Vec<&Holder>> = Vec::new();
    for holder in states.iter().flat_map(|state| &state.holders) {
        // A renewal that changes the name may have reached some nodes only. One that is not lockkit's has no token, but is the
        // same everywhere.
        let same = |of: &&mut Vec<&Holder>| {
            of[0].token == holder.token && (holder.token.is_some() || of[0].info == holder.info)
        };
        match by_holder.iter_mut().find(same) {
            Some(shown) => shown.push(holder),
            None => by_holder.push(vec![holder]),
        }
    }
    let holders = by_holder.into_iter().filter(|shown| shown.len() + silent >= quorum.majority);
    KeyState {
        key: key.clone(),
        holders: holders.map(|shown| as_one(quorum, &shown)).collect(),
        fence: states.iter().filter_map(|state| state.fence).max(),
        waiters: states.iter().filter_map(|state| state.waiters).max(),
        // An order over several nodes would be a consensus: there is none.
        queue: None,
    }
}

fn as_one(quorum: &Quorum, shown: &[&Holder]) -> Holder {
    let mut left: Vec<Option<Duration>> = shown.iter().map(|holder| holder.remaining).collect();
    // It is held until one node too many has let it go. None is for ever.
    left.sort_unstable_by_key(|left| std::cmp::Reverse(left.unwrap_or(Duration::MAX)));
    // After a raise most nodes may show a number below the fence of the grant.
    let fences = || shown.iter().filter_map(|holder| holder.fence);
    Holder {
        token: shown[0].token,
        info: HolderInfo::new(most_common(shown.iter().map(|holder| holder.info.as_str())).unwrap_or_default()),
        mode: shown[0].mode,
        depth: most_common(shown.iter().map(|holder| holder.depth)).unwrap_or(1),
        fence: known_fence(quorum, shown[0].token).or_else(|| most_common(fences())),
        remaining: left.get(quorum.majority - 1).or(left.last()).copied().flatten(),
    }
}

/// The fence that this client was granted, if it is the holder: after a raise the nodes do not show it.
fn known_fence(quorum: &Quorum, token: Option<Token>) -> Option<Fence> {
    let entry = quorum.claims.get(&token?)?;
    entry.grant().map(|grant| grant.fence)
}

/// What most show; the largest of several such.
fn most_common<T: Ord + Copy>(values: impl Iterator<Item = T> + Clone) -> Option<T> {
    values.clone().max_by_key(|value| (values.clone().filter(|other| other == value).count(), *value))
}
