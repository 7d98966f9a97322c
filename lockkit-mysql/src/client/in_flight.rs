//! Connections that are being closed: the server may still be at work on what was asked there, although the caller is gone.

use std::sync::{Arc, Mutex};

use lockkit_core::{Token, store::unpoisoned};
use tokio::{
    sync::{OwnedSemaphorePermit, watch},
    time::{Instant, timeout_at},
};

/// The statements that such connections were left with.
#[derive(Debug, Default)]
pub(crate) struct InFlight(Mutex<Vec<Arc<Statement>>>);

#[derive(Debug)]
struct Statement {
    /// The claim that it may be about.
    token: Option<Token>,
    /// The right to its connection.
    permit: Mutex<Option<OwnedSemaphorePermit>>,
    /// By when it has ended.
    until: watch::Sender<Instant>,
}

/// A connection with such a statement, which is closed when this is dropped. **The statement counts on** until it has
/// [ended](Self::closed), or its time is over: whoever awaits its end may go with a runtime, while the server goes on.
#[derive(Debug)]
pub(crate) struct Closing(Arc<Statement>);

impl InFlight {
    /// Counts a statement that has ended by then, and its connection.
    pub(crate) fn add(&self, token: Option<Token>, permit: Option<OwnedSemaphorePermit>, until: Instant) -> Closing {
        self.give_back();
        let statement = Arc::new(Statement { token, permit: Mutex::new(permit), until: watch::Sender::new(until) });
        unpoisoned(&self.0).push(Arc::clone(&statement));
        Closing(statement)
    }

    /// Gives the permits back whose time is over: a connection that is left on a runtime that nobody drives is never closed.
    pub(crate) fn give_back(&self) {
        let now = Instant::now();
        unpoisoned(&self.0).retain(|statement| {
            let is_open = *statement.until.borrow() > now;
            if !is_open {
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
    }

    /// By when a statement about the claim has ended, if there is one. Nearly always there is none at all.
    fn of(&self, token: &Token) -> Option<watch::Receiver<Instant>> {
        let statements = unpoisoned(&self.0);
        let is_open = |one: &&Arc<Statement>| one.token == Some(*token) && *one.until.borrow() > Instant::now();
        statements.iter().find(is_open).map(|statement| statement.until.subscribe())
    }
}

impl Closing {
    /// The connection is closed, and its statement has ended by then.
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
            statement.closed(Instant::now());
        }
        assert_eq!(is_settled(), Poll::Ready(()));
        all.give_back();
        assert!(unpoisoned(&all.0).is_empty(), "what is over is not kept");
    }

    #[tokio::test]
    async fn a_statement_that_nobody_hears_of_is_over_in_time() {
        let (all, token) = (InFlight::default(), Token::random().expect("token"));
        let until = Instant::now() + Duration::from_millis(20);
        // Also if whoever awaited its end is gone.
        drop(all.add(Some(token), None, until));
        all.settled(&token).await;
        assert!(Instant::now() >= until);
        drop(all.add(None, None, Instant::now() + Duration::from_secs(3600)));
        assert_eq!(unpoisoned(&all.0).len(), 1, "what is over is not kept");
    }
}
