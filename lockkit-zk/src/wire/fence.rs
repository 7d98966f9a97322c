//! Fences, from the transaction that made the holder's node (rule R9).
//!
//! Every change on ZooKeeper has a number of its own, which grows with every change, over restarts and changes of
//! leader. Let `z` be the number of the transaction that made a node (its czxid). Nodes of one lock are made one by
//! one, and each holds the lock only when those before it are gone, so along the grants of a lock `z` grows by at least
//! one. The fence of a grant is
//!
//! ```text
//! fence(z) = STRIDE * z + offset        and the grant owns [fence, fence + span)
//! ```
//!
//! with `offset` at 0 as long as nobody asked for more. **No two grants overlap:** if `span <= STRIDE`, the next grant
//! has `z' >= z + 1` and an offset that is not smaller, so `fence(z') >= fence(z) + STRIDE >= fence(z) + span`. What does
//! not fit into that (a floor above it, a longer span) raises the offset **before** the grant is returned, to
//! what makes `fence(z + 1) >= fence + span`. The offset never falls, and is read by the next holder after it became
//! first, so it sees what all holders before it wrote. A raise is one transaction with a write to the holder's own node:
//! one that lost the lock without noticing raises nothing.
//!
//! **Members of a quorum** must grant exactly what was proposed ([`FenceClock::Floor`]), which transactions don't allow.
//! The first such request turns the record of the lock into a counter: from then on every grant of that lock writes the
//! last fence that it owns, and the next one starts above it. Since the counter starts above `STRIDE * z`, it is above
//! all that was granted before.
//!
//! **Readers and permits** hold together, so the proof above is not theirs: one may settle its fence after another that has a
//! higher number and has raised the offset, and the two could come to the same fence. So they raise it by multiples of
//! [`LEAP`] only, which no distance between the nodes of two of them makes up for. They still never go back: who asks
//! after a grant was returned has a higher number, and reads an offset that is not smaller. What turns the record into a
//! counter is refused to them, for others may hold by then whose fences the counter would not be above. One that is there
//! they count on like all others.

use lockkit_core::{Error, ErrorKind, Fence, FenceClock, FenceRequest, Result, store::FENCE_ROOM};

/// Fences per transaction. Core asks for 65 at most by default; more than that costs a grant one more write.
pub(crate) const STRIDE: u64 = 128;

/// By multiples of this those that hold together raise the offset of their lock. Two of their nodes would have to be one and a
/// half epochs of 2^32 transactions apart, to the transaction, to come to the same fence all the same.
const LEAP: u64 = STRIDE * (3 << 31);

/// Where fences end: they should fit the signed numbers of databases.
const MAX: u64 = i64::MAX as u64;

/// What is stored of a lock's fences, beside its queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FenceRecord {
    /// To be added to what comes from the transaction.
    Offset(u64),
    /// The last fence that belongs to a grant.
    Last(u64),
}

impl FenceRecord {
    /// What a lock without a record has.
    pub(crate) const NONE: Self = Self::Offset(0);

    pub(crate) fn text(self) -> String {
        match self {
            Self::Offset(offset) => format!("offset:{offset}"),
            Self::Last(last) => format!("last:{last}"),
        }
    }

    pub(crate) fn parse(data: &[u8]) -> Option<Self> {
        let (kind, number) = str::from_utf8(data).ok()?.split_once(':')?;
        let number = number.parse().ok()?;
        match kind {
            "offset" => Some(Self::Offset(number)),
            "last" => Some(Self::Last(number)),
            _ => None,
        }
    }

    /// The fence of a holder whose node was made by `czxid` and says nothing of its own.
    pub(crate) fn natural(self, czxid: i64) -> Option<Fence> {
        match self {
            Self::Offset(offset) => base(czxid).ok()?.checked_add(offset).map(Fence::new),
            Self::Last(_) => None,
        }
    }
}

/// The fence of a grant, and the record to be written before it is returned, if it changes. `alone`: nobody else may hold the
/// lock meanwhile.
///
/// # Errors
/// [`ErrorKind::InvalidInput`] for a floor or a span that leads beyond 2^63; `Unexpected` if the ensemble has used up
/// its transactions; `Unsupported` for a first fence without the store's clock that is not `alone`.
pub(crate) fn grant(
    record: FenceRecord,
    czxid: i64,
    request: &FenceRequest,
    alone: bool,
) -> Result<(Fence, Option<FenceRecord>)> {
    let base = base(czxid)?;
    let floor = request.floor.get();
    let span = u64::from(request.span);
    let least = floor.checked_add(1).ok_or_else(too_high)?;
    let natural = match record {
        FenceRecord::Offset(offset) => base.checked_add(offset),
        FenceRecord::Last(last) => last.checked_add(1),
    };
    let max = if natural.is_some_and(|natural| natural >= least) { MAX } else { MAX - FENCE_ROOM };
    let (fence, next) = match (record, request.clock) {
        (FenceRecord::Offset(offset), FenceClock::Store) => {
            let raised = raised(offset, least.saturating_sub(base), alone);
            let (offset, next) = match span.saturating_sub(STRIDE) {
                0 => (raised, raised),
                // A leap of its own, which ends before the next one.
                _ if !alone => (raised.saturating_add(LEAP), raised.saturating_add(2 * LEAP)),
                more => (raised, raised.saturating_add(more)),
            };
            (base.checked_add(offset), FenceRecord::Offset(next))
        }
        (FenceRecord::Offset(_), FenceClock::Floor) if !alone => {
            let message = "only exclusive locks can have fences without the store's clock";
            return Err(Error::new(ErrorKind::Unsupported, message));
        }
        (FenceRecord::Offset(_), FenceClock::Floor) | (FenceRecord::Last(_), _) => {
            // All that was granted so far lies below.
            let fence = natural.map(|natural| natural.max(least));
            (fence, FenceRecord::Last(fence.unwrap_or(MAX).saturating_add(span.saturating_sub(1))))
        }
    };
    let fence = fence.filter(|fence| fence.checked_add(span).is_some_and(|end| end <= max)).ok_or_else(too_high)?;
    Ok((Fence::new(fence), (next != record).then_some(next)))
}

/// The fence of a grant that takes the place of another: above all fences of that one, which owns those below `after`, and below those of all later
/// grants. And the record to be written in the step that makes it, if it changes. `czxid` made the node of the other one: those of
/// claims that wait have the next numbers, however late the place is taken.
///
/// # Errors
/// As for [`grant`].
pub(crate) fn in_place(
    record: FenceRecord,
    czxid: i64,
    after: Fence,
    request: &FenceRequest,
) -> Result<(Fence, Option<FenceRecord>)> {
    let asked = request.floor.get().checked_add(1).ok_or_else(too_high)?;
    let (least, max) = (asked.max(after.get()), if asked > after.get() { MAX - FENCE_ROOM } else { MAX });
    let end = |fence: u64| fence.checked_add(u64::from(request.span)).filter(|end| *end <= max).ok_or_else(too_high);
    let (fence, next) = match (record, request.clock) {
        (FenceRecord::Offset(offset), FenceClock::Store) => {
            // What the next grant has at least.
            let next = base(czxid)?.saturating_add(STRIDE).saturating_add(offset);
            (least, FenceRecord::Offset(offset.saturating_add(end(least)?.saturating_sub(next))))
        }
        (FenceRecord::Offset(_), FenceClock::Floor) => (least, FenceRecord::Last(end(least)? - 1)),
        (FenceRecord::Last(last), _) => {
            let fence = least.max(last.checked_add(1).ok_or_else(too_high)?);
            (fence, FenceRecord::Last(end(fence)? - 1))
        }
    };
    Ok((Fence::new(fence), (next != record).then_some(next)))
}

/// The number of a transaction no later than the one that made the node whose place the holder of these fences took, which is all that is known of
/// that. What raises the fences of the lock counts from there.
pub(crate) fn place_of(record: FenceRecord, fence: Fence, span: u32) -> i64 {
    // All of them lie below what the next transaction stood for then, and the offset never falls. As a rule it is that very transaction: of one
    // that is too low, the place would be given fences that are too high.
    let FenceRecord::Offset(offset) = record else { return 0 };
    let next = fence.offset(span).get().saturating_sub(offset).div_ceil(STRIDE);
    i64::try_from(next).map_or(0, |next| next.saturating_sub(1).max(0))
}

/// The record that makes all later grants higher than `floor`, if it has to be written, while the holder made by `czxid` holds the lock.
/// `own_end`: the first fence behind those of the holder, if it holds the lock alone; else `None`.
///
/// # Errors
/// As for [`grant`].
pub(crate) fn raise(
    record: FenceRecord,
    czxid: i64,
    floor: Fence,
    own_end: Option<Fence>,
) -> Result<Option<FenceRecord>> {
    // The next node lies above the floor as it is, but a lease that takes the place of this one has the fences behind its own, unless the
    // record is younger than its node.
    let counts_from_own = own_end.is_some_and(|end| floor >= end) && matches!(record, FenceRecord::Offset(_));
    let (floor, alone) = (floor.get(), own_end.is_some());
    if floor > MAX - FENCE_ROOM {
        return Err(too_high());
    }
    let next = match record {
        FenceRecord::Offset(offset) => {
            FenceRecord::Offset(raised(offset, (floor + 1).saturating_sub(base(czxid)? + STRIDE), alone))
        }
        FenceRecord::Last(last) => FenceRecord::Last(last.max(floor)),
    };
    Ok((next != record || counts_from_own).then_some(next))
}

/// An offset that is no smaller, and `least` or more.
fn raised(offset: u64, least: u64, alone: bool) -> u64 {
    let missing = least.saturating_sub(offset);
    offset.saturating_add(if alone { missing } else { missing.div_ceil(LEAP).saturating_mul(LEAP) })
}

fn base(czxid: i64) -> Result<u64> {
    let transaction =
        u64::try_from(czxid).ok().and_then(|czxid| czxid.checked_mul(STRIDE)).filter(|base| *base < MAX / 2);
    transaction.ok_or_else(|| {
        Error::new(ErrorKind::Unexpected, "the servers number their transactions too high to make fences of them")
    })
}

fn too_high() -> Error {
    Error::invalid("fences on ZooKeeper end at 2^63")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(floor: u64, span: u32, clock: FenceClock) -> FenceRequest {
        FenceRequest { floor: Fence::new(floor), span, clock }
    }

    #[test]
    fn a_plain_grant_writes_nothing() {
        let (fence, write) = grant(FenceRecord::NONE, 1000, &ask(0, 65, FenceClock::Store), true).expect("grant");
        assert_eq!((fence.get(), write), (1000 * STRIDE, None));
        let (fence, write) =
            grant(FenceRecord::Offset(7), 1000, &ask(1000 * STRIDE + 6, 128, FenceClock::Store), true).expect("grant");
        assert_eq!((fence.get(), write), (1000 * STRIDE + 7, None));
    }

    /// The proof above, by exhaustion of a small world: whatever is asked for in whatever order, no grant overlaps with
    /// the one before, and floors are kept.
    #[test]
    fn no_two_grants_overlap() {
        let floors = [0, 1, 500 * STRIDE, 1 << 50];
        let spans = [1, 2, 127, 128, 129, 5000];
        let clocks = [FenceClock::Store, FenceClock::Store, FenceClock::Floor];
        let mut state: u32 = 12345;
        let mut pick = |among: usize| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as usize % among
        };
        for _ in 0..2000 {
            let (mut record, mut next_free, mut czxid) = (FenceRecord::NONE, 0, 400);
            for _ in 0..30 {
                czxid += 1 + i64::try_from(pick(3)).expect("small");
                let (floor, span) = (floors[pick(4)] + u64::try_from(pick(300)).expect("small"), spans[pick(6)]);
                let (fence, write) = grant(record, czxid, &ask(floor, span, clocks[pick(3)]), true).expect("grant");
                assert!(fence.get() >= next_free && fence.get() > floor, "{record:?} {czxid} {floor} {span}: {fence}");
                next_free = fence.get() + u64::from(span);
                record = write.unwrap_or(record);
                // Another takes its place, once or twice; those that wait have the next numbers all the same. The second time the place
                // is the one that is known from the fence, and the node is a younger one.
                let (mut from, mut own, mut own_end, mut is_raised) = (czxid, czxid, next_free, false);
                for _ in 0..pick(4) {
                    if pick(3) == 0 {
                        let floor = own_end - 1 + u64::try_from(pick(300)).expect("small");
                        let raised = raise(record, from, Fence::new(floor), Some(Fence::new(own_end))).expect("raise");
                        (record, is_raised) = (raised.unwrap_or(record), raised.is_some());
                        next_free = floor + 1;
                    }
                    let (floor, span) = (floors[pick(4)], spans[pick(6)]);
                    let asked = ask(floor, span, clocks[pick(3)]);
                    let next = record.natural(own + 1).map_or(0, Fence::get);
                    let after = if is_raised { own_end.max(next) } else { own_end };
                    let (fence, write) = in_place(record, from, Fence::new(after), &asked).expect("grant");
                    assert!(fence.get() >= next_free && fence.get() > floor, "{record:?} {czxid} {asked:?}: {fence}");
                    next_free = fence.get() + u64::from(span);
                    record = write.unwrap_or(record);
                    let place = place_of(record, fence, span);
                    assert!((0..=czxid).contains(&place), "{place} is behind {czxid}");
                    (from, own, is_raised) = (place, own + 1 + i64::try_from(pick(5000)).expect("small"), false);
                    own_end = next_free;
                }
                if pick(3) == 0 {
                    let floor = next_free + u64::try_from(pick(1000)).expect("small");
                    let own_end = Some(Fence::new(own_end));
                    record = raise(record, from, Fence::new(floor), own_end).expect("raise").unwrap_or(record);
                    next_free = floor + 1;
                }
            }
        }
    }

    /// Those that hold together settle in any order, and raise the offset in any order.
    #[test]
    fn permits_held_together_never_share_a_fence() {
        let mut state: u32 = 54321;
        let mut pick = |among: usize| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as usize % among
        };
        let floors = [0, 0, 900 * STRIDE, 1 << 50];
        for _ in 0..2000 {
            let mut record = FenceRecord::NONE;
            let mut given: Vec<(u64, u64)> = Vec::new();
            for group in 0..4 {
                let highest = given.iter().map(|(_, end)| *end).max().unwrap_or_default();
                let mut unsettled: Vec<i64> = (0..6).map(|number| 500 + group * 10 + number).collect();
                while !unsettled.is_empty() {
                    let czxid = unsettled.remove(pick(unsettled.len()));
                    let floor = floors[pick(4)] + u64::try_from(pick(300)).expect("small");
                    let span = [1, 65, 400][pick(3)];
                    let asked = ask(floor, span, FenceClock::Store);
                    let (fence, write) = grant(record, czxid, &asked, false).expect("grant");
                    let (first, end) = (fence.get(), fence.get() + u64::from(span));
                    assert!(first > floor);
                    assert!(first >= highest, "{fence} after {highest}, of the group before");
                    assert!(given.iter().all(|(a, b)| end <= *a || *b <= first), "{fence} twice");
                    given.push((first, end));
                    record = write.unwrap_or(record);
                    if pick(5) == 0 {
                        let floor = first + u64::try_from(pick(1000)).expect("small");
                        record = raise(record, czxid, Fence::new(floor), None).expect("raise").unwrap_or(record);
                    }
                }
            }
        }
        let error = grant(FenceRecord::NONE, 7, &ask(0, 1, FenceClock::Floor), false).expect_err("others may hold");
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        let counted = grant(FenceRecord::Last(41), 7, &ask(0, 1, FenceClock::Store), false).expect("grant");
        assert_eq!((counted.0.get(), counted.1), (42, Some(FenceRecord::Last(42))));
    }

    #[test]
    fn a_quorum_gets_what_it_proposed() {
        let proposed = 4_000_000_000_000_000;
        let (fence, write) = grant(FenceRecord::NONE, 77, &ask(proposed, 1, FenceClock::Floor), true).expect("grant");
        assert_eq!((fence.get(), write), (proposed + 1, Some(FenceRecord::Last(proposed + 1))));
        let (fence, write) =
            grant(write.expect("written"), 79, &ask(proposed + 10, 3, FenceClock::Floor), true).expect("grant");
        assert_eq!((fence.get(), write), (proposed + 11, Some(FenceRecord::Last(proposed + 13))));
    }

    #[test]
    fn a_grant_in_the_place_of_another_writes_nothing_while_there_is_room() {
        let fence = Fence::new(1000 * STRIDE + 7);
        let record = FenceRecord::Offset(7);
        let plain = ask(0, 1, FenceClock::Store);
        assert_eq!(in_place(record, 1000, fence.offset(65), &plain).expect("grant"), (fence.offset(65), None));
        let (full, write) = in_place(record, 1000, fence.offset(128), &plain).expect("grant");
        assert_eq!((full, write), (fence.offset(128), Some(FenceRecord::Offset(8))));
        for record in [record, FenceRecord::Last(5)] {
            let error = in_place(record, 1000, fence, &ask(MAX, 1, FenceClock::Store)).expect_err("too high");
            assert_eq!(error.kind(), ErrorKind::InvalidInput);
        }
    }

    #[test]
    fn what_would_overflow_is_refused() {
        for (floor, span) in [(u64::MAX, 1), (MAX, 1), (MAX - 1, 2), (MAX - 10, u32::MAX)] {
            for record in [FenceRecord::NONE, FenceRecord::Last(5)] {
                let error = grant(record, 1, &ask(floor, span, FenceClock::Store), true).expect_err("too high");
                assert_eq!(error.kind(), ErrorKind::InvalidInput, "{floor} {span}");
            }
        }
        assert_eq!(
            raise(FenceRecord::NONE, 1, Fence::new(u64::MAX), None).expect_err("too high").kind(),
            ErrorKind::InvalidInput
        );
        assert_eq!(
            grant(FenceRecord::NONE, -1, &FenceRequest::default(), true).expect_err("no czxid").kind(),
            ErrorKind::Unexpected
        );
        assert!(grant(FenceRecord::NONE, i64::MAX, &FenceRequest::default(), true).is_err());
    }

    #[test]
    fn a_mistyped_floor_does_not_use_up_the_fences() {
        for record in [FenceRecord::NONE, FenceRecord::Offset(7), FenceRecord::Last(5)] {
            for alone in [true, false] {
                let mistyped = ask(MAX - 1000, 65, FenceClock::Store);
                let error = grant(record, 1, &mistyped, alone).expect_err("nobody could be granted anything after it");
                assert_eq!(error.kind(), ErrorKind::InvalidInput, "{record:?} {alone}");
                raise(record, 1, mistyped.floor, alone.then_some(Fence::NONE)).expect_err("nor here");
                in_place(record, 1, Fence::new(300), &mistyped).expect_err("nor in the place of another");
                let highest = ask(MAX - 2 * FENCE_ROOM, 65, FenceClock::Store);
                let (fence, write) = grant(record, 1, &highest, alone).expect("grant");
                grant(write.expect("raised"), 1_000_000, &FenceRequest::default(), alone).expect("the next one");
                let again = FenceRequest { floor: fence, ..FenceRequest::default() };
                grant(write.expect("raised"), 1_000_000, &again, alone).expect("it raises nothing");
            }
        }
        // What has come so far by itself goes on to the end.
        let late = FenceRecord::Last(MAX - 1000);
        grant(late, 1, &ask(MAX - 2000, 65, FenceClock::Store), true).expect("grant");
    }

    #[test]
    fn a_record_survives_its_text() {
        for record in [FenceRecord::NONE, FenceRecord::Offset(u64::MAX), FenceRecord::Last(42)] {
            assert_eq!(FenceRecord::parse(record.text().as_bytes()), Some(record));
        }
        for bad in ["", "offset", "offset:", "offset:x", "first:1", "last:-1"] {
            assert_eq!(FenceRecord::parse(bad.as_bytes()), None, "{bad}");
        }
    }
}
