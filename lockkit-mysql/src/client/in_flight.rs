//! Statements that the server may still be running although their callers are gone.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use lockkit_core::Token;
use tokio::{
    sync::watch,
    time::{Instant, timeout_at},
};

/// The claims that such statements are about.
#[derive(Clone, Debug, Default)]
pub(crate) struct InFlight {
    statements: Arc<watch::Sender<Vec<Entry>>>,
    next: Arc<AtomicU64>,
}

/// A statement about a claim, and by when it has ended.
#[derive(Clone, Copy, Debug)]
struct Entry {
    number: u64,
    token: Token,
    until: Instant,
}

/// One statement. It counts until it has [ended](Self::ended), or its time is over: **not until this is dropped**, for whoever awaits
/// its end may go with a runtime, while the server goes on.
#[derive(Debug)]
pub(crate) struct Statement {
    all: InFlight,
    number: u64,
}

impl InFlight {
    /// Counts a statement about a claim, which has ended by then.
    pub(crate) fn add(&self, token: Token, until: Instant) -> Statement {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.statements.send_modify(|statements| {
            let now = Instant::now();
            statements.retain(|statement| statement.until > now);
            statements.push(Entry { number, token, until });
        });
        Statement { all: self.clone(), number }
    }

    /// Returns when no statement about the claim is in flight.
    pub(crate) async fn settled(&self, token: &Token) {
        // Nearly always there are none.
        if self.statements.borrow().is_empty() {
            return;
        }
        // The other end is in `self`, so that it is not closed before this returns.
        let mut statements = self.statements.subscribe();
        loop {
            let of_claim = |statement: &&Entry| statement.token == *token;
            let last = statements.borrow_and_update().iter().filter(of_claim).map(|statement| statement.until).max();
            let Some(until) = last.filter(|until| *until > Instant::now()) else { return };
            drop(timeout_at(until, statements.changed()).await);
        }
    }
}

impl Statement {
    /// It counts no longer than until then.
    pub(crate) fn ends_by(self, until: Instant) {
        self.all.statements.send_modify(|statements| {
            let this = statements.iter_mut().find(|statement| statement.number == self.number);
            this.into_iter().for_each(|statement| statement.until = statement.until.min(until));
        });
    }

    /// The server has answered it.
    pub(crate) fn ended(self) {
        self.all.statements.send_modify(|statements| statements.retain(|statement| statement.number != self.number));
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
        let statements = [all.add(token, later), all.add(token, later)];
        all.settled(&Token::random().expect("token")).await;
        let mut settled = pin!(all.settled(&token));
        let mut is_settled = || settled.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        for statement in statements {
            assert_eq!(is_settled(), Poll::Pending);
            statement.ended();
        }
        assert_eq!(is_settled(), Poll::Ready(()));
        assert!(all.statements.borrow().is_empty());
    }

    #[tokio::test]
    async fn a_statement_that_nobody_hears_of_is_over_in_time() {
        let (all, token) = (InFlight::default(), Token::random().expect("token"));
        let until = Instant::now() + Duration::from_millis(20);
        // Also if whoever awaited its end is gone.
        drop(all.add(token, until));
        all.settled(&token).await;
        assert!(Instant::now() >= until);
        all.add(Token::random().expect("token"), Instant::now() + Duration::from_secs(3600)).ended();
        assert!(all.statements.borrow().is_empty(), "what is over is not kept");
    }
}
