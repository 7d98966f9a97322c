//! One error for every store: what went wrong, and whether the store may have changed.

use std::{error::Error as StdError, fmt, sync::Arc, time::Duration};

use crate::LockKey;

/// The result of a lockkit operation.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation failed.
///
/// That a lock is held by another is not an error but an answer. The error is one word wide, cheap to clone, and its
/// `Display` is one line without secrets: `acquire "invoice/42" on redis: unavailable: connection refused`.
///
/// `docs/errors.md` lists all messages, with what each means, whether the operation may have had an effect, and what to do.
#[derive(Clone)]
pub struct Error(Arc<Inner>);

#[derive(Clone)]
struct Inner {
    kind: ErrorKind,
    effect: Effect,
    message: String,
    operation: Option<&'static str>,
    key: Option<LockKey>,
    store: Option<Arc<str>>,
    source: Option<Arc<dyn StdError + Send + Sync>>,
}

/// What the caller can do about an [`Error`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum ErrorKind {
    /// Correct the name, the option or the URL.
    #[error("invalid input")]
    InvalidInput,
    /// Set up what is missing, or name what is there: a table, a database, a file, a server of the right kind. The URL is
    /// well-formed, but what it leads to is not as it says.
    #[error("misconfigured")]
    Misconfigured,
    /// Correct the credentials or the store's permissions.
    #[error("denied")]
    Denied,
    /// Use another store, or do without the feature.
    #[error("unsupported")]
    Unsupported,
    /// Try again later: the store can't be reached, or refuses work for now.
    #[error("unavailable")]
    Unavailable,
    /// Try again later: no answer came in time.
    #[error("timed out")]
    TimedOut,
    /// Stop the work: the lease is no longer held.
    #[error("lost")]
    Lost,
    /// Try again: the store chose this operation to resolve a deadlock.
    #[error("deadlock")]
    Deadlock,
    /// Nothing: the [`Locker`](crate::Locker) was shut down.
    #[error("closed")]
    Closed,
    /// Read the message: the store answered something that it should not have.
    #[error("unexpected")]
    Unexpected,
}

/// Whether a failed operation may have changed the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Effect {
    /// It did not.
    None,
    /// It may have, or may still come to.
    Unknown,
}

/// What had been sent of a request that failed, and so whether it may have had an effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sent {
    /// Not a byte of it left.
    No,
    /// It may have been sent, but only reads.
    ReadOnly,
    /// It was, or may have been, sent; and it would change something.
    Yes,
}

impl Error {
    /// An error that had no effect. See [`unknown_effect`](Self::unknown_effect) for the other case.
    #[must_use]
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self(Arc::new(Inner {
            kind,
            effect: Effect::None,
            message: message.into(),
            operation: None,
            key: None,
            store: None,
            source: None,
        }))
    }

    /// The caller asked for what can't be: [`InvalidInput`](ErrorKind::InvalidInput), and without effect.
    #[must_use]
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::InvalidInput, message)
    }

    /// Says that the store may have changed all the same.
    #[must_use]
    pub fn unknown_effect(self) -> Self {
        self.with(|inner| inner.effect = Effect::Unknown)
    }

    /// Says what the failed request had sent: the effect is unknown if that would change something.
    #[must_use]
    pub fn after(self, sent: Sent) -> Self {
        if sent == Sent::Yes { self.unknown_effect() } else { self }
    }

    /// A request was not answered within `bound`, which is told in whole milliseconds.
    #[must_use]
    pub fn no_answer(bound: Duration, sent: Sent) -> Self {
        let bound = Duration::from_millis(u64::try_from(bound.as_millis()).unwrap_or(u64::MAX));
        Self::new(ErrorKind::TimedOut, format!("no answer in {bound:?}")).after(sent)
    }

    /// A store answered fewer questions than it was asked.
    pub(crate) fn unanswered() -> Self {
        Self::new(ErrorKind::Unexpected, "the store gave no answer").unknown_effect()
    }

    /// Adds the cause.
    #[must_use]
    pub fn with_source(self, source: impl StdError + Send + Sync + 'static) -> Self {
        self.with(|inner| inner.source = Some(Arc::new(source)))
    }

    /// Adds where it happened: the operation, the lock if it was about one, and the store's name.
    #[must_use]
    pub fn at(self, operation: &'static str, key: Option<&LockKey>, store: &Arc<str>) -> Self {
        self.with(|inner| {
            inner.operation = Some(operation);
            inner.key = key.cloned();
            inner.store = Some(Arc::clone(store));
        })
    }

    fn with(mut self, change: impl FnOnce(&mut Inner)) -> Self {
        change(Arc::make_mut(&mut self.0));
        self
    }

    /// What the caller can do about it.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Whether the store may have changed.
    #[must_use]
    pub fn effect(&self) -> Effect {
        self.0.effect
    }

    /// Whether the same call may succeed when it is made again: the store was out of reach or busy, or the effect
    /// is unknown (a repeated call with the same claim is harmless, rule R1).
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self.0.kind {
            ErrorKind::Unavailable | ErrorKind::TimedOut | ErrorKind::Deadlock => true,
            ErrorKind::Unexpected => self.0.effect == Effect::Unknown,
            ErrorKind::InvalidInput
            | ErrorKind::Misconfigured
            | ErrorKind::Denied
            | ErrorKind::Unsupported
            | ErrorKind::Lost
            | ErrorKind::Closed => false,
        }
    }

    /// The lock that the operation was about.
    #[must_use]
    pub fn key(&self) -> Option<&LockKey> {
        self.0.key.as_ref()
    }

    /// The message, without kind and place.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.0.message
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(operation) = self.0.operation {
            f.write_str(operation)?;
            if let Some(key) = &self.0.key {
                write!(f, " {key:?}")?;
            }
            if let Some(store) = &self.0.store {
                write!(f, " on {store}")?;
            }
            f.write_str(": ")?;
        }
        write!(f, "{}: {}", self.0.kind, self.0.message)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = f.debug_struct("Error");
        out.field("message", &format_args!("{self}")).field("effect", &self.0.effect);
        if let Some(source) = &self.0.source {
            out.field("source", source);
        }
        out.finish()
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source.as_ref().map(|source| &**source as &(dyn StdError + 'static))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_one_word_and_one_line() {
        assert_eq!(size_of::<Error>(), size_of::<usize>());
        let key = LockKey::new("invoice/42").expect("name");
        let error = Error::new(ErrorKind::Unavailable, "connection refused").at("acquire", Some(&key), &"redis".into());
        assert_eq!(error.to_string(), r#"acquire "invoice/42" on redis: unavailable: connection refused"#);
        assert_eq!(error.key(), Some(&key));
    }

    #[test]
    fn a_quoted_name_can_not_break_the_line() {
        let key = LockKey::new("a\nb").expect("name");
        let error = Error::new(ErrorKind::TimedOut, "no answer in 2s").at("renew", Some(&key), &"redis".into());
        assert_eq!(error.to_string().lines().count(), 1);
    }

    #[test]
    fn an_unknown_effect_makes_the_unexpected_retryable() {
        let error = Error::new(ErrorKind::Unexpected, "odd reply");
        assert!(!error.is_retryable());
        assert!(error.unknown_effect().is_retryable());
    }
}
