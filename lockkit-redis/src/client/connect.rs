//! Connecting to a server and logging in: TCP, with or without TLS under it.

use std::{io, time::Duration};

use lockkit_core::Result;
use redis::{
    AsyncConnectionConfig, RedisConnectionInfo,
    aio::MultiplexedConnection,
    io::tcp::socket2::{SockRef, TcpKeepalive},
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpStream, lookup_host},
    task::{AbortHandle, JoinSet},
};
use tokio_util::io::InspectReader;

use crate::{
    client::identify::FirstBytes,
    config::RedisConfig,
    wire::{address::Address, error},
};

/// A connection to a server, with the task that moves its bytes. The bounds are those of the caller.
///
/// # Errors
/// `Misconfigured` if a server of another kind answers; `Denied` for a wrong login or certificate; `Unavailable`.
pub(crate) async fn connect(
    config: &RedisConfig,
    address: &Address,
    login: &RedisConnectionInfo,
    settings: AsyncConnectionConfig,
) -> Result<(MultiplexedConnection, AbortHandle)> {
    let (stream, first) = open(config, &address.0, address.1).await?;
    let settings = settings.set_connection_timeout(None).set_response_timeout(None);
    let connected = MultiplexedConnection::new_with_config(login, stream, settings).await;
    let (connection, driver) = connected.map_err(|e| first.explain(error::map_login(&e)))?;
    Ok((connection, tokio::spawn(driver).abort_handle()))
}

/// Anything that carries a connection.
trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// Opens a stream to a server. With it comes what the server says first.
///
/// # Errors
/// Of the name's resolution, or of the last address that was tried, or of TLS.
async fn open(config: &RedisConfig, host: &str, port: u16) -> Result<(Box<dyn Stream>, FirstBytes)> {
    let first_bytes = FirstBytes::new(config.tls);
    let heard = first_bytes.clone();
    let stream = connect_tcp(host, port).await.map_err(error::map_open)?;
    let stream = InspectReader::new(stream, move |bytes: &[u8]| heard.hear(bytes));
    #[cfg(feature = "tls")]
    if config.tls {
        let secured = crate::client::tls::handshake(config, host, stream).await;
        let secured = secured.map_err(|e| first_bytes.explain(error::map_open(e)))?;
        return Ok((Box::new(secured), first_bytes));
    }
    #[cfg(not(feature = "tls"))]
    debug_assert!(!config.tls, "a configuration with TLS is refused without the feature");
    Ok((Box::new(stream), first_bytes))
}

async fn connect_tcp(host: &str, port: u16) -> io::Result<TcpStream> {
    let addresses = lookup_host((host, port)).await?;
    let stream = first(addresses.map(TcpStream::connect)).await?;
    // Nagle's algorithm costs 39 to 68 % of the throughput on a real network (redis-rs#2195).
    stream.set_nodelay(true)?;
    let keepalive = TcpKeepalive::new().with_time(Duration::from_secs(15)).with_interval(Duration::from_secs(5));
    SockRef::from(&stream).set_tcp_keepalive(&keepalive)?;
    Ok(stream)
}

/// The first that succeeds of several attempts made at once.
async fn first<F>(attempts: impl Iterator<Item = F>) -> io::Result<TcpStream>
where
    F: Future<Output = io::Result<TcpStream>> + Send + 'static,
{
    let mut attempts: JoinSet<_> = attempts.collect();
    let mut failure = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
    while let Some(attempt) = attempts.join_next().await {
        match attempt? {
            Ok(stream) => return Ok(stream),
            Err(e) => failure = e,
        }
    }
    Err(failure)
}
