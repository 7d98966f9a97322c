//! The end of named locks that nobody releases: a lease may be left at the store for another process, or end with the
//! runtime that was to release it, and the next attempt may not come. Other clients would wait for the named lock, and not for the row.

use std::sync::{Arc, Weak};

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
            // There never was a named lock.
            return;
        }
        for Renewal { claim, ttl, .. } in renewals {
            if let Some(queue) = known.queues.get_mut(&claim.key)
                && let QueueState::Has(_, Some(holder), until) = &mut queue.state
                && *holder == claim.token
            {
                *until = end_of_lease(*ttl);
            }
        }
    }

    /// Has the tasks look at this moment, or before, that release the named locks whose time is over. They end when there are no named
    /// locks any more. On a lock that is taken and released all the time they sleep.
    pub(super) fn watch(self: &Arc<Self>, until: Instant) {
        let mut known = unpoisoned(&self.known);
        // Tasks that should have looked before now, and have not, are on runtimes that nobody drives.
        let watched = known.watched.replace(until).filter(|watched| *watched > Instant::now());
        let Some(watched) = watched else {
            let (watch, again) = watch::channel(());
            // Those that were started before end, if there are any left.
            known.watch = Some(watch);
            drop(known);
            // A runtime that is about to end drops its own at once.
            return self.spawn_on_both(|| Watch(Arc::downgrade(self)).run(again.clone()));
        };
        if watched <= until {
            known.watched = Some(watched);
        } else {
            known.watch.iter().for_each(|watch| watch.send_replace(()));
        }
    }

    /// Releases the named locks whose time is over. Tells when the next one's is.
    fn end_lapsed(&self) -> Option<Instant> {
        let (mut lapsed, mut next) = (Vec::new(), None::<Instant>);
        let mut known = unpoisoned(&self.known);
        let now = Instant::now();
        for queue in known.queues.values_mut() {
            let QueueState::Has(_, _, until) = queue.state else { continue };
            if until > now {
                next = Some(next.map_or(until, |next| next.min(until)));
            } else {
                lapsed.extend(queue.give_up());
            }
        }
        // In one step with the look: a named lock that is kept from now on starts a new task, or has this one look again.
        known.watched = next;
        drop(known);
        drop(lapsed);
        next
    }
}

/// What such a task knows. It does not keep the queues, which end with their store.
struct Watch(Weak<NamedLockQueues>);

impl Watch {
    async fn run(mut self, mut again: watch::Receiver<()>) {
        while let Some(next) = self.next_end() {
            tokio::select! {
                () = sleep_until(next) => {}
                told = again.changed() => if told.is_err() {
                    // Others have taken over, or the store is gone.
                    self.0 = Weak::new();
                    return;
                },
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
    /// The task may end with its runtime. Then the next named lock that is kept starts others.
    fn drop(&mut self) {
        if let Some(queues) = self.0.upgrade() {
            unpoisoned(&queues.known).watched = None;
        }
    }
}
