//! Where a member of a cluster sends those who ask it for another member's slot.

use lockkit_core::{Error, ErrorKind};
use redis::RedisError;

use crate::wire::{address::Address, name::SLOTS};

/// Where an error says that a slot is.
#[derive(Debug, PartialEq)]
pub(crate) struct Redirect {
    pub(crate) address: Address,
    pub(crate) slot: u16,
    pub(crate) asking: bool,
}

impl Redirect {
    /// What `MOVED` and `ASK` say.
    pub(crate) fn of(error: &Error) -> Option<Self> {
        let cause = std::error::Error::source(error)?.downcast_ref::<RedisError>()?;
        let (address, slot) = cause.redirect_node().filter(|(_, slot)| *slot < SLOTS)?;
        let (host, port) = address.rsplit_once(':')?;
        let asking = cause.code() == Some("ASK");
        Some(Self { address: (host.to_owned(), port.parse().ok()?), slot, asking })
    }

    /// An empty host means that of the member that answered.
    pub(crate) fn at_host(mut self, host: &str) -> Self {
        if self.address.0.is_empty() {
            host.clone_into(&mut self.address.0);
        }
        self
    }
}

/// A slot is on its way, or its members do not agree on whose it is. Nothing was done.
pub(crate) fn undecided() -> Error {
    Error::new(ErrorKind::Unavailable, "the lock's slot is moving from one member of the cluster to another")
}

/// What to tell of a redirect that is not followed any more. The error says so itself if it was not for the lock's slot, but met on
/// the way to it.
pub(crate) fn settled(error: Error) -> Error {
    let is_of_lock = error.kind() == ErrorKind::Unsupported && Redirect::of(&error).is_some();
    if is_of_lock { undecided() } else { error }
}

/// Nobody serves a slot.
pub(crate) fn unserved() -> Error {
    Error::new(ErrorKind::Unavailable, "no member of the cluster serves the lock's slot")
}

#[cfg(test)]
mod tests {
    use redis::Value;

    use super::*;
    use crate::wire::error::{self, Sent};

    #[test]
    fn signposts_are_read() {
        let error = |text: &str| {
            let reply = redis::parse_redis_value(text.as_bytes()).expect("reply");
            let Value::ServerError(e) = reply else { panic!("{reply:?}") };
            error::map(&e.into(), Sent::Yes)
        };
        let read = |text| Redirect::of(&error(text));
        let moved = Redirect { address: ("10.0.0.1".into(), 7000), slot: 7, asking: false };
        assert_eq!(read("-MOVED 7 10.0.0.1:7000\r\n"), Some(moved));
        assert_eq!(read("-ASK 7 ::1:7000\r\n").map(|to| (to.address.0, to.asking)), Some(("::1".into(), true)));
        assert_eq!(read("-MOVED 7 :7000\r\n").map(|to| to.address.0), Some(String::new()));
        assert_eq!(read("-MOVED 16383 a:7000\r\n").map(|to| to.slot), Some(16383));
        assert_eq!(read("-MOVED 16384 a:7000\r\n"), None, "there is no such slot");
        assert_eq!(read("-CLUSTERDOWN Hash slot not served\r\n"), None);
    }
}
