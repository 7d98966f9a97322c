//! The sessions of a store, one after the other: the present one is made when it is needed, and anew when the last one is over.

use std::{fmt, sync::Arc, time::Duration};

use lockkit_core::{Alarm, Result, Token, store::unpoisoned};

use crate::{
    client::session::{Past, Session, Slot},
    config::ZkConfig,
    wire::name::Names,
};

/// The way to the ensemble: the present session, and what is to be said of those that are over.
pub(crate) struct Sessions {
    pub(crate) config: ZkConfig,
    pub(crate) names: Names,
    session: Arc<Slot>,
    past: Arc<Past>,
    alarm: Alarm,
}

impl Sessions {
    pub(crate) fn new(config: ZkConfig, names: Names, alarm: Alarm) -> Self {
        Self { config, names, session: Arc::default(), past: Arc::default(), alarm }
    }

    /// The present session, or a new one.
    ///
    /// # Errors
    /// `Unavailable`, `TimedOut`, `Denied`. Nothing was asked for yet, so without effect.
    pub(crate) async fn session(&self) -> Result<Arc<Session>> {
        let open = || {
            let (config, names, past, alarm) =
                (self.config.clone(), self.names.clone(), Arc::clone(&self.past), self.alarm.clone());
            let slot = Arc::downgrade(&self.session);
            async move { Session::open(&config, names, past, alarm, slot).await }
        };
        self.session.get(|session| !session.is_over(), self.config.timeout, open).await
    }

    /// The present session, if there is one.
    pub(crate) fn present(&self) -> Option<Arc<Session>> {
        self.session.present(|session| !session.is_over())
    }

    /// The timeout of the present session, or else the one that will be asked for.
    pub(crate) fn session_timeout(&self) -> Duration {
        self.present().map_or(self.config.session, |session| session.timeout())
    }

    /// Whether the claim was held in a session that is over.
    pub(crate) fn was_held(&self, token: &Token) -> bool {
        unpoisoned(&self.past).get(token) == Some(&true)
    }

    /// Whether the claim is of this store, in a session that is over.
    pub(crate) fn was_ours(&self, token: &Token) -> bool {
        unpoisoned(&self.past).contains_key(token)
    }

    /// Takes note that a claim was not held, or that its holder has been told. It may have left a node all the same.
    pub(crate) fn was_not_held(&self, token: &Token) {
        unpoisoned(&self.past).entry(*token).and_modify(|held| *held = false);
    }

    /// Forgets a claim of a session that is over; tells whether it was held. Its holder has been told.
    pub(crate) fn forget(&self, token: &Token) -> bool {
        unpoisoned(&self.past).remove(token) == Some(true)
    }
}

impl fmt::Debug for Sessions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sessions").field("config", &self.config).field("open", &self.present().is_some()).finish()
    }
}

#[cfg(test)]
mod tests {
    use lockkit_core::{LockStore, Locker, LossReason, Release, Renewal, Renewed};
    use tokio::time::timeout;

    use super::*;
    use crate::{
        ZkStore,
        testing::{claim, granted, request, server},
    };

    /// From outside it can't be seen apart from the end of the lease: the servers end a session late, not early.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn the_end_of_a_session_is_heard_at_once() {
        let server = server().await;
        let config = ZkConfig::new([server.addr().to_string()]);
        let store = Arc::new(ZkStore::connect(config).await.expect("connect"));
        let locker = Locker::shared_builder(Arc::clone(&store) as Arc<dyn LockStore>).build();
        let guard = locker.lock("a").acquire().await.expect("acquire");
        store.sessions().present().expect("a session").end();
        // The next regular renewal is some 6 s away.
        let reason = timeout(Duration::from_secs(3), guard.lost()).await.expect("at once");
        assert_eq!(reason, LossReason::SessionEnded);
    }

    /// A lease is revoked by another client alone: also once a renewal has told its holder of the end.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn nobody_revokes_a_lease_of_a_session_that_its_own_store_gave_up() {
        let server = server().await;
        let config = ZkConfig::new([server.addr().to_string()]);
        let store = ZkStore::connect(config.clone()).await.expect("connect");
        let other = ZkStore::connect(config).await.expect("connect");
        let mine = request(&claim(), Duration::ZERO);
        granted(store.acquire(&mine).await);
        store.sessions().present().expect("a session").end();
        let renewal = || [Renewal::new(mine.claim.clone(), Duration::from_secs(20))];
        let renewed = store.renew(&renewal()).await.remove(0);
        assert!(matches!(renewed, Ok(Renewed::Lost(LossReason::SessionEnded))), "{renewed:?}");
        store.release(&mine.claim).await.expect("release");
        let witness = other.sessions().present().expect("a session");
        let lock = witness.names.lock(&mine.claim.key);
        let is_revoked = witness.is_revoked(&lock, &mine.claim.token, Duration::from_secs(5)).await;
        assert!(!is_revoked.expect("a directory"));
        let renewed = store.renew(&renewal()).await.remove(0);
        assert!(matches!(renewed, Ok(Renewed::Lost(LossReason::Gone))), "{renewed:?}");
    }

    /// The guards of a session hear of its end when their tasks are run. Until then they believe in their leases, and nobody else
    /// may get the locks.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn what_a_session_held_that_is_over_goes_to_nobody_until_the_lease_has_lapsed() {
        const SESSION: Duration = Duration::from_secs(6);
        let server = server().await;
        let config = ZkConfig::new([server.addr().to_string()]).session(SESSION);
        let store = ZkStore::connect(config.clone()).await.expect("connect");
        let other = ZkStore::connect(config).await.expect("connect");
        let (mine, theirs) = (request(&claim(), Duration::ZERO), request(&claim(), SESSION * 5));
        let held = granted(store.acquire(&mine).await);
        store.sessions().present().expect("a session").end();
        assert!(store.sessions().present().is_none());
        let ended = store.info().clock.now();
        granted(other.acquire(&theirs).await);
        let taken = store.info().clock.now();
        assert!(held.until <= taken, "two holders for {:?}", held.until.since(taken));
        assert!(taken < ended + SESSION * 2, "it stayed for {:?}", taken.since(ended));
        let release = store.release(&mine.claim).await.expect("release");
        assert_eq!(release, Release::NotHeld(LossReason::SessionEnded));
    }
}
