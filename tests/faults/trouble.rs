//! Why a fault was not inflicted as it should have been, and whether another fault explains it.

use std::{error::Error, fmt, io};

use lockkit_testkit::{BoxError, servers::ServerError};

use crate::fault::{Fault, a_lease_may_linger};

/// What kept the nemesis from its work.
#[derive(Debug)]
pub(crate) enum Trouble {
    /// A server did not do what it was told.
    Server(BoxError),
    /// The ensemble has no leader that something could be done to.
    NoLeader,
    /// Nobody came to where the nemesis waited.
    Stuck(String),
    /// The rows of the locks are not there.
    NoRows,
    /// It was all done, and nothing shows it.
    NoEffect(String),
    /// Anything else, which no fault explains.
    Other(BoxError),
}

impl Trouble {
    /// Whether it may come of `other`, which went on while `mine` was inflicted. What no other fault explains is a failure
    /// of the run.
    pub(crate) fn is_due_to(&self, mine: Fault, other: Fault) -> bool {
        let waits_for_rows = |fault| matches!(fault, Fault::LockWait | Fault::Deadlock);
        match self {
            Self::Server(_) => {
                let is_away =
                    matches!(other, Fault::Kill(_) | Fault::KillEmpty(_) | Fault::Freeze(_) | Fault::Connections);
                is_away || waits_for_rows(other) && (waits_for_rows(mine) || matches!(mine, Fault::DeleteAll(_)))
            }
            Self::NoLeader => matches!(other, Fault::Kill(_) | Fault::Freeze(_) | Fault::CutOff(_)),
            Self::NoRows => matches!(other, Fault::DeleteAll(_) | Fault::KillEmpty(_)),
            // A frozen holder, too, can release nothing while the others wait.
            Self::Stuck(_) => {
                let is_frozen = |fault| matches!(fault, Fault::ClientFreeze | Fault::ReaderFreeze);
                let freezes = |fault| if is_frozen(fault) { Fault::ClientKill } else { fault };
                a_lease_may_linger(&[freezes(mine), freezes(other)])
            }
            // A server that is away shows nothing, and nothing passes where replies are held back.
            Self::NoEffect(_) => true,
            Self::Other(_) => false,
        }
    }
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Server(error) => error.fmt(f),
            Self::NoLeader => f.write_str("the ensemble has no leader"),
            Self::Stuck(what) => f.write_str(what),
            Self::NoRows => f.write_str("the locks have no rows"),
            Self::NoEffect(missing) => write!(f, "the fault shows no effect, the nemesis is broken: {missing}"),
            Self::Other(error) => error.fmt(f),
        }
    }
}

impl Error for Trouble {}

impl From<ServerError> for Trouble {
    fn from(error: ServerError) -> Self {
        Self::Server(error.into())
    }
}

impl From<io::Error> for Trouble {
    fn from(error: io::Error) -> Self {
        Self::Other(error.into())
    }
}

impl From<BoxError> for Trouble {
    fn from(error: BoxError) -> Self {
        Self::Other(error)
    }
}

/// That a fault must have been seen to do something.
pub(crate) fn shows(is_shown: bool, missing: impl Into<String>) -> Result<(), Trouble> {
    if is_shown { Ok(()) } else { Err(Trouble::NoEffect(missing.into())) }
}

/// What a trial of the judge runs: of each kind of trouble one that another fault explains, and one that it does not.
pub(crate) fn explains_no_more_than_it_can() -> Result<(), BoxError> {
    use crate::fault::Which::{All, Leader};
    let server = || Trouble::Server("connection refused".into());
    let stuck = || Trouble::Stuck("nobody came".to_owned());
    let cases = [
        (server(), Fault::ScriptFlush, Fault::Kill(All), true),
        (server(), Fault::ScriptFlush, Fault::Cut, false),
        (server(), Fault::Evict, Fault::ClientFreeze, false),
        (server(), Fault::DeleteAll(All), Fault::Deadlock, true),
        (server(), Fault::Connections, Fault::Deadlock, false),
        (Trouble::NoLeader, Fault::CutOff(Leader), Fault::Kill(Leader), true),
        (Trouble::NoLeader, Fault::CutOff(Leader), Fault::ClientKill, false),
        (Trouble::NoRows, Fault::LockWait, Fault::DeleteAll(All), true),
        (Trouble::NoRows, Fault::LockWait, Fault::Freeze(All), false),
        (stuck(), Fault::HolderCutOff, Fault::ClockForward(All), true),
        (stuck(), Fault::HolderCutOff, Fault::Kill(All), false),
        (Trouble::Other("the library is gone".into()), Fault::ClockBack(All), Fault::Kill(All), false),
    ];
    for (trouble, mine, other, expected) in cases {
        if trouble.is_due_to(mine, other) != expected {
            return Err(format!("{mine:?} with {other:?}: {trouble}").into());
        }
    }
    Ok(())
}
