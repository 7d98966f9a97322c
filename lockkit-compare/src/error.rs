//! Why a measurement failed.

use std::io;

use lockkit_testkit::servers;
use serde::{Deserialize, Serialize};
use tokio::task::JoinError;

/// Why a measurement failed. [`kind`](Self::kind) says what can be done about it; the text, one line without secrets, what happened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    kind: ErrorKind,
    message: String,
}

/// What can be done about an [`Error`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The URL of a store, or an option in it, is wrong.
    InvalidInput,
    /// A store, a private server or the system does not answer, or refuses.
    Unavailable,
    /// The store is not fit for locks, or can't do what is measured.
    Unfit,
    /// A lease was lost that should have been kept.
    Lost,
    /// A worker process ended early, or a measure is wrong in itself.
    Internal,
}

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// What can be done about it.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    pub(crate) fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }

    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Internal, message)
    }

    /// The system refused something that it usually grants.
    pub(crate) fn system(attempt: &str, error: &io::Error) -> Self {
        Self::new(ErrorKind::Unavailable, format!("could not {attempt}: {error}"))
    }
}

impl From<lockkit::Error> for Error {
    fn from(error: lockkit::Error) -> Self {
        let kind = match error.kind() {
            lockkit::ErrorKind::InvalidInput => ErrorKind::InvalidInput,
            lockkit::ErrorKind::Misconfigured | lockkit::ErrorKind::Unsupported => ErrorKind::Unfit,
            lockkit::ErrorKind::Lost => ErrorKind::Lost,
            // Denied, Unavailable, TimedOut, Deadlock, Closed, Unexpected, and whatever may come to be added.
            _ => ErrorKind::Unavailable,
        };
        Self::new(kind, error.to_string())
    }
}

impl From<servers::ServerError> for Error {
    fn from(error: servers::ServerError) -> Self {
        Self::new(ErrorKind::Unavailable, error.to_string())
    }
}

impl From<JoinError> for Error {
    fn from(error: JoinError) -> Self {
        Self::internal(error.to_string())
    }
}
