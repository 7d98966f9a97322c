//! Releasing: all nodes at once, a verdict with a majority. What failed at a node is repeated there.

use std::sync::Arc;

use lockkit_core::{Claim, Effect, Error, Release, Result, drift, store::Sent};

use crate::{
    client::{backlog::Owed, calls::Calls, claims::Entry},
    config::RedlockConfig,
    store::{
        RedlockStore,
        late::{Undo, see_to},
    },
    wire::{
        error::NodeErrors,
        votes::{Answers, Decision},
    },
};

/// Ends a lease, or an attempt to get one.
pub(crate) async fn release(store: &RedlockStore, claim: &Claim) -> Result<Release> {
    store.info.admit_mode(claim.mode)?;
    let quorum = &store.quorum;
    let entry = quorum.claims.end(&claim.token);
    let unused = entry.as_ref().is_some_and(|entry| entry.is_unused());
    let outcome = |answers: &Answers| if unused { answers.outcome_if_unused() } else { answers.outcome() };
    let limit = entry.as_ref().map_or(RedlockConfig::PATIENCE, |entry| quorum.config.patience_for(entry.ttl));
    let preferred = quorum.preferred(&claim.key);
    let mut calls = ask_all(store, claim, entry.as_ref());
    let (mut answers, mut errors) = (Answers::new(quorum.nodes.len()), NodeErrors::default());
    let (mut waiters, mut preferred_said, mut clean) = (0, false, true);
    let mut count = |node, waiting: Option<u32>| {
        waiters = waiters.max(waiting.unwrap_or(0));
        preferred_said |= waiting.is_some() && Some(node) == preferred;
    };
    calls.limit(limit);
    while outcome(&answers) == Decision::Open {
        match calls.next().await {
            Some((node, Ok(Release::Released { waiters }))) => {
                answers.yes += 1;
                count(node, waiters);
            }
            Some((_, Ok(Release::NotHeld(reason)))) => answers.not_held(reason),
            Some((node, Err(error))) => {
                clean = false;
                answers.failed();
                errors.push(quorum.nodes[node].name(), error);
            }
            None => {
                for node in calls.pending() {
                    quorum.nodes[node].note_slow(true);
                    errors.push(quorum.nodes[node].name(), Error::no_answer(limit, Sent::Yes));
                }
                answers.close();
            }
        }
    }
    for (node, answer) in calls.at_hand().await {
        clean &= answer.is_ok();
        if let Ok(Release::Released { waiters }) = answer {
            count(node, waiters);
        }
    }
    let outcome = outcome(&answers);
    if let Decision::Open | Decision::Unknown = outcome {
        return Err(errors.into_error(answers.yes, quorum.nodes.len(), Effect::Unknown));
    }
    // If all have answered, and none may come to grant it, nothing stands against asking with the token again.
    let is_final = |entry: &Arc<Entry>| (0..quorum.nodes.len()).all(|node| !entry.in_doubt.contains(node));
    see_to(quorum, entry.filter(|entry| clean && is_final(entry)), calls, Result::is_ok);
    Ok(match outcome {
        Decision::NotHeld(reason) => Release::NotHeld(reason),
        // Only the preferred node can count the waiters, for they all wait there.
        _ => Release::Released { waiters: (preferred_said || waiters > 0).then_some(waiters) },
    })
}

/// What fails at a node is repeated there: the caller takes the release for done when a majority has answered.
fn ask_all(store: &RedlockStore, claim: &Claim, entry: Option<&Arc<Entry>>) -> Calls<Result<Release>> {
    let quorum = &store.quorum;
    let mut calls = Calls::with_capacity(quorum.nodes.len());
    for node in 0..quorum.nodes.len() {
        let owed = entry.map_or_else(|| store.owed_by_others(claim), |entry| Owed::at(entry, node));
        let settled = entry.is_none_or(|entry| !entry.in_doubt.contains(node));
        let quorum = Arc::clone(quorum);
        calls.add(node, async move {
            let answer = Undo::new(&quorum, node, owed).release(settled).await;
            // The lock is free by its word: the next attempt must count on it too, however slow it was before.
            quorum.nodes[node].note_slow(answer.is_err());
            answer
        });
    }
    calls
}

impl RedlockStore {
    /// The release of a lease of which nothing is known here: another client's.
    fn owed_by_others(&self, claim: &Claim) -> Owed {
        let longest = self.info.capability.liveness.ttl.as_ref().map_or(self.quorum.config.max_ttl, |ttl| *ttl.end());
        Owed { claim: claim.clone(), lapse: self.info.clock.now() + longest + drift(longest), settled: true }
    }
}
