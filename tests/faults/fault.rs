//! The faults: which there are for a store, and what may come of them.

use lockkit::Fencing;

use crate::target::Kind;

/// Something that goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Fault {
    /// Nothing does.
    Nothing,
    /// A client is killed while it holds a lock, and started again.
    ClientKill,
    /// A client stands still past its lease, between its last check and its write.
    ClientFreeze,
    /// A reader and the holder of a permit are killed, and started again.
    SharersKill,
    /// A reader stands still past its lease.
    ReaderFreeze,
    /// All that wait for a lock are killed while it is held, and started again.
    WaitersKill,
    /// Nothing comes through between a holder and the store any more, in both directions, past its lease.
    HolderCutOff,
    /// All connections are reset, again and again.
    Cut,
    /// Requests arrive, and no reply comes back, for longer than a lease.
    HeldReplies,
    /// Everything takes longer.
    Delay,
    /// Requests take effect and their replies are lost.
    ReplyLost,
    /// Servers are killed and come back with their data.
    Kill(Which),
    /// Servers are killed and come back without data.
    KillEmpty(Which),
    /// Servers stand still for longer than a lease.
    Freeze(Which),
    /// Nothing comes through any more between a server and the others, until they notice.
    CutOff(Which),
    /// The server forgets its scripts, again and again.
    ScriptFlush,
    /// All data is deleted under a holder.
    DeleteAll(Which),
    /// The server evicts everything for want of memory, under a holder.
    Evict,
    /// The server takes no more connections, and the clients lose theirs.
    Connections,
    /// Another transaction keeps the rows of the locks locked.
    LockWait,
    /// Another transaction locks the same rows in the opposite order.
    Deadlock,
    /// The server's wall clock is set forward by an hour, under a holder.
    ClockForward(Which),
    /// The server's wall clock is set back by an hour, and right again.
    ClockBack(Which),
}

/// Which of a store's servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Which {
    All,
    One,
    Two,
    Three,
    Leader,
    Follower,
}

impl Which {
    fn words(self) -> &'static str {
        match self {
            Self::All => "the server",
            Self::One => "one node",
            Self::Two => "two nodes",
            Self::Three => "three nodes",
            Self::Leader => "the leader",
            Self::Follower => "a follower",
        }
    }
}

impl Fault {
    /// Those of a store.
    pub(crate) fn of(kind: Kind) -> Vec<Self> {
        let mut all = Self::OF_CLIENTS.to_vec();
        if kind.has_every_mode() {
            all.extend([Self::SharersKill, Self::ReaderFreeze, Self::WaitersKill]);
        }
        all.extend(Self::of_servers(kind));
        all
    }

    /// Whether it befalls the servers of a store.
    pub(crate) fn is_of_servers(self, kind: Kind) -> bool {
        Self::of_servers(kind).contains(&self)
    }

    /// What befalls clients and the network.
    const OF_CLIENTS: [Self; 8] = [
        Self::Nothing,
        Self::ClientKill,
        Self::ClientFreeze,
        Self::HolderCutOff,
        Self::Cut,
        Self::HeldReplies,
        Self::Delay,
        Self::ReplyLost,
    ];

    fn of_servers(kind: Kind) -> Vec<Self> {
        use Which::{All, Follower, Leader, One, Three, Two};
        match kind {
            Kind::Redis | Kind::RedisNewer | Kind::Valkey => vec![
                Self::Kill(All),
                Self::KillEmpty(All),
                Self::Freeze(All),
                Self::ScriptFlush,
                Self::DeleteAll(All),
                Self::Evict,
                Self::Connections,
                Self::ClockForward(All),
                Self::ClockBack(All),
            ],
            Kind::Redlock => vec![
                Self::Kill(Two),
                Self::KillEmpty(One),
                Self::Freeze(Two),
                Self::Freeze(Three),
                Self::DeleteAll(One),
                Self::ClockForward(One),
                Self::ClockBack(One),
            ],
            Kind::MariaDb | Kind::MySql => vec![
                Self::Kill(All),
                Self::KillEmpty(All),
                Self::Freeze(All),
                Self::DeleteAll(All),
                Self::LockWait,
                Self::Deadlock,
                Self::Connections,
                Self::ClockForward(All),
                Self::ClockBack(All),
            ],
            Kind::ZooKeeper | Kind::ZooKeeperNewer => vec![Self::Kill(All), Self::KillEmpty(All), Self::Freeze(All)],
            Kind::Ensemble => {
                let at = [Leader, Follower].into_iter();
                at.flat_map(|which| [Self::Kill(which), Self::Freeze(which), Self::CutOff(which)]).collect()
            }
        }
    }

    /// Its name in a trial and in the history.
    pub(crate) fn name(self) -> String {
        format!("{self:?}").chars().fold(String::new(), |mut name, c| {
            if c.is_uppercase() && !name.is_empty() && !name.ends_with('_') {
                name.push('_');
            }
            match c {
                '(' => {}
                ')' => {}
                c => name.extend(c.to_lowercase()),
            }
            name
        })
    }

    /// Its name for readers.
    pub(crate) fn words(self, kind: Kind) -> String {
        let session = kind.is_zookeeper();
        match self {
            Self::Nothing => "nothing".into(),
            Self::ClientKill => "a holder is killed".into(),
            Self::ClientFreeze => "a holder is frozen past its lease".into(),
            Self::SharersKill => "a reader and the holder of a permit are killed".into(),
            Self::ReaderFreeze => "a reader is frozen past its lease".into(),
            Self::WaitersKill => "all that wait for a lock are killed".into(),
            Self::HolderCutOff if session => "a holder is cut off until its session expires".into(),
            Self::HolderCutOff => "a holder is cut off past its lease (half-open)".into(),
            Self::Cut => "connections are reset".into(),
            Self::HeldReplies => "no reply comes back, past the lease".into(),
            Self::Delay => "everything is delayed".into(),
            Self::ReplyLost => "replies are lost after the effect".into(),
            Self::Kill(which) => format!("{} killed, back with all data", which.words()),
            Self::KillEmpty(which) => format!("{} killed, back without data", which.words()),
            Self::Freeze(which) => format!("{} frozen past the lease", which.words()),
            Self::CutOff(which) => format!("{} cut off from the others until they notice", which.words()),
            Self::ScriptFlush => "scripts are flushed".into(),
            Self::DeleteAll(Which::All) if kind.is_sql() => "all rows are deleted".into(),
            Self::DeleteAll(Which::All) => "all keys are deleted (FLUSHALL)".into(),
            Self::DeleteAll(which) => format!("all keys of {} are deleted", which.words()),
            Self::Evict => "locks are evicted (maxmemory)".into(),
            Self::Connections => "connections are exhausted".into(),
            Self::LockWait => "lock waits (1205)".into(),
            Self::Deadlock => "deadlocks (1213)".into(),
            Self::ClockForward(which) => format!("the wall clock of {} an hour forward", which.words()),
            Self::ClockBack(which) => format!("the wall clock of {} an hour back, and right again", which.words()),
        }
    }

    /// Whether the server's wall clock has to be one that can be moved.
    pub(crate) fn needs_clock(self) -> bool {
        matches!(self, Self::ClockForward(_) | Self::ClockBack(_))
    }

    /// Whether the nemesis can do both at once. It makes statements wait by `SLEEP`, which goes by the server's wall clock:
    /// set back meanwhile, it lasts until that has caught up. And of two faults that kill or freeze workers, one would take away the
    /// worker that the other has chosen.
    pub(crate) fn goes_with(self, other: Self) -> bool {
        let of_workers = |fault| {
            matches!(
                fault,
                Self::ClientKill | Self::ClientFreeze | Self::SharersKill | Self::ReaderFreeze | Self::WaitersKill
            )
        };
        if of_workers(self) && of_workers(other) {
            return false;
        }
        let sleeps = |fault| matches!(fault, Self::LockWait | Self::Deadlock);
        !(sleeps(self) && other.needs_clock() || sleeps(other) && self.needs_clock())
    }

    /// Whether the servers must not claim to keep what this makes them forget.
    pub(crate) fn needs_forgetful(self) -> bool {
        matches!(self, Self::KillEmpty(Which::One))
    }

    /// Whether the unfenced twin must show it: somebody is past its check when the lock goes to the next.
    pub(crate) fn shows_on_twin(self) -> bool {
        match self {
            Self::ClientFreeze | Self::HolderCutOff | Self::Evict => true,
            Self::KillEmpty(which) | Self::DeleteAll(which) | Self::ClockForward(which) => which == Which::All,
            _ => false,
        }
    }

    /// Whether it lasts longer than a lease that is not renewed meanwhile, so that a holder must learn of its loss.
    pub(crate) fn costs_a_lease(self) -> bool {
        self.outlasts_leases() || self == Self::ReaderFreeze
    }

    /// Whether nobody can renew or release anything for longer than a lease.
    pub(crate) fn outlasts_leases(self) -> bool {
        matches!(self, Self::HeldReplies | Self::Freeze(Which::All | Which::Three))
    }

    /// Whether a holder is kept at its lock from beginning to end. (The others choose one of their own.)
    pub(crate) fn has_a_holder(self) -> bool {
        let chooses = matches!(self, Self::ClientKill | Self::SharersKill | Self::ReaderFreeze | Self::WaitersKill);
        !self.shows_on_twin() && !chooses
    }

    /// Whether two may believe at once: where a store loses leases before they end (docs/guarantees.md). One node of a
    /// quorum is enough, for a lease that was fought for may have no more than a majority. (A clock that is set right is set
    /// forward, and a node that restarts without its data does not vote.)
    pub(crate) fn may_overlap(self) -> bool {
        match self {
            Self::Evict | Self::DeleteAll(_) | Self::ClockForward(_) | Self::ClockBack(_) => true,
            Self::KillEmpty(which) => which == Which::All,
            _ => false,
        }
    }

    fn loses_data(self) -> bool {
        matches!(self, Self::KillEmpty(_) | Self::DeleteAll(_) | Self::Evict)
    }
}

/// Whether a lease may last longer than it was asked for (docs/guarantees.md): the server's clock was ahead when it was
/// granted, and is set right again, and its holder can't release it any more, or not for as long as it was asked for: a release that
/// was not answered by then is given up.
pub(crate) fn a_lease_may_linger(faults: &[Fault]) -> bool {
    let keeps_releases_away = |fault: &Fault| match fault {
        Fault::ClientKill
        | Fault::SharersKill
        | Fault::WaitersKill
        | Fault::HolderCutOff
        | Fault::Connections
        | Fault::Kill(Which::All) => true,
        fault => fault.outlasts_leases(),
    };
    faults.contains(&Fault::ClockForward(Which::All)) && faults.iter().any(keeps_releases_away)
}

/// Whether a store claims that its fences grow through all of these together.
pub(crate) fn fences_hold(claim: Fencing, faults: &[Fault]) -> bool {
    let lost = faults.iter().any(|fault| fault.loses_data());
    let back = faults.iter().any(|fault| matches!(fault, Fault::ClockForward(_) | Fault::ClockBack(_)));
    match claim {
        // What a single node of a durable quorum loses, it loses against its word.
        Fencing::Strict | Fencing::BestEffort => !lost,
        Fencing::Hybrid => !(lost && back),
        _ => false,
    }
}
