//! The engine against a model: random runs of several processes on a simulated store, with everything that can go
//! wrong.
//!
//! `PROPTEST_CASES=20000 cargo test -p lockkit-testkit --test engine` looks for longer.

mod model;
mod op;
mod run;

use std::{sync::Arc, time::Duration};

use lockkit_sim::{Fault, Operation, SimStore};
use lockkit_testkit::broken::{Bug, LocalStore};
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner};

use self::{
    op::{Ask, Op, Wait, ops},
    run::run,
};

/// How many runs, unless `PROPTEST_CASES` says otherwise.
const CASES: u32 = 300;

fn config() -> Config {
    let cases = if std::env::var_os("PROPTEST_CASES").is_some() { Config::default().cases } else { CASES };
    Config { cases, failure_persistence: None, ..Config::default() }
}

fn search(mut runner: TestRunner, store: impl Fn() -> SimStore) -> Result<(), String> {
    let answer = runner.run(&ops(), |ops| run(&store, &ops).map_err(TestCaseError::fail));
    answer.map_err(|e| e.to_string())
}

fn must_hold(store: impl Fn() -> SimStore) {
    if let Err(e) = search(TestRunner::new(config()), store) {
        panic!("{e}");
    }
}

fn simple(bug: Option<Bug>) -> SimStore {
    SimStore::over(|clock| Arc::new(LocalStore::new(bug, clock)))
}

#[test]
fn the_engine_keeps_its_word_where_waiters_are_woken() {
    must_hold(SimStore::new);
}

#[test]
fn the_engine_keeps_its_word_where_waiters_have_to_ask() {
    must_hold(|| SimStore::new().polled());
}

#[test]
fn the_engine_keeps_its_word_on_another_store() {
    must_hold(|| simple(None));
}

/// Found by the search: the acquisition was still on its way when its caller left, its first release got lost, and the
/// second overtook it.
#[test]
fn a_release_that_overtakes_its_acquisition_is_sent_again() {
    let times = Duration::from_millis;
    let ask = Ask { client: 0, key: 0, owner: None, ttl: times(10_000), renew: true, wait: Wait::Forever };
    let ops = [
        Op::Inject { client: 0, rule: Fault::DelayRequest(times(1500)).on(Operation::Acquire) },
        Op::Acquire(ask),
        Op::Yield,
        Op::Inject { client: 0, rule: Fault::LoseRequest.on(Operation::Release) },
        Op::Cancel { pending: 0 },
        Op::Sleep { time: times(1) },
    ];
    assert_eq!(run(SimStore::new, &ops), Ok(()));
}

/// Found by the search: the release of an earlier claim failed, so that the store has another connection by the time at
/// which the next claim is given up. Its release overtook it.
#[test]
fn a_release_on_another_connection_is_sent_again() {
    let times = Duration::from_millis;
    let wait = Wait::For(times(501));
    let ask = Ask { client: 1, key: 0, owner: Some(0), ttl: times(10_000), renew: true, wait };
    let ops = [
        Op::Inject { client: 1, rule: Fault::DelayRequest(times(528)).until_healed() },
        Op::Acquire(ask),
        Op::Sleep { time: times(725) },
        Op::Leap { time: times(275) },
        Op::Cancel { pending: 0 },
    ];
    // When the second claim is asked for is a matter of chance.
    for _ in 0..100 {
        assert_eq!(run(|| simple(None), &ops), Ok(()));
    }
}

/// Found by the search: a lease lapsed in the moment in which the model looked whether anybody waits for a free lock.
#[test]
fn a_waiter_that_has_to_ask_has_time_to_notice() {
    let times = Duration::from_millis;
    for lapse in 1970..2010 {
        let ask = |client| {
            Op::Acquire(Ask { client, key: 0, owner: None, ttl: times(10_000), renew: false, wait: Wait::Forever })
        };
        let ops = [Op::TakeOver { key: 0, ttl: times(lapse) }, ask(0), ask(1), Op::Settle];
        assert_eq!(run(|| SimStore::new().polled(), &ops), Ok(()), "{lapse} ms");
    }
}

/// The rules of who holds a lease. Which of them is broken first depends on the jitter of the engine.
const BELIEF: &[&str] = &["until its release", "still believed in", "holders at once", "is not there", "but by nobody"];
const FENCES: &[&str] = &["was granted after", "belongs to two holders"];

/// What the model is worth: each of these bugs of a store must break a rule of it, and one that it is about. What becomes of
/// a claim that is asked for again is not among them: the engine asks for a claim once, unless it queues.
#[test]
fn known_bad_stores_are_found() {
    for (bug, says) in [
        (Bug::DeletesAnyones, BELIEF),
        (Bug::HidesNotMine, BELIEF),
        (Bug::RenewsAnyones, BELIEF),
        (Bug::RenewCreates, BELIEF),
        (Bug::NoExpiry, BELIEF),
        (Bug::DepthAdds, &["times, not as in"]),
        (Bug::FenceLapses, FENCES),
        (Bug::FenceRestarts, FENCES),
        (Bug::SpanIgnored, FENCES),
    ] {
        // The same runs each time, but for the jitter of the engine.
        let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[7; 32]);
        let config = Config { cases: 5000, failure_persistence: None, max_shrink_iters: 0, ..Config::default() };
        let found = search(TestRunner::new_with_rng(config, rng), || simple(Some(bug)));
        let found = found.expect_err(&format!("{bug:?} was not found"));
        let first = found.lines().next().unwrap_or_default();
        println!("{bug:?}: {first}");
        assert!(says.iter().any(|says| first.contains(says)), "{bug:?}: {first}");
    }
}
