//! The name of a lock. Errors name the lock that they are about, so that this file names no error: `new`, which returns one, is in
//! `types.rs`.

use std::{fmt, sync::Arc};

/// The name of a lock: 1 to 512 bytes of UTF-8, each spelling a lock of its own on every store (rule R11).
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LockKey(Arc<str>);

impl LockKey {
    /// The longest name, in bytes.
    pub const MAX_BYTES: usize = 512;

    /// A name that was checked.
    pub(crate) fn unchecked(name: Arc<str>) -> Self {
        Self(name)
    }

    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for LockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", &self.0)
    }
}

impl fmt::Display for LockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
