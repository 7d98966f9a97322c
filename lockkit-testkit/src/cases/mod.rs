//! The compliance suite: named cases, each with one sentence that says what a store must do.
//!
//! The numbers R1 to R12 are those of [`lockkit_core::store`]. A case sees a store only through the public API, opens
//! its own clients, and uses names of its own, so that all cases can run side by side on one store. A case that harms
//! the server gets a private one.

mod abandoned;
mod asks;
mod behind;
mod call;
mod cancellation;
mod contention;
mod counted;
mod downgrade;
mod election;
mod expiry;
mod fairness;
mod faults;
mod fencing;
mod input;
mod lifecycle;
mod line;
mod modes;
mod multi;
mod ownership;
mod readers;
mod records;
mod reentrancy;
mod resource;
mod scene;
mod waiting;
mod window;

use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use lockkit_core::{LockKey, LockStore, Locker, Token};

pub(crate) use asks::abandon_after;
use asks::{
    answered, assert_taken, fencing_claimed, fresh, grant, grant_again, grant_at_once, grant_released, locker, renew,
    request, request_as, seen, take, take_in_the_end, wait_for_waiter, wait_for_waiters,
};

use crate::{Backend, BoxError, Server};

/// One thing that every store must get right.
pub struct Case {
    /// Its name, such as `fencing::never_decreases`.
    pub name: &'static str,
    /// What the store must do.
    pub doc: &'static str,
    /// What the store must be able to do for the case to apply.
    pub needs: Needs,
    pub(crate) run: fn(Ctx) -> Pin<Box<dyn Future<Output = CaseResult> + Send>>,
}

impl fmt::Debug for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Case").field("name", &self.name).field("needs", &self.needs).finish_non_exhaustive()
    }
}

/// What a store must be able to do for a case to apply.
#[derive(Clone, Copy, Debug)]
pub struct Needs {
    /// Leases that end by ttl.
    pub ttl: bool,
    /// Shared locks.
    pub shared: bool,
    /// Permits.
    pub permits: bool,
    /// Waiters that are served in the order in which they came.
    pub fifo: bool,
    /// Fences that mean anything.
    pub fences: bool,
    /// Fences that outlive the loss of all data.
    pub hybrid: bool,
    /// Grants in the place of others.
    pub resume: bool,
    /// Locks that are kept when their holder is done.
    pub keeps: bool,
    /// Records, kept in one place.
    pub records: bool,
    /// A clock that can be injected.
    pub clock: bool,
    /// A private server that can be harmed.
    pub server: bool,
}

impl Needs {
    /// Nothing beyond the contract.
    pub const NOTHING: Self = Self {
        ttl: false,
        shared: false,
        permits: false,
        fifo: false,
        fences: false,
        hybrid: false,
        resume: false,
        keeps: false,
        records: false,
        clock: false,
        server: false,
    };
    /// Leases that end by ttl.
    pub const TTL: Self = Self { ttl: true, ..Self::NOTHING };
    /// Shared locks.
    pub const SHARED: Self = Self { shared: true, ..Self::NOTHING };
    /// Shared locks, with leases that end by ttl.
    pub const SHARED_TTL: Self = Self { ttl: true, ..Self::SHARED };
    /// Shared locks, with fences that mean anything.
    pub const SHARED_FENCES: Self = Self { fences: true, ..Self::SHARED };
    /// Permits.
    pub const PERMITS: Self = Self { permits: true, ..Self::NOTHING };
    /// Permits, with leases that end by ttl.
    pub const PERMITS_TTL: Self = Self { ttl: true, ..Self::PERMITS };
    /// Shared locks and permits.
    pub const SHARED_PERMITS: Self = Self { permits: true, ..Self::SHARED };
    /// Waiters that are served in the order in which they came.
    pub const FIFO: Self = Self { fifo: true, ..Self::NOTHING };
    /// Waiters that are served in the order in which they came, and leases that end by ttl.
    pub const FIFO_TTL: Self = Self { ttl: true, ..Self::FIFO };
    /// Fences that mean anything.
    pub const FENCES: Self = Self { fences: true, ..Self::NOTHING };
    /// Leases that end by ttl, on a clock that can be injected.
    pub const CLOCK: Self = Self { ttl: true, clock: true, ..Self::NOTHING };
    /// Grants in the place of others.
    pub const RESUME: Self = Self { resume: true, ..Self::NOTHING };
    /// Locks that are kept when their holder is done.
    pub const KEEPS: Self = Self { keeps: true, ..Self::NOTHING };
    /// The same, on a clock that can be injected.
    pub const KEEPS_CLOCK: Self = Self { clock: true, ..Self::KEEPS };
    /// Records, kept in one place.
    pub const RECORDS: Self = Self { records: true, ..Self::NOTHING };
    /// A private server.
    pub const SERVER: Self = Self { server: true, ..Self::NOTHING };
    /// A private server, with leases that end by ttl.
    pub const SERVER_TTL: Self = Self { ttl: true, ..Self::SERVER };
    /// A private server, with waiters that are served in the order in which they came.
    pub const SERVER_FIFO: Self = Self { fifo: true, ..Self::SERVER };
    /// A private server, with fences that mean anything.
    pub const SERVER_FENCES: Self = Self { fences: true, ..Self::SERVER };
    /// A private server, with records.
    pub const SERVER_RECORDS: Self = Self { records: true, ..Self::SERVER };
    /// A private server that may lose its data without its fences going back.
    pub const SERVER_HYBRID: Self = Self { hybrid: true, ..Self::SERVER_FENCES };
}

/// All cases, group by group.
#[must_use]
pub fn all() -> Vec<&'static Case> {
    let groups: [&'static [Case]; 21] = [
        lifecycle::CASES,
        expiry::CASES,
        ownership::CASES,
        reentrancy::CASES,
        contention::CASES,
        waiting::CASES,
        fairness::CASES,
        line::CASES,
        modes::CASES,
        readers::CASES,
        downgrade::CASES,
        fencing::CASES,
        cancellation::CASES,
        abandoned::CASES,
        behind::CASES,
        input::CASES,
        records::CASES,
        window::CASES,
        election::CASES,
        multi::CASES,
        faults::CASES,
    ];
    groups.into_iter().flatten().collect()
}

/// How a case ended: the error says which rule was broken, and how that showed.
pub(crate) type CaseResult = Result<(), BoxError>;

/// Makes the table of a group: the function's name is the case's, its sentence stands beside it.
macro_rules! cases {
    ($group:literal: $($function:ident [$needs:ident] $doc:literal)*) => {
        pub(super) const CASES: &[$crate::cases::Case] = &[$($crate::cases::Case {
            name: concat!($group, "::", stringify!($function)),
            doc: $doc,
            needs: $crate::cases::Needs::$needs,
            run: |ctx| Box::pin($function(ctx)),
        }),*];
    };
}
use cases;

/// The ttl of cases that wait for a lease to end.
const SHORT: Duration = Duration::from_millis(600);

/// The ttl of cases in which no lease should end.
const LONG: Duration = Duration::from_secs(20);

/// How late a waiter may be that is not told what has happened: a lease or a place ran out.
const UNTOLD: Duration = Duration::from_secs(2);

/// For how long a call is made again that failed for want of time: with [`SHORT`] it has no more than 150 ms.
const AGAIN: Duration = Duration::from_secs(10);

/// How late this machine may be at doing what is due.
const SLACK: Duration = Duration::from_millis(400);

/// A case at work: its store, and names that nobody else uses.
#[derive(Debug)]
pub(crate) struct Ctx {
    backend: Arc<dyn Backend>,
    prefix: String,
    names: AtomicU32,
}

impl Ctx {
    pub(crate) fn new(case: &Case, backend: Arc<dyn Backend>, under: &str) -> Self {
        let unique = Token::random().map(|token| token.reveal()[..12].to_owned()).unwrap_or_default();
        Self { backend, prefix: format!("{under}{}/{unique}", case.name), names: AtomicU32::new(0) }
    }

    /// A name that nobody else uses.
    fn name(&self) -> String {
        // All of one length, so that none is the beginning of another: listing `…/1` would give `…/10` to `…/199` too.
        format!("{}/{:06}", self.prefix, self.names.fetch_add(1, Ordering::Relaxed))
    }

    /// A key that nobody else uses.
    fn key(&self) -> Result<LockKey, BoxError> {
        Ok(LockKey::new(self.name())?)
    }

    /// A new client of the store.
    async fn store(&self) -> Result<Arc<dyn LockStore>, BoxError> {
        self.backend.open().await
    }

    /// A new client, as users have it.
    async fn locker(&self) -> Result<Locker, BoxError> {
        Ok(locker(self.store().await?))
    }

    async fn server(&self) -> Result<Box<dyn Server>, BoxError> {
        self.backend.private_server().await?.ok_or_else(|| "there is no private server".into())
    }
}
