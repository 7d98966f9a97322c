//! The claims that were asked for in an order, and where they listen while they wait.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use lockkit_core::{Claim, Mode, Token, store::unpoisoned};

use crate::client::{node::Node, subscriptions::Interest};

/// How many claims are remembered at most. Beyond that, those that have the lock are forgotten: they are released as if they had been
/// asked for in no order, and the next waiter hears of that on the channel of the lock.
const REMEMBERED: usize = 10_000;

/// The claims that were asked for in an order, and where they wait.
#[derive(Default)]
pub(crate) struct Ordered {
    claims: Mutex<HashMap<Token, Stage>>,
}

/// How far a claim is.
enum Stage {
    /// A call is under way.
    Asked,
    /// It has a place, and may have been granted the lock.
    Waits(QueueListener),
    /// It has the lock, or is being released.
    Done,
}

/// Where a claim listens while it waits.
pub(super) struct QueueListener {
    pub(super) node: Arc<Node>,
    pub(super) channel: String,
    own: Interest,
    /// On the channel of the lock, if it is the first.
    pub(super) first: Option<Interest>,
}

/// A claim that is asked for now.
pub(super) struct OpenClaim<'a> {
    ordered: &'a Ordered,
    claim: &'a Claim,
    pub(super) place: Option<QueueListener>,
    /// This is the first call for the claim.
    is_new: bool,
}

impl Ordered {
    pub(super) fn ask<'a>(&'a self, claim: &'a Claim) -> OpenClaim<'a> {
        let mut claims = unpoisoned(&self.claims);
        if claims.len() >= REMEMBERED {
            claims.retain(|_, stage| !matches!(stage, Stage::Done));
        }
        let before = claims.insert(claim.token, Stage::Asked);
        let is_new = before.is_none();
        let place = match before {
            Some(Stage::Waits(place)) => Some(place),
            _ => None,
        };
        OpenClaim { ordered: self, claim, place, is_new }
    }

    pub(super) fn has(&self, claim: &Claim) -> bool {
        unpoisoned(&self.claims).contains_key(&claim.token)
    }

    /// A claim is about to be released: it listens no more.
    pub(super) fn end(&self, claim: &Claim) {
        let left = unpoisoned(&self.claims).get_mut(&claim.token).map(|stage| std::mem::replace(stage, Stage::Done));
        // Its channels are given up after the lock on the table.
        drop(left);
    }

    pub(super) fn forget(&self, token: &Token) {
        let left = unpoisoned(&self.claims).remove(token);
        drop(left);
    }
}

impl OpenClaim<'_> {
    /// The claim has the lock.
    pub(super) fn granted(&mut self) {
        self.place = None;
        // Its mode says how it is to be released, unless it is exclusive.
        match self.claim.mode {
            Mode::Exclusive => self.ordered.end(self.claim),
            _ => self.ordered.forget(&self.claim.token),
        }
    }

    /// There is nothing to remember of a claim that never had a place.
    pub(super) fn refused(&self) {
        if self.is_new && self.place.is_none() {
            self.ordered.forget(&self.claim.token);
        }
    }
}

impl Drop for OpenClaim<'_> {
    fn drop(&mut self) {
        let Some(place) = self.place.take() else { return };
        // It may have been released meanwhile. What is left of it then is dropped after the lock on the table.
        let mut claims = unpoisoned(&self.ordered.claims);
        let left = match claims.get_mut(&self.claim.token) {
            Some(stage @ Stage::Asked) => {
                *stage = Stage::Waits(place);
                None
            }
            _ => Some(place),
        };
        drop(claims);
        drop(left);
    }
}

impl QueueListener {
    /// `first` is the channel of the lock, for a claim that will be the first in the queue.
    pub(super) fn new(node: Arc<Node>, channel: String, first: Option<&str>) -> Self {
        let own = node.subscriptions.listen(&channel);
        let first = first.map(|lock| node.subscriptions.listen(lock));
        Self { node, channel, own, first }
    }

    /// From now on only what is new counts. Returns the channels that have to be subscribed first.
    pub(super) fn arm<'a>(&'a mut self, lock: &'a str) -> impl Iterator<Item = &'a str> {
        let wanted = |interest: &mut Interest, channel: &'a str| {
            interest.arm();
            (!interest.is_subscribed()).then_some(channel)
        };
        let own = wanted(&mut self.own, &self.channel);
        let first = self.first.as_mut().and_then(|first| wanted(first, lock));
        own.into_iter().chain(first)
    }

    /// Waits until something happened after which asking again makes sense.
    pub(super) async fn called(&mut self) {
        match &mut self.first {
            None => self.own.notified().await,
            Some(first) => tokio::select! {
                () = self.own.notified() => {}
                () = first.notified() => {}
            },
        }
    }
}
