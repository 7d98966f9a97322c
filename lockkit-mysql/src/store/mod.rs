//! The store: five questions, each one statement where the answer is the usual one.

pub(crate) mod gc;
pub(crate) mod inspect;
pub(crate) mod named_lock_queue;
pub(crate) mod renew;

use std::{fmt, sync::Arc, time::Duration};

use async_trait::async_trait;
use lockkit_core::{
    AcquireRequest, Attempt, Capability, Claim, Contention, Error, ErrorKind, Fence, FenceClock, FenceRequest, Fencing,
    Finding, Hold, KeyState, Liveness, LockKey, LockStore, LossReason, Mode, Order, Query, Release, Renewal, Renewed,
    Result, StoreInfo, Waiting,
};

use crate::{
    client::{
        connection::{LONGEST_WAIT, Replicas},
        pool::{Bound, Connection, Lane, Pool},
        server,
    },
    config::MySqlConfig,
    schema,
    store::named_lock_queue::{Gates, Passed, Turn},
    wire::{
        error::{self, Sent},
        name::to_column,
        row,
        statements::{Statements, over_fence},
    },
};

const MIN_TTL: Duration = Duration::from_millis(100);
const MAX_TTL: Duration = Duration::from_secs(5 * 60);
/// Beyond this the server's arithmetic would leave the integers.
const MAX_FENCE: u64 = 1 << 62;

/// In µs since 1970: a server's clock that is behind this is not set, and fences from it would be numbers of rows.
const LEAST_TIME: u64 = 1 << 50;

/// A lock store in a table of a MySQL or MariaDB server.
pub struct MySqlStore {
    pub(crate) info: StoreInfo,
    pub(crate) pool: Pool,
    pub(crate) statements: Statements,
    pub(crate) timeout: Duration,
    gates: Arc<Gates>,
}

impl MySqlStore {
    /// Connects, and checks that the server and the table can keep locks. The table is made if it is missing and
    /// [`create`](MySqlConfig::create) allows it.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] for a wrong configuration; [`Misconfigured`](ErrorKind::Misconfigured) for something else
    /// than a MySQL server at the address, and for a database or a table that is missing or wrong, with what makes it right;
    /// [`ErrorKind::Unsupported`] for a server that is too old, or logs statements; `Denied`, `Unavailable` or `TimedOut` if it
    /// can't be asked or takes no writes.
    pub async fn connect(config: MySqlConfig) -> Result<Self> {
        let mut store = Self::new(config.clone())?;
        let warnings = store.check(&config).await.map_err(|e| e.at("connect", None, &store.info.name))?;
        store.info.warnings = warnings.into();
        Ok(store)
    }

    /// Connects to the database that a URL names. See [`MySqlConfig::from_url`] for its form.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub async fn from_url(url: &str) -> Result<Self> {
        Self::connect(MySqlConfig::from_url(url)?).await
    }

    /// A store that connects when it is first used, and checks neither server nor table: for a quorum, whose members may
    /// be down when it starts.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] for a wrong configuration.
    pub fn new(config: MySqlConfig) -> Result<Self> {
        let statements = Statements::new(&config.check()?);
        let pool = Pool::new(&config, Replicas::Refused);
        let gates = Arc::new(Gates::new(&config.table, Pool::extra(&config), config.timeout));
        let info = StoreInfo {
            scheme: "mysql",
            name: config.display_name().into(),
            capability: Capability {
                shared: false,
                permits: false,
                fifo: false,
                waiting: Waiting::Poll,
                liveness: Liveness::Ttl { min: MIN_TTL, max: MAX_TTL },
                fencing: Fencing::Hybrid,
                max_key_bytes: LockKey::MAX_BYTES,
            },
            clock: config.clock,
            alarm: None,
            warnings: Arc::default(),
        };
        Ok(Self { info, pool, statements, timeout: config.timeout, gates })
    }

    /// What the server's settings put at risk, in words; known only after [`connect`](Self::connect).
    #[must_use]
    pub fn warnings(&self) -> &[String] {
        &self.info.warnings
    }

    /// Removes the rows of locks that nobody has used for at least `unused_for`, and says how many. Nothing depends on
    /// it but the size of the table.
    ///
    /// A row is kept while its lock is held, while somebody keeps the row locked, and while its fence counter is ahead of
    /// the server's clock, so that the fences of a removed lock go on growing when it is used again.
    ///
    /// # Errors
    /// As those of [`LockStore::release`]; some rows may have been removed. A period below one minute is
    /// [`ErrorKind::InvalidInput`].
    ///
    /// # Cancellation
    /// Some rows may have been removed.
    pub async fn remove_unused(&self, unused_for: Duration) -> Result<u64> {
        gc::remove_unused(self, unused_for).await.map_err(|e| e.at("remove unused", None, &self.info.name))
    }

    async fn check(&self, config: &MySqlConfig) -> Result<Vec<String>> {
        let mut connection = self.pool.first_connection(config, Bound::new(self.timeout)).await?;
        let settings = server::Settings::of_server(&mut connection).await?;
        let warnings = Finding::admit(&server::judge(&settings))?;
        if config.create {
            schema::create_if_missing(&mut connection, config).await?;
        }
        schema::check_table(&mut connection, config).await?;
        Ok(warnings)
    }
}

#[async_trait]
impl LockStore for MySqlStore {
    fn info(&self) -> &StoreInfo {
        &self.info
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        self.attempt(request).await.map_err(|e| e.at("acquire", Some(&request.claim.key), &self.info.name))
    }

    async fn renew(&self, renewals: &[Renewal]) -> Vec<Result<Renewed>> {
        let answers = renew::renew(self, renewals).await;
        for (answer, Renewal { claim, .. }) in answers.iter().zip(renewals) {
            if matches!(answer, Ok(Renewed::Lost(_))) {
                // It will not be released.
                named_lock_queue::open(self.gates.behind(&claim.key, &claim.token));
            }
        }
        answers
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        self.release_claim(claim).await.map_err(|e| e.at("release", Some(&claim.key), &self.info.name))
    }

    async fn inspect(&self, query: &Query) -> Result<Vec<KeyState>> {
        inspect::inspect(self, query).await.map_err(|e| e.at("inspect", None, &self.info.name))
    }
}

impl MySqlStore {
    async fn attempt(&self, request: &AcquireRequest) -> Result<Attempt> {
        exclusive(&request.claim)?;
        if request.order != Order::Any {
            return Err(error::unsupported("first-in-first-out order"));
        }
        let (ttl, fence) = (microseconds(request.ttl)?, request.fence);
        if fence.span == 0 {
            return Err(error::invalid("a grant owns at least one fence"));
        }
        check_floor(fence.floor)?;
        let waits = request.wait >= LONGEST_WAIT;
        match waits.then(|| self.gates.turn(&request.claim.key)).flatten() {
            Some(turn) => self.attempt_in_turn(request, ttl, turn).await,
            None => self.attempt_row(request, ttl).await,
        }
    }

    /// Tries the row; if it is held, waits at the lock's gate and tries again. If the lock is hot, the gate comes first.
    async fn attempt_in_turn(&self, request: &AcquireRequest, ttl: i64, mut turn: Turn<'_>) -> Result<Attempt> {
        if turn.should_ask() {
            let mut connection = self.pool.connection(Lane::Common, self.bound(request.ttl)).await?;
            if turn.is_wanted(&mut connection).await {
                turn.note_company();
            }
        }
        let mut passed = if turn.is_hot() { Some(turn.pass(&self.pool).await) } else { None };
        let mut attempt = self.attempt_row(request, ttl).await?;
        if let Attempt::Contended(contention) = &attempt {
            turn.note_company();
            // A lease that ends sooner than a wait may is left to the poller.
            let lasts = contention.retry_after.is_some_and(|left| left >= LONGEST_WAIT);
            if passed.is_none() && lasts && !turn.is_passed() {
                passed = Some(turn.pass(&self.pool).await);
                attempt = self.attempt_row(request, ttl).await?;
            }
        }
        match attempt {
            Attempt::Granted(hold) => {
                turn.took(request.claim.token);
                Ok(Attempt::Granted(hold))
            }
            Attempt::Contended(contention) => {
                turn.missed();
                // Others went through the gate all the time: line up again, rather than ask for the row.
                let retry_after =
                    if passed == Some(Passed::NotYet) { Some(Duration::ZERO) } else { contention.retry_after };
                Ok(Attempt::Contended(Contention { retry_after, ..contention }))
            }
        }
    }

    async fn attempt_row(&self, request: &AcquireRequest, ttl: i64) -> Result<Attempt> {
        let mut connection = self.pool.connection(Lane::Common, self.bound(request.ttl)).await?;
        if let Some(hold) = self.take(&mut connection, request, ttl).await? {
            return Ok(Attempt::Granted(hold));
        }
        match self.look(&mut connection, &request.claim.key).await? {
            None => {
                let insert = |_| self.statements.insert().bind(to_column(&request.claim.key));
                connection.execute(insert, None).await?;
                match self.take(&mut connection, request, ttl).await? {
                    Some(hold) => Ok(Attempt::Granted(hold)),
                    None => Ok(contended(self.look(&mut connection, &request.claim.key).await?)),
                }
            }
            Some(lock) if lock.lease.as_ref().is_some_and(|lease| lease.is_of(&request.claim)) => {
                self.take_again(&mut connection, request).await
            }
            found => Ok(contended(found)),
        }
    }

    /// The usual case, in one round trip: takes the lock if its row is there and free.
    async fn take(&self, connection: &mut Connection, request: &AcquireRequest, ttl: i64) -> Result<Option<Hold>> {
        let AcquireRequest { claim, fence, .. } = request;
        let statement = |question| {
            let acquire = self.statements.acquire(fence.clock == FenceClock::Store);
            acquire
                .bind(fence.floor.get() + 1)
                .bind(fence.span)
                .bind(claim.token.as_bytes().as_slice())
                .bind(request.holder.as_str())
                .bind(over_fence(question))
                .bind(ttl)
                .bind(to_column(&claim.key))
        };
        let sent = self.info.clock.now();
        let (done, question) = connection.execute(statement, Some(claim.token)).await?;
        let first = done.last_insert_id() ^ over_fence(question);
        match done.rows_affected() {
            0 if done.last_insert_id() == 0 => Ok(None),
            1 if is_sane(first, fence) => {
                let (fence, until) = (Fence::new(first), sent + request.ttl);
                Ok(Some(Hold { claim: claim.clone(), fence, span: request.fence.span, until, depth: 1 }))
            }
            _ => Err(connection.out_of_step(Sent::Yes)),
        }
    }

    /// The claim has the lease already (rule R1): extends it, and gives the grant that is on record.
    async fn take_again(&self, connection: &mut Connection, request: &AcquireRequest) -> Result<Attempt> {
        let renewal = renew::Terms { ttl: microseconds(request.ttl)?, depth: None, floor: 0 };
        let sent = self.info.clock.now();
        renew::extend(self, connection, &[&request.claim], renewal).await.map_err(|failed| failed.error)?;
        match self.look(connection, &request.claim.key).await? {
            Some(row::Lock { lease: Some(lease), .. }) if lease.is_of(&request.claim) => {
                Ok(Attempt::Granted(lease.hold(&request.claim, sent, request.ttl)))
            }
            found => Ok(contended(found)),
        }
    }

    pub(crate) async fn look(&self, connection: &mut Connection, key: &LockKey) -> Result<Option<row::Lock>> {
        let found = row::only(
            &connection.numbered_rows(|question| self.statements.look().bind(question).bind(to_column(key))).await?,
        )?;
        if found.as_ref().is_some_and(|lock| lock.name != to_column(key)) {
            return Err(connection.out_of_step(Sent::ReadOnly));
        }
        Ok(found)
    }

    async fn release_claim(&self, claim: &Claim) -> Result<Release> {
        exclusive(claim)?;
        let bound = Bound::new(self.timeout);
        let gate = self.gates.behind(&claim.key, &claim.token);
        // Behind whatever was sent for the claim and given up; else that could take the lock after its release.
        self.pool.settled(&claim.token, bound).await?;
        let mut connection = self.pool.connection(Lane::Reserved, bound).await?;
        let token = claim.token.as_bytes().as_slice();
        let statement = |question| self.statements.release().bind(question).bind(to_column(&claim.key)).bind(token);
        let (done, question) = connection.execute(statement, Some(claim.token)).await?;
        match done.rows_affected() {
            1 if renew::is_answer(&done, question) => {
                named_lock_queue::open(gate);
                Ok(Release::Released { waiters: None })
            }
            0 if renew::is_answer(&done, question) => {
                let found = self.look(&mut connection, &claim.key).await?;
                Ok(Release::NotHeld(why_not(found.as_ref().and_then(|lock| lock.lease.as_ref()))))
            }
            _ => Err(connection.out_of_step(Sent::Yes)),
        }
    }

    /// The bound on an operation that asks for a lease of `ttl`: an answer that comes later is of little use.
    pub(crate) fn bound(&self, ttl: Duration) -> Bound {
        Bound::new(self.timeout.min(ttl / 4))
    }
}

/// Whether a grant can have this fence: else the answer is to another question, whose number is another, or that has none,
/// such as the one that makes the row.
fn is_sane(fence: u64, asked: &FenceRequest) -> bool {
    (asked.floor.get() + 1..MAX_FENCE).contains(&fence) && (asked.clock == FenceClock::Floor || fence > LEAST_TIME)
}

/// Another has the lock, or had it when it was asked for and it makes sense to ask again at once.
fn contended(found: Option<row::Lock>) -> Attempt {
    let free = Contention { retry_after: Some(Duration::ZERO), ..Contention::default() };
    Attempt::Contended(found.and_then(|lock| lock.lease).map_or(free, row::Lease::into_contention))
}

/// Why a lease is not the claim's, given whose it is.
pub(crate) fn why_not(found: Option<&row::Lease>) -> LossReason {
    if found.is_some() { LossReason::Taken } else { LossReason::Gone }
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
pub(crate) fn microseconds(ttl: Duration) -> Result<i64> {
    if !(MIN_TTL..=MAX_TTL).contains(&ttl) {
        let message = format!("the ttl must lie between {MIN_TTL:?} and {MAX_TTL:?}; it is {ttl:?}");
        return Err(Error::new(ErrorKind::InvalidInput, message));
    }
    Ok(i64::try_from(ttl.as_nanos().div_ceil(1000)).unwrap_or(i64::MAX))
}

/// # Errors
/// [`ErrorKind::InvalidInput`] if the counter could not go there.
pub(crate) fn check_floor(floor: Fence) -> Result<()> {
    if floor.get() < MAX_FENCE { Ok(()) } else { Err(error::invalid("fences in a table end at 2^62")) }
}

impl fmt::Debug for MySqlStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MySqlStore").field("name", &self.info.name).field("pool", &self.pool).finish_non_exhaustive()
    }
}
