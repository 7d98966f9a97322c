//! Waiting in the queue, until something comes to pass that the lock is waited for with.

use std::{
    future::{Future, poll_fn},
    pin::{Pin, pin},
    task::Poll,
    time::Duration,
};

use lockkit_core::Result;
use tokio::time::{Instant, sleep_until};
use zookeeper_client::EventType;

use crate::{
    client::watched::{Use, changed, is_ready},
    store::attempt::{Acquisition, QueueView},
    wire::{
        queue::{self, Position, Until},
        value::Value,
        window,
    },
};

/// How many nodes a permit watches at most. Where more permits may be held than that, one watch on the directory costs less, though
/// it wakes at each change there.
const WATCHES: usize = 16;

/// When to look again at a queue that can't be watched.
pub(super) const LOOK_PAUSE: Duration = Duration::from_millis(250);

/// How a wait ended.
pub(crate) enum Woken {
    /// Something changed.
    Changed,
    /// The only node before ours is gone, and nothing has changed since the queue was read but that.
    Next,
    /// There is no room for the watches that it takes.
    Unwatched,
    /// The caller's time is up, or the session's.
    Over,
}

/// The news of a watch that is set.
type News = Pin<Box<dyn Future<Output = Option<EventType>> + Send>>;

impl Acquisition<'_> {
    /// Waits in the queue. It returns before the lock can be ours, or then; and when the caller's time is up, or the session's,
    /// whatever it is about to ask: in a long queue that changes all the time there is always something.
    pub(crate) async fn wait(&self, queue: &QueueView, until: Until<'_>, deadline: Option<Instant>) -> Result<Woken> {
        let news = async {
            match until {
                Until::Gone { node, alone } => self.wait_for_end(queue, node, alone).await,
                Until::Fewer { than, .. } if than > WATCHES => self.wait_for_change(queue).await,
                Until::Fewer { than, ahead } => Box::pin(self.wait_for_room(queue, than, ahead)).await,
            }
        };
        tokio::select! {
            biased;
            () = passed(deadline) => Ok(Woken::Over),
            () = self.session.ended() => Ok(Woken::Over),
            woken = news => woken,
        }
    }

    /// Waits for a node before ours to change or go.
    ///
    /// When the only one goes and we are the next, the lock is ours without another look, if nothing else can have
    /// changed. There are three such things, and all would be told of before the end of the holder's node, because
    /// the servers and the driver keep the order of events:
    /// - our own node was deleted; there is a watch on it too;
    /// - the holder raised the fences of the lock; it says so in its own node. Others that held the lock with it are gone since
    ///   before the queue was read, in which their raise would have been seen;
    /// - the holder had the lock kept when it was done. It writes to its own node before that goes.
    ///
    /// What happened while the connection was lost is told in any order, so then we look.
    async fn wait_for_end(&self, queue: &QueueView, before: &str, alone: bool) -> Result<Woken> {
        let client = &self.session.client;
        let mut states = client.state_watcher();
        let (path, own_path) = (format!("{}/{before}", self.lock), format!("{}/{}", self.lock, queue.node.name));
        let may_be_next = alone && !queue::has_record(&queue.children) && !window::is_kept(&queue.children);
        let own = may_be_next.then(|| self.look(&own_path, Use::Hearing)).flatten();
        let Some(watched) = self.look(&path, Use::Waiting) else { return Ok(Woken::Unwatched) };
        let own = match own {
            Some(own) => {
                let Some((_, watch)) = self.seen(own).await? else { return Ok(Woken::Changed) };
                Some(watch)
            }
            None => None,
        };
        let Some((data, watch)) = self.seen(watched).await? else { return Ok(Woken::Changed) };
        let is_next = own.is_some() && Value::parse(&data).is_none_or(|value| value.fence.is_none());
        let mut own_changed = pin!(async {
            match own {
                Some(own) => changed(own).await,
                None => std::future::pending().await,
            }
        });
        let event = tokio::select! {
            biased;
            _ = own_changed.as_mut() => return Ok(Woken::Changed),
            event = changed(watch) => event,
        };
        match event {
            None => Ok(Woken::Over),
            Some(EventType::NodeDeleted) if is_next => {
                // Both watches may have spoken since the own one was looked at above.
                let is_stale = is_ready(own_changed) || is_ready(states.changed());
                Ok(if is_stale { Woken::Changed } else { Woken::Next })
            }
            Some(_) => Ok(Woken::Changed),
        }
    }

    /// Waits until fewer than so many of the nodes before ours are left, whichever they are: as many are watched, and when one is
    /// gone, another, which needs no look at the queue. None can have come between.
    async fn wait_for_room(&self, queue: &QueueView, than: usize, mut ahead: Vec<&str>) -> Result<Woken> {
        // From here on the nearest is the last.
        ahead.reverse();
        let mut watched: Vec<(&str, News)> = Vec::with_capacity(than);
        loop {
            let missing = than - watched.len();
            if ahead.len() < missing {
                return Ok(Woken::Changed);
            }
            let nodes = ahead.split_off(ahead.len() - missing);
            let path = |node| format!("{}/{node}", self.lock);
            let asked: Vec<_> = nodes.into_iter().map(|node| (node, self.look(&path(node), Use::Waiting))).collect();
            if asked.iter().any(|(_, answer)| answer.is_none()) {
                drop((asked, watched));
                return self.wait_for_change(queue).await;
            }
            for (node, answer) in asked {
                let Some(answer) = answer else { continue };
                if let Some((_, watch)) = self.seen(answer).await? {
                    watched.push((node, Box::pin(changed(watch))));
                }
            }
            if watched.len() < than {
                continue;
            }
            let (node, event) = first(&mut watched).await;
            match event {
                None => return Ok(Woken::Over),
                Some(EventType::NodeDeleted) => {}
                // It says something else now, and is still there.
                Some(_) => ahead.push(node),
            }
        }
    }

    /// Waits for what comes and goes in the queue, until we don't have to wait for that any more.
    async fn wait_for_change(&self, queue: &QueueView) -> Result<Woken> {
        let client = &self.session.client;
        loop {
            let listed =
                self.session.watches.ask(&self.lock, Use::Waiting, || client.list_and_watch_children(&self.lock));
            let Some(listed) = listed else { return Ok(Woken::Unwatched) };
            let Some((children, watch)) = self.seen(listed).await? else { return Ok(Woken::Changed) };
            let place = queue::place(&children, &queue.node.name);
            if !matches!(place, Position::Behind { until: Until::Fewer { .. }, .. }) {
                return Ok(Woken::Changed);
            }
            if changed(watch).await.is_none() {
                return Ok(Woken::Over);
            }
        }
    }
}

/// The first of the watches that has news, which is taken out.
async fn first<'n>(watched: &mut Vec<(&'n str, News)>) -> (&'n str, Option<EventType>) {
    poll_fn(|context| {
        for index in 0..watched.len() {
            if let Poll::Ready(event) = watched[index].1.as_mut().poll(context) {
                return Poll::Ready((watched.swap_remove(index).0, event));
            }
        }
        Poll::Pending
    })
    .await
}

/// Waits for a moment; for ever, if it is beyond the clock's range.
pub(super) async fn passed(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use std::{num::NonZeroU32, sync::Arc, time::Duration};

    use lockkit_core::{AcquireRequest, Attempt, Claim, LockStore as _, Mode};
    use lockkit_testkit::faults::{Direction, Proxy};
    use tokio::sync::Notify;

    use crate::{
        ZkConfig, ZkStore,
        testing::{claim, granted, request, server},
    };

    fn permit(wait: Duration) -> AcquireRequest {
        let mode = Mode::Permit { limit: NonZeroU32::new(2).expect("not zero") };
        request(&Claim { mode, ..claim() }, wait)
    }

    /// From outside it can't be brought about: while a session has a connection that answers, nothing but the passing of its
    /// timeout ends it.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn the_end_of_a_session_ends_a_wait_that_is_about_to_begin() {
        let server = server().await;
        let holder = ZkStore::connect(ZkConfig::new([server.addr().to_string()])).await.expect("connect");
        for _ in 0..2 {
            granted(holder.acquire(&permit(Duration::ZERO)).await);
        }
        let proxy = Arc::new(Proxy::start(server.addr()).await.expect("proxy"));
        let store = Arc::new(ZkStore::connect(ZkConfig::new([proxy.addr().to_string()])).await.expect("connect"));
        let session = store.sessions().present().expect("a session");
        let (listed, held) = (Arc::new(Notify::new()), Arc::downgrade(&proxy));
        let news = Arc::clone(&listed);
        proxy.rewrite_replies(move |replies| {
            if replies.windows(8).filter(|text| text == b"permit2-").count() >= 3 {
                // It hears who is before it, and of what it asks next it hears nothing.
                _ = held.upgrade().map(|proxy| proxy.hold(Direction::ToClient));
                news.notify_one();
            }
            replies
        });
        let waiting = tokio::spawn(async move { store.acquire(&permit(Duration::from_secs(60))).await });
        listed.notified().await;
        session.end();
        let answer = waiting.await.expect("no panic");
        assert!(matches!(answer, Ok(Attempt::Contended(_))), "it waited for an answer: {answer:?}");
    }
}
