//! How the command ends when it fails: one line on stderr and a code from `sysexits.h`.

use std::fmt;

use lockkit::{Error, ErrorKind};

/// A failed check: something that a lock must never let happen did happen.
pub(crate) const VIOLATED: u8 = 1;
/// Bad usage or input.
pub(crate) const USAGE: u8 = 64;
/// The store can't be had.
pub(crate) const UNAVAILABLE: u8 = 69;
/// Anything that should not have happened.
pub(crate) const SOFTWARE: u8 = 70;

/// Why the command failed.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) code: u8,
    pub(crate) message: String,
}

impl Failure {
    pub(crate) fn new(code: u8, message: impl fmt::Display) -> Self {
        Self { code, message: message.to_string() }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let code = match error.kind() {
            ErrorKind::InvalidInput | ErrorKind::Unsupported => USAGE,
            _ => UNAVAILABLE,
        };
        Self::new(code, error)
    }
}

impl fmt::Display for Failure {
    /// One line, whatever the message was made of.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut lines = self.message.lines().map(str::trim).filter(|line| !line.is_empty());
        f.write_str(lines.next().unwrap_or("failed"))?;
        lines.try_for_each(|line| write!(f, "; {line}"))
    }
}
