//! The holders of locks, and those whom a migration does not know.

use super::{
    floor::OWN,
    migration::Migration,
    phase::{Phase, Side},
    record::{PhaseRecord, unmark},
};
use crate::{Error, ErrorKind, Holder, LockKey, LockStore, Query, Result};

/// A holder of a lock in one of the stores.
#[derive(Clone, Debug)]
pub struct Seen {
    /// The lock.
    pub key: LockKey,
    /// The store.
    pub side: Side,
    /// As what it holds the lock; `None` if it is no client of the migration, or of another one.
    pub phase: Option<Phase>,
    /// The holder.
    pub holder: Holder,
}

impl Migration {
    /// Whether a lock is for the use of migrations themselves, and not of a service.
    #[must_use]
    pub fn is_own(key: &LockKey) -> bool {
        key.as_str().starts_with(OWN)
    }

    /// All holders of locks, as the stores show them.
    ///
    /// # Errors
    /// As [`state`](Self::state); as those of [`LockStore::inspect`], for a store of the phase.
    pub async fn holders(&self) -> Result<Vec<Seen>> {
        let record = self.state().await?.record;
        self.holders_of(&record).await
    }

    pub(super) async fn holders_of(&self, record: &PhaseRecord) -> Result<Vec<Seen>> {
        let mut seen = Vec::new();
        let every = Query::Prefix(String::new());
        let (old, new) = tokio::join!(self.pair.at(Side::Old).inspect(&every), self.pair.at(Side::New).inspect(&every));
        for (side, locks) in Side::ALL.into_iter().zip([old, new]) {
            let locks = match locks {
                Ok(locks) => locks,
                Err(error) if record.phase.uses(side) => return Err(error),
                Err(_) => continue,
            };
            // Locks for the migration's own use may be left by whoever was killed while it moved on.
            for lock in locks.into_iter().filter(|lock| !Self::is_own(&lock.key)) {
                for mut holder in lock.holders {
                    let (info, phase) = unmark(&holder.info, &record.id);
                    holder.info = info;
                    seen.push(Seen { key: lock.key.clone(), side, phase, holder });
                }
            }
        }
        Ok(seen)
    }

    /// Clients that know nothing of the migration are the one danger that its rules don't see to.
    pub(super) async fn check_others(&self, record: &PhaseRecord) -> Result<()> {
        if self.despite_others {
            return Ok(());
        }
        let seen = self.holders_of(record).await?;
        let others = || seen.iter().filter(|seen| seen.phase.is_none() && record.phase.uses(seen.side));
        let Some(first) = others().next() else { return Ok(()) };
        let mut why = format!(
            "locks held by clients that know nothing of the migration: {}, such as {:?}, held by {:?} in the {} store",
            others().count(),
            first.key,
            first.holder.info,
            first.side
        );
        let kept = others().filter(|seen| seen.holder.info.is_done()).count();
        if kept > 0 {
            why += &format!(
                "; {kept} of them kept for a time after the work (keep_for): wait for the end of that, or break them"
            );
        }
        Err(Error::new(ErrorKind::Misconfigured, why))
    }

    /// Refuses to end the migration while a client of it holds a lock.
    pub(super) async fn check_nobody_holds(&self, record: &PhaseRecord) -> Result<()> {
        let Some(seen) = self.holders_of(record).await?.into_iter().find(|seen| seen.phase.is_some()) else {
            return Ok(());
        };
        let why = format!("{} holds {:?} as a client of the migration", seen.holder.info, seen.key);
        Err(Error::new(ErrorKind::Unavailable, why))
    }
}
