//! Watches, as many as the driver can announce on another connection, and other news of the driver.
//!
//! After a reconnection the driver announces its watches with requests of 128 KiB of paths each, and gives all of them the
//! same number. At the second answer under that number it hangs up, and so it does on every connection after that, until the
//! session is over, with all leases (zookeeper-client 0.11, `WatchManager::resend_watches`, `Depot::pop_request`). So the paths
//! that a session watches stay within one such request. What finds no room asks again at its own pace.

use std::{
    future::Future,
    pin::pin,
    sync::{Arc, Mutex},
    task::{Context, Waker},
};

use lockkit_core::store::{unpoisoned, without_panic};
use zookeeper_client::{Error, EventType, OneshotWatcher};

use crate::client::driver::Answer;

/// How many bytes the paths have together that the driver announces in one request.
const MOST: usize = 128 * 1024;

/// What a watch is for, and so how much may be taken up when it is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    /// To spare a list of the queue.
    Sparing,
    /// To hear at once of a lease that was broken, or that the holder went and nothing else changed.
    Hearing,
    /// To wait for the node before one's own.
    Waiting,
}

impl Use {
    fn limit(self) -> usize {
        match self {
            Self::Sparing => MOST / 4,
            Self::Hearing => MOST / 4 * 3,
            Self::Waiting => MOST,
        }
    }
}

/// The room that the watches of a session take up.
#[derive(Clone, Debug, Default)]
pub(crate) struct Watches(Arc<Mutex<Taken>>);

#[derive(Debug, Default)]
struct Taken {
    bytes: usize,
    /// How many of them are for requests whose callers went away before the answer. The driver may still get one, and has a
    /// watch then until it hears that nobody wants it.
    left: usize,
}

/// The room of one watch.
#[derive(Debug)]
struct Room {
    watches: Watches,
    bytes: usize,
    /// Whether the driver has the watch or will never have it, and not a request for it.
    answered: bool,
}

/// A watch that is set.
#[derive(Debug)]
pub(crate) struct Watched {
    // It is dropped before its room: what is asked for in that room goes behind the word that this one is not wanted.
    watcher: OneshotWatcher,
    room: Room,
}

impl Watches {
    /// Asks for something together with a watch on `path`, at once, if there is room for it.
    pub(crate) fn ask<'a, T, F>(
        &self,
        path: &str,
        purpose: Use,
        ask: impl FnOnce() -> F,
    ) -> Option<Answer<'a, (T, Watched)>>
    where
        F: Future<Output = Result<(T, OneshotWatcher), Error>> + Send + 'a,
    {
        let mut room = self.take(path.len(), purpose)?;
        let answer = ask();
        Some(Box::pin(async move {
            let answer = answer.await;
            room.answered = true;
            answer.map(|(answer, watcher)| (answer, Watched { watcher, room }))
        }))
    }

    fn take(&self, bytes: usize, purpose: Use) -> Option<Room> {
        let mut taken = unpoisoned(&self.0);
        if taken.bytes + bytes > purpose.limit() {
            return None;
        }
        taken.bytes += bytes;
        Some(Room { watches: self.clone(), bytes, answered: false })
    }

    /// How much room is taken up by requests whose callers went away.
    pub(crate) fn left(&self) -> usize {
        unpoisoned(&self.0).left
    }

    /// Takes note that a request was answered that was sent when `left` was so much: what was sent before is over.
    pub(crate) fn settle(&self, left: usize) {
        let mut taken = unpoisoned(&self.0);
        taken.left -= left;
        taken.bytes -= left;
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        let mut taken = unpoisoned(&self.watches.0);
        if self.answered {
            taken.bytes -= self.bytes;
        } else {
            taken.left += self.bytes;
        }
    }
}

/// What a watch tells; `None` if its session is over, or nobody serves it any more.
///
/// The driver's task ends with the runtime on which the session was opened, and whoever then waits for a watch on
/// another one runs into an `unwrap` (zookeeper-client 0.11, `OneshotReceiver::recv`). A lost session is no reason for a
/// caller to panic.
pub(crate) async fn changed(watched: Watched) -> Option<EventType> {
    let Watched { watcher, room: _room } = watched;
    let event = without_panic(async { Some(watcher.changed().await.event_type) }, || None).await;
    event.filter(|event| *event != EventType::Session)
}

/// Whether there is news already. It waits for none.
pub(crate) fn is_ready<T>(news: impl Future<Output = T>) -> bool {
    pin!(news).poll(&mut Context::from_waker(Waker::noop())).is_ready()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_given_back_when_the_driver_surely_has_no_watch() {
        let watches = Watches::default();
        let mut answered = watches.take(MOST / 4, Use::Sparing).expect("it is empty");
        assert!(watches.take(1, Use::Sparing).is_none());
        let left = watches.take(MOST / 2, Use::Hearing).expect("leases have room of their own");
        assert!(watches.take(1, Use::Hearing).is_none());
        assert!(watches.take(MOST / 4 + 1, Use::Waiting).is_none());
        drop(watches.take(MOST / 4, Use::Waiting).expect("waiters have room of their own"));
        assert_eq!(
            (watches.left(), watches.take(1, Use::Waiting).is_none()),
            (MOST / 4, true),
            "it may be answered yet"
        );
        let before = watches.left();
        drop(left);
        watches.settle(before);
        assert_eq!(watches.left(), MOST / 2, "it was left after that request had been sent");
        answered.answered = true;
        drop(answered);
        watches.settle(MOST / 2);
        assert!(watches.take(MOST, Use::Waiting).is_some(), "all is free");
    }
}
