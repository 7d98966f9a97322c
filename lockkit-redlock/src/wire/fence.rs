//! Pure: how a quorum agrees on a fence, in one round trip when all goes well.
//!
//! The client proposes a number `t`. A node grants `max(counter + 1, t)` and moves its counter behind what the grant
//! owns: a grant `f` of span `s` owns `f .. f + s`, and leaves the counter at `f + s - 1`. Then
//!
//! 1. **agreed**: if a majority granted the very same number, that is the fence;
//! 2. **raised**: else the fence is the highest number granted, and one more round asks all nodes that granted to raise
//!    their counters to `fence + s - 1`. A node does so only while it still holds **that very grant**, which the client
//!    sees by the number in the answer. A majority must.
//!
//! # Why no two grants overlap, and later ones are higher
//! Let A and B be two grants with fences `F` and `G` and spans `s` and `r`. Each has a majority of nodes that counted
//! for it, so some node j counted for both. Node j is exclusive, so it served one of them first; say A.
//!
//! - When A's hold at j ended, j's counter was at least `F + s - 1`: either j granted exactly `F` (case 1), or it raised
//!   its counter that far while it held A's grant (case 2). Counters never go down.
//! - So what j then granted to B is at least `F + s`. And `G` is at least what j granted to B: equal to it in case 1,
//!   the maximum over the grants of all nodes that may count in case 2.
//!
//! Hence `G >= F + s`: the ranges `F .. F + s` and `G .. G + r` do not overlap. If A returned before B was invoked, j
//! served A first, so later grants have higher fences. Nothing here mentions time: it holds whatever clocks, pauses and
//! expiries do, as long as counters are not lost. `tests/model.rs` checks this, and what breaks without each part:
//!
//! - without the raise, the maximum may have been granted by a single node, which B need not share;
//! - with "at least" in place of "the very same", likewise;
//! - if a node that lost the grant in between may count for the raise, j may have served A, B, and A's late repetition,
//!   so that B's number was drawn before A raised the counter.
//!
//! The proposal only serves to make numbers equal: any `t` is safe. The wall clock makes it likely that `t` is above
//! every counter, so that all nodes grant exactly `t`; and after a loss of counters it is what keeps fences growing.

use lockkit_core::{Fence, FenceClock, FenceRequest};

/// What to ask the nodes for: exactly `t`, the caller's floor and the wall clock permitting.
pub(crate) fn proposal(asked: FenceRequest, wall_clock_micros: u64) -> FenceRequest {
    let first = asked.floor.offset(1);
    let proposed = match asked.clock {
        FenceClock::Store => first.max(Fence::new(wall_clock_micros)),
        FenceClock::Floor => first,
    };
    exactly(proposed, asked.span)
}

/// A request that a node whose counter is below `fence` grants with just that number.
pub(crate) fn exactly(fence: Fence, span: u32) -> FenceRequest {
    FenceRequest { floor: Fence::new(fence.get().saturating_sub(1)), span, clock: FenceClock::Floor }
}

/// How far a node's counter has to be raised so that a grant at `fence` owns its whole span.
pub(crate) fn last_of(fence: Fence, span: u32) -> Fence {
    fence.offset(span.saturating_sub(1))
}

/// What the grants of a majority amount to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Choice {
    /// A majority granted the same number.
    Agreed(Fence),
    /// They did not. This is the number to raise the counters to, on the nodes that granted.
    Raise(Fence),
}

/// Chooses among the numbers that nodes granted, of which there are at least `quorum`.
pub(crate) fn choose(granted: impl Iterator<Item = Fence> + Clone, quorum: usize) -> Choice {
    let highest = granted.clone().max().unwrap_or_default();
    let agreed = granted.clone().find(|fence| granted.clone().filter(|other| other == fence).count() >= quorum);
    agreed.map_or(Choice::Raise(highest), Choice::Agreed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(granted: &[u64], quorum: usize) -> Choice {
        choose(granted.iter().copied().map(Fence::new), quorum)
    }

    #[test]
    fn equal_numbers_of_a_majority_are_the_fence() {
        assert_eq!(chosen(&[7, 7, 7], 3), Choice::Agreed(Fence::new(7)));
        assert_eq!(chosen(&[9, 7, 7, 7], 3), Choice::Agreed(Fence::new(7)));
        assert_eq!(chosen(&[9, 7, 7], 3), Choice::Raise(Fence::new(9)));
        assert_eq!(chosen(&[8, 9, 7], 2), Choice::Raise(Fence::new(9)));
    }

    #[test]
    fn a_proposal_is_above_the_floor_and_the_wall_clock() {
        let asked = |floor, clock| FenceRequest { floor: Fence::new(floor), span: 4, clock };
        assert_eq!(proposal(asked(10, FenceClock::Store), 1000).floor, Fence::new(999));
        assert_eq!(proposal(asked(5000, FenceClock::Store), 1000).floor, Fence::new(5000));
        let exact = proposal(asked(10, FenceClock::Floor), 1000);
        assert_eq!((exact.floor, exact.span, exact.clock), (Fence::new(10), 4, FenceClock::Floor));
        assert_eq!(last_of(Fence::new(10), 4), Fence::new(13));
    }
}
