//! The contract between the core and a store. Read this first.
//!
//! A store answers five questions, and keeps records for migrations; the core does everything else, once. The author of a store implements
//! [`LockStore`] and keeps the rules below, which the cases of the compliance suite cite by number.
//!
//! - **R1, idempotent per claim.** The same [`Claim`] again gives the same grant and the same fence, with the lease
//!   extended.
//! - **R2, one token per acquisition**: 128 random bits, never per client or per owner. Once its release may have been
//!   sent, by the core or by the store itself, a token is burnt: it is never asked for again, for a release that arrives
//!   late would end the new grant. So `release(&claim)` undoes an acquire whose outcome is unknown, and can hurt nobody
//!   else. A store releases nothing by itself: it answers with an error of
//!   [unknown effect](crate::Effect::Unknown), and the core releases the claim. A store over several others, which has to
//!   undo at some what it got, says so with [`Contention::burnt`]. The core goes on with a new token after either, and
//!   after any `Contended`; but it keeps the token, and with it the place, of a claim that queues (R3), unless the store
//!   says that it is burnt. A grant [in the place of another](AcquireRequest::from) burns that one's token.
//! - **R3, waiting.** `acquire` may answer [`Attempt::Contended`] at any time up to `wait`; `wait == 0` is a try. A
//!   queueing store keeps the claim's place until `release(&claim)`, or until the claim has not asked again for 6 s ([`PLACE`]), or
//!   where leases end with the session until that does. A try gets no place and passes nobody that has one. All modes of a
//!   key wait in one queue: a claim with a place gets in as soon as it could beside all before it. The core loops until the
//!   caller's deadline; a store answers a claim in the queue within 2 s, so that it asks again in time.
//! - **R4, validity.** [`Hold::until`] is the moment just **before the request was sent** plus the ttl, on the clock of
//!   [`StoreInfo::clock`]. The core subtracts [`drift`](crate::drift). A reply that leaves less than the minimum
//!   useful validity is not an acquisition: the core releases it and goes on.
//! - **R5, renew never creates.** It extends only what is still held by the claim. Absent, expired or another's:
//!   [`Renewed::Lost`]. Nothing may resurrect a lease that another owner could have taken. `depth` is written as an
//!   absolute number, so that a repeated renewal counts once.
//! - **R6, no false no.** "Could not ask" is an error with [`Effect::Unknown`](crate::Effect::Unknown), never
//!   `Contended`, never `NotHeld`.
//! - **R7, foreign hands.** Renewing or releasing someone else's lease changes nothing and says so.
//! - **R8, cancellation.** Every future may be dropped at any await. The core then calls `release(&claim)`; a store
//!   sends that release behind whatever it may already have sent for the claim, if the connection still lives. If another
//!   connection has taken its place, the store has [counted](Reconnections) that.
//! - **R9, fences.** For one key, if grant X returned before acquire Y was invoked, then fence(Y) > fence(X): across
//!   release, expiry, crash, restart and migration, as strictly as [`Capability::fencing`](crate::Capability::fencing)
//!   claims. Gaps are fine. Renewal and reentry keep the fence. If both are [shared](Mode::Shared), fence(Y) >= fence(X)
//!   is enough: those that share the lock at one time may carry one number. It lies above that of each exclusive grant
//!   before them, so that a late writer is refused where they have been, and below that of each after them. Each permit
//!   has a number of its own, which is an order and no admission: a resource that takes only the highest would refuse
//!   others that are held.
//! - **R10, server time.** Expiry is judged by the store's own clock in the same atomic step as the change that
//!   depends on it, never by a client's wall clock. A store whose clients are all on its own machine may use the machine's:
//!   one that is never set and goes on while the machine sleeps (`CLOCK_BOOTTIME`) if nothing that it keeps outlives a
//!   boot, else the wall clock.
//! - **R11, names.** Every [`LockKey`] is a distinct lock: no folding of case, accents, trailing spaces, braces or
//!   slashes. What a store can't spell it encodes or hashes.
//! - **R12, honest capabilities.** What a store can't do it answers with
//!   [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported). No silent downgrade.
//!
//! Two invariants keep backends small: a backend never sleeps, polls, retries, renews or counts reentrancy on its own
//! (a native blocking wait, such as a watch or a subscription, is fine), and every call ends within `wait` plus the
//! store's own bound on one operation, whatever the network does.

mod background;
mod driver;
mod info;
mod reconnections;
mod records;
mod single_flight;

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use async_trait::async_trait;

use crate::{Claim, Fence, Hold, HolderInfo, LockKey, LossReason, Mode, Result, Token};

pub use background::{Background, Begun, has_ended};
pub(crate) use driver::renew_one;
pub use driver::{join_all, one_line, without_panic};
pub use info::StoreInfo;
pub use reconnections::Reconnections;
pub(crate) use records::known_identity;
pub use records::{Identity, Record, Records, Swap, identity};
pub use single_flight::SingleFlight;

pub use crate::error::Sent;

/// How long a store keeps the place of a claim that does not ask again (rule R3). A claim that is granted the lock before it asks again
/// has it until the end of its place at most.
pub const PLACE: Duration = Duration::from_secs(6);

/// After which time one that waits in a place asks again, to keep it: two may come to nothing before the place is lost.
pub const REFRESH: Duration = Duration::from_secs(2);

/// So many fences are left above what somebody asks for: with a mistyped floor the first grant of a lock would else be its last.
pub const FENCE_ROOM: u64 = 1 << 40;

/// A place that keeps locks. See the [module](self) for the rules.
///
/// There are no default methods: in a wrapper they would silently bypass what is wrapped.
#[async_trait]
pub trait LockStore: fmt::Debug + Send + Sync + 'static {
    /// What the store is and can do. No I/O.
    fn info(&self) -> &StoreInfo;

    /// Asks for a lease, waiting natively for up to [`AcquireRequest::wait`].
    ///
    /// # Errors
    /// [`InvalidInput`](crate::ErrorKind::InvalidInput) or [`Unsupported`](crate::ErrorKind::Unsupported) for what the
    /// store can't do; `Unavailable`, `TimedOut`, `Denied` or `Unexpected` when it could not ask. If the request may
    /// have been sent, the effect is unknown.
    ///
    /// # Cancellation
    /// The lease may be granted, or come to be granted, after the future was dropped: release the claim.
    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt>;

    /// Extends leases; one answer for each renewal, in order.
    ///
    /// # Cancellation
    /// Any of the leases may have been extended; none was created.
    async fn renew(&self, renewals: &[Renewal]) -> Vec<Result<Renewed>>;

    /// Ends a lease, or a claim's place in a queue. Idempotent.
    ///
    /// # Errors
    /// As for [`acquire`](Self::acquire).
    ///
    /// # Cancellation
    /// The lease may have ended.
    async fn release(&self, claim: &Claim) -> Result<Release>;

    /// Reads who holds what. Changes nothing.
    ///
    /// # Errors
    /// As for [`acquire`](Self::acquire), always without effect.
    async fn inspect(&self, query: &Query) -> Result<Vec<KeyState>>;

    /// Where the store keeps [`Records`]: in one place, or a quorum at each of its nodes; empty if it keeps none. No I/O.
    fn records(&self) -> Vec<Box<dyn Records + '_>>;
}

/// Takes a mutex, also after a panic of the thread that had it: for data of which each change is made in one step.
pub fn unpoisoned<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How many releases that failed are tried again at a time, so that a store which comes back is not met by all of them at once.
pub const RETRIED_AT_ONCE: usize = 64;

/// The bound on an operation that asks for a lease of `ttl`, of a store that waits for its servers for `timeout` at most: an answer that
/// comes later is of little use.
#[must_use]
pub fn operation_bound(timeout: Duration, ttl: Duration) -> Duration {
    timeout.min(ttl / 4)
}

/// A request for a lease.
#[derive(Clone, Debug)]
pub struct AcquireRequest {
    /// What is asked for.
    pub claim: Claim,
    /// How long the lease is to last when it is not renewed.
    pub ttl: Duration,
    /// How long the store may wait for the lock to become free. Zero is a try.
    pub wait: Duration,
    /// The order among waiters.
    pub order: Order,
    /// What fence is asked for.
    pub fence: FenceRequest,
    /// The name of the client that asks.
    pub holder: HolderInfo,
    /// Take the place of the exclusive lease with this token: the grant is made only if that lease has the lock (or the claim
    /// has it, rule R1). The lease ends in the same step, so that nobody gets in between, and its token is burnt. If anybody else
    /// has the lock, or nobody, the answer is `Contended`, with a holder only if there is one. It is a try: `wait` is zero. A
    /// [shared](Mode::Shared) claim passes all that wait, is the first of a new group, with a fence above that of the lease, and lets in
    /// those readers that wait first in the queue.
    pub from: Option<Token>,
    /// The lease that takes the place [of another](Self::from) is to [keep](crate::Capability::keeps) the lock from all, and is nobody's to
    /// hold: it is exclusive, is not renewed, and ends by time alone, whatever becomes of the client. The ttl may be longer than the
    /// store's longest. After an unknown effect such a request is made again with the same token.
    pub keeps: bool,
}

impl AcquireRequest {
    /// A try, in any order, for one fence, without a floor. Set the fields to ask for more.
    #[must_use]
    pub fn new(claim: Claim, ttl: Duration, holder: HolderInfo) -> Self {
        let (wait, order, fence) = (Duration::ZERO, Order::Any, FenceRequest::default());
        Self { claim, ttl, wait, order, fence, holder, from: None, keeps: false }
    }

    /// Whether the lock is to be shared, or its waiters are to be served in order: a store's queue is asked then.
    #[must_use]
    pub fn is_in_order(&self) -> bool {
        self.claim.mode != Mode::Exclusive || self.order == Order::Fifo && self.from.is_none()
    }
}

/// The order among waiters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Order {
    /// The waiter that asks at the right moment goes first.
    #[default]
    Any,
    /// The waiter that came first goes first.
    Fifo,
}

/// What fence a grant is to carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FenceRequest {
    /// Grant strictly above this.
    pub floor: Fence,
    /// How many consecutive fences the grant is to own; at least 1.
    pub span: u32,
    /// Where a new counter starts.
    pub clock: FenceClock,
}

impl Default for FenceRequest {
    fn default() -> Self {
        Self { floor: Fence::NONE, span: 1, clock: FenceClock::Store }
    }
}

/// Where a fence counter starts that the store does not have yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FenceClock {
    /// At the store's own clock, in microseconds, or above the floor if that is higher.
    #[default]
    Store,
    /// Just above the floor: the members of a quorum must be able to grant exactly what was proposed. For exclusive locks in no order.
    Floor,
}

/// The answer to an [`AcquireRequest`].
#[derive(Clone, Debug)]
pub enum Attempt {
    /// The lease is the claim's.
    Granted(Hold),
    /// It is another's.
    Contended(Contention),
}

/// What is known of the holder in the way.
#[derive(Clone, Debug, Default)]
pub struct Contention {
    /// When asking again makes sense, if the store knows: zero for at once.
    pub retry_after: Option<Duration>,
    /// The holders of the lock.
    pub holder: Option<HolderInfo>,
    /// The store has undone a part of the attempt, or is about to, and sees to it that nothing of it stays: the token must
    /// not be asked for again (rule R2).
    pub burnt: bool,
}

/// A request to extend a lease.
#[derive(Clone, Debug)]
pub struct Renewal {
    /// Whose lease.
    pub claim: Claim,
    /// How long it is to last from now on.
    pub ttl: Duration,
    /// The count of nested holds, to be shown in the store.
    pub depth: u32,
    /// Raise the store's fence counter for the key to at least this: later grants are above it, and readers that come to share the
    /// lock are not below.
    pub fence_floor: Option<Fence>,
    /// Show this name of the client that holds the lease from now on; `None` leaves the one that is there.
    pub holder: Option<HolderInfo>,
}

impl Renewal {
    /// Extends a lease that is held once; raises no fence and leaves the holder's name. Set the fields to ask for more.
    #[must_use]
    pub fn new(claim: Claim, ttl: Duration) -> Self {
        Self { claim, ttl, depth: 1, fence_floor: None, holder: None }
    }
}

/// The answer to a [`Renewal`].
#[derive(Clone, Debug)]
pub enum Renewed {
    /// The lease goes on.
    Held(Hold),
    /// The lease is over. The caller releases the claim once its holder has heard: a part of the store may keep it until then.
    Lost(LossReason),
}

/// The answer to a release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    /// The lease was the claim's and has ended.
    Released {
        /// How many **other** clients were known to wait for it; `None` if the store can't tell.
        waiters: Option<u32>,
    },
    /// The lease was not the claim's at that moment: the work done under it may have overlapped with another's.
    NotHeld(LossReason),
}

/// What to inspect.
#[derive(Clone, Debug)]
pub enum Query {
    /// These locks; the answer has one entry for each, in order, also for the free ones.
    Keys(Vec<LockKey>),
    /// All locks that are held and whose name starts with this; sorted by name.
    Prefix(String),
    /// This lock, with those that wait in its queue: one entry, also if it is free. For people that ask: it may cost more than the
    /// same lock among [`Keys`](Self::Keys).
    Queue(LockKey),
}

/// What is known of a lock.
#[derive(Clone, Debug)]
pub struct KeyState {
    /// The lock.
    pub key: LockKey,
    /// Its holders; empty if it is free.
    pub holders: Vec<Holder>,
    /// The last fence that was given out for it, as far as the store remembers.
    pub fence: Option<Fence>,
    /// How many clients wait for it, if the store can tell.
    pub waiters: Option<u32>,
    /// Those that wait in its queue, the next one first, and at most [`LONGEST_QUEUE`](Self::LONGEST_QUEUE) of them. `None` if
    /// [`Query::Queue`] did not ask for it, if the store has [no queue](crate::Capability::fifo), or if it can't be read. On most stores
    /// those that wait in no [order](Order::Any) are counted as waiters, but are not in the queue. The queue may be a moment younger
    /// than the rest.
    pub queue: Option<Vec<Waiter>>,
}

impl KeyState {
    /// How much of a queue is shown: 32 places.
    pub const LONGEST_QUEUE: usize = 32;

    /// A lock of which nothing is known.
    #[must_use]
    pub fn unknown(key: LockKey) -> Self {
        Self { key, holders: Vec::new(), fence: None, waiters: None, queue: None }
    }
}

/// One that waits in the queue of a lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiter {
    /// Its name.
    pub info: HolderInfo,
    /// How it is to hold the lock.
    pub mode: Mode,
}

/// One holder of a lock.
#[derive(Clone, Debug)]
pub struct Holder {
    /// Its token; `None` if it is not a lockkit client.
    pub token: Option<Token>,
    /// Its name.
    pub info: HolderInfo,
    /// How it holds the lock.
    pub mode: Mode,
    /// Its nested holds.
    pub depth: u32,
    /// The first fence of its grant; `None` if it is not a lockkit client.
    pub fence: Option<Fence>,
    /// What is left of its lease on the store's clock; `None` if the lease does not run out by time.
    pub remaining: Option<Duration>,
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl<S: LockStore + ?Sized> LockStore for Arc<S> {
    fn info(&self) -> &StoreInfo {
        (**self).info()
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        (**self).acquire(request).await
    }

    async fn renew(&self, renewals: &[Renewal]) -> Vec<Result<Renewed>> {
        (**self).renew(renewals).await
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        (**self).release(claim).await
    }

    async fn inspect(&self, query: &Query) -> Result<Vec<KeyState>> {
        (**self).inspect(query).await
    }

    fn records(&self) -> Vec<Box<dyn Records + '_>> {
        (**self).records()
    }
}
