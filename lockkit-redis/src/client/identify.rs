//! What answers where a Redis server was expected: known by its first bytes, for those who mix up ports.

use std::sync::{Arc, OnceLock};

use lockkit_core::{Error, ErrorKind};

/// How many bytes are looked at.
const LOOK: usize = 64;

/// The first bytes that came on a connection, which are those of TLS if that was wanted.
#[derive(Clone, Debug)]
pub(crate) struct FirstBytes {
    bytes: Arc<OnceLock<Box<[u8]>>>,
    tls: bool,
}

impl FirstBytes {
    pub(crate) fn new(tls: bool) -> Self {
        Self { bytes: Arc::default(), tls }
    }

    /// Takes note of bytes that came, if they are the first.
    pub(crate) fn hear(&self, bytes: &[u8]) {
        if !bytes.is_empty() {
            self.bytes.get_or_init(|| bytes[..bytes.len().min(LOOK)].into());
        }
    }

    /// The error with which the login failed; or, if the first bytes are those of another kind of server, one that says
    /// which.
    pub(crate) fn explain(&self, error: Error) -> Error {
        match self.bytes.get().and_then(|bytes| speaker(bytes, self.tls)) {
            Some(speaker) => {
                Error::new(ErrorKind::Misconfigured, format!("the server there is {speaker}")).with_source(error)
            }
            None => error,
        }
    }
}

/// Which kind of server begins like this, if it is none of Redis, with TLS or without.
fn speaker(bytes: &[u8], tls: bool) -> Option<String> {
    match bytes {
        // The length of a packet, its number, then the version of the protocol, or an error.
        [_, _, 0, 0, 10, rest @ ..] => {
            let version = rest.iter().take_while(|byte| byte.is_ascii_graphic()).map(|byte| char::from(*byte));
            Some(format!("MySQL or MariaDB ({}), not Redis", version.collect::<String>()))
        }
        [_, _, 0, 0, 0xff, ..] => Some("MySQL or MariaDB, not Redis".to_owned()),
        // An alert or a handshake of TLS.
        [0x15 | 0x16, 3, ..] if !tls => {
            Some("a server that speaks TLS; the scheme of Redis over TLS is rediss".to_owned())
        }
        [b'-', ..] if tls => Some("a server that speaks no TLS; the scheme of Redis without it is redis".to_owned()),
        [b'H', b'T', b'T', b'P', b'/', ..] => Some("a web server, not Redis".to_owned()),
        [b'S', b'S', b'H', b'-', ..] => Some("an SSH server, not Redis".to_owned()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn others_are_known_by_their_first_bytes() {
        let said = |bytes: &[u8]| speaker(bytes, false).unwrap_or_default();
        assert_eq!(said(b"J\0\0\0\x0a8.4.3\0rest"), "MySQL or MariaDB (8.4.3), not Redis");
        assert_eq!(said(b"E\0\0\0\xff\x6a\x04Host is blocked"), "MySQL or MariaDB, not Redis");
        assert!(said(b"\x15\x03\x03\0\x02").contains("rediss"));
        assert_eq!(said(b"HTTP/1.1 400 Bad Request"), "a web server, not Redis");
        for redis in [&b"%7\r\n$6\r\nserver"[..], b"-NOAUTH", b"+OK", b"-ERR unknown command 'HELLO'", b"", b"*"] {
            assert_eq!(speaker(redis, false), None);
        }
        // A server's part of a handshake, whose certificate is not to be trusted.
        assert_eq!(speaker(b"\x16\x03\x03\0\x7a", true), None);
        assert!(speaker(b"-ERR Protocol error", true).unwrap_or_default().contains("no TLS"));
    }
}
