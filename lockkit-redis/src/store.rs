//! The store: five questions, each one round trip.

use std::{fmt, sync::Arc, time::Duration};

use async_trait::async_trait;
use lockkit_core::{
    AcquireRequest, Attempt, Capability, Claim, Clock, Contention, Effect, Error, ErrorKind, Fence, FenceClock,
    Fencing, Hold, HolderInfo, KeyState, Liveness, LockKey, LockStore, LossReason, Mode, Moment, Order, Query, Release,
    Renewal, Renewed, Result, StoreInfo, Token, Waiting,
};
use redis::{Cmd, Pipeline, Value};
use tokio::time::{Instant, timeout};

use crate::{
    check,
    config::{RedisConfig, Topology},
    error::{self, Sent},
    inspect,
    link::Connection,
    name::{self, Names},
    node::{Node, Nodes, Route},
    reign::{self, Reign},
    renew,
    scripts::{ACQUIRE, ACQUIRE_GUARDED, RELEASE},
    value::{self, Stored},
    wake::Interest,
};

const MIN_TTL: Duration = Duration::from_millis(100);
/// A waiter asks at least this often, whatever messages may have been lost.
const SAFETY_POLL: Duration = Duration::from_secs(5);
/// Fences must be exact in Lua, whose numbers are doubles.
const MAX_FENCE: u64 = 1 << 53;

/// A lock store on one Redis or Valkey server, on the primary that sentinels name, or on a cluster.
pub struct RedisStore {
    pub(crate) info: StoreInfo,
    pub(crate) names: Names,
    pub(crate) nodes: Nodes,
    pub(crate) timeout: Duration,
    pub(crate) max_ttl: Duration,
    warnings: Vec<String>,
}

impl RedisStore {
    /// Connects, and checks that the server can keep locks.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] for a wrong configuration; [`ErrorKind::Unsupported`] for a server that is a
    /// replica, part of a cluster (if none was named) or too old; `Denied`, `Unavailable` or `TimedOut` if it can't be asked.
    pub async fn connect(config: RedisConfig) -> Result<Self> {
        let mut store = Self::new(config)?;
        store.warnings = store.check().await?;
        Ok(store)
    }

    /// Connects to the server that a URL names. See [`RedisConfig::from_url`] for its form.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub async fn from_url(url: &str) -> Result<Self> {
        Self::connect(RedisConfig::from_url(url)?).await
    }

    /// A store that connects when it is first used, and does not check the server: for a quorum, whose members may be
    /// down when it starts.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] for a wrong configuration.
    pub fn new(config: RedisConfig) -> Result<Self> {
        let names = config.check()?;
        let (scheme, fencing) = match config.topology {
            Topology::Single => ("redis", Fencing::Hybrid),
            // A former primary that still serves somebody counts on from where it was.
            Topology::Sentinel { .. } => ("redis+sentinel", Fencing::BestEffort),
            Topology::Cluster { .. } => ("redis+cluster", Fencing::BestEffort),
        };
        let info = StoreInfo {
            scheme,
            name: config.display_name().into(),
            capability: Capability {
                shared: false,
                permits: false,
                fifo: false,
                waiting: Waiting::Notify,
                liveness: Liveness::Ttl { min: MIN_TTL, max: config.max_ttl },
                fencing,
                max_key_bytes: LockKey::MAX_BYTES,
            },
            clock: Arc::clone(&config.clock),
        };
        let (timeout, max_ttl) = (config.timeout, config.max_ttl);
        let nodes = Nodes::new(config, &names);
        Ok(Self { info, names, nodes, timeout, max_ttl, warnings: Vec::new() })
    }

    /// What the server's settings put at risk, in words; known only after [`connect`](Self::connect).
    #[must_use]
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Asks the server whether it can keep locks; what its settings put at risk, in words.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub async fn check(&self) -> Result<Vec<String>> {
        check::check(self).await.map_err(|e| e.at("connect", None, &self.info.name))
    }
}

#[async_trait]
impl LockStore for RedisStore {
    fn info(&self) -> &StoreInfo {
        &self.info
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        let outcome = match Plan::new(self, request) {
            Ok(plan) if request.wait.is_zero() => self.ask(&plan, None).await.map(|(answer, _)| answer.into_attempt()),
            Ok(plan) => self.wait(&plan, request.wait).await,
            Err(e) => Err(e),
        };
        outcome.map_err(|e| e.at("acquire", Some(&request.claim.key), &self.info.name))
    }

    async fn renew(&self, renewals: &[Renewal]) -> Vec<Result<Renewed>> {
        renew::renew(self, renewals).await
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        self.release_claim(claim).await.map_err(|e| e.at("release", Some(&claim.key), &self.info.name))
    }

    async fn inspect(&self, query: &Query) -> Result<Vec<KeyState>> {
        inspect::inspect(self, query).await.map_err(|e| e.at("inspect", None, &self.info.name))
    }
}

/// An acquisition that can be asked for as often as necessary (rule R1).
struct Plan<'a> {
    request: &'a AcquireRequest,
    lock: String,
    ttl_ms: u64,
    bound: Duration,
    clock: &'a dyn Clock,
}

/// What the server said to an acquisition.
enum Answer {
    Granted(Hold),
    Held {
        remaining: Option<Duration>,
        holder: HolderInfo,
    },
    /// The server took over from another, and grants nothing for so long.
    Paused(Duration),
}

/// Where a waiter listens.
struct Post {
    node: Arc<Node>,
    interest: Interest,
}

impl RedisStore {
    /// Asks once, wherever the lock is. A waiter who listens there subscribes first, in the same round trip.
    async fn ask(&self, plan: &Plan<'_>, mut post: Option<&mut Post>) -> Result<(Answer, Arc<Node>)> {
        let mut route = self.nodes.route(&plan.lock).await?;
        loop {
            let interest = post.as_deref_mut().filter(|post| Arc::ptr_eq(&post.node, &route.node));
            let asked = self.ask_at(&route, plan, interest.map(|post| &mut post.interest)).await;
            match asked {
                Ok(answer) => return Ok((answer, route.node)),
                Err(e) => route = self.nodes.follow(route, e).await?,
            }
        }
    }

    async fn ask_at(&self, route: &Route, plan: &Plan<'_>, interest: Option<&mut Interest>) -> Result<Answer> {
        let node = &route.node;
        let connection = node.link.connection().await?;
        let reign = connection.reign();
        if let Some(left) = reign.and_then(|reign| reign.pause(plan.clock.now())) {
            return Ok(Answer::Paused(left));
        }
        let request = plan.script(reign);
        let script = if reign.is_some() { &*ACQUIRE_GUARDED } else { &*ACQUIRE };
        let channel = interest.and_then(|interest| {
            interest.arm();
            (!interest.is_subscribed() && !route.asking).then_some(&plan.lock)
        });
        let sent = plan.clock.now();
        let reply = match channel {
            None => node.link.run(&connection, script, &request, route.asking, plan.bound, Sent::Yes).await,
            Some(channel) => {
                let mut requests = Pipeline::with_capacity(2);
                requests.cmd("SUBSCRIBE").arg(channel).add_command(request);
                let replies = node.link.run_all(&connection, Some(script), &requests, plan.bound, Sent::Yes).await;
                replies.and_then(|replies| subscribed(node, &connection, replies))
            }
        };
        match reply {
            Ok(reply) => match plan.read(reply, sent)? {
                Answer::Granted(hold) => self.confirm(route, &connection, hold).await.map(Answer::Granted),
                answer => Ok(answer),
            },
            Err(e) if e.kind() == ErrorKind::Unexpected && e.effect() == Effect::None => {
                Err(explain(node, &connection, plan, e).await)
            }
            Err(e) => Err(e),
        }
    }

    /// Makes sure that enough replicas have a grant; releases it if they don't.
    async fn confirm(&self, route: &Route, connection: &Connection, hold: Hold) -> Result<Hold> {
        let Some(replicas) = &route.node.replicas else { return Ok(hold) };
        let Err(shortfall) = replicas.confirm(connection).await else { return Ok(hold) };
        let message = format!("the grant is not safe: {}", shortfall.message());
        let error = Error::new(ErrorKind::Unavailable, message).with_source(shortfall);
        match self.release_at(route, &hold.claim).await {
            Ok(_) => Err(error),
            Err(_) => Err(error.unknown_effect()),
        }
    }

    /// Asks, and asks again whenever the lock was released, until it is granted or there is reason to report back:
    /// the holder's lease has run out, `wait` is over, or it is time to make sure that no message was lost.
    async fn wait(&self, plan: &Plan<'_>, wait: Duration) -> Result<Attempt> {
        let deadline = Instant::now().checked_add(wait);
        // Listen before asking, so that a release between the answer and the wait is not missed.
        let mut post = self.nodes.known(&plan.lock).and_then(|node| {
            let interest = node.wake.listen_if_subscribed(&plan.lock)?;
            Some(Post { node, interest })
        });
        loop {
            let (answer, node) = self.ask(plan, post.as_mut()).await?;
            let Answer::Held { remaining, holder } = answer else { return Ok(answer.into_attempt()) };
            let Some(Post { interest, .. }) = post.as_mut().filter(|post| Arc::ptr_eq(&post.node, &node)) else {
                post = Some(Post { interest: node.wake.listen(&plan.lock), node });
                continue;
            };
            let lapses = remaining.map_or(SAFETY_POLL, |remaining| remaining + Duration::from_millis(1));
            let rest = deadline.map_or(Duration::MAX, |deadline| deadline.saturating_duration_since(Instant::now()));
            let pause = lapses.min(SAFETY_POLL).min(rest);
            if timeout(pause, interest.rung()).await.is_err() {
                return Ok(Attempt::Contended(Contention { retry_after: Some(Duration::ZERO), holder: Some(holder) }));
            }
        }
    }

    async fn release_claim(&self, claim: &Claim) -> Result<Release> {
        exclusive(claim)?;
        let mut route = self.nodes.route(&self.names.lock(&claim.key)).await?;
        loop {
            match self.release_at(&route, claim).await {
                Ok(release) => return Ok(release),
                Err(e) => route = self.nodes.follow(route, e).await?,
            }
        }
    }

    async fn release_at(&self, Route { node, asking, .. }: &Route, claim: &Claim) -> Result<Release> {
        let lock = self.names.lock(&claim.key);
        let mut token = String::with_capacity(Token::TEXT_LEN + 1);
        value::push_token(&mut token, &claim.token);
        let mut request = RELEASE.by_hash(1, 1, lock.len() + token.len());
        request.arg(&lock).arg(token);
        let connection = node.link.connection().await?;
        let reply = node.link.run(&connection, &RELEASE, &request, *asking, self.timeout, Sent::Yes).await?;
        match reply {
            Value::Int(-1) => Ok(Release::NotHeld(LossReason::Gone)),
            Value::Int(-2) => Ok(Release::NotHeld(LossReason::Taken)),
            Value::Int(-3) => Ok(Release::Released { waiters: None }),
            Value::Int(receivers @ 0..) => {
                let others = receivers - i64::from(node.wake.is_subscribed(&lock));
                // A member of a cluster counts only those who listen at it.
                Ok(Release::Released { waiters: Some(u32::try_from(others).unwrap_or(0)) })
            }
            _ => Err(error::odd_reply(Sent::Yes)),
        }
    }

    /// The bound on an operation that asks for a lease of `ttl`: an answer that comes later is of little use.
    pub(crate) fn bound(&self, ttl: Duration) -> Duration {
        self.timeout.min(ttl / 4)
    }
}

/// Takes the answers to a subscription and an acquisition.
fn subscribed(node: &Node, connection: &Connection, replies: Vec<Value>) -> Result<Value> {
    let [subscribed, reply] = <[Value; 2]>::try_from(replies).map_err(|_| error::odd_reply(Sent::Yes))?;
    let reply = node.link.accept(connection, reply, Sent::Yes)?;
    if matches!(reply, Value::Array(_)) {
        // Without the subscription there is no waiting; but what was granted is granted.
        node.link.accept(connection, subscribed, Sent::No)?;
    }
    Ok(reply)
}

/// Finds out whether something other than a lock is in the way.
async fn explain(node: &Node, connection: &Connection, plan: &Plan<'_>, cause: Error) -> Error {
    let mut requests = Pipeline::with_capacity(2);
    requests.cmd("TYPE").arg(&plan.lock).cmd("TYPE").arg(name::counter(&plan.lock));
    let types = node.link.run_all(connection, None, &requests, plan.bound, Sent::ReadOnly).await;
    match types.as_deref() {
        Ok([Value::SimpleString(lock), Value::SimpleString(counter)]) => {
            error::wrong_type(cause, &plan.request.claim.key, lock, counter)
        }
        _ => cause,
    }
}

impl<'a> Plan<'a> {
    fn new(store: &'a RedisStore, request: &'a AcquireRequest) -> Result<Self> {
        let AcquireRequest { claim, ttl, fence, .. } = request;
        exclusive(claim)?;
        if request.order != Order::Any {
            return Err(error::unsupported("first-in-first-out order"));
        }
        let ttl_ms = milliseconds(*ttl, store.max_ttl)?;
        if fence.span == 0 {
            return Err(Error::new(ErrorKind::InvalidInput, "a grant owns at least one fence"));
        }
        check_floor(fence.floor.offset(fence.span))?;
        let lock = store.names.lock(&claim.key);
        Ok(Self { request, lock, ttl_ms, bound: store.bound(*ttl), clock: &*store.info.clock })
    }

    /// The script, for a server in this reign.
    fn script(&self, reign: Option<&Reign>) -> Cmd {
        let AcquireRequest { claim, fence, holder, .. } = self.request;
        let script = if reign.is_some() { &*ACQUIRE_GUARDED } else { &*ACQUIRE };
        let mut cmd = script.by_hash(2, 7, 2 * self.lock.len() + holder.as_str().len() + 150);
        let mut text = String::with_capacity((self.lock.len() + 10).max(HolderInfo::MAX_BYTES / 2));
        name::push_counter(&mut text, &self.lock);
        cmd.arg(&self.lock).arg(&text);
        text.clear();
        value::push_head(&mut text, &claim.token, 1);
        cmd.arg(&text).arg(self.ttl_ms);
        text.clear();
        value::push_tail(&mut text, fence.span, reign.map_or("", |reign| &reign.mark), holder);
        cmd.arg(&text).arg(fence.span);
        let floor = reign.map_or(fence.floor, |reign| fence.floor.max(reign.floor));
        if fence.clock == FenceClock::Floor {
            cmd.arg(floor.get()).arg(1);
        } else if floor != Fence::NONE {
            cmd.arg(floor.get());
        }
        if let Some(reign) = reign {
            cmd.arg(&reign.id);
        }
        cmd
    }

    fn read(&self, reply: Value, sent: Moment) -> Result<Answer> {
        let grant = |fence, span, depth| {
            let until = sent + self.request.ttl;
            Ok(Answer::Granted(Hold { claim: self.request.claim.clone(), fence, span, until, depth }))
        };
        let odd = || error::odd_reply(Sent::Yes);
        match reply {
            Value::Int(first) => {
                grant(Fence::new(u64::try_from(first).map_err(|_| odd())?), self.request.fence.span, 1)
            }
            Value::BulkString(mine) => {
                let (fence, span, depth) = value::numbers(&mine).ok_or_else(odd)?;
                grant(fence, span, depth)
            }
            Value::Array(parts) => match &parts[..] {
                [Value::Int(pttl), Value::BulkString(theirs)] => Ok(Answer::Held {
                    remaining: u64::try_from(*pttl).ok().map(Duration::from_millis),
                    holder: Stored::parse(theirs).into_holder(),
                }),
                _ => Err(odd()),
            },
            _ => Err(odd()),
        }
    }
}

impl Answer {
    fn into_attempt(self) -> Attempt {
        match self {
            Self::Granted(hold) => Attempt::Granted(hold),
            Self::Held { remaining, holder } => {
                Attempt::Contended(Contention { retry_after: remaining, holder: Some(holder) })
            }
            Self::Paused(left) => {
                let holder = Some(reign::predecessors_holder());
                Attempt::Contended(Contention { retry_after: Some(left), holder })
            }
        }
    }
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore").field("name", &self.info.name).field("names", &self.names).finish_non_exhaustive()
    }
}

/// # Errors
/// [`ErrorKind::Unsupported`] if the claim is not exclusive.
pub(crate) fn exclusive(claim: &Claim) -> Result<()> {
    match claim.mode {
        Mode::Exclusive => Ok(()),
        other => Err(error::unsupported(&format!("the mode {other}"))),
    }
}

/// A ttl as the server wants it: rounded up, so that the lease never ends before its holder believes.
///
/// # Errors
/// [`ErrorKind::InvalidInput`] if the store does not take it.
pub(crate) fn milliseconds(ttl: Duration, longest: Duration) -> Result<u64> {
    if !(MIN_TTL..=longest).contains(&ttl) {
        let message = format!("the ttl must lie between {MIN_TTL:?} and {longest:?}; it is {ttl:?}");
        return Err(Error::new(ErrorKind::InvalidInput, message));
    }
    Ok(u64::try_from(ttl.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX))
}

/// # Errors
/// [`ErrorKind::InvalidInput`] if the counter could not go there.
pub(crate) fn check_floor(fence: Fence) -> Result<()> {
    if fence.get() < MAX_FENCE {
        Ok(())
    } else {
        Err(Error::new(ErrorKind::InvalidInput, "fences on Redis end at 2^53"))
    }
}
