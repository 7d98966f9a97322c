//! Stores around stores.

mod observed;
mod prefix;

pub use self::{observed::Observed, prefix::Prefix};
