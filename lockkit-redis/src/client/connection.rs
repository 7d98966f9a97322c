//! A connection to a server: sends requests, bounds them, and gives itself up when it is dead.
//!
//! All requests share it and are answered in order, also those that [leave together](crate::client::batch), so that a release
//! always runs behind the acquisition that it undoes (rule R8). There is no retry. The [dialer](crate::client::dialer) makes
//! the next connection.
//!
//! A connection is given up
//! - when it breaks: the driver says so at once, and the next operation makes a new one;
//! - when it is a black hole. Nothing breaks then, and the driver alone would never give it up
//!   (redis-rs#1032). An operation that times out, or is abandoned after half of its time, without anything having been
//!   received since it began, leaves a strike; any answer wipes it out. A second such operation that began **after** the
//!   strike ends the connection. So the release that follows upon a timed-out acquisition still goes the same way, and a
//!   burst of operations that time out together counts once. A caller that went away hears
//!   no error, and what is sent from then on may arrive before what was sent earlier: so the store counts each connection that goes
//!   out of use ([`Reconnections`]), for the core to know;
//! - when an answer comes that belongs to [another question](crate::wire::number);
//! - when the server turns out to be a replica (`READONLY`), or not to be the one that it was, or when a sentinel says
//!   that another took over: the next operation finds out where the name leads now.

use std::{
    future::Future,
    iter,
    pin::{Pin, pin},
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use lockkit_core::{
    Error, Fence, FenceClock, Result,
    store::{Reconnections, SingleFlight},
};
use redis::{Cmd, Pipeline, RedisResult, Value, aio::MultiplexedConnection};
use tokio::{
    task::AbortHandle,
    time::{Instant, timeout},
};

use crate::{
    client::{
        batch::{Batches, is_unknown_script},
        epoch::Epoch,
        questions,
        sentinel::Watches,
        subscriptions::Subscriptions,
    },
    wire::{
        address::Address,
        error::{self, Sent},
        number::{self, Numbered},
        request::{self, Request},
    },
};

/// A connection that was made, dead or alive.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(super) inner: Arc<MultiplexedConnection>,
    /// The task that moves the bytes. It ends with the last user of this value, whatever is under way.
    pub(super) driver: AbortHandle,
    /// Which connection of its dialer this is.
    pub(super) generation: u64,
    pub(super) broken: Arc<AtomicBool>,
    pub(super) batches: Arc<Batches>,
    /// How many operations are under way.
    pub(super) under_way: AtomicUsize,
    pub(super) received: AtomicU64,
    pub(super) struck: AtomicBool,
    pub(super) reconnections: Reconnections,
    pub(super) address: Address,
    pub(super) epoch: Option<Epoch>,
    /// The server's clock when the connection was made, where no other server can take over; or why it is not known. It is above all
    /// fences that the server gave out before, so that a counter that comes back older than it was, from a snapshot or on a replica
    /// that took over, does not go on from there. No connection outlives a restart.
    pub(super) clock: Result<Fence>,
    /// The sentinels, if it was they who named the server.
    pub(super) watches: Option<Watches>,
    pub(super) subscriptions: Arc<Subscriptions>,
    /// Where the dialer keeps the connection in use.
    pub(super) shared: Weak<SharedConnection>,
}

/// The connection in use.
pub(super) type SharedConnection = SingleFlight<Arc<Connection>>;

impl Connection {
    /// Runs a script. `request` names it by its hash; if the server does not know it, it was definitely not run, and is
    /// sent again with its code. `asking` for a slot of a cluster that is on its way to this server.
    pub(crate) async fn run(&self, mut request: Cmd, asking: bool, bound: Duration, sent: Sent) -> Result<Value> {
        let exchange = pin!(async {
            self.batches.make_way();
            let mut driver = MultiplexedConnection::clone(&self.inner);
            let (count, number) = (self.batches.count_sent(), self.batches.number());
            request.arg(number);
            let mut reply = send(&mut driver, &request, asking).await?;
            self.batches.count_answered(count);
            if is_unknown_script(&reply) {
                let number = self.batches.number();
                let mut again = questions::run_with_code(&mut driver, iter::once(&request), asking, number).await?;
                reply = again.pop().unwrap_or_default();
            }
            number::answer(number, reply)
        });
        let reply = self.bounded(bound, sent, exchange).await?;
        self.accept(reply, sent)
    }

    /// Asks for a lease, or ends one, together with what others ask for at the same time. Where servers can take over
    /// from each other, and for a slot that is on its way, each request goes alone; with a `guard` only to the server with
    /// this replication id.
    pub(crate) async fn request(
        &self,
        request: Box<Request>,
        guard: Option<&str>,
        asking: bool,
        bound: Duration,
    ) -> Result<Value> {
        if asking || self.epoch.is_some() {
            let command = request::alone(&request, guard);
            let reply = Box::pin(self.run(command, asking, bound, Sent::Yes)).await?;
            return self.accept(request::only_answer(reply), Sent::Yes);
        }
        let exchange = pin!(async { self.batches.run(request, self.is_alone()).await });
        let reply = self.bounded(bound, Sent::Yes, exchange).await?;
        self.accept(reply, Sent::Yes)
    }

    /// Sends several requests at once; one answer each, in order, among them errors ([`accept`](Self::accept) them). Scripts that the
    /// server does not know by their hashes are sent again with their code.
    pub(crate) async fn run_all(&self, requests: &Pipeline, bound: Duration, sent: Sent) -> Result<Vec<Value>> {
        let exchange = pin!(async {
            self.batches.make_way();
            let mut driver = MultiplexedConnection::clone(&self.inner);
            let (count, asked) = (self.batches.count_sent(), Numbered::new(requests, || self.batches.number()));
            let mut replies = driver.send_packed_commands(&asked.requests, 0, asked.requests.len()).await?;
            self.batches.count_answered(count);
            if replies.iter().any(is_unknown_script) {
                let asked = asked.requests.cmd_iter().zip(&replies);
                let unknown = asked.filter(|(_, reply)| is_unknown_script(reply)).map(|(request, _)| request);
                let again = questions::run_with_code(&mut driver, unknown, false, self.batches.number()).await?;
                let places = replies.iter_mut().filter(|reply| is_unknown_script(reply));
                places.zip(again).for_each(|(reply, answer)| *reply = answer);
            }
            let answers = asked.answers(replies)?;
            if sent == Sent::Yes {
                questions::confirm(&mut driver, self.batches.number(), answers.last()).await?;
            }
            Ok(answers)
        });
        self.bounded(bound, sent, exchange).await
    }

    /// Sends one request by itself. Its answer may be an error ([`accept`](Self::accept) it).
    pub(crate) async fn run_one(&self, request: Cmd, bound: Duration, sent: Sent) -> Result<Value> {
        let mut requests = Pipeline::with_capacity(1);
        requests.add_command(request);
        Ok(self.run_all(&requests, bound, sent).await?.pop().unwrap_or_default())
    }

    /// Takes a single answer: what is an error there becomes one here.
    pub(crate) fn accept(&self, reply: Value, sent: Sent) -> Result<Value> {
        let Value::ServerError(e) = reply else { return Ok(reply) };
        let e = e.into();
        if error::is_not_in_charge(&e) {
            self.give_up();
        }
        Err(error::map(&e, sent))
    }

    /// Waits for an exchange, and judges the connection by how it ends.
    async fn bounded<T>(
        &self,
        bound: Duration,
        sent: Sent,
        exchange: Pin<&mut (impl Future<Output = RedisResult<T>> + Send)>,
    ) -> Result<T> {
        let mut operation = UnderWay::begin(self, bound);
        let outcome = timeout(bound, exchange).await.ok();
        operation.ended = outcome.is_some();
        drop(operation);
        match outcome {
            // What a server says counts for nothing once it is known that another took over.
            Some(Ok(_)) if self.may_be_replaced() && self.is_broken() => Err(error::taken_over(sent)),
            Some(Ok(reply)) => {
                self.received.fetch_add(1, Ordering::Relaxed);
                if self.struck.load(Ordering::Relaxed) {
                    self.struck.store(false, Ordering::Relaxed);
                }
                Ok(reply)
            }
            Some(Err(e)) => {
                if e.is_unrecoverable_error() {
                    self.give_up();
                }
                Err(error::map(&e, sent))
            }
            None => Err(Error::no_answer(bound, sent)),
        }
    }

    /// Takes the connection out of use, and wakes those who rely on it. Operations under way go on.
    pub(super) fn give_up(&self) {
        self.broken.store(true, Ordering::Release);
        _ = self.shared.upgrade().map(|shared| shared.present(|current| current.stays()));
        self.subscriptions.detach(self.generation);
    }

    pub(super) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Acquire)
    }

    /// Whether it stays in its slot, to be asked there: that it goes is counted in the same step.
    pub(super) fn stays(&self) -> bool {
        let is_broken = self.is_broken();
        if is_broken {
            self.reconnections.add_one();
        }
        !is_broken
    }

    /// Whether another server can take over from this one. A fenced value has no epoch, but may have sentinels that say so.
    fn may_be_replaced(&self) -> bool {
        self.epoch.is_some() || self.watches.is_some()
    }

    /// Whether there is one operation under way at most.
    pub(crate) fn is_alone(&self) -> bool {
        self.under_way.load(Ordering::Relaxed) <= 1
    }

    /// The server's time in charge, where servers can take over from each other.
    pub(crate) fn epoch(&self) -> Option<&Epoch> {
        self.epoch.as_ref()
    }

    /// The mark of the leases that are granted here, where servers can take over from each other.
    pub(crate) fn mark(&self) -> Option<&str> {
        self.epoch.as_ref().map(|epoch| &*epoch.mark)
    }

    /// Adds what goes before a script that changes leases, where servers can take over from each other.
    pub(crate) fn push_epoch(&self, command: &mut Cmd) {
        if let Some(epoch) = &self.epoch {
            command.arg(&epoch.mark).arg(&epoch.run_mark).arg(&epoch.id);
        }
    }

    /// What a grant on this connection has to be above, whatever the counter says.
    ///
    /// # Errors
    /// If the server's clock is needed, and this user may not ask for it.
    pub(crate) fn floor(&self, clock: FenceClock) -> Result<Fence> {
        match (&self.epoch, clock) {
            (Some(epoch), _) => Ok(epoch.floor),
            (None, FenceClock::Store) => self.clock.clone(),
            (None, FenceClock::Floor) => Ok(Fence::NONE),
        }
    }

    /// Whether the other leads to the same server, in the same epoch.
    pub(crate) fn is_same_server(&self, other: &Self) -> bool {
        let id = |connection: &Self| connection.epoch.as_ref().map(|epoch| epoch.id.clone());
        self.address == other.address && id(self) == id(other)
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

/// Counts as under way until it is dropped. If it has not ended by then, that may tell of a black hole: the engine gives up
/// a renewal, and others what they ask for, before our own bound is over.
struct UnderWay<'a> {
    connection: &'a Connection,
    /// Whether there was a strike when it began, and what had been received.
    struck: bool,
    received: u64,
    /// From when on silence means something.
    suspicious: Option<Instant>,
    ended: bool,
}

impl<'a> UnderWay<'a> {
    fn begin(connection: &'a Connection, bound: Duration) -> Self {
        connection.under_way.fetch_add(1, Ordering::Relaxed);
        let received = connection.received.load(Ordering::Relaxed);
        let struck = connection.struck.load(Ordering::Relaxed);
        let suspicious = Instant::now().checked_add(bound / 2);
        Self { connection, struck, received, suspicious, ended: false }
    }

    fn is_unanswered(&self) -> bool {
        !self.ended
            && self.connection.received.load(Ordering::Relaxed) == self.received
            && self.suspicious.is_some_and(|suspicious| Instant::now() >= suspicious)
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        let connection = self.connection;
        connection.under_way.fetch_sub(1, Ordering::Relaxed);
        if self.is_unanswered() && connection.struck.swap(true, Ordering::Relaxed) && self.struck {
            connection.give_up();
        }
    }
}

/// Sends a request; those who say `ASKING` do so right before it.
async fn send(driver: &mut MultiplexedConnection, request: &Cmd, asking: bool) -> RedisResult<Value> {
    if !asking {
        return driver.send_packed_command(request).await;
    }
    let mut requests = Pipeline::with_capacity(2);
    requests.cmd("ASKING").add_command(request.clone());
    let replies = driver.send_packed_commands(&requests, 0, requests.len()).await?;
    Ok(replies.into_iter().nth(1).unwrap_or_default())
}
