//! The store over both stores of a migration: what clients may and may not do while the phase changes.

mod dropped;
mod grants;
mod readings;
mod renewals;
mod world;
