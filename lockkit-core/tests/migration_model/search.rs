//! Searching a model: all of it.

use std::{
    collections::HashMap,
    fmt::Debug,
    hash::Hash,
    time::{Duration, Instant},
};

use stateright::{Checker, Expectation, HasDiscoveries, Model};

/// Searches breadth first; `Err` with how a property came to be violated.
fn search<M>(name: &str, model: M) -> Result<(), String>
where
    M: Model + Send + Sync + 'static,
    M::State: Send + Sync + Debug + Hash + PartialEq + Clone,
    M::Action: Debug + Clone + PartialEq,
{
    let start = Instant::now();
    let checker = model.checker().finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join();
    let (states, depth) = (checker.unique_state_count(), checker.max_depth());
    let took = start.elapsed().max(Duration::from_millis(1));
    let properties = checker.model().properties();
    for property in properties.iter().filter(|property| property.expectation == Expectation::Always) {
        if let Some(path) = checker.discovery(property.name) {
            let steps: Vec<String> = path.into_actions().iter().map(|action| format!("  {action:?}")).collect();
            println!("{name}: a counterexample of {} steps after {states} states, in {took:.1?}", steps.len());
            return Err(format!("{name}: not so: {}\n{}", property.name, steps.join("\n")));
        }
    }
    println!("{name}: {states} states, all of them, {depth} deep, in {took:.1?}");
    for property in properties.iter().filter(|property| property.expectation == Expectation::Sometimes) {
        assert!(checker.discovery(property.name).is_some(), "{name}: never: {}", property.name);
    }
    Ok(())
}

/// What must hold in each state.
pub(crate) fn holds<M>(name: &str, model: M)
where
    M: Model + Send + Sync + 'static,
    M::State: Send + Sync + Debug + Hash + PartialEq + Clone,
    M::Action: Debug + Clone + PartialEq,
{
    if let Err(violation) = search(name, model) {
        panic!("{violation}");
    }
}

/// A safeguard is off, and that must show.
pub(crate) fn breaks<M>(name: &str, model: M)
where
    M: Model + Send + Sync + 'static,
    M::State: Send + Sync + Debug + Hash + PartialEq + Clone,
    M::Action: Debug + Clone + PartialEq,
{
    match search(name, model) {
        Ok(()) => panic!("{name}: no counterexample"),
        Err(violation) => println!("{violation}"),
    }
}

/// That something can still come about, wherever `from` holds.
pub(crate) struct Wanted<S> {
    pub(crate) what: &'static str,
    pub(crate) from: fn(&S) -> bool,
    pub(crate) goal: fn(&S) -> bool,
}

/// A state from which something can't come about any more by the steps that `by` lets through, though others led there.
pub(crate) fn stuck<M>(name: &str, model: &M, by: fn(&M::Action) -> bool, wanted: &[Wanted<M::State>]) -> Option<String>
where
    M: Model,
    M::State: Debug + Hash + Eq + Clone,
    M::Action: Clone,
{
    let mut states = model.init_states();
    let mut places: HashMap<M::State, usize> = states.iter().cloned().zip(0..).collect();
    let mut before: Vec<Vec<usize>> = vec![Vec::new(); states.len()];
    let mut place = 0;
    while place < states.len() {
        let mut actions = Vec::new();
        model.actions(&states[place], &mut actions);
        for action in actions {
            let Some(next) = model.next_state(&states[place], action.clone()) else { continue };
            let next = *places.entry(next).or_insert_with_key(|next| {
                states.push(next.clone());
                before.push(Vec::new());
                states.len() - 1
            });
            if by(&action) {
                before[next].push(place);
            }
        }
        place += 1;
    }
    println!("{name}: looked at {} states for a way on", states.len());
    wanted.iter().find_map(|Wanted { what, from, goal }| {
        let mut can: Vec<bool> = states.iter().map(goal).collect();
        let mut left: Vec<usize> = (0..states.len()).filter(|place| can[*place]).collect();
        while let Some(place) = left.pop() {
            for earlier in &before[place] {
                if !std::mem::replace(&mut can[*earlier], true) {
                    left.push(*earlier);
                }
            }
        }
        let place = (0..states.len()).find(|place| !can[*place] && from(&states[*place]))?;
        Some(format!("{name}: can't come about any more: {what}, from {:?}", states[place]))
    })
}
