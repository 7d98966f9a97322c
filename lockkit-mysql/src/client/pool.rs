//! The store's connections.
//!
//! The driver has a pool of its own, which is not used, for three reasons. It hides why no connection could be had. It
//! has no room set aside, so that renewals would queue up behind whoever came first. And what a dropped future leaves
//! behind would go back into it: **a statement whose future is dropped runs on** on the server, and may yet take a lock
//! that nobody wants any more. So here
//!
//! - every wait, for a connection or for an answer, ends at the operation's deadline: the driver has no such bound;
//! - some connections are only for renewals and releases;
//! - a connection on which an answer came that belongs to another question is closed;
//! - a connection that was left while a question was open ([`Line`]) serves nobody again. It is kept in the background until
//!   the server has answered, so that a release of the same claim can be sent behind that (rule R8), and then closed. Until
//!   then it counts as in use.

use std::{
    fmt,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use lockkit_core::{Error, Result, Token};
use sqlx::{
    MySqlConnection, Row as _,
    mysql::{MySqlConnectOptions, MySqlQueryResult, MySqlRow},
};
use tokio::{
    runtime::{Handle, Id},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, timeout_at},
};

use crate::{
    client::{
        connection::{self, Alarm, Line, Replicas, before},
        identify,
        in_flight::RunningOn,
    },
    config::MySqlConfig,
    wire::{
        error::{self, Sent},
        statements::{self, Question, Statement},
    },
};

/// A connection that was not probed for longer than this is probed before it is used: servers close idle ones, and one
/// that was the primary may have become a replica.
const UNPROVEN: Duration = Duration::from_secs(5);

/// Which connections an operation may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lane {
    /// Those for everybody.
    Common,
    /// Those for everybody, and those that are set aside for renewals and releases.
    Reserved,
}

/// When an operation must have ended, and what it was given.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bound {
    at: Instant,
    whole: Duration,
}

impl Bound {
    pub(crate) fn new(whole: Duration) -> Self {
        // Beyond the clock's range it is as good as a year.
        let now = Instant::now();
        let at = now.checked_add(whole).unwrap_or_else(|| now + Duration::from_secs(365 * 24 * 3600));
        Self { at, whole }
    }
}

/// The connections of a store.
pub(crate) struct Pool {
    shared: Arc<Shared>,
}

struct Shared {
    options: MySqlConnectOptions,
    replicas: Replicas,
    /// For how long what was left in doubt is waited for: by then the server has answered, if it can.
    linger: Duration,
    common: Arc<Semaphore>,
    reserved: Arc<Semaphore>,
    idle: Mutex<Vec<Idle>>,
    /// Raised whenever a connection broke: then those that are older are not trusted without asking.
    breaks: AtomicU64,
    running_on: Arc<RunningOn>,
}

struct Idle {
    line: Line,
    breaks: u64,
}

/// A connection in use. Dropping it puts it back, or away if it is in doubt.
pub(crate) struct Connection {
    /// `None` once it broke.
    line: Option<Line>,
    breaks: u64,
    bound: Bound,
    /// Given back when the connection is idle or closed, not before.
    permit: Option<OwnedSemaphorePermit>,
    shared: Arc<Shared>,
}

impl Pool {
    pub(crate) fn new(config: &MySqlConfig, replicas: Replicas) -> Self {
        let all = usize::try_from(config.connections).unwrap_or(usize::MAX).min(Semaphore::MAX_PERMITS);
        let reserved = (all / 8).max(1);
        let all = all - Self::extra(config);
        let shared = Shared {
            options: config.driver_options(),
            replicas,
            linger: config.timeout.saturating_add(connection::LONGEST_WAIT),
            common: Arc::new(Semaphore::new(all - reserved)),
            reserved: Arc::new(Semaphore::new(reserved)),
            idle: Mutex::default(),
            breaks: AtomicU64::new(0),
            running_on: Arc::default(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// How many [extra connections](Self::extra_connection) there may be: a quarter of all.
    pub(crate) fn extra(config: &MySqlConfig) -> usize {
        usize::try_from(config.connections / 4).unwrap_or_default()
    }

    /// A connection beside those that this pool counts: its caller counts it, by a permit that is given back when the server
    /// is done with the connection.
    ///
    /// # Errors
    /// As [`connection`](Self::connection).
    pub(crate) async fn extra_connection(&self, permit: OwnedSemaphorePermit, bound: Bound) -> Result<Connection> {
        self.trusted(permit, bound).await
    }

    /// The first connection, before which nothing is known of the server. If something else answers, that is said.
    ///
    /// # Errors
    /// As [`connection`](Self::connection), and [`Misconfigured`](lockkit_core::ErrorKind::Misconfigured) if it is no
    /// MySQL server.
    pub(crate) async fn first_connection(&self, config: &MySqlConfig, bound: Bound) -> Result<Connection> {
        tokio::select! {
            connected = self.connection(Lane::Common, bound) => connected,
            error = identify::other_server(config) => Err(error),
        }
    }

    /// A connection that can be trusted, or a new one.
    ///
    /// # Errors
    /// When there is none by the deadline; without effect.
    pub(crate) async fn connection(&self, lane: Lane, bound: Bound) -> Result<Connection> {
        let permit = match self.shared.permit(lane) {
            Some(permit) => permit,
            None => {
                let permit = timeout_at(bound.at, self.shared.wait_for_permit(lane)).await;
                permit.ok().flatten().ok_or_else(|| error::busy(bound.whole))?
            }
        };
        self.trusted(permit, bound).await
    }

    /// A connection for what can as well be done another time: none if all that are for everybody are in use.
    pub(crate) async fn spare_connection(&self, bound: Bound) -> Option<Connection> {
        self.trusted(self.shared.permit(Lane::Common)?, bound).await.ok()
    }

    async fn trusted(&self, permit: OwnedSemaphorePermit, bound: Bound) -> Result<Connection> {
        let breaks = self.shared.breaks.load(Ordering::Acquire);
        let shared = Arc::clone(&self.shared);
        let mut connection = Connection { line: None, breaks, bound, permit: Some(permit), shared };
        while let Some(idle) = self.shared.pop(Handle::current().id()) {
            let doubtful = idle.breaks != breaks || !idle.line.is_proven(UNPROVEN);
            connection.line = Some(idle.line);
            if !doubtful || connection.is_sound().await {
                return Ok(connection);
            }
        }
        connection.connect().await?;
        Ok(connection)
    }

    /// Waits until the server has answered whatever was sent for the claim and given up.
    ///
    /// # Errors
    /// When it has not by the deadline. What was given up may still come to have an effect.
    pub(crate) async fn settled(&self, token: &Token, bound: Bound) -> Result<()> {
        let settled = timeout_at(bound.at, self.shared.running_on.settled(token)).await;
        settled.map_err(|_| Error::no_answer(bound.whole, Sent::Yes))
    }
}

impl Shared {
    fn permit(&self, lane: Lane) -> Option<OwnedSemaphorePermit> {
        let permit = Arc::clone(&self.common).try_acquire_owned().ok();
        match lane {
            Lane::Common => permit,
            Lane::Reserved => permit.or_else(|| Arc::clone(&self.reserved).try_acquire_owned().ok()),
        }
    }

    /// `None` never comes: the semaphores are not closed.
    async fn wait_for_permit(&self, lane: Lane) -> Option<OwnedSemaphorePermit> {
        let common = Arc::clone(&self.common).acquire_owned();
        match lane {
            Lane::Common => common.await.ok(),
            Lane::Reserved => tokio::select! {
                biased;
                permit = Arc::clone(&self.reserved).acquire_owned() => permit.ok(),
                permit = common => permit.ok(),
            },
        }
    }

    /// The connection of this runtime that was used last, whose caches are warm. If there is none, one of another runtime
    /// is closed to make room.
    fn pop(&self, runtime: Id) -> Option<Idle> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        match idle.iter().rposition(|idle| idle.line.is_of(runtime)) {
            Some(at) => Some(idle.remove(at)),
            None => {
                let foreign = idle.pop();
                drop(idle);
                drop(foreign);
                None
            }
        }
    }

    fn push(&self, idle: Idle) {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(idle);
    }
}

impl Connection {
    /// Runs a statement that changes something, possibly a claim. What it answers is not known to be its answer, unless
    /// it brings back the number of the question.
    ///
    /// # Errors
    /// When it fails or the deadline has come. The error says whether it may have had an effect.
    pub(crate) async fn execute<'q>(
        &mut self,
        statement: impl FnOnce(Question) -> Statement<'q>,
        token: Option<Token>,
    ) -> Result<(MySqlQueryResult, Question)> {
        self.execute_raw(statement, token).await?.map_err(|e| error::map(e, Sent::Yes))
    }

    /// The same, but with the driver's own error if it was the server that refused.
    pub(crate) async fn execute_raw<'q>(
        &mut self,
        statement: impl FnOnce(Question) -> Statement<'q>,
        token: Option<Token>,
    ) -> Result<Result<(MySqlQueryResult, Question), sqlx::Error>> {
        let (driver, alarm, question) = self.ask(token)?;
        let outcome = before(alarm, statement(question).execute(driver)).await;
        Ok(self.ended(outcome, Sent::Yes)?.map(|done| (done, question)))
    }

    /// Runs a statement that only reads. What it answers is not known to be its answer.
    ///
    /// # Errors
    /// When it fails or the deadline has come; without effect.
    pub(crate) async fn rows(&mut self, statement: Statement<'_>) -> Result<Vec<MySqlRow>> {
        self.fetch(|_| statement).await?.map(|(rows, _)| rows).map_err(|e| error::map(e, Sent::ReadOnly))
    }

    /// Runs a statement that only reads, and whose rows begin with the number of the question. If there are none, another
    /// question makes sure that this was its answer: then the next answer is the one to the next question.
    ///
    /// # Errors
    /// As [`rows`](Self::rows), and when the answer is one to another question.
    pub(crate) async fn numbered_rows<'q>(
        &mut self,
        statement: impl FnOnce(Question) -> Statement<'q>,
    ) -> Result<Vec<MySqlRow>> {
        self.numbered_rows_raw(statement).await?.map_err(|e| error::map(e, Sent::ReadOnly))
    }

    /// The same, but with the driver's own error if it was the server that refused.
    pub(crate) async fn numbered_rows_raw<'q>(
        &mut self,
        statement: impl FnOnce(Question) -> Statement<'q>,
    ) -> Result<Result<Vec<MySqlRow>, sqlx::Error>> {
        let (rows, question) = match self.fetch(statement).await? {
            Ok(fetched) => fetched,
            Err(failed) => return Ok(Err(failed)),
        };
        let mut is_answer = has_number(&rows, question);
        if rows.is_empty() {
            is_answer = match self.fetch(|question| statements::number().bind(question)).await? {
                Ok((echo, question)) => echo.len() == 1 && has_number(&echo, question),
                Err(failed) => return Ok(Err(failed)),
            };
        }
        if is_answer { Ok(Ok(rows)) } else { Err(self.out_of_step(Sent::ReadOnly)) }
    }

    async fn fetch<'q>(
        &mut self,
        statement: impl FnOnce(Question) -> Statement<'q>,
    ) -> Result<Result<(Vec<MySqlRow>, Question), sqlx::Error>> {
        let (driver, alarm, question) = self.ask(None)?;
        let outcome = before(alarm, statement(question).fetch_all(driver)).await;
        Ok(self.ended(outcome, Sent::ReadOnly)?.map(|rows| (rows, question)))
    }

    /// Runs statements given as text.
    ///
    /// # Errors
    /// As [`execute`](Self::execute).
    pub(crate) async fn run_text(&mut self, text: String) -> Result<MySqlQueryResult> {
        let (driver, alarm, _) = self.ask(None)?;
        let outcome = before(alarm, sqlx::raw_sql(sqlx::AssertSqlSafe(text)).execute(driver)).await;
        self.ended(outcome, Sent::Yes)?.map_err(|e| error::map(e, Sent::Yes))
    }

    /// What runs from now on has this bound.
    pub(crate) fn set_bound(&mut self, bound: Bound) {
        self.bound = bound;
    }

    /// Closes it, and with it what the server keeps for it, instead of putting it back.
    pub(crate) fn hang_up(&mut self) {
        self.line = None;
    }

    /// The answer is none to what was asked: the connection is closed.
    pub(crate) fn out_of_step(&mut self, sent: Sent) -> Error {
        self.hang_up();
        error::out_of_step(sent)
    }

    /// From here until [`ended`](Self::ended) the connection is in doubt.
    fn ask(&mut self, token: Option<Token>) -> Result<(&mut MySqlConnection, &mut Alarm, Question)> {
        let until = self.bound.at;
        self.line.as_mut().and_then(|line| line.ask(token, until)).ok_or_else(connection::broke)
    }

    /// Takes note of how a question ended: with an answer, which may be a refusal, or, in time, without one.
    fn ended<T>(&mut self, outcome: Option<Result<T, sqlx::Error>>, sent: Sent) -> Result<Result<T, sqlx::Error>> {
        let Some(outcome) = outcome else {
            self.shared.breaks.fetch_add(1, Ordering::AcqRel);
            return Err(Error::no_answer(self.bound.whole, sent));
        };
        match &outcome {
            // On a lock that many want this is no rare answer, and to connect anew takes several round trips.
            Err(failed) if error::is_row_busy(failed) => self.line.iter_mut().for_each(Line::refused),
            Err(failed) => {
                // After most errors it could go on, but errors are rare, and a new connection is in a known state.
                self.hang_up();
                if error::number(failed).is_none() {
                    self.shared.breaks.fetch_add(1, Ordering::AcqRel);
                }
            }
            Ok(_) => self.line.iter_mut().for_each(Line::answered),
        }
        Ok(outcome)
    }

    /// Probes an idle connection, and closes it if it fails. A dead one must not cost the whole time.
    async fn is_sound(&mut self) -> bool {
        let now = Instant::now();
        let until = now + self.bound.at.saturating_duration_since(now) / 3;
        let Some(line) = &mut self.line else { return false };
        let is_sound = line.prove(until, self.shared.replicas).await.is_ok();
        if !is_sound {
            self.hang_up();
        }
        is_sound
    }

    async fn connect(&mut self) -> Result<()> {
        let open = Line::open(&self.shared.options, self.shared.replicas);
        let line = timeout_at(self.bound.at, open).await.map_err(|_| Error::no_answer(self.bound.whole, Sent::No))?;
        self.line = Some(line?);
        Ok(())
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let (Some(line), permit) = (self.line.take(), self.permit.take()) else { return };
        if !line.is_in_doubt() {
            // Back before the permit is, so that whoever gets the permit finds it.
            self.shared.push(Idle { line, breaks: self.breaks });
            return drop(permit);
        }
        // Without a runtime, all that is left is to hang up.
        let Ok(runtime) = Handle::try_current() else { return };
        let mark = line.open_claim().map(|token| RunningOn::mark(&self.shared.running_on, token));
        let linger = self.shared.linger;
        runtime.spawn(async move {
            line.finish_and_close(linger).await;
            drop((mark, permit));
        });
    }
}

/// Whether all rows are an answer to this question.
fn has_number(rows: &[MySqlRow], question: Question) -> bool {
    rows.iter().all(|row| row.try_get::<Question, _>(0).is_ok_and(|number| number == question))
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let idle = self.shared.idle.lock().unwrap_or_else(PoisonError::into_inner).len();
        f.debug_struct("Pool").field("idle", &idle).finish_non_exhaustive()
    }
}
