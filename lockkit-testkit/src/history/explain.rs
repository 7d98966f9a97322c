//! A violation, in the words that a person needs: who, when, which grant.

use std::fmt;

/// A rule of a history.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rule {
    /// No two holders are told at the same moment that the lock is theirs.
    Overlap,
    /// A grant that is asked for after another was returned has a greater fence; no two leases have the same, and nested
    /// grants have that of their lease.
    FenceOrder,
    /// Who holds an older fence is told so no more once a newer one was returned. This follows from exclusion and from the
    /// order of fences together, and so it is claimed only where both are.
    Superseded,
    /// No answer contradicts what was answered before: a lease that is held after it was lost.
    Answer,
    /// A lease is taken by another only where another asked. Where leases end before their time, the one who took it may be
    /// the holder itself, with a request of which it never heard, and so it is claimed only where they don't.
    Rival,
    /// A fenced resource admits exactly who is not late, and no update is lost.
    Resource,
    /// A lock that must be free is granted in time.
    Liveness,
    /// A lock that somebody asks for and nobody has is granted in time. Claimed only where that time is said
    /// ([`check_reach`](super::check_reach)).
    Reach,
    /// A lock that all ask for in order is granted in the order in which they came: to none before one that had its place in the
    /// queue already. Judged where somebody [looks](super::What::Look) at the queue, and nothing is wrong meanwhile: a place may be
    /// lost with a connection, or by one that stands still.
    Order,
    /// The history is one that somebody can have lived through: what is heard was asked, once; what is used was granted;
    /// nothing is missing in the record of a resource. If not, it is the recording that is wrong, whatever the store did.
    Record,
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Overlap => "two holders at once",
            Self::FenceOrder => "fences out of order",
            Self::Superseded => "an older holder believes after a newer one",
            Self::Answer => "an answer that can't be true",
            Self::Rival => "taken by another who never was",
            Self::Resource => "fenced resource corrupted",
            Self::Liveness => "lock not to be had",
            Self::Reach => "lock out of reach",
            Self::Order => "granted out of order",
            Self::Record => "a record that can't be",
        })
    }
}

/// Somebody who takes part in a violation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Party {
    /// Which process.
    pub process: String,
    /// Which operation acquired the lock.
    pub grant: Option<u64>,
    /// With which fence.
    pub fence: Option<u64>,
    /// What it did from when to when, in nanoseconds of the history's clock.
    pub from: u64,
    /// See [`from`](Self::from).
    pub to: u64,
}

/// Something that must not have happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Which rule was broken.
    pub rule: Rule,
    /// For which lock.
    pub key: String,
    /// When, in nanoseconds of the history's clock.
    pub at: u64,
    /// Until when, if it lasted.
    pub until: u64,
    /// By whom; the one who came first is first.
    pub parties: Vec<Party>,
    /// What happened, in a sentence.
    pub text: String,
    /// Where the history begins, so that times can be told from there.
    pub(super) origin: u64,
}

impl Violation {
    /// A moment as seconds since the history began.
    pub(super) fn seconds(&self, at: u64) -> f64 {
        at.saturating_sub(self.origin) as f64 / 1e9
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {:?} at {:.6} s", self.rule, self.key, self.seconds(self.at))?;
        write!(f, "  {}", self.text)?;
        for party in &self.parties {
            write!(f, "\n  {:<8}", party.process)?;
            if let Some(grant) = party.grant {
                write!(f, " grant {grant}")?;
            }
            if let Some(fence) = party.fence {
                write!(f, " fence {fence}")?;
            }
            write!(f, " from {:.6} s to {:.6} s", self.seconds(party.from), self.seconds(party.to))?;
        }
        Ok(())
    }
}
