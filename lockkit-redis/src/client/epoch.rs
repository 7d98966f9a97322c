//! Whose leases count when servers can take over from each other: with sentinels, and in a cluster.
//!
//! Replication is asynchronous, so a server that takes over may lack leases, and changes to leases, of its predecessor.
//! Nothing that it has can tell. Two rules make up for it, and neither trusts what was replicated:
//!
//! 1. **A lease can be renewed only by the server that granted it**, in the same epoch: each lease carries the mark of
//!    the epoch in its value. So when a server takes over, the leases of its predecessor end within their ttl, for all
//!    holders, whether or not they were replicated.
//! 2. **A server that took over grants nothing for the longest ttl.** When it grants again, those leases have lapsed.
//!    (This is Redlock's delayed restart.)
//!
//! The epoch is found out on each new connection, by a script that leaves a note of it on the server, so that all
//! clients see the same pause. Every script that grants or renews then checks that it is still the same.

use std::time::Duration;

use lockkit_core::{Error, ErrorKind, Fence, HolderInfo, Moment, Result};
use redis::{Cmd, RedisError, Value};

use crate::wire::{
    error::{self, Sent},
    redirect::Redirect,
    scripts::EPOCH,
};

/// A server's time in charge.
#[derive(Clone, Debug)]
pub(crate) struct Epoch {
    /// What the server's note says.
    pub(crate) note: String,
    /// What its leases are marked with: `@` and 8 hexadecimal digits.
    pub(crate) mark: String,
    /// By whose clock the moments are that the server has noted: `@` and 8 hexadecimal digits of its run id. Two clients may know one
    /// run by two epochs.
    pub(crate) run_mark: String,
    /// The server's replication id.
    pub(crate) id: String,
    /// From when on it may grant.
    pub(crate) grants_from: Moment,
    /// Grant above this: the moment from which on it may grant, on the server's clock in microseconds. It is above all
    /// that its predecessor gave out by *its* clock, so that a counter that lagged behind does no harm.
    pub(crate) floor: Fence,
}

impl Epoch {
    /// What to ask a server that was just connected to. `key` is that of the server's note, and `seen` what it said when this client
    /// saw it last; empty if it did not.
    pub(crate) fn question(key: &str, seen: &str, pause: Duration) -> Cmd {
        let mut request = EPOCH.by_own_code(1);
        request.arg(key).arg(u64::try_from(pause.as_millis()).unwrap_or(u64::MAX)).arg(seen);
        request
    }

    /// Takes the answer, after which it is `now`.
    ///
    /// # Errors
    /// `Unavailable` if the server is a replica; what it answers otherwise. Without effect on any lock.
    pub(crate) fn answer(reply: Value, now: Moment) -> Result<Self> {
        match reply {
            Value::ServerError(e) => Err(refused(e.into())),
            reply => Self::read(reply, now),
        }
    }

    fn read(reply: Value, now: Moment) -> Result<Self> {
        let odd = || error::odd_reply(Sent::No);
        let (note, left, from): (String, u64, u64) = redis::from_redis_value(reply).map_err(|_| odd())?;
        let mark = format!("@{}", note.get(..8).ok_or_else(odd)?);
        let part = |at| note.split(':').nth(at).ok_or_else(odd);
        let run_mark = format!("@{}", part(1)?.get(..8).ok_or_else(odd)?);
        let id = part(2)?.to_owned();
        Ok(Self {
            note,
            mark,
            run_mark,
            id,
            // Rounded up.
            grants_from: now + Duration::from_millis(left.saturating_add(u64::from(left > 0))),
            floor: Fence::new(from.saturating_mul(1000)),
        })
    }

    /// For how long it grants nothing yet.
    pub(crate) fn pause(&self, now: Moment) -> Option<Duration> {
        Some(self.grants_from.since(now)).filter(|left| !left.is_zero())
    }
}

/// In a cluster the map can be older than what the member says: then the error points to where it is wrong.
fn refused(cause: RedisError) -> Error {
    let error = error::map(&cause, Sent::No);
    let Some(to) = Redirect::of(&error) else { return error };
    let message = format!("the server does not serve slot {} any more, where its note was", to.slot);
    Error::new(ErrorKind::Unavailable, message).with_source(cause)
}

/// Who is in the way while a server grants nothing: whoever may still believe in a lease of its predecessor.
pub(crate) fn predecessors_holder() -> HolderInfo {
    HolderInfo::new("unknown: another server took over, and leases of the former one may not have lapsed")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read_whatever_they_say() {
        let now = Moment::from_nanos(7);
        let read = |note: &str, left: u64, from: u64| {
            let number = |number: u64| Value::BulkString(number.to_string().into());
            Epoch::read(Value::Array(vec![Value::BulkString(note.into()), number(left), number(from)]), now)
        };
        let epoch = read("0123456789:abcdef0123:id:7?", 0, 7).expect("an epoch");
        assert_eq!((&*epoch.mark, &*epoch.run_mark), ("@01234567", "@abcdef01"));
        assert_eq!((&*epoch.id, epoch.floor), ("id", Fence::new(7000)));
        assert_eq!((epoch.pause(now), epoch.grants_from), (None, now));
        let late = read("0123456789:abcdef0123:id:7", u64::MAX, u64::MAX).expect("an epoch");
        assert!(late.pause(now).is_some() && late.floor == Fence::new(u64::MAX));
        for note in ["", "0123456789:run"] {
            assert_eq!(read(note, 0, 7).expect_err(note).kind(), ErrorKind::Unexpected);
        }
    }
}
