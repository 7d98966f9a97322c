//! What the store was asked, and what it answered.

use std::{
    sync::{Mutex, MutexGuard},
    time::Duration,
};

use lockkit_core::{Attempt, Effect, ErrorKind, LockKey, LossReason, Release, Renewed, Result, store::unpoisoned};

use crate::fault::{Fault, Operation};

/// A call that the store has seen. A renewal of several leases is one call for each.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Call {
    /// When it was made, counted from the creation of the store.
    pub at: Duration,
    /// What was asked.
    pub operation: Operation,
    /// The lock that it was about; `None` for the reading of several.
    pub key: Option<LockKey>,
    /// What went wrong with it, by the script.
    pub fault: Option<Fault>,
    /// What the caller got; `None` if it still waits or has gone away.
    pub answer: Option<Answer>,
}

/// What the caller got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Answer {
    /// The lease is the caller's.
    Granted,
    /// It is another's.
    Contended,
    /// The lease goes on.
    Renewed,
    /// The lease is over.
    Lost(LossReason),
    /// The lease was the caller's and has ended.
    Released,
    /// The lease was not the caller's.
    NotHeld(LossReason),
    /// Who holds what.
    Read,
    /// An error.
    Failed(ErrorKind, Effect),
}

/// An answer for the log.
pub(crate) trait Logged {
    fn logged(&self) -> Answer;
}

impl Logged for Attempt {
    fn logged(&self) -> Answer {
        match self {
            Self::Granted(_) => Answer::Granted,
            Self::Contended(_) => Answer::Contended,
        }
    }
}

impl Logged for Renewed {
    fn logged(&self) -> Answer {
        match self {
            Self::Held(_) => Answer::Renewed,
            Self::Lost(reason) => Answer::Lost(*reason),
        }
    }
}

impl Logged for Release {
    fn logged(&self) -> Answer {
        match self {
            Self::Released { .. } => Answer::Released,
            Self::NotHeld(reason) => Answer::NotHeld(*reason),
        }
    }
}

impl<T> Logged for Vec<T> {
    fn logged(&self) -> Answer {
        Answer::Read
    }
}

impl<T: Logged> Logged for Result<T> {
    fn logged(&self) -> Answer {
        match self {
            Ok(answer) => answer.logged(),
            Err(e) => Answer::Failed(e.kind(), e.effect()),
        }
    }
}

/// The calls so far.
#[derive(Debug, Default)]
pub(crate) struct Log(Mutex<Calls>);

#[derive(Debug, Default)]
struct Calls {
    calls: Vec<Call>,
    /// How many were taken out already.
    taken: usize,
}

impl Log {
    /// Writes down a call; returns its number.
    pub(crate) fn asked(&self, call: Call) -> usize {
        let mut log = self.calls();
        log.calls.push(call);
        log.taken + log.calls.len() - 1
    }

    /// Writes down the answer to a call.
    pub(crate) fn answered(&self, number: usize, answer: Answer) {
        let mut log = self.calls();
        if let Some(call) = number.checked_sub(log.taken).and_then(|at| log.calls.get_mut(at)) {
            call.answer = Some(answer);
        }
    }

    pub(crate) fn all(&self) -> Vec<Call> {
        self.calls().calls.clone()
    }

    pub(crate) fn take(&self) -> Vec<Call> {
        let mut log = self.calls();
        log.taken += log.calls.len();
        std::mem::take(&mut log.calls)
    }

    fn calls(&self) -> MutexGuard<'_, Calls> {
        unpoisoned(&self.0)
    }
}
