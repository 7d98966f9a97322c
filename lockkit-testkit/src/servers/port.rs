//! The ports that servers get.

use std::{
    hash::{BuildHasher, RandomState},
    io,
    net::{Ipv4Addr, TcpListener, UdpSocket},
    ops::Range,
};

/// Where servers listen.
///
/// These ports lie below those from which systems take the source ports of outgoing connections. A port from *that*
/// range, as binding to port 0 would give, is not safe while its server is down: a client on the same machine that keeps
/// trying to reconnect is sooner or later given the very port it connects to as its source, connects to itself, and the
/// server can't come back.
const PORTS: Range<u16> = 20_000..32_000;

/// A port on 127.0.0.1 for one server, until it is dropped: also while the server is down.
///
/// The UDP port of the same number stays bound, which no server uses. By that all test processes of a machine know that
/// the number is taken, where a TCP port would be in the server's way. Without it a server that is restarted finds, once
/// in some thousand times, that another one was given its port while it was down.
#[derive(Debug)]
pub(crate) struct Port {
    number: u16,
    _claim: UdpSocket,
}

impl Port {
    /// A port that nothing listens on, chosen at random.
    pub(crate) fn free() -> io::Result<Self> {
        let random = RandomState::new();
        (0..100_u32)
            .map(|attempt| PORTS.start + (random.hash_one(attempt) % PORTS.len() as u64) as u16)
            .find_map(|number| Self::claim(number).ok())
            .ok_or_else(|| io::Error::new(io::ErrorKind::AddrInUse, "no free port on 127.0.0.1"))
    }

    fn claim(number: u16) -> io::Result<Self> {
        // First the claim: listening, even for a moment, is in the way of a server that comes back.
        let claim = UdpSocket::bind((Ipv4Addr::LOCALHOST, number))?;
        TcpListener::bind((Ipv4Addr::LOCALHOST, number))?;
        Ok(Self { number, _claim: claim })
    }

    pub(crate) fn number(&self) -> u16 {
        self.number
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_given_once_until_it_is_dropped() -> io::Result<()> {
        let port = Port::free()?;
        let number = port.number();
        assert_eq!(Port::claim(number).expect_err("it is taken").kind(), io::ErrorKind::AddrInUse);
        let server = TcpListener::bind((Ipv4Addr::LOCALHOST, number))?;
        drop(port);
        assert_eq!(Port::claim(number).expect_err("somebody listens").kind(), io::ErrorKind::AddrInUse);
        drop(server);
        Port::claim(number).map(drop)
    }
}
