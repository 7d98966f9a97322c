//! One attempt to get a lease, of whatever kind: one request, wherever the lock is, and what the answer says.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use lockkit_core::{
    AcquireRequest, Attempt, Clock, Contention, Effect, Error, ErrorKind, Fence, FenceClock, FenceRequest, Hold,
    HolderInfo, Moment, Result, Token,
};
use redis::{Cmd, Pipeline, Value};

use crate::{
    client::{
        connection::Connection,
        epoch,
        node::{Node, Route},
    },
    store::{RedisStore, ordered::Listener},
    wire::{
        error::{self, Sent},
        name, order, redirect,
        request::{self, Request},
        scripts::{REPLACE, REPLACE_GUARDED},
        value::{self, Stored, check_floor, milliseconds},
    },
};

/// A waiter asks at least this often while the holder is a client that is not lockkit, and sends no message when it releases.
pub(super) const SILENT_POLL: Duration = Duration::from_millis(100);
/// When to ask again for a lock whose slot is on its way to another member of a cluster.
pub(super) const ON_ITS_WAY: Duration = Duration::from_millis(100);

/// An acquisition that can be asked for as often as necessary (rule R1).
pub(super) struct Acquisition<'a> {
    pub(super) request: &'a AcquireRequest,
    pub(super) lock: String,
    ttl_ms: u64,
    bound: Duration,
    clock: &'a dyn Clock,
}

/// What the server said to an acquisition.
pub(super) enum Answer {
    Granted(Hold),
    Held(HeldByAnother),
    /// The server took over from another, and grants nothing for so long.
    Paused(Duration),
}

/// What is in the way of an acquisition.
pub(super) struct HeldByAnother {
    pub(super) remaining: Option<Duration>,
    /// None if the lease is gone whose place was asked for.
    pub(super) holder: Option<HolderInfo>,
    /// Whether the holder sends no message when it releases.
    pub(super) is_silent: bool,
    /// Whether the claim is the first in the lock's queue.
    pub(super) is_first: bool,
}

/// What `PTTL` says of a key that is not there. (The value alone does not tell: another client's may be empty.)
const NO_KEY: i64 = -2;

impl RedisStore {
    /// Asks once, wherever the lock is. A waiter who listens there subscribes first, in the same round trip.
    pub(super) async fn ask(
        &self,
        acquisition: &Acquisition<'_>,
        mut waiter: Option<&mut Listener>,
    ) -> Result<(Answer, Route)> {
        let mut route = self.nodes.route(&acquisition.lock).await?;
        loop {
            let here = waiter.as_deref_mut().filter(|waiter| Arc::ptr_eq(&waiter.node, &route.node) && !route.asking);
            match self.ask_at(&route, acquisition, here).await {
                Ok(answer) => return Ok((answer, route)),
                Err(e) => route = self.nodes.follow(route, e).await?,
            }
        }
    }

    async fn ask_at(
        &self,
        route: &Route,
        acquisition: &Acquisition<'_>,
        waiter: Option<&mut Listener>,
    ) -> Result<Answer> {
        let connection = route.node.dialer.connection().await?;
        if let Some(left) = acquisition.pause(route, &connection)? {
            return Ok(Answer::Paused(left));
        }
        let request = acquisition.request;
        let (floor, sent) = (acquisition.floor(&connection)?, acquisition.clock.now());
        let reply = if acquisition.request.is_in_order() {
            Box::pin(self.send_in_order(route, &connection, acquisition, waiter)).await
        } else if let Some(from) = request.from {
            Box::pin(self.send_in_place_of(from, route, &connection, acquisition)).await
        } else {
            let (request, guard) = (acquisition.request(&connection)?, connection.epoch().map(|epoch| &*epoch.id));
            match waiter.map(|waiter| waiter.arm(&acquisition.lock)).filter(|channels| !channels.is_empty()) {
                None => connection.request(request, guard, route.asking, acquisition.bound).await,
                Some(channels) => {
                    let command = request::alone(&request, guard);
                    Box::pin(subscribe_and_send(&connection, &channels, command, acquisition.bound)).await
                }
            }
        };
        match reply {
            Ok(reply) => match acquisition.read(reply, sent, floor)? {
                Answer::Granted(hold) => {
                    if let Some(from) = request.from {
                        self.ordered.forget(&from);
                    }
                    Box::pin(confirm(&route.node, &connection, hold)).await.map(Answer::Granted)
                }
                answer => Ok(answer),
            },
            Err(e) if e.kind() == ErrorKind::Unexpected && e.effect() == Effect::None => {
                Err(Box::pin(explain(&connection, acquisition, e)).await)
            }
            Err(e) => Err(e),
        }
    }

    /// Asks for the place of another lease. That takes a script of its own, so that other requests do not pay for it.
    async fn send_in_place_of(
        &self,
        from: Token,
        route: &Route,
        connection: &Connection,
        acquisition: &Acquisition<'_>,
    ) -> Result<Value> {
        let is_guarded = connection.epoch().is_some();
        let (script, keys) = if is_guarded { (&*REPLACE_GUARDED, 2) } else { (&*REPLACE, 3) };
        let mut command = script.by_hash(keys, 10, 2 * acquisition.lock.len() + 400);
        command.arg(&acquisition.lock).arg(name::counter(&acquisition.lock));
        if !is_guarded {
            command.arg(self.names.unused());
        }
        let mut ending = String::with_capacity(Token::TEXT_LEN + 1);
        value::push_token(&mut ending, &from);
        acquisition.request(connection)?.push_arguments(command.arg(ending));
        connection.push_epoch(&mut command);
        connection.run(command, route.asking, acquisition.bound, Sent::Yes).await
    }

    /// Asks for a lease, and for a place in the queue if there is somebody to listen at it.
    async fn send_in_order(
        &self,
        route: &Route,
        connection: &Connection,
        acquisition: &Acquisition<'_>,
        waiter: Option<&mut Listener>,
    ) -> Result<Value> {
        let lock = &acquisition.lock;
        let first = connection.floor(FenceClock::Store)?.offset(1).get();
        let channel = waiter.as_ref().map(|waiter| &*waiter.channel);
        let mut take = order::take(connection.mark(), lock, acquisition.request, acquisition.ttl_ms, first, channel);
        connection.push_epoch(&mut take);
        let channels = waiter.map(|waiter| waiter.arm(lock)).unwrap_or_default();
        let reply = if channels.is_empty() {
            connection.run(take, route.asking, acquisition.bound, Sent::Yes).await?
        } else {
            subscribe_and_send(connection, &channels, take, acquisition.bound).await?
        };
        match reply {
            Value::Int(-4) => Err(Error::invalid("the semaphore has another number of permits")),
            reply => Ok(reply),
        }
    }
}

/// Makes sure that enough replicas have a grant. If they don't, it stays until the caller releases it (rule R2).
async fn confirm(node: &Node, connection: &Connection, hold: Hold) -> Result<Hold> {
    let Some(replicas) = &node.replicas else { return Ok(hold) };
    let Err(shortfall) = replicas.confirm(connection).await else { return Ok(hold) };
    let message = format!("the grant is not safe: {}", shortfall.message());
    Err(Error::new(ErrorKind::Unavailable, message).with_source(shortfall).unknown_effect())
}

/// Sends a request behind the subscriptions of its waiter.
async fn subscribe_and_send(
    connection: &Connection,
    channels: &[&str],
    command: Cmd,
    bound: Duration,
) -> Result<Value> {
    let mut requests = Pipeline::with_capacity(channels.len() + 1);
    for channel in channels {
        requests.cmd("SUBSCRIBE").arg(*channel);
    }
    requests.add_command(command);
    let mut replies = connection.run_all(&requests, bound, Sent::Yes).await?;
    let reply = request::only_answer(replies.pop().unwrap_or_default());
    let reply = connection.accept(reply, Sent::Yes)?;
    if matches!(reply, Value::Array(_)) {
        // Without the subscription there is no waiting; but what was granted is granted.
        for subscribed in replies {
            connection.accept(subscribed, Sent::Yes)?;
        }
    }
    Ok(reply)
}

/// Finds out whether something other than a lock is in the way.
async fn explain(connection: &Connection, acquisition: &Acquisition<'_>, cause: Error) -> Error {
    let mut requests = Pipeline::with_capacity(2);
    requests.cmd("TYPE").arg(&acquisition.lock).cmd("TYPE").arg(name::counter(&acquisition.lock));
    let types = connection.run_all(&requests, acquisition.bound, Sent::ReadOnly).await;
    match types.as_deref() {
        Ok([Value::SimpleString(lock), Value::SimpleString(counter)]) => {
            error::wrong_type(cause, &acquisition.request.claim.key, lock, counter)
        }
        _ => cause,
    }
}

impl<'a> Acquisition<'a> {
    pub(super) fn new(store: &'a RedisStore, request: &'a AcquireRequest) -> Result<Self> {
        let AcquireRequest { claim, ttl, fence, .. } = request;
        store.info.admit(request)?;
        let ttl_ms = milliseconds(*ttl);
        check_floor(fence.floor.offset(fence.span))?;
        let lock = store.names.lock(&claim.key);
        Ok(Self { request, lock, ttl_ms, bound: store.bound(*ttl), clock: &*store.info.clock })
    }

    /// For how long the server grants nothing, because it took over from another.
    fn pause(&self, route: &Route, connection: &Connection) -> Result<Option<Duration>> {
        match connection.epoch() {
            // It has no slot yet that could have its note. By the time that it is asked it may be in charge of this one.
            None if route.asking => Err(redirect::undecided()),
            epoch => Ok(epoch.and_then(|epoch| epoch.pause(self.clock.now()))),
        }
    }

    fn request(&self, connection: &Connection) -> Result<Box<Request>> {
        let AcquireRequest { claim, fence, holder, .. } = self.request;
        let fence = FenceRequest { floor: self.floor(connection)?, ..*fence };
        let mark = connection.mark().unwrap_or_default();
        Ok(Request::acquire(&self.lock, claim, holder, self.ttl_ms, fence, mark, SystemTime::now()))
    }

    /// The fence of a grant must be above this.
    fn floor(&self, connection: &Connection) -> Result<Fence> {
        let fence = &self.request.fence;
        Ok(fence.floor.max(connection.floor(fence.clock)?))
    }

    fn read(&self, reply: Value, sent: Moment, floor: Fence) -> Result<Answer> {
        let grant = |fence, span, depth| {
            let until = sent + self.request.ttl;
            Ok(Answer::Granted(Hold { claim: self.request.claim.clone(), fence, span, until, depth }))
        };
        let odd = || error::odd_reply(Sent::Yes);
        match reply {
            // No grant has another fence: it would be the answer to another question.
            Value::Int(first) => match u64::try_from(first).map(Fence::new) {
                Ok(fence) if fence > floor && value::is_fence(fence) => grant(fence, self.request.fence.span, 1),
                _ => Err(odd()),
            },
            Value::BulkString(mine) => {
                let (fence, span, depth) = value::own(&mine, &self.request.claim.token).ok_or_else(odd)?;
                grant(fence, span, depth)
            }
            Value::Array(parts) => match &parts[..] {
                [Value::Int(pttl), Value::BulkString(theirs), place @ ..] => {
                    let remaining = u64::try_from(*pttl).ok().map(Duration::from_millis);
                    let stored = Stored::parse(theirs);
                    // It is free, but others wait for it.
                    let is_free = *pttl == NO_KEY && !place.is_empty();
                    let (is_silent, is_first) = (!is_free && stored == Stored::Foreign, *place == [Value::Int(0)]);
                    let holder = match (is_free, *pttl) {
                        (true, _) => Some(HolderInfo::new("others that wait for it")),
                        (false, NO_KEY) if theirs.is_empty() => None,
                        (false, _) => Some(stored.into_holder()),
                    };
                    Ok(Answer::Held(HeldByAnother { remaining, holder, is_silent, is_first }))
                }
                _ => Err(odd()),
            },
            _ => Err(odd()),
        }
    }
}

impl Answer {
    pub(super) fn into_attempt(self) -> Attempt {
        match self {
            Self::Granted(hold) => Attempt::Granted(hold),
            Self::Held(HeldByAnother { remaining, holder, .. }) => contended(remaining, holder),
            Self::Paused(left) => contended(Some(left), Some(epoch::predecessors_holder())),
        }
    }
}

pub(super) fn contended(retry_after: Option<Duration>, holder: Option<HolderInfo>) -> Attempt {
    Attempt::Contended(Contention { retry_after, holder, burnt: false })
}
