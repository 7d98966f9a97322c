//! One connection to the server, and the rule that decides whether it may be used.
//!
//! The protocol has no numbers that tell one answer from another: an answer that nobody waited for is taken for the
//! answer to the next question. So each question has a [number](Question) that comes back with its answer, and a connection
//! is **in doubt** from before the first byte of a question until the last byte of its answer was read, whatever the
//! question is and for whatever reason its future is dropped. A connection in doubt is never used again. The driver can be
//! reached by its callers only through [`RawConnection::ask`], which puts the connection in doubt.
//!
//! The driver can't take up an answer of which it has read a part: a statement that is being prepared is an exchange of which it
//! keeps no account. So the connection keeps the question that is open, and leads it to its end when its caller is gone. A statement
//! that is only prepared by then is not run any more.

use std::{
    future::poll_fn,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use lockkit_core::{Error, ErrorKind, Result, Token, store::without_panic};
use sqlx::{
    Connection as _, Either, Execute, Executor as _, MySql, MySqlConnection, Statement as _,
    mysql::{MySqlConnectOptions, MySqlQueryResult, MySqlRow},
};
use tokio::{
    runtime::{Handle, Id},
    time::{Instant, Sleep, sleep_until, timeout},
};

use crate::wire::{
    error::{self, Sent},
    row::column,
    settings, statements,
    terms::{FIRST_QUESTION, Question},
};

/// No statement on a lock waits longer than this at the server for one thing: for a table and then a row, as [`SETUP`] says, or for
/// a named lock.
pub(crate) const LONGEST_WAIT: Duration = Duration::from_secs(1);

/// What every connection is set to, in one round trip. `time_zone` because all times are in UTC; `sql_mode` because some
/// modes change what a statement means (`SIMULTANEOUS_ASSIGNMENT` would break the order of assignments that the
/// statements rely on); `innodb_lock_wait_timeout` because no row here is locked for longer than a statement; `lock_wait_timeout`
/// because a statement that was given up would go on waiting for a table that somebody locks as a whole (`LOCK TABLES`, `ALTER
/// TABLE`, a backup's `FLUSH TABLES WITH READ LOCK`), and take effect much later; `sql_select_limit` because a lease whose row is
/// not given back would be taken for a lost one; `sql_safe_updates` because it refuses the removal of unused rows;
/// `group_concat_max_len` because a list of claims is longer than MySQL's 1024 bytes.
const SETUP: &str = "SET NAMES utf8mb4, SESSION time_zone = '+00:00', SESSION autocommit = 1, \
     SESSION sql_mode = 'STRICT_TRANS_TABLES,NO_ENGINE_SUBSTITUTION', SESSION innodb_lock_wait_timeout = 1, \
     SESSION lock_wait_timeout = 1, SESSION sql_select_limit = 18446744073709551615, SESSION sql_safe_updates = 0, \
     SESSION group_concat_max_len = 1048576; SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED";

/// How often a server is asked at most whether it is done. Each result of a transaction may be taken for an answer.
const MOST_PROBES: u64 = 16;

/// What the server answered: the rows of all results, and what was changed.
#[derive(Default)]
pub(crate) struct Answer {
    pub(crate) rows: Vec<MySqlRow>,
    pub(crate) done: MySqlQueryResult,
}

/// A question that is open, with the driver, which comes back with the answer.
type Open = Pin<Box<dyn Future<Output = (MySqlConnection, Result<Answer, sqlx::Error>)> + Send>>;

/// What to do with a server that is set to take no writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Replicas {
    /// A user with enough rights could write all the same, behind the back of the replica's primary.
    Refused,
    /// The doctor only looks.
    #[cfg(feature = "doctor")]
    Admitted,
}

/// A connection to the server, with a timer of its own.
///
/// Every statement has a bound, and almost none reaches it. To set a timer anew each time, the runtime takes a lock and,
/// if no other is due before, wakes the thread that waits for events. To put off one that is set costs nothing of this.
pub(crate) struct RawConnection {
    /// `None` while a question is open.
    driver: Option<MySqlConnection>,
    open: Option<Open>,
    /// Set when nobody waits for the answer any more.
    is_left: Arc<AtomicBool>,
    timer: Pin<Box<Sleep>>,
    /// Driver and timer belong to it. When it ends, they may not be touched any more.
    runtime: Id,
    /// Set when an answer turned out to belong to another question, or can't be understood.
    is_out_of_step: bool,
    /// The last claim that a question was about.
    claim: Option<Token>,
    /// The number of the last question.
    asked: Question,
    /// When it was probed for the last time; `None` after a refusal.
    probed: Option<Instant>,
}

impl RawConnection {
    /// Connects, and sets the connection to what the statements need. The inner error is the server's: it answers, but takes
    /// no writes.
    ///
    /// # Errors
    /// When the server can't be reached, or refuses.
    ///
    /// # Cancellation
    /// The connection is closed.
    pub(crate) async fn open(options: &MySqlConnectOptions, replicas: Replicas) -> Result<Result<Self>> {
        let connect = async {
            let mut driver = MySqlConnection::connect_with(options).await?;
            let setup = format!("{SETUP}; {}", probe(0));
            let rows = driver.fetch_all(statements::text(setup)).await?;
            Ok::<_, sqlx::Error>((driver, rows))
        };
        let (driver, rows) = understood(connect).await.map_err(|e| error::map(e, Sent::No))?;
        let (now, runtime) = (Instant::now(), Handle::current().id());
        Ok(judge(&rows, 0, replicas).map(|()| Self {
            driver: Some(driver),
            open: None,
            is_left: Arc::default(),
            timer: Box::pin(sleep_until(now)),
            runtime,
            is_out_of_step: false,
            claim: None,
            asked: FIRST_QUESTION,
            probed: Some(now),
        }))
    }

    /// Asks something, and tells the number of the question. From here on the connection is in doubt, until there is an
    /// [answer](Self::answer). `None` if it is in doubt already.
    pub(crate) fn ask<Q: Execute<'static, MySql> + 'static>(
        &mut self,
        token: Option<Token>,
        what: impl FnOnce(Question) -> Q,
    ) -> Option<Question> {
        if self.is_out_of_step {
            return None;
        }
        let mut driver = self.driver.take()?;
        self.claim = token.or(self.claim);
        self.asked += 1;
        let (question, is_left) = (what(self.asked), Arc::clone(&self.is_left));
        self.open = Some(Box::pin(async move {
            let answer = understood(ask(&mut driver, question, &is_left)).await;
            (driver, answer)
        }));
        Some(self.asked)
    }

    /// The answer to the open question; `None` if it has not come by `until`.
    ///
    /// # Cancellation
    /// The question stays open.
    pub(crate) async fn answer(&mut self, until: Instant) -> Option<Result<Answer, sqlx::Error>> {
        self.timer.as_mut().reset(until);
        let (driver, answer) = tokio::select! {
            biased;
            answered = self.open.as_mut()? => answered,
            () = self.timer.as_mut() => return None,
        };
        (self.driver, self.open) = (Some(driver), None);
        Some(answer)
    }

    /// The answer belonged to another question: the one to the last question may be still to come.
    pub(crate) fn out_of_step(&mut self) {
        self.is_out_of_step = true;
    }

    /// The answer was read to its end, and was a refusal. That has no number, and could have come twice: so the connection
    /// is to be probed before it serves again.
    pub(crate) fn refused(&mut self) {
        self.probed = None;
    }

    /// Whether a question is open.
    pub(crate) fn is_in_doubt(&self) -> bool {
        self.driver.is_none() || self.is_out_of_step
    }

    /// The claim that an open question may be about.
    pub(crate) fn claim(&self) -> Option<Token> {
        self.claim
    }

    /// The operation is over, and its claim with it.
    pub(crate) fn forget_claim(&mut self) {
        self.claim = None;
    }

    pub(crate) fn is_of(&self, runtime: Id) -> bool {
        self.runtime == runtime
    }

    /// Whether it was probed not longer ago than this.
    pub(crate) fn is_proven(&self, within: Duration) -> bool {
        self.probed.is_some_and(|probed| probed.elapsed() <= within)
    }

    /// Asks whether the server is there and takes writes, and checks that the answer is the one to this question.
    ///
    /// # Errors
    /// When it is not so, or not known in time: then it is to be closed.
    pub(crate) async fn prove(&mut self, until: Instant, replicas: Replicas) -> Result<()> {
        let number = self.ask(None, |number| statements::text(probe(number))).ok_or_else(broke)?;
        let answer = self.answer(until).await.ok_or_else(broke)?.map_err(|e| error::map(e, Sent::ReadOnly))?;
        judge(&answer.rows, number, replicas)?;
        self.probed = Some(Instant::now());
        Ok(())
    }

    /// Waits until the server is done with what was asked, and closes the connection. Says whether nothing is to come of it any more;
    /// else a statement about the claim may still wait there for a row, for as long as any may.
    ///
    /// The connection's runtime may be gone, and the timer with it: this waits by a timer of the present runtime.
    pub(crate) async fn finish_and_close(mut self, patience: Duration) -> bool {
        self.is_left.store(true, Ordering::Relaxed);
        let finish = async {
            if let Some(open) = self.open.take() {
                let (driver, answer) = open.await;
                match answer {
                    // It may close the connection after that.
                    Err(sqlx::Error::Database(_)) => return true,
                    // A server does not notice that a client has gone while it works for it. An earlier answer about the claim may have
                    // come twice, so that its last statement is open, too.
                    Err(sqlx::Error::Io(_)) => return self.claim.is_none(),
                    _ => self.driver = Some(driver),
                }
            }
            self.find_step().await
        };
        timeout(patience, finish).await.unwrap_or(false)
    }

    /// Asks until an answer has the number of one of these questions: the server answers in order. Says whether there was one.
    async fn find_step(&mut self) -> bool {
        let (Some(driver), last) = (&mut self.driver, self.asked) else { return false };
        for number in last + 1..=last + MOST_PROBES {
            match understood(read(driver, statements::text(probe(number)))).await {
                Ok(answer) if answer.rows.iter().any(|row| number_of(row).is_some_and(|number| number > last)) => {
                    return true;
                }
                Err(sqlx::Error::Io(_)) => return false,
                _ => {}
            }
        }
        false
    }
}

/// The error of a connection that broke, or that was left in the middle of a statement.
pub(crate) fn broke() -> Error {
    Error::new(ErrorKind::Unavailable, "the connection was already broken")
}

/// Asks, and reads the answer to its end. For a caller that has left, nothing more is sent.
async fn ask<Q: Execute<'static, MySql> + 'static>(
    driver: &mut MySqlConnection,
    mut question: Q,
    is_left: &AtomicBool,
) -> Result<Answer, sqlx::Error> {
    let arguments = question.take_arguments().map_err(sqlx::Error::Encode)?;
    let still = || match is_left.load(Ordering::Relaxed) {
        true => Err(sqlx::Error::Protocol("its caller has left".into())),
        false => Ok(()),
    };
    still()?;
    let Some(arguments) = arguments else { return read(driver, sqlx::raw_sql(question.sql())).await };
    let prepared = driver.prepare(question.sql()).await?;
    still()?;
    read(driver, sqlx::query_with(prepared.into_sql(), arguments)).await
}

async fn read<Q: Execute<'static, MySql> + 'static>(
    driver: &mut MySqlConnection,
    question: Q,
) -> Result<Answer, sqlx::Error> {
    let (mut answer, mut parts) = (Answer::default(), driver.fetch_many(question));
    while let Some(part) = poll_fn(|cx| parts.as_mut().poll_next(cx)).await {
        match part? {
            Either::Left(done) => answer.done.extend([done]),
            Either::Right(row) => answer.rows.push(row),
        }
    }
    Ok(answer)
}

/// The driver's answer. The driver panics over some answers that do not belong to its question. Such a panic becomes an error
/// here, and the connection is closed.
fn understood<T>(work: impl Future<Output = Result<T, sqlx::Error>>) -> impl Future<Output = Result<T, sqlx::Error>> {
    without_panic(work, || Err(sqlx::Error::Protocol("the answer is malformed".into())))
}

/// The number comes back, so that the answer to another question is noticed.
fn probe(number: Question) -> String {
    format!("SELECT '{number}', CAST(@@GLOBAL.read_only AS CHAR)")
}

/// The number that came back with a [probe], if the row belongs to one.
fn number_of(row: &MySqlRow) -> Option<Question> {
    column::<String>(row, 0).ok()?.parse().ok()
}

fn judge(rows: &[MySqlRow], number: Question, replicas: Replicas) -> Result<()> {
    let [row] = rows else { return Err(error::out_of_step(Sent::ReadOnly)) };
    if number_of(row) != Some(number) {
        return Err(error::out_of_step(Sent::ReadOnly));
    }
    if replicas == Replicas::Refused && settings::is_on(&column::<String>(row, 1)?) {
        return Err(error::read_only());
    }
    Ok(())
}
