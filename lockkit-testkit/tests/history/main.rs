//! The checker itself: seeded bad histories, one or more for each rule, each with its good twin.
//!
//! A history is a stretch of lawful traffic from a seed, with a few events changed. The checker must find exactly that.

mod answers;
mod changes;
mod leases;
mod modes;
mod order;
mod reach;
mod report;
mod script;
