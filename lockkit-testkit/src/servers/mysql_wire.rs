//! As much of the MySQL protocol as the jobs of a test's administrator need: text queries without TLS, as a user without
//! a password.

use std::{io, net::SocketAddr, time::Duration};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, BufReader},
    net::TcpStream,
    time::timeout,
};

/// How long a server may take for one statement. A frozen one would take forever.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);

/// `PROTOCOL_41`, `SECURE_CONNECTION` and `PLUGIN_AUTH`: what all servers of the last ten years speak.
const CAPABILITIES: u32 = 0x0200 | 0x8000 | 0x0008_0000;

/// The character set `utf8mb4_general_ci`.
const UTF8: u8 = 45;

/// What one statement gave: rows of text, `None` for NULL.
pub(super) type Rows = Vec<Vec<Option<String>>>;

/// A connection to a MySQL or MariaDB server.
#[derive(Debug)]
pub(super) struct Connection {
    stream: BufReader<TcpStream>,
    sequence: u8,
}

impl Connection {
    /// Logs in as a user who has no password.
    pub(super) async fn open(addr: SocketAddr, user: &str) -> io::Result<Self> {
        let login = async {
            let mut connection = Self { stream: BufReader::new(TcpStream::connect(addr).await?), sequence: 0 };
            let greeting = connection.receive().await?;
            connection.log_in(user, &plugin(&greeting)).await?;
            Ok(connection)
        };
        timeout(ANSWER_WITHIN, login).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
    }

    /// Runs one statement. What the server refuses is an error of the kind [`io::ErrorKind::Other`] in its own words.
    pub(super) async fn query(&mut self, statement: &str) -> io::Result<Rows> {
        let answer = async {
            self.sequence = 0;
            self.send(&[&[3], statement.as_bytes()].concat()).await?;
            self.rows().await
        };
        timeout(ANSWER_WITHIN, answer).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
    }

    async fn log_in(&mut self, user: &str, plugin: &[u8]) -> io::Result<()> {
        let mut response = Vec::new();
        response.extend_from_slice(&CAPABILITIES.to_le_bytes());
        response.extend_from_slice(&(1_u32 << 24).to_le_bytes());
        response.push(UTF8);
        response.extend_from_slice(&[0; 23]);
        response.extend_from_slice(user.as_bytes());
        // The end of the name, and a password of no bytes.
        response.extend_from_slice(&[0, 0]);
        response.extend_from_slice(plugin);
        response.push(0);
        self.send(&response).await?;
        loop {
            match self.receive().await?.first() {
                Some(0x00) => return Ok(()),
                // Another way to log in is asked for, or more data for this one. Without a password it is all the same.
                Some(0xfe | 0x01) => self.send(&[]).await?,
                other => return Err(unexpected(&format!("login answered with {other:?}"))),
            }
        }
    }

    async fn rows(&mut self) -> io::Result<Rows> {
        let head = self.receive().await?;
        if head.first() == Some(&0) {
            return Ok(Vec::new());
        }
        while !is_end(&self.receive().await?) {}
        let mut rows = Vec::new();
        loop {
            let packet = self.receive().await?;
            if is_end(&packet) {
                return Ok(rows);
            }
            rows.push(row(&packet).ok_or_else(|| unexpected("a row is cut short"))?);
        }
    }

    async fn send(&mut self, payload: &[u8]) -> io::Result<()> {
        let length = u32::try_from(payload.len()).map_err(io::Error::other)?.to_le_bytes();
        let packet = [&[length[0], length[1], length[2], self.sequence], payload].concat();
        self.sequence = self.sequence.wrapping_add(1);
        self.stream.write_all(&packet).await
    }

    async fn receive(&mut self) -> io::Result<Vec<u8>> {
        let mut head = [0; 4];
        self.stream.read_exact(&mut head).await?;
        self.sequence = head[3].wrapping_add(1);
        let mut payload = vec![0; u32::from_le_bytes([head[0], head[1], head[2], 0]) as usize];
        self.stream.read_exact(&mut payload).await?;
        match payload.first() {
            // The number, and in front of the words a `#` with five characters of the SQL standard's code.
            Some(0xff) if payload.len() > 3 => {
                let number = u16::from_le_bytes([payload[1], payload[2]]);
                let text = payload[3..].strip_prefix(b"#").and_then(|text| text.get(5..)).unwrap_or(&payload[3..]);
                Err(io::Error::other(format!("{number}: {}", String::from_utf8_lossy(text))))
            }
            _ => Ok(payload),
        }
    }
}

/// The name of the way to log in that the server proposes: the last text of its greeting.
fn plugin(greeting: &[u8]) -> Vec<u8> {
    let mut texts = greeting.rsplit(|&byte| byte == 0).filter(|text| !text.is_empty());
    texts.next().map(<[u8]>::to_vec).unwrap_or_default()
}

fn is_end(packet: &[u8]) -> bool {
    packet.first() == Some(&0xfe) && packet.len() < 9
}

fn row(mut packet: &[u8]) -> Option<Vec<Option<String>>> {
    let mut row = Vec::new();
    while let Some((&first, rest)) = packet.split_first() {
        let (length, rest) = match first {
            0xfb => {
                row.push(None);
                packet = rest;
                continue;
            }
            0xfc => (usize::from(u16::from_le_bytes([*rest.first()?, *rest.get(1)?])), rest.get(2..)?),
            0xfd => (u32::from_le_bytes([*rest.first()?, *rest.get(1)?, *rest.get(2)?, 0]) as usize, rest.get(3..)?),
            short => (usize::from(short), rest),
        };
        row.push(Some(String::from_utf8_lossy(rest.get(..length)?).into_owned()));
        packet = &rest[length..];
    }
    Some(row)
}

fn unexpected(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("not what a MySQL server says: {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_read() {
        let long = "x".repeat(300);
        let packet = [b"\x01a\xfb\x00\xfc\x2c\x01".as_slice(), long.as_bytes()].concat();
        assert_eq!(row(&packet), Some(vec![Some("a".to_owned()), None, Some(String::new()), Some(long)]));
        assert_eq!(row(b"\x05abc"), None);
    }
}
