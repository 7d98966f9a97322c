//! Quorums when nodes fail, lag behind, forget, or disagree.

mod background;
mod burnt;
mod deadline;
mod doctor;
mod down;
mod dropped;
mod fencing;
mod late_replies;
mod misuse;
mod mixed;
mod release;
mod restart;
mod second_round;
mod support;
