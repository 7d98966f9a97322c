//! Where several fight for one lock before the eyes of one who writes down all that they do and hear, and whose resource checks
//! their fences.

use std::time::Duration;

use lockkit::{Clock, Fence, SystemClock, fenced::admit};
use lockkit_testkit::history::{Event, What};
use tokio::{
    sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
    task::JoinSet,
    time::timeout,
};

use crate::{
    error::{Error, Result},
    worker::{Answer, Fight, Job, Order},
    workers::{Worker, WorkerProgram, unexpected},
};

/// How long a fighter may take to end. It waits for nothing but a release.
const END_WITHIN: Duration = Duration::from_secs(30);

/// The fighters, in order, and the record.
#[derive(Debug)]
pub(super) struct Stage {
    key: String,
    fighters: Vec<Seat>,
    said: UnboundedReceiver<(usize, Said)>,
    say: UnboundedSender<(usize, Said)>,
    /// The highest fence that the resource has seen.
    highest: Fence,
    /// The place of the next write in the order of the resource, and the version that stands there.
    order: u64,
    version: u64,
    record: Vec<Event>,
    /// What fights in this process, or talks to one that fights. They end with the stage.
    tasks: JoinSet<()>,
}

/// A fighter, as it is seen from here.
#[derive(Debug)]
struct Seat {
    orders: UnboundedSender<Order>,
    /// The number of its process; none of one in this process.
    process: Option<u32>,
    /// When it got the lock that it has.
    holds: Option<u64>,
    is_killed: bool,
    has_ended: bool,
}

#[derive(Debug)]
enum Said {
    Saw(Event),
    Ended(Result<()>),
}

/// What to call a fighter.
pub(super) fn name(number: usize) -> String {
    format!("process {}", number + 1)
}

impl Stage {
    pub(super) fn new(key: String) -> Self {
        let (say, said) = unbounded_channel();
        Self {
            key,
            fighters: Vec::new(),
            said,
            say,
            highest: Fence::NONE,
            order: 0,
            version: 0,
            record: Vec::new(),
            tasks: JoinSet::new(),
        }
    }

    /// Starts a process that fights from now on.
    pub(super) async fn enter(&mut self, program: &WorkerProgram, url: &str, ttl: Duration) -> Result<()> {
        let (number, say) = (self.fighters.len(), self.say.clone());
        let job = Job::Fight(Fight { name: name(number), key: self.key.clone(), ttl });
        let mut worker = Worker::start(program, job, Some(url)).await?;
        match worker.hear_soon().await? {
            Answer::Ready => {}
            other => return Err(unexpected(&other)),
        }
        let (process, orders) = (worker.process(), self.seat());
        self.fighters[number].process = process;
        self.tasks.spawn(async move {
            let ended = relay(worker, orders, |event| drop(say.send((number, Said::Saw(event))))).await;
            // Nobody listens any more to a stage that is gone.
            drop(say.send((number, Said::Ended(ended))));
        });
        Ok(())
    }

    /// Lets a task of this process fight from now on.
    #[cfg(test)]
    pub(super) fn enter_here(&mut self, lock: lockkit::Lock) {
        let (number, say, key) = (self.fighters.len(), self.say.clone(), self.key.clone());
        let orders = self.seat();
        self.tasks.spawn(async move {
            let tell = |event| {
                drop(say.send((number, Said::Saw(event))));
                Ok(())
            };
            let ended = crate::worker::Fighter::new(name(number), key, tell, orders).fight(&lock).await;
            drop(say.send((number, Said::Ended(ended))));
        });
    }

    fn seat(&mut self) -> UnboundedReceiver<Order> {
        let (orders, received) = unbounded_channel();
        self.fighters.push(Seat { orders, process: None, holds: None, is_killed: false, has_ended: false });
        received
    }

    /// The names of the fighters.
    pub(super) fn names(&self) -> Vec<String> {
        (0..self.fighters.len()).map(name).collect()
    }

    pub(super) fn order(&self, number: usize, order: Order) {
        // One that has ended does what it is told.
        _ = self.fighters[number].orders.send(order);
    }

    /// Tells all but this one.
    pub(super) fn order_others(&self, but: usize, order: Order) {
        (0..self.fighters.len()).filter(|number| *number != but).for_each(|number| self.order(number, order));
    }

    /// The process of a fighter.
    pub(super) fn process(&self, number: usize) -> Result<u32> {
        self.fighters[number].process.ok_or_else(|| Error::internal("a fighter is no process of its own"))
    }

    /// From now on it is known that this one says nothing more.
    pub(super) fn is_killed(&mut self, number: usize) {
        self.fighters[number].is_killed = true;
    }

    /// For how long this one has had the lock that it has; nothing without one.
    pub(super) fn has_held(&self, number: usize) -> Option<Duration> {
        Some(Duration::from_nanos(SystemClock.now().as_nanos().saturating_sub(self.fighters[number].holds?)))
    }

    /// How many have the lock.
    #[cfg(test)]
    pub(super) fn holders(&self) -> usize {
        self.fighters.iter().filter(|seat| seat.holds.is_some()).count()
    }

    /// Waits for the next event. Nothing is lost if the waiting is dropped.
    async fn next(&mut self) -> Result<Option<Event>> {
        // There is a sender in here.
        let Some((number, said)) = self.said.recv().await else { return Ok(None) };
        match said {
            Said::Saw(event) => {
                self.note(number, &event);
                Ok(Some(event))
            }
            Said::Ended(ended) => {
                self.fighters[number].has_ended = true;
                if self.fighters[number].is_killed { Ok(None) } else { ended.map(|()| None) }
            }
        }
    }

    /// Writes an event down, and answers for the resource.
    fn note(&mut self, number: usize, event: &Event) {
        self.record.push(event.clone());
        let seat = &mut self.fighters[number];
        match event.what {
            What::Granted { .. } => seat.holds = Some(event.at),
            What::Lost { .. } | What::Release { .. } => seat.holds = None,
            What::Write { fence, .. } => {
                let admitted = admit(&mut self.highest, Fence::new(fence)).is_admitted();
                let (key, by, version) = (self.key.clone(), event.process.clone(), self.version);
                let what = What::Updated { key, by, fence, admitted, base: version, version };
                let at = SystemClock.now().as_nanos();
                self.record.push(Event { at, process: "resource".to_owned(), op: self.order, what });
                self.order += 1;
                self.version += u64::from(admitted);
                _ = seat.orders.send(Order::Admitted(admitted));
            }
            _ => {}
        }
    }

    /// Watches until something happens, and returns when that was; nothing if it does not within this time.
    pub(super) async fn until(
        &mut self,
        within: Duration,
        mut happens: impl FnMut(&Self, &Event) -> bool + Send,
    ) -> Result<Option<u64>> {
        let watching = async {
            loop {
                if let Some(event) = self.next().await?
                    && happens(self, &event)
                {
                    return Ok(event.at);
                }
            }
        };
        timeout(within, watching).await.ok().transpose()
    }

    /// Watches for so long.
    pub(super) async fn watch(&mut self, time: Duration) -> Result<()> {
        self.until(time, |_, _| false).await.map(drop)
    }

    /// Watches while something else goes on.
    pub(super) async fn during<T>(&mut self, other: impl Future<Output = T> + Send) -> Result<T> {
        tokio::pin!(other);
        loop {
            tokio::select! {
                done = &mut other => return Ok(done),
                seen = self.next() => drop(seen?),
            }
        }
    }

    /// Ends the fight, and returns all that happened.
    pub(super) async fn end(mut self) -> Result<Vec<Event>> {
        for seat in &self.fighters {
            _ = seat.orders.send(Order::End);
        }
        let ending = async {
            while !self.fighters.iter().all(|seat| seat.has_ended || seat.is_killed) {
                self.next().await?;
            }
            Ok(())
        };
        let silent = || Error::internal(format!("a fighter did not end within {END_WITHIN:?}"));
        timeout(END_WITHIN, ending).await.unwrap_or_else(|_| Err(silent()))?;
        Ok(self.record)
    }
}

/// Carries orders and answers between the stage and a process, until that has finished.
async fn relay(mut worker: Worker, mut orders: UnboundedReceiver<Order>, saw: impl Fn(Event) + Send) -> Result<()> {
    loop {
        tokio::select! {
            order = orders.recv() => match order {
                Some(order) => worker.tell(&order).await?,
                None => return Ok(()),
            },
            answer = worker.hear() => match answer? {
                Answer::Saw(event) => saw(event),
                Answer::Finished => return Ok(()),
                other => return Err(unexpected(&other)),
            },
        }
    }
}
