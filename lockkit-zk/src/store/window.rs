//! Windows in which a lock is kept from all: looked at by claims that would hold it otherwise.

use std::time::Duration;

use lockkit_core::{Attempt, Error, Result};
use tokio::time::{Instant, sleep};
use zookeeper_client as zk;

use crate::{
    client::{
        watched::{Use, changed},
        windows::{self, Record},
    },
    store::{
        attempt::{Acquisition, QueueView, contention, undone},
        wait::{LOOK_PAUSE, Woken, passed},
    },
    wire::{error::doubtful, window},
};

/// When to ask again for a lock whose directory has to be made anew when a window is over.
const PAUSE: Duration = Duration::from_secs(2);

/// What a claim that is the first of its queue finds.
pub(crate) enum Outlook {
    /// No window that is not over.
    Open,
    /// Something changed while it waited.
    Changed,
    /// The lock is kept: the answer to the caller.
    Kept(Attempt),
}

impl Acquisition<'_> {
    /// Lets a claim that would hold the lock wait for the end of a window, for as long as the request says; a try gives up its place. The records
    /// of windows that are over are removed.
    ///
    /// A lock without such records costs no request: the list of its children shows that. Nor can one be overlooked where the list is
    /// spared, for a record is counted among the nodes ever made in the directory.
    pub(crate) async fn outlast(&mut self, queue: &QueueView, deadline: Option<Instant>) -> Result<Outlook> {
        let Some((record, left)) = self.window_of(queue).await? else { return Ok(Outlook::Open) };
        let holder = Some(record.window.holder.clone());
        if self.request.wait.is_zero() {
            self.undo(&queue.node).await?;
            return Ok(Outlook::Kept(undone(holder, left)));
        }
        let woken = tokio::select! {
            biased;
            () = passed(deadline) => Woken::Over,
            () = self.session.ended() => Woken::Over,
            woken = self.wait_for_window(&record, left) => woken?,
        };
        // The claim keeps its place, or has none to keep.
        let pause = match woken {
            Woken::Changed | Woken::Next => return Ok(Outlook::Changed),
            Woken::Unwatched => LOOK_PAUSE,
            Woken::Over => Duration::ZERO,
        };
        Ok(Outlook::Kept(Attempt::Contended(contention(holder, pause))))
    }

    /// Waits for the end of a window, or of its record. A window ends by time, of which no watch tells: so this one wait is by the clock.
    async fn wait_for_window(&self, record: &Record, left: Duration) -> Result<Woken> {
        let path = format!("{}/{}", self.lock, window::node(&record.token));
        let Some(watched) = self.look(&path, Use::Waiting) else { return Ok(Woken::Unwatched) };
        let Some((data, watch)) = self.seen(watched).await? else { return Ok(Woken::Changed) };
        if windows::parse(&data)? != record.window {
            return Ok(Woken::Changed);
        }
        tokio::select! {
            () = sleep(left) => Ok(Woken::Changed),
            event = changed(watch) => Ok(if event.is_some() { Woken::Changed } else { Woken::Over }),
        }
    }

    /// The same for a claim that can't stay in its place: it is asked for anew.
    pub(crate) async fn give_way(&mut self, queue: &QueueView) -> Result<Option<Attempt>> {
        let Some((record, left)) = self.window_of(queue).await? else { return Ok(None) };
        self.undo(&queue.node).await?;
        Ok(Some(undone(Some(record.window.holder), left.min(PAUSE))))
    }

    /// The window that ends last, and what is left of it; none if all are over, which are removed.
    async fn window_of(&mut self, queue: &QueueView) -> Result<Option<(Record, Duration)>> {
        if !window::is_kept(&queue.children) {
            return Ok(None);
        }
        let records = self.session.records(&self.lock, &queue.children, self.bound).await;
        let records = records.map_err(Error::unknown_effect)?;
        let now = match self.leader {
            Some(made) => made,
            None => self.session.leader_time().await.map_err(|failure| doubtful(&failure))?,
        };
        let mut last = None;
        for record in records {
            let left = record.left(now);
            if left.is_zero() && self.remove(&record).await? {
                continue;
            }
            // One that was written to just now is looked at again at once.
            if last.as_ref().is_none_or(|(_, longest)| *longest < left) {
                last = Some((record, left));
            }
        }
        Ok(last)
    }

    /// Removes the record of a window that is over; tells whether it counts no more.
    async fn remove(&self, record: &Record) -> Result<bool> {
        match self.session.remove(&self.lock, record, self.bound).await {
            // Who may not remove it is not kept out by it.
            Err(failure) if failure.is(&zk::Error::NoAuth) => Ok(true),
            removed => removed.map_err(|failure| doubtful(&failure)),
        }
    }
}
