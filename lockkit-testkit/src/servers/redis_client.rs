//! What a test's administrator says to a Redis server, and how its replies are rendered.

use super::Location;
use redis::{
    AsyncConnectionConfig, Client, ConnectionAddr, IntoConnectionInfo as _, RedisConnectionInfo, RedisError, Value,
    aio::MultiplexedConnection,
};
use std::{io, path::PathBuf, time::Duration};

/// How long a server may take to let its administrator in, or for one command. A frozen one would take forever.
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

/// A connection to a Redis server. It sends no command of its own, so that a test may count them.
#[derive(Debug)]
pub(super) struct Connection(MultiplexedConnection);

impl Connection {
    pub(super) async fn open(location: &Location, door: Door, password: Option<&str>) -> io::Result<Self> {
        let addr = match door {
            Door::Port => ConnectionAddr::Tcp("127.0.0.1".to_owned(), location.port),
            Door::Socket => ConnectionAddr::Unix(Door::socket(location)),
        };
        let settings = RedisConnectionInfo::default().set_skip_set_lib_name();
        let info = addr.into_connection_info().map_err(io::Error::other)?.set_redis_settings(settings);
        let limits = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(ANSWER_WITHIN))
            .set_response_timeout(Some(ANSWER_WITHIN));
        let client = Client::open(info).map_err(io::Error::other)?;
        let connection = client.get_multiplexed_async_connection_with_config(&limits).await;
        let mut connection = Self(connection.map_err(io::Error::other)?);
        if let Some(password) = password {
            connection.command(&["AUTH", password]).await?;
        }
        Ok(connection)
    }

    /// Runs one command and renders its reply as text, one line per element.
    ///
    /// An error reply is an error of the kind [`io::ErrorKind::Other`] with the server's own words.
    pub(super) async fn command(&mut self, words: &[&str]) -> io::Result<String> {
        let mut command = redis::Cmd::new();
        command.arg(words);
        let reply = command.query_async(&mut self.0).await.map_err(in_its_own_words)?;
        Ok(lines(reply).join("\n"))
    }
}

fn in_its_own_words(error: RedisError) -> io::Error {
    match (error.code(), error.detail()) {
        (Some(code), Some(detail)) => io::Error::other(format!("{code} {detail}")),
        _ => io::Error::other(error),
    }
}

fn lines(reply: Value) -> Vec<String> {
    match reply {
        Value::Nil => vec!["(nil)".to_owned()],
        Value::Int(number) => vec![number.to_string()],
        Value::Okay => vec!["OK".to_owned()],
        Value::SimpleString(text) => vec![text],
        Value::BulkString(bytes) => vec![String::from_utf8_lossy(&bytes).into_owned()],
        Value::Array(values) => values.into_iter().flat_map(lines).collect(),
        other => vec![format!("{other:?}")],
    }
}
