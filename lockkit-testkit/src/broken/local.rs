//! The simple store without a network, to put beneath a simulation: only what is wrong on the table, and with what is
//! asked of it, is wrong here.

use std::{
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use async_trait::async_trait;
use lockkit_core::{
    AcquireRequest, Attempt, Capability, Claim, Clock, Contention, Error, ErrorKind, Fencing, Hold, KeyState, Liveness,
    LockKey, LockStore, Mode, Moment, Order, Query, Release, Renewal, Renewed, Result, Resume, StoreInfo, Waiting,
    store::{Reconnections, Records, unpoisoned},
};

use super::{
    Bug,
    record::{Answer, StoredTerms},
    table::Table,
};

/// The simple store in this process, for `SimStore::over` of the package `lockkit-sim`: correct without a bug.
#[derive(Debug)]
pub struct LocalStore {
    info: StoreInfo,
    table: Mutex<Table>,
    bug: Option<Bug>,
}

impl LocalStore {
    /// An empty store, by this clock.
    #[must_use]
    pub fn new(bug: Option<Bug>, clock: Arc<dyn Clock>) -> Self {
        let capability = Capability {
            shared: false,
            permits: false,
            fifo: false,
            resume: Resume::UntilTtl,
            keeps: false,
            downgrades: false,
            waiting: Waiting::Poll,
            liveness: Liveness { ttl: Some(Duration::from_millis(100)..=Duration::from_secs(300)), session: None },
            fencing: Fencing::Hybrid,
            max_key_bytes: LockKey::MAX_BYTES,
        };
        let info = StoreInfo {
            scheme: "simple",
            name: "simple".into(),
            capability,
            clock,
            alarm: None,
            reconnections: Reconnections::default(),
            warnings: Arc::default(),
        };
        Self { info, table: Mutex::new(Table::new(bug)), bug }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        unpoisoned(&self.table)
    }

    fn now(&self) -> Moment {
        self.info.clock.now()
    }

    fn renew_one(&self, renewal: &Renewal) -> Result<Renewed> {
        self.info.admit_mode(renewal.claim.mode)?;
        let now = self.now();
        Ok(match self.table().renew(renewal.claim.key.as_str(), renewal, now, Some(now + renewal.ttl)) {
            Ok(terms) => Renewed::Held(hold(&renewal.claim, terms, now + renewal.ttl)),
            Err(reason) => Renewed::Lost(reason),
        })
    }
}

#[async_trait]
impl LockStore for LocalStore {
    fn info(&self) -> &StoreInfo {
        &self.info
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        if request.order != Order::Any || request.claim.mode != Mode::Exclusive {
            return Err(Error::new(ErrorKind::Unsupported, "this store has only plain exclusive locks"));
        }
        let now = self.now();
        // BUG: for ever.
        let ends = Some(now + request.ttl).filter(|_| self.bug != Some(Bug::NoExpiry));
        Ok(match self.table().acquire(request.claim.key.as_str(), request, now, ends) {
            Answer::OtherLimit => return Err(Error::invalid("there are no permits here")),
            Answer::Granted(terms) => Attempt::Granted(hold(&request.claim, terms, now + request.ttl)),
            Answer::Held { remaining, holder } => {
                Attempt::Contended(Contention { retry_after: remaining, holder, burnt: false })
            }
        })
    }

    async fn renew(&self, renewals: &[Renewal]) -> Vec<Result<Renewed>> {
        let mut answers: Vec<_> = renewals.iter().map(|renewal| self.renew_one(renewal)).collect();
        if self.bug == Some(Bug::RenewalsReversed) {
            // BUG: as they come.
            answers.reverse();
        }
        answers
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        self.info.admit_mode(claim.mode)?;
        Ok(match self.table().release(claim.key.as_str(), claim, self.now()) {
            // BUG: that it was another's is kept from the caller.
            Release::NotHeld(_) if self.bug == Some(Bug::HidesNotMine) => Release::Released { waiters: None },
            answer => answer,
        })
    }

    async fn inspect(&self, query: &Query) -> Result<Vec<KeyState>> {
        let (now, mut table) = (self.now(), self.table());
        let keys: Vec<_> = match query {
            Query::Keys(keys) => keys.clone(),
            Query::Queue(key) => vec![key.clone()],
            Query::Prefix(prefix) => table.held(prefix).into_iter().map(|(_, key)| key).collect(),
        };
        let states = keys.iter().map(|key| table.state(key.as_str(), key, now));
        Ok(states.filter(|state| !matches!(query, Query::Prefix(_)) || !state.holders.is_empty()).collect())
    }

    fn records(&self) -> Vec<Box<dyn Records + '_>> {
        Vec::new()
    }
}

fn hold(claim: &Claim, terms: StoredTerms, until: Moment) -> Hold {
    Hold { claim: claim.clone(), fence: terms.fence, span: terms.span, until, depth: terms.depth }
}
