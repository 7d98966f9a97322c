//! The way of a client to the store: what is sent goes in order, may be slow, and arrives also if nobody waits for it.

use std::{pin::Pin, sync::Mutex, time::Duration};

use lockkit_core::{Error, ErrorKind, Result, store::unpoisoned};
use tokio::{
    sync::{oneshot, watch},
    time::{Instant, sleep, sleep_until, timeout},
};

use crate::fault::Fault;

/// A connection, replaced by a new one when an answer did not come in time.
#[derive(Debug)]
pub(crate) struct Link {
    /// Ends when the last request that was sent has arrived.
    last: Mutex<Option<oneshot::Receiver<()>>>,
    /// Until when nothing arrives.
    frozen: watch::Sender<Option<Instant>>,
}

type Delivery<T> = Pin<Box<dyn Future<Output = Result<T>> + Send>>;

impl Link {
    pub(crate) fn new() -> Self {
        Self { last: Mutex::default(), frozen: watch::Sender::new(None) }
    }

    pub(crate) fn freeze(&self, time: Duration) {
        self.frozen.send_replace(Some(in_time(time)));
    }

    pub(crate) fn thaw(&self) {
        self.frozen.send_replace(None);
    }

    pub(crate) fn is_frozen(&self) -> bool {
        self.frozen.borrow().is_some_and(|until| Instant::now() < until)
    }

    /// Has `work` done by the store, with what `fault` makes of it.
    ///
    /// # Cancellation
    /// What was sent arrives all the same, before what is sent later.
    pub(crate) async fn ask<T: Send + 'static>(
        &self,
        fault: Option<Fault>,
        bound: Duration,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<T> {
        let answer = async {
            match fault {
                None => self.deliver(Duration::ZERO, work).await,
                Some(Fault::Fail(kind, effect)) => {
                    let error = Error::new(kind, "the script says so");
                    Err(if effect == lockkit_core::Effect::Unknown { error.unknown_effect() } else { error })
                }
                Some(Fault::LoseRequest) => std::future::pending().await,
                Some(Fault::LoseReply) => {
                    drop(self.deliver(Duration::ZERO, work).await);
                    std::future::pending().await
                }
                Some(Fault::DelayRequest(delay)) => self.deliver(delay, work).await,
                Some(Fault::DelayReply(delay)) => {
                    let answer = self.deliver(Duration::ZERO, work).await;
                    sleep(delay).await;
                    answer
                }
            }
        };
        timeout(bound, answer).await.unwrap_or_else(|_| {
            self.reconnect();
            Err(Error::new(ErrorKind::TimedOut, format!("no answer in {bound:?}")).unknown_effect())
        })
    }

    /// Sends `work` behind what was sent before.
    fn deliver<T: Send + 'static>(
        &self,
        delay: Duration,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Delivery<T> {
        let mut last = unpoisoned(&self.last);
        // Once it said that it has arrived, it must not be asked again.
        last.take_if(|last| last.try_recv() != Err(oneshot::error::TryRecvError::Empty));
        if last.is_none() && delay.is_zero() && !self.is_frozen() {
            return Box::pin(async move { Ok(tokio::task::unconstrained(work).await) });
        }
        let (arrived, next) = oneshot::channel();
        let ahead = last.replace(next);
        let (due, frozen) = (in_time(delay), self.frozen.subscribe());
        let on_its_way = tokio::spawn(async move {
            if let Some(ahead) = ahead {
                // An error says that it has arrived.
                drop(ahead.await);
            }
            sleep_until(due).await;
            thawed(frozen).await;
            let answer = tokio::task::unconstrained(work).await;
            drop::<oneshot::Sender<()>>(arrived);
            answer
        });
        Box::pin(async move {
            on_its_way.await.map_err(|e| {
                Error::new(ErrorKind::Unexpected, "the request was lost with its runtime")
                    .unknown_effect()
                    .with_source(e)
            })
        })
    }

    /// From here on, nothing goes behind what is still on its way.
    fn reconnect(&self) {
        *unpoisoned(&self.last) = None;
    }
}

/// The moment when this time is over: of times without end, one that nobody lives to see.
fn in_time(time: Duration) -> Instant {
    const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);
    Instant::now() + time.min(CENTURY)
}

async fn thawed(mut frozen: watch::Receiver<Option<Instant>>) {
    loop {
        let until = *frozen.borrow_and_update();
        let Some(until) = until.filter(|until| Instant::now() < *until) else { return };
        tokio::select! {
            () = sleep_until(until) => {}
            // An error says that the client is gone; what it sent arrives all the same.
            changed = frozen.changed() => if changed.is_err() { sleep_until(until).await },
        }
    }
}
