//! Inspecting: what the stores of the phase know, as one.

use std::collections::BTreeMap;

use super::{
    dual::Dual,
    floor::OWN,
    phase::{Phase, Side},
};
use crate::{Holder, KeyState, LockKey, LockStore, Query, Result};

impl Dual {
    pub(super) async fn inspect_in_phase(&self, query: &Query) -> Result<Vec<KeyState>> {
        let phase = self.confirmed().await?.phase;
        let states = match phase {
            Phase::Old => self.pair.at(Side::Old).inspect(query).await?,
            Phase::New => self.pair.at(Side::New).inspect(query).await?,
            Phase::Both => {
                let (old, new) =
                    tokio::join!(self.pair.at(Side::Old).inspect(query), self.pair.at(Side::New).inspect(query));
                merge(query, old?, new?)
            }
        };
        // Those for the migration's own use are not the service's.
        let is_own = |state: &KeyState| matches!(query, Query::Prefix(_)) && state.key.as_str().starts_with(OWN);
        Ok(states.into_iter().filter(|state| !is_own(state)).map(|state| self.unmarked(state)).collect())
    }

    fn unmarked(&self, mut state: KeyState) -> KeyState {
        for holder in &mut state.holders {
            holder.info = self.unmark(&holder.info);
        }
        // Nobody waits in order for a lock of two stores.
        state.queue = None;
        state
    }
}

/// The states of both stores, each lock once; a holder of both is one.
fn merge(query: &Query, old: Vec<KeyState>, new: Vec<KeyState>) -> Vec<KeyState> {
    match query {
        Query::Keys(_) | Query::Queue(_) => old.into_iter().zip(new).map(|(old, new)| one(old, new)).collect(),
        Query::Prefix(_) => {
            let mut by_key: BTreeMap<LockKey, KeyState> =
                old.into_iter().map(|state| (state.key.clone(), state)).collect();
            for state in new {
                let merged = match by_key.remove(&state.key) {
                    Some(old) => one(old, state),
                    None => state,
                };
                by_key.insert(merged.key.clone(), merged);
            }
            by_key.into_values().collect()
        }
    }
}

fn one(mut old: KeyState, new: KeyState) -> KeyState {
    for holder in new.holders {
        // A lease that was taken along may have another token there. The grant's fence is that of the store that was asked last,
        // and its lease is the shorter one.
        let is_same =
            |known: &&mut Holder| holder.token.is_some() && (known.token == holder.token || known.info == holder.info);
        match old.holders.iter_mut().find(is_same) {
            Some(known) => {
                known.fence = known.fence.max(holder.fence);
                known.remaining = known.remaining.into_iter().chain(holder.remaining).min();
            }
            None => old.holders.push(holder),
        }
    }
    // The old store is the one that is waited for.
    KeyState { fence: old.fence.max(new.fence), ..old }
}
