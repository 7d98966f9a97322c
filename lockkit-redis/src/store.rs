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
    config::RedisConfig,
    doctor,
    error::{self, Sent},
    inspect,
    link::{Connection, Link},
    name::{self, Names},
    renew,
    scripts::{ACQUIRE, RELEASE},
    value::{self, Stored},
    wake::{Interest, Wake},
};

const MIN_TTL: Duration = Duration::from_millis(100);
const MAX_TTL: Duration = Duration::from_secs(5 * 60);
/// A waiter asks at least this often, whatever messages may have been lost.
const SAFETY_POLL: Duration = Duration::from_secs(5);
/// Fences must be exact in Lua, whose numbers are doubles.
const MAX_FENCE: u64 = 1 << 53;

/// A lock store on one Redis or Valkey server.
pub struct RedisStore {
    pub(crate) info: StoreInfo,
    pub(crate) names: Names,
    pub(crate) link: Link,
    pub(crate) wake: Arc<Wake>,
    pub(crate) timeout: Duration,
    warnings: Vec<String>,
}

impl RedisStore {
    /// Connects, and checks that the server can keep locks.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] for a wrong configuration; [`ErrorKind::Unsupported`] for a server that is a
    /// replica, part of a cluster or too old; `Denied`, `Unavailable` or `TimedOut` if it can't be asked.
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
        let wake = Arc::new(Wake::default());
        let info = StoreInfo {
            scheme: "redis",
            name: config.display_name().into(),
            capability: Capability {
                shared: false,
                permits: false,
                fifo: false,
                waiting: Waiting::Notify,
                liveness: Liveness::Ttl { min: MIN_TTL, max: MAX_TTL },
                fencing: Fencing::Hybrid,
                max_key_bytes: LockKey::MAX_BYTES,
            },
            clock: Arc::clone(&config.clock),
            alarm: None,
        };
        let timeout = config.timeout;
        let link = Link::new(config, Arc::clone(&wake));
        Ok(Self { info, names, link, wake, timeout, warnings: Vec::new() })
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
        doctor::check(&self.link, &self.names, self.timeout).await.map_err(|e| e.at("connect", None, &self.info.name))
    }
}

#[async_trait]
impl LockStore for RedisStore {
    fn info(&self) -> &StoreInfo {
        &self.info
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        let outcome = match Plan::new(self, request) {
            Ok(plan) if request.wait.is_zero() => self.ask(&plan, None).await.map(Answer::into_attempt),
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
    script: Cmd,
    bound: Duration,
    clock: &'a dyn Clock,
}

/// What the server said to an acquisition.
enum Answer {
    Granted(Hold),
    Held { remaining: Option<Duration>, holder: HolderInfo },
}

impl RedisStore {
    /// Asks once; if `subscribe` is given, subscribes to that channel first, in the same round trip.
    async fn ask(&self, plan: &Plan<'_>, subscribe: Option<&str>) -> Result<Answer> {
        let connection = self.link.connection().await?;
        let sent = plan.clock.now();
        let reply = match subscribe {
            None => self.link.run(&connection, &ACQUIRE, &plan.script, plan.bound, Sent::Yes).await,
            Some(channel) => self.subscribe_and_ask(&connection, plan, channel).await,
        };
        match reply {
            Ok(reply) => plan.read(reply, sent),
            Err(e) if e.kind() == ErrorKind::Unexpected && e.effect() == Effect::None => {
                Err(self.explain(&connection, plan, e).await)
            }
            Err(e) => Err(e),
        }
    }

    async fn subscribe_and_ask(&self, connection: &Connection, plan: &Plan<'_>, channel: &str) -> Result<Value> {
        let mut requests = Pipeline::with_capacity(2);
        requests.cmd("SUBSCRIBE").arg(channel).add_command(plan.script.clone());
        let replies = self.link.run_all(connection, Some(&ACQUIRE), &requests, plan.bound, Sent::Yes).await?;
        let [subscribed, reply] = <[Value; 2]>::try_from(replies).map_err(|_| error::odd_reply(Sent::Yes))?;
        let reply = self.link.accept(connection, reply, Sent::Yes)?;
        if matches!(reply, Value::Array(_)) {
            // Without the subscription there is no waiting; but what was granted is granted.
            self.link.accept(connection, subscribed, Sent::No)?;
        }
        Ok(reply)
    }

    /// Finds out whether something other than a lock is in the way.
    async fn explain(&self, connection: &Connection, plan: &Plan<'_>, cause: Error) -> Error {
        let mut requests = Pipeline::with_capacity(2);
        requests.cmd("TYPE").arg(&plan.lock).cmd("TYPE").arg(name::counter(&plan.lock));
        let types = self.link.run_all(connection, None, &requests, plan.bound, Sent::ReadOnly).await;
        match types.as_deref() {
            Ok([Value::SimpleString(lock), Value::SimpleString(counter)]) => {
                error::wrong_type(cause, &plan.request.claim.key, lock, counter)
            }
            _ => cause,
        }
    }

    /// Asks, and asks again whenever the lock was released, until it is granted or there is reason to report back:
    /// the holder's lease has run out, `wait` is over, or it is time to make sure that no message was lost.
    async fn wait(&self, plan: &Plan<'_>, wait: Duration) -> Result<Attempt> {
        let deadline = Instant::now().checked_add(wait);
        // Listen before asking, so that a release between the answer and the wait is not missed.
        let mut interest: Option<Interest> = self.wake.listen_if_subscribed(&plan.lock);
        loop {
            let answer = match &mut interest {
                None => self.ask(plan, None).await?,
                Some(interest) => {
                    interest.arm();
                    let channel = (!interest.is_subscribed()).then_some(plan.lock.as_str());
                    self.ask(plan, channel).await?
                }
            };
            let Answer::Held { remaining, holder } = answer else { return Ok(answer.into_attempt()) };
            let Some(interest) = &mut interest else {
                interest = Some(self.wake.listen(&plan.lock));
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
        let lock = self.names.lock(&claim.key);
        let mut token = String::with_capacity(Token::TEXT_LEN + 1);
        value::push_token(&mut token, &claim.token);
        let mut request = RELEASE.by_hash(1, 1, lock.len() + token.len());
        request.arg(&lock).arg(token);
        let connection = self.link.connection().await?;
        let reply = self.link.run(&connection, &RELEASE, &request, self.timeout, Sent::Yes).await?;
        match reply {
            Value::Int(-1) => Ok(Release::NotHeld(LossReason::Gone)),
            Value::Int(-2) => Ok(Release::NotHeld(LossReason::Taken)),
            Value::Int(-3) => Ok(Release::Released { waiters: None }),
            Value::Int(receivers @ 0..) => {
                let others = receivers - i64::from(self.wake.is_subscribed(&lock));
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

impl<'a> Plan<'a> {
    fn new(store: &'a RedisStore, request: &'a AcquireRequest) -> Result<Self> {
        let AcquireRequest { claim, ttl, fence, .. } = request;
        exclusive(claim)?;
        if request.order != Order::Any {
            return Err(error::unsupported("first-in-first-out order"));
        }
        let ttl_ms = milliseconds(*ttl)?;
        if fence.span == 0 {
            return Err(Error::new(ErrorKind::InvalidInput, "a grant owns at least one fence"));
        }
        check_floor(fence.floor.offset(fence.span))?;
        let lock = store.names.lock(&claim.key);
        let mut script = ACQUIRE.by_hash(2, 6, 2 * lock.len() + request.holder.as_str().len() + 100);
        let mut text = String::with_capacity((lock.len() + 10).max(HolderInfo::MAX_BYTES / 2));
        name::push_counter(&mut text, &lock);
        script.arg(&lock).arg(&text);
        text.clear();
        value::push_head(&mut text, &claim.token, 1);
        script.arg(&text).arg(ttl_ms);
        text.clear();
        value::push_tail(&mut text, fence.span, &request.holder);
        script.arg(&text).arg(fence.span);
        if fence.clock == FenceClock::Floor {
            script.arg(fence.floor.get()).arg(1);
        } else if fence.floor != Fence::NONE {
            script.arg(fence.floor.get());
        }
        Ok(Self { request, lock, script, bound: store.bound(*ttl), clock: &*store.info.clock })
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
pub(crate) fn milliseconds(ttl: Duration) -> Result<u64> {
    if !(MIN_TTL..=MAX_TTL).contains(&ttl) {
        let message = format!("the ttl must lie between {MIN_TTL:?} and {MAX_TTL:?}; it is {ttl:?}");
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
