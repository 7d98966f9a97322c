//! Quorums when nodes fail, lag behind, forget, or disagree.

mod doctor;
mod down;
mod fencing;
mod misuse;
mod mixed;
mod release;
mod restart;
mod stragglers;
mod support;
