//! One session with the ensemble: its requests, and the claims that live in it.
//!
//! Every request of the store goes through [`Session::read`] or [`Session::lead`], which bound it in time; the latter takes
//! note that it has been to the leader. The driver sends requests in the order in which they are **called**, not in which
//! they are awaited, and the servers keep that order: what is called together goes together.

mod heartbeat;

use std::{
    collections::HashMap,
    future::Future,
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
    runtime::Handle,
    sync::{Notify, oneshot, watch},
    task::AbortHandle,
    time::timeout,
};
use zookeeper_client::{self as zk, Client, CreateMode, CreateOptions, StateWatcher};

use crate::{
    client::{
        claims::{Claimed, Stage},
        connect,
        driver::{Answer, understood},
        proof::Proof,
        uncontended::Uncontended,
        watched::Watches,
    },
    config::ZkConfig,
    wire::{
        error::{Failure, read_only},
        name::Names,
    },
};

/// How often a session looks for what it left behind after the outcome of a creation was not known.
const SWEEPS: u32 = 3;

/// A session, alive or over.
pub(crate) struct Session {
    pub(crate) client: Client,
    pub(crate) names: Names,
    config: ZkConfig,
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
    /// The runtime on which it was opened: the driver's task is there.
    home: Handle,
    itself: Weak<Self>,
    /// Tells the session's task of the end, and gives it the session to keep if something was held in it.
    last: Mutex<Option<oneshot::Sender<Arc<Self>>>>,
    /// How many of the next signs of life are to look for nodes that were left behind.
    sweeps: AtomicU32,
}

/// The claims of sessions that are over, until they are released, and whether they were granted and nobody was told.
pub(crate) type Past = Mutex<HashMap<Token, bool>>;

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
            config: config.clone(),
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
            home: Handle::current(),
            itself: Weak::clone(itself),
            last: Mutex::new(Some(last)),
            sweeps: AtomicU32::new(0),
            client,
        });
        let own = Box::pin(session.client.list_ephemerals(session.names.root()));
        session.read(config.timeout, own).await.map_err(|failure| read_only(&failure))?;
        let states = session.client.state_watcher();
        let task =
            tokio::spawn(heartbeat::live(Arc::downgrade(&session), states, Arc::clone(&session.poke), kept, slot));
        _ = session.task.set(task.abort_handle());
        Ok(session)
    }

    /// Runs something on the runtime on which the session was opened. That of the caller may end, or be driven no more, and the
    /// leases go on; without its own runtime nothing proves that the session lives.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        drop(self.home.spawn(task));
    }

    pub(crate) fn now(&self) -> Moment {
        self.config.clock.now()
    }

    /// Whether `owner`, of a node's stat, is this session.
    pub(crate) fn owns(&self, owner: i64) -> bool {
        owner == self.client.session_id().0
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

    /// Gives up all claims, and takes note of which were held; tells whether any was.
    fn give_up_claims(&self, past: &mut HashMap<Token, bool>) -> bool {
        let mut any = false;
        for (token, claimed) in unpoisoned(&self.claims).drain() {
            let held = matches!(claimed.stage, Stage::Held(..));
            past.insert(token, held);
            any |= held;
        }
        any
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

    pub(crate) fn options(&self, mode: CreateMode) -> CreateOptions<'static> {
        mode.with_acls(self.config.acls())
    }

    /// Awaits the answer to a request that reads.
    pub(crate) async fn read<T>(&self, bound: Duration, answer: Answer<'_, T>) -> Result<T, Failure> {
        let answer = match timeout(bound, understood(answer)).await {
            Ok(answer) => answer.map_err(Failure::from),
            Err(_) => Err(self.unheard(bound)),
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

    /// No answer came in time. A session that is connected is over if no answer has come for as long as it lasts without a sign of life.
    /// Then the driver does nothing more; or it hears something, for else it would have hung up, but makes nothing of it. Where it is not
    /// connected, a driver that goes on says within 7/5 of that time that the session has expired.
    ///
    /// - Nobody drives its runtime any more.
    /// - The length of an answer was spoilt, and it waits for the rest. It would do so for as long as requests are sent.
    pub(crate) fn unheard(&self, bound: Duration) -> Failure {
        let timeouts = if self.client.state() == zk::SessionState::SyncConnected { 1 } else { 2 };
        if self.proof().is_silent_for(timeouts, self.now()) {
            self.end();
        }
        Failure::TimedOut(bound)
    }

    /// Takes note that the outcome of a creation is not known.
    pub(crate) fn is_in_doubt(&self) {
        self.sweeps.store(SWEEPS, Ordering::Relaxed);
    }

    /// The connection is one of another session. What we know belongs to the old one.
    pub(crate) fn replaced(&self) -> Failure {
        self.end();
        Failure::Driver(zk::Error::SessionExpired)
    }
}
