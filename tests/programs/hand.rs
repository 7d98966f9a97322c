//! One task of a program.

use std::{pin::pin, sync::Arc, time::Duration};

use lockkit::{ErrorKind, Guard, Lock, Mode, Outcome, Result, Status, store::Query};
use lockkit_testkit::{faults::poll_until, history::What};
use tokio::time::{sleep, timeout};

use crate::{
    program::{Ask, INSTEAD_OF_FOREVER, LONG, Patience, Step, Wait},
    world::{Free, Process, World},
};

pub(crate) struct Hand {
    world: Arc<World>,
    locker: usize,
    guards: Vec<Held>,
}

/// A guard, and the operation that acquired it. However it is dropped, also with its runtime, that is recorded.
struct Held {
    world: Arc<World>,
    locker: usize,
    guard: Option<Guard>,
    grant: u64,
    key: usize,
    owner: Option<usize>,
}

impl Held {
    fn guard(&self) -> &Guard {
        self.guard.as_ref().expect("it is taken by a release alone")
    }

    fn process(&self) -> &Process {
        &self.world.processes[self.locker]
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let Some(guard) = self.guard.take() else { return };
        let recorder = &self.process().recorder;
        let op = recorder.ask(What::Release { grant: self.grant }).expect("a file");
        drop(guard);
        recorder.hear(op, What::Dropped).expect("a file");
        self.world.goes(self.key, true);
    }
}

impl Hand {
    pub(crate) fn new(world: Arc<World>, locker: usize) -> Self {
        Self { world, locker, guards: Vec::new() }
    }

    pub(crate) async fn work(mut self, steps: &[Step]) {
        for step in steps {
            self.step(step).await;
        }
    }

    fn process(&self) -> &Process {
        &self.world.processes[self.locker]
    }

    async fn step(&mut self, step: &Step) {
        match step {
            Step::Acquire(ask) => self.acquire(ask).await,
            Step::Nest(guard, ask) => {
                let Some((key, Some(owner))) = self.pick(*guard).map(|held| (held.key, held.owner)) else { return };
                self.acquire(&Ask { key, owner: Some(owner), ..ask.clone() }).await;
            }
            Step::Look(guard) => self.look(*guard).await,
            Step::Renew(guard) => self.renew(*guard).await,
            Step::Release(guard) => self.release(*guard, None).await,
            Step::LeaveRelease(guard, polls) => self.release(*guard, Some(*polls)).await,
            Step::Drop(guard) => drop(self.take(*guard)),
            Step::Give(guard, runtime, time) => self.give(*guard, *runtime, *time),
            Step::Sleep(time) => sleep(Duration::from_millis(*time)).await,
            Step::Outlast => sleep(Duration::from_millis(self.world.terms.short * 5 / 4)).await,
        }
    }

    async fn acquire(&mut self, ask: &Ask) {
        let (world, process) = (Arc::clone(&self.world), self.process());
        let (lock, wait) = (self.lock(ask), self.wait(ask));
        let (was_closed, free) = (process.is_closed(), world.comes(ask.key));
        let asked = What::Acquire {
            key: world.name(ask.key),
            within: None,
            owner: ask.owner.map(|owner| owner as u64),
            mode: Mode::Exclusive,
        };
        let grant = process.recorder.ask(asked).expect("a file");
        let acquiring = async {
            match wait {
                Wait::Try => lock.try_acquire().await,
                Wait::Within(wait) => lock.acquire_within(Duration::from_millis(wait)).await,
                Wait::Forever => lock.acquire().await.map(Some),
            }
        };
        let came = world.bounded(have_patience(ask.patience, acquiring)).await;
        let (heard, came) = match came {
            None => {
                world.complain(format!("an acquisition of lock {} does not end: {ask:?}", ask.key));
                (What::Cancelled, None)
            }
            Some(None) => (What::Cancelled, None),
            Some(Some(came)) => match &came {
                Ok(Some(guard)) => (What::Granted { fence: guard.fence().get() }, Some(came)),
                Ok(None) => (What::Contended, Some(came)),
                Err(error) => (What::Failed { error: error.to_string() }, Some(came)),
            },
        };
        process.recorder.hear(grant, heard).expect("a file");
        if let Some(guard) = self.came(ask, came, was_closed, free) {
            self.guards.push(Held {
                world,
                locker: self.locker,
                guard: Some(guard),
                grant,
                key: ask.key,
                owner: ask.owner,
            });
        }
    }

    fn came(&self, ask: &Ask, came: Option<Result<Option<Guard>>>, was_closed: bool, free: Free) -> Option<Guard> {
        let (world, key) = (&self.world, ask.key);
        match came {
            Some(Ok(Some(guard))) => {
                if was_closed {
                    world.complain(format!("lock {key} was granted after the shutdown"));
                }
                return Some(guard);
            }
            Some(Ok(None)) if was_closed => world.complain(format!("lock {key} was refused after the shutdown")),
            // What is answered late for a short lease may be in the way until it is released.
            Some(Ok(None)) if world.was_free(key, free) && !world.program.is_short(key) => {
                world.complain(format!("lock {key} was free and refused"));
            }
            // The time may be up before the store has answered.
            Some(Err(error)) if error.kind() == ErrorKind::TimedOut && matches!(self.wait(ask), Wait::Within(_)) => {}
            Some(Err(error)) => world.judge("an acquisition", key, self.process(), &error),
            Some(Ok(None)) | None => {}
        }
        world.goes(key, true);
        None
    }

    fn lock(&self, ask: &Ask) -> Lock {
        let (process, name) = (self.process(), self.world.name(ask.key));
        let mut lock = match ask.owner {
            Some(owner) => process.owners[owner].lock(name),
            None => process.locker.lock(name),
        };
        // All guards of an owner share one lease: what asks for other terms than it has is refused.
        let (short, renew, max_hold) = match ask.owner {
            Some(_) => (self.world.program.is_short(ask.key), ask.key.is_multiple_of(2), None),
            None => (ask.short, ask.renew, ask.max_hold),
        };
        lock = lock.ttl(Duration::from_millis(if short { self.world.terms.short } else { LONG }));
        if !renew {
            lock = lock.no_renewal();
        }
        if let Some(limit) = max_hold {
            lock = lock.max_hold(Duration::from_millis(limit));
        }
        if ask.fifo && self.world.terms.fifo { lock.fifo() } else { lock }
    }

    fn wait(&self, ask: &Ask) -> Wait {
        match ask.wait {
            Wait::Forever if !self.may_wait_forever(ask.key) => Wait::Within(INSTEAD_OF_FOREVER),
            wait => wait,
        }
    }

    /// A task that waits without limit has only locks of smaller numbers, so that no two tasks wait for each other. Leases of a runtime
    /// that ended may stay, where they end with the session.
    fn may_wait_forever(&self, key: usize) -> bool {
        self.world.program.runtime_ends.is_none() && self.guards.iter().all(|held| held.key < key)
    }

    fn pick(&self, guard: usize) -> Option<&Held> {
        guard.checked_rem(self.guards.len()).map(|at| &self.guards[at])
    }

    fn take(&mut self, guard: usize) -> Option<Held> {
        guard.checked_rem(self.guards.len()).map(|at| self.guards.swap_remove(at))
    }

    async fn look(&self, guard: usize) {
        let Some(held) = self.pick(guard) else { return };
        let (world, process) = (&self.world, self.process());
        if !self.ask(held) {
            return;
        }
        let query = Query::Keys(vec![held.guard().key().clone()]);
        match world.bounded(process.locker.inspect(&query)).await {
            None => world.complain("an inspection does not end".to_owned()),
            Some(Err(error)) => world.judge("an inspection", held.key, process, &error),
            Some(Ok(states)) if held.guard().is_held() => world.must_show(held.key, held.guard().token(), &states),
            Some(Ok(_)) => {}
        }
        self.ask(held);
    }

    /// Asks the guard.
    fn ask(&self, held: &Held) -> bool {
        let recorder = &self.process().recorder;
        let op = recorder.ask(What::Ask { grant: held.grant }).expect("a file");
        let status = held.guard().status();
        let heard = match status {
            Status::Held | Status::Suspect => What::Held,
            Status::Lost(reason) => What::Lost { reason: reason.to_string() },
        };
        recorder.hear(op, heard).expect("a file");
        if let Status::Lost(reason) = status {
            self.lost(held.key, &reason.to_string());
        }
        !matches!(status, Status::Lost(_))
    }

    fn lost(&self, key: usize, reason: &str) {
        if !self.world.program.may_lose(key) {
            self.world.complain(format!("lock {key} was lost for nothing: {reason}"));
        }
    }

    async fn renew(&self, guard: usize) {
        let Some(held) = self.pick(guard) else { return };
        let (world, process) = (&self.world, self.process());
        let op = process.recorder.ask(What::Renew { grant: held.grant }).expect("a file");
        let heard = match world.bounded(held.guard().renew()).await {
            Some(Ok(())) => What::Held,
            Some(Err(error)) => {
                world.judge("a renewal", held.key, process, &error);
                What::Failed { error: error.to_string() }
            }
            None => {
                world.complain("a renewal does not end".to_owned());
                What::Failed { error: String::new() }
            }
        };
        process.recorder.hear(op, heard).expect("a file");
    }

    /// Releases; gives it up after so many polls.
    async fn release(&mut self, guard: usize, polls: Option<u64>) {
        let Some(mut held) = self.take(guard) else { return };
        let Some(guard) = held.guard.take() else { return };
        let (world, process, grant, key) = (&self.world, self.process(), held.grant, held.key);
        let op = process.recorder.ask(What::Release { grant }).expect("a file");
        let released = async {
            match polls {
                None => Some(guard.release().await),
                Some(polls) => polled(polls, guard.release()).await,
            }
        };
        let (heard, is_clean) = match world.bounded(released).await {
            Some(Some(Ok(Outcome::Released))) => (What::Released { held: true, reason: None }, true),
            Some(Some(Ok(Outcome::NotHeld(reason)))) => {
                self.lost(key, &reason.to_string());
                (What::Released { held: false, reason: Some(reason.to_string()) }, false)
            }
            Some(Some(Err(error))) => {
                world.judge("a release", key, process, &error);
                (What::Failed { error: error.to_string() }, false)
            }
            Some(None) => (What::Dropped, false),
            None => {
                world.complain(format!("a release of lock {key} does not end"));
                (What::Dropped, false)
            }
        };
        process.recorder.hear(op, heard).expect("a file");
        world.goes(key, !is_clean);
    }

    /// Another task has it from now on.
    fn give(&mut self, guard: usize, runtime: usize, time: u64) {
        let Some(held) = self.take(guard) else { return };
        let mut other = Self::new(Arc::clone(&self.world), self.locker);
        other.guards.push(held);
        let steps = [Step::Look(0), Step::Sleep(time), Step::Look(0), Step::Release(0)];
        self.world.spawn(runtime, Box::pin(async move { other.work(&steps).await }));
    }
}

/// The answer to an acquisition with this patience; `None` if it was given up.
async fn have_patience<F: Future>(patience: Patience, future: F) -> Option<F::Output> {
    let (polled_for, unpolled, goes_on) = match patience {
        Patience::Await => return Some(future.await),
        Patience::DropAfter(time) => return timeout(Duration::from_millis(time), future).await.ok(),
        Patience::DropAtPoll(polls) => return polled(polls, future).await,
        Patience::GoOnAfter(polled, unpolled) => (polled, unpolled, true),
        Patience::DropUnpolled(polled, unpolled) => (polled, unpolled, false),
    };
    let mut future = pin!(future);
    tokio::select! {
        biased;
        came = &mut future => return Some(came),
        () = sleep(Duration::from_millis(polled_for)) => {}
    }
    sleep(Duration::from_millis(unpolled)).await;
    if goes_on { Some(future.await) } else { None }
}

/// Polls a future so many times, if at all, and drops it.
async fn polled<F: Future>(times: u64, future: F) -> Option<F::Output> {
    if times == 0 {
        return None;
    }
    poll_until(pin!(future), times.try_into().expect("few"), || {}).await
}
