//! Calls to several nodes side by side, in one task.
//!
//! A call that was begun is always led to its end, for what it asked may come true at any time, and only its end tells
//! the store below whether its connection still lives. So [`Calls`] that are dropped go on in the background. The end of the
//! runtime on which they were begun is their end, too: their timers are of that one, and panic when they are polled elsewhere then.

use std::{
    future::{Future, poll_fn},
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use lockkit_core::store::has_ended;
use tokio::{
    runtime::Handle,
    task::yield_now,
    time::{Sleep, sleep},
};

/// One call under way.
pub(crate) type Call<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Calls under way, each with the index of its node.
pub(crate) struct Calls<T: Send + 'static> {
    pending: Vec<(usize, Call<T>)>,
    /// Answers that came together with one that was handed out.
    ready: Vec<(usize, T)>,
    /// When [`next`](Self::next) waits no more. In a box, for most calls have no limit.
    time_up: Option<Pin<Box<Sleep>>>,
    /// Where the first of them was begun.
    runtime: Option<Handle>,
}

impl<T: Send + 'static> Default for Calls<T> {
    fn default() -> Self {
        Self::with_capacity(0)
    }
}

impl<T: Send + 'static> Calls<T> {
    pub(crate) fn with_capacity(nodes: usize) -> Self {
        Self { pending: Vec::with_capacity(nodes), ready: Vec::new(), time_up: None, runtime: None }
    }

    /// For calls that contain what is [taken](Self::take) out of others.
    pub(crate) fn begun_with<U: Send + 'static>(&mut self, others: &Calls<U>) {
        self.runtime = self.runtime.take().or_else(|| others.runtime.clone());
    }

    pub(crate) fn add(&mut self, node: usize, call: impl Future<Output = T> + Send + 'static) {
        self.pending.push((node, Box::pin(call)));
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.pending.is_empty() && self.ready.is_empty()
    }

    /// The nodes that have not answered yet.
    pub(crate) fn pending(&self) -> impl Iterator<Item = usize> {
        self.pending.iter().map(|(node, _)| *node)
    }

    /// How many answers were not handed out.
    pub(crate) fn unheard(&self) -> usize {
        self.ready.len() + self.pending.len()
    }

    /// Has [`next`](Self::next) wait for so long from now.
    pub(crate) fn limit(&mut self, limit: Duration) {
        self.time_up = Some(Box::pin(sleep(limit)));
    }

    /// The next answer, in the order in which they come; `None` when all have answered, or the time is up. What is there
    /// counts, even if the time is up as well.
    pub(crate) async fn next(&mut self) -> Option<(usize, T)> {
        poll_fn(|cx| match (self.poll_next(cx), &mut self.time_up) {
            (Poll::Pending, Some(time_up)) => time_up.as_mut().poll(cx).map(|()| None),
            (answer, _) => answer,
        })
        .await
    }

    /// Takes all calls out, also those with an answer that nobody has heard.
    pub(crate) fn take(&mut self) -> Vec<(usize, Call<T>)> {
        let heard = self.ready.drain(..).map(|(node, answer)| (node, Box::pin(std::future::ready(answer)) as Call<T>));
        heard.chain(self.pending.drain(..)).collect()
    }

    /// Sends what is asked, and returns without an answer.
    pub(crate) async fn send(&mut self) {
        self.begin();
        poll_fn(|cx| {
            poll_all(&mut self.pending, cx, |node, answer| self.ready.push((node, answer)));
            Poll::Ready(())
        })
        .await;
    }

    /// The answers that come in the same breath as those before. To give way once for them is cheaper than a task that
    /// hears them in the background.
    pub(crate) async fn at_hand(&mut self) -> Vec<(usize, T)> {
        if !self.pending.is_empty() {
            yield_now().await;
            self.send().await;
        }
        std::mem::take(&mut self.ready)
    }

    /// The next answer, however long it takes; `None` when all have answered, or the runtime on which they were begun has ended.
    pub(crate) async fn next_ever(&mut self) -> Option<(usize, T)> {
        poll_fn(|cx| {
            if self.has_ended() {
                self.pending.clear();
            }
            self.poll_next(cx)
        })
        .await
    }

    fn has_ended(&self) -> bool {
        let here = Handle::try_current().ok().map(|here| here.id());
        self.runtime.as_ref().is_some_and(|runtime| Some(runtime.id()) != here && has_ended(runtime))
    }

    fn begin(&mut self) {
        if self.runtime.is_none() {
            self.runtime = Handle::try_current().ok();
        }
    }

    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<(usize, T)>> {
        if self.is_empty() {
            return Poll::Ready(None);
        }
        self.begin();
        if self.ready.is_empty() {
            // All of them, also when one is ready: the first time it is asked, a call is sent.
            poll_all(&mut self.pending, cx, |node, answer| self.ready.push((node, answer)));
        }
        self.ready.pop().map_or(Poll::Pending, |answer| Poll::Ready(Some(answer)))
    }
}

/// There are few, so that asking all of them each time is cheap.
fn poll_all<T>(calls: &mut Vec<(usize, Call<T>)>, cx: &mut Context<'_>, mut answered: impl FnMut(usize, T)) {
    calls.retain_mut(|(node, call)| match call.as_mut().poll(cx) {
        Poll::Ready(answer) => {
            answered(*node, answer);
            false
        }
        Poll::Pending => true,
    });
}

impl<T: Send + 'static> Drop for Calls<T> {
    fn drop(&mut self) {
        self.ready.clear();
        if !self.pending.is_empty() {
            // Not `Self`: a runtime that is shutting down drops the task at once, and dropping it must not spawn another.
            let mut rest = std::mem::take(&mut self.pending);
            // Calls that were not begun have asked for nothing.
            if let Some(runtime) = &self.runtime {
                runtime.spawn(poll_fn(move |cx| {
                    poll_all(&mut rest, cx, |_, _| {});
                    if rest.is_empty() { Poll::Ready(()) } else { Poll::Pending }
                }));
            }
        }
    }
}
