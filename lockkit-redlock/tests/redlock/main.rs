//! Quorums when nodes fail, lag behind, forget, or disagree.

mod down;
mod fencing;
mod misuse;
mod restart;
mod stragglers;
mod support;
