//! The claims that were asked for in an order, and where they listen while they wait.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use lockkit_core::{
    Claim, Mode, Release, Token,
    store::{PLACE, unpoisoned},
};
use tokio::time::Instant;

use crate::client::{node::Node, subscriptions::Interest};

/// With more claims than this, those that have the lock are forgotten: they are released as if they had been asked for in no order, and
/// the next waiter hears of that on the channel of the lock.
const REMEMBERED: usize = 10_000;

/// By how many more claims there have to be before those are looked for that can be forgotten.
const GROWTH: usize = 1024;

/// The claims that were asked for in an order, and where they wait.
#[derive(Default)]
pub(crate) struct Ordered {
    table: Mutex<ClaimTable>,
}

#[derive(Default)]
struct ClaimTable {
    claims: HashMap<Token, Stage>,
    /// With how many claims to look for those that can be forgotten.
    limit: usize,
}

/// How far a claim is.
enum Stage {
    /// A call is under way.
    Asked,
    /// No call is under way since then. It may have a place, and have been granted the lock.
    Waits { place: Option<Listener>, since: Instant },
    /// It has the lock, or is being released.
    Done,
}

/// Where a claim listens while it waits: on the channel of the lock, or, if it has a place in the queue, on one of its own.
pub(super) struct Listener {
    pub(super) node: Arc<Node>,
    pub(super) channel: String,
    own: Interest,
    /// On the channel of the lock, too, if it is the first in the queue.
    pub(super) first: Option<Interest>,
}

/// A claim that is asked for now.
pub(super) struct OpenClaim<'a> {
    ordered: &'a Ordered,
    claim: &'a Claim,
    pub(super) place: Option<Listener>,
    /// This is the first call for the claim.
    is_new: bool,
}

impl Ordered {
    pub(super) fn ask<'a>(&'a self, claim: &'a Claim) -> OpenClaim<'a> {
        let mut table = unpoisoned(&self.table);
        let before = table.claims.insert(claim.token, Stage::Asked);
        let swept = table.sweep();
        drop(table);
        // Their channels are given up after the lock on the table.
        drop(swept);
        let is_new = before.is_none();
        let place = match before {
            Some(Stage::Waits { place, .. }) => place,
            _ => None,
        };
        OpenClaim { ordered: self, claim, place, is_new }
    }

    pub(super) fn has(&self, claim: &Claim) -> bool {
        unpoisoned(&self.table).claims.contains_key(&claim.token)
    }

    /// A claim is about to be released: it listens no more.
    pub(super) fn end(&self, claim: &Claim) {
        let mut table = unpoisoned(&self.table);
        let left = table.claims.get_mut(&claim.token).map(|stage| std::mem::replace(stage, Stage::Done));
        drop(table);
        // Its channels are given up after the lock on the table.
        drop(left);
    }

    /// The release of a claim was answered. If the claim had nothing, a request of its own may still be on its way that gives it a place:
    /// the next release has to find that, too.
    pub(super) fn released(&self, claim: &Claim, release: &Release) {
        let mut table = unpoisoned(&self.table);
        let left = match release {
            Release::Released { .. } => table.claims.remove(&claim.token),
            Release::NotHeld(_) => {
                let waits = Stage::Waits { place: None, since: Instant::now() };
                table.claims.get_mut(&claim.token).map(|stage| std::mem::replace(stage, waits))
            }
        };
        drop(table);
        // Its channels are given up after the lock on the table.
        drop(left);
    }

    pub(super) fn forget(&self, token: &Token) {
        let left = unpoisoned(&self.table).claims.remove(token);
        drop(left);
    }
}

impl ClaimTable {
    /// Takes out, once there are many more claims than before, those whose places are over: they were given up, and their release may
    /// never be asked for. And those that have the lock, if there are too many.
    fn sweep(&mut self) -> Vec<Stage> {
        self.limit = self.limit.min(self.claims.len() + GROWTH);
        if self.claims.len() < self.limit {
            return Vec::new();
        }
        let are_many = self.claims.len() >= REMEMBERED;
        let is_over = |stage: &Stage| match stage {
            Stage::Asked => false,
            Stage::Waits { since, .. } => since.elapsed() > PLACE,
            Stage::Done => are_many,
        };
        let swept = self.claims.extract_if(|_, stage| is_over(stage)).map(|(_, stage)| stage).collect();
        self.limit = self.claims.len() + GROWTH;
        swept
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
        let place = self.place.take();
        // It may have been released meanwhile. What is left of it then is dropped after the lock on the table.
        let mut table = unpoisoned(&self.ordered.table);
        let left = match table.claims.get_mut(&self.claim.token) {
            Some(stage @ Stage::Asked) => {
                *stage = Stage::Waits { place, since: Instant::now() };
                None
            }
            _ => place,
        };
        drop(table);
        drop(left);
    }
}

impl Listener {
    pub(super) fn new(node: Arc<Node>, channel: String) -> Self {
        let own = node.subscriptions.listen(&channel);
        Self { node, channel, own, first: None }
    }

    /// From now on only what is new counts. Returns the channels that have to be subscribed first.
    pub(super) fn arm<'a>(&'a mut self, lock: &'a str) -> Vec<&'a str> {
        let wanted = |interest: &mut Interest, channel: &'a str| {
            interest.arm();
            (!interest.is_subscribed()).then_some(channel)
        };
        let own = wanted(&mut self.own, &self.channel);
        let first = self.first.as_mut().and_then(|first| wanted(first, lock));
        own.into_iter().chain(first).collect()
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use lockkit_core::LockKey;

    use super::*;
    use crate::{client::note::NoteKey, config::RedisConfig};

    fn claim() -> Claim {
        Claim { key: LockKey::new("a").expect("name"), token: Token::random().expect("token"), mode: Mode::Exclusive }
    }

    /// As one that is dropped when no runtime is left which could release it.
    #[tokio::test(start_paused = true)]
    async fn what_nobody_asks_for_any_more_is_forgotten_once_there_is_much() {
        let (ordered, config) = (Ordered::default(), RedisConfig::new("127.0.0.1", 1));
        let node = Arc::new(Node::new(&config, NoteKey::default(), None, &Default::default()));
        let listener = || Some(Listener::new(Arc::clone(&node), Token::random().expect("token").reveal()));
        let (given_up, unanswered, asked_again, granted) = (claim(), claim(), claim(), claim());
        ordered.ask(&given_up).place = listener();
        drop(ordered.ask(&unanswered));
        ordered.ask(&asked_again).place = listener();
        ordered.ask(&granted).granted();
        tokio::time::advance(PLACE + Duration::from_millis(1)).await;
        assert!(ordered.ask(&asked_again).place.is_some());
        let (under_way, others) = (claim(), (0..GROWTH).map(|_| claim()).collect::<Vec<_>>());
        let call = ordered.ask(&under_way);
        others.iter().for_each(|other| drop(ordered.ask(other)));
        let kept = [&given_up, &unanswered, &asked_again, &granted, &under_way].map(|claim| ordered.has(claim));
        assert_eq!(kept, [false, false, true, true, true]);
        assert!(others.iter().all(|other| ordered.has(other)));
        drop(call);
        // The node, and who waits there.
        assert_eq!(Arc::strong_count(&node), 2, "listens for what was given up");
        tokio::time::advance(PLACE + Duration::from_millis(1)).await;
        let more: Vec<_> = (0..GROWTH).map(|_| claim()).collect();
        more.iter().for_each(|other| drop(ordered.ask(other)));
        assert!(!others.iter().chain([&asked_again, &under_way]).any(|other| ordered.has(other)));
        assert_eq!(Arc::strong_count(&node), 1);
    }
}
