//! From what the nodes answered to what that means: pure. Votes, fences and errors.

pub(crate) mod error;
pub(crate) mod fence;
pub(crate) mod votes;
