//! How long a session surely lives, from what the servers acknowledged.
//!
//! ZooKeeper's answers don't say when a session will end. A server that is not the leader answers pings and reads by
//! itself, even for a while after it was cut off from the leader, and the leader alone ends sessions: one timeout after
//! it last **heard** of them. It does not hear of a session by the requests that a follower passes on. It pings each
//! follower every half tick, and the follower answers with the sessions that it has heard of.
//!
//! So three requests are needed, each sent when the one before it was **answered**. When a request was sent says nothing:
//! the network may have held it up.
//!
//! 1. A request sent at `t`. When it is answered, the follower has heard of the session, at `t` or later.
//! 2. Half a tick later at least, a request that goes through the leader. By then the leader has sent the follower a ping,
//!    and what the leader sends to a follower arrives in order: when the follower passes on the answer, it has answered
//!    the ping.
//! 3. A **write**. What a follower sends to the leader arrives in order too: when the leader gets the write, it has heard of
//!    request 1. If a majority then acknowledges the write, this leader led, and knew the session.
//!
//! So the session lives until `t + timeout` at least. A `sync` will do for the second request, but not for the third: a leader
//! that lost its majority answers it (ZOOKEEPER-1675). If the session moved to another server in between, it was announced
//! to the leader then, after `t`. A leader elected in between gives every session a new timeout.
//!
//! Two things are the servers' own, and can't be asked for: that the leader sends its pings in time, and how long a tick is.
//! A session's timeout is at least two ticks, unless the administrator set `minSessionTimeout` lower; then a quarter of
//! the timeout is at least half a tick.

use std::{collections::VecDeque, time::Duration};

use lockkit_core::Moment;

/// The requests of one session, and what they prove.
#[derive(Debug)]
pub(crate) struct Proof {
    timeout: Duration,
    /// Requests that went through the leader and were answered; ascending by when they were sent, not too close to each other.
    trips: VecDeque<Trip>,
    /// When a request that goes through the leader was last answered, or a server took the session anew.
    answered: Moment,
    /// When the last write that proved something was sent.
    written: Moment,
    until: Moment,
    /// The session was announced to a server anew, which may have given it a shorter timeout. Counts how often.
    moves: u64,
    /// How many of the moves the timeout is known after.
    settled: u64,
}

#[derive(Clone, Copy, Debug)]
struct Trip {
    sent: Moment,
    answered: Moment,
}

impl Proof {
    /// Half a tick at least, and a little more for the leader's ping to leave: 4/15 of the timeout.
    const SPACING: (u32, u32) = (4, 15);
    /// How many trips per timeout are remembered.
    const GRAIN: u32 = 20;
    /// How often a session has to give a sign of life so that its leases last: the trip that counts is then two signs old.
    const SIGNS_PER_TIMEOUT: u32 = 7;

    /// A session whose establishment (a write by itself, which gives it a whole timeout) began at `opened`.
    pub(crate) fn new(opened: Moment, established: Moment, timeout: Duration) -> Self {
        let trips = VecDeque::from([Trip { sent: opened, answered: established }]);
        let mut proof =
            Self { timeout, trips, answered: established, written: opened, until: opened, moves: 0, settled: 0 };
        proof.until = proof.end_of(opened);
        proof
    }

    /// The session's timeout.
    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// How long to wait between two signs of life.
    pub(crate) fn pace(&self) -> Duration {
        self.timeout / Self::SIGNS_PER_TIMEOUT
    }

    /// Takes note that a request that goes through the leader was answered.
    pub(crate) fn passed(&mut self, sent: Moment, answered: Moment) {
        self.answered = self.answered.max(answered);
        let grain = self.timeout / Self::GRAIN;
        if self.unsettled().is_some() || self.trips.back().is_some_and(|last| sent < last.sent + grain) {
            return;
        }
        self.trips.push_back(Trip { sent, answered });
        while self.trips.front().is_some_and(|first| first.sent + self.timeout < sent) {
            self.trips.pop_front();
        }
    }

    /// Takes note that a write sent at `sent` was acknowledged, in this session and in no other.
    pub(crate) fn wrote(&mut self, sent: Moment) {
        if self.unsettled().is_some() {
            return;
        }
        self.written = self.written.max(sent);
        let spacing = self.timeout * Self::SPACING.0 / Self::SPACING.1;
        let before = |moment: Moment| self.trips.iter().rev().find(move |trip| trip.answered <= moment);
        let Some(second) = before(sent) else { return };
        if let Some(first) = self.trips.iter().rev().find(|trip| trip.answered + spacing <= second.sent) {
            self.until = self.until.max(self.end_of(first.sent));
        }
    }

    /// Until when the session surely lives, as far as is known.
    pub(crate) fn until(&self) -> Moment {
        self.until
    }

    /// Whether the last write is so recent that another one would prove little more.
    pub(crate) fn is_fresh(&self, now: Moment) -> bool {
        self.unsettled().is_none() && now < self.written + self.timeout / (Self::SIGNS_PER_TIMEOUT - 1)
    }

    /// Whether nothing was answered for so many times as long as a session lasts without a sign of life.
    pub(crate) fn is_silent_for(&self, timeouts: u32, now: Moment) -> bool {
        now >= self.answered + self.timeout * timeouts
    }

    /// Takes note that the session was announced to a server anew. Until the timeout that it gave is known, nothing proves
    /// anything.
    pub(crate) fn moved(&mut self, now: Moment) {
        self.moves += 1;
        self.answered = self.answered.max(now);
    }

    /// The move after which the timeout is not known yet.
    pub(crate) fn unsettled(&self) -> Option<u64> {
        (self.settled < self.moves).then_some(self.moves)
    }

    /// Takes note of the timeout that holds since a move. Tells whether it is shorter, so that leases may be believed in for
    /// too long.
    pub(crate) fn settle(&mut self, moves: u64, timeout: Duration) -> bool {
        self.settled = moves;
        if timeout >= self.timeout {
            return false;
        }
        self.timeout = timeout;
        // The session was announced after the last request before it had been sent.
        if let Some(last) = self.trips.back().copied() {
            self.trips = VecDeque::from([last]);
            self.until = self.until.min(self.end_of(last.sent));
        }
        true
    }

    /// The end of a session last heard of at `sent`, on a clock that may run 1 % slower than the leader's.
    fn end_of(&self, sent: Moment) -> Moment {
        sent + (self.timeout - self.timeout / 100)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const T: Duration = Duration::from_secs(15);

    fn at(millis: u64) -> Moment {
        Moment::from_nanos(1_000_000_000_000) + Duration::from_millis(millis)
    }

    fn lasts(sent: u64) -> Moment {
        at(sent) + T - T / 100
    }

    fn opened() -> Proof {
        Proof::new(at(0), at(10), T)
    }

    #[test]
    fn a_new_session_lasts_from_its_first_request() {
        assert_eq!(opened().until(), lasts(0));
    }

    #[test]
    fn a_write_proves_what_was_answered_before_the_request_before_it() {
        let mut proof = opened();
        proof.passed(at(5000), at(5010));
        proof.passed(at(9009), at(9020));
        proof.wrote(at(9020));
        assert_eq!(proof.until(), lasts(0), "between the first and the second is too little time");
        proof.passed(at(10_010), at(10_020));
        proof.wrote(at(10_019));
        assert_eq!(proof.until(), lasts(0), "the second was not answered yet");
        proof.wrote(at(10_020));
        assert_eq!(proof.until(), lasts(5000));
        assert!(proof.is_fresh(at(10_030)) && !proof.is_fresh(at(13_000)));
    }

    #[test]
    fn what_the_network_held_up_proves_nothing() {
        let mut proof = opened();
        proof.passed(at(5000), at(9500));
        proof.passed(at(9500), at(9600));
        proof.wrote(at(9600));
        assert_eq!(proof.until(), lasts(0), "it may have arrived together with the one after it");
        proof.passed(at(13_500), at(13_510));
        proof.wrote(at(13_510));
        assert_eq!(proof.until(), lasts(5000));
    }

    #[test]
    fn without_a_write_nothing_is_proven() {
        let mut proof = opened();
        for second in 1..60 {
            proof.passed(at(second * 1000), at(second * 1000));
        }
        assert_eq!(proof.until(), lasts(0));
        proof.wrote(at(60_000));
        assert_eq!(proof.until(), lasts(55_000));
    }

    #[test]
    fn late_answers_and_crowds_change_nothing() {
        let mut proof = opened();
        proof.passed(at(10_000), at(10_000));
        proof.passed(at(3000), at(10_001));
        for millis in 0..10_000 {
            proof.passed(at(10_000 + millis), at(10_000 + millis));
            proof.wrote(at(10_000 + millis));
        }
        assert!(proof.trips.len() <= 21, "{}", proof.trips.len());
        assert!(proof.trips.iter().map(|trip| trip.sent).is_sorted());
        assert!(proof.until() <= lasts(16_000) && proof.until() >= lasts(14_000));
    }

    #[test]
    fn at_the_regular_pace_two_thirds_are_left() {
        let mut proof = opened();
        let (mut now, answer) = (at(0), Duration::from_millis(100));
        for _ in 0..20 {
            now = now + proof.pace();
            proof.passed(now, now + answer);
            proof.wrote(now + answer);
            assert!(proof.until().since(now) >= T * 2 / 3, "{:?}", proof.until().since(now));
        }
    }

    #[test]
    fn after_a_move_the_shorter_timeout_counts() {
        let mut proof = opened();
        for second in 1..=10 {
            proof.passed(at(second * 1000), at(second * 1000));
        }
        proof.wrote(at(10_000));
        assert_eq!(proof.until(), lasts(6000));
        proof.moved(at(11_000));
        proof.passed(at(11_000), at(11_000));
        proof.wrote(at(11_000));
        assert_eq!(proof.until(), lasts(6000), "with which timeout?");
        assert!(!proof.is_fresh(at(11_000)));
        let short = T / 5;
        assert!(proof.settle(proof.unsettled().expect("a move"), short));
        assert_eq!((proof.timeout(), proof.until()), (short, at(10_000) + short - short / 100));
        proof.passed(at(11_100), at(11_100));
        proof.wrote(at(11_100));
        assert_eq!(proof.until(), at(10_000) + short - short / 100);
        proof.passed(at(12_000), at(12_000));
        proof.wrote(at(12_000));
        assert_eq!(proof.until(), at(11_100) + short - short / 100);
    }

    #[test]
    fn until_the_timeout_is_known_a_write_proves_nothing() {
        let mut proof = opened();
        for second in 1..=10 {
            proof.passed(at(second * 1000), at(second * 1000));
        }
        proof.moved(at(10_000));
        proof.wrote(at(10_000));
        assert_eq!(proof.until(), lasts(0), "the server may have given less than that");
    }

    #[test]
    fn a_move_to_a_like_server_costs_nothing() {
        let mut proof = opened();
        proof.passed(at(5000), at(5000));
        proof.moved(at(5000));
        let first = proof.unsettled().expect("a move");
        proof.moved(at(6000));
        assert!(!proof.settle(first, T), "no shorter");
        assert!(proof.unsettled().is_some(), "it moved again meanwhile");
        assert!(!proof.settle(first + 1, T));
        proof.passed(at(10_000), at(10_000));
        proof.wrote(at(10_000));
        assert_eq!(proof.until(), lasts(5000));
    }

    #[test]
    fn silence_is_counted_on_one_connection() {
        let mut proof = opened();
        proof.passed(at(5000), at(5010));
        assert!(!proof.is_silent_for(1, at(20_009)) && proof.is_silent_for(1, at(20_010)));
        proof.moved(at(20_010));
        assert!(!proof.is_silent_for(1, at(35_009)) && proof.is_silent_for(1, at(35_010)));
    }
}
