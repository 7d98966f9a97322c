//! Knowing without asking that nobody else is in the queue of a lock.
//!
//! To see whether a new node is first its creator lists the queue: a second request. A process that takes the same lock
//! again and again without contention can do without it: it takes 1.4 times as many locks then by one task, 1.5 times by 64 (figures in
//! `docs/backends/zookeeper.md`).
//!
//! The sequence number of a node is the count of all children ever made in its directory, whatever they are called and
//! whichever client made them. So if
//!
//! 1. node `n` of ours was alone in the directory when it had been made, and
//! 2. we deleted it, which was acknowledged, and
//! 3. the next node of ours has the number `n + 1`, and
//! 4. the directory is still the same one, so that the count did not start over,
//!
//! then nobody has made a node in between, and the new one is alone. For (4) there is a watch on the directory, set when
//! it was surely older than node `n`: the servers tell of its end **before** they answer any request that they handled
//! later, and the driver passes on both in that order (ZooKeeper Programmer's Guide, "What ZooKeeper Guarantees about
//! Watches"). As long as the watch is silent when the answer to the creation is there, nothing happened to the directory
//! before it. A watch also tells of what happened while the connection was lost.
//!
//! What else there may be in the directory has no number, and no watch tells of it: the fence record, and how long the lock is kept. So
//! whoever writes one of them forgets the lock first. (Its own node stands meanwhile, so that nobody finds a list of one node.)

use std::{collections::HashMap, future::Future, pin::Pin};

use crate::client::watched::is_ready;

/// How many locks are remembered. Each has a watch.
const LOCKS: usize = 1024;

/// How often in a row a lock has to be found free of others before the list is spared.
const STREAK: u32 = 2;

/// Ends when something happened to a lock's directory.
pub(crate) type Watch = Pin<Box<dyn Future<Output = ()> + Send>>;

/// What is remembered of the locks that this session took without contention.
#[derive(Default)]
pub(crate) struct Uncontended {
    locks: HashMap<String, Last>,
}

/// The last node of ours in a lock's directory.
struct Last {
    sequence: i64,
    /// Whether its deletion was acknowledged.
    deleted: bool,
    /// How often in a row nobody else had made a node.
    streak: u32,
    watch: Option<Watch>,
}

/// What to ask for together with the creation of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum QueueRequest {
    /// The queue.
    List,
    /// The queue, and a watch on the directory, because the list may be spared soon.
    ListAndWatch,
    /// Nothing: most likely it will turn out to be alone.
    Nothing,
}

impl Uncontended {
    /// What to ask for when a node is made in `lock`.
    pub(crate) fn ask(&mut self, lock: &str) -> QueueRequest {
        match self.locks.get_mut(lock) {
            Some(last) if last.deleted && last.streak >= STREAK => {
                if last.is_watched() {
                    QueueRequest::Nothing
                } else {
                    QueueRequest::ListAndWatch
                }
            }
            _ => QueueRequest::List,
        }
    }

    /// Whether node `sequence`, whose creation was answered just now, is surely alone.
    pub(crate) fn confirm(&mut self, lock: &str, sequence: i64) -> bool {
        let Some(last) = self.locks.get_mut(lock) else { return false };
        let alone = last.deleted && sequence == last.sequence + 1 && last.is_watched();
        if alone {
            (last.sequence, last.deleted) = (sequence, false);
        } else {
            self.locks.remove(lock);
        }
        alone
    }

    /// Takes note that node `sequence` was seen to be alone, and of the watch that was set, if one was.
    pub(crate) fn seen(&mut self, lock: &str, sequence: i64, watch: Option<Watch>) {
        if let Some(last) = self.locks.get_mut(lock) {
            let next = last.deleted && sequence == last.sequence + 1;
            last.streak = if next { last.streak.saturating_add(1) } else { 0 };
            (last.sequence, last.deleted) = (sequence, false);
            last.watch = watch;
            return;
        }
        if self.locks.len() >= LOCKS {
            // Those that were worth remembering come back.
            self.locks.clear();
        }
        self.locks.insert(lock.to_owned(), Last { sequence, deleted: false, streak: 0, watch });
    }

    /// Takes note that there is or may be somebody else in the queue.
    pub(crate) fn forget(&mut self, lock: &str) {
        self.locks.remove(lock);
    }

    /// Takes note that the deletion of node `sequence` was acknowledged.
    pub(crate) fn deleted(&mut self, lock: &str, sequence: i64) {
        if let Some(last) = self.locks.get_mut(lock)
            && last.sequence == sequence
        {
            last.deleted = true;
        }
    }
}

impl Last {
    /// Whether there is a watch, and it is silent up to now. One that has spoken must not be asked again.
    fn is_watched(&mut self) -> bool {
        let silent = self.watch.as_mut().is_some_and(|watch| !is_ready(watch));
        if !silent {
            self.watch = None;
        }
        silent
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;

    fn watch() -> (oneshot::Sender<()>, Watch) {
        let (event, watch) = oneshot::channel();
        (event, Box::pin(async move { _ = watch.await }))
    }

    /// Takes and releases without contention until the list is spared; the event of the watch is returned.
    fn warm(alone: &mut Uncontended) -> oneshot::Sender<()> {
        for sequence in 0..=2 {
            assert_eq!(alone.ask("l"), QueueRequest::List);
            alone.seen("l", sequence, None);
            alone.deleted("l", sequence);
        }
        assert_eq!(alone.ask("l"), QueueRequest::ListAndWatch);
        let (event, watch) = watch();
        alone.seen("l", 3, Some(watch));
        alone.deleted("l", 3);
        assert_eq!(alone.ask("l"), QueueRequest::Nothing);
        event
    }

    #[test]
    fn the_next_number_is_alone() {
        let mut alone = Uncontended::default();
        let _event = warm(&mut alone);
        for sequence in 4..10 {
            assert_eq!(alone.ask("l"), QueueRequest::Nothing);
            assert!(alone.confirm("l", sequence));
            assert_ne!(alone.ask("l"), QueueRequest::Nothing, "its node is still there");
            alone.deleted("l", sequence);
        }
        assert_eq!(alone.ask("other"), QueueRequest::List);
    }

    #[test]
    fn a_gap_a_twin_and_a_node_that_may_be_there_are_not() {
        let mut alone = Uncontended::default();
        let _event = warm(&mut alone);
        assert!(!alone.confirm("l", 5), "somebody made node 4");
        assert!(!alone.confirm("l", 6), "nothing is known any more");

        let mut alone = Uncontended::default();
        let _event = warm(&mut alone);
        assert!(alone.confirm("l", 4));
        assert!(!alone.confirm("l", 5), "node 4 was not deleted");

        let mut alone = Uncontended::default();
        let _event = warm(&mut alone);
        assert!(alone.confirm("l", 4));
        alone.deleted("l", 3);
        assert!(!alone.confirm("l", 5), "it was another node's deletion");
    }

    #[test]
    fn a_new_directory_is_not() {
        let mut alone = Uncontended::default();
        let event = warm(&mut alone);
        drop(event);
        assert!(!alone.confirm("l", 4), "the count may have started over");

        let mut alone = Uncontended::default();
        let event = warm(&mut alone);
        drop(event);
        assert_eq!(alone.ask("l"), QueueRequest::ListAndWatch);

        let mut alone = Uncontended::default();
        for sequence in 0..=3 {
            alone.seen("l", sequence, None);
            alone.deleted("l", sequence);
        }
        assert!(!alone.confirm("l", 4), "nobody watches");
    }

    #[test]
    fn contention_ends_a_streak() {
        let mut alone = Uncontended::default();
        let _event = warm(&mut alone);
        alone.forget("l");
        assert_eq!(alone.ask("l"), QueueRequest::List);
        for sequence in [10, 12, 14, 16, 18] {
            alone.seen("l", sequence, None);
            alone.deleted("l", sequence);
        }
        assert_eq!(alone.ask("l"), QueueRequest::List, "somebody else takes it in between");
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let mut alone = Uncontended::default();
        for lock in 0..5000 {
            alone.seen(&lock.to_string(), 1, None);
        }
        assert!(alone.locks.len() <= LOCKS);
    }
}
