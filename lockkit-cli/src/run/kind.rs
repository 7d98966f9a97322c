//! How `lockkit run` is to hold its lock.

use std::num::NonZeroU32;

use clap::Args as ClapArgs;
use lockkit::{Lock, LockKey, Locker, Mode};

/// Without one of these the lock is exclusive, and waiters come in no order.
#[derive(Clone, Copy, Debug, Default, ClapArgs)]
#[group(multiple = false)]
pub(super) struct Kind {
    /// Hold the lock together with others that read; writers wait, and readers behind a waiting writer
    #[arg(long)]
    read: bool,
    /// Hold the lock alone, in the order of arrival among readers and writers
    #[arg(long)]
    write: bool,
    /// Hold one of N permits of a semaphore; all its users must give the same N
    #[arg(long, value_name = "N")]
    permit: Option<NonZeroU32>,
    /// Hold the lock alone, first come, first served
    #[arg(long)]
    fifo: bool,
}

impl Kind {
    pub(super) fn lock(self, locker: &Locker, key: &LockKey) -> Lock {
        let key = key.as_str();
        match self {
            Self { read: true, .. } => locker.rw_lock(key).read(),
            Self { write: true, .. } => locker.rw_lock(key).write(),
            Self { permit: Some(permits), .. } => locker.semaphore(key, permits),
            Self { fifo: true, .. } => locker.lock(key).fifo(),
            _ => locker.lock(key),
        }
    }

    fn mode(self) -> Mode {
        match self {
            Self { read: true, .. } => Mode::Shared,
            Self { permit: Some(limit), .. } => Mode::Permit { limit },
            _ => Mode::Exclusive,
        }
    }

    /// Whether a run inside another, which holds the lock in this mode, may run on that lease.
    pub(super) fn is_covered_by(self, held: Mode) -> bool {
        held == Mode::Exclusive || held == self.mode()
    }
}
