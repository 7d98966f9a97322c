//! Stores around stores.

mod fence_above;
mod observed;
mod prefix;

pub use self::{fence_above::FenceAbove, observed::Observed, prefix::Prefix};
