//! Statements that run on at the server although nobody waits for them any more.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use lockkit_core::Token;
use tokio::sync::watch;

/// The claims of such statements.
#[derive(Debug, Default)]
pub(crate) struct RunningOn {
    /// Each with what ends when the statement does.
    claims: Mutex<HashMap<Token, Vec<watch::Receiver<()>>>>,
    /// How many there are: the common case, none, is known without the map.
    count: AtomicUsize,
}

/// The mark of one statement. Dropping it says that it has ended, or will never be heard of again.
#[derive(Debug)]
pub(crate) struct Mark {
    all: Arc<RunningOn>,
    token: Token,
    ended: watch::Receiver<()>,
    /// Never sends. It is dropped after the mark was taken away, which wakes who waits for the end.
    _ends: watch::Sender<()>,
}

impl RunningOn {
    /// Marks a statement about a claim.
    pub(crate) fn mark(all: &Arc<Self>, token: Token) -> Mark {
        let (ends, ended) = watch::channel(());
        all.claims().entry(token).or_default().push(ended.clone());
        all.count.fetch_add(1, Ordering::AcqRel);
        Mark { all: Arc::clone(all), token, ended, _ends: ends }
    }

    /// Returns when no statement about the claim runs on.
    pub(crate) async fn settled(&self, token: &Token) {
        while self.count.load(Ordering::Acquire) > 0 {
            let running = self.claims().get(token).and_then(|running| running.first().cloned());
            let Some(mut running) = running else { return };
            drop(running.changed().await);
        }
    }

    fn claims(&self) -> MutexGuard<'_, HashMap<Token, Vec<watch::Receiver<()>>>> {
        self.claims.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        let mut claims = self.all.claims();
        if let Some(running) = claims.get_mut(&self.token) {
            running.retain(|ended| !ended.same_channel(&self.ended));
            if running.is_empty() {
                claims.remove(&self.token);
            }
        }
        self.all.count.fetch_sub(1, Ordering::AcqRel);
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
        let (all, token) = (Arc::new(RunningOn::default()), Token::random().expect("token"));
        all.settled(&token).await;
        let marks = [RunningOn::mark(&all, token), RunningOn::mark(&all, token)];
        all.settled(&Token::random().expect("token")).await;
        let mut settled = pin!(all.settled(&token));
        let mut is_settled = || settled.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        for mark in marks {
            assert_eq!(is_settled(), Poll::Pending);
            drop(mark);
        }
        assert_eq!(is_settled(), Poll::Ready(()));
        assert!(all.claims().is_empty());
    }
}
