//! The machinery behind `Locker`, written once for all stores: the local queue, waiting, renewal, the reaper.
//!
//! Ownership runs one way: guards and tasks hold the engine; the engine holds leases; a lease holds its seat in the
//! local queue. The timer task holds the engine only while it works, so that the last guard and the last `Locker`
//! take everything with them. All tasks run at [home](home), on one runtime.

mod ask;
mod backlog;
mod backoff;
mod doubts;
mod hand_over;
mod home;
mod keep;
mod lanes;
mod lease;
mod local;
mod nest;
mod outstanding;
mod poll;
mod queue;
mod reaper;
mod release;
mod renew;
mod resume;
mod seat;
mod turn;
mod wait;

use std::{
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::sync::Notify;

pub use self::hand_over::HandOver;
pub(crate) use self::{
    ask::{Ask, Limit, Terms},
    doubts::Doubts,
    home::Home,
    lease::{Lease, LeaseStatus},
    outstanding::BackgroundTask,
};
use self::{
    backlog::Backlog, lanes::Lanes, local::LocalQueues, outstanding::Outstanding, poll::Poller, renew::Timers,
    seat::Seat,
};
use crate::{
    AcquireRequest, Attempt, Error, ErrorKind, Event, Hold, HolderInfo, Liveness, LockStore, Moment, Observer, Result,
    drift,
};

/// What a `Locker` can be told once, for all its locks.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) holder: HolderInfo,
    pub(crate) hand_over: HandOver,
    pub(crate) patience: Duration,
    pub(crate) observer: Option<Arc<dyn Observer>>,
}

/// The machinery of one `Locker`.
pub(crate) struct Engine {
    pub(crate) store: Arc<dyn LockStore>,
    pub(crate) settings: Settings,
    queues: Arc<LocalQueues>,
    home: Home,
    timers: Arc<Timers>,
    lanes: Lanes,
    poller: Poller,
    outstanding: Outstanding,
    backlog: Backlog,
    failures: AtomicU64,
    closed: AtomicBool,
    closing: Notify,
}

impl Engine {
    pub(crate) fn new(store: Arc<dyn LockStore>, settings: Settings, home: Home) -> Arc<Self> {
        let timers = Arc::new(Timers::new(store.info().alarm.as_ref()));
        let queues = LocalQueues::new(Arc::clone(&store.info().clock));
        Arc::new(Self {
            store,
            settings,
            queues,
            home,
            timers,
            lanes: Lanes::default(),
            poller: Poller::default(),
            outstanding: Outstanding::default(),
            backlog: Backlog::default(),
            failures: AtomicU64::new(0),
            closed: AtomicBool::new(false),
            closing: Notify::new(),
        })
    }

    pub(crate) fn now(&self) -> Moment {
        self.store.info().clock.now()
    }

    /// Takes note of an answer of the store. After an error the store may have replaced its connection: what is sent from
    /// then on may arrive before what was sent earlier.
    pub(crate) fn heard<T>(&self, answer: Result<T>) -> Result<T> {
        if answer.is_err() {
            self.failures.fetch_add(1, Ordering::SeqCst);
        }
        answer
    }

    /// Changes whenever the store may have replaced a connection: the errors that were heard here, and the store's own count.
    fn failures(&self) -> u64 {
        self.failures.load(Ordering::SeqCst).wrapping_add(self.store.info().reconnections.count())
    }

    /// Refuses to go on after a shutdown. A caller that is about to send something has to be counted as
    /// [outstanding](Outstanding) first: then either this sees the shutdown, or the shutdown sees and waits for it.
    pub(crate) fn check_open(&self) -> Result<()> {
        if self.closed.load(Ordering::SeqCst) {
            return Err(closed());
        }
        Ok(())
    }

    /// Refuses new acquisitions and ends those under way, then waits until every release under way is done.
    pub(crate) async fn shutdown(self: &Arc<Self>, timeout: Duration) -> Result<()> {
        self.closed.store(true, Ordering::SeqCst);
        self.closing.notify_waiters();
        let drained = async {
            loop {
                self.adopt_work();
                self.outstanding.drained().await;
                // A release whose runtime has ended meanwhile lies there, or is being taken over.
                if !self.backlog.has_left() && self.outstanding.count() == 0 {
                    return;
                }
                // A runtime that is ending gives back at once what it is given.
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(timeout, drained).await.map_err(|_| {
            let left = self.outstanding.count();
            Error::new(ErrorKind::TimedOut, format!("{left} releases were still under way after {timeout:?}"))
                .unknown_effect()
        })
    }

    /// Checks what is believed of a lease, and carries out a loss that only this look revealed.
    pub(crate) fn look(self: &Arc<Self>, lease: &Arc<Lease>) -> LeaseStatus {
        let mut state = lease.state();
        let lost = state.look(self.now());
        let status = state.status();
        drop(state);
        if let Some(reason) = lost {
            self.after_loss(lease, reason);
        }
        status
    }

    /// Makes a grant a lease of this process. A seat that is not in force any more is left behind.
    fn admit(self: &Arc<Self>, hold: Hold, terms: Terms, seat: Option<Seat>) -> Arc<Lease> {
        let now = self.now();
        let mut seat = seat.filter(|seat| self.queues.at(seat, |_, _| ()).is_some());
        if let Some(seat) = &mut seat {
            seat.granted = Some(now);
        }
        let left = hold.until.since(now);
        let ttl = match &self.store.info().capability.liveness {
            Liveness { session: None, .. } => terms.ttl,
            Liveness { ttl: Some(_), .. } => left.min(terms.ttl),
            Liveness { ttl: None, .. } => left,
        };
        let lease = Arc::new(Lease::new(self.queues.number(), hold, terms, ttl, now, seat));
        if let Some(seat) = &lease.state().seat {
            self.queues.at(seat, |queue, _| queue.holds(Arc::downgrade(&lease)));
        }
        self.register(&lease, now);
        lease
    }

    /// A lease with this ttl as this process believes in it: belief ends before the store's lease, by the [drift](drift) of clocks. The drift is
    /// that of the whole lease, from when the request was `sent`, for little of the lease may be left when the answer comes. Where leases
    /// have a session alone, the drift counts from now: the store has taken off what went before.
    fn believed(&self, mut hold: Hold, ttl: Duration, sent: Moment) -> Hold {
        let from = if self.store.info().capability.liveness.ttl.is_some() { sent } else { self.now() };
        hold.until = hold.until - drift(hold.until.since(from).min(ttl));
        hold
    }

    /// What the store said of an acquisition.
    fn heard_of(&self, request: &AcquireRequest, sent: Moment, answer: Result<Attempt>) -> Result<Attempt> {
        self.heard(answer).map(|attempt| match attempt {
            Attempt::Granted(hold) => Attempt::Granted(self.believed(hold, request.ttl, sent)),
            Attempt::Contended(_) => attempt,
        })
    }

    /// A panic of the observer ends here: else a lease could be renewed for ever that nobody has.
    pub(crate) fn observe<'a>(&self, event: impl FnOnce() -> Event<'a>) {
        if let Some(observer) = &self.settings.observer {
            drop(catch_unwind(AssertUnwindSafe(|| observer.event(&event()))));
        }
    }
}

fn closed() -> Error {
    Error::new(ErrorKind::Closed, "the locker was shut down")
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.timers.wake();
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine").field("store", &self.store.info().name).finish_non_exhaustive()
    }
}
