//! The store's connections.
//!
//! The driver has a pool of its own, which is not used, for three reasons. It hides why no connection could be had. It
//! has no room set aside, so that renewals would queue up behind whoever came first. And what a dropped future leaves
//! behind would go back into it: **a statement whose future is dropped runs on** on the server, and may yet take a lock
//! that nobody wants any more. So here
//!
//! - every wait, for a connection or for an answer, ends at the operation's deadline: the driver has no such bound;
//! - some connections are only for renewals and releases;
//! - a connection that was left in the middle of a statement serves nobody again. It is kept in the background until the
//!   server has answered, so that a release of the same claim can be sent behind that (rule R8), and then closed.

use std::{
    fmt,
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use lockkit_core::{Error, ErrorKind, Result, Token};
use sqlx::{
    Connection as _, MySqlConnection, Row as _,
    mysql::{MySqlArguments, MySqlConnectOptions, MySqlQueryResult, MySqlRow},
    query::Query,
};
use tokio::{
    runtime::{Handle, Id},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, Sleep, sleep_until, timeout, timeout_at},
};

use crate::{
    config::MySqlConfig,
    error::{self, Sent},
    running_on::RunningOn,
};

/// A connection that was idle for longer than this is asked whether it is still there: servers close idle ones.
const IDLE: Duration = Duration::from_secs(5);

/// What every connection is set to, in one round trip. `time_zone` because all times are in UTC; `sql_mode` because some
/// modes change what a statement means (`SIMULTANEOUS_ASSIGNMENT` would break the order of assignments that the
/// statements rely on); `innodb_lock_wait_timeout` because no row here is locked for longer than a statement.
const SETUP: &str = "SET NAMES utf8mb4, SESSION time_zone = '+00:00', SESSION autocommit = 1, \
     SESSION sql_mode = 'STRICT_TRANS_TABLES,NO_ENGINE_SUBSTITUTION', SESSION innodb_lock_wait_timeout = 1; \
     SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED";

/// A statement with its arguments.
pub(crate) type Statement<'q> = Query<'q, sqlx::MySql, MySqlArguments>;

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
    since: Instant,
    breaks: u64,
}

/// A connection to the server, with a timer of its own.
///
/// Every statement has a bound, and almost none reaches it. To set a timer anew each time, the runtime takes a lock and,
/// if no other is due before, wakes the thread that waits for events. To put off one that is set costs nothing of this.
struct Line {
    driver: MySqlConnection,
    alarm: Pin<Box<Sleep>>,
    /// Both belong to it. When it ends, they may not be touched any more.
    runtime: Id,
}

/// A connection in use. Dropping it puts it back, or away if it was left in the middle of a statement.
pub(crate) struct Connection {
    /// `None` once it broke.
    line: Option<Line>,
    /// Set while a statement runs: whose it is, if it is about a claim.
    running: Option<Option<Token>>,
    breaks: u64,
    bound: Bound,
    /// None for an extra one, whose user counts by itself.
    permit: Option<OwnedSemaphorePermit>,
    shared: Arc<Shared>,
}

impl Pool {
    pub(crate) fn new(config: &MySqlConfig) -> Self {
        let all = usize::try_from(config.connections).unwrap_or(usize::MAX).min(Semaphore::MAX_PERMITS);
        let reserved = (all / 8).max(1);
        let all = all - Self::extra(config);
        let shared = Shared {
            options: config.driver_options(),
            linger: config.timeout,
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

    /// A connection beside those that this pool counts.
    ///
    /// # Errors
    /// As [`connection`](Self::connection).
    pub(crate) async fn extra_connection(&self, bound: Bound) -> Result<Connection> {
        self.trusted(None, bound).await
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
        self.trusted(Some(permit), bound).await
    }

    async fn trusted(&self, permit: Option<OwnedSemaphorePermit>, bound: Bound) -> Result<Connection> {
        let breaks = self.shared.breaks.load(Ordering::Acquire);
        let shared = Arc::clone(&self.shared);
        let mut connection = Connection { line: None, running: None, breaks, bound, permit, shared };
        while let Some(idle) = self.shared.pop(Handle::current().id()) {
            let doubtful = idle.breaks != breaks || idle.since.elapsed() > IDLE;
            connection.line = Some(idle.line);
            if !doubtful || connection.is_alive().await {
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
        settled.map_err(|_| error::timed_out(bound.whole, Sent::Yes))
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
        match idle.iter().rposition(|idle| idle.line.runtime == runtime) {
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
    /// Runs a statement that changes something, possibly a claim.
    ///
    /// # Errors
    /// When it fails or the deadline has come. The error says whether it may have had an effect.
    pub(crate) async fn execute(&mut self, statement: Statement<'_>, token: Option<Token>) -> Result<MySqlQueryResult> {
        self.execute_raw(statement, token).await?.map_err(|e| error::map(e, Sent::Yes))
    }

    /// The same, but with the driver's own error if it was the server that refused.
    pub(crate) async fn execute_raw(
        &mut self,
        statement: Statement<'_>,
        token: Option<Token>,
    ) -> Result<Result<MySqlQueryResult, sqlx::Error>> {
        let line = self.begin(token)?;
        let Some(outcome) = before(&mut line.alarm, statement.execute(&mut line.driver)).await else {
            return Err(self.gave_up(Sent::Yes));
        };
        Ok(self.ended(outcome))
    }

    /// Runs a statement that only reads.
    ///
    /// # Errors
    /// When it fails or the deadline has come; without effect.
    pub(crate) async fn rows(&mut self, statement: Statement<'_>) -> Result<Vec<MySqlRow>> {
        let line = self.begin(None)?;
        let Some(outcome) = before(&mut line.alarm, statement.fetch_all(&mut line.driver)).await else {
            return Err(self.gave_up(Sent::ReadOnly));
        };
        self.ended(outcome).map_err(|e| error::map(e, Sent::ReadOnly))
    }

    /// Runs statements given as text.
    ///
    /// # Errors
    /// As [`execute`](Self::execute).
    pub(crate) async fn run_text(&mut self, text: String) -> Result<MySqlQueryResult> {
        let line = self.begin(None)?;
        let statement = sqlx::raw_sql(sqlx::AssertSqlSafe(text));
        let Some(outcome) = before(&mut line.alarm, statement.execute(&mut line.driver)).await else {
            return Err(self.gave_up(Sent::Yes));
        };
        self.ended(outcome).map_err(|e| error::map(e, Sent::Yes))
    }

    /// What runs from now on has this bound.
    pub(crate) fn set_bound(&mut self, bound: Bound) {
        self.bound = bound;
    }

    /// Closes it, and with it what the server keeps for it, instead of putting it back.
    pub(crate) fn hang_up(mut self) {
        self.line = None;
    }

    /// From here until [`ended`](Self::ended) a drop finds the connection in the middle of a statement.
    fn begin(&mut self, token: Option<Token>) -> Result<&mut Line> {
        match &mut self.line {
            Some(line) if self.running.is_none() => {
                self.running = Some(token);
                line.alarm.as_mut().reset(self.bound.at);
                Ok(line)
            }
            // It broke, or was left in the middle of a statement, and whoever has it did not notice.
            _ => Err(Error::new(ErrorKind::Unavailable, "the connection broke before")),
        }
    }

    fn ended<T>(&mut self, outcome: Result<T, sqlx::Error>) -> Result<T, sqlx::Error> {
        self.running = None;
        if let Err(failed) = &outcome
            && !error::is_row_busy(failed)
        {
            // After most errors it could go on, but errors are rare, and a new connection is in a known state.
            self.line = None;
            if error::number(failed).is_none() {
                self.shared.breaks.fetch_add(1, Ordering::AcqRel);
            }
        }
        outcome
    }

    fn gave_up(&self, sent: Sent) -> Error {
        self.shared.breaks.fetch_add(1, Ordering::AcqRel);
        error::timed_out(self.bound.whole, sent)
    }

    /// Asks an idle connection whether it is still there. A dead one must not cost the whole time.
    async fn is_alive(&mut self) -> bool {
        let patience = self.bound.at.saturating_duration_since(Instant::now()) / 3;
        let Some(line) = &mut self.line else { return false };
        if matches!(timeout(patience, line.driver.ping()).await, Ok(Ok(()))) {
            return true;
        }
        self.line = None;
        false
    }

    async fn connect(&mut self) -> Result<()> {
        let connect = async {
            let mut driver = MySqlConnection::connect_with(&self.shared.options).await?;
            sqlx::raw_sql(SETUP).execute(&mut driver).await?;
            Ok(driver)
        };
        let Ok(outcome) = timeout_at(self.bound.at, connect).await else {
            return Err(error::timed_out(self.bound.whole, Sent::No));
        };
        let driver = outcome.map_err(|e| error::map(e, Sent::No))?;
        let alarm = Box::pin(sleep_until(self.bound.at));
        self.line = Some(Line { driver, alarm, runtime: Handle::current().id() });
        Ok(())
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let (Some(line), permit) = (self.line.take(), self.permit.take()) else { return };
        let Some(token) = self.running.take() else {
            // Back before the permit is, so that whoever gets the permit finds it.
            self.shared.push(Idle { line, since: Instant::now(), breaks: self.breaks });
            return drop(permit);
        };
        // Without a runtime, all that is left is to hang up.
        let Ok(runtime) = Handle::try_current() else { return };
        let mark = token.map(|token| RunningOn::mark(&self.shared.running_on, token));
        let linger = self.shared.linger;
        runtime.spawn(async move {
            let mut driver = line.driver;
            // The driver reads the answer that is still to come before it sends anything. Whatever comes of the ping,
            // the server is then done with the statement, or stands still and may do it later.
            drop(timeout(linger, driver.ping()).await);
            drop((driver, mark, permit));
        });
    }
}

/// What a future gives, or `None` if the alarm goes off before.
async fn before<F: Future>(alarm: &mut Pin<Box<Sleep>>, work: F) -> Option<F::Output> {
    tokio::select! {
        biased;
        output = work => Some(output),
        () = alarm.as_mut() => None,
    }
}

/// Reads a column; what does not fit is an error.
pub(crate) fn column<'r, T>(row: &'r MySqlRow, index: usize) -> Result<T>
where
    T: sqlx::Decode<'r, sqlx::MySql> + sqlx::Type<sqlx::MySql>,
{
    row.try_get(index).map_err(|e| error::map(e, Sent::ReadOnly))
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let idle = self.shared.idle.lock().unwrap_or_else(PoisonError::into_inner).len();
        f.debug_struct("Pool").field("idle", &idle).finish_non_exhaustive()
    }
}
