//! One connection through the proxy.
//!
//! Each direction is a queue between what is read and what is delivered, so that a delay delays everything by the same
//! time, and what is held waits. The end of a stream waits in the queue like everything else: through a black hole
//! nobody hears the other side hang up.

use super::{
    answers::Answers,
    shared::{Direction, Shared},
};
use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpStream,
        tcp::{ReadHalf, WriteHalf},
    },
    sync::{mpsc, watch},
    time::{Instant, timeout},
};

/// How much is read at once, and how much of it may be queued: enough for any test, and bounded.
const CHUNK: usize = 64 * 1024;
const QUEUE: usize = 256;

/// How long a server may take to hang up after the reply that is to be lost.
const HANG_UP_WITHIN: Duration = Duration::from_secs(1);

/// What came out of a stream.
enum Event {
    Bytes(Vec<u8>),
    /// One side has sent all that it wanted to send.
    End,
    /// The connection broke.
    Reset,
}

impl Event {
    fn is_last(&self) -> bool {
        !matches!(self, Self::Bytes(_))
    }
}

/// What is read in one direction, with the time when it was.
type Queue = mpsc::Sender<(Instant, Event)>;

/// One side broke the connection, and the other may know.
struct Broken;

/// How a connection ended.
enum Ended {
    /// Both sides had sent all that they wanted to send.
    Closed,
    Reset,
    ReplyLost(Loss),
}

/// How far the loss of a reply has come on this connection.
#[derive(Clone, Copy, Debug, Default)]
struct Loss {
    /// The request is about to be forwarded. From now on the client gets nothing any more.
    begun: bool,
    /// The request was forwarded in full.
    forwarded: bool,
    /// Something came back.
    answered: bool,
    /// The server hung up.
    ended: bool,
}

impl Loss {
    /// Whether the reply came, and was lost.
    fn is_done(&self) -> bool {
        self.forwarded && self.answered
    }

    /// Whether there is nothing left to wait for.
    fn is_over(&self) -> bool {
        self.is_done() || (self.begun && self.ended)
    }
}

/// Serves one client until either side hangs up, or the proxy cuts the connection.
pub(super) async fn serve(shared: &Shared, mut cut: watch::Receiver<bool>, mut client: TcpStream) {
    let connected = tokio::select! {
        biased;
        _ = cut.wait_for(|cut| *cut) => None,
        server = connect(shared) => server,
    };
    let Some(mut server) = connected else { return reset(&client) };
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let outcome = tokio::select! {
        biased;
        _ = cut.wait_for(|cut| *cut) => Ended::Reset,
        outcome = relay(shared, &mut client, &mut server) => outcome,
    };
    match outcome {
        Ended::Closed => {}
        Ended::Reset => {
            reset(&client);
            reset(&server);
        }
        Ended::ReplyLost(loss) => {
            // With several requests under way, what came back may be the answer to an earlier one. So the server is
            // told politely that no more requests come, and has read all of them when it hangs up in turn. (A reset
            // would make the kernel throw away what the server has not read yet.)
            let _ = server.shutdown().await;
            let _ = timeout(HANG_UP_WITHIN, tokio::io::copy(&mut server, &mut tokio::io::sink())).await;
            reset(&client);
            drop(client);
            shared.reply_was_lost(loss.is_done());
        }
    }
}

async fn connect(shared: &Shared) -> Option<TcpStream> {
    match TcpStream::connect(shared.upstream).await {
        Ok(server) => Some(server),
        Err(_) => {
            // That the server is down is news too, and must not get through while its direction is held.
            shared.may_pass(Direction::ToClient, Instant::now()).await;
            None
        }
    }
}

/// Makes closing the stream a reset: whoever is at the other end gets an error instead of a polite end.
pub(super) fn reset(stream: &TcpStream) {
    // It fails only on a connection that is gone already.
    let _ = stream.set_zero_linger();
}

/// Lets bytes pass both ways, as far as the rules of the proxy allow.
async fn relay(shared: &Shared, client: &mut TcpStream, server: &mut TcpStream) -> Ended {
    let (from_client, to_client) = client.split();
    let (from_server, to_server) = server.split();
    let (requests, queued_requests) = mpsc::channel(QUEUE);
    let (replies, queued_replies) = mpsc::channel(QUEUE);
    let loss = watch::Sender::new(Loss::default());
    let mut watched = loss.subscribe();
    let turn = Counter::default();
    let up = async {
        let read = read_requests(from_client, requests, &turn);
        tokio::join!(read, deliver(shared, Direction::ToServer, queued_requests, to_server, &loss)).1
    };
    let down = async {
        let read = read_replies(shared, from_server, replies, &loss, &turn);
        tokio::join!(read, deliver(shared, Direction::ToClient, queued_replies, to_client, &loss)).1
    };
    // All in one task, so that between two awaits of one part nothing happens in another.
    let result = tokio::select! {
        biased;
        _ = watched.wait_for(Loss::is_over) => Ok(()),
        result = async { tokio::try_join!(up, down) } => result.map(drop),
    };
    let loss = *loss.borrow();
    match result {
        _ if loss.begun => Ended::ReplyLost(loss),
        Ok(()) => Ended::Closed,
        Err(Broken) => Ended::Reset,
    }
}

/// How many pieces of requests were read.
type Counter = AtomicU64;

async fn read_requests(mut from: ReadHalf<'_>, queue: Queue, turn: &Counter) {
    loop {
        let event = read(&mut from).await;
        let is_last = event.is_last();
        turn.fetch_add(1, Ordering::Relaxed);
        if queue.send((Instant::now(), event)).await.is_err() || is_last {
            return;
        }
    }
}

async fn read_replies(
    shared: &Shared,
    mut from: ReadHalf<'_>,
    queue: Queue,
    loss: &watch::Sender<Loss>,
    turn: &Counter,
) {
    let mut answers = Answers::new(shared.answers());
    loop {
        let mut event = read(&mut from).await;
        let is_last = event.is_last();
        if let Event::Bytes(bytes) = &mut event {
            *bytes = answers.pass(bytes, turn.load(Ordering::Relaxed), |is_greeting| shared.fate(is_greeting));
        }
        let mut is_lost = false;
        loss.send_modify(|loss| {
            is_lost = loss.begun;
            loss.answered |= loss.begun && !is_last;
            loss.ended |= is_last;
        });
        if !is_lost && queue.send((Instant::now(), event)).await.is_err() || is_last {
            return;
        }
    }
}

async fn read(from: &mut ReadHalf<'_>) -> Event {
    let mut bytes = Vec::with_capacity(CHUNK);
    match from.read_buf(&mut bytes).await {
        Ok(0) => Event::End,
        Ok(_) => Event::Bytes(bytes),
        Err(_) => Event::Reset,
    }
}

/// Hands on what was read in one direction, when the rules allow it.
async fn deliver(
    shared: &Shared,
    direction: Direction,
    mut queue: mpsc::Receiver<(Instant, Event)>,
    mut to: WriteHalf<'_>,
    loss: &watch::Sender<Loss>,
) -> Result<(), Broken> {
    // The end of what was sent before, for the trap.
    let mut before = Vec::new();
    while let Some((read_at, event)) = queue.recv().await {
        shared.may_pass(direction, read_at).await;
        // A failed write is no reason to end: that the other side is gone is news that travels the other way, and that
        // way may be held. So what can't be delivered is swallowed, and the reader of the same stream reports the end.
        match (direction, event) {
            (Direction::ToServer, Event::Bytes(bytes)) => {
                let bytes = shared.rewritten(direction, bytes);
                let springs = shared.trap_springs(&mut before, &bytes);
                if springs {
                    loss.send_modify(|loss| loss.begun = true);
                }
                let _ = to.write_all(&bytes).await;
                if springs {
                    loss.send_modify(|loss| loss.forwarded = true);
                }
            }
            (Direction::ToClient, Event::Bytes(_)) if loss.borrow().begun => {}
            (Direction::ToClient, Event::Bytes(bytes)) => {
                let bytes = shared.rewritten(direction, bytes);
                let (now, later) = bytes.split_at(shared.passes(&bytes));
                let _ = to.write_all(now).await;
                if !later.is_empty() {
                    shared.may_pass(direction, read_at).await;
                    let _ = to.write_all(later).await;
                }
            }
            (_, Event::End) => drop(to.shutdown().await),
            (_, Event::Reset) => return Err(Broken),
        }
    }
    Ok(())
}
