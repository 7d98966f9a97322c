//! One session with the ensemble: its requests, the claims that live in it, and the proof that it lives.
//!
//! Every request of the store goes through [`Session::read`] or [`Session::write`], which bound it in time and take note
//! of what its answer proves. The driver sends requests in the order in which they are **called**, not in which
//! they are awaited, and the servers keep that order: what is called together goes together.

use std::{
    collections::{HashMap, HashSet},
    future::Future,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use lockkit_core::{Alarm, Clock, Fence, HolderInfo, Moment, Result, Token};
use tokio::{
    sync::{Notify, watch},
    task::AbortHandle,
    time::{sleep, timeout},
};
use zookeeper_client::{self as zk, Acls, Client, CreateMode, CreateOptions, StateWatcher};

use crate::{
    alone::Alone,
    config::ZkConfig,
    connect,
    error::{self, Failure, Sent},
    name::Names,
    proof::Proof,
    value::Value,
};

/// How often a session looks for what it left behind after the outcome of a creation was not known.
const SWEEPS: u32 = 3;

/// A session, alive or over.
pub(crate) struct Session {
    pub(crate) client: Client,
    pub(crate) names: Names,
    id: i64,
    timeout: Duration,
    acls: Acls<'static>,
    clock: Arc<dyn Clock>,
    proof: Mutex<Proof>,
    claims: Mutex<HashMap<Token, Claimed>>,
    pub(crate) alone: Mutex<Alone>,
    over: watch::Sender<bool>,
    past: Arc<Past>,
    pub(crate) alarm: Alarm,
    /// Asks for a sign of life now; each one's end is announced.
    poke: Arc<Notify>,
    signs: watch::Sender<Option<Result<(), Failure>>>,
    /// Whether the session's own node was made.
    own_node: Mutex<bool>,
    task: OnceLock<AbortHandle>,
    /// How many of the next signs of life are to look for nodes that were left behind.
    sweeps: AtomicU32,
}

/// The claims that were granted in sessions that are over, until somebody was told.
pub(crate) type Past = Mutex<HashSet<Token>>;

/// What this session has to do with a claim.
#[derive(Clone, Debug)]
pub(crate) struct Claimed {
    /// The path of the lock.
    pub(crate) lock: String,
    pub(crate) stage: Stage,
    /// Whether a watch tells if the node is deleted.
    pub(crate) watched: bool,
    /// Whether the deletion of the node was asked for.
    pub(crate) releasing: bool,
    /// Whether the node says what the grant says. It is not known while a write to it is not answered.
    pub(crate) written: bool,
}

/// How far a claim has come.
#[derive(Clone, Debug)]
pub(crate) enum Stage {
    /// Its node was asked for, and may exist or not.
    Asked,
    /// It has a node, which waits, or holds the lock without knowing it.
    Queued(Node),
    /// It holds the lock.
    Held(Node, Grant),
    /// It held the lock, and its node was deleted by somebody else.
    Gone,
}

/// A claim's node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Node {
    pub(crate) name: String,
    /// The number of the transaction that made it.
    pub(crate) czxid: i64,
    pub(crate) sequence: i64,
}

/// What was granted.
#[derive(Clone, Debug)]
pub(crate) struct Grant {
    pub(crate) fence: Fence,
    pub(crate) span: u32,
    pub(crate) depth: u32,
    /// Whether the node's data has to spell out the fence.
    pub(crate) explicit: bool,
    pub(crate) holder: HolderInfo,
}

impl Grant {
    pub(crate) fn value(&self) -> Value {
        Value {
            depth: self.depth,
            span: self.span,
            fence: self.explicit.then_some(self.fence),
            holder: self.holder.clone(),
        }
    }
}

impl Session {
    /// Establishes a session. It lives on its own from then on, until it is dropped or over.
    ///
    /// # Errors
    /// Also [`Unsupported`](lockkit_core::ErrorKind::Unsupported): the servers are older than 3.6. They don't know the
    /// question which nodes a session has, and would hang up at each one.
    pub(crate) async fn open(config: &ZkConfig, names: Names, past: Arc<Past>, alarm: Alarm) -> Result<Arc<Self>> {
        let opened = config.clock.now();
        let client = connect::connect(config).await?;
        let timeout = client.session_timeout();
        let session = Arc::new(Self {
            id: client.session_id().0,
            names,
            timeout: config.timeout,
            acls: config.acls(),
            clock: Arc::clone(&config.clock),
            proof: Mutex::new(Proof::new(opened, timeout)),
            claims: Mutex::default(),
            alone: Mutex::default(),
            over: watch::Sender::new(false),
            past,
            alarm,
            poke: Arc::default(),
            signs: watch::Sender::new(None),
            own_node: Mutex::default(),
            task: OnceLock::new(),
            sweeps: AtomicU32::new(0),
            client,
        });
        let own = Box::pin(session.client.list_ephemerals(session.names.root()));
        let own = session.read(opened, config.timeout, own).await;
        own.map_err(|failure| error::map(&failure, Sent::ReadOnly))?;
        let states = session.client.state_watcher();
        let pause = timeout / Proof::WRITES_PER_TIMEOUT;
        let task = tokio::spawn(live(Arc::downgrade(&session), states, Arc::clone(&session.poke), pause));
        _ = session.task.set(task.abort_handle());
        Ok(session)
    }

    pub(crate) fn now(&self) -> Moment {
        self.clock.now()
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
    pub(crate) fn end(&self) {
        if self.over.send_replace(true) {
            return;
        }
        let mut past = lock(&self.past);
        for (token, claimed) in lock(&self.claims).drain() {
            if matches!(claimed.stage, Stage::Held(..)) {
                past.insert(token);
            }
        }
        drop(past);
        self.alarm.raise_all();
    }

    pub(crate) fn claims(&self) -> MutexGuard<'_, HashMap<Token, Claimed>> {
        lock(&self.claims)
    }

    /// What is known of a claim.
    pub(crate) fn claimed(&self, token: &Token) -> Option<Claimed> {
        self.claims().get(token).cloned()
    }

    /// Changes what is known of a claim, if anything is.
    pub(crate) fn update(&self, token: &Token, change: impl FnOnce(&mut Claimed)) {
        if let Some(claimed) = self.claims().get_mut(token) {
            change(claimed);
        }
    }

    /// Until when the session surely lives.
    pub(crate) fn proven(&self) -> Moment {
        lock(&self.proof).until()
    }

    pub(crate) fn options(&self, mode: CreateMode) -> CreateOptions<'static> {
        mode.with_acls(self.acls)
    }

    /// Awaits the answer to a request that reads and was called at `sent`.
    pub(crate) async fn read<T>(&self, sent: Moment, bound: Duration, answer: Answer<'_, T>) -> Result<T, Failure> {
        let answer = self.await_answer(bound, answer).await;
        if answer.as_ref().map_or_else(Failure::is_answer, |_| true) {
            lock(&self.proof).touched(sent);
        }
        answer
    }

    /// Awaits the answer to a request that writes and was called at `sent`.
    pub(crate) async fn write<T>(&self, sent: Moment, bound: Duration, answer: Answer<'_, T>) -> Result<T, Failure> {
        let answer = self.await_answer(bound, answer).await;
        match &answer {
            Ok(_) => lock(&self.proof).wrote(sent),
            Err(failure) if failure.is_answer() => lock(&self.proof).touched(sent),
            Err(_) => {}
        }
        answer
    }

    async fn await_answer<T>(&self, bound: Duration, answer: Answer<'_, T>) -> Result<T, Failure> {
        let answer = match timeout(bound, answer).await {
            Ok(answer) => answer.map_err(Failure::from),
            Err(_) => Err(Failure::TimedOut(bound)),
        };
        if answer.as_ref().is_err_and(Failure::ends_session) {
            self.end();
        }
        answer
    }

    /// Makes sure that the last proof of life is recent, with one request for all who ask at the same time.
    pub(crate) async fn sign_of_life(&self) -> Result<(), Failure> {
        if lock(&self.proof).is_fresh(self.now()) {
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
        timeout(self.timeout, sign).await.unwrap_or(Err(Failure::TimedOut(self.timeout)))
    }

    /// Takes note that the outcome of a creation is not known.
    pub(crate) fn is_in_doubt(&self) {
        self.sweeps.store(SWEEPS, Ordering::Relaxed);
    }

    /// Gives a sign of life: a write if anything depends on the session, else a read.
    async fn pulse(&self) {
        let sent = self.now();
        let sign = if !self.claims().is_empty() {
            self.beat(sent).await
        } else {
            let path = self.names.root();
            self.read(sent, self.timeout, Box::pin(self.client.check_stat(path))).await.map(drop)
        };
        let settled = sign.is_ok();
        self.signs.send_replace(Some(sign));
        if settled && self.sweeps.load(Ordering::Relaxed) > 0 && self.sweep(self.timeout).await.is_ok() {
            // Set again meanwhile, it is one less than it could be.
            self.sweeps.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Writes to the session's own node. If the node is not this session's, neither is any other: a server may answer a
    /// reconnecting client with a new session, and the driver does not mind (ClickHouse/ClickHouse#116690).
    async fn beat(&self, sent: Moment) -> Result<(), Failure> {
        let path = self.names.session(self.id);
        if *lock(&self.own_node) {
            let beat = Box::pin(self.client.set_data(&path, b"", None));
            let own = Box::pin(self.client.list_ephemerals(&path));
            let beat = self.write(sent, self.timeout, beat).await;
            match self.read(sent, self.timeout, own).await {
                Ok(own) if own.is_empty() && beat.is_ok() => {
                    self.end();
                    return Err(Failure::Driver(zk::Error::SessionExpired));
                }
                _ => {}
            }
            match beat {
                // An administrator deleted it.
                Err(failure) if failure.is(&zk::Error::NoNode) => *lock(&self.own_node) = false,
                other => return other.map(drop),
            }
        }
        self.make_own_node(&path).await
    }

    async fn make_own_node(&self, path: &str) -> Result<(), Failure> {
        let options = self.options(CreateMode::Ephemeral);
        for _ in 0..2 {
            let made = Box::pin(self.client.create(path, b"", &options));
            match self.write(self.now(), self.timeout, made).await {
                Ok((stat, _)) if self.owns(stat.ephemeral_owner) => *lock(&self.own_node) = true,
                Ok(_) => {
                    self.end();
                    return Err(Failure::Driver(zk::Error::SessionExpired));
                }
                // A reply was lost.
                Err(failure) if failure.is(&zk::Error::NodeExists) => *lock(&self.own_node) = true,
                Err(failure) if failure.is(&zk::Error::NoNode) => {
                    let options = self.options(CreateMode::Container);
                    let root = Box::pin(self.client.mkdir(self.names.root(), &options));
                    self.write(self.now(), self.timeout, root).await?;
                    continue;
                }
                Err(failure) => return Err(failure),
            }
            break;
        }
        Ok(())
    }
}

/// The answer to a request that has been sent.
pub(crate) type Answer<'a, T> = std::pin::Pin<Box<dyn Future<Output = Result<T, zk::Error>> + Send + 'a>>;

/// The task of a session: it notices its end, and gives signs of life. It keeps the session alive only while it works.
async fn live(session: Weak<Session>, mut states: StateWatcher, poke: Arc<Notify>, pause: Duration) {
    loop {
        let state = tokio::select! {
            state = states.changed() => Some(state),
            () = sleep(pause) => None,
            () = poke.notified() => None,
        };
        let Some(session) = session.upgrade() else { return };
        if state.is_some_and(zk::SessionState::is_terminated) {
            session.end();
        }
        if session.is_over() {
            return;
        }
        if state != Some(zk::SessionState::Disconnected) {
            session.pulse().await;
        }
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
