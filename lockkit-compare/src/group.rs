//! What is measured, in groups that are taken or left out together.

use std::{fmt, str::FromStr};

use crate::error::{Error, ErrorKind};

/// Measures that are taken or left out together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Group {
    /// One task with nobody else there: a bare round trip, acquisition and release.
    Alone,
    /// How the rate grows with the number of keys.
    Keys,
    /// The same as [`Alone`](Self::Alone) with other kinds of locks: in order of arrival, as a reader, alone and beside another, of a permit.
    Kinds,
    /// A lock that the tasks of one process fight for.
    Hot,
    /// A lock that several processes fight for.
    Processes,
    /// From a release in one process to the acquisition in another.
    HandOff,
    /// From the end of a holder without a word to the moment when another has its lock.
    Takeover,
    /// Acquisition and release as the delay of the network grows.
    Delay,
    /// What held leases cost the process that holds them.
    Leases,
    /// What held locks and waiters cost the servers.
    Cost,
    /// What becomes of a lock when its holder or its server meets with a fault: who held it when; and updates that are lost without a
    /// lock. On private servers only.
    Faults,
    /// The compliance cases.
    Compliance,
}

impl Group {
    /// All groups, in the order in which they are measured.
    pub const ALL: [Self; 12] = [
        Self::Alone,
        Self::Keys,
        Self::Kinds,
        Self::Hot,
        Self::Processes,
        Self::HandOff,
        Self::Takeover,
        Self::Delay,
        Self::Leases,
        Self::Cost,
        Self::Faults,
        Self::Compliance,
    ];

    /// What it is called where groups are chosen.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Alone => "alone",
            Self::Keys => "keys",
            Self::Kinds => "kinds",
            Self::Hot => "hot",
            Self::Processes => "processes",
            Self::HandOff => "hand-off",
            Self::Takeover => "takeover",
            Self::Delay => "delay",
            Self::Leases => "leases",
            Self::Cost => "cost",
            Self::Faults => "faults",
            Self::Compliance => "compliance",
        }
    }

    /// The names of all groups, in a list for people.
    #[must_use]
    pub fn names() -> String {
        Self::ALL.map(Self::name).join(", ")
    }
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Group {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        let found = Self::ALL.into_iter().find(|group| group.name() == name);
        found.ok_or_else(|| {
            // What was given is not repeated: it may be anything.
            let message = format!("there is no such group of measures; there are {}", Self::names());
            Error::new(ErrorKind::InvalidInput, message)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_found_by_its_name_and_no_other() {
        for group in Group::ALL {
            assert_eq!(group.to_string().parse(), Ok(group));
        }
        assert!(Group::ALL.is_sorted(), "a set of groups lists them in the same order");
        let error = "Hot".parse::<Group>().expect_err("no such group").to_string();
        assert!(Group::ALL.iter().all(|group| error.contains(group.name())), "{error}");
    }
}
