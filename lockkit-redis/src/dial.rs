//! Connecting and logging in, and what to say when something else answers.

use std::{io, time::Duration};

use lockkit_core::{Error, ErrorKind, Result};
use redis::{AsyncConnectionConfig, RedisConnectionInfo, aio::MultiplexedConnection};
use tokio::{net::TcpStream, task::AbortHandle, time::timeout};

use crate::{
    config::RedisConfig,
    error,
    sentinel::Place,
    stream::{self, UnderWay},
};

/// For how long a greeting is waited for, once it is known that no Redis answers.
const GREETING: Duration = Duration::from_millis(500);

/// A connection to a server, with the task that moves its bytes. The bounds are those of the caller.
///
/// # Errors
/// `InvalidInput` if a server of another kind answers; `Denied` for a wrong login or certificate; `Unavailable`.
pub(crate) async fn connect(
    config: &RedisConfig,
    place: &Place,
    login: &RedisConnectionInfo,
    settings: AsyncConnectionConfig,
    under_way: UnderWay,
) -> Result<(MultiplexedConnection, AbortHandle)> {
    let stream = match stream::open(config, &place.0, place.1, under_way).await {
        Ok(stream) => stream,
        // What is no TLS may be no Redis.
        Err(e) if e.kind() == io::ErrorKind::InvalidData => return Err(explain(place, error::map_open(e)).await),
        Err(e) => return Err(error::map_open(e)),
    };
    let settings = settings.set_connection_timeout(None).set_response_timeout(None);
    match MultiplexedConnection::new_with_config(login, stream, settings).await {
        Ok((connection, driver)) => Ok((connection, tokio::spawn(driver).abort_handle())),
        Err(e) if e.kind() == redis::ErrorKind::Parse => {
            let unknown = "something that is no Redis server answers there; check host, port and the scheme of the URL";
            Err(explain(place, Error::new(ErrorKind::InvalidInput, unknown).with_source(e)).await)
        }
        Err(e) => Err(error::map_login(&e)),
    }
}

/// Names a server that speaks first, as MySQL does.
async fn explain((host, port): &Place, cause: Error) -> Error {
    let listen = async {
        let (mut greeting, stream) = ([0; 5], TcpStream::connect((host.as_str(), *port)).await?);
        stream.readable().await?;
        stream.try_read(&mut greeting).map(|_| greeting)
    };
    match timeout(GREETING, listen).await {
        // The first packet: its length, the number 0, and the version of the protocol, or an error.
        Ok(Ok([_, _, _, 0, 10 | 255])) => {
            let what = "a MySQL or MariaDB server answers there; check host, port and the scheme of the URL";
            Error::new(ErrorKind::InvalidInput, what).with_source(cause)
        }
        _ => cause,
    }
}
