//! Releasing: all nodes at once, a verdict with a majority. What failed at a node is repeated there.

use std::sync::Arc;

use lockkit_core::{Claim, Effect, Error, Release, Result, drift, store::Sent};

use crate::{
    client::{backlog::Owed, calls::Calls, claims::Entry, quorum::Quorum},
    config::RedlockConfig,
    wire::{
        error::NodeErrors,
        votes::{Answers, Decision},
    },
};

/// Ends a lease, or an attempt to get one.
pub(crate) async fn release(quorum: &Arc<Quorum>, claim: &Claim) -> Result<Release> {
    quorum.info.admit_mode(claim.mode)?;
    let entry = quorum.claims.end(&claim.token);
    let unused = entry.as_ref().is_some_and(|entry| entry.is_unused());
    let outcome = |answers: &Answers| if unused { answers.outcome_if_unused() } else { answers.outcome() };
    let limit = entry.as_ref().map_or(RedlockConfig::PATIENCE, |entry| quorum.config.patience_for(entry.ttl));
    let preferred = quorum.preferred(&claim.key);
    let mut calls = ask_all(quorum, claim);
    let mut rest = Rest {
        quorum: Arc::clone(quorum),
        claim: claim.clone(),
        entry,
        failed: Vec::new(),
        unheard: Vec::new(),
        clean: true,
    };
    let (mut answers, mut errors) = (Answers::new(quorum.nodes.len()), NodeErrors::default());
    let (mut waiters, mut preferred_said) = (0, false);
    let mut count = |node, waiting: Option<u32>| {
        waiters = waiters.max(waiting.unwrap_or(0));
        preferred_said |= waiting.is_some() && Some(node) == preferred;
    };
    calls.limit(limit);
    while outcome(&answers) == Decision::Open {
        match calls.next().await {
            Some((node, answer)) => {
                rest.hear(node, &answer);
                match answer {
                    Ok(Release::Released { waiters }) => {
                        answers.yes += 1;
                        count(node, waiters);
                    }
                    Ok(Release::NotHeld(reason)) => answers.not_held(reason),
                    Err(error) => {
                        answers.failed();
                        errors.push(quorum.nodes[node].name(), error);
                    }
                }
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
        rest.hear(node, &answer);
        if let Ok(Release::Released { waiters }) = answer {
            count(node, waiters);
        }
    }
    match outcome(&answers) {
        Decision::NotHeld(reason) => {
            rest.see_to(calls);
            Ok(Release::NotHeld(reason))
        }
        Decision::Done => {
            rest.see_to(calls);
            // Only the preferred node can count the waiters, for they all wait there.
            Ok(Release::Released { waiters: (preferred_said || waiters > 0).then_some(waiters) })
        }
        // The caller has to release it again, everywhere; but not for longer than leases last that lapse.
        Decision::Open | Decision::Unknown => {
            for node in rest.failed.iter().copied().chain(calls.pending()) {
                if quorum.nodes[node].is_by_session() {
                    rest.owe(node);
                }
            }
            Err(errors.into_error(answers.yes, quorum.nodes.len(), Effect::Unknown))
        }
    }
}

fn ask_all(quorum: &Arc<Quorum>, claim: &Claim) -> Calls<Result<Release>> {
    let claim = Arc::new(claim.clone());
    let mut calls = Calls::with_capacity(quorum.nodes.len());
    for node in 0..quorum.nodes.len() {
        let (quorum, claim) = (Arc::clone(quorum), Arc::clone(&claim));
        calls.add(node, async move { quorum.nodes[node].release(&claim).await });
    }
    calls
}

/// What is left of a release when a majority has answered. The caller takes it for done, so it is the store that has to
/// see to the other nodes.
struct Rest {
    quorum: Arc<Quorum>,
    claim: Claim,
    entry: Option<Arc<Entry>>,
    /// The nodes at which it has to be repeated.
    failed: Vec<usize>,
    /// Those that have not answered.
    unheard: Vec<usize>,
    /// No release is under way.
    clean: bool,
}

impl Rest {
    fn hear(&mut self, node: usize, answer: &Result<Release>) {
        // The lock is free by its word: the next attempt must count on it too, however slow it was before.
        self.quorum.nodes[node].note_slow(answer.is_err());
        if let Err(error) = answer {
            self.clean = false;
            if error.is_retryable() {
                self.failed.push(node);
            }
        }
    }

    /// Has what failed repeated, and waits in the background for those that have not answered.
    fn see_to(mut self, mut calls: Calls<Result<Release>>) {
        self.repeat();
        if calls.is_empty() {
            return self.close();
        }
        self.unheard = calls.nodes().collect();
        let quorum = Arc::clone(&self.quorum);
        quorum.background.spawn(async move {
            while let Some((node, answer)) = calls.next_ever().await {
                self.unheard.retain(|other| *other != node);
                self.hear(node, &answer);
                self.repeat();
            }
            self.close();
        });
    }

    fn repeat(&mut self) {
        for node in std::mem::take(&mut self.failed) {
            self.owe(node);
        }
    }

    fn owe(&self, node: usize) {
        let owed = self.entry.as_ref().map_or_else(|| self.quorum.owed_by_others(&self.claim), |e| Owed::at(e, node));
        self.quorum.owe(node, owed);
    }

    /// From now on nothing stands against asking with the token again.
    fn close(&self) {
        if let Some(entry) = self.entry.as_ref().filter(|_| self.clean && self.unheard.is_empty()) {
            self.quorum.claims.forget(entry);
        }
    }
}

/// A runtime may end before all nodes have answered, that of the calls or this one's. The others are asked again.
impl Drop for Rest {
    fn drop(&mut self) {
        for node in std::mem::take(&mut self.unheard) {
            self.owe(node);
        }
    }
}

impl Quorum {
    /// The release of a lease of which nothing is known here: another client's.
    fn owed_by_others(&self, claim: &Claim) -> Owed {
        let longest = self.info.capability.liveness.ttl.as_ref().map_or(self.config.max_ttl, |ttl| *ttl.end());
        Owed { claim: claim.clone(), lapse: self.info.clock.now() + longest + drift(longest), settled: true }
    }
}
