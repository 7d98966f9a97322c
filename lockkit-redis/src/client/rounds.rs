//! One answer for all who ask the same question at the same time.

use std::{
    future::Future,
    sync::{Arc, Mutex},
};

use lockkit_core::store::unpoisoned;
use tokio::sync::watch;

/// Rounds of a question, one after the other.
///
/// A task asks, not one of those who want the answer: they may go away, or stop where they are for as long as they like.
#[derive(Debug)]
pub(crate) struct Rounds<T> {
    /// What comes of the round that has not begun.
    next: Mutex<Option<Answered<T>>>,
    /// Held by the round under way.
    turn: tokio::sync::Mutex<()>,
}

type Answered<T> = watch::Receiver<Option<T>>;

impl<T: Clone + Send + Sync + 'static> Rounds<T> {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { next: Mutex::default(), turn: tokio::sync::Mutex::default() })
    }

    /// The outcome of a round that begins from now on; `None` if the runtime ended before it did. `ask` is dropped if
    /// somebody else's is about to begin.
    ///
    /// # Cancellation
    /// The round goes on.
    pub(crate) async fn join(self: &Arc<Self>, ask: impl Future<Output = T> + Send + 'static) -> Option<T> {
        let mut answered = self.coming(ask);
        answered.wait_for(Option::is_some).await.ok()?.clone()
    }

    fn coming(self: &Arc<Self>, ask: impl Future<Output = T> + Send + 'static) -> Answered<T> {
        let mut next = unpoisoned(&self.next);
        // One that was to come may have ended with its runtime.
        if let Some(answered) = next.as_ref().filter(|answered| answered.has_changed().is_ok()) {
            return answered.clone();
        }
        let (told, answered) = watch::channel(None);
        *next = Some(answered.clone());
        let rounds = Arc::clone(self);
        tokio::spawn(async move {
            let turn = rounds.turn.lock().await;
            // Callers that come from now on are too late for this one.
            unpoisoned(&rounds.next).take();
            let answer = ask.await;
            drop(turn);
            told.send_replace(Some(answer));
        });
        answered
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicU32, Ordering},
        time::Duration,
    };

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn who_comes_late_has_the_next_round() {
        let (rounds, begun) = (Rounds::new(), Arc::new(AtomicU32::new(0)));
        let ask = || {
            let begun = Arc::clone(&begun);
            async move {
                let number = begun.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(Duration::from_secs(1)).await;
                number
            }
        };
        let late = async {
            tokio::time::sleep(Duration::from_millis(500)).await;
            tokio::join!(rounds.join(ask()), rounds.join(ask()))
        };
        let (first, same, late) = tokio::join!(rounds.join(ask()), rounds.join(ask()), late);
        assert_eq!((first, same, late), (Some(0), Some(0), (Some(1), Some(1))));
    }

    #[test]
    fn a_runtime_that_ends_takes_only_its_own_round_along() {
        let runtime = || tokio::runtime::Builder::new_current_thread().enable_time().build().expect("runtime");
        let rounds = Rounds::new();
        let first = runtime();
        first.block_on(async {
            let ended = tokio::time::timeout(Duration::from_millis(5), rounds.join(std::future::pending())).await;
            assert!(ended.is_err());
        });
        drop(first);
        assert_eq!(runtime().block_on(rounds.join(async { 7 })), Some(7));
    }
}
