//! Renewal: one task per `Locker` over a timer queue, and few requests for many leases.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{
    runtime::Handle,
    sync::Notify,
    task::AbortHandle,
    time::{sleep, timeout},
};

use super::{
    Engine, Lease,
    backoff::Random,
    lease::{Due, State, renewal_timeout},
};
use crate::{
    Alarm, Error, ErrorKind, Event, LossReason, Moment, Renewal, Renewed, Result,
    alarm::{Alarmed, Alarms},
};

/// The longest sleep of the timer task. Its sleep stands still while the machine is suspended, the deadlines do not:
/// so long after waking up it may take to notice.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);

/// The leases of one `Locker`, by the moment at which each is next looked at.
#[derive(Debug, Default)]
pub(super) struct Timers {
    queue: Mutex<Queue>,
    wake: Notify,
}

#[derive(Debug, Default)]
struct Queue {
    leases: BTreeMap<(Moment, u64), Arc<Lease>>,
    /// Until when the task sleeps; `None` while it is awake or waits for a first lease.
    asleep_until: Option<Moment>,
    /// Whether there was nothing to do for a while.
    quiet: bool,
    task: Option<(Handle, AbortHandle)>,
    random: Option<Random>,
    alarm: Option<Alarm>,
    /// What the first task listens to; from the beginning on, so that it misses nothing.
    alarms: Option<Alarms>,
}

impl Timers {
    pub(super) fn new(alarm: Option<&Alarm>) -> Self {
        let queue = Queue { alarm: alarm.cloned(), alarms: alarm.map(Alarm::listen), ..Queue::default() };
        Self { queue: Mutex::new(queue), wake: Notify::new() }
    }

    pub(super) fn remove(&self, lease: &Lease, state: &State) {
        self.queue().leases.remove(&(state.next_event, lease.id));
    }

    /// Ends the task once it finds its engine gone.
    pub(super) fn stop(&self) {
        self.wake.notify_one();
    }

    /// The runtime that the task runs on.
    pub(super) fn runtime(&self) -> Option<Handle> {
        self.queue().task.as_ref().map(|(runtime, _)| runtime.clone())
    }

    /// Moves a lease to the moment at which it is to be looked at.
    fn plan(&self, lease: &Arc<Lease>, state: &mut State, at: Moment) {
        let mut queue = self.queue();
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
        self.queue().leases.values().filter(is_meant).cloned().collect()
    }

    fn jitter(&self) -> u32 {
        self.queue().random.get_or_insert_with(Random::seeded).next()
    }

    /// Takes out what is due, or says when something will be.
    fn take_due(&self, now: Moment) -> Result<Vec<Arc<Lease>>, Moment> {
        let mut queue = self.queue();
        let later = queue.leases.split_off(&(now + Duration::from_nanos(1), 0));
        let due = std::mem::replace(&mut queue.leases, later);
        if !due.is_empty() {
            return Ok(due.into_values().collect());
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

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Engine {
    /// Puts a lease under the care of the timer task, which is started if need be.
    pub(super) fn register(self: &Arc<Self>, lease: &Arc<Lease>, now: Moment) {
        let jitter = self.timers.jitter();
        let mut state = lease.state();
        let at = state.schedule(lease.terms.renew, lease.ttl, now, jitter);
        self.timers.plan(lease, &mut state, at);
        drop(state);
        let mut queue = self.timers.queue();
        if queue.task.as_ref().is_none_or(|(_, task)| task.is_finished())
            && let Ok(runtime) = Handle::try_current()
        {
            self.watch_on(runtime, &mut queue);
        }
    }

    /// Starts the timer task; `false` if its runtime has ended.
    fn watch_on(self: &Arc<Self>, runtime: Handle, queue: &mut Queue) -> bool {
        let alarms = queue.alarms.take().or_else(|| queue.alarm.as_ref().map(Alarm::listen));
        let armed = Arc::new(AtomicBool::new(false));
        let watching = Watching { engine: Arc::downgrade(self), armed: Arc::clone(&armed) };
        let task = runtime.spawn(watch(Arc::clone(&self.timers), watching, alarms)).abort_handle();
        // A runtime that has ended has dropped the task by now. From here on it is the task that notices.
        armed.store(true, Ordering::SeqCst);
        let runs = !task.is_finished();
        queue.task = Some((runtime, task));
        runs
    }

    /// Starts the timer task anew where one of the leases was taken, after the runtime that it was on has ended.
    fn watch_elsewhere(self: &Arc<Self>) {
        let mut queue = self.timers.queue();
        let mut tried = Vec::new();
        loop {
            let mut runtimes = queue.leases.values().filter_map(|lease| lease.runtime.as_ref());
            let Some(runtime) = runtimes.find(|runtime| !tried.contains(&runtime.id())).cloned() else { return };
            tried.push(runtime.id());
            if self.watch_on(runtime, &mut queue) {
                return;
            }
        }
    }

    /// Looks after everything that is due; says until when nothing will be.
    fn serve(self: &Arc<Self>) -> Moment {
        loop {
            let now = self.now();
            let due = match self.timers.take_due(now) {
                Ok(due) => due,
                Err(until) => return until,
            };
            let mut to_renew = Vec::new();
            for lease in due {
                let mut state = lease.state();
                match state.due(&lease.terms, now) {
                    Due::Nothing => {}
                    Due::Later(at) => self.timers.plan(&lease, &mut state, at),
                    Due::Lost(reason) => {
                        drop(state);
                        self.after_loss(&lease, reason);
                    }
                    Due::Renew => {
                        // Should the task that renews it be lost, with its runtime or by a panic, another one is due.
                        let overdue = now + renewal_timeout(lease.ttl) * 2;
                        let at = overdue.min(state.deadline());
                        self.timers.plan(&lease, &mut state, at);
                        drop(state);
                        to_renew.push(lease);
                    }
                }
            }
            self.renew_together(to_renew);
        }
    }

    /// Asks about leases of which the store said that something may have happened to them.
    fn verify(self: &Arc<Self>, alarmed: &Alarmed) {
        let leases = self.timers.alarmed(alarmed);
        self.renew_together(leases);
    }

    /// Renews leases in the background.
    fn renew_together(self: &Arc<Self>, leases: Vec<Arc<Lease>>) {
        // Leases of a like ttl go together: a slow answer must not cost the short ones their deadline.
        let mut batches: BTreeMap<u32, Vec<Arc<Lease>>> = BTreeMap::new();
        for lease in leases {
            batches.entry(lease.ttl.as_millis().max(1).ilog2()).or_default().push(lease);
        }
        for leases in batches.into_values() {
            let engine = Arc::clone(self);
            tokio::spawn(async move { engine.renew(&leases).await });
        }
    }

    /// Renews leases with one call to the store and draws the consequences. One that is not to be renewed by itself, and
    /// is asked about all the same, lasts no longer for that.
    async fn renew(self: &Arc<Self>, leases: &[Arc<Lease>]) {
        let renewals: Vec<_> = leases.iter().map(|lease| renewal(lease)).collect();
        let limit = leases.iter().map(|lease| renewal_timeout(lease.ttl)).min().unwrap_or_default();
        match timeout(limit, self.store.renew(&renewals)).await {
            Ok(answers) => {
                for (lease, answer) in leases.iter().zip(answers) {
                    if lease.terms.renew || matches!(answer, Ok(Renewed::Lost(_))) {
                        drop(self.apply(lease, answer));
                    }
                }
            }
            Err(_) => {
                let error = Error::new(ErrorKind::TimedOut, format!("no answer in {limit:?}")).unknown_effect();
                for lease in leases {
                    drop(self.apply(lease, Err(error.clone())));
                }
            }
        }
    }

    /// Renews one lease now.
    ///
    /// `Ok(Some(_))` if it turned out to be lost.
    pub(crate) async fn renew_now(self: &Arc<Self>, lease: &Arc<Lease>) -> Result<Option<LossReason>> {
        let answer = self.store.renew(&[renewal(lease)]).await.pop();
        let answer = answer
            .unwrap_or_else(|| Err(Error::new(ErrorKind::Unexpected, "the store gave no answer").unknown_effect()));
        self.apply(lease, answer)
    }

    /// Shows the count of nested holds in the store.
    pub(super) async fn write_depth(self: &Arc<Self>, lease: &Arc<Lease>) -> Result<Option<LossReason>> {
        self.renew_now(lease).await
    }

    fn apply(self: &Arc<Self>, lease: &Arc<Lease>, answer: Result<Renewed>) -> Result<Option<LossReason>> {
        let now = self.now();
        let jitter = self.timers.jitter();
        let mut state = lease.state();
        match answer {
            Ok(Renewed::Held(hold)) => {
                let margin = state.deadline().since(now);
                state.extend(hold.until, lease.ttl, now);
                if state.is_live() {
                    let at = state.schedule(lease.terms.renew, lease.ttl, now, jitter);
                    self.timers.plan(lease, &mut state, at);
                }
                drop(state);
                self.observe(|| Event::Renewed { key: &lease.claim.key, margin });
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
}

fn renewal(lease: &Lease) -> Renewal {
    Renewal { claim: lease.claim.clone(), ttl: lease.terms.ttl, depth: lease.state().depth, fence_floor: None }
}

/// The timer task. It holds the engine only while it works.
async fn watch(timers: Arc<Timers>, watching: Watching, mut alarms: Option<Alarms>) {
    loop {
        let pause = {
            let Some(engine) = watching.engine.upgrade() else { return };
            let until = engine.serve();
            until.since(engine.now())
        };
        let alarm = async {
            match &mut alarms {
                Some(alarms) => alarms.next().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = sleep(pause) => {}
            () = timers.wake.notified() => {}
            alarmed = alarm => {
                let Some(engine) = watching.engine.upgrade() else { return };
                engine.verify(&alarmed);
            }
        }
    }
}

/// What the timer task looks after. If its runtime drops the task, another one takes over.
struct Watching {
    engine: Weak<Engine>,
    /// Whether the task was taken by its runtime at all.
    armed: Arc<AtomicBool>,
}

impl Drop for Watching {
    fn drop(&mut self) {
        if self.armed.load(Ordering::SeqCst)
            && let Some(engine) = self.engine.upgrade()
        {
            engine.watch_elsewhere();
        }
    }
}
