//! A client of the simple store: five questions, each one step on the machine, unless a bug makes it two.

use std::{
    collections::{HashMap, HashSet},
    future::Future,
    pin::pin,
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use lockkit_core::{
    AcquireRequest, Attempt, Capability, Claim, Clock, Contention, Error, ErrorKind, Fence, Fencing, Hold, HolderInfo,
    KeyState, Liveness, LockKey, LockStore, LossReason, Mode, Moment, Order, Query, Release, Renewal, Renewed, Result,
    Resume, StoreInfo, SystemClock, Token, Waiting,
    store::{Reconnections, Record, Records},
};
use tokio::{
    sync::{Mutex, oneshot, watch},
    time::timeout,
};

use super::{
    Bug,
    record::{Answer, StoredTerms},
    table::Table,
    wire::Dialer,
};

/// How long the machine may take to answer.
const BOUND: Duration = Duration::from_secs(2);

/// A client.
#[derive(Clone, Debug)]
pub(super) struct SimpleStore {
    info: Arc<StoreInfo>,
    dialer: Arc<Dialer>,
    bug: Option<Bug>,
    /// What [`Bug::TokenPerClient`] takes for proof of ownership.
    client: Token,
    /// The claims that were released: what [`Bug::LandsLate`] waits for.
    released: watch::Sender<HashSet<Token>>,
    /// What [`Bug::RecordsRemembered`] takes for what the records are.
    pub(super) remembered: Arc<Mutex<HashMap<LockKey, Record>>>,
}

impl SimpleStore {
    pub(super) fn new(dialer: Dialer, bug: Option<Bug>, clock: Arc<dyn Clock>) -> Result<Self> {
        let exclusive_only = matches!(bug, Some(Bug::DowngradesShared | Bug::LooksForAnyMode));
        let capability = Capability {
            shared: !exclusive_only,
            permits: !exclusive_only,
            fifo: true,
            resume: Resume::UntilTtl,
            keeps: true,
            downgrades: !exclusive_only,
            waiting: Waiting::Notify,
            liveness: Liveness { ttl: Some(Duration::from_millis(100)..=Duration::from_secs(300)), session: None },
            fencing: Fencing::Hybrid,
            max_key_bytes: LockKey::MAX_BYTES,
        };
        let info = Arc::new(StoreInfo {
            scheme: "simple",
            name: "simple".into(),
            capability,
            clock,
            alarm: None,
            reconnections: Reconnections::default(),
            warnings: Arc::default(),
        });
        Ok(Self {
            info,
            dialer: Arc::new(dialer),
            bug,
            client: Token::random()?,
            released: watch::Sender::default(),
            remembered: Arc::default(),
        })
    }

    pub(super) fn has(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    fn now(&self) -> Moment {
        self.info.clock.now()
    }

    /// Has a step done, with the name of the lock and the present moment by the store's clock.
    async fn ask<T: Clone + Send + 'static>(
        &self,
        key: &LockKey,
        bound: Duration,
        step: impl FnOnce(&mut Table, &str, Moment) -> T + Send + 'static,
    ) -> Result<T> {
        let name = name_of(key.as_str(), self.bug);
        // BUG: the client's clock decides.
        let theirs = self.has(Bug::ClientClock).then(|| self.now());
        let asked =
            self.dialer.ask(key.as_str(), move |table| step(table, &name, theirs.unwrap_or_else(|| SystemClock.now())));
        // BUG: the network takes as long as it takes.
        let bound = if self.has(Bug::NoBound) { Duration::MAX } else { bound };
        let answer = match tokio::time::timeout(bound, asked).await {
            // BUG: the answer that comes first may be to a question that somebody gave up.
            Ok(Ok(answer)) if self.has(Bug::ReusesInDoubt) => Ok(self.dialer.one_behind(answer)),
            Ok(answer) => answer,
            Err(_) => {
                self.dialer.give_up().await;
                Err(Error::new(ErrorKind::TimedOut, format!("no answer in {bound:?}")).unknown_effect())
            }
        };
        answer.map_err(|e| {
            // BUG: the request may have been sent all the same.
            let e = if self.has(Bug::EffectDenied) { Error::new(e.kind(), e.message()) } else { e };
            e.at("ask", Some(key), &self.info.name)
        })
    }

    /// Has a step done that has nothing to do with time.
    pub(super) async fn ask_machine<T: Clone + Send + 'static>(
        &self,
        key: &LockKey,
        step: impl FnOnce(&mut Table, &str) -> T + Send + 'static,
    ) -> Result<T> {
        self.ask(key, BOUND, move |table, name, _| step(table, name)).await
    }

    /// How long a lease lasts on the machine.
    fn lasts(&self, ttl: Duration) -> Option<Duration> {
        match self.bug {
            // BUG: for ever; the second may get its end later.
            Some(Bug::NoExpiry | Bug::SetThenExpire) => None,
            // BUG: rounded down. A store that takes no 0 makes it 1.
            Some(Bug::WholeSeconds) => Some(Duration::from_secs(ttl.as_secs().max(1))),
            // BUG: whoever asks.
            Some(Bug::WindowOfALease) => Some(ttl.min(Duration::from_secs(300))),
            _ => Some(ttl),
        }
    }

    /// What is proof of ownership.
    fn proof(&self, claim: &Claim) -> Claim {
        // BUG: a question about a client does not say about which of its claims.
        let token = if self.has(Bug::TokenPerClient) { self.client } else { claim.token };
        Claim { token, ..claim.clone() }
    }

    fn hold(&self, claim: &Claim, terms: StoredTerms, sent: Moment, ttl: Duration) -> Hold {
        let StoredTerms { fence, span, depth } = terms;
        // BUG: the time that the reply took is counted as validity.
        let since = if self.has(Bug::ValidityFromReply) { self.now() } else { sent };
        // BUG: claimed, but not there.
        let fence = if self.has(Bug::NoFence) { Fence::NONE } else { fence };
        Hold { claim: claim.clone(), fence, span, until: since + ttl, depth }
    }

    /// Asks once.
    async fn attempt(&self, request: &AcquireRequest) -> Result<Attempt> {
        let (sent, claim) = (self.now(), self.proof(&request.claim));
        let (bound, lasts) = (BOUND.min(request.ttl / 4), self.lasts(request.ttl));
        let asked = AcquireRequest { claim: claim.clone(), ..request.clone() };
        let step =
            move |table: &mut Table, name: &str, now| table.acquire(name, &asked, now, lasts.map(|lasts| now + lasts));
        match self.ask(&request.claim.key, bound, step).await? {
            Answer::Held { remaining, holder } => {
                // BUG: nobody has a name, too.
                let nobody = self.has(Bug::NobodyHoldsIt).then(|| HolderInfo::new(""));
                Ok(Attempt::Contended(Contention { retry_after: remaining, holder: holder.or(nobody), burnt: false }))
            }
            Answer::OtherLimit => Err(Error::invalid("the lock has another number of permits")),
            Answer::Granted(terms) => {
                if self.has(Bug::SetThenExpire) {
                    // BUG: who stops here leaves a lease without end.
                    let ttl = request.ttl;
                    let step = move |table: &mut Table, name: &str, now| table.expire(name, &claim, Some(now + ttl));
                    self.ask(&request.claim.key, bound, step).await?;
                }
                Ok(Attempt::Granted(self.hold(&request.claim, terms, sent, request.ttl)))
            }
        }
    }

    /// Asks until it is granted or the time is over.
    async fn acquire_within(&self, request: &AcquireRequest) -> Result<Attempt> {
        let give_up = self.now() + request.wait;
        let mut waiter = None;
        loop {
            // Listen first, ask then: what is freed in between is not missed.
            let mut freed = pin!(self.dialer.inside.freed.notified());
            freed.as_mut().enable();
            let answer = self.attempt(request).await?;
            let Attempt::Contended(contention) = &answer else { return Ok(answer) };
            let left = give_up.since(self.now());
            if left.is_zero() {
                return Ok(answer);
            }
            // BUG: nobody waits here.
            if self.has(Bug::BusyAnswers) {
                let holder = contention.holder.clone();
                return Ok(Attempt::Contended(Contention { retry_after: Some(Duration::ZERO), holder, burnt: false }));
            }
            let place = waiter.get_or_insert_with(|| CountedWaiter::new(self, &request.claim.key)).place;
            // BUG: who died will not release.
            let lapse = contention.retry_after.filter(|_| !self.has(Bug::WaitsForRelease));
            let mut lapse = lapse.map_or(left, |after| after + Duration::from_millis(1));
            if request.order == Order::Fifo {
                // A waiter that does not ask again in time loses its place.
                lapse = lapse.min(Duration::from_secs(2));
            }
            drop(tokio::time::timeout(left.min(lapse), freed).await);
            if self.has(Bug::LastComeFirst) {
                // BUG: who came early asks late.
                tokio::time::sleep(Duration::from_millis(40) * 10_u32.saturating_sub(place)).await;
            }
        }
    }

    async fn renew_one(&self, renewal: &Renewal) -> Result<Renewed> {
        let (sent, ttl, lasts) = (self.now(), renewal.ttl, self.lasts(renewal.ttl).or(Some(renewal.ttl)));
        let asked = Renewal { claim: self.proof(&renewal.claim), ..renewal.clone() };
        let step =
            move |table: &mut Table, name: &str, now| table.renew(name, &asked, now, lasts.map(|lasts| now + lasts));
        Ok(match self.ask(&renewal.claim.key, BOUND.min(ttl / 4), step).await? {
            Ok(terms) => Renewed::Held(self.hold(&renewal.claim, terms, sent, ttl)),
            Err(reason) => Renewed::Lost(reason),
        })
    }

    async fn release_claim(&self, claim: &Claim) -> Result<Release> {
        let proof = self.proof(claim);
        if self.has(Bug::GetThenDelete) {
            // BUG: by the time of the second step the lease may have lapsed and be another's.
            let answer = self.ask(&claim.key, BOUND, move |table, name, now| table.whose(name, &proof, now)).await?;
            if let Err(reason) = answer {
                return Ok(Release::NotHeld(reason));
            }
            self.ask(&claim.key, BOUND, |table, name, _| table.delete(name)).await?;
            return Ok(Release::Released { waiters: None });
        }
        self.ask(&claim.key, BOUND, move |table, name, now| table.release(name, &proof, now)).await
    }

    fn admit_mode(&self, claim: &Claim) -> Result<()> {
        // BUG: nobody asks whether there are such leases.
        if self.has(Bug::LooksForAnyMode) { Ok(()) } else { self.info.admit_mode(claim.mode) }
    }
}

#[async_trait]
impl LockStore for SimpleStore {
    fn info(&self) -> &StoreInfo {
        &self.info
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        // BUG: that there are none is no reason to refuse one.
        if request.claim.mode != Mode::Shared || !self.has(Bug::DowngradesShared) {
            self.info.admit_mode(request.claim.mode)?;
        }
        if self.has(Bug::LandsLate) {
            // BUG: who is cancelled should have sent it before, or never.
            let (store, request, token) = (self.clone(), request.clone(), request.claim.token);
            let (_caller, gone) = oneshot::channel::<()>();
            let late = async move {
                // Well before whoever is still there: the next one must find the lock taken.
                if timeout(Duration::from_millis(100), gone).await.is_ok() {
                    let mut released = store.released.subscribe();
                    drop(timeout(BOUND, released.wait_for(|released| released.contains(&token))).await);
                }
                store.acquire_within(&request).await
            };
            return detached(late).await;
        }
        match self.acquire_within(request).await {
            // BUG: nobody said that it is held.
            Err(e) if self.has(Bug::ErrorsAsBusy) && e.is_retryable() => Ok(Attempt::Contended(Contention::default())),
            answer => answer,
        }
    }

    async fn renew(&self, renewals: &[Renewal]) -> Vec<Result<Renewed>> {
        let mut answers = Vec::with_capacity(renewals.len());
        let mut failed = None;
        for renewal in renewals {
            if let Err(refusal) = self.admit_mode(&renewal.claim) {
                answers.push(Err(refusal));
                continue;
            }
            // What failed once is not tried for each of the others: the bound is one for the whole call.
            let answer = match &failed {
                None => self.renew_one(renewal).await,
                Some(error) => Err(Error::clone(error)),
            };
            failed = answer.as_ref().err().cloned();
            answers.push(match answer {
                // BUG: nobody said that it is lost.
                Err(e) if self.has(Bug::ErrorsAsNo) && e.is_retryable() => Ok(Renewed::Lost(LossReason::Gone)),
                answer => answer,
            });
        }
        match self.bug {
            // BUG: as they come.
            Some(Bug::RenewalsReversed) => answers.reverse(),
            // BUG: what was lost is left out.
            Some(Bug::RenewalsTooFew) => answers.retain(|answer| !matches!(answer, Ok(Renewed::Lost(_)))),
            _ => {}
        }
        answers
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        self.admit_mode(claim)?;
        let release = self.release_claim(claim).await;
        if self.has(Bug::LandsLate) {
            self.released.send_modify(|released| _ = released.insert(claim.token));
        }
        match release {
            // BUG: nobody said that it is not held.
            Err(e) if self.has(Bug::ErrorsAsNo) && e.is_retryable() => Ok(Release::NotHeld(LossReason::Gone)),
            // BUG: that it was another's is kept from the caller.
            Ok(Release::NotHeld(_)) if self.has(Bug::HidesNotMine) => Ok(Release::Released { waiters: None }),
            answer => answer,
        }
    }

    async fn inspect(&self, query: &Query) -> Result<Vec<KeyState>> {
        let mut states = Vec::new();
        match query {
            Query::Keys(keys) => {
                for key in keys {
                    let asked = key.clone();
                    let step = move |table: &mut Table, name: &str, now| table.state(name, &asked, now);
                    states.push(self.ask(key, BOUND, step).await?);
                }
            }
            Query::Queue(key) => {
                let asked = key.clone();
                let step = move |table: &mut Table, name: &str, now| table.state_with_queue(name, &asked, now);
                states.push(self.ask(key, BOUND, step).await?);
            }
            Query::Prefix(prefix) => {
                let prefix = prefix.clone();
                let any = LockKey::new("prefix")?;
                let step = move |table: &mut Table, _: &str, now| {
                    let held = table.held(&prefix);
                    held.iter().map(|(name, key)| table.state(name, key, now)).collect::<Vec<_>>()
                };
                states = self.ask(&any, BOUND, step).await?;
                states.retain(|state| !state.holders.is_empty());
            }
        }
        let waiting = self.dialer.inside.waiting();
        for state in &mut states {
            state.waiters = Some(waiting.get(state.key.as_str()).copied().unwrap_or(0));
        }
        Ok(states)
    }

    fn records(&self) -> Vec<Box<dyn Records + '_>> {
        vec![Box::new(self)]
    }
}

/// What the store calls a lock.
pub(super) fn name_of(key: &str, bug: Option<Bug>) -> String {
    match bug {
        // BUG: what a case-insensitive collation does.
        Some(Bug::FoldsCase) => key.to_lowercase(),
        // BUG: what a padding collation does.
        Some(Bug::TrimsSpaces) => key.trim_end_matches(' ').to_owned(),
        _ => key.to_owned(),
    }
}

/// Goes on when the caller is cancelled.
async fn detached<T: Send + 'static>(work: impl Future<Output = Result<T>> + Send + 'static) -> Result<T> {
    let broken = |_| Error::new(ErrorKind::Unexpected, "the task broke off").unknown_effect();
    tokio::spawn(work).await.map_err(broken)?
}

/// Counts one that waits for as long as it does.
struct CountedWaiter<'a> {
    dialer: &'a Dialer,
    key: &'a LockKey,
    /// How many waited when it came, itself included.
    place: u32,
    stays: bool,
}

impl<'a> CountedWaiter<'a> {
    fn new(store: &'a SimpleStore, key: &'a LockKey) -> Self {
        let mut waiting = store.dialer.inside.waiting();
        let count = waiting.entry(key.as_str().to_owned()).or_default();
        *count += 1;
        // BUG: nobody takes it off the list.
        Self { dialer: &store.dialer, key, place: *count, stays: store.has(Bug::GhostWaiters) }
    }
}

impl Drop for CountedWaiter<'_> {
    fn drop(&mut self) {
        if self.stays {
            return;
        }
        let mut waiting = self.dialer.inside.waiting();
        if let Some(count) = waiting.get_mut(self.key.as_str()) {
            *count -= 1;
            if *count == 0 {
                waiting.remove(self.key.as_str());
            }
        }
    }
}
