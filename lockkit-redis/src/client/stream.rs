//! The byte stream under a connection: TCP, with or without TLS, and writes that wait for company.

use std::{
    future::{Future, poll_fn},
    io,
    ops::Range,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use lockkit_core::Result;
use redis::io::tcp::socket2::{SockRef, TcpKeepalive};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpStream, lookup_host},
};

use crate::{
    client::answered::{FirstBytes, Listening},
    config::RedisConfig,
    wire::error,
};

/// Anything that carries a connection.
pub(crate) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// Opens a stream to a server; `under_way` is to be kept up to date by whoever uses it. With it comes what the server says
/// first.
///
/// # Errors
/// Of the name's resolution, or of the last address that was tried, or of TLS.
pub(crate) async fn open(
    config: &RedisConfig,
    host: &str,
    port: u16,
    under_way: UnderWay,
) -> Result<(Box<dyn Stream>, FirstBytes)> {
    let first_bytes = FirstBytes::new(config.tls);
    let stream = Listening::new(connect(host, port).await.map_err(error::map_open)?, first_bytes.clone());
    #[cfg(feature = "tls")]
    if config.tls {
        let secured = crate::client::tls::handshake(config, host, stream).await;
        let secured = secured.map_err(|e| first_bytes.explain(error::map_open(e)))?;
        return Ok((Box::new(Together::new(secured, under_way)), first_bytes));
    }
    #[cfg(not(feature = "tls"))]
    debug_assert!(!config.tls, "a configuration with TLS is refused without the feature");
    Ok((Box::new(Together::new(stream, under_way)), first_bytes))
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

/// How many operations are under way on a connection.
pub(crate) type UnderWay = Arc<AtomicUsize>;

/// A stream that lets many operations share the work, by giving way to whatever else is ready to run.
///
/// - **Writing** it gives way once. A runtime runs the connection's driver as soon as the first of many tasks has
///   handed over its request, and each alone would cost the client and the server a system call.
/// - **Reading** it gives way between small portions. Else the replies to all of them would wake all tasks at once,
///   and call for other threads to take some over; and the server would be idle until the last one has asked again.
///
/// Together this takes two thirds off the client's processor time with 64 tasks. A single operation has nobody to wait
/// for: it is read and written at once.
///
/// Where [requests leave together](crate::client::batch) this saves little time any more, but memory: while 100 000 leases are
/// renewed, a process has 800 bytes for each of them, and had 1340 without it.
struct Together<S> {
    inner: S,
    under_way: UnderWay,
    gave_way: bool,
    input: Box<[u8; INPUT]>,
    /// What is in `input` and was not handed on yet.
    pending: Range<usize>,
    /// How much of it to hand on at a time.
    portion: usize,
    paused: bool,
}

/// How much is read at once. (Some 400 short replies.)
const INPUT: usize = 8 * 1024;
/// The smallest portion that is handed on. (Some three short replies.)
const PORTION: usize = 64;
/// Long replies are handed on in portions of this part of what was read.
const PORTIONS: usize = 32;

impl<S> Together<S> {
    fn new(inner: S, under_way: UnderWay) -> Self {
        let input = Box::new([0; INPUT]);
        Self { inner, under_way, gave_way: false, input, pending: 0..0, portion: 0, paused: false }
    }

    fn is_alone(&self) -> bool {
        self.under_way.load(Ordering::Relaxed) <= 1
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Together<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if !self.gave_way && !self.is_alone() {
            self.gave_way = true;
            // Not `yield_now`, which also waits for the runtime to have looked for new events: it gains nothing here.
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
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.pending.is_empty() {
            if this.is_alone() {
                return Pin::new(&mut this.inner).poll_read(cx, buffer);
            }
            let mut input = ReadBuf::new(&mut this.input[..]);
            ready!(Pin::new(&mut this.inner).poll_read(cx, &mut input))?;
            this.pending = 0..input.filled().len();
            this.portion = PORTION.max(this.pending.len() / PORTIONS);
        } else if !this.paused {
            this.paused = true;
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        this.paused = false;
        let portion = this.pending.len().min(this.portion).min(buffer.remaining());
        let (start, end) = (this.pending.start, this.pending.start + portion);
        buffer.put_slice(&this.input[start..end]);
        this.pending.start = end;
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    /// Whatever the portions, the bytes arrive complete and in order, and so does the end.
    #[tokio::test]
    async fn nothing_is_lost_on_the_way() {
        let bytes: Vec<u8> = (0..100_000_u32).map(|i| (i * 7 / 3) as u8).collect();
        for operations in [0, 1, 2, 64] {
            let (near, mut far) = duplex(20_000);
            let under_way = UnderWay::new(AtomicUsize::new(operations));
            let mut stream = Together::new(near, Arc::clone(&under_way));
            let (sent, all) = (bytes.clone(), bytes.clone());
            let echo = tokio::spawn(async move {
                let mut received = vec![0; sent.len()];
                far.read_exact(&mut received).await.expect("read");
                assert!(received == sent);
                for (i, part) in received.chunks(3333).enumerate() {
                    far.write_all(part).await.expect("write");
                    under_way.store(if i % 5 == 4 { 1 } else { operations }, Ordering::Relaxed);
                }
            });
            stream.write_all(&all).await.expect("write");
            stream.flush().await.expect("flush");
            let mut back = Vec::new();
            stream.read_to_end(&mut back).await.expect("read");
            assert!(back == all, "{operations} operations");
            echo.await.expect("echo");
        }
    }
}
