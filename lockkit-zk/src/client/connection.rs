//! The present session: made when it is needed, and anew when the last one is over.

use std::{
    fmt,
    sync::{Arc, Mutex},
    time::Duration,
};

use lockkit_core::{Alarm, Error, Result, Token};
use tokio::{sync::watch, time::timeout};

use crate::{
    client::{
        driver::lock,
        session::{Past, Session},
    },
    config::ZkConfig,
    wire::{
        error::{self, Sent},
        name::Names,
    },
};

/// The way to the ensemble.
pub(crate) struct Link {
    pub(crate) config: ZkConfig,
    pub(crate) names: Names,
    slot: Arc<Mutex<Slot>>,
    past: Arc<Past>,
    alarm: Alarm,
}

/// Where the task that opens a session puts it.
type Opening = watch::Receiver<Option<Result<Arc<Session>>>>;

enum Slot {
    Empty,
    Open(Arc<Session>),
    /// A task opens one. It is a task so that callers who lose patience don't make it start over.
    Opening(Opening),
}

impl Link {
    pub(crate) fn new(config: ZkConfig, names: Names, alarm: Alarm) -> Self {
        Self { config, names, slot: Arc::new(Mutex::new(Slot::Empty)), past: Arc::default(), alarm }
    }

    /// The present session, or a new one.
    ///
    /// # Errors
    /// `Unavailable`, `TimedOut`, `Denied`. Nothing was asked for yet, so without effect.
    pub(crate) async fn session(&self) -> Result<Arc<Session>> {
        let mut opening = match self.open_or_opening() {
            Ok(session) => return Ok(session),
            Err(opening) => opening,
        };
        let bound = self.config.timeout;
        match timeout(bound, opening.wait_for(Option::is_some)).await {
            Ok(Ok(session)) => session.clone().unwrap_or_else(|| Err(error::session_over())),
            // The runtime that the task ran on is gone.
            Ok(Err(_)) => Err(error::session_over()),
            Err(_) => Err(Error::no_answer(bound, Sent::ReadOnly)),
        }
    }

    /// The present session, if there is one.
    pub(crate) fn present(&self) -> Option<Arc<Session>> {
        match &*lock(&self.slot) {
            Slot::Open(session) if !session.is_over() => Some(Arc::clone(session)),
            _ => None,
        }
    }

    /// The timeout of the present session, or else the one that will be asked for.
    pub(crate) fn session_timeout(&self) -> Duration {
        self.present().map_or(self.config.session, |session| session.timeout())
    }

    /// Whether the claim was held in a session that is over.
    pub(crate) fn was_held(&self, token: &Token) -> bool {
        lock(&self.past).contains(token)
    }

    /// Forgets that a claim was held in a session that is over: its holder has been told.
    pub(crate) fn forget(&self, token: &Token) -> bool {
        lock(&self.past).remove(token)
    }

    fn open_or_opening(&self) -> Result<Arc<Session>, Opening> {
        let mut slot = lock(&self.slot);
        match &*slot {
            Slot::Open(session) if !session.is_over() => return Ok(Arc::clone(session)),
            Slot::Opening(opening) if opening.has_changed().is_ok() => return Err(opening.clone()),
            Slot::Empty | Slot::Open(_) | Slot::Opening(_) => {}
        }
        let (outcome, opening) = watch::channel(None);
        *slot = Slot::Opening(opening.clone());
        let (config, names) = (self.config.clone(), self.names.clone());
        let (slot, past, alarm) = (Arc::clone(&self.slot), Arc::clone(&self.past), self.alarm.clone());
        tokio::spawn(async move {
            let session = Session::open(&config, names, past, alarm).await;
            *lock(&slot) = session.as_ref().map_or(Slot::Empty, |session| Slot::Open(Arc::clone(session)));
            outcome.send_replace(Some(session));
        });
        Err(opening)
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").field("config", &self.config).field("open", &self.present().is_some()).finish()
    }
}

#[cfg(test)]
mod tests {
    use lockkit_core::{LockStore, Locker, LossReason};
    use lockkit_testkit::servers::{ZooKeeperFlavor, ZooKeeperServer};

    use super::*;
    use crate::ZkStore;

    /// From outside it can't be seen apart from the end of the lease: the servers end a session late, not early.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn the_end_of_a_session_is_heard_at_once() {
        let server = ZooKeeperServer::start(ZooKeeperFlavor::Installed).await.expect("ZooKeeper is required");
        let config = ZkConfig::new([server.addr().to_string()]);
        let store = Arc::new(ZkStore::connect(config).await.expect("connect"));
        let locker = Locker::shared_builder(Arc::clone(&store) as Arc<dyn LockStore>).build();
        let guard = locker.lock("a").acquire().await.expect("acquire");
        store.link().present().expect("a session").end();
        // The next regular renewal is some 6 s away.
        let reason = timeout(Duration::from_secs(3), guard.lost()).await.expect("at once");
        assert_eq!(reason, LossReason::SessionEnded);
    }
}
