//! One session with the ensemble: its requests, the claims that live in it, and the proof that it lives.
//!
//! Every request of the store goes through [`Session::read`] or [`Session::lead`], which bound it in time; the latter takes
//! note that it has been to the leader. The driver sends requests in the order in which they are **called**, not in which
//! they are awaited, and the servers keep that order: what is called together goes together.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, Weak,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use lockkit_core::{
    Alarm, Clock, Moment, Result, Token,
    store::{SingleFlight, unpoisoned},
};
use tokio::{
    sync::{Notify, oneshot, watch},
    task::AbortHandle,
    time::{sleep, timeout},
};
use zookeeper_client::{self as zk, Acls, Client, CreateMode, CreateOptions, StateWatcher};

use crate::{
    client::{
        claims::{Claimed, Stage},
        connect,
        driver::{Answer, understood},
        proof::Proof,
        uncontended::Uncontended,
        watched::{self, Watches},
    },
    config::ZkConfig,
    wire::{
        error::{self, Failure, Sent},
        name::Names,
    },
};

/// How often a session tries to write to a node of its own that is removed again and again.
const BEAT_TRIES: u32 = 4;

/// How often a session looks for what it left behind after the outcome of a creation was not known.
const SWEEPS: u32 = 3;

/// A session, alive or over.
pub(crate) struct Session {
    pub(crate) client: Client,
    pub(crate) names: Names,
    id: i64,
    config: ZkConfig,
    acls: Acls<'static>,
    proof: Mutex<Proof>,
    /// Tells of reconnections that the proof has not been told of yet.
    moves: Mutex<StateWatcher>,
    claims: Mutex<HashMap<Token, Claimed>>,
    pub(crate) uncontended: Mutex<Uncontended>,
    pub(crate) watches: Watches,
    over: watch::Sender<bool>,
    past: Arc<Past>,
    pub(crate) alarm: Alarm,
    /// Asks for a sign of life now; each one's end is announced.
    poke: Arc<Notify>,
    signs: watch::Sender<Option<Result<(), Failure>>>,
    /// Whether the session's own node was made.
    own_node: Mutex<bool>,
    task: OnceLock<AbortHandle>,
    itself: Weak<Self>,
    /// Tells the session's task of the end, and gives it the session to keep if something was held in it.
    last: Mutex<Option<oneshot::Sender<Arc<Self>>>>,
    /// How many of the next signs of life are to look for nodes that were left behind.
    sweeps: AtomicU32,
}

/// The claims that were granted in sessions that are over, until somebody was told.
pub(crate) type Past = Mutex<HashSet<Token>>;

/// Where the present session is, for all who ask for it.
pub(crate) type Slot = SingleFlight<Arc<Session>>;

impl Session {
    /// Establishes a session. It lives on its own from then on, until it is dropped or over.
    ///
    /// # Errors
    /// Also [`Unsupported`](lockkit_core::ErrorKind::Unsupported): the servers are older than 3.6. They don't know the
    /// question which nodes a session has, and would hang up at each one.
    pub(crate) async fn open(
        config: &ZkConfig,
        names: Names,
        past: Arc<Past>,
        alarm: Alarm,
        slot: Weak<Slot>,
    ) -> Result<Arc<Self>> {
        let opened = config.clock.now();
        let client = connect::connect(config).await?;
        let proof = Proof::new(opened, config.clock.now(), client.session_timeout());
        let (last, kept) = oneshot::channel();
        let session = Arc::new_cyclic(|itself| Self {
            id: client.session_id().0,
            config: config.clone(),
            acls: config.acls(),
            proof: Mutex::new(proof),
            moves: Mutex::new(client.state_watcher()),
            names,
            claims: Mutex::default(),
            uncontended: Mutex::default(),
            watches: Watches::default(),
            over: watch::Sender::new(false),
            past,
            alarm,
            poke: Arc::default(),
            signs: watch::Sender::new(None),
            own_node: Mutex::default(),
            task: OnceLock::new(),
            itself: Weak::clone(itself),
            last: Mutex::new(Some(last)),
            sweeps: AtomicU32::new(0),
            client,
        });
        let own = Box::pin(session.client.list_ephemerals(session.names.root()));
        session.read(config.timeout, own).await.map_err(|failure| error::map(&failure, Sent::ReadOnly))?;
        let states = session.client.state_watcher();
        let task = tokio::spawn(live(Arc::downgrade(&session), states, Arc::clone(&session.poke), kept, slot));
        _ = session.task.set(task.abort_handle());
        Ok(session)
    }

    pub(crate) fn now(&self) -> Moment {
        self.config.clock.now()
    }

    /// Whether `owner`, of a node's stat, is this session.
    pub(crate) fn owns(&self, owner: i64) -> bool {
        owner == self.id
    }

    pub(crate) fn is_over(&self) -> bool {
        // Without its runtime a session is of no use: the driver's task is gone too.
        if self.task.get().is_some_and(AbortHandle::is_finished) {
            self.end();
        }
        *self.over.borrow()
    }

    /// Returns when the session is over.
    pub(crate) async fn ended(&self) {
        // It can't fail: the sender lives as long as `self`.
        _ = self.over.subscribe().wait_for(|over| *over).await;
    }

    /// Declares the session over. All that it held is lost at once.
    ///
    /// The servers may still know it. Then its nodes stay until nobody can believe in a lease any more: holders are told of the
    /// loss, but they hear of it only when their tasks are run.
    pub(crate) fn end(&self) {
        let held = {
            // Before the end is declared, so that whoever sees it and forgets a claim does so after this.
            let mut past = unpoisoned(&self.past);
            if self.over.send_replace(true) {
                return;
            }
            self.give_up_claims(&mut past)
        };
        if let Some(last) = unpoisoned(&self.last).take()
            && held
            && let Some(session) = self.itself.upgrade()
        {
            // If its task has ended nobody can keep it, and the driver's task, on the same runtime, has ended without a word
            // to the servers.
            drop(last.send(session));
        }
        self.alarm.raise_all();
    }

    /// Forgets all claims, and takes note of those that were held; tells whether any was.
    fn give_up_claims(&self, past: &mut HashSet<Token>) -> bool {
        let mut held = false;
        for (token, claimed) in unpoisoned(&self.claims).drain() {
            if matches!(claimed.stage, Stage::Held(..)) {
                past.insert(token);
                held = true;
            }
        }
        held
    }

    /// Ends the session's task, as the end of its runtime does.
    #[cfg(test)]
    pub(crate) fn abandon(&self) {
        self.task.get().expect("it is open").abort();
    }

    pub(crate) fn claims(&self) -> MutexGuard<'_, HashMap<Token, Claimed>> {
        unpoisoned(&self.claims)
    }

    /// What is known of a claim.
    pub(crate) fn claimed(&self, token: &Token) -> Option<Claimed> {
        self.claims().get(token).cloned()
    }

    /// Takes note that the release of a claim is asked for; says what was known of it before.
    pub(crate) fn begin_release(&self, token: &Token) -> Option<Claimed> {
        let mut claims = self.claims();
        let claimed = claims.get_mut(token)?;
        let before = claimed.clone();
        claimed.releasing = true;
        Some(before)
    }

    /// Whether a node of the session with this token belongs to nobody: the claim is not known, or has another one.
    pub(crate) fn is_stray(&self, token: &Token, path: &str) -> bool {
        let claims = self.claims();
        // Under their lock, for the end of the session is declared before they are forgotten: then their nodes must stay, for
        // their holders may still believe in them.
        if *self.over.borrow() {
            return false;
        }
        let Some(claimed) = claims.get(token) else { return true };
        match &claimed.stage {
            // Its creation may just have been carried out.
            Stage::Asked => false,
            Stage::Queued(node) | Stage::Held(node, _) => path != format!("{}/{}", claimed.lock, node.name),
            Stage::Gone => true,
        }
    }

    /// Changes what is known of a claim, if anything is; tells whether it is.
    pub(crate) fn update(&self, token: &Token, change: impl FnOnce(&mut Claimed)) -> bool {
        self.claims().get_mut(token).map(change).is_some()
    }

    /// What is known of how long the session lives, reconnections up to now included: the driver tells of one before it
    /// passes on the first answer that comes after it.
    fn proof(&self) -> MutexGuard<'_, Proof> {
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

    pub(crate) fn options(&self, mode: CreateMode) -> CreateOptions<'static> {
        mode.with_acls(self.acls)
    }

    /// Awaits the answer to a request that reads.
    pub(crate) async fn read<T>(&self, bound: Duration, answer: Answer<'_, T>) -> Result<T, Failure> {
        let answer = match timeout(bound, understood(answer)).await {
            Ok(answer) => answer.map_err(Failure::from),
            Err(_) => Err(Failure::TimedOut(bound)),
        };
        if answer.as_ref().is_err_and(Failure::ends_session) {
            self.end();
        }
        answer
    }

    /// Awaits the answer to a request that goes through the leader, and was called at `sent`: a write, or a `sync`.
    pub(crate) async fn lead<T>(&self, sent: Moment, bound: Duration, answer: Answer<'_, T>) -> Result<T, Failure> {
        let answer = self.read(bound, answer).await;
        if answer.as_ref().map_or_else(Failure::is_answer, |_| true) {
            self.proof().passed(sent, self.now());
        }
        answer
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
    pub(crate) async fn sign_of_life(&self) -> Result<(), Failure> {
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
        let bound = self.config.timeout;
        timeout(bound, sign).await.unwrap_or(Err(Failure::TimedOut(bound)))
    }

    /// Takes note that the outcome of a creation is not known.
    pub(crate) fn is_in_doubt(&self) {
        self.sweeps.store(SWEEPS, Ordering::Relaxed);
    }

    /// Gives a sign of life, and if anything depends on the session, proves that it lives.
    async fn pulse(&self) {
        let sign = self.sign().await;
        let settled = sign.is_ok();
        if !settled && self.client.state() == zk::SessionState::SyncConnected && self.proof().is_silent(self.now()) {
            // The driver hears something, or it would have hung up, and makes nothing of it: the length of an answer was
            // spoilt, and it waits for the rest. It would do so for as long as requests are sent.
            self.end();
        }
        self.signs.send_replace(Some(sign));
        if settled && self.sweeps.load(Ordering::Relaxed) > 0 && self.sweep(self.config.timeout).await.is_ok() {
            // Set again meanwhile, it is one less than it could be.
            self.sweeps.fetch_sub(1, Ordering::Relaxed);
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
        if self.claims().is_empty() { Ok(()) } else { self.beat().await }
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

    /// Writes to the session's own node, and proves by it that the session lives.
    async fn beat(&self) -> Result<(), Failure> {
        let path = self.names.session(self.id);
        for _ in 0..BEAT_TRIES {
            let is_made = *unpoisoned(&self.own_node);
            let has_beaten =
                if is_made { self.write_own_node(&path).await? } else { self.make_own_node(&path).await? };
            if has_beaten {
                return Ok(());
            }
        }
        Err(Failure::Driver(zk::Error::NoNode))
    }

    /// Writes to the session's own node. It is `false` if there is none: an administrator deleted it.
    ///
    /// The answer does not tell in which session it was: a server may answer a reconnecting client with a new session, and
    /// the driver does not mind (ClickHouse/ClickHouse#116690). The node itself stays until the old session ends. So the
    /// write proves something only if a request behind it shows that the session has that node.
    async fn write_own_node(&self, path: &str) -> Result<bool, Failure> {
        let (sent, bound) = (self.now(), self.config.timeout);
        let beat = Box::pin(self.client.set_data(path, b"", None));
        let own = Box::pin(self.client.list_ephemerals(path));
        let (beat, own) = tokio::join!(self.lead(sent, bound, beat), self.read(bound, own));
        match beat {
            Ok(_) if own?.is_empty() => Err(self.replaced()),
            Ok(_) => {
                self.wrote(sent);
                Ok(true)
            }
            Err(failure) if failure.is(&zk::Error::NoNode) => {
                *unpoisoned(&self.own_node) = false;
                Ok(false)
            }
            Err(failure) => Err(failure),
        }
    }

    /// Makes the session's own node. It is `false` if that has to be seen first.
    async fn make_own_node(&self, path: &str) -> Result<bool, Failure> {
        let (sent, bound, options) = (self.now(), self.config.timeout, self.options(CreateMode::Ephemeral));
        match self.lead(sent, bound, Box::pin(self.client.create(path, b"", &options))).await {
            Ok((stat, _)) if !self.owns(stat.ephemeral_owner) => return Err(self.replaced()),
            Ok(_) => {
                *unpoisoned(&self.own_node) = true;
                self.wrote(sent);
                return Ok(true);
            }
            // A reply was lost.
            Err(failure) if failure.is(&zk::Error::NodeExists) => *unpoisoned(&self.own_node) = true,
            Err(failure) if failure.is(&zk::Error::NoNode) => {
                let options = self.options(CreateMode::Container);
                self.lead(self.now(), bound, Box::pin(self.client.mkdir(self.names.root(), &options))).await?;
            }
            Err(failure) => return Err(failure),
        }
        Ok(false)
    }

    /// The connection is one of another session. What we know belongs to the old one.
    pub(crate) fn replaced(&self) -> Failure {
        self.end();
        Failure::Driver(zk::Error::SessionExpired)
    }
}

/// The task of a session: it notices its end, and gives signs of life. It keeps the session alive only while it works, and after the
/// end for as long as anybody may believe in a lease of it.
async fn live(
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
