//! The phases of a migration, and its two stores: pure.

use std::fmt;

/// Where the locks of a service are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// In the old store.
    Old,
    /// In both: a lock is held if it is held in each.
    Both,
    /// In the new store.
    New,
}

/// One of the two stores of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// The store that the service comes from.
    Old,
    /// The store that it goes to.
    New,
}

impl Phase {
    /// Whether the locks of this phase are in that store.
    #[must_use]
    pub const fn uses(self, side: Side) -> bool {
        !matches!((self, side), (Self::Old, Side::New) | (Self::New, Side::Old))
    }

    /// The stores of this phase, in the order in which they are asked (rule M8).
    #[must_use]
    pub const fn sides(self) -> &'static [Side] {
        match self {
            Self::Old => &[Side::Old],
            Self::Both => &Side::ALL,
            Self::New => &[Side::New],
        }
    }

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Old => "old",
            Self::Both => "both",
            Self::New => "new",
        }
    }

    pub(super) fn named(name: &str) -> Option<Self> {
        [Self::Old, Self::Both, Self::New].into_iter().find(|phase| phase.name() == name)
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Side {
    /// The old store, then the new one.
    pub const ALL: [Self; 2] = [Self::Old, Self::New];

    /// The place in a pair.
    #[must_use]
    pub const fn index(self) -> usize {
        match self {
            Self::Old => 0,
            Self::New => 1,
        }
    }

    /// The other store.
    #[must_use]
    pub const fn other(self) -> Self {
        match self {
            Self::Old => Self::New,
            Self::New => Self::Old,
        }
    }

    /// The phase in which the locks are in this store alone.
    #[must_use]
    pub const fn alone(self) -> Phase {
        match self {
            Self::Old => Phase::Old,
            Self::New => Phase::New,
        }
    }

    pub(super) fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|side| side.alone().name() == name)
    }
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.alone().fmt(f)
    }
}
