//! Who waits for a lock in order: one queue for all modes, the first in front.

use std::{collections::VecDeque, sync::Arc};

use tokio::sync::Notify;

use crate::{Claim, HolderInfo, Mode, Moment, Token, Waiter, store::PLACE};

#[derive(Debug, Default)]
pub(super) struct ClaimQueue(VecDeque<QueuedClaim>);

/// A claim's place. It has a lease of its own, so that those behind it do not wait for a client that is gone.
#[derive(Debug)]
pub(super) struct QueuedClaim {
    pub(super) claim: Claim,
    info: HolderInfo,
    pub(super) ends: Moment,
    /// Notified when it seems to be the claim's turn. If nobody listens at the moment, the next one who does hears it.
    pub(super) wake: Arc<Notify>,
}

impl ClaimQueue {
    /// Keeps the claim's place from now on, the last one if it had none; returns what wakes it.
    pub(super) fn keep(&mut self, claim: &Claim, info: &HolderInfo, now: Moment) -> Arc<Notify> {
        let ends = now + PLACE;
        if let Some(place) = self.0.iter_mut().find(|place| place.claim == *claim) {
            place.ends = ends;
            return Arc::clone(&place.wake);
        }
        let wake = Arc::new(Notify::new());
        self.0.push_back(QueuedClaim { claim: claim.clone(), info: info.clone(), ends, wake: Arc::clone(&wake) });
        wake
    }

    /// Gives up a place; whether there was one.
    pub(super) fn leave(&mut self, token: &Token) -> bool {
        let before = self.0.len();
        self.0.retain(|place| place.claim.token != *token);
        self.0.len() < before
    }

    /// Drops the places that nobody asked for in time; whether there were any.
    pub(super) fn drop_lapsed(&mut self, now: Moment) -> bool {
        let before = self.0.len();
        self.0.retain(|place| now < place.ends);
        self.0.len() < before
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// How many wait.
    pub(super) fn len(&self, now: Moment) -> u32 {
        let live = self.0.iter().filter(|place| now < place.ends).count();
        u32::try_from(live).unwrap_or(u32::MAX)
    }

    /// All that wait, the first in front, for people to see.
    pub(super) fn waiters(&self, now: Moment) -> impl Iterator<Item = Waiter> {
        let live = self.0.iter().filter(move |place| now < place.ends);
        live.map(|place| Waiter { info: place.info.clone(), mode: place.claim.mode })
    }

    pub(super) fn has(&self, claim: &Claim) -> bool {
        self.0.iter().any(|place| place.claim == *claim)
    }

    /// How all that wait want to hold the lock, the first in front.
    pub(super) fn modes(&self) -> impl Iterator<Item = Mode> + Clone {
        self.0.iter().map(|place| place.claim.mode)
    }

    /// The places before that of the claim; all of them if it has none.
    pub(super) fn before(&self, claim: &Claim) -> impl Iterator<Item = &QueuedClaim> + Clone {
        self.0.iter().take_while(move |place| place.claim != *claim)
    }

    pub(super) fn places(&self) -> impl Iterator<Item = &QueuedClaim> {
        self.0.iter()
    }
}
