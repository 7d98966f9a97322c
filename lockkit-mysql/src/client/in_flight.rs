//! Statements that the server may still be running although their callers are gone.

use std::{collections::HashMap, sync::Arc};

use lockkit_core::Token;
use tokio::{
    sync::watch,
    time::{Instant, timeout_at},
};

/// The claims that such statements are about.
#[derive(Clone, Debug, Default)]
pub(crate) struct InFlight(Arc<watch::Sender<HashMap<Token, Statements>>>);

/// How many there are about a claim, and by when the last of them has ended.
#[derive(Clone, Copy, Debug)]
struct Statements {
    count: usize,
    until: Instant,
}

/// One statement. Dropping it says that the statement has ended, or will never be heard of again.
#[derive(Debug)]
pub(crate) struct Statement {
    all: InFlight,
    token: Token,
}

impl InFlight {
    /// Counts a statement about a claim, which has ended by then: whoever waits for its answer may be on a runtime that nobody drives.
    pub(crate) fn add(&self, token: Token, until: Instant) -> Statement {
        self.0.send_modify(|claims| {
            let statements = claims.entry(token).or_insert(Statements { count: 0, until });
            *statements = Statements { count: statements.count + 1, until: statements.until.max(until) };
        });
        Statement { all: self.clone(), token }
    }

    /// Returns when no statement about the claim is in flight.
    pub(crate) async fn settled(&self, token: &Token) {
        // Nearly always there are none.
        if self.0.borrow().is_empty() {
            return;
        }
        // The other end is in `self`, so that it is not closed before this returns.
        let mut claims = self.0.subscribe();
        loop {
            let Some(Statements { until, .. }) = claims.borrow_and_update().get(token).copied() else { return };
            if until <= Instant::now() {
                return;
            }
            drop(timeout_at(until, claims.changed()).await);
        }
    }
}

impl Drop for Statement {
    fn drop(&mut self) {
        self.all.0.send_modify(|claims| {
            if let Some(statements) = claims.get_mut(&self.token) {
                statements.count -= 1;
                if statements.count == 0 {
                    claims.remove(&self.token);
                }
            }
        });
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
            drop(statement);
        }
        assert_eq!(is_settled(), Poll::Ready(()));
        assert!(all.0.borrow().is_empty());
    }

    #[tokio::test]
    async fn a_statement_that_nobody_hears_of_is_over_in_time() {
        let (all, token) = (InFlight::default(), Token::random().expect("token"));
        let until = Instant::now() + Duration::from_millis(20);
        let _never = all.add(token, until);
        all.settled(&token).await;
        assert!(Instant::now() >= until);
    }
}
