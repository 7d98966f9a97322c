//! What can go wrong, and the script that says with which calls it does.

use std::{sync::Mutex, time::Duration};

use lockkit_core::{Effect, ErrorKind, store::unpoisoned};

/// One of the questions that a store answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// [`LockStore::acquire`](lockkit_core::LockStore::acquire).
    Acquire,
    /// [`LockStore::renew`](lockkit_core::LockStore::renew).
    Renew,
    /// [`LockStore::release`](lockkit_core::LockStore::release).
    Release,
    /// [`LockStore::inspect`](lockkit_core::LockStore::inspect).
    Inspect,
}

/// What happens to a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// The request gets lost: nothing happens, and the caller gets `TimedOut`, with unknown effect, after the store's
    /// [bound](crate::SimStore::bound).
    LoseRequest,
    /// The store does what it is asked, but its answer gets lost: the caller gets `TimedOut`, with unknown effect,
    /// after the store's [bound](crate::SimStore::bound).
    LoseReply,
    /// The request takes so long to reach the store, and so does what the client sends after it. If that is longer than
    /// the [bound](crate::SimStore::bound), the caller gets `TimedOut`, and **the request still arrives**.
    DelayRequest(Duration),
    /// The store does what it is asked at once, but its answer takes so long.
    DelayReply(Duration),
    /// Nothing happens, and the caller gets this error at once.
    Fail(ErrorKind, Effect),
}

impl Fault {
    /// The server can't be reached at all: `Unavailable`, at once, without effect.
    pub const REFUSED: Self = Self::Fail(ErrorKind::Unavailable, Effect::None);

    /// Only for calls of this kind.
    #[must_use]
    pub fn on(self, operation: Operation) -> Rule {
        Rule::from(self).on(operation)
    }

    /// For the next `calls` calls.
    #[must_use]
    pub fn times(self, calls: u32) -> Rule {
        Rule::from(self).times(calls)
    }

    /// For all calls until [`SimStore::heal`](crate::SimStore::heal).
    #[must_use]
    pub fn until_healed(self) -> Rule {
        Rule::from(self).until_healed()
    }
}

/// A fault and the calls that it happens to: the next one, of any kind, unless it is told otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    fault: Fault,
    operation: Option<Operation>,
    /// How many calls it is still for; `None` for all.
    left: Option<u32>,
}

impl From<Fault> for Rule {
    fn from(fault: Fault) -> Self {
        Self { fault, operation: None, left: Some(1) }
    }
}

impl Rule {
    /// Only for calls of this kind.
    #[must_use]
    pub fn on(self, operation: Operation) -> Self {
        Self { operation: Some(operation), ..self }
    }

    /// For the next `calls` calls.
    #[must_use]
    pub fn times(self, calls: u32) -> Self {
        Self { left: Some(calls), ..self }
    }

    /// For all calls until [`SimStore::heal`](crate::SimStore::heal).
    #[must_use]
    pub fn until_healed(self) -> Self {
        Self { left: None, ..self }
    }

    pub(crate) fn lasts(&self) -> bool {
        self.left.is_none()
    }
}

/// The rules that are in force, in the order in which they were given.
#[derive(Debug, Default)]
pub(crate) struct Script(Mutex<Vec<Rule>>);

impl Script {
    pub(crate) fn add(&self, rule: Rule) {
        self.rules().push(rule);
    }

    pub(crate) fn clear(&self) {
        self.rules().clear();
    }

    /// What happens to the next call of this kind: the first rule that is for it is used up by it.
    pub(crate) fn next(&self, operation: Operation) -> Option<Fault> {
        let mut rules = self.rules();
        rules.retain(|rule| rule.left != Some(0));
        let rule = rules.iter_mut().find(|rule| rule.operation.is_none_or(|only| only == operation))?;
        if let Some(left) = &mut rule.left {
            *left -= 1;
        }
        Some(rule.fault)
    }

    fn rules(&self) -> std::sync::MutexGuard<'_, Vec<Rule>> {
        unpoisoned(&self.0)
    }
}
