//! The lease of an enclosing run, as a run inside it believes in it.
//!
//! The outer run renews it. The inner one asks the store, again and again, whether the token still holds the lock and for
//! how long, and believes no more than that.

use std::{
    convert::Infallible,
    future::pending,
    io,
    os::fd::OwnedFd,
    sync::{Mutex, MutexGuard},
    time::Duration,
};

use lockkit::{
    Holder, LockKey, Locker, LossReason, Mode, Moment,
    store::{Query, drift, unpoisoned},
};
use tokio::time::{sleep, timeout};

use super::{
    kind::Kind,
    lender::{Asked, LeaseLoan},
    margins::Margins,
    nest::{Enclosing, Entry},
    notify::RenewalNotify,
};
use crate::exit::{Failure, USAGE};

/// The shortest pause between two questions.
const SHORTEST_PAUSE: Duration = Duration::from_millis(20);

/// A borrowed lease.
#[derive(Debug)]
pub(super) struct Borrowed {
    locker: Locker,
    pub(super) entry: Entry,
    loan: LeaseLoan,
    notify: RenewalNotify,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    deadline: Moment,
    lost: Option<String>,
}

/// What the store says about a token.
enum Answer {
    Holds { mode: Mode, deadline: Moment },
    Lost(LossReason),
}

/// The lease of an enclosing run on `key`, if one has it on this store.
pub(super) async fn borrow(
    locker: &Locker,
    (key, kind): (&LockKey, Kind),
    enclosing: &Enclosing,
    notify: &RenewalNotify,
) -> Result<Option<Borrowed>, Failure> {
    // The innermost first: the same name may be held on several stores.
    for entry in enclosing.held.iter().rev().filter(|entry| entry.key == *key) {
        let asked = LeaseLoan::ask(&entry.run).await;
        if matches!(asked, Asked::Nobody) {
            continue;
        }
        if let Answer::Holds { mode, deadline } = question(locker, entry).await? {
            if !kind.is_covered_by(mode) {
                let message =
                    format!("the enclosing run holds {key:?} ({mode}), which does not cover what is asked for here");
                return Err(Failure::new(USAGE, message));
            }
            let Asked::Lent(loan) = asked else {
                let message = format!("another user's run holds {key:?}; a run lends its lease to its own user only");
                return Err(Failure::new(USAGE, message));
            };
            let state = Mutex::new(State { deadline, lost: None });
            let (locker, entry, notify) = (locker.clone(), entry.clone(), notify.clone());
            return Ok(Some(Borrowed { locker, entry, loan, notify, state }));
        }
    }
    Ok(None)
}

/// Asks the store whether the entry's token holds the lock.
async fn question(locker: &Locker, entry: &Entry) -> lockkit::Result<Answer> {
    // Taken before the question is sent, for the answer is as old as that when it comes.
    let asked = locker.info().clock.now();
    let mut states = locker.inspect(&Query::Keys(vec![entry.key.clone()])).await?;
    let holders = states.pop().map(|state| state.holders).unwrap_or_default();
    let is_ours = |holder: &&Holder| holder.token == Some(entry.token);
    Ok(match holders.iter().find(is_ours) {
        Some(holder) => {
            // Where time does not end leases, the outer run believes in it for so long after each renewal.
            let left = holder.remaining.unwrap_or(entry.lasts);
            Answer::Holds { mode: holder.mode, deadline: asked + left.saturating_sub(drift(left)) }
        }
        None if holders.is_empty() => Answer::Lost(LossReason::Gone),
        None => Answer::Lost(LossReason::Taken),
    })
}

impl Borrowed {
    /// Another handle of what the lender sees the end of.
    pub(super) fn loan(&self) -> io::Result<OwnedFd> {
        self.loan.handle()
    }

    pub(super) fn notify(&self) -> &RenewalNotify {
        &self.notify
    }

    pub(super) fn remaining(&self) -> Duration {
        let state = self.state();
        if state.lost.is_some() { Duration::ZERO } else { state.deadline.since(self.locker.info().clock.now()) }
    }

    pub(super) fn trouble(&self) -> String {
        let lost = self.state().lost.clone();
        lost.or_else(|| self.notify.error()).unwrap_or_else(|| "the enclosing run has not renewed it".to_owned())
    }

    /// Asks at every third of the time until CMD would be stopped, so that an answer may fail to come or be late.
    pub(super) async fn keep(&self) -> Infallible {
        let term = Margins::of(self.entry.lasts).term;
        while !self.remaining().is_zero() {
            let pause = (self.remaining().saturating_sub(term) / 3).max(SHORTEST_PAUSE);
            tokio::select! {
                () = sleep(pause) => self.ask().await,
                () = self.loan.ended() => self.lose("the enclosing run has ended".to_owned()),
            }
        }
        pending().await
    }

    async fn ask(&self) {
        match timeout(self.remaining(), question(&self.locker, &self.entry)).await {
            Ok(Ok(Answer::Holds { deadline, .. })) => {
                self.notify.set_error(None);
                let mut state = self.state();
                state.deadline = state.deadline.max(deadline);
            }
            Ok(Ok(Answer::Lost(reason))) => return self.lose(reason.to_string()),
            Ok(Err(error)) => self.notify.set_error(Some(error.to_string())),
            Err(_) => self.notify.set_error(Some("the store did not answer".to_owned())),
        }
        self.notify.notify();
    }

    /// Asks one last time after CMD has ended; says why the lease was lost if it was.
    pub(super) async fn check(&self) -> Option<String> {
        if self.remaining().is_zero() {
            return Some(self.trouble());
        }
        match timeout(self.remaining(), question(&self.locker, &self.entry)).await {
            Ok(Ok(Answer::Lost(reason))) => Some(reason.to_string()),
            // No answer is no reason to doubt what was believed in until a moment ago.
            _ => None,
        }
    }

    fn lose(&self, why: String) {
        self.state().lost.get_or_insert(why);
        self.notify.notify();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        unpoisoned(&self.state)
    }
}
