//! What an acquisition may have left at the store before.

use std::sync::Weak;

use super::reaper::{Undo, Unsettled};
use crate::{Error, ErrorKind, Token};

/// What became of earlier claims of one caller of which something may be left at the store.
///
/// Why an answer that the lock is held proves nothing (rule R6): it may be held by such a claim, whose release is still
/// under way.
#[derive(Debug, Default)]
pub(crate) struct Doubts {
    earlier: Vec<(Error, Weak<Unsettled>)>,
    last: Option<(Token, Weak<Unsettled>)>,
}

impl Doubts {
    pub(super) fn add(&mut self, error: &Error, undo: &Undo<'_>) {
        self.earlier.push((error.clone(), undo.unsettled()));
    }

    /// The last claim was given up, because others went past.
    pub(super) fn overtaken(&mut self) {
        self.earlier.extend(self.last.iter().map(|(_, unsettled)| (late_grant(), Weak::clone(unsettled))));
    }

    /// Says of an error what is true of all that the caller asked for.
    pub(crate) fn leave_open(&mut self, error: Error) -> Error {
        if self.latest().is_some() { error.unknown_effect() } else { error }
    }

    pub(super) fn latest(&mut self) -> Option<Error> {
        self.earlier.retain(|(_, unsettled)| unsettled.strong_count() > 0);
        self.earlier.last().map(|(error, _)| error.clone())
    }

    /// A claim is about to be asked for, with this token.
    pub(super) fn asks(&mut self, token: Token, undo: &Undo<'_>) {
        self.last = Some((token, undo.unsettled()));
    }

    /// The token of the last claim that was asked for, whatever became of it.
    pub(crate) fn last_token(&self) -> Option<Token> {
        self.last.as_ref().map(|(token, _)| *token)
    }
}

pub(super) fn late_grant() -> Error {
    Error::new(ErrorKind::TimedOut, "the grant came too late to be of use").unknown_effect()
}
