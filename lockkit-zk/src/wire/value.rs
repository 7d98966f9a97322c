//! The data of a claim's node: `lockkit:<depth>:<span>:<fence>:<holder>`.
//!
//! The fence is left out where it follows from the node's czxid and the lock's fence record. The holder comes last and
//! may contain anything. Curator and kazoo don't look at the data of others; theirs is text without this beginning.

use lockkit_core::{Fence, HolderInfo, Token};

const MARK: &str = "lockkit:";

/// Begins what the directory of a lock says of leases that were ended on purpose.
const REVOKED: &str = "lockkit:revoked:";

/// How many of them it says at most.
const REMEMBERED: usize = 256;

/// What a node says of its claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Value {
    pub(crate) depth: u32,
    pub(crate) span: u32,
    /// `None` if it follows from the node's czxid and the lock's record.
    pub(crate) fence: Option<Fence>,
    pub(crate) holder: HolderInfo,
}

impl Value {
    pub(crate) fn text(&self) -> String {
        let fence = self.fence.map(|fence| fence.to_string()).unwrap_or_default();
        format!("{MARK}{}:{}:{fence}:{}", self.depth, self.span, self.holder)
    }

    /// `None` if it is not lockkit's.
    pub(crate) fn parse(data: &[u8]) -> Option<Self> {
        let mut fields = str::from_utf8(data).ok()?.strip_prefix(MARK)?.splitn(4, ':');
        let (depth, span) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
        let fence = match fields.next()? {
            "" => None,
            number => Some(Fence::new(number.parse().ok()?)),
        };
        Some(Self { depth, span, fence, holder: HolderInfo::new(fields.next()?) })
    }
}

/// What the directory of a lock says after `data` when the lease of the claim with this token was ended by somebody else on
/// purpose. Each whose lease was ended so has to find its token there, also one that looks late.
pub(crate) fn revoked(data: &[u8], token: &Token) -> String {
    let before: Vec<_> = tokens(data).collect();
    let kept = &before[before.len().saturating_sub(REMEMBERED - 1)..];
    let all: String = kept.iter().flat_map(|token| [token, ","]).collect();
    format!("{REVOKED}{all}{}", token.reveal())
}

/// Whether the directory of a lock says so of the claim with this token.
pub(crate) fn is_revoked(data: &[u8], token: &Token) -> bool {
    tokens(data).any(|revoked| revoked == token.reveal())
}

fn tokens(data: &[u8]) -> impl Iterator<Item = &str> {
    let list = str::from_utf8(data).ok().and_then(|text| text.strip_prefix(REVOKED));
    list.into_iter().flat_map(|list| list.split(','))
}

/// What a node says of who made it, whatever client that is.
pub(crate) fn holder(data: &[u8]) -> HolderInfo {
    match Value::parse(data) {
        Some(value) => value.holder,
        None if data.is_empty() => HolderInfo::new("a client that is not lockkit"),
        None => HolderInfo::new(&String::from_utf8_lossy(data)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_survives_its_text() {
        for (fence, holder) in [(None, "a:b:c"), (Some(Fence::new(7)), ""), (Some(Fence::new(u64::MAX)), "ü:")] {
            let value = Value { depth: 3, span: 65, fence, holder: HolderInfo::new(holder) };
            assert_eq!(Value::parse(value.text().as_bytes()), Some(value));
        }
    }

    #[test]
    fn what_others_write_is_their_description() {
        for foreign in ["127.0.0.1", "fe80::1", "1:2::3", "lockkit:", "lockkit:1:1", "lockkit:1:1:x:y"] {
            assert_eq!(Value::parse(foreign.as_bytes()), None, "{foreign}");
            assert_eq!(holder(foreign.as_bytes()).as_str(), foreign);
        }
        assert_eq!(holder(b"").as_str(), "a client that is not lockkit");
        assert_eq!(holder(b"\xff\n").as_str(), "\u{fffd} ");
    }

    #[test]
    fn each_that_was_revoked_finds_itself() {
        let tokens = [0; 300].map(|_| Token::random().expect("random"));
        let alone = revoked(b"", &tokens[0]);
        assert!(is_revoked(alone.as_bytes(), &tokens[0]) && !is_revoked(alone.as_bytes(), &tokens[1]));
        let all = tokens.iter().fold(String::new(), |data, token| revoked(data.as_bytes(), token));
        assert!(tokens[300 - REMEMBERED..].iter().all(|token| is_revoked(all.as_bytes(), token)));
        assert!(!is_revoked(all.as_bytes(), &tokens[0]), "the list grows without end");
        assert_eq!(revoked(b"what others wrote", &tokens[0]), alone);
    }
}
