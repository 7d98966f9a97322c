//! The code's record, and the few of its fields that differ between the records of one model.

use std::{sync::LazyLock, time::Duration};

use lockkit_core::{
    Fence, Token,
    migrate::{Phase, PhaseRecord, Side},
};

/// One tick of a model.
pub(crate) const TICK: Duration = Duration::from_secs(1);

/// A record of which the epoch and the floor are ranks: numbers as small as the order of those in a state allows, so that there may be
/// any number of changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Rec {
    pub(crate) epoch: u8,
    pub(crate) phase: Phase,
    pub(crate) came_from: Phase,
    pub(crate) floor: u8,
    /// Tells apart records that are otherwise equal: those written before a store lost its last one, and after.
    pub(crate) stamp: u8,
}

static STAMPS: LazyLock<[Token; 2]> = LazyLock::new(|| ["0", "1"].map(|digit| token(&digit.repeat(32))));

static FIRST: LazyLock<PhaseRecord> = LazyLock::new(|| PhaseRecord {
    id: token(&"a".repeat(32)),
    stores: ["b", "c"].map(|digit| digit.repeat(32).parse().expect("an identity")),
    home: Side::Old,
    home_is_durable: true,
    max_ttl: TICK,
    fresh: TICK,
    epoch: 0,
    phase: Phase::Old,
    is_over: false,
    is_told: false,
    is_shadowed: false,
    came_from: Phase::Old,
    floor: Fence::NONE,
    logs: 0,
    stamp: STAMPS[0],
});

fn token(text: &str) -> Token {
    text.parse().expect("a token")
}

/// The first record of a migration.
pub(crate) fn first(home: Side, max_ttl: u8, fresh: u8) -> PhaseRecord {
    PhaseRecord { home, max_ttl: TICK * u32::from(max_ttl), fresh: TICK * u32::from(fresh), ..FIRST.clone() }
}

impl Rec {
    /// In the phase [`Phase::Old`], from which each migration starts.
    pub(crate) const FIRST: Self = Self { epoch: 0, phase: Phase::Old, came_from: Phase::Old, floor: 0, stamp: 0 };

    /// The code's record with these fields.
    pub(crate) fn of(self, first: &PhaseRecord) -> PhaseRecord {
        PhaseRecord {
            epoch: self.epoch.into(),
            phase: self.phase,
            came_from: self.came_from,
            floor: Fence::new(self.floor.into()),
            stamp: STAMPS[usize::from(self.stamp)],
            ..first.clone()
        }
    }

    /// What the model keeps of a record that the code made.
    pub(crate) fn from(record: &PhaseRecord, stamp: u8) -> Self {
        let small = |number: u64| u8::try_from(number).expect("ranks are small");
        Self {
            epoch: small(record.epoch),
            phase: record.phase,
            came_from: record.came_from,
            floor: small(record.floor.get()),
            stamp,
        }
    }
}

/// The rank of a number among those in use.
pub(crate) fn rank(used: &[u8], number: u8) -> u8 {
    let lower = (0..number).filter(|other| used.contains(other)).count();
    u8::try_from(lower).expect("ranks are small")
}
