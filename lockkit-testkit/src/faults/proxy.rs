//! A proxy between a client and a server that is told what to do to their connections.

use super::{
    answers::{Framing, Slip},
    connection,
    shared::{Direction, Rules, Shared},
    trap::Trap,
};
use lockkit_core::store::unpoisoned;
use std::{
    io, mem,
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinHandle,
    time::sleep,
};

/// A TCP proxy on 127.0.0.1 that can cut, hold, delay, lose, repeat and change what passes through it.
///
/// At first it lets everything pass. What it is told holds for all its connections, open ones and new ones, until
/// it is told otherwise. Of the protocol that is spoken through it it knows no more than where an
/// [answer ends](Framing). It ends, with all its connections, when it is dropped.
///
/// ```
/// # async fn example(server: std::net::SocketAddr) -> std::io::Result<()> {
/// use lockkit_testkit::faults::{Direction, Proxy};
///
/// let proxy = Proxy::start(server).await?;
/// // ... connect a client to proxy.addr() instead of the server ...
/// proxy.hold(Direction::ToClient); // The server does what it is asked, and nobody hears of it.
/// proxy.heal();
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Proxy {
    addr: SocketAddr,
    shared: Arc<Shared>,
    listening: JoinHandle<()>,
}

impl Proxy {
    /// Starts a proxy before the server at `upstream`, which need not run yet.
    ///
    /// # Errors
    ///
    /// If there is no free port.
    pub async fn start(upstream: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let addr = listener.local_addr()?;
        let shared = Arc::new(Shared::new(upstream));
        let listening = tokio::spawn(accept(listener, shared.clone()));
        Ok(Self { addr, shared, listening })
    }

    /// Tells how the server's answers end, for [`slip`](Self::slip), on connections that are made from now on. At first
    /// it takes what comes between two requests for one answer.
    #[must_use]
    pub fn framing(self, framing: Framing) -> Self {
        *unpoisoned(&self.shared.framing) = framing;
        self
    }

    /// The address for clients to connect to.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// How many connections are open.
    #[must_use]
    pub fn connections(&self) -> usize {
        unpoisoned(&self.shared.connections).receiver_count()
    }

    /// Resets every open connection on both sides, and returns when all are gone. New ones are welcome.
    pub async fn cut(&self) {
        let old = mem::take(&mut *unpoisoned(&self.shared.connections));
        old.send_replace(true);
        old.closed().await;
    }

    /// Whether new connections are reset as soon as they are made. Open ones stay.
    pub fn refuse(&self, refuse: bool) {
        self.shared.rules.send_modify(|rules| rules.refuse = refuse);
    }

    /// Holds back what is sent in this direction, also that a side hangs up, until [`release`](Self::release).
    ///
    /// Both sides still take their connection for a good one. New connections are accepted as ever.
    pub fn hold(&self, direction: Direction) {
        self.shared.rules.send_modify(|rules| rules.lanes[direction as usize].held = true);
    }

    /// Lets so many bytes more of what servers say pass, counted over all connections, and then [holds](Self::hold) the rest back: in the
    /// middle of an answer, perhaps. Until that is reached, only [`heal`](Self::heal) takes it back.
    pub fn hold_replies_after(&self, bytes: usize) {
        *unpoisoned(&self.shared.until_hold) = Some(bytes);
    }

    /// Waits until replies are held back.
    pub async fn held(&self) {
        // It can't fail: the sender lives as long as `self`.
        let _ = self.shared.rules.subscribe().wait_for(|rules| rules.lanes[Direction::ToClient as usize].held).await;
    }

    /// Delivers what was held back in this direction, and lets pass what follows.
    pub fn release(&self, direction: Direction) {
        self.shared.rules.send_modify(|rules| rules.lanes[direction as usize].held = false);
    }

    /// Holds back both directions: connections stay open and new ones are accepted, but nothing comes through.
    pub fn blackhole(&self) {
        self.hold(Direction::ToServer);
        self.hold(Direction::ToClient);
    }

    /// Delivers what is sent in this direction that much later. Pieces sent one after the other are delayed side by
    /// side. Delays of no more than 50 ms are kept to a fraction of a millisecond, others to a millisecond or two.
    pub fn delay(&self, direction: Direction, delay: Duration) {
        self.shared.rules.send_modify(|rules| rules.lanes[direction as usize].delay = delay);
    }

    /// Loses the reply to one request: the effect happens, and the client can't know.
    ///
    /// The request is the one with the `nth` occurrence (the first is 1) of `pattern` in what clients send from now on,
    /// counted over all connections; an empty pattern is in everything. It is forwarded; when the server has
    /// answered, the answer is thrown away and the connection is reset. That happens once; [`dropped`](Self::dropped)
    /// tells when. If the server goes away without an answer, the next occurrence is taken instead.
    ///
    /// With several requests under way on one connection, all their replies are lost. The server has then read all
    /// that was forwarded until the first of these replies, so a request with the pattern must not be so long that it
    /// is sent in several pieces.
    pub fn drop_reply_after(&self, pattern: impl Into<Vec<u8>>, nth: usize) {
        self.shared.dropped.send_replace(false);
        *unpoisoned(&self.shared.trap) = Some(Trap::new(pattern.into(), nth));
    }

    /// Changes what the server says, piece by piece as it comes: a short reply to one request is one piece, and several that
    /// come together may be one.
    pub fn rewrite_replies(&self, rewrite: impl FnMut(Vec<u8>) -> Vec<u8> + Send + 'static) {
        unpoisoned(&self.shared.rewrites)[Direction::ToClient as usize] = Some(Box::new(rewrite));
    }

    /// Changes what clients say, piece by piece as it comes: a short request is one piece, and several that are sent together may
    /// be one.
    pub fn rewrite_requests(&self, rewrite: impl FnMut(Vec<u8>) -> Vec<u8> + Send + 'static) {
        unpoisoned(&self.shared.rewrites)[Direction::ToServer as usize] = Some(Box::new(rewrite));
    }

    /// Waits until the reply that [`drop_reply_after`](Self::drop_reply_after) asked for was lost.
    ///
    /// It returns at once if that has happened already, and never if nothing was asked for.
    pub async fn dropped(&self) {
        // It can't fail: the sender lives as long as `self`.
        let _ = self.shared.dropped.subscribe().wait_for(|&dropped| dropped).await;
    }

    /// Loses one whole answer, or has it come twice, so that a client that does not look takes every later answer on that
    /// connection for the one to the question before, or after.
    ///
    /// It is the `nth` answer (the first is 1) that begins from now on, counted over all connections. How a server greets a
    /// new connection is an answer too, but does not come twice: ZooKeeper's driver takes a second greeting for an answer
    /// from a server that is far ahead, and finds none that is as far until its session has ended.
    pub fn slip(&self, slip: Slip, nth: usize) {
        *unpoisoned(&self.shared.slip) = Some((slip, nth.max(1)));
    }

    /// Whether the answer came that was to be lost, or to come twice.
    #[must_use]
    pub fn slipped(&self) -> bool {
        unpoisoned(&self.shared.slip).is_some_and(|(_, countdown)| countdown == 0)
    }

    /// Lets everything pass again, at once and in order, what was held back included, and forgets about dropping replies,
    /// about changing anything, and about an answer that was to slip.
    pub fn heal(&self) {
        *unpoisoned(&self.shared.trap) = None;
        *unpoisoned(&self.shared.slip) = None;
        *unpoisoned(&self.shared.rewrites) = [None, None];
        *unpoisoned(&self.shared.until_hold) = None;
        self.shared.rules.send_replace(Rules::default());
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.listening.abort();
        unpoisoned(&self.shared.connections).send_replace(true);
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    loop {
        match listener.accept().await {
            Ok((client, _)) if shared.rules.borrow().refuse => connection::reset(&client),
            Ok((client, _)) => {
                let cut = unpoisoned(&shared.connections).subscribe();
                tokio::spawn(serve(shared.clone(), cut, client));
            }
            // Most likely there are too many open files, and that takes a while to get better.
            Err(_) => sleep(Duration::from_millis(10)).await,
        }
    }
}

async fn serve(shared: Arc<Shared>, cut: watch::Receiver<bool>, client: TcpStream) {
    connection::serve(&shared, cut, client).await;
}
