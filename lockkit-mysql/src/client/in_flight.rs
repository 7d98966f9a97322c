//! Statements that the server may still be running although their callers are gone.

use std::{collections::HashMap, sync::Arc};

use lockkit_core::Token;
use tokio::sync::watch;

/// The claims that such statements are about, each with how many there are.
#[derive(Clone, Debug, Default)]
pub(crate) struct InFlight(Arc<watch::Sender<HashMap<Token, usize>>>);

/// One statement. Dropping it says that the statement has ended, or will never be heard of again.
#[derive(Debug)]
pub(crate) struct Statement {
    all: InFlight,
    token: Token,
}

impl InFlight {
    /// Counts a statement about a claim.
    pub(crate) fn add(&self, token: Token) -> Statement {
        self.0.send_modify(|claims| *claims.entry(token).or_default() += 1);
        Statement { all: self.clone(), token }
    }

    /// Returns when no statement about the claim is in flight.
    pub(crate) async fn settled(&self, token: &Token) {
        // Nearly always there are none.
        if !self.0.borrow().is_empty() {
            // The other end is in `self`, so that it is not closed before this returns.
            drop(self.0.subscribe().wait_for(|claims| !claims.contains_key(token)).await);
        }
    }
}

impl Drop for Statement {
    fn drop(&mut self) {
        self.all.0.send_modify(|claims| {
            let left = claims.get(&self.token).map_or(0, |count| count - 1);
            if left > 0 {
                claims.insert(self.token, left);
            } else {
                claims.remove(&self.token);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use std::{
        pin::pin,
        task::{Context, Poll, Waker},
    };

    use super::*;

    #[tokio::test]
    async fn a_claim_is_settled_when_its_last_statement_has_ended() {
        let (all, token) = (InFlight::default(), Token::random().expect("token"));
        all.settled(&token).await;
        let statements = [all.add(token), all.add(token)];
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
}
