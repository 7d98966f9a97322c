//! The end of named locks whose holders do not release them: a lease may be left at the store for another process, or end with the
//! runtime that was to release it. Other clients would wait for the named lock, and not for the row.

use std::{
    mem,
    sync::{Arc, Weak},
};

use lockkit_core::{Renewal, store::unpoisoned};
use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};

use crate::store::named_lock_queue::{NamedLockQueues, QueueState, end_of_lease};

impl NamedLockQueues {
    /// Takes note of leases that were extended.
    pub(crate) fn extended<'a>(&self, renewals: impl Iterator<Item = &'a Renewal>) {
        let mut known = unpoisoned(&self.known);
        if known.watch.is_none() {
            // No lease ever had a named lock.
            return;
        }
        for Renewal { claim, ttl, .. } in renewals {
            if let Some(queue) = known.queues.get_mut(&claim.key)
                && let QueueState::Held(_, holder, until) = &mut queue.state
                && *holder == claim.token
            {
                *until = end_of_lease(*ttl);
            }
        }
    }

    /// Starts the tasks that release the named locks of leases that have ended, unless there are some. They end when there are no such
    /// named locks any more. On a lock that is taken and released all the time they sleep.
    pub(super) fn watch(self: &Arc<Self>) {
        let is_watched = mem::replace(&mut unpoisoned(&self.known).watched, true);
        if !is_watched {
            let (watch, ended) = watch::channel(());
            // Those that were started before end, if there are any left.
            unpoisoned(&self.known).watch = Some(watch);
            // A runtime that is about to end drops its own at once.
            self.spawn_on_both(|| Watch(Arc::downgrade(self)).run(ended.clone()));
        }
    }

    /// Releases the named locks of leases that have ended. Tells when the next one does.
    fn end_lapsed(&self) -> Option<Instant> {
        let (mut lapsed, mut next) = (Vec::new(), None::<Instant>);
        let mut known = unpoisoned(&self.known);
        let now = Instant::now();
        for queue in known.queues.values_mut() {
            let QueueState::Held(_, _, until) = &queue.state else { continue };
            if *until > now {
                next = Some(next.map_or(*until, |next| next.min(*until)));
            } else if let QueueState::Held(named_lock, ..) = mem::replace(&mut queue.state, QueueState::Unused) {
                lapsed.push(named_lock);
            }
        }
        // In one step with the look: a lease that gets a named lock from now on starts a new task.
        known.watched = next.is_some();
        drop(known);
        for named_lock in lapsed {
            named_lock.release();
        }
        next
    }
}

/// What such a task knows. It does not keep the queues, which end with their store.
struct Watch(Weak<NamedLockQueues>);

impl Watch {
    async fn run(mut self, mut ended: watch::Receiver<()>) {
        while let Some(next) = self.next_end() {
            tokio::select! {
                () = sleep_until(next) => {}
                _ = ended.changed() => {
                    // Others have taken over, or the store is gone.
                    self.0 = Weak::new();
                    return;
                }
            }
        }
    }

    fn next_end(&mut self) -> Option<Instant> {
        let next = self.0.upgrade()?.end_lapsed();
        if next.is_none() {
            // Another task may have been started since.
            self.0 = Weak::new();
        }
        next
    }
}

impl Drop for Watch {
    /// The task may end with its runtime. Then the next lease with a named lock starts others.
    fn drop(&mut self) {
        if let Some(queues) = self.0.upgrade() {
            unpoisoned(&queues.known).watched = false;
        }
    }
}
