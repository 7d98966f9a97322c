//! As much of the Redis protocol as the jobs of a test's administrator need.

use super::Location;
use std::{fmt, io, path::PathBuf, time::Duration};
use tokio::{
    io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader},
    net::{TcpStream, UnixStream},
    time::timeout,
};

/// How long a server may take for one command. A frozen one would take forever.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

/// Where a server lets its administrator in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Door {
    /// At its port.
    Port,
    /// At a socket in its directory, because nobody gets in at its port without TLS.
    Socket,
}

impl Door {
    /// The path of the socket.
    pub(super) fn socket(location: &Location) -> PathBuf {
        location.dir.join("socket")
    }
}

/// A connection to a Redis server.
pub(super) struct Connection {
    stream: BufReader<Box<dyn Stream>>,
}

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

impl Connection {
    pub(super) async fn open(location: &Location, door: Door, password: Option<&str>) -> io::Result<Self> {
        let stream: Box<dyn Stream> = match door {
            Door::Port => Box::new(TcpStream::connect(location.addr()).await?),
            Door::Socket => Box::new(UnixStream::connect(Door::socket(location)).await?),
        };
        let mut connection = Self { stream: BufReader::new(stream) };
        if let Some(password) = password {
            connection.command(&["AUTH", password]).await?;
        }
        Ok(connection)
    }

    /// Runs one command and renders its reply as text, one line per element.
    ///
    /// An error reply is an error of the kind [`io::ErrorKind::Other`] with the server's own words.
    pub(super) async fn command(&mut self, words: &[&str]) -> io::Result<String> {
        let answer = async {
            let mut request = format!("*{}\r\n", words.len());
            for word in words {
                request.push_str(&format!("${}\r\n{word}\r\n", word.len()));
            }
            self.stream.write_all(request.as_bytes()).await?;
            self.reply().await
        };
        timeout(ANSWER_WITHIN, answer).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
    }

    async fn reply(&mut self) -> io::Result<String> {
        let mut lines = Vec::new();
        // A nested reply is read flat: an array merely says how many more values are to come.
        let mut expected = 1;
        while expected > 0 {
            expected -= 1;
            let head = self.line().await?;
            let (kind, rest) = head.split_at_checked(1).ok_or_else(|| unexpected(&head))?;
            match kind {
                "+" | ":" => lines.push(rest.to_owned()),
                "-" => return Err(io::Error::other(rest.to_owned())),
                "$" | "*" => match (kind, rest.parse::<i64>().map_err(|_| unexpected(&head))?) {
                    (_, ..0) => lines.push("(nil)".to_owned()),
                    ("$", length) => lines.push(self.bulk(length as usize).await?),
                    (_, count) => expected += count,
                },
                _ => return Err(unexpected(&head)),
            }
        }
        Ok(lines.join("\n"))
    }

    async fn line(&mut self) -> io::Result<String> {
        let mut line = String::new();
        match self.stream.read_line(&mut line).await? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(line.trim_end().to_owned()),
        }
    }

    async fn bulk(&mut self, length: usize) -> io::Result<String> {
        let mut bytes = vec![0; length + "\r\n".len()];
        self.stream.read_exact(&mut bytes).await?;
        bytes.truncate(length);
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").finish_non_exhaustive()
    }
}

fn unexpected(head: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("not a Redis reply: {head:?}"))
}
