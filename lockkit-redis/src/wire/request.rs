//! A request to take or to end a lease, as `batch.lua` wants it.

use std::{
    fmt::Write,
    ops::Range,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use lockkit_core::{Claim, Fence, FenceClock, FenceRequest, HolderInfo, Token};
use redis::{Cmd, Value};

use crate::wire::{
    name,
    scripts::{BATCH, BATCH_GUARDED, Script},
    value,
};

/// The keys and arguments of a request for a lease.
const MOST_PARTS: usize = 8;

/// A request: its keys and its arguments, one after the other in one text.
///
/// It is kept in a box, for it passes through many hands: each would need room for it.
#[derive(Debug)]
pub(crate) struct Request {
    text: String,
    /// Where each of them ends.
    ends: [u32; MOST_PARTS],
    parts: u8,
    keys: u8,
}

impl Request {
    /// Asks for a lease, which is to have this mark. What time it is decides how a fence that is asked for is kept.
    pub(crate) fn acquire(
        lock: &str,
        claim: &Claim,
        holder: &HolderInfo,
        ttl_ms: u64,
        fence: FenceRequest,
        mark: &str,
        now: SystemTime,
    ) -> Box<Self> {
        let mut request = Self::with_capacity(2 * lock.len() + holder.as_str().len() + 150, 2);
        request.part(|text| text.push_str(lock));
        request.part(|text| name::push_counter(text, lock));
        request.part(|text| value::push_head(text, &claim.token, 1));
        request.part(|text| value::push_tail(text, fence.span, mark, holder));
        request.number(ttl_ms);
        request.number(u64::from(fence.span));
        request.number(fence.floor.offset(1).get());
        request.part(|text| text.push_str(first_fence(&fence, now)));
        request
    }

    /// Adds the arguments of a request for a lease to a command of another script.
    pub(crate) fn push_arguments(&self, command: &mut Cmd) {
        for argument in self.arguments() {
            command.arg(argument);
        }
    }

    /// Ends a lease.
    pub(crate) fn release(lock: &str, token: &Token) -> Box<Self> {
        let mut request = Self::with_capacity(lock.len() + Token::TEXT_LEN + 1, 1);
        request.part(|text| text.push_str(lock));
        request.part(|text| value::push_token(text, token));
        request
    }

    fn with_capacity(bytes: usize, keys: u8) -> Box<Self> {
        Box::new(Self { text: String::with_capacity(bytes), ends: [0; MOST_PARTS], parts: 0, keys })
    }

    fn part(&mut self, push: impl FnOnce(&mut String)) {
        push(&mut self.text);
        self.ends[usize::from(self.parts)] = u32::try_from(self.text.len()).unwrap_or(u32::MAX);
        self.parts += 1;
    }

    fn number(&mut self, number: u64) {
        // A text takes all that is written to it.
        self.part(|text| _ = write!(text, "{number}"));
    }

    fn parts(&self, which: Range<u8>) -> impl Iterator<Item = &str> {
        let end = |part: u8| self.ends[usize::from(part)] as usize;
        which.map(move |part| &self.text[part.checked_sub(1).map_or(0, end)..end(part)])
    }

    fn keys(&self) -> impl Iterator<Item = &str> {
        self.parts(0..self.keys)
    }

    fn arguments(&self) -> impl Iterator<Item = &str> {
        self.parts(self.keys..self.parts)
    }
}

/// Which fence a grant begins with, in the words of `batch.lua`.
fn first_fence(fence: &FenceRequest, now: SystemTime) -> &'static str {
    match fence.clock {
        // The next of the counter.
        FenceClock::Store => "next",
        // The one that is asked for, if the counter is below. Where that is this client's clock to within a day, its counter need
        // not be kept anew each time.
        FenceClock::Floor if is_today(fence.floor, now) => "clock",
        FenceClock::Floor => "asked",
    }
}

/// A command that carries requests out, with a last argument for what goes before the script.
pub(crate) fn command<'a>(
    script: &Script,
    requests: impl Iterator<Item = &'a Request> + Clone,
    last: Option<&'a str>,
) -> Cmd {
    let sum = |of: fn(&Request) -> usize| requests.clone().map(of).sum::<usize>();
    let (keys, parts) = (sum(|request| request.keys.into()), sum(|request| request.parts.into()));
    let bytes = sum(|request| request.text.len());
    let mut cmd = script.by_hash(keys, parts - keys + last.map_or(0, |_| 1), bytes + last.map_or(0, str::len));
    for key in requests.clone().flat_map(Request::keys) {
        cmd.arg(key);
    }
    for argument in requests.flat_map(Request::arguments).chain(last) {
        cmd.arg(argument);
    }
    cmd
}

/// A command that carries out a single request; with a `guard` only on the server with this replication id.
pub(crate) fn alone(request: &Request, guard: Option<&str>) -> Cmd {
    command(if guard.is_some() { &BATCH_GUARDED } else { &BATCH }, std::iter::once(request), guard)
}

/// The answer to a request that was alone; or the error of all.
pub(crate) fn only_answer(reply: Value) -> Value {
    match reply {
        Value::Array(answers) => match <[Value; 1]>::try_from(answers) {
            Ok([answer]) => answer,
            Err(answers) => Value::Array(answers),
        },
        other => other,
    }
}

/// Whether a fence is this client's clock, in microseconds, to within a day.
fn is_today(fence: Fence, now: SystemTime) -> bool {
    now.duration_since(UNIX_EPOCH).unwrap_or_default().abs_diff(Duration::from_micros(fence.get()))
        < Duration::from_secs(24 * 3600)
}

#[cfg(test)]
mod tests {
    use lockkit_core::{LockKey, Mode};

    use super::*;

    fn claim() -> Claim {
        let (key, token) = (LockKey::new("k").expect("key"), Token::random().expect("random"));
        Claim { key, token, mode: Mode::Exclusive }
    }

    #[test]
    fn requests_share_a_command() {
        let claim = claim();
        let (token, holder) = (claim.token.reveal(), HolderInfo::new("me"));
        let fence = FenceRequest { floor: Fence::new(9), span: 12, clock: FenceClock::Store };
        let requests = [
            Request::acquire("p:k", &claim, &holder, 5000, fence, "", UNIX_EPOCH),
            Request::release("p:k", &claim.token),
        ];
        let cmd = command(&BATCH, requests.iter().map(|request| &**request), Some("last"));
        let args = cmd.args_iter().skip(2).map(|arg| match arg {
            redis::Arg::Simple(bytes) => String::from_utf8_lossy(bytes).into_owned(),
            _ => String::new(),
        });
        let (head, tail, token) = (format!("{token}:1:"), ":12:me".to_owned(), format!("{token}:"));
        let expected = ["3", "p:k", "{p:k}:fence", "p:k", &head, &tail, "5000", "12", "10", "next", &token, "last"];
        assert_eq!(args.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn fences_that_go_with_the_clock_are_told_from_others() {
        let hours = |hours: u64| Duration::from_secs(hours * 3600);
        let now = hours(500_000);
        let is_today = |moment: Duration| {
            is_today(Fence::new(u64::try_from(moment.as_micros()).expect("micros")), UNIX_EPOCH + now)
        };
        assert!(is_today(now - hours(23)) && is_today(now + hours(23)));
        assert!(!is_today(now - hours(25)) && !is_today(now + hours(25)) && !is_today(hours(0)));
    }
}
