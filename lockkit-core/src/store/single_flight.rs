//! One connection, or one answer, for all callers, made by one of them at a time.

use std::{
    fmt, mem,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use tokio::{sync::watch, time::timeout};

use super::{Background, Begun, Sent, unpoisoned};
use crate::{Error, ErrorKind, Result};

/// What all callers share, such as a connection or a session: made when it is needed, and anew when it is over.
///
/// A task makes it. All that come meanwhile wait for that one attempt,
/// and callers that lose patience do not make it start over: where connecting takes longer than callers wait, nobody would
/// ever be connected. When to try again after a failure is the core's decision: the next caller that asks begins the
/// next attempt.
///
/// The task runs where this was made, also if a caller on another runtime asks for it: what it makes lives there, and that other
/// runtime may not be driven any more when the call is over. An attempt lasts for no longer than four times as long as its caller waits. If the
/// first runtime has ended, or does not begin while a caller waits, or does not end the attempt by then, the runtime of the next caller takes its
/// place.
pub struct SingleFlight<T> {
    slot: Arc<Mutex<Slot<T>>>,
    background: Background,
}

/// How many times as long as a caller waits an attempt may last.
const LONGEST: u32 = 4;
/// One that lasts so many times as long is on a runtime that nobody drives any more.
const STUCK: u32 = 5;

/// Where the task that makes it puts what came of that.
type Flight<T> = watch::Receiver<Option<Result<T>>>;

enum Slot<T> {
    Empty,
    Ready(T),
    /// An attempt under way.
    Flight(Flight<T>, Progress),
}

/// How an attempt goes on.
struct Progress {
    since: Instant,
    /// Whether its task has run: else nobody drives its runtime.
    begun: Begun,
}

impl Progress {
    /// Whether it is waited for in vain by callers that wait for so long.
    fn is_stuck(&self, bound: Duration) -> bool {
        let times = if self.begun.has_begun() { STUCK } else { 1 };
        self.since.elapsed() >= bound.saturating_mul(times)
    }
}

impl<T: Clone + Send + Sync + 'static> SingleFlight<T> {
    /// With nothing made.
    #[must_use]
    pub fn new() -> Self {
        Self { slot: Arc::new(Mutex::new(Slot::Empty)), background: Background::new() }
    }

    /// What is there, if it is alive; what is not is dropped. Nothing is made.
    pub fn present(&self, is_alive: impl FnOnce(&T) -> bool) -> Option<T> {
        let mut slot = unpoisoned(&self.slot);
        match &*slot {
            Slot::Ready(value) if is_alive(value) => return Some(value.clone()),
            Slot::Empty | Slot::Flight(..) => return None,
            Slot::Ready(_) => {}
        }
        let over = mem::replace(&mut *slot, Slot::Empty);
        // Whatever its end does, it does it without the slot.
        drop(slot);
        drop(over);
        None
    }

    /// What is there, if it is alive, or what `make` makes; waits for no longer than `bound`.
    ///
    /// # Errors
    /// That of `make`; `TimedOut` after `bound`, while the attempt goes on; `Unavailable` if the runtime of the attempt has
    /// ended, or another attempt has taken its place. None has an effect, as far as `make` has none.
    ///
    /// # Cancellation
    /// The attempt goes on without the caller.
    pub async fn get<F>(
        &self,
        is_alive: impl FnOnce(&T) -> bool,
        bound: Duration,
        make: impl FnOnce() -> F,
    ) -> Result<T>
    where
        F: Future<Output = Result<T>> + Send + 'static,
    {
        let mut flight = match self.ready_or_flight(is_alive, bound, make) {
            Ok(value) => return Ok(value),
            Err(flight) => flight,
        };
        let broken_off = || Err(Error::new(ErrorKind::Unavailable, "connecting ended with the runtime that it ran on"));
        match timeout(bound, flight.wait_for(Option::is_some)).await {
            Ok(Ok(outcome)) => outcome.clone().unwrap_or_else(broken_off),
            Ok(Err(_)) => broken_off(),
            Err(_) => Err(Error::no_answer(bound, Sent::ReadOnly)),
        }
    }

    fn ready_or_flight<F>(
        &self,
        is_alive: impl FnOnce(&T) -> bool,
        bound: Duration,
        make: impl FnOnce() -> F,
    ) -> Result<T, Flight<T>>
    where
        F: Future<Output = Result<T>> + Send + 'static,
    {
        let mut slot = unpoisoned(&self.slot);
        let is_stuck = match &*slot {
            Slot::Ready(value) if is_alive(value) => return Ok(value.clone()),
            // One whose task ended without a word, with its runtime or by a panic, has no sender any more.
            Slot::Flight(flight, progress) if flight.has_changed().is_ok() => {
                if !progress.is_stuck(bound) {
                    return Err(flight.clone());
                }
                true
            }
            Slot::Empty | Slot::Ready(_) | Slot::Flight(..) => false,
        };
        let (done, flight) = watch::channel(None);
        let begun = Begun::default();
        *slot = Slot::Flight(flight.clone(), Progress { since: Instant::now(), begun: begun.clone() });
        let (make, shared, own) = (make(), Arc::clone(&self.slot), flight.clone());
        // The task of a runtime that is ending is dropped at once, here and now.
        drop(slot);
        if is_stuck {
            self.background.leave();
        }
        self.background.spawn(begun.noted_by(async move {
            let longest = bound.saturating_mul(LONGEST);
            let outcome = timeout(longest, make).await;
            let outcome = outcome.unwrap_or_else(|_| Err(Error::no_answer(longest, Sent::ReadOnly)));
            let mut slot = unpoisoned(&shared);
            let is_current = matches!(&*slot, Slot::Flight(flight, _) if flight.same_channel(&own));
            if is_current {
                *slot = outcome.as_ref().map_or(Slot::Empty, |value| Slot::Ready(value.clone()));
            }
            drop(slot);
            // What nothing keeps is for nobody: a session would end under the locks that its callers got with it.
            done.send_replace(Some(if is_current || outcome.is_err() {
                outcome
            } else {
                let message = "connecting took so long that another attempt took its place";
                Err(Error::new(ErrorKind::Unavailable, message))
            }));
        }));
        Err(flight)
    }
}

impl<T: Clone + Send + Sync + 'static> Default for SingleFlight<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> fmt::Debug for SingleFlight<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match &*unpoisoned(&self.slot) {
            Slot::Empty => "empty",
            Slot::Ready(_) => "ready",
            Slot::Flight(..) => "in flight",
        };
        f.debug_tuple("SingleFlight").field(&state).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::{
        future::pending,
        sync::atomic::{AtomicU32, Ordering},
        thread,
    };

    use tokio::{
        runtime::{Builder, Runtime},
        sync::Notify,
    };

    use super::*;

    const BOUND: Duration = Duration::from_secs(5);

    /// Numbers what it makes, when it may.
    #[derive(Clone, Default)]
    struct Maker {
        made: Arc<AtomicU32>,
        go: Arc<Notify>,
    }

    impl Maker {
        async fn make(self) -> Result<u32> {
            let number = self.made.fetch_add(1, Ordering::SeqCst) + 1;
            self.go.notified().await;
            Ok(number)
        }

        fn made(&self) -> u32 {
            self.made.load(Ordering::SeqCst)
        }
    }

    #[tokio::test]
    async fn one_attempt_serves_all_who_come_meanwhile_and_goes_on_without_them() {
        let (flight, maker) = (SingleFlight::new(), Maker::default());
        let get = || flight.get(|_| true, BOUND, || maker.clone().make());
        // Each is polled once and dropped.
        for _ in 0..3 {
            tokio::select! {
                biased;
                _ = get() => panic!("nothing was made yet"),
                () = tokio::task::yield_now() => {}
            }
        }
        maker.go.notify_one();
        assert_eq!(get().await.expect("made"), 1);
        assert_eq!((get().await.expect("there"), maker.made()), (1, 1));
        assert_eq!(flight.present(|_| true), Some(1));
    }

    #[tokio::test]
    async fn what_is_over_is_made_anew() {
        let (flight, maker) = (SingleFlight::new(), Maker::default());
        for number in 1..=2 {
            maker.go.notify_one();
            let made = flight.get(|made| *made == number, BOUND, || maker.clone().make()).await;
            assert_eq!(made.expect("made"), number);
        }
        assert_eq!(flight.present(|made| *made > 2), None);
    }

    #[tokio::test]
    async fn what_is_over_is_dropped_when_it_is_looked_for() {
        let flight = SingleFlight::new();
        let made = flight.get(|_| true, BOUND, || async { Ok(Arc::new(())) }).await.expect("made");
        assert!(flight.present(|_| true).is_some());
        assert_eq!(Arc::strong_count(&made), 2);
        assert!(flight.present(|_| false).is_none());
        assert_eq!(Arc::strong_count(&made), 1);
    }

    #[tokio::test]
    async fn an_error_is_for_all_who_wait_and_the_next_caller_tries_again() {
        let (flight, go) = (Arc::new(SingleFlight::<u32>::new()), Arc::new(Notify::new()));
        let mut waiters = Vec::new();
        for _ in 0..2 {
            let (flight, go) = (Arc::clone(&flight), Arc::clone(&go));
            waiters.push(tokio::spawn(async move {
                let refused = async move {
                    go.notified().await;
                    Err(Error::new(ErrorKind::Denied, "no"))
                };
                flight.get(|_| true, BOUND, || refused).await
            }));
            tokio::task::yield_now().await;
        }
        go.notify_one();
        for waiter in waiters {
            assert_eq!(waiter.await.expect("no panic").expect_err("refused").kind(), ErrorKind::Denied);
        }
        assert_eq!(flight.get(|_| true, BOUND, || async { Ok(7) }).await.expect("made"), 7);
    }

    #[tokio::test(start_paused = true)]
    async fn a_caller_waits_for_its_bound() {
        let flight = SingleFlight::<u32>::new();
        let error = flight.get(|_| true, BOUND, pending).await.expect_err("never made");
        assert_eq!((error.kind(), error.effect()), (ErrorKind::TimedOut, crate::Effect::None));
    }

    fn runtime() -> Runtime {
        Builder::new_current_thread().enable_time().build().expect("a runtime")
    }

    /// Asks once, and leaves it.
    fn ask(runtime: &Runtime, flight: &SingleFlight<u32>) {
        runtime.block_on(async {
            tokio::select! {
                biased;
                _ = flight.get(|_| false, BOUND, pending) => panic!("never made"),
                () = tokio::task::yield_now() => {}
            }
        });
    }

    #[test]
    fn an_attempt_that_ended_with_its_runtime_is_in_nobodys_way() {
        let (flight, first) = (SingleFlight::<u32>::new(), runtime());
        ask(&first, &flight);
        drop(first);
        assert_eq!(runtime().block_on(flight.get(|_| true, BOUND, || async { Ok(1) })).expect("made"), 1);
    }

    #[test]
    fn what_is_made_anew_is_made_where_the_first_was() {
        let (home, other) = (runtime(), runtime());
        let flight = home.block_on(async { SingleFlight::new() });
        let make = || async { Ok(thread::current().id()) };
        for _ in 0..2 {
            // Somebody drives it meanwhile.
            let there = thread::scope(|scope| {
                let driver =
                    scope.spawn(|| home.block_on(async { tokio::time::sleep(Duration::from_millis(300)).await }));
                let made = other.block_on(flight.get(|_| false, BOUND, make)).expect("made");
                (made, driver.thread().id())
            });
            assert_eq!(there.0, there.1);
        }
        drop(home);
        let here = other.block_on(flight.get(|_| false, BOUND, make)).expect("made");
        assert_eq!(here, thread::current().id(), "the first one has ended");
    }

    /// An attempt that takes long says nothing against its runtime.
    #[test]
    fn an_attempt_that_takes_too_long_is_made_anew_where_the_first_was() {
        const SHORT: Duration = Duration::from_millis(300);
        let home = Builder::new_multi_thread().worker_threads(1).enable_time().build().expect("a runtime");
        let there = home.block_on(home.spawn(async { thread::current().id() })).expect("no panic");
        let (flight, other) = (home.block_on(async { SingleFlight::new() }), runtime());
        let (started, begun) = (Instant::now(), Arc::new(AtomicU32::new(0)));
        let made = loop {
            let begun = Arc::clone(&begun);
            let make = || async move {
                if begun.fetch_add(1, Ordering::SeqCst) < 2 {
                    pending::<()>().await;
                }
                Ok(thread::current().id())
            };
            if let Ok(made) = other.block_on(flight.get(|_| true, SHORT, make)) {
                break made;
            }
            assert!(started.elapsed() < BOUND, "it was never made");
        };
        assert_eq!(made, there);
        assert_eq!(begun.load(Ordering::SeqCst), 3);
    }

    /// Asks until there is an answer, and says how often it was asked in vain.
    fn ask_on(runtime: &Runtime, flight: &SingleFlight<u32>, bound: Duration) -> u32 {
        let mut asked = 0;
        loop {
            match runtime.block_on(flight.get(|_| true, bound, || async { Ok(1) })) {
                Ok(made) => {
                    assert_eq!(made, 1);
                    return asked;
                }
                Err(error) => assert_eq!(error.kind(), ErrorKind::TimedOut),
            }
            asked += 1;
            assert!(asked < 100, "it is waited for, and does not come");
        }
    }

    /// All who share a session must share one that is kept: else it ends with the last of them, and with it the locks that they have.
    #[tokio::test]
    async fn what_a_replaced_attempt_makes_is_for_nobody() {
        const SHORT: Duration = Duration::from_millis(20);
        let (flight, maker) = (Arc::new(SingleFlight::new()), Maker::default());
        let waiter = {
            let (flight, maker) = (Arc::clone(&flight), maker.clone());
            tokio::spawn(async move { flight.get(|_| true, BOUND, || maker.make()).await })
        };
        while maker.made() == 0 {
            tokio::task::yield_now().await;
        }
        while flight.get(|_| true, SHORT, || async { Ok(2) }).await.is_err() {}
        maker.go.notify_one();
        let error = waiter.await.expect("no panic").expect_err("it is kept by nobody");
        assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, crate::Effect::None));
        assert_eq!(flight.present(|_| true), Some(2));
    }

    #[test]
    fn an_attempt_on_a_runtime_that_nobody_drives_is_replaced() {
        const SHORT: Duration = Duration::from_millis(50);
        let (home, other) = (runtime(), runtime());
        let flight = home.block_on(async { SingleFlight::new() });
        // It is under way when it is left.
        ask(&home, &flight);
        assert_ne!(ask_on(&other, &flight, SHORT), 0);
        // What the first attempt may yet make is nobody's.
        home.block_on(async { tokio::task::yield_now().await });
        assert_eq!(flight.present(|_| true), Some(1));
        // It does not even begin: the caller after the one that waited in vain has it made elsewhere.
        let flight = home.block_on(async { SingleFlight::new() });
        assert_eq!(ask_on(&other, &flight, SHORT), 1);
    }
}
