//! The string stored at a lock's key: `<token>:<depth>:<fence>:<span>[@<epoch>]:<holder>`.
//!
//! Token: 32 lower-case hexadecimal digits. Depth, fence and span: decimal. Epoch: 8 hexadecimal digits, only where
//! servers can take over from each other (see [`epoch`](crate::client::epoch)). Holder: the rest, any text. Whatever does not
//! have this form belongs to a client that is not lockkit, and excludes us all the same.
//!
//! While a lock is shared there is `#s:<fence>[@<run>]` or `#p<limit>:<fence>[@<run>]` in its place, with 8 digits of the server's run id, and
//! each lease has such a string in a hash beside it; or that string of the first lease behind `#s:` or `#p<limit>:` (see `queue.lua`).

use std::time::Duration;

use lockkit_core::{Error, Fence, HolderInfo, Mode, Result, Token, store::FENCE_ROOM};

/// Fences must be exact in Lua, whose numbers are doubles.
const MAX_FENCE: u64 = 1 << 53;

/// What is stored at a lock's key.
#[derive(Debug, PartialEq)]
pub(crate) enum Stored {
    /// A lease of lockkit, and nobody shares the lock with it.
    Lease(Mode, StoredLease),
    /// The lock is shared, by leases of this mode that are stored elsewhere.
    Shared(Mode),
    /// Another client's value. What it says is not kept: it may be that client's token, or anybody's data.
    Foreign,
}

/// A lease as it is stored.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct StoredLease {
    pub(crate) token: Token,
    pub(crate) depth: u32,
    pub(crate) fence: Fence,
    pub(crate) span: u32,
    pub(crate) holder: HolderInfo,
}

impl Stored {
    /// Reads a stored value.
    pub(crate) fn parse(value: &[u8]) -> Self {
        let Ok(text) = str::from_utf8(value) else { return Self::Foreign };
        let stored = match text.strip_prefix('#').and_then(|shared| shared.split_once(':')) {
            Some((mode, rest)) => match self::mode(mode).filter(|mode| *mode != Mode::Exclusive) {
                Some(mode) if number(unmarked(rest.as_bytes())).is_some() => Some(Self::Shared(mode)),
                Some(mode) => lease(rest).map(|lease| Self::Lease(mode, lease)),
                None => None,
            },
            None => lease(text).map(|lease| Self::Lease(Mode::Exclusive, lease)),
        };
        stored.unwrap_or(Self::Foreign)
    }

    /// The name of the holder.
    pub(crate) fn into_holder(self) -> HolderInfo {
        match self {
            Self::Lease(_, lease) => lease.holder,
            Self::Shared(Mode::Permit { limit }) => HolderInfo::new(&format!("holders of {limit} permits")),
            Self::Shared(_) => HolderInfo::new("readers"),
            Self::Foreign => foreign(),
        }
    }
}

/// The name of a holder that is not lockkit.
pub(crate) fn foreign() -> HolderInfo {
    HolderInfo::new("a client that is not lockkit")
}

/// What a grant or a renewal needs to know of the lease with this token: fence, span and depth, without the holder. `None` if
/// it is another's.
pub(crate) fn own(value: &[u8], token: &Token) -> Option<(Fence, u32, u32)> {
    let mut head = String::with_capacity(Token::TEXT_LEN + 1);
    push_token(&mut head, token);
    value.starts_with(head.as_bytes()).then(|| numbers(value))?
}

/// The same of a lease that is known to be lockkit's.
pub(crate) fn numbers(value: &[u8]) -> Option<(Fence, u32, u32)> {
    let mut parts = value.get(Token::TEXT_LEN + 1..)?.splitn(4, |byte| *byte == b':');
    let depth = number(parts.next()?)?;
    let fence = number(parts.next()?)?;
    let span = number(unmarked(parts.next()?))?;
    Some((Fence::new(fence), u32::try_from(span).ok()?, u32::try_from(depth).ok()?))
}

/// Appends `<token>:`, by which a lease is recognised.
pub(crate) fn push_token(text: &mut String, token: &Token) {
    for byte in token.as_bytes() {
        for digit in [byte >> 4, byte & 15] {
            text.push(char::from(b"0123456789abcdef"[usize::from(digit)]));
        }
    }
    text.push(':');
}

/// Appends `<token>:<depth>:`, the beginning of a value.
pub(crate) fn push_head(text: &mut String, token: &Token, depth: u32) {
    push_token(text, token);
    push_number(text, depth);
    text.push(':');
}

/// Appends `:<span><mark>:<holder>`, the end of a value; the mark is empty or `@<epoch>`.
pub(crate) fn push_tail(text: &mut String, span: u32, mark: &str, holder: &HolderInfo) {
    text.push(':');
    push_number(text, span);
    text.push_str(mark);
    text.push(':');
    text.push_str(holder.as_str());
}

fn push_number(text: &mut String, number: u32) {
    match u8::try_from(number) {
        Ok(digit @ 0..=9) => text.push(char::from(b'0' + digit)),
        _ => text.push_str(&number.to_string()),
    }
}

/// A mode as `queue.lua` spells it.
pub(crate) fn mode(text: &str) -> Option<Mode> {
    match text.split_at_checked(1)? {
        ("x", "") => Some(Mode::Exclusive),
        ("s", "") => Some(Mode::Shared),
        ("p", limit) => Some(Mode::Permit { limit: limit.parse().ok()? }),
        _ => None,
    }
}

fn lease(text: &str) -> Option<StoredLease> {
    let (fence, span, depth) = numbers(text.as_bytes())?;
    let token = text.get(..Token::TEXT_LEN)?.parse().ok()?;
    let mut parts = text.splitn(5, ':');
    if parts.next()?.len() != Token::TEXT_LEN {
        return None;
    }
    let holder = parts.nth(3)?;
    Some(StoredLease { token, depth, fence, span, holder: HolderInfo::new(holder) })
}

/// A number without the mark behind it.
fn unmarked(number: &[u8]) -> &[u8] {
    number.split(|byte| *byte == b'@').next().unwrap_or(number)
}

fn number(digits: &[u8]) -> Option<u64> {
    let well_formed = (1..=19).contains(&digits.len()) && digits.iter().all(u8::is_ascii_digit);
    well_formed.then(|| digits.iter().fold(0, |number, digit| number * 10 + u64::from(digit - b'0')))
}

/// A ttl as the server wants it: rounded up, so that the lease never ends before its holder believes.
pub(crate) fn milliseconds(ttl: Duration) -> u64 {
    u64::try_from(ttl.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

/// Whether a counter can have given this out.
pub(crate) fn is_fence(fence: Fence) -> bool {
    fence.get() < MAX_FENCE
}

/// # Errors
/// `InvalidInput` if the counter could not go there, or hardly any further.
pub(crate) fn check_floor(fence: Fence) -> Result<()> {
    if fence.get() < MAX_FENCE - FENCE_ROOM { Ok(()) } else { Err(Error::invalid("fences on Redis end at 2^53")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_survives_its_text() {
        let token = Token::random().expect("random");
        for (depth, span, mark, holder) in
            [(1, 1, "", "web-3:4711"), (12, u32::MAX, "", ""), (0, 1, "", "a:b:1:2:é"), (2, 3, "@0123abcd", "a@b:c")]
        {
            let holder = HolderInfo::new(holder);
            let mut text = String::new();
            push_head(&mut text, &token, depth);
            text.push_str("1795163327687740");
            push_tail(&mut text, span, mark, &holder);
            assert!(text.starts_with(&format!("{}:{depth}:1795163327687740:{span}{mark}:", token.reveal())));
            let fence = Fence::new(1_795_163_327_687_740);
            let lease = StoredLease { token, depth, fence, span, holder };
            let permits = Mode::Permit { limit: std::num::NonZeroU32::MIN.saturating_add(9) };
            for (before, mode) in [("", Mode::Exclusive), ("#s:", Mode::Shared), ("#p10:", permits)] {
                let stored = Stored::parse(format!("{before}{text}").as_bytes());
                assert_eq!(stored, Stored::Lease(mode, lease.clone()), "{before}{text}");
            }
        }
    }

    #[test]
    fn a_shared_lock_is_told_from_others() {
        let permits = Mode::Permit { limit: std::num::NonZeroU32::MIN.saturating_add(2) };
        for (text, mode) in
            [("#s:17", Mode::Shared), ("#p3:1795163327687740", permits), ("#s:17@0123abcd", Mode::Shared)]
        {
            assert_eq!(Stored::parse(text.as_bytes()), Stored::Shared(mode));
        }
        for text in ["#", "#s", "#s:", "#s:x", "#sx:1", "#p:1", "#p0:1", "#p-1:1", "#x:1", "s:1"] {
            assert_eq!(Stored::parse(text.as_bytes()), Stored::Foreign, "{text}");
        }
    }

    #[test]
    fn what_is_not_ours_is_foreign() {
        let token = Token::random().expect("random").reveal();
        for text in [
            String::new(),
            "1".into(),
            token.clone(),
            format!("{token}:1:2:3"),
            format!("{token}:x:2:3:h"),
            format!("{token}:1:-2:3:h"),
            format!("{token}:1:2:99999999999:h"),
            format!("{}:1:2:3:h", token.to_uppercase().replace(char::is_numeric, "A")),
            format!("{token}x1:2:3:4:h"),
            format!("#x:{token}:1:2:3:h"),
            format!("#p0:{token}:1:2:3:h"),
            format!("#{token}:1:2:3:h"),
        ] {
            assert_eq!(Stored::parse(text.as_bytes()), Stored::Foreign, "{text}");
        }
        assert_eq!(Stored::parse(b"\xff").into_holder().as_str(), "a client that is not lockkit");
    }
}
