//! One answer for all who ask the same question at the same time, which was asked after each of them had come.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use lockkit_core::{
    Error, ErrorKind, Result,
    store::{Sent, SingleFlight},
};
use tokio::time::timeout;

/// Rounds of a question, one after the other. A task asks, where this was made, and goes on without those who want the answer: see
/// [`SingleFlight`].
pub(crate) struct Rounds<T> {
    callers: Arc<AtomicU64>,
    /// How many callers had come when it began, and what came of it.
    last: SingleFlight<(u64, T)>,
}

impl<T: Clone + Send + Sync + 'static> Rounds<T> {
    pub(crate) fn new() -> Self {
        Self { callers: Arc::default(), last: SingleFlight::new() }
    }

    /// The outcome of a round that begins from now on, after the one that is under way.
    ///
    /// # Errors
    /// `TimedOut` after `bound`; `Unavailable` if the round's runtime has ended. Without an effect, as far as `ask` has none. A round may take
    /// twice the bound.
    ///
    /// # Cancellation
    /// The round goes on.
    pub(crate) async fn join<F>(&self, bound: Duration, ask: impl Fn() -> F + Send + Sync) -> Result<T>
    where
        F: Future<Output = T> + Send + 'static,
    {
        let mine = self.callers.fetch_add(1, Ordering::SeqCst) + 1;
        let covered = async {
            loop {
                let round = || {
                    let (callers, answer) = (Arc::clone(&self.callers), ask());
                    async move { Ok((callers.load(Ordering::SeqCst), answer.await)) }
                };
                match self.last.get(|(covers, _)| *covers >= mine, bound / 2, round).await {
                    Ok((covers, outcome)) if covers >= mine => return Ok(outcome),
                    // It began too soon.
                    Ok(_) => {}
                    // It takes long, or nobody drives its runtime: then the next one is on this.
                    Err(e) if e.kind() == ErrorKind::TimedOut => {}
                    Err(e) => return Err(e),
                }
            }
        };
        timeout(bound, covered).await.unwrap_or_else(|_| Err(Error::no_answer(bound, Sent::ReadOnly)))
    }
}

impl<T> fmt::Debug for Rounds<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rounds").field("last", &self.last).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use tokio::runtime::Builder;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn who_comes_late_has_the_next_round() {
        let (rounds, begun) = (Rounds::new(), Arc::new(AtomicU64::new(0)));
        let ask = || {
            let begun = Arc::clone(&begun);
            async move {
                let number = begun.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(Duration::from_secs(1)).await;
                number
            }
        };
        let join = || rounds.join(Duration::from_secs(5), &ask);
        let late = async {
            tokio::time::sleep(Duration::from_millis(500)).await;
            tokio::join!(join(), join())
        };
        let (first, same, (late, also)) = tokio::join!(join(), join(), late);
        assert_eq!([first, same, late, also].map(|answer| answer.expect("in time")), [0, 0, 1, 1]);
        assert_eq!(join().await.expect("in time"), 2, "the last one began before");
    }

    #[test]
    fn a_round_on_a_runtime_that_nobody_drives_is_replaced() {
        let [home, other] = [(), ()].map(|()| Builder::new_current_thread().enable_time().build().expect("a runtime"));
        let rounds = home.block_on(async { Rounds::new() });
        let answer = other.block_on(rounds.join(Duration::from_millis(100), || async { 7 }));
        assert_eq!(answer.expect("in time"), 7);
    }
}
