//! Renewal: one task per `Locker` over a timer queue, and few requests for many leases.
//!
//! What is due, and what an alarm is about, waits in [lanes](super::lanes) for one of a few calls. Each answer counts when it
//! comes, also if it comes late.

use std::{
    collections::{BTreeMap, HashSet},
    mem,
    sync::{Arc, Mutex, Weak},
    time::Duration,
};

use tokio::{
    runtime::Handle,
    sync::{Mutex as AsyncMutex, Notify},
    task::yield_now,
    time::{sleep, timeout},
};

use super::{
    Engine, Lease,
    backoff::random,
    lanes::LaneId,
    lease::{LeaseState, LeaseStatus, renewal_timeout},
};
use crate::{
    Alarm, Error, ErrorKind, Event, LossReason, Moment, Renewal, Renewed, Result,
    alarm::{Alarmed, Alarms},
    store::{Sent, renew_one, unpoisoned},
};

/// The longest sleep of the timer task. Its sleep stands still while the machine is suspended, the deadlines do not:
/// so long after waking up it may take to notice.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);
/// How many due leases are looked at before other tasks of the runtime have their turn.
const TURN: usize = 1024;

/// The leases of one `Locker`, by the moment at which each is next looked at.
#[derive(Debug)]
pub(super) struct Timers {
    queue: Mutex<RenewalQueue>,
    wake: Notify,
    /// What the task listens to. It outlives the task, so that nothing is missed between two of them.
    alarms: AsyncMutex<Option<Alarms>>,
}

#[derive(Debug, Default)]
struct RenewalQueue {
    leases: BTreeMap<(Moment, u64), Arc<Lease>>,
    /// Until when the task sleeps; `None` while it is awake or waits for a first lease.
    asleep_until: Option<Moment>,
    /// Whether there was nothing to do for a while.
    quiet: bool,
}

impl Timers {
    pub(super) fn new(alarm: Option<&Alarm>) -> Self {
        Self { queue: Mutex::default(), wake: Notify::new(), alarms: AsyncMutex::new(alarm.map(Alarm::listen)) }
    }

    pub(super) fn remove(&self, lease: &Lease, state: &LeaseState) {
        unpoisoned(&self.queue).leases.remove(&(state.next_event, lease.id));
    }

    /// Has the task look again: it ends once it finds its engine gone.
    pub(super) fn wake(&self) {
        self.wake.notify_one();
    }

    /// The runtimes on which the leases were taken.
    pub(super) fn runtimes(&self) -> Vec<Handle> {
        let mut seen = HashSet::new();
        let queue = unpoisoned(&self.queue);
        let runtimes = queue.leases.values().flat_map(|lease| lease.runtimes());
        runtimes.filter(|runtime| seen.insert(runtime.id())).cloned().collect()
    }

    /// Moves a lease to the moment at which it is to be looked at.
    fn plan(&self, lease: &Arc<Lease>, state: &mut LeaseState, at: Moment) {
        let mut queue = unpoisoned(&self.queue);
        queue.leases.remove(&(state.next_event, lease.id));
        state.next_event = at;
        queue.quiet = false;
        queue.leases.insert((at, lease.id), Arc::clone(lease));
        if queue.asleep_until.is_some_and(|until| at < until) {
            queue.asleep_until = None;
            drop(queue);
            self.wake.notify_one();
        }
    }

    /// The leases that an alarm is about.
    fn alarmed(&self, alarmed: &Alarmed) -> Vec<Arc<Lease>> {
        let is_meant = |lease: &&Arc<Lease>| match alarmed {
            Alarmed::All => true,
            Alarmed::These(tokens) => tokens.contains(&lease.claim.token),
        };
        unpoisoned(&self.queue).leases.values().filter(is_meant).cloned().collect()
    }

    /// Takes out some of what is due, or says when something will be.
    fn take_due(&self, now: Moment) -> Result<Vec<Arc<Lease>>, Moment> {
        let mut queue = unpoisoned(&self.queue);
        let mut due = Vec::new();
        while due.len() < TURN
            && let Some(first) = queue.leases.first_entry()
            && first.key().0 <= now
        {
            due.push(first.remove());
        }
        if !due.is_empty() {
            return Ok(due);
        }
        // An empty queue is given one more look before the task goes to sleep for good: waking it for each lease of a
        // loop that takes and releases one lock would cost more than the lease.
        let until = match queue.leases.first_key_value() {
            Some(((at, _), _)) => (*at).min(now + LONGEST_SLEEP),
            None if queue.quiet => now + Duration::MAX,
            None => now + LONGEST_SLEEP,
        };
        queue.quiet = queue.leases.is_empty();
        queue.asleep_until = Some(until);
        Err(until)
    }
}

impl Engine {
    /// Puts a lease under the care of the timer task, which is started if need be.
    pub(super) fn register(self: &Arc<Self>, lease: &Arc<Lease>, now: Moment) {
        let mut state = lease.state();
        let at = state.schedule(lease.terms.renew, lease.ttl, now, random());
        self.timers.plan(lease, &mut state, at);
        drop(state);
        // Has the task started if it does not run yet.
        drop(self.home());
    }

    /// Looks after what is due; says until when nothing will be, or `None` if there may be more.
    fn serve(self: &Arc<Self>) -> Option<Moment> {
        self.adopt_work();
        let now = self.now();
        let due = match self.timers.take_due(now) {
            Ok(due) => due,
            Err(until) => {
                // Not before all that is due waits, so that the most urgent of all goes first.
                self.renew_waiting();
                return Some(until);
            }
        };
        let mut to_renew = Vec::new();
        for lease in due {
            let mut state = lease.state();
            if let Some(reason) = state.look(now) {
                drop(state);
                self.after_loss(&lease, reason);
            } else if state.is_live() {
                let deadline = state.deadline();
                self.timers.plan(&lease, &mut state, deadline);
                drop(state);
                if lease.terms.renew {
                    to_renew.push(lease);
                }
            }
        }
        self.lanes.add(to_renew);
        None
    }

    /// Asks about leases of which the store said that something may have happened to them.
    fn verify(self: &Arc<Self>, alarmed: &Alarmed) {
        self.lanes.add(self.timers.alarmed(alarmed));
        self.renew_waiting();
    }

    /// Makes as many calls as there may be at a time. Called by tasks at home.
    fn renew_waiting(self: &Arc<Self>) {
        for (lane, leases) in self.lanes.take() {
            tokio::spawn(RenewalCall { engine: Arc::clone(self), lane: Some(lane), leases }.work());
        }
    }

    /// Draws the consequences of an answer. A lease that is not to be renewed by itself, and is asked about all the same, lasts
    /// no longer for that.
    fn answered(self: &Arc<Self>, lease: &Arc<Lease>, sent: Moment, answer: Result<Renewed>) {
        let answer = self.heard(answer);
        if lease.terms.renew || matches!(answer, Ok(Renewed::Lost(_))) {
            drop(self.apply(lease, sent, answer));
        }
    }

    fn failed(self: &Arc<Self>, leases: &[Arc<Lease>], error: &Error) {
        for lease in leases {
            let error = error.clone().at("renew", Some(&lease.claim.key), &self.store.info().name);
            self.answered(lease, self.now(), Err(error));
        }
    }

    /// Renews one lease now, which also shows the count of nested holds in the store.
    ///
    /// `Ok(Some(_))` if it turned out to be lost.
    pub(crate) async fn renew_now(self: &Arc<Self>, lease: &Arc<Lease>) -> Result<Option<LossReason>> {
        // It may have ended, and with it the renewals of this lease.
        drop(self.home());
        let sent = self.now();
        let answer = renew_one(&*self.store, renewal(lease)).await;
        self.apply(lease, sent, self.heard(answer))
    }

    fn apply(
        self: &Arc<Self>,
        lease: &Arc<Lease>,
        sent: Moment,
        answer: Result<Renewed>,
    ) -> Result<Option<LossReason>> {
        let now = self.now();
        let mut state = lease.state();
        match answer {
            Ok(Renewed::Held(hold)) => {
                let margin = state.deadline().since(now);
                state.extend(self.believed(hold, lease.terms.ttl, sent).until, now);
                if state.is_live() {
                    let at = state.schedule(lease.terms.renew, lease.ttl, now, random());
                    self.timers.plan(lease, &mut state, at);
                }
                drop(state);
                self.observe(|| Event::Renewed { key: &lease.claim.key, margin });
                Ok(None)
            }
            // The release of the last hold has overtaken what was asked for another one, which was held until then.
            Ok(Renewed::Lost(reason)) if state.status() == LeaseStatus::Released => {
                drop(state);
                self.lose_successor(lease, reason);
                Ok(None)
            }
            Ok(Renewed::Lost(reason)) => {
                let news = state.lose(reason);
                drop(state);
                if news {
                    self.after_loss(lease, reason);
                }
                Ok(Some(reason))
            }
            Err(error) => {
                if let Some(at) = state.doubt(lease.ttl, now) {
                    let at = if lease.terms.renew { at } else { state.deadline() };
                    self.timers.plan(lease, &mut state, at);
                    let left = state.deadline().since(now);
                    drop(state);
                    self.observe(|| Event::RenewalFailed { key: &lease.claim.key, error: &error, left });
                }
                Err(error)
            }
        }
    }

    /// The store said that a lease is lost which has gone on to the next holder meanwhile: then that one has nothing.
    fn lose_successor(self: &Arc<Self>, former: &Lease, reason: LossReason) {
        let mut last = former.id;
        loop {
            let next = self.queues.look(&former.claim.key, |queue| queue.held()).flatten();
            let Some(next) = next.filter(|next| next.claim == former.claim && next.id != last) else { return };
            let news = next.state().lose(reason);
            if news {
                return self.after_loss(&next, reason);
            }
            // If it was handed on since the look, the next look finds the one that has it.
            last = next.id;
        }
    }
}

fn renewal(lease: &Lease) -> Renewal {
    Renewal {
        claim: lease.claim.clone(),
        ttl: lease.terms.ttl,
        depth: lease.state().depth,
        fence_floor: None,
        holder: None,
    }
}

/// Leases that a call is about. If the call ends with its task, they are in doubt.
struct RenewalCall {
    engine: Arc<Engine>,
    /// Where it counts as under way.
    lane: Option<LaneId>,
    leases: Vec<Arc<Lease>>,
}

impl RenewalCall {
    /// Asks the store, and goes on with the next batch of the lane as long as there is one.
    async fn work(mut self) {
        loop {
            self.call().await;
            let Some(lane) = self.lane else { return };
            match self.engine.lanes.next(lane) {
                Some(leases) => self.leases = leases,
                None => {
                    self.lane = None;
                    return;
                }
            }
        }
    }

    /// Renews the leases with one call.
    async fn call(&mut self) {
        let store = Arc::clone(&self.engine.store);
        let renewals: Vec<_> = self.leases.iter().map(|lease| renewal(lease)).collect();
        let limit = self.leases.iter().map(|lease| renewal_timeout(lease.ttl)).min().unwrap_or_default();
        let sent = self.engine.now();
        let mut call = store.renew(&renewals);
        if let Ok(answers) = timeout(limit, &mut call).await {
            let mut answers = answers.into_iter();
            for lease in mem::take(&mut self.leases) {
                self.engine.answered(&lease, sent, answers.next().unwrap_or_else(|| Err(Error::unanswered())));
            }
            return;
        }
        // The others of the lane must not wait for it; but should an answer come after all, it is as good as any.
        let leases = mem::take(&mut self.leases);
        let late = Error::no_answer(limit, Sent::Yes);
        self.engine.failed(&leases, &late);
        self.leave();
        let deadline = leases.iter().map(|lease| lease.state().deadline()).max();
        let left = deadline.map(|deadline| deadline.since(self.engine.now())).unwrap_or_default();
        for (lease, answer) in leases.iter().zip(timeout(left, call).await.unwrap_or_default()) {
            // An error says nothing new, and may be older than another answer.
            if let answer @ Ok(_) = self.engine.heard(answer) {
                self.engine.answered(lease, sent, answer);
            }
        }
    }

    /// Makes room in the lane for another call.
    fn leave(&mut self) {
        if let Some(lane) = self.lane.take() {
            self.engine.lanes.leave(lane);
            self.engine.renew_waiting();
        }
    }
}

impl Drop for RenewalCall {
    fn drop(&mut self) {
        if let Some(lane) = self.lane.take() {
            self.engine.lanes.leave(lane);
        }
        let broken_off = Error::new(ErrorKind::Unavailable, "the renewal was broken off").unknown_effect();
        self.engine.failed(&mem::take(&mut self.leases), &broken_off);
    }
}

/// Does what is due. It holds the engine only while it works.
pub(super) async fn serve_timers(timers: &Timers, engine: &Weak<Engine>) {
    let mut alarms = timers.alarms.lock().await;
    loop {
        let pause = {
            let Some(engine) = engine.upgrade() else { return };
            engine.serve().map(|until| until.since(engine.now()))
        };
        let Some(pause) = pause else {
            yield_now().await;
            continue;
        };
        let alarm = async {
            match &mut *alarms {
                Some(alarms) => alarms.next().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = sleep(pause) => {}
            () = timers.wake.notified() => {}
            alarmed = alarm => {
                let Some(engine) = engine.upgrade() else { return };
                engine.verify(&alarmed);
            }
        }
    }
}
