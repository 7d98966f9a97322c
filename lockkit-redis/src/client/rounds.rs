//! One answer for all who ask the same question at the same time.

use std::{
    fmt,
    future::Future,
    sync::{Arc, Mutex},
    time::Duration,
};

use lockkit_core::{
    Error, Result,
    store::{Background, Begun, Sent, unpoisoned},
};
use tokio::{
    sync::watch,
    time::{Instant, timeout},
};
use tokio_util::sync::CancellationToken;

/// Rounds of a question, one after the other.
///
/// A task asks, not one of those who want the answer: they may go away, or stop where they are for as long as they like. It runs
/// where this was made: the runtime of one of them may not be driven any more. If the first one has ended, or is not driven itself,
/// that of the next caller takes its place.
pub(crate) struct Rounds<T> {
    /// How long a round may take, with the one before it. Its own bounds end it sooner, unless nobody drives its runtime.
    bound: Duration,
    background: Background,
    state: Mutex<State<T>>,
}

struct State<T> {
    /// The round that has not begun.
    next: Option<Coming<T>>,
    turn: Arc<Turn>,
}

/// What comes of a round, since when it is to come, and whether its task is there to wait for its turn.
struct Coming<T> {
    answered: watch::Receiver<Option<T>>,
    since: Instant,
    begun: Begun,
}

/// Whose turn it is.
#[derive(Default)]
struct Turn {
    /// Held by the round under way.
    held: tokio::sync::Mutex<()>,
    /// The rounds that wait for this one have been given up, and the one that has it.
    is_over: CancellationToken,
}

impl<T: Clone + Send + Sync + 'static> Rounds<T> {
    /// `longest` is how long a question may take.
    pub(crate) fn new(longest: Duration) -> Arc<Self> {
        let (background, state) = (Background::new(), Mutex::new(State { next: None, turn: Arc::default() }));
        Arc::new(Self { bound: longest.saturating_mul(2), background, state })
    }

    /// The outcome of a round that begins from now on; `None` if the runtime ended before it did. `ask` is dropped if
    /// somebody else's is about to begin.
    ///
    /// # Errors
    /// `TimedOut` if there is none after twice the longest time that a question may take, and after a second if nobody drives the runtime of
    /// the round. Without an effect, as far as `ask` has none.
    ///
    /// # Cancellation
    /// The round goes on.
    pub(crate) async fn join(self: &Arc<Self>, ask: impl Future<Output = T> + Send + 'static) -> Result<Option<T>> {
        let mut coming = self.coming(ask);
        loop {
            let patience = self.patience(&coming);
            let left = patience.saturating_sub(coming.since.elapsed());
            if let Ok(outcome) = timeout(left, coming.answered.wait_for(Option::is_some)).await {
                return Ok(outcome.ok().and_then(|answer| answer.clone()));
            }
            // Unless it has begun meanwhile.
            if self.patience(&coming) <= patience {
                return Err(Error::no_answer(patience, Sent::ReadOnly));
            }
        }
    }

    /// For how long a round is waited for.
    fn patience(&self, coming: &Coming<T>) -> Duration {
        if coming.begun.has_begun() { self.bound } else { self.bound.min(Background::BEGINS_WITHIN) }
    }

    fn coming(self: &Arc<Self>, ask: impl Future<Output = T> + Send + 'static) -> Coming<T> {
        let mut state = unpoisoned(&self.state);
        // One that was to come may have ended with its runtime.
        if let Some(next) = state.next.as_ref().filter(|next| next.answered.has_changed().is_ok()) {
            if next.since.elapsed() < self.patience(next) {
                return next.clone();
            }
            // Nobody drives it, or the one before it. What they may yet find out is too old.
            state.turn.is_over.cancel();
            state.turn = Arc::default();
            self.background.leave();
        }
        let (told, answered) = watch::channel(None);
        let coming = Coming { answered, since: Instant::now(), begun: Begun::default() };
        state.next = Some(coming.clone());
        let (rounds, turn) = (Arc::clone(self), Arc::clone(&state.turn));
        // The task of a runtime that is ending is dropped at once, here and now.
        drop(state);
        self.background.spawn(coming.begun.clone().noted_by(async move {
            let round = async {
                let held = turn.held.lock().await;
                // Callers that come from now on are too late for this one.
                unpoisoned(&rounds.state).next.take();
                let answer = ask.await;
                drop(held);
                told.send_replace(Some(answer));
            };
            tokio::select! {
                biased;
                () = turn.is_over.cancelled() => {}
                () = round => {}
            }
        }));
        coming
    }
}

impl<T> Clone for Coming<T> {
    fn clone(&self) -> Self {
        Self { answered: self.answered.clone(), since: self.since, begun: self.begun.clone() }
    }
}

impl<T> fmt::Debug for Rounds<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rounds").field("bound", &self.bound).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::{
        future::pending,
        sync::atomic::{AtomicBool, AtomicU32, Ordering},
    };

    use lockkit_core::{Effect, ErrorKind};
    use tokio::{
        runtime::{Builder, Runtime},
        sync::Notify,
    };

    use super::*;

    const LONGEST: Duration = Duration::from_secs(5);

    #[tokio::test(start_paused = true)]
    async fn who_comes_late_has_the_next_round() {
        let (rounds, begun) = (Rounds::new(LONGEST), Arc::new(AtomicU32::new(0)));
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
        let (first, same, (late, also)) = tokio::join!(rounds.join(ask()), rounds.join(ask()), late);
        assert_eq!([first, same, late, also].map(|answer| answer.expect("in time")), [0, 0, 1, 1].map(Some));
    }

    fn runtime() -> Runtime {
        Builder::new_current_thread().enable_time().build().expect("runtime")
    }

    /// Has a round begin there that does not end, and leaves it.
    fn leave_one(runtime: &Runtime, rounds: &Arc<Rounds<u32>>) {
        runtime.block_on(async {
            let left = timeout(Duration::from_millis(5), rounds.join(pending())).await;
            assert!(left.is_err());
        });
    }

    #[test]
    fn a_runtime_that_ends_takes_only_its_own_round_along() {
        let rounds = Rounds::new(LONGEST);
        let first = runtime();
        leave_one(&first, &rounds);
        drop(first);
        assert_eq!(runtime().block_on(rounds.join(async { 7 })).expect("in time"), Some(7));
    }

    #[test]
    fn a_round_on_a_runtime_that_nobody_drives_is_replaced() {
        let (rounds, first, other) = (Rounds::new(Duration::from_millis(25)), runtime(), runtime());
        leave_one(&first, &rounds);
        let error = other.block_on(rounds.join(async { 7 })).expect_err("the first one has the turn");
        assert_eq!((error.kind(), error.effect()), (ErrorKind::TimedOut, Effect::None));
        assert_eq!(other.block_on(rounds.join(async { 7 })).expect("in time"), Some(7));
    }

    /// A caller is not kept for as long as a question may take by a runtime that does not even begin.
    #[test]
    fn a_runtime_that_begins_no_round_costs_a_second() {
        let (first, other) = (runtime(), runtime());
        let rounds = first.block_on(async { Rounds::new(Duration::from_secs(60)) });
        let start = std::time::Instant::now();
        let error = other.block_on(rounds.join(async { 7 })).expect_err("nobody drives the first one");
        assert_eq!((error.kind(), error.effect()), (ErrorKind::TimedOut, Effect::None));
        assert_eq!(other.block_on(rounds.join(async { 7 })).expect("in time"), Some(7));
        assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
    }

    /// What it may yet find out is older than what others have found out meanwhile.
    #[test]
    fn a_round_that_was_given_up_does_not_go_on() {
        let (rounds, first, other) = (Rounds::new(Duration::from_millis(25)), runtime(), runtime());
        let (go, goes_on) = (Arc::new(Notify::new()), Arc::new(AtomicBool::new(false)));
        let ask = {
            let (go, goes_on) = (Arc::clone(&go), Arc::clone(&goes_on));
            async move {
                go.notified().await;
                goes_on.store(true, Ordering::Relaxed);
                1
            }
        };
        assert!(first.block_on(async { timeout(Duration::from_millis(5), rounds.join(ask)).await }).is_err());
        let is_replaced = (0..9).any(|_| other.block_on(rounds.join(async { 2 })).is_ok());
        assert!(is_replaced, "the first one has the turn");
        go.notify_one();
        first.block_on(async { tokio::time::sleep(Duration::from_millis(5)).await });
        assert!(!goes_on.load(Ordering::Relaxed));
    }

    #[test]
    fn a_round_does_not_depend_on_the_runtime_of_a_caller() {
        let (home, other) = (runtime(), runtime());
        let rounds = home.block_on(async { Rounds::new(LONGEST) });
        leave_one_behind(&other, &rounds);
        assert_eq!(home.block_on(rounds.join(async { 8 })).expect("in time"), Some(8));
    }

    /// Asks there, and leaves it before anybody has begun.
    fn leave_one_behind(runtime: &Runtime, rounds: &Arc<Rounds<u32>>) {
        runtime.block_on(async {
            let left = timeout(Duration::from_millis(5), rounds.join(async { 8 })).await;
            assert!(left.is_err(), "it runs elsewhere");
        });
    }
}
