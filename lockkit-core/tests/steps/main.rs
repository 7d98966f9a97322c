//! The steps of a migration: what may be done when, by whom, and what is left if whoever does it is killed.

mod ends;
mod fallen_back;
mod phases;
mod quorum;
mod world;
