//! The small values that everything else is made of.

use std::{fmt, num::NonZeroU32, str::FromStr, sync::Arc, time::Duration};

use crate::{Error, ErrorKind, LockKey, Moment, Result};

impl LockKey {
    /// Checks a name.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if the name is empty or longer than [`MAX_BYTES`](Self::MAX_BYTES).
    pub fn new(name: impl Into<Arc<str>>) -> Result<Self> {
        let name = name.into();
        match name.len() {
            0 => Err(Error::invalid("a lock's name must not be empty")),
            1..=Self::MAX_BYTES => Ok(Self::unchecked(name)),
            len => {
                Err(Error::invalid(format!("a lock's name has at most {} bytes; this one has {len}", Self::MAX_BYTES)))
            }
        }
    }
}

/// Proof of ownership: 128 random bits, new for every acquisition (rule R2).
///
/// A client that knows a token can release that one lease, so it is never printed by `Debug`;
/// [`reveal`](Self::reveal) spells it out where a person asks for it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Token([u8; 16]);

impl Token {
    /// The length of a token's text.
    pub const TEXT_LEN: usize = 32;

    /// A new token from the operating system's random numbers.
    ///
    /// # Errors
    /// [`ErrorKind::Unexpected`] if the operating system has none to give.
    pub fn random() -> Result<Self> {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes)
            .map_err(|e| Error::new(ErrorKind::Unexpected, "no random numbers from the system").with_source(e))?;
        Ok(Self(bytes))
    }

    /// The 16 bytes.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }

    /// The token as 32 lower-case hexadecimal digits.
    #[must_use]
    pub fn reveal(&self) -> String {
        format!("{:032x}", u128::from_be_bytes(self.0))
    }
}

impl FromStr for Token {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        // Not all that the number's own reading takes: it has a sign, and upper case.
        let well_formed = text.len() == Self::TEXT_LEN && text.bytes().all(|d| matches!(d, b'0'..=b'9' | b'a'..=b'f'));
        match u128::from_str_radix(text, 16) {
            Ok(number) if well_formed => Ok(Self(number.to_be_bytes())),
            _ => Err(Error::invalid("a token has 32 lower-case hexadecimal digits")),
        }
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// A fencing token: a number that grows with every grant of a key (rule R9).
///
/// Hand it to the resource that the lock protects and let the resource refuse smaller numbers than it has seen.
/// [`Fence::NONE`] is never granted by a store that fences.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fence(u64);

impl Fence {
    /// No fence: below every one that is granted.
    pub const NONE: Self = Self(0);

    /// The fence with this number.
    #[must_use]
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    /// The number.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The fence `by` further on.
    #[must_use]
    pub const fn offset(self, by: u32) -> Self {
        Self(self.0.saturating_add(by as u64))
    }
}

impl fmt::Display for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// How a lock is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Mode {
    /// By one holder, who excludes all others.
    Exclusive,
    /// By any number of holders, who exclude exclusive ones.
    Shared,
    /// By up to `limit` holders. All users of a name must agree on the limit.
    Permit {
        /// How many may hold at once.
        limit: NonZeroU32,
    },
}

impl Mode {
    /// Whether one more may hold the lock in this way beside those that hold it so. That they agree on a limit is looked at elsewhere.
    pub(crate) fn has_room(self, mut taken: impl Iterator<Item = Self>) -> bool {
        match self {
            Self::Exclusive => taken.next().is_none(),
            Self::Shared => taken.all(|other| other == Self::Shared),
            Self::Permit { limit } => {
                taken.zip(1..).all(|(other, count)| matches!(other, Self::Permit { .. }) && count < limit.get())
            }
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exclusive => f.write_str("exclusive"),
            Self::Shared => f.write_str("shared"),
            Self::Permit { limit } => write!(f, "permit of {limit}"),
        }
    }
}

/// One acquisition, named **before** its request is sent, so that it can be undone when its outcome is unknown.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Claim {
    /// The lock.
    pub key: LockKey,
    /// Proof of ownership.
    pub token: Token,
    /// How it is to be held.
    pub mode: Mode,
}

/// A lease that the store granted or extended.
#[derive(Clone, Debug)]
pub struct Hold {
    /// Whose it is.
    pub claim: Claim,
    /// The first fence of the grant. Renewal and reentry keep it.
    pub fence: Fence,
    /// The grant owns the fences `fence .. fence + span`.
    pub span: u32,
    /// When the lease may lapse, on the store's [`Clock`](crate::Clock): the ttl counted from the moment just before
    /// the granting request was sent (rule R4). An absolute moment, so that a process frozen between the reply and
    /// its use does not add the pause to the lease.
    pub until: Moment,
    /// The count of nested holds that the store has on record.
    pub depth: u32,
}

/// The name of a holder: one line of at most 256 bytes, such as `billing@web-3:4711`.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct HolderInfo(Arc<str>);

/// How the description of a holder ends that is done, and only keeps the lock from others.
const DONE: &str = " (done)";

impl HolderInfo {
    /// The longest description, in bytes.
    pub const MAX_BYTES: usize = 256;

    /// A description. Control characters become spaces; what goes beyond [`MAX_BYTES`](Self::MAX_BYTES) is cut off.
    #[must_use]
    pub fn new(text: &str) -> Self {
        let mut clean = String::with_capacity(text.len().min(Self::MAX_BYTES));
        for c in text.chars().map(|c| if c.is_control() { ' ' } else { c }) {
            if clean.len() + c.len_utf8() > Self::MAX_BYTES {
                break;
            }
            clean.push(c);
        }
        Self(clean.into())
    }

    /// The default: `program@host:pid`.
    #[must_use]
    pub fn this_process() -> Self {
        let program = std::env::args_os().next().unwrap_or_default();
        let program = std::path::Path::new(&program).file_name().unwrap_or_default().to_string_lossy().into_owned();
        let uname = rustix::system::uname();
        Self::new(&format!("{program}@{}:{}", uname.nodename().to_string_lossy(), std::process::id()))
    }

    /// The description.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether nobody is at work, and the lock is only [kept](crate::Lock::keep_for) from others, as far as the description tells.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.0.ends_with(DONE)
    }

    /// The description of what keeps a lock when this holder is done.
    pub(crate) fn done(&self) -> Self {
        self.followed_by(DONE)
    }

    /// The description with this behind it, which is not cut off.
    pub(crate) fn followed_by(&self, mark: &str) -> Self {
        let room = self.0.floor_char_boundary(Self::MAX_BYTES - mark.len());
        Self::new(&format!("{}{mark}", &self.0[..room]))
    }
}

impl fmt::Debug for HolderInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", &self.0)
    }
}

impl fmt::Display for HolderInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Why a lease is no longer its holder's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LossReason {
    /// The lease ran out: its deadline passed on the local clock.
    Expired,
    /// The store could not be reached until the deadline passed.
    Unreachable,
    /// The store has no such lease any more: it expired there or was deleted.
    Gone,
    /// Another holder has the lock.
    Taken,
    /// The guard was kept longer than its `max_hold`.
    MaxHold,
    /// The store's session ended, and with it all its leases.
    SessionEnded,
    /// Somebody else ended the lease, and said so: [`Locker::break_lock`](crate::Locker::break_lock), on a store that
    /// keeps the reason (ZooKeeper). On others such a lease is [`Gone`](Self::Gone).
    Revoked,
}

impl fmt::Display for LossReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Expired => "the lease ran out",
            Self::Unreachable => "the store could not be reached before the lease ran out",
            Self::Gone => "the store has no such lease any more",
            Self::Taken => "another holder has the lock",
            Self::MaxHold => "it was held longer than its max_hold",
            Self::SessionEnded => "the store's session ended",
            Self::Revoked => "somebody else ended the lease on purpose",
        })
    }
}

/// Drift allowance of a lease: 1 % of it and 2 ms.
///
/// The form is that of the Redlock description (redis.io, "Distributed Locks with Redis", step 3): one part for
/// clocks that run at different rates, one for the store's resolution. Good quartz stays below 0.01 %.
#[must_use]
pub fn drift(ttl: Duration) -> Duration {
    ttl / 100 + Duration::from_millis(2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_1_to_512_bytes() {
        assert_eq!(LockKey::new("").expect_err("empty").kind(), ErrorKind::InvalidInput);
        assert!(LockKey::new("x".repeat(512)).is_ok());
        assert_eq!(LockKey::new("x".repeat(513)).expect_err("long").kind(), ErrorKind::InvalidInput);
    }

    #[test]
    fn a_token_survives_its_text_and_hides_from_debug() {
        let token = Token::random().expect("random");
        let text = token.reveal();
        assert_eq!(text.parse::<Token>().expect("parse"), token);
        assert!(!format!("{token:?}").contains(&text));
        for bad in ["", "zz", &text[1..], &text.to_uppercase().replace(char::is_numeric, "G"), &format!("{text}0")] {
            assert!(bad.parse::<Token>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_holder_is_one_short_line() {
        assert_eq!(HolderInfo::new("a\nb\tc").as_str(), "a b c");
        let long = HolderInfo::new(&"é".repeat(400));
        assert_eq!(long.as_str().len(), 256);
        assert!(HolderInfo::this_process().as_str().contains(&std::process::id().to_string()));
    }
}
