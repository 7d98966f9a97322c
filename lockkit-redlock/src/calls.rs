//! Calls to several nodes side by side, in one task.
//!
//! A call that was begun is always led to its end, for what it asked may come true at any time, and only its end tells
//! the store below whether its connection still lives. So [`Calls`] that are dropped go on in the background.

use std::{
    future::{Future, poll_fn},
    pin::Pin,
    task::{Context, Poll},
};

use tokio::{runtime::Handle, time::Sleep};

/// One call under way.
pub(crate) type Call<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Calls under way, each with the index of its node.
pub(crate) struct Calls<T: Send + 'static>(Vec<(usize, Call<T>)>);

/// What [`Calls::next`] brings.
pub(crate) enum Next<T> {
    Answer(usize, T),
    TimeUp,
    /// All have answered.
    End,
}

impl<T: Send + 'static> Calls<T> {
    pub(crate) fn with_capacity(nodes: usize) -> Self {
        Self(Vec::with_capacity(nodes))
    }

    pub(crate) fn add(&mut self, node: usize, call: impl Future<Output = T> + Send + 'static) {
        self.0.push((node, Box::pin(call)));
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The nodes that have not answered yet.
    pub(crate) fn pending(&self) -> impl Iterator<Item = usize> {
        self.0.iter().map(|(node, _)| *node)
    }

    /// The next answer, in the order in which they come. What is there counts, even if the time is up as well.
    pub(crate) async fn next(&mut self, mut limit: Pin<&mut Sleep>) -> Next<T> {
        poll_fn(|cx| match self.poll_next(cx) {
            Poll::Ready(Some((node, answer))) => Poll::Ready(Next::Answer(node, answer)),
            Poll::Ready(None) => Poll::Ready(Next::End),
            Poll::Pending => limit.as_mut().poll(cx).map(|()| Next::TimeUp),
        })
        .await
    }

    /// Takes all calls out.
    pub(crate) fn take(&mut self) -> Vec<(usize, Call<T>)> {
        std::mem::take(&mut self.0)
    }

    /// The next answer, however long it takes; `None` when all have answered.
    pub(crate) async fn next_ever(&mut self) -> Option<(usize, T)> {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<(usize, T)>> {
        if self.0.is_empty() { Poll::Ready(None) } else { poll_any(&mut self.0, cx).map(Some) }
    }
}

/// Few calls, so that asking all of them each time is cheap.
fn poll_any<T>(calls: &mut Vec<(usize, Call<T>)>, cx: &mut Context<'_>) -> Poll<(usize, T)> {
    for at in 0..calls.len() {
        if let Poll::Ready(answer) = calls[at].1.as_mut().poll(cx) {
            let (node, _) = calls.swap_remove(at);
            return Poll::Ready((node, answer));
        }
    }
    Poll::Pending
}

impl<T: Send + 'static> Drop for Calls<T> {
    fn drop(&mut self) {
        if !self.0.is_empty() {
            // Not `Self`: a runtime that is shutting down drops the task at once, and dropping it must not spawn another.
            let mut rest = self.take();
            in_background(async move {
                while !rest.is_empty() {
                    poll_fn(|cx| poll_any(&mut rest, cx)).await;
                }
            });
        }
    }
}

/// Leads something to its end without its caller. Without a runtime it is forgotten, and the leases that it was for
/// lapse.
pub(crate) fn in_background(task: impl Future<Output = ()> + Send + 'static) {
    if let Ok(runtime) = Handle::try_current() {
        runtime.spawn(task);
    }
}
