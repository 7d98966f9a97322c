//! Connections that are being closed: the server may still be at work on what was asked there, although the caller is gone.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicBool, Ordering},
};

use lockkit_core::{
    Token,
    store::{Reconnections, unpoisoned},
};
use tokio::{
    sync::{OwnedSemaphorePermit, watch},
    time::{Instant, timeout_at},
};

/// The statements that such connections were left with.
#[derive(Debug, Default)]
pub(crate) struct InFlight {
    statements: Mutex<Vec<Arc<StatementInFlight>>>,
    /// Counts those whose time was over before they were known to have ended: what they do may come after what is asked next.
    reconnections: Reconnections,
}

#[derive(Debug)]
struct StatementInFlight {
    /// The claim that it may be about.
    token: Option<Token>,
    /// The right to its connection.
    permit: Mutex<Option<OwnedSemaphorePermit>>,
    /// By when it has ended.
    until: watch::Sender<Instant>,
    /// Whether the server was heard to be done with it.
    is_done: AtomicBool,
}

/// A connection with such a statement, which is closed when this is dropped. **The statement counts on** until it has
/// [ended](Self::ended), or its time is over: whoever awaits its end may go with a runtime, while the server goes on.
#[derive(Debug)]
pub(crate) struct Closing(Arc<StatementInFlight>);

impl InFlight {
    pub(crate) fn new(reconnections: Reconnections) -> Self {
        Self { statements: Mutex::default(), reconnections }
    }

    /// Counts a statement that has ended by then, and its connection.
    pub(crate) fn add(&self, token: Option<Token>, permit: Option<OwnedSemaphorePermit>, until: Instant) -> Closing {
        self.give_back();
        let (permit, until) = (Mutex::new(permit), watch::Sender::new(until));
        let statement = Arc::new(StatementInFlight { token, permit, until, is_done: AtomicBool::new(false) });
        unpoisoned(&self.statements).push(Arc::clone(&statement));
        Closing(statement)
    }

    /// Forgets those whose time is over, and gives their permits back: a connection that is left on a runtime that nobody drives is never
    /// closed.
    pub(crate) fn give_back(&self) {
        let now = Instant::now();
        unpoisoned(&self.statements).retain(|statement| {
            let is_open = *statement.until.borrow() > now;
            if !is_open {
                if statement.token.is_some() && !statement.is_done.load(Ordering::Acquire) {
                    self.reconnections.add_one();
                }
                drop(unpoisoned(&statement.permit).take());
            }
            is_open
        });
    }

    /// Returns when no statement about the claim is in flight.
    pub(crate) async fn settled(&self, token: &Token) {
        while let Some(mut until) = self.of(token) {
            let at = *until.borrow_and_update();
            drop(timeout_at(at, until.changed()).await);
        }
        // What was not heard of is to be counted before the next question is sent.
        self.give_back();
    }

    /// By when a statement about the claim has ended, if there is one. Nearly always there is none at all.
    fn of(&self, token: &Token) -> Option<watch::Receiver<Instant>> {
        let statements = unpoisoned(&self.statements);
        let is_open = |one: &&Arc<StatementInFlight>| one.token == Some(*token) && *one.until.borrow() > Instant::now();
        statements.iter().find(is_open).map(|statement| statement.until.subscribe())
    }
}

impl Closing {
    /// The server is done with the statement.
    pub(crate) fn ended(self) {
        self.0.is_done.store(true, Ordering::Release);
        self.0.until.send_replace(Instant::now());
    }

    /// The right that it has, if its time is not over.
    pub(crate) fn take_permit(&self) -> Option<OwnedSemaphorePermit> {
        unpoisoned(&self.0.permit).take()
    }

    /// The connection is closed, and its statement has ended by then, as far as is known.
    pub(crate) fn closed(self, until: Instant) {
        self.0.until.send_replace(until);
    }
}

impl Drop for Closing {
    fn drop(&mut self) {
        drop(unpoisoned(&self.0.permit).take());
    }
}

#[cfg(test)]
mod tests {
    use std::{
        pin::pin,
        task::{Context, Poll, Waker},
        time::Duration,
    };

    use super::*;

    #[tokio::test]
    async fn a_claim_is_settled_when_its_last_statement_has_ended() {
        let (all, token) = (InFlight::default(), Token::random().expect("token"));
        all.settled(&token).await;
        let later = Instant::now() + Duration::from_secs(3600);
        let statements = [all.add(Some(token), None, later), all.add(Some(token), None, later)];
        all.settled(&Token::random().expect("token")).await;
        let mut settled = pin!(all.settled(&token));
        let mut is_settled = || settled.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        for statement in statements {
            assert_eq!(is_settled(), Poll::Pending);
            statement.ended();
        }
        assert_eq!(is_settled(), Poll::Ready(()));
        all.give_back();
        assert!(unpoisoned(&all.statements).is_empty(), "what is over is not kept");
        assert_eq!(all.reconnections.count(), 0, "each is known to have ended");
    }

    #[tokio::test]
    async fn a_statement_that_nobody_hears_of_is_over_in_time() {
        let (all, token) = (InFlight::default(), Token::random().expect("token"));
        let until = Instant::now() + Duration::from_millis(20);
        // Also if whoever awaited its end is gone.
        drop(all.add(Some(token), None, until));
        all.settled(&token).await;
        assert!(Instant::now() >= until);
        assert_eq!(all.reconnections.count(), 1, "it may take effect after what comes next");
        drop(all.add(Some(token), None, Instant::now()));
        all.settled(&token).await;
        assert_eq!(all.reconnections.count(), 2, "also if nobody had to wait for it");
        drop(all.add(None, None, Instant::now() + Duration::from_secs(3600)));
        assert_eq!(unpoisoned(&all.statements).len(), 1, "what is over is not kept");
    }
}
