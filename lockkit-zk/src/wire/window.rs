//! Windows: records that a lock is kept from all for a while, though nobody holds it.
//!
//! The record of a window is a node `~kept-<token>` in the directory of the lock, beside the queue. It is in nobody's way: `~` sorts
//! behind all that takes part, so Curator, which counts every child, never waits for it. Its data are
//! `kept:<milliseconds>:<due>:<fence>:<holder>`. The window ends so many milliseconds after the record was last written, by the clock of the
//! leader, which gives each change its time. A change that is made later by that clock finds the lock free.
//!
//! Names are made of tokens, so no two records have the same one, and a version stands for one state of one record.

use std::time::Duration;

use lockkit_core::{Fence, HolderInfo, Token};

/// Begins the name of a record.
const KEPT: &str = "~kept-";

/// What a record says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Window {
    /// How long the window is, in milliseconds.
    pub(crate) millis: i64,
    /// When the record may be removed by others, in milliseconds since 1970 by the clock of the client that made it. It is a part of the name
    /// under which they find it, and decides nothing.
    pub(crate) due: u64,
    pub(crate) fence: Fence,
    pub(crate) holder: HolderInfo,
}

impl Window {
    /// The length of a window of at least `time`. The leader cuts the time of each change to a millisecond.
    pub(crate) fn millis(time: Duration) -> i64 {
        i64::try_from(time.as_nanos().div_ceil(1_000_000)).unwrap_or(i64::MAX - 1).saturating_add(1)
    }

    /// What is left of the window of a record that was written at `written`, when it is `now`; zero if it is over.
    pub(crate) fn left(&self, written: i64, now: i64) -> Duration {
        let left = written.saturating_add(self.millis).saturating_sub(now);
        Duration::from_millis(u64::try_from(left).unwrap_or(0))
    }

    pub(crate) fn text(&self) -> String {
        format!("kept:{}:{}:{}:{}", self.millis, self.due, self.fence, self.holder)
    }

    /// `None` if it has another form.
    pub(crate) fn parse(data: &[u8]) -> Option<Self> {
        let mut fields = str::from_utf8(data).ok()?.strip_prefix("kept:")?.splitn(4, ':');
        let (millis, due) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
        let fence = Fence::new(fields.next()?.parse().ok()?);
        Some(Self { millis, due, fence, holder: HolderInfo::new(fields.next()?) })
    }
}

/// The name of the record of the claim with this token.
pub(crate) fn node(token: &Token) -> String {
    format!("{KEPT}{}", token.reveal())
}

/// The token in the name of a record.
pub(crate) fn token(node: &str) -> Option<Token> {
    node.strip_prefix(KEPT)?.parse().ok()
}

/// Whether a child of a lock is the record of a window.
pub(crate) fn is_record(child: &str) -> bool {
    token(child).is_some()
}

/// Whether one is among the children of a lock.
pub(crate) fn is_kept(children: &[String]) -> bool {
    children.iter().any(|child| is_record(child))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn window(time: Duration) -> Window {
        Window { millis: Window::millis(time), due: 7, fence: Fence::new(9), holder: HolderInfo::new("a:b (done)") }
    }

    #[test]
    fn a_window_survives_its_text() {
        let window = window(Duration::from_secs(3600));
        assert_eq!(Window::parse(window.text().as_bytes()), Some(window));
        for other in ["", "kept:", "kept:1:2:3", "kept:x:2:3:a", "lockkit:1:1::a", "offset:7"] {
            assert_eq!(Window::parse(other.as_bytes()), None, "{other}");
        }
    }

    /// Written at 1000.999 and asked about at 3001.0 both are cut.
    #[test]
    fn no_window_is_shorter_than_it_was_to_be() {
        let short = window(Duration::from_secs(2));
        assert_eq!(short.left(1000, 3000), Duration::from_millis(1));
        assert_eq!(short.left(1000, 3001), Duration::ZERO);
        assert_eq!(short.left(1000, 999), Duration::from_millis(2002), "the clock of the next leader is behind");
        assert_eq!(window(Duration::from_nanos(1)).millis, 2);
        assert_eq!(window(Duration::MAX).left(i64::MAX, 0), Duration::from_millis(i64::MAX as u64));
    }

    #[test]
    fn a_record_is_known_by_its_name() {
        let token = Token::random().expect("random");
        assert_eq!(super::token(&node(&token)), Some(token));
        for other in ["~kept-", "~kept-1", "~fence", "_c_00112233-4455-6677-8899-aabbccddeeff-lock-0000000007"] {
            assert!(!is_record(other), "{other}");
        }
    }
}
