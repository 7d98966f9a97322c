//! How long a session surely lives, from what the servers acknowledged.
//!
//! ZooKeeper's answers don't say when a session will end. A server that is not the leader answers pings and reads by
//! itself, even for a while after it was cut off from the leader, and the leader alone ends sessions: one timeout after
//! it last **heard** of them. It hears of a request when the follower that got it answers the leader's next ping, at
//! most half a tick later; and the answers to pings and the writes that a follower passes on go the same way, in order.
//!
//! So let a request of this session be sent at `t`, and later, by more than half a tick, a **write** that a majority
//! acknowledged. When the leader ordered that write it knew the session and had heard of the request, or else it was
//! elected since and gave every session a new timeout. Either way the session lives until `t + timeout` at least. A read
//! would not do, nor would `sync`: a leader that lost its majority answers both (ZOOKEEPER-1675).
//!
//! The tick is the servers' secret. A session's timeout is at least two ticks unless the administrator set it lower, so
//! a quarter of the timeout is at least half a tick.

use std::{collections::VecDeque, time::Duration};

use lockkit_core::Moment;

/// The requests and writes of one session, and what they prove.
#[derive(Debug)]
pub(crate) struct Proof {
    timeout: Duration,
    /// When requests that were answered had been sent; ascending, and not too close to each other.
    touches: VecDeque<Moment>,
    /// When the last acknowledged write was sent.
    written: Moment,
    until: Moment,
}

impl Proof {
    /// Half a tick at least, as a part of the timeout.
    const SPACING: u32 = 4;
    /// How many touches per timeout are remembered.
    const GRAIN: u32 = 20;
    /// How often a session has to write so that its leases last: the touch that counts is then two writes old.
    pub(crate) const WRITES_PER_TIMEOUT: u32 = 7;

    /// A session whose establishment (a write by itself, which gives it a whole timeout) began at `opened`.
    pub(crate) fn new(opened: Moment, timeout: Duration) -> Self {
        let mut proof = Self { timeout, touches: VecDeque::from([opened]), written: opened, until: opened };
        proof.until = proof.end_of(opened);
        proof
    }

    /// Takes note that a request sent at `sent` was answered.
    pub(crate) fn touched(&mut self, sent: Moment) {
        let grain = self.timeout / Self::GRAIN;
        if self.touches.back().is_some_and(|last| sent < *last + grain) {
            return;
        }
        self.touches.push_back(sent);
        while self.touches.front().is_some_and(|first| *first + self.timeout < sent) {
            self.touches.pop_front();
        }
    }

    /// Takes note that a write sent at `sent` was acknowledged.
    pub(crate) fn wrote(&mut self, sent: Moment) {
        let spacing = self.timeout / Self::SPACING;
        if let Some(touch) = self.touches.iter().rev().find(|touch| **touch + spacing <= sent) {
            self.until = self.until.max(self.end_of(*touch));
        }
        self.written = self.written.max(sent);
        self.touched(sent);
    }

    /// Until when the session surely lives, as far as is known.
    pub(crate) fn until(&self) -> Moment {
        self.until
    }

    /// Whether the last write is so recent that another one would prove little more.
    pub(crate) fn is_fresh(&self, now: Moment) -> bool {
        now < self.written + self.timeout / (Self::WRITES_PER_TIMEOUT - 1)
    }

    /// The end of a session last heard of at `touch`, on a clock that may run 1 % slower than the leader's.
    fn end_of(&self, touch: Moment) -> Moment {
        touch + (self.timeout - self.timeout / 100)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const T: Duration = Duration::from_secs(20);

    fn at(millis: u64) -> Moment {
        Moment::from_nanos(1_000_000_000_000) + Duration::from_millis(millis)
    }

    fn lasts(touch: u64) -> Moment {
        at(touch) + T - T / 100
    }

    #[test]
    fn a_new_session_lasts_from_its_first_request() {
        assert_eq!(Proof::new(at(0), T).until(), lasts(0));
    }

    #[test]
    fn a_write_proves_what_was_sent_half_a_tick_before() {
        let mut proof = Proof::new(at(0), T);
        proof.wrote(at(4999));
        assert_eq!(proof.until(), lasts(0));
        proof.wrote(at(9998));
        assert_eq!(proof.until(), lasts(0), "the write before is too recent to count");
        proof.wrote(at(9999));
        assert_eq!(proof.until(), lasts(4999));
        assert!(proof.is_fresh(at(10_000)) && !proof.is_fresh(at(14_000)));
    }

    #[test]
    fn reads_alone_prove_nothing() {
        let mut proof = Proof::new(at(0), T);
        for second in 1..60 {
            proof.touched(at(second * 1000));
        }
        assert_eq!(proof.until(), lasts(0));
        proof.wrote(at(60_000));
        assert_eq!(proof.until(), lasts(55_000));
    }

    #[test]
    fn late_answers_and_crowds_change_nothing() {
        let mut proof = Proof::new(at(0), T);
        proof.wrote(at(10_000));
        proof.touched(at(3000));
        for millis in 0..10_000 {
            proof.wrote(at(10_000 + millis));
        }
        assert!(proof.touches.len() <= 21, "{}", proof.touches.len());
        assert!(proof.touches.iter().is_sorted());
        assert!(proof.until() <= lasts(15_000) && proof.until() >= lasts(14_000));
    }

    #[test]
    fn at_the_regular_pace_two_thirds_are_left() {
        let mut proof = Proof::new(at(0), T);
        let pace = T / Proof::WRITES_PER_TIMEOUT;
        let mut now = at(0);
        for _ in 0..20 {
            now = now + pace;
            proof.wrote(now);
            assert!(proof.until().since(now) >= T * 2 / 3, "{:?}", proof.until().since(now));
        }
    }
}
