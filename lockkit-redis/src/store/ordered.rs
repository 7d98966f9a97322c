//! The claims that were asked for in an order, and where they listen while they wait.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use lockkit_core::{Claim, Mode, Token, store::unpoisoned};
use tokio::time::Instant;

use crate::client::{node::Node, subscriptions::Interest};

/// For how long a claim keeps its place that does not ask again.
pub(super) const PLACE: Duration = Duration::from_secs(6);

/// How many claims are remembered at most. Beyond that, those that have the lock are forgotten: they are released as if they had been
/// asked for in no order, and the next waiter hears of that on the channel of the lock.
const REMEMBERED: usize = 10_000;

/// By how many more claims there have to be before those are looked for that nobody will ask for any more.
const GROWTH: usize = 1024;

/// The claims that were asked for in an order, and where they wait.
#[derive(Default)]
pub(crate) struct Ordered {
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    claims: HashMap<Token, Stage>,
    /// The fewest claims since the last look for those that nobody asks for any more.
    fewest: usize,
}

/// How far a claim is.
enum Stage {
    /// A call is under way.
    Asked,
    /// No call is under way since then. It may have a place, and have been granted the lock.
    Waits { place: Option<QueueListener>, since: Instant },
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
        let mut table = unpoisoned(&self.table);
        if table.claims.len() >= REMEMBERED {
            table.claims.retain(|_, stage| !matches!(stage, Stage::Done));
        }
        let before = table.claims.insert(claim.token, Stage::Asked);
        let abandoned = table.take_abandoned();
        drop(table);
        // Their channels are given up after the lock on the table.
        drop(abandoned);
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

    pub(super) fn forget(&self, token: &Token) {
        let left = unpoisoned(&self.table).claims.remove(token);
        drop(left);
    }
}

impl Table {
    /// Takes the claims out whose places are over, once there are many more than before: they were given up, and their release
    /// may never be asked for.
    fn take_abandoned(&mut self) -> Vec<Stage> {
        self.fewest = self.fewest.min(self.claims.len());
        if self.claims.len() < self.fewest + GROWTH {
            return Vec::new();
        }
        let abandoned = self.claims.extract_if(|_, stage| stage.is_abandoned()).map(|(_, stage)| stage).collect();
        self.fewest = self.claims.len();
        abandoned
    }
}

impl Stage {
    fn is_abandoned(&self) -> bool {
        matches!(self, Self::Waits { since, .. } if since.elapsed() > PLACE)
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

#[cfg(test)]
mod tests {
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
        let node = Arc::new(Node::new(&config, NoteKey::default(), None));
        let listener = || Some(QueueListener::new(Arc::clone(&node), Token::random().expect("token").reveal(), None));
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
