//! The one connection of a store: made when it is needed, watched, and replaced when it is dead.
//!
//! All requests share it and are answered in order, also those that [leave together](crate::client::batch), so that a release
//! always runs behind the acquisition that it undoes (rule R8). There is no retry: the operation that finds no connection
//! has one [made](crate::client::dialer), others that come meanwhile wait for the same attempt, and if it fails they all fail with
//! its error.
//!
//! A connection is given up
//! - when it breaks: the driver says so at once, and the next operation makes a new one;
//! - when it is a black hole. Nothing breaks then, and the driver alone would never give it up
//!   (redis-rs#1032). An operation that times out, or is abandoned after half of its time, without anything having been
//!   received since it began, leaves a strike; any answer wipes it out. A second such operation that began **after** the
//!   strike ends the connection. So the release that follows upon a timed-out acquisition still goes the same way, and a
//!   burst of operations that time out together counts once;
//! - when an answer comes that belongs to [another question](crate::wire::number);
//! - when the server turns out to be a replica (`READONLY`), or not to be the one that it was, or when a sentinel says
//!   that another took over: the next operation finds out where the name leads now.

use std::{
    fmt,
    future::Future,
    pin::{Pin, pin},
    sync::{Arc, PoisonError, atomic::Ordering},
    time::Duration,
};

use lockkit_core::{Alarm, Error, Result};
use redis::{Cmd, Pipeline, RedisResult, Value, aio::MultiplexedConnection};
use tokio::time::{Instant, timeout};

pub(crate) use crate::client::dialer::{Connection, NoteKey};
use crate::{
    client::{
        batch::{Batches, is_unknown_script},
        dialer::Line,
        subscriptions::Wake,
    },
    config::RedisConfig,
    wire::{
        error::{self, Sent},
        number,
        request::{self, Request},
        scripts::Script,
    },
};

/// Makes, watches and replaces the connection.
pub(crate) struct Link(Arc<Line>);

impl Link {
    /// A link that is not connected yet. `note` is where the server's note about its reign is, and `alarm` is for the
    /// case that it ends, where servers can take over from each other.
    pub(crate) fn new(config: RedisConfig, note: Option<Arc<NoteKey>>, alarm: Option<Alarm>, wake: Arc<Wake>) -> Self {
        Self(Arc::new(Line::new(config, note, alarm, wake)))
    }

    /// Who logs in, if it is not the default user.
    pub(crate) fn username(&self) -> Option<&str> {
        self.0.config.login.username.as_deref()
    }

    /// See [`Line::connection`].
    pub(crate) async fn connection(&self) -> Result<Arc<Connection>> {
        self.0.connection().await
    }

    /// The connection, if there is one.
    pub(crate) fn current(&self) -> Option<Arc<Connection>> {
        self.0.current()
    }

    /// Has the server's note written at the key that it has now, for those who connect from now on. Returns at once.
    pub(crate) fn write_note(&self) {
        let Some(connection) = self.current() else { return };
        let line = Arc::clone(&self.0);
        tokio::spawn(async move {
            let seen = connection.reign().map(|reign| reign.note.clone()).unwrap_or_default();
            // If it fails, they find no note, and pause if they must.
            _ = timeout(line.config.timeout, line.reign(&connection.inner, &seen)).await;
        });
    }

    /// Runs a script. `request` names it by its hash; if the server does not know it, it was definitely not run, and is
    /// sent again with its code. `asking` for a slot of a cluster that is on its way to this server.
    pub(crate) async fn run(
        &self,
        connection: &Connection,
        script: &Script,
        request: &Cmd,
        asking: bool,
        bound: Duration,
        sent: Sent,
    ) -> Result<Value> {
        let exchange = pin!(async {
            connection.batches.make_way();
            let mut driver = MultiplexedConnection::clone(&connection.inner);
            let (count, number) = (connection.batches.count_sent(), connection.batches.number());
            let mut request = request.clone();
            request.arg(number);
            let mut reply = send(&mut driver, &request, asking).await?;
            connection.batches.count_answered(count);
            if is_unknown_script(&reply) {
                reply = send(&mut driver, &script.by_code(&request), asking).await?;
            }
            number::answer(number, reply)
        });
        let reply = self.bounded(connection, bound, sent, exchange).await?;
        self.accept(connection, reply, sent)
    }

    /// Asks for a lease, or ends one, together with what others ask for at the same time. Where servers can take over
    /// from each other, and for a slot that is on its way, each request goes alone; with a `guard` only to the server with
    /// this replication id.
    pub(crate) async fn request(
        &self,
        connection: &Connection,
        request: Box<Request>,
        guard: Option<&str>,
        asking: bool,
        bound: Duration,
    ) -> Result<Value> {
        if asking || self.fails_over() {
            let (script, command) = request::alone(&request, guard);
            let reply = Box::pin(self.run(connection, script, &command, asking, bound, Sent::Yes)).await?;
            return self.accept(connection, request::only_answer(reply), Sent::Yes);
        }
        let exchange = pin!(async { connection.batches.run(request, connection.is_alone()).await });
        let reply = self.bounded(connection, bound, Sent::Yes, exchange).await?;
        self.accept(connection, reply, Sent::Yes)
    }

    /// Sends several requests at once; one answer each, in order, among them errors ([`accept`](Self::accept) them).
    ///
    /// With a script, requests that the server does not know by hash are sent again with its code.
    pub(crate) async fn run_all(
        &self,
        connection: &Connection,
        script: Option<&Script>,
        requests: &Pipeline,
        bound: Duration,
        sent: Sent,
    ) -> Result<Vec<Value>> {
        let exchange = pin!(async {
            connection.batches.make_way();
            let mut driver = MultiplexedConnection::clone(&connection.inner);
            let (count, asked) = (connection.batches.count_sent(), Numbered::new(requests, &connection.batches));
            let mut replies = driver.send_packed_commands(&asked.requests, 0, asked.requests.len()).await?;
            connection.batches.count_answered(count);
            for (reply, request) in replies.iter_mut().zip(asked.requests.cmd_iter()) {
                if let (Some(script), true) = (script, is_unknown_script(reply)) {
                    *reply = driver.send_packed_command(&script.by_code(request)).await?;
                }
            }
            let answers = asked.answers(replies)?;
            if sent == Sent::Yes {
                number::confirm(&mut driver, connection.batches.number(), answers.last()).await?;
            }
            Ok(answers)
        });
        self.bounded(connection, bound, sent, exchange).await
    }

    /// Takes a single answer: what is an error there becomes one here.
    pub(crate) fn accept(&self, connection: &Connection, reply: Value, sent: Sent) -> Result<Value> {
        let Value::ServerError(e) = reply else { return Ok(reply) };
        let e = e.into();
        if error::is_not_in_charge(&e) {
            self.give_up(connection);
        }
        Err(error::map(&e, sent))
    }

    /// Waits for an exchange, and judges the connection by how it ends.
    async fn bounded<T>(
        &self,
        connection: &Connection,
        bound: Duration,
        sent: Sent,
        exchange: Pin<&mut (impl Future<Output = RedisResult<T>> + Send)>,
    ) -> Result<T> {
        let mut operation = Operation::begin(self, connection, bound);
        let outcome = connection.timers.within(bound, exchange).await;
        operation.ended = outcome.is_some();
        drop(operation);
        match outcome {
            // What a server says counts for nothing once it is known that another took over.
            Some(Ok(_)) if connection.reign().is_some() && connection.broken.load(Ordering::Acquire) => {
                Err(error::taken_over(sent))
            }
            Some(Ok(reply)) => {
                connection.received.fetch_add(1, Ordering::Relaxed);
                if connection.struck.load(Ordering::Relaxed) {
                    connection.struck.store(false, Ordering::Relaxed);
                }
                Ok(reply)
            }
            Some(Err(e)) => {
                if e.is_unrecoverable_error() {
                    self.give_up(connection);
                }
                Err(error::map(&e, sent))
            }
            None => Err(Error::no_answer(bound, sent)),
        }
    }

    /// Ends the connection, if there is one, because the server is not in charge any more. Wakes those who rely on it.
    pub(crate) fn close(&self) {
        if let Some(connection) = self.current() {
            self.give_up(&connection);
        }
        self.0.raise_alarm();
    }

    /// Whether another server may take over.
    pub(crate) fn fails_over(&self) -> bool {
        self.0.note.is_some()
    }

    /// For how long a server that took over grants nothing, where one may.
    pub(crate) fn pause(&self) -> Option<Duration> {
        self.fails_over().then(|| self.0.config.pause())
    }

    /// Whether replicas have to acknowledge what is granted.
    pub(crate) fn asks_replicas(&self) -> bool {
        self.0.config.replicas > 0
    }

    /// Where the server is, if it is always the same.
    pub(crate) fn host(&self) -> &str {
        &self.0.config.host
    }

    /// Drops a connection, and wakes those who rely on it.
    fn give_up(&self, connection: &Connection) {
        connection.broken.store(true, Ordering::Release);
        let mut current = self.0.current.write().unwrap_or_else(PoisonError::into_inner);
        let dropped = current.take_if(|current| current.epoch == connection.epoch);
        drop(current);
        drop(dropped);
        self.0.wake.detach(connection.epoch);
    }
}

/// Counts as under way until it is dropped. If it has not ended by then, that may tell of a black hole: the engine gives up
/// a renewal, and others what they ask for, before our own bound is over.
struct Operation<'a> {
    link: &'a Link,
    connection: &'a Connection,
    /// Whether there was a strike when it began, and what had been received.
    struck: bool,
    received: u64,
    /// From when on silence means something.
    suspicious: Option<Instant>,
    ended: bool,
}

impl<'a> Operation<'a> {
    fn begin(link: &'a Link, connection: &'a Connection, bound: Duration) -> Self {
        connection.under_way.fetch_add(1, Ordering::Relaxed);
        let received = connection.received.load(Ordering::Relaxed);
        let struck = connection.struck.load(Ordering::Relaxed);
        let suspicious = Instant::now().checked_add(bound / 2);
        Self { link, connection, struck, received, suspicious, ended: false }
    }

    fn is_unanswered(&self) -> bool {
        !self.ended
            && self.connection.received.load(Ordering::Relaxed) == self.received
            && self.suspicious.is_some_and(|suspicious| Instant::now() >= suspicious)
    }
}

impl Drop for Operation<'_> {
    fn drop(&mut self) {
        self.connection.under_way.fetch_sub(1, Ordering::Relaxed);
        if self.is_unanswered() && self.connection.struck.swap(true, Ordering::Relaxed) && self.struck {
            self.link.give_up(self.connection);
        }
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Line { config, current, .. } = &*self.0;
        f.debug_struct("Link").field("config", config).field("current", current).finish_non_exhaustive()
    }
}

/// Requests that leave together, the last of which brings back a [number].
struct Numbered {
    requests: Pipeline,
    /// Of each request that is a script, and of what goes behind the others.
    numbers: Vec<Option<u64>>,
    /// How many of the replies are answers.
    answers: usize,
}

impl Numbered {
    fn new(requests: &Pipeline, batches: &Batches) -> Self {
        let answers = requests.len();
        let mut numbered = Pipeline::with_capacity(answers + 1);
        let mut numbers = Vec::with_capacity(answers + 1);
        for request in requests.cmd_iter() {
            let mut request = request.clone();
            let number = Script::is_run_by(&request).then(|| batches.number());
            number.iter().for_each(|number| _ = request.arg(*number));
            numbers.push(number);
            numbered.add_command(request);
        }
        if numbers.last() == Some(&None) {
            let number = batches.number();
            numbered.add_command(number::echo(number));
            numbers.push(Some(number));
        }
        Self { requests: numbered, numbers, answers }
    }

    /// # Errors
    /// If a reply belongs to another request.
    fn answers(self, mut replies: Vec<Value>) -> RedisResult<Vec<Value>> {
        if let (Some(Some(number)), Some(echo)) = (self.numbers.get(self.answers), replies.get(self.answers)) {
            number::heard(*number, echo)?;
            replies.truncate(self.answers);
        }
        let answer = |(reply, number)| match number {
            Some(number) => number::answer(number, reply),
            None => Ok(reply),
        };
        replies.into_iter().zip(self.numbers).map(answer).collect()
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
