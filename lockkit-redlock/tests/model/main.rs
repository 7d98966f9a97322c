//! Models of the protocol, searched exhaustively as far as time allows: what always holds, and what breaks as soon as
//! one safeguard is off.
//!
//! Each search visits some millions of states, in breadth, which takes seconds; `LOCKKIT_MODEL_STATES` sets how many.

mod fences;
mod leases;

use std::time::{Duration, Instant};

use fences::Fences;
use leases::Leases;
use stateright::{Checker, HasDiscoveries, Model};

/// How many states a search visits at most.
fn budget() -> usize {
    std::env::var("LOCKKIT_MODEL_STATES").ok().and_then(|text| text.parse().ok()).unwrap_or(12_000_000)
}

/// Searches breadth first; `Err` with the property that was violated and how it came to that.
fn search<M>(name: &str, model: M) -> Result<usize, String>
where
    M: Model + Send + Sync + 'static,
    M::State: Send + Sync + std::fmt::Debug + std::hash::Hash + PartialEq + Clone,
    M::Action: std::fmt::Debug + Clone + PartialEq,
{
    let start = Instant::now();
    let checker = model
        .checker()
        .threads(2)
        .finish_when(HasDiscoveries::AnyFailures)
        .target_state_count(budget())
        .spawn_bfs()
        .join();
    let (states, whole) = (checker.unique_state_count(), checker.state_count() < budget());
    let took = start.elapsed().max(Duration::from_millis(1));
    let violated = checker
        .model()
        .properties()
        .into_iter()
        .filter(|property| property.expectation == stateright::Expectation::Always)
        .find_map(|property| checker.discovery(property.name).map(|path| (property.name, path)));
    match violated {
        Some((property, path)) => {
            println!("{name}: found after {states} states, in {took:.1?}");
            let steps: Vec<String> = path.into_actions().iter().map(|action| format!("  {action:?}")).collect();
            Err(format!("{name}: violated: {property}, in {} steps:\n{}", steps.len(), steps.join("\n")))
        }
        None => {
            println!("{name}: {states} states, {} in {took:.1?}", if whole { "all of them," } else { "not all," });
            let reached = |name: &&'static str| checker.discovery(name).is_some();
            let wanted = checker.model().properties().into_iter();
            let wanted = wanted.filter(|property| property.expectation == stateright::Expectation::Sometimes);
            let vacuous: Vec<&str> = wanted.map(|property| property.name).filter(|name| !reached(name)).collect();
            assert!(vacuous.is_empty(), "{name}: never seen: {vacuous:?}");
            Ok(states)
        }
    }
}

fn holds<M>(name: &str, model: M)
where
    M: Model + Send + Sync + 'static,
    M::State: Send + Sync + std::fmt::Debug + std::hash::Hash + PartialEq + Clone,
    M::Action: std::fmt::Debug + Clone + PartialEq,
{
    if let Err(violation) = search(name, model) {
        panic!("{violation}");
    }
}

fn breaks<M>(name: &str, model: M)
where
    M: Model + Send + Sync + 'static,
    M::State: Send + Sync + std::fmt::Debug + std::hash::Hash + PartialEq + Clone,
    M::Action: std::fmt::Debug + Clone + PartialEq,
{
    match search(name, model) {
        Ok(states) => panic!("{name}: no counterexample in {states} states"),
        Err(violation) => println!("{violation}"),
    }
}

#[test]
fn fences_hold() {
    holds("one attempt each", Fences { attempts: 1, proposals: 1, ..Fences::SOUND });
    holds("one attempt each, two proposals", Fences { attempts: 1, ..Fences::SOUND });
    holds("three clients", Fences { clients: 3, attempts: 1, proposals: 1, ..Fences::SOUND });
    holds("two attempts each", Fences { proposals: 1, ..Fences::SOUND });
    holds("two attempts with one token", Fences { proposals: 1, fresh_token: false, ..Fences::SOUND });
}

#[test]
fn fences_hold_with_renewal() {
    holds("renewal and healing", Fences { attempts: 1, proposals: 1, renewals: 2, ..Fences::SOUND });
}

#[test]
fn fences_need_the_raise() {
    breaks("no raise", Fences { raise: false, attempts: 1, ..Fences::SOUND });
}

#[test]
fn fences_need_exact_agreement() {
    breaks("at least instead of exactly", Fences { exact: false, attempts: 1, ..Fences::SOUND });
}

#[test]
fn fences_need_the_very_grant() {
    breaks(
        "a node that lost the grant counts",
        Fences { very_grant: false, attempts: 1, proposals: 1, ..Fences::SOUND },
    );
}

#[test]
fn renewal_needs_probation() {
    let model = Fences { attempts: 1, proposals: 1, renewals: 1, probation: false, ..Fences::SOUND };
    breaks("healed nodes count at once", model);
}

#[test]
fn fences_need_durable_counters() {
    breaks("one node forgets its counter", Fences { durable: false, attempts: 1, proposals: 1, ..Fences::SOUND });
}

#[test]
fn leases_hold() {
    holds("leases", Leases::SOUND);
}

#[test]
fn leases_hold_over_a_restart() {
    holds("leases with a restart", Leases { restart: true, attempts: [1, 1], ..Leases::SOUND });
}

#[test]
fn leases_need_the_moment_of_sending() {
    breaks("deadline from the reply", Leases { from_sent: false, renewals: 0, ..Leases::SOUND });
}

#[test]
fn leases_need_drift() {
    breaks("no drift", Leases { drift: false, renewals: 0, ..Leases::SOUND });
}

#[test]
fn leases_need_a_look_at_the_deadline() {
    breaks("no look at the deadline after a pause", Leases { deadline: false, renewals: 0, ..Leases::SOUND });
}

#[test]
fn leases_need_delayed_restart() {
    let model = Leases { restart: true, delayed_restart: false, attempts: [1, 1], renewals: 0, ..Leases::SOUND };
    breaks("no delayed restart", model);
}

#[test]
fn leases_need_fresh_tokens() {
    breaks("one token for all attempts", Leases { fresh_token: false, renewals: 0, ..Leases::SOUND });
}

#[test]
fn leases_hold_over_a_wait() {
    holds("a wait first", Leases { waits: true, attempts: [1, 1], end: 4, ..Leases::SOUND });
    holds("a wait first and two renewals", Leases { waits: true, attempts: [1, 0], renewals: 2, ..Leases::SOUND });
}
