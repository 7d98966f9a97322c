//! Requests about locks that are shared, or whose waiters have an order, as `queue.lua` wants them.
//!
//! Where servers can take over from each other, leases have a mark, and the epoch is to be added behind each of these.

use lockkit_core::{AcquireRequest, Mode, Renewal, Token, store::PLACE};
use redis::Cmd;

use crate::wire::{
    name,
    scripts::{QUEUE, QUEUE_GUARDED},
    value,
};

/// What is to be done.
#[derive(Clone, Copy, Debug)]
enum Step {
    Take,
    /// Take the lock in the place of another lease.
    Replace,
    Renew,
    End,
}

impl Step {
    /// Its name in the script.
    fn name(self) -> &'static str {
        match self {
            Self::Take => "take",
            Self::Replace => "replace",
            Self::Renew => "renew",
            Self::End => "end",
        }
    }
}

/// Takes the lock with a fence from `first` on; or, if there is a channel to listen at, a place in its queue.
pub(crate) fn take(
    mark: Option<&str>,
    lock: &str,
    request: &AcquireRequest,
    ttl_ms: u64,
    first: u64,
    channel: Option<&str>,
) -> Cmd {
    let AcquireRequest { claim, fence, holder, from, .. } = request;
    let step = if from.is_some() { Step::Replace } else { Step::Take };
    let mut take = command(mark, lock, step, &claim.token);
    take.arg(first).arg(1);
    let mut tail = String::with_capacity(holder.as_str().len() + 24);
    value::push_tail(&mut tail, fence.span, mark.unwrap_or_default(), holder);
    let kept = channel.map_or(0, |_| PLACE.as_millis());
    let mode = match claim.mode {
        Mode::Shared => "s".to_owned(),
        Mode::Permit { limit } => format!("p{limit}"),
        _ => "x".to_owned(),
    };
    take.arg(mode).arg(ttl_ms).arg(fence.span).arg(fence.floor.offset(1).get());
    take.arg(kept.to_string()).arg(channel.unwrap_or_default()).arg(tail);
    if let Some(from) = from {
        take.arg(from.reveal());
    }
    take
}

/// Renews a lease that shares its lock.
pub(crate) fn renew(mark: Option<&str>, lock: &str, renewal: &Renewal, ttl_ms: u64) -> Cmd {
    let text = |text: Option<String>| text.unwrap_or_default();
    let mut renew = command(mark, lock, Step::Renew, &renewal.claim.token);
    renew.arg(1).arg(0).arg(ttl_ms).arg(renewal.depth);
    renew.arg(text(renewal.holder.as_ref().map(|holder| format!(":{}", holder.as_str()))));
    renew.arg(text(renewal.fence_floor.map(|floor| floor.get().to_string())));
    renew
}

/// Ends a lease, or gives up a place; if the lock may be granted, the next gets it, with a fence from `first` on.
pub(crate) fn end(mark: Option<&str>, lock: &str, token: &Token, first: u64, may_grant: bool) -> Cmd {
    let mut end = command(mark, lock, Step::End, token);
    end.arg(first).arg(u8::from(may_grant));
    end
}

fn command(mark: Option<&str>, lock: &str, step: Step, token: &Token) -> Cmd {
    let script = if mark.is_some() { &QUEUE_GUARDED } else { &QUEUE };
    let keys = name::all(lock);
    let mut command = script.by_hash(keys.len(), 14, 8 * lock.len() + 500);
    command.arg(&keys).arg(step.name()).arg(token.reveal());
    command
}
