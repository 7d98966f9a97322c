//! How a session lives: its task, the signs of life that this gives, and what they prove.

use std::{
    sync::{Arc, MutexGuard, Weak, atomic::Ordering},
    time::Duration,
};

use lockkit_core::{Moment, store::unpoisoned};
use tokio::{
    sync::{Notify, oneshot},
    time::{sleep, timeout},
};
use zookeeper_client::{self as zk, CreateMode, StateWatcher};

use super::{Session, Slot};
use crate::{
    client::{claims::Stage, connect, proof::Proof, watched},
    wire::error::Failure,
};

/// How often a session tries to write to a node of its own that is removed again and again.
const BEAT_TRIES: u32 = 4;

impl Session {
    /// What is known of how long the session lives, reconnections up to now included: the driver tells of one before it
    /// passes on the first answer that comes after it.
    pub(super) fn proof(&self) -> MutexGuard<'_, Proof> {
        let mut proof = unpoisoned(&self.proof);
        if watched::is_ready(unpoisoned(&self.moves).changed()) {
            proof.moved(self.now());
        }
        proof
    }

    /// Until when the session surely lives.
    pub(crate) fn proven(&self) -> Moment {
        self.proof().until()
    }

    /// The session's timeout.
    pub(crate) fn timeout(&self) -> Duration {
        self.proof().timeout()
    }

    /// Takes note that a write sent at `sent` was acknowledged, and that its answer shows that it was in this session.
    pub(crate) fn wrote(&self, sent: Moment) {
        let mut proof = self.proof();
        // Whoever keeps a session that is over until nobody believes in it has looked already until when that is.
        if !*self.over.borrow() {
            proof.wrote(sent);
        }
    }

    /// Makes sure that the last proof of life is recent, with one request for all who ask at the same time.
    pub(crate) async fn sign_of_life(&self, bound: Duration) -> Result<(), Failure> {
        if self.proof().is_fresh(self.now()) {
            return Ok(());
        }
        let mut signs = self.signs.subscribe();
        self.poke.notify_one();
        let sign = async {
            tokio::select! {
                _ = signs.changed() => {}
                () = self.ended() => return Err(Failure::Driver(zk::Error::SessionExpired)),
            }
            signs.borrow_and_update().clone().unwrap_or(Ok(()))
        };
        // The sign that is announced first may have been sent before we asked. That is as good: it is recent.
        timeout(bound, sign).await.unwrap_or_else(|_| Err(self.unheard(bound)))
    }

    /// Gives a sign of life, and if anything depends on the session, proves that it lives.
    async fn pulse(&self) {
        let sign = self.sign().await;
        let settled = sign.is_ok();
        self.signs.send_replace(Some(sign));
        if settled && self.sweeps.load(Ordering::Relaxed) > 0 {
            // The next sign of life deletes what is left: leases depend on signs that come in time.
            let until = self.now() + self.proof().pace() / 2;
            if self.sweep(until, self.config.timeout).await.is_ok_and(|is_done| is_done) {
                // Set again meanwhile, it is one less than it could be.
                self.sweeps.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    async fn sign(&self) -> Result<(), Failure> {
        let unsettled = self.proof().unsettled();
        if let Some(moves) = unsettled {
            self.settle(moves).await?;
        }
        let (sent, left) = (self.now(), self.watches.left());
        self.lead(sent, self.config.timeout, Box::pin(self.client.sync(self.names.root()))).await?;
        self.watches.settle(left);
        if self.claims().is_empty() { Ok(()) } else { self.leader_time().await.map(drop) }
    }

    /// Finds out which timeout the session has since it was announced to another server, or to the same one with another
    /// configuration. The driver knows it, but does not tell. If it is shorter, the leases that there are can't be kept for as
    /// long as was promised: they are lost.
    async fn settle(&self, moves: u64) -> Result<(), Failure> {
        let timeout = connect::shortest_timeout(&self.config, self.timeout()).await?;
        let is_shorter = unpoisoned(&self.proof).settle(moves, timeout);
        if is_shorter {
            for claimed in self.claims().values_mut() {
                claimed.cut = matches!(claimed.stage, Stage::Held(..));
            }
            self.alarm.raise_all();
        }
        Ok(())
    }

    /// Writes to the session's own node, and proves by it that the session lives. Says when that was, by the leader's clock, in
    /// milliseconds since 1970: no request but a write asks for that.
    pub(crate) async fn leader_time(&self) -> Result<i64, Failure> {
        let path = self.names.session(self.client.session_id().0);
        for _ in 0..BEAT_TRIES {
            let is_made = *unpoisoned(&self.own_node);
            let beaten = if is_made { self.write_own_node(&path).await? } else { self.make_own_node(&path).await? };
            if let Some(time) = beaten {
                return Ok(time);
            }
        }
        Err(Failure::Driver(zk::Error::NoNode))
    }

    /// Writes to the session's own node. `None` if there is none: an administrator deleted it.
    ///
    /// The answer does not tell in which session it was: a server may answer a reconnecting client with a new session, and
    /// the driver does not mind (ClickHouse/ClickHouse#116690). The node itself stays until the old session ends. So the
    /// write proves something only if a request behind it shows that the session has that node.
    async fn write_own_node(&self, path: &str) -> Result<Option<i64>, Failure> {
        let (sent, bound) = (self.now(), self.config.timeout);
        let beat = Box::pin(self.client.set_data(path, b"", None));
        let own = Box::pin(self.client.list_ephemerals(path));
        let (beat, own) = tokio::join!(self.lead(sent, bound, beat), self.read(bound, own));
        match beat {
            Ok(_) if own?.is_empty() => Err(self.replaced()),
            Ok(stat) => {
                self.wrote(sent);
                Ok(Some(stat.mtime))
            }
            Err(failure) if failure.is(&zk::Error::NoNode) => {
                *unpoisoned(&self.own_node) = false;
                Ok(None)
            }
            Err(failure) => Err(failure),
        }
    }

    /// Makes the session's own node. `None` if that has to be seen first.
    async fn make_own_node(&self, path: &str) -> Result<Option<i64>, Failure> {
        let (sent, bound, options) = (self.now(), self.config.timeout, self.options(CreateMode::Ephemeral));
        match self.lead(sent, bound, Box::pin(self.client.create(path, b"", &options))).await {
            Ok((stat, _)) if !self.owns(stat.ephemeral_owner) => return Err(self.replaced()),
            Ok((stat, _)) => {
                *unpoisoned(&self.own_node) = true;
                self.wrote(sent);
                return Ok(Some(stat.ctime));
            }
            // A reply was lost.
            Err(failure) if failure.is(&zk::Error::NodeExists) => *unpoisoned(&self.own_node) = true,
            Err(failure) if failure.is(&zk::Error::NoNode) => {
                let options = self.options(CreateMode::Container);
                self.lead(self.now(), bound, Box::pin(self.client.mkdir(self.names.root(), &options))).await?;
            }
            Err(failure) => return Err(failure),
        }
        Ok(None)
    }
}

/// The task of a session: it notices its end, and gives signs of life. It keeps the session alive only while it works, and after the
/// end for as long as anybody may believe in a lease of it.
pub(super) async fn live(
    session: Weak<Session>,
    mut states: StateWatcher,
    poke: Arc<Notify>,
    mut kept: oneshot::Receiver<Arc<Session>>,
    slot: Weak<Slot>,
) {
    let kept = loop {
        let Some(pause) = session.upgrade().map(|session| session.proof().pace()) else { return };
        let state = tokio::select! {
            biased;
            kept = &mut kept => break kept.ok(),
            state = states.changed() => Some(state),
            () = poke.notified() => None,
            () = sleep(pause) => None,
        };
        let Some(session) = session.upgrade() else { return };
        if state.is_some_and(zk::SessionState::is_terminated) {
            session.end();
        } else if state != Some(zk::SessionState::Disconnected) {
            session.pulse().await;
        }
    };
    // As long as anybody has it the driver may keep it alive at the servers, with all its nodes.
    _ = slot.upgrade().map(|slot| slot.present(|present| !present.is_over()));
    if let Some(session) = kept {
        sleep(session.proven().since(session.now())).await;
    }
}

#[cfg(test)]
mod tests {
    use std::{pin::pin, time::Instant};

    use lockkit_core::{AcquireRequest, Claim, Effect, Error, LockKey, LockStore as _, ShiftedClock};
    use lockkit_testkit::faults::Proxy;

    use super::*;
    use crate::{
        ZkConfig, ZkStore,
        testing::{claim, granted, request, server},
    };

    /// A claim waits for nearly as long as the session lasts, and is the next one then: a sign of life is due, and is not
    /// answered. The session may be declared over meanwhile, while it has something else, too.
    async fn be_the_next_without_a_sign_of_life(ends: bool) -> (Error, Duration) {
        const SESSION: Duration = Duration::from_secs(60);
        let server = server().await;
        let (proxy, clock) = (Proxy::start(server.addr()).await.expect("proxy"), Arc::new(ShiftedClock::default()));
        let config = ZkConfig::new([proxy.addr().to_string()]).session(SESSION).timeout(Duration::from_secs(10));
        let store = ZkStore::connect(config.clock(Arc::<ShiftedClock>::clone(&clock))).await.expect("connect");
        let other = ZkStore::connect(ZkConfig::new([server.addr().to_string()])).await.expect("connect");
        let (held, theirs) = (Claim { key: LockKey::new("b").expect("name"), ..claim() }, claim());
        granted(store.acquire(&request(&held, Duration::ZERO)).await);
        granted(other.acquire(&request(&theirs, Duration::ZERO)).await);
        let asked = AcquireRequest { ttl: Duration::from_secs(4), ..request(&claim(), SESSION) };
        let mut asking = pin!(store.acquire(&asked));
        let watched = async { while server.word("wchp").await.expect("wchp").matches("/lockkit/a/").count() < 2 {} };
        tokio::select! {
            answer = asking.as_mut() => panic!("it does not wait: {answer:?}"),
            () = watched => {}
        }
        let session = store.sessions().present().expect("a session");
        let (silent, root) = (Arc::new(Notify::new()), session.names.root().to_owned());
        let news = Arc::clone(&silent);
        proxy.rewrite_replies(move |replies| {
            if !replies.ends_with(root.as_bytes()) {
                return replies;
            }
            news.notify_one();
            Vec::new()
        });
        clock.advance(SESSION - Duration::from_millis(1500));
        other.release(&theirs).await.expect("release");
        let start = Instant::now();
        let (answer, ()) = tokio::join!(asking, async {
            silent.notified().await;
            if ends {
                session.end();
            }
        });
        (answer.expect_err("nothing proves that the session lives"), start.elapsed())
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_claim_whose_session_is_declared_over_when_it_is_the_next_may_have_a_node() {
        let (error, _) = be_the_next_without_a_sign_of_life(true).await;
        assert_eq!(error.effect(), Effect::Unknown, "{error}");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn an_acquisition_waits_for_a_sign_of_life_for_no_longer_than_for_other_answers() {
        let (error, elapsed) = be_the_next_without_a_sign_of_life(false).await;
        assert!(elapsed < Duration::from_secs(5), "it waited for {elapsed:?}: {error}");
    }
}
