//! Tasks that take and release one lock again and again.

use std::{sync::Arc, time::Duration};

use lockkit::{Clock, Moment, SystemClock};
use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;

use crate::{
    error::{Error, Result},
    exclusive::Exclusive,
    ledger::Ledger,
};

/// The time in which acquisitions are counted. Before it the tasks warm up.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Window {
    pub(crate) from: Moment,
    pub(crate) until: Moment,
}

impl Window {
    /// A window that opens after `warm_up` and stays open for `length`.
    pub(crate) fn after(start: Moment, warm_up: Duration, length: Duration) -> Self {
        Self { from: start + warm_up, until: start + warm_up + length }
    }

    pub(crate) fn length(&self) -> Duration {
        self.until.since(self.from)
    }
}

/// What the tasks of one process did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Tally {
    /// Acquisitions within the window, for each task.
    pub(crate) counts: Vec<u64>,
    /// All acquisitions, before and after the window too.
    pub(crate) total: u64,
    /// Holders that found a fence in the ledger which was not below their own.
    pub(crate) out_of_turn: u64,
}

/// Lets `tasks` tasks fight for `lock` until the window closes; each holder makes an entry in the ledger.
pub(crate) async fn contend<X: Exclusive, L: Ledger>(
    lock: &X,
    tasks: usize,
    window: Window,
    ledger: Arc<L>,
) -> Result<Tally> {
    let mut running = JoinSet::new();
    for _ in 0..tasks {
        running.spawn(one_task(lock.clone(), window, Arc::clone(&ledger)));
    }
    let mut tally = Tally::default();
    while let Some(ended) = running.join_next().await {
        let one = ended??;
        tally.counts.extend(one.counts);
        tally.total += one.total;
        tally.out_of_turn += one.out_of_turn;
    }
    Ok(tally)
}

async fn one_task<X: Exclusive, L: Ledger>(lock: X, window: Window, ledger: Arc<L>) -> Result<Tally> {
    let (mut counted, mut tally) = (0, Tally::default());
    loop {
        let now = SystemClock.now();
        if now >= window.until {
            tally.counts.push(counted);
            return Ok(tally);
        }
        let held = lock.take().await?;
        let fence = X::fence(&held);
        let in_turn = ledger.pass(fence.unwrap_or_default());
        let in_turn = in_turn.map_err(|error| Error::system("read or write the counter", &error))?;
        let got = SystemClock.now();
        tally.total += 1;
        // Without fences, what shows is only that an update was lost.
        tally.out_of_turn += u64::from(fence.is_some() && !in_turn);
        counted += u64::from(got >= window.from && got < window.until);
        X::give_back(held).await?;
        // A store in memory may never wait, and would keep the other tasks from their turn.
        tokio::task::consume_budget().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::MemoryLedger;

    #[tokio::test]
    async fn every_acquisition_is_entered_in_turn() {
        let locker = lockkit::connect("memory:").await.expect("memory");
        let ledger = Arc::new(MemoryLedger::default());
        let window = Window::after(SystemClock.now(), Duration::from_millis(5), Duration::from_millis(20));
        let tally = contend(&locker.lock("hot"), 4, window, Arc::clone(&ledger)).await.expect("contend");
        assert_eq!(tally.counts.len(), 4);
        assert_eq!(tally.out_of_turn, 0);
        assert_eq!(ledger.read().expect("read").count, tally.total);
        assert!(tally.counts.iter().sum::<u64>() <= tally.total);
    }
}
