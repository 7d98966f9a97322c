//! The byte stream under a connection: TCP, with or without TLS.

use std::{
    future::{Future, poll_fn},
    io,
    pin::Pin,
    task::Poll,
    time::Duration,
};

use lockkit_core::Result;
use redis::io::tcp::socket2::{SockRef, TcpKeepalive};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpStream, lookup_host},
};
use tokio_util::io::InspectReader;

use crate::{client::answered::FirstBytes, config::RedisConfig, wire::error};

/// Anything that carries a connection.
pub(crate) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// Opens a stream to a server. With it comes what the server says first.
///
/// # Errors
/// Of the name's resolution, or of the last address that was tried, or of TLS.
pub(crate) async fn open(config: &RedisConfig, host: &str, port: u16) -> Result<(Box<dyn Stream>, FirstBytes)> {
    let first_bytes = FirstBytes::new(config.tls);
    let heard = first_bytes.clone();
    let stream = connect(host, port).await.map_err(error::map_open)?;
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

async fn connect(host: &str, port: u16) -> io::Result<TcpStream> {
    let addresses = lookup_host((host, port)).await?;
    let stream = first(addresses.map(|address| Box::pin(TcpStream::connect(address))).collect()).await?;
    // Nagle's algorithm costs 39 to 68 % of the throughput on a real network (redis-rs#2195).
    stream.set_nodelay(true)?;
    let keepalive = TcpKeepalive::new().with_time(Duration::from_secs(15)).with_interval(Duration::from_secs(5));
    SockRef::from(&stream).set_tcp_keepalive(&keepalive)?;
    Ok(stream)
}

/// The first that succeeds of several attempts made at once.
async fn first<F: Future<Output = io::Result<TcpStream>> + Unpin>(mut attempts: Vec<F>) -> io::Result<TcpStream> {
    let mut failure = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
    poll_fn(move |cx| {
        let mut index = 0;
        while let Some(attempt) = attempts.get_mut(index) {
            match Pin::new(attempt).poll(cx) {
                Poll::Ready(Ok(stream)) => return Poll::Ready(Ok(stream)),
                Poll::Ready(Err(e)) => {
                    failure = e;
                    drop(attempts.swap_remove(index));
                }
                Poll::Pending => index += 1,
            }
        }
        if attempts.is_empty() {
            let failure = std::mem::replace(&mut failure, io::ErrorKind::NotFound.into());
            return Poll::Ready(Err(failure));
        }
        Poll::Pending
    })
    .await
}
