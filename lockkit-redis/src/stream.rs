//! The byte stream under a connection: TCP, with or without TLS, and writes that wait for company.

use std::{
    future::{Future, poll_fn},
    io,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use redis::io::tcp::socket2::{SockRef, TcpKeepalive};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpStream, lookup_host},
};

use crate::config::RedisConfig;

/// Anything that carries a connection.
pub(crate) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// Opens a stream to the server.
///
/// # Errors
/// Of the name's resolution, or of the last address that was tried; TLS errors come as [`io::Error`] too.
pub(crate) async fn open(config: &RedisConfig) -> io::Result<Box<dyn Stream>> {
    let addresses = lookup_host((config.host.as_str(), config.port)).await?;
    let stream = first(addresses.map(|address| Box::pin(TcpStream::connect(address))).collect()).await?;
    // Nagle's algorithm costs 39 to 68 % of the throughput on a real network (redis-rs#2195).
    stream.set_nodelay(true)?;
    let keepalive = TcpKeepalive::new().with_time(Duration::from_secs(15)).with_interval(Duration::from_secs(5));
    SockRef::from(&stream).set_tcp_keepalive(&keepalive)?;
    #[cfg(feature = "tls")]
    if config.tls {
        return Ok(Box::new(Together::new(crate::tls::handshake(config, stream).await?)));
    }
    Ok(Box::new(Together::new(stream)))
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

/// A stream whose writes give way once to whatever else is ready to run, so that the requests of many tasks leave in
/// one piece.
///
/// A runtime runs the connection's driver as soon as the first of them has handed over its request, and each would cost
/// the client and the server a system call. When nobody else is ready, giving way costs a fraction of a microsecond.
#[derive(Debug)]
struct Together<S> {
    inner: S,
    gave_way: bool,
}

impl<S> Together<S> {
    fn new(inner: S) -> Self {
        Self { inner, gave_way: false }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Together<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if !self.gave_way {
            self.gave_way = true;
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let written = Pin::new(&mut self.inner).poll_write(cx, bytes);
        self.gave_way = written.is_pending();
        written
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Together<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(cx, buffer)
    }
}
