//! One of several that fight for a lock and use what it protects, and who tells everything that it does and hears.

use std::time::Duration;

use lockkit::{Clock, Guard, Lock, Outcome, Status, SystemClock};
use lockkit_testkit::history::{Event, What};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use super::{Answer, Fight, Orders};
use crate::error::Result;

/// How long a holder holds the lock if it is not told to keep it.
const BRIEF: Duration = Duration::from_millis(250);
/// How often a holder writes, and asks whether it still has the lock.
pub(crate) const TICK: Duration = Duration::from_millis(50);
/// How long after a release it asks again: others are to have their turn.
const REST: Duration = Duration::from_millis(60);
/// How long what it held may take to be released in the end.
const RELEASED_WITHIN: Duration = Duration::from_secs(2);

/// What a fighter is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Order {
    /// Hold the lock for a moment each time. So it begins.
    Briefly,
    /// Hold the lock until it is lost.
    Keep,
    /// Do not ask for the lock: another is to have it.
    Rest,
    /// No more.
    End,
    /// The resource's answer to a write.
    Admitted(bool),
}

/// A fighter: its name, what it says goes to, and where its orders come from.
#[derive(Debug)]
pub(crate) struct Fighter<S> {
    name: String,
    key: String,
    say: S,
    orders: mpsc::UnboundedReceiver<Order>,
    conduct: Order,
    /// The number of its next operation.
    next: u64,
}

/// Fights as a process of its own.
pub(super) async fn run(job: Fight, store: Option<&str>, mut orders: Orders) -> Result<Answer> {
    let locker = super::connect(store).await?;
    let lock = locker.lock(&job.key).ttl(job.ttl);
    let (told, heard) = mpsc::unbounded_channel();
    // The end of the orders ends the process.
    tokio::spawn(async move {
        while let Ok(order) = orders.next().await {
            if told.send(order).is_err() {
                return;
            }
        }
    });
    super::say(&Answer::Ready)?;
    Fighter::new(job.name, job.key, |event| super::say(&Answer::Saw(event)), heard).fight(&lock).await?;
    // What is not released by then lapses.
    drop(locker.shutdown(RELEASED_WITHIN).await);
    Ok(Answer::Finished)
}

impl<S: FnMut(Event) -> Result<()> + Send> Fighter<S> {
    pub(crate) fn new(name: String, key: String, say: S, orders: mpsc::UnboundedReceiver<Order>) -> Self {
        Self { name, key, say, orders, conduct: Order::Briefly, next: 1 }
    }

    /// Takes the lock again and again, until told to end.
    pub(crate) async fn fight(mut self, lock: &Lock) -> Result<()> {
        while self.conduct != Order::End {
            if self.conduct != Order::Rest
                && let Some((guard, grant)) = self.take(lock).await?
            {
                self.hold(guard, grant).await?;
            }
            self.pause(REST).await;
        }
        Ok(())
    }

    async fn take(&mut self, lock: &Lock) -> Result<Option<(Guard, u64)>> {
        let op = self.ask(What::acquire(self.key.clone()))?;
        let acquiring = lock.acquire();
        tokio::pin!(acquiring);
        loop {
            tokio::select! {
                taken = &mut acquiring => return match taken {
                    Ok(guard) => {
                        self.hear(op, What::Granted { fence: guard.fence().get() })?;
                        Ok(Some((guard, op)))
                    }
                    // Of a server that is away that is to be expected, and worth another try.
                    Err(error) => {
                        self.hear(op, What::Failed { error: error.to_string() })?;
                        Ok(None)
                    }
                },
                order = self.orders.recv() => self.obey(order),
            }
            if self.conduct == Order::End {
                self.hear(op, What::Cancelled)?;
                return Ok(None);
            }
        }
    }

    /// Writes, looks at its guard, and rests, in turns. Each write but the first follows a rest, as a program's does that checked its
    /// lock and was held up before it came to the write.
    async fn hold(&mut self, guard: Guard, grant: u64) -> Result<()> {
        let until = SystemClock.now() + BRIEF;
        loop {
            self.write(guard.fence().get()).await?;
            let ask = self.ask(What::Ask { grant })?;
            if let Status::Lost(reason) = guard.status() {
                return self.hear(ask, What::Lost { reason: reason.to_string() });
            }
            self.hear(ask, What::Held)?;
            self.pause(TICK).await;
            if self.conduct != Order::Keep && SystemClock.now() >= until {
                return self.release(guard, grant).await;
            }
        }
    }

    async fn write(&mut self, fence: u64) -> Result<()> {
        let op = self.ask(What::Write { key: self.key.clone(), fence })?;
        // Without an answer there is nobody any more to tell anything.
        while let Some(order) = self.orders.recv().await {
            match order {
                Order::Admitted(true) => return self.hear(op, What::Written),
                Order::Admitted(false) => return self.hear(op, What::Refused),
                order => self.conduct = order,
            }
        }
        Ok(())
    }

    async fn release(&mut self, guard: Guard, grant: u64) -> Result<()> {
        let op = self.ask(What::Release { grant })?;
        let answer = match guard.release().await {
            Ok(Outcome::Released) => What::Released { held: true, reason: None },
            Ok(Outcome::NotHeld(reason)) => What::Released { held: false, reason: Some(reason.to_string()) },
            Err(error) => What::Failed { error: error.to_string() },
        };
        self.hear(op, answer)
    }

    /// Rests, unless it is to end.
    async fn pause(&mut self, length: Duration) {
        let rest = tokio::time::sleep(length);
        tokio::pin!(rest);
        while self.conduct != Order::End {
            tokio::select! {
                () = &mut rest => return,
                order = self.orders.recv() => self.obey(order),
            }
        }
    }

    fn obey(&mut self, order: Option<Order>) {
        match order {
            // An answer to what was not asked.
            Some(Order::Admitted(_)) => {}
            Some(order) => self.conduct = order,
            None => self.conduct = Order::End,
        }
    }

    /// Tells what it asks, before it does; returns the number of the operation.
    fn ask(&mut self, what: What) -> Result<u64> {
        let op = self.next;
        self.next += 1;
        self.hear(op, what)?;
        Ok(op)
    }

    fn hear(&mut self, op: u64, what: What) -> Result<()> {
        (self.say)(Event { at: SystemClock.now().as_nanos(), process: self.name.clone(), op, what })
    }
}
