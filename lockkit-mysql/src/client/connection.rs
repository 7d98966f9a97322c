//! A connection in use, and what becomes of it afterwards.
//!
//! A connection that is not in doubt ([`RawConnection`]) becomes idle again. One that was left while a question was open is
//! kept in the background until the server has answered, so that a release of the same claim can be sent behind that
//! (rule R8), and then closed. Until then it counts as in use.

use std::{sync::Arc, time::Duration};

use lockkit_core::{Error, Result, Token};
use sqlx::{
    Execute, MySql, Row as _,
    mysql::{MySqlQueryResult, MySqlRow},
};
use tokio::{
    runtime::{Handle, Id},
    sync::OwnedSemaphorePermit,
    time::Instant,
};

use crate::{
    client::{
        idle::Idle,
        in_flight::Closing,
        raw::{self, Answer, RawConnection},
    },
    wire::{
        error::{self, Sent},
        order,
        statements::{self, Statement},
        terms::Question,
    },
};

/// When an operation must have ended, and what it was given.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bound {
    pub(crate) at: Instant,
    pub(crate) whole: Duration,
}

impl Bound {
    pub(crate) fn new(whole: Duration) -> Self {
        // Beyond the clock's range it is as good as a year.
        let now = Instant::now();
        let at = now.checked_add(whole).unwrap_or_else(|| now + Duration::from_secs(365 * 24 * 3600));
        Self { at, whole }
    }

    /// The same, but for the end of something longer. How long a statement may be open is told by the whole, which stays.
    pub(crate) fn no_later_than(self, at: Instant) -> Self {
        Self { at: self.at.min(at), ..self }
    }

    /// A bound on one of several steps, so that the others have some time, too.
    pub(crate) fn half_of_what_is_left(self) -> Self {
        Self::new(self.at.saturating_duration_since(Instant::now()) / 2)
    }
}

/// A connection in use.
pub(crate) struct Connection {
    /// `None` once it broke.
    raw: Option<RawConnection>,
    /// How many connections had broken when this was taken.
    breaks: u64,
    bound: Bound,
    /// Given back when the connection is idle or closed, not before; `None` if it [was given](super::pool::Pool::background_connection)
    /// none.
    permit: Option<OwnedSemaphorePermit>,
    idle: Arc<Idle>,
}

impl Connection {
    /// A connection that is taken from those that were idle, or is new.
    pub(crate) fn new(
        raw: RawConnection,
        breaks: u64,
        bound: Bound,
        permit: Option<OwnedSemaphorePermit>,
        idle: Arc<Idle>,
    ) -> Self {
        Self { raw: Some(raw), breaks, bound, permit, idle }
    }

    /// Runs a statement that changes something. If it may give a claim something, that is named: its release then waits until the
    /// server is done with the statement. What it answers is not known to be its answer, unless it brings back the number of the
    /// question.
    ///
    /// # Errors
    /// When it fails or the deadline has come. The error says whether it may have had an effect.
    pub(crate) async fn execute(
        &mut self,
        statement: impl FnOnce(Question) -> Statement,
        token: Option<Token>,
    ) -> Result<(MySqlQueryResult, Question)> {
        let (answer, question) = self.ask(statement, token, Sent::Yes).await?;
        Ok((answer.done, question))
    }

    /// Runs a statement that only reads. What it answers is not known to be its answer.
    ///
    /// # Errors
    /// When it fails or the deadline has come; without effect.
    pub(crate) async fn rows(&mut self, statement: Statement) -> Result<Vec<MySqlRow>> {
        Ok(self.ask(|_| statement, None, Sent::ReadOnly).await?.0.rows)
    }

    /// Runs a statement that only reads, and whose rows begin with the number of the question. If there are none, another
    /// question makes sure that this was its answer: then the next answer is the one to the next question.
    ///
    /// # Errors
    /// As [`rows`](Self::rows), and when the answer is one to another question.
    pub(crate) async fn numbered_rows(
        &mut self,
        statement: impl FnOnce(Question) -> Statement,
    ) -> Result<Vec<MySqlRow>> {
        let (Answer { rows, .. }, question) = self.ask(statement, None, Sent::ReadOnly).await?;
        let is_answer = if rows.is_empty() {
            let number = |question| statements::number().bind(question);
            let (echo, question) = self.ask(number, None, Sent::ReadOnly).await?;
            echo.rows.len() == 1 && has_number(&echo.rows, question)
        } else {
            has_number(&rows, question)
        };
        if is_answer { Ok(rows) } else { Err(self.out_of_step(Sent::ReadOnly)) }
    }

    /// Runs a transaction that is given as one text, likewise. The rows of all its statements begin with the number
    /// of the question.
    ///
    /// # Errors
    /// As [`execute`](Self::execute). What was begun is rolled back if a row was busy, as it may be on a lock that many want; after
    /// any other error the connection is closed.
    pub(crate) async fn transact(
        &mut self,
        text: impl FnOnce(Question) -> String,
        token: Option<Token>,
    ) -> Result<Vec<MySqlRow>> {
        let (rows, question) = match self.ask(|question| statements::text(text(question)), token, Sent::Yes).await {
            Ok((answer, question)) => (answer.rows, question),
            Err(busy) if error::is_row_busy(&busy) => {
                // Out of step, the refusal may have been the answer to another question.
                return Err(if self.roll_back().await { busy } else { busy.unknown_effect() });
            }
            Err(failed) => {
                self.close_if_answered();
                return Err(failed);
            }
        };
        if !rows.is_empty() && has_number(&rows, question) { Ok(rows) } else { Err(self.out_of_step(Sent::Yes)) }
    }

    /// Ends a transaction that a refusal left open. The refusal had no number: that this answer has its own says that both came
    /// once. Without it this is `false`, and the connection is not used again.
    async fn roll_back(&mut self) -> bool {
        match self.ask(|question| statements::text(order::roll_back(question)), None, Sent::ReadOnly).await {
            Ok((Answer { rows, .. }, question)) if rows.len() == 1 && has_number(&rows, question) => return true,
            Ok(_) => drop(self.out_of_step(Sent::ReadOnly)),
            Err(_) => self.close_if_answered(),
        }
        false
    }

    /// Runs statements given as text.
    ///
    /// # Errors
    /// As [`execute`](Self::execute).
    pub(crate) async fn run_text(&mut self, text: String) -> Result<MySqlQueryResult> {
        Ok(self.ask(|_| statements::text(text), None, Sent::Yes).await?.0.done)
    }

    /// Statements that run from now on have this bound.
    pub(crate) fn set_bound(&mut self, bound: Bound) {
        self.bound = bound;
    }

    /// Whether it belongs to this runtime, and there it is of use.
    pub(crate) fn is_of(&self, runtime: Id) -> bool {
        self.raw.as_ref().is_some_and(|raw| raw.is_of(runtime))
    }

    /// Puts the connection back, and hands its right to work in the background, ahead of the operations that wait for one: where connections are few,
    /// some may always wait. The runtime of that work may stand still. So the right is given back at this moment at the latest.
    pub(crate) fn give_up(mut self, at: Instant) -> Closing {
        let permit = self.permit.take();
        self.idle.in_flight.add(None, permit, at)
    }

    /// Takes the right back that was [given up](Self::give_up) for it, unless its time is over: the connection may be in doubt, and
    /// counts for as long as that.
    pub(crate) fn take_right(&mut self, given_up: &Closing) {
        self.permit = given_up.take_permit();
    }

    /// Closes it, and with it what the server keeps for it, instead of putting it back.
    pub(crate) fn hang_up(&mut self) {
        self.raw = None;
    }

    /// Closes it, unless the server may still be at work on the last question: then it is closed later.
    pub(crate) fn close_if_answered(&mut self) {
        self.raw.take_if(|raw| !raw.is_in_doubt());
    }

    /// The answer belongs to another question. The server may not have run the last one yet, so that the connection is in
    /// doubt, and a release of the claim is to be sent behind that.
    pub(crate) fn out_of_step(&mut self, sent: Sent) -> Error {
        self.raw.iter_mut().for_each(RawConnection::out_of_step);
        error::out_of_step(sent)
    }

    /// Asks, and takes note of how that ended: with an answer, which may be a refusal, or, in time, without one.
    async fn ask<Q: Execute<'static, MySql> + 'static>(
        &mut self,
        what: impl FnOnce(Question) -> Q,
        token: Option<Token>,
        sent: Sent,
    ) -> Result<(Answer, Question)> {
        let raw = self.raw.as_mut().ok_or_else(raw::broke)?;
        let question = raw.ask(token, what).ok_or_else(raw::broke)?;
        match raw.answer(self.bound.at).await {
            Some(Ok(answer)) => Ok((answer, question)),
            Some(Err(refusal)) => {
                let refusal = error::map(refusal, sent);
                if error::is_row_busy(&refusal) {
                    // On a lock that many want this is no rare answer, and to connect anew takes several round trips.
                    self.raw.iter_mut().for_each(RawConnection::refused);
                } else if error::is_refusal(&refusal) {
                    // After most errors it could go on, but errors are rare, and a new connection is in a known state. What the
                    // server refuses here may concern the others, too, as it does when it has become a replica.
                    self.hang_up();
                    self.idle.broke();
                } else {
                    // It broke, or the driver did not understand the answer, which may be one to another question. The server may
                    // still run the statement.
                    self.raw.iter_mut().for_each(RawConnection::out_of_step);
                    self.idle.broke();
                }
                Err(refusal)
            }
            // It stays in doubt.
            None => {
                self.idle.broke();
                Err(Error::no_answer(self.bound.whole, sent))
            }
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let (Some(mut raw), permit) = (self.raw.take(), self.permit.take()) else { return };
        if !raw.is_in_doubt() {
            raw.forget_claim();
            // It is idle before the permit is given back, so that the next operation finds it.
            self.idle.push(raw, self.breaks);
            return drop(permit);
        }
        // Its release waits for this, whatever becomes of who is to await the answer: nobody may be, and a runtime may end.
        let (late, sooner) = (Bound::new(self.idle.linger).at, Bound::new(self.idle.open_for(self.bound.whole)).at);
        let closing = self.idle.in_flight.add(raw.claim(), permit, late);
        // Without a runtime, all that is left is to hang up.
        let Ok(runtime) = Handle::try_current() else { return };
        let linger = self.idle.linger;
        runtime.spawn(async move {
            if raw.finish_and_close(linger).await {
                closing.ended();
            } else {
                // A server that can't be heard any more may still run it, for a lease that is over soon.
                closing.closed(sooner);
            }
        });
    }
}

/// Whether all rows are an answer to this question.
fn has_number(rows: &[MySqlRow], question: Question) -> bool {
    rows.iter().all(|row| row.try_get::<Question, _>(0).is_ok_and(|number| number == question))
}
