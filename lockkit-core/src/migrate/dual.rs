//! The store over both.

use std::{
    fmt,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use tokio::sync::oneshot;

use super::{
    claim::Entry,
    claims::Claims,
    migration::not_started,
    pair::Pair,
    phase::{Phase, Side},
    record::{self, PhaseRecord},
    rules,
    shadow::Shadow,
    tally::{Answer, Tally},
};
use crate::{
    AcquireRequest, Attempt, Claim, Error, ErrorKind, Fence, HolderInfo, KeyState, LockStore, Moment, Query, Release,
    Renewal, Renewed, Result, StoreInfo,
    store::{Records, SingleFlight, unpoisoned},
};

/// How long a caller waits for the record. A reading that takes longer goes on, and is for those who ask next; where nobody drives its
/// runtime, the next one takes its place.
const READ_WITHIN: Duration = Duration::from_secs(3);

/// A store over the old store and the new one of a migration, which is in either or in both, as the record of the migration
/// says at the moment.
///
/// It does what both stores do, as far as the protocol covers it: exclusive locks. First-come-first-served locks, shared and
/// permit modes, and leases that outlive their guard are refused. It keeps no records, so that it has no identity, and its
/// locks can't be in a [`MultiLock`](crate::MultiLock) with those of other stores.
///
/// # Guarantees
/// Exclusion is as strong as that of the weaker store in use; fences go on rising through every phase, forward and back. In
/// [`Phase::Both`] a lock needs both stores, so that nothing is granted while one of them is down: leases run out, none is
/// given to two. What can't read the record for [`PhaseRecord::fresh`] acquires and renews nothing.
pub struct Dual {
    pub(super) pair: Pair,
    info: StoreInfo,
    /// As it was when this client came; what never changes of it is what counts.
    pub(super) first: PhaseRecord,
    seen: Mutex<SeenRecord>,
    /// The question for the record that each store is being asked, with the moment before it.
    readings: [SingleFlight<(Moment, Option<PhaseRecord>)>; 2],
    /// The end of the migration, once a store has shown it.
    pub(super) end: OnceLock<PhaseRecord>,
    /// Which of the stores have been seen to be those of the record.
    is_checked: Arc<[AtomicBool; 2]>,
    pub(super) claims: Claims,
    pub(super) shadow: Shadow,
    /// Tells its [registration](Self::sign_on) that this client is no more, by being dropped.
    pub(super) signed_on: OnceLock<oneshot::Sender<()>>,
}

/// What the record says, as it was read lately enough to act on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Confirmed {
    pub(super) phase: Phase,
    pub(super) is_shadowed: bool,
    pub(super) floor: Fence,
    /// When that was checked.
    pub(super) at: Moment,
}

impl Confirmed {
    /// Whether what was asked for as of this phase stands; of a new grant also by its fence.
    pub(super) fn stands(&self, phase: Phase, granted: Option<Fence>) -> bool {
        rules::stands((self.phase, self.floor), phase, granted)
    }
}

/// The record as it was read last, and when that was asked.
#[derive(Debug)]
struct SeenRecord {
    sent: Moment,
    record: PhaseRecord,
}

impl Dual {
    /// A store over `old` and `new`, between which a migration was [started](super::Migration::start).
    ///
    /// # Errors
    /// [`ErrorKind::Misconfigured`] if the stores have no record of a migration, or that of another pair of stores, or of this
    /// pair the other way round; else as those of [`Records::read`], if neither store answers.
    pub async fn connect(old: Arc<dyn LockStore>, new: Arc<dyn LockStore>) -> Result<Self> {
        let pair = Pair::new(old, new);
        let sent = pair.now();
        let answers: [_; 2] = tokio::join!(pair.read(Side::Old), pair.read(Side::New)).into();
        // What is wrong with a store is said; one that is away is needed in some phases only.
        let failed = || answers.iter().filter_map(|answer| answer.as_ref().err());
        if let Some(error) = failed().find(|error| !error.is_retryable()) {
            return Err(error.clone());
        }
        let record = rules::current(answers.iter().flatten().flatten().cloned())?;
        let Some(record) = record.filter(|record| !record.is_over || failed().next().is_none()) else {
            return Err(failed().next().cloned().unwrap_or_else(not_started));
        };
        for (side, answer) in Side::ALL.into_iter().zip(&answers) {
            match answer {
                Ok(Some(found)) if found.is_of(&record) => {}
                Ok(_) if record.is_over => return Err(not_started()),
                Ok(Some(_)) => return Err(not_told(&pair, side)),
                // One without the record is not the store that it is meant to be, or has lost it.
                Ok(None) => return Err(without_record(&pair, side)),
                Err(_) => {}
            }
        }
        if record.is_over {
            return Err(is_over(&record));
        }
        let info = pair.info(&record)?;
        let (is_checked, id) = (Arc::new(answers.map(|answer| AtomicBool::new(answer.is_ok()))), record.id);
        let seen = Mutex::new(SeenRecord { sent, record: record.clone() });
        Ok(Self {
            pair,
            info,
            first: record,
            end: OnceLock::new(),
            seen,
            readings: Default::default(),
            is_checked,
            claims: Claims::default(),
            shadow: Shadow::new(id),
            signed_on: OnceLock::new(),
        })
    }

    /// Makes sure that a store is that one of the two, by its record, before anything is asked of it.
    ///
    /// # Errors
    /// As those of [`confirmed`](Self::confirmed).
    pub(super) async fn check(&self, side: Side) -> Result<()> {
        if self.is_checked[side.index()].load(Ordering::Acquire) {
            return Ok(());
        }
        self.read_at(side).await.map(drop)
    }

    /// The phase, as this client read it last. It acts on that for no longer than [`PhaseRecord::fresh`].
    #[must_use]
    pub fn phase(&self) -> Phase {
        self.seen().record.phase
    }

    /// What the new store has answered to this client that was asked beside the old one.
    #[must_use]
    pub fn tally(&self) -> Tally {
        self.shadow.answers.tally()
    }

    /// Has a lease of the old store followed by one of the new store.
    pub(super) fn follow(&self, entry: &Entry, ttl: Duration, holder: impl FnOnce() -> HolderInfo) {
        // The URL of the new store may lead to the locks of another service (rule M6). Each reading of the record asks that store again.
        if !self.is_checked[Side::New.index()].load(Ordering::Acquire) {
            return self.shadow.answers.note(Answer::Failed);
        }
        self.shadow.follow(self.pair.at(Side::New), &entry.claim, ttl, || self.mark(&holder(), Phase::Old));
        // A release that came before this has ended nothing.
        if entry.over().is_some() {
            self.shadow.end(&entry.claim);
        }
    }

    /// The record, as it was at some moment since `fresh` ago (rule M3); it is read if what is known is older.
    ///
    /// # Errors
    /// If neither store could be asked, or the answer took too long, or is no record of this migration (rule M6).
    pub(super) async fn confirmed(&self) -> Result<Confirmed> {
        if let Some(confirmed) = self.fresh() {
            return Ok(confirmed);
        }
        // Each request has room for what it may have to do, and few have to read.
        Box::pin(self.read()).await?;
        if self.fresh().is_none() && self.end.get().is_none() {
            // Another caller had asked the question, too long ago for the answer to count.
            Box::pin(self.read()).await?;
        }
        self.fresh().ok_or_else(|| {
            if let Some(end) = self.end.get() {
                return is_over(end);
            }
            let why = format!("reading the phase of the migration took longer than {:?}", self.first.fresh);
            Error::new(ErrorKind::TimedOut, why)
        })
    }

    fn fresh(&self) -> Option<Confirmed> {
        let (seen, at) = (self.seen(), self.pair.now());
        let PhaseRecord { phase, is_shadowed, floor, .. } = seen.record;
        let confirmed = || Confirmed { phase, is_shadowed, floor, at };
        // An end that one store has shown is final, whatever the other store has.
        (self.end.get().is_none() && rules::is_fresh(seen.sent, at, self.first.fresh)).then(confirmed)
    }

    /// Reads the record at both stores. The first answer will do, unless it is older than what was known; then the other has its
    /// time, too, for a store that takes no changes must not win again and again.
    async fn read(&self) -> Result<()> {
        let known = self.seen().record.epoch;
        let (old, new) = (self.read_at(Side::Old), self.read_at(Side::New));
        tokio::pin!(old, new);
        let (first, other): (_, Pin<&mut (dyn Future<Output = Result<u64>> + Send)>) = tokio::select! {
            first = &mut old => (first, new),
            first = &mut new => (first, old),
        };
        match first {
            Ok(epoch) => {
                // Its question may have been another caller's, and have taken long.
                let is_enough = epoch >= known && self.fresh().is_some();
                let patience = if is_enough { Duration::ZERO } else { self.first.fresh / 4 };
                // A store that does not answer must not keep the other's answer back.
                drop(tokio::time::timeout(patience, other).await);
                Ok(())
            }
            // What is wrong with a record says more than that a store is away.
            Err(error) => {
                let other = other.await;
                other.map(drop).map_err(|other| if error.is_retryable() { other } else { error })
            }
        }
    }

    /// Reads the record at one store, and says of which epoch it is.
    ///
    /// # Cancellation
    /// The question is led to its end, and its answer is for those who ask again meanwhile. The slower store is hardly ever waited for:
    /// if its questions were dropped, many stores would lose a connection with each, and a store without a connection would never
    /// get one. MySQL also counts logins that are broken off, and refuses a client after too many of them (`max_connect_errors`).
    async fn read_at(&self, side: Side) -> Result<u64> {
        let ask = || {
            let (pair, first, is_checked) = (self.pair.clone(), self.first.clone(), Arc::clone(&self.is_checked));
            async move {
                let sent = pair.now();
                let found = pair.read(side).await?;
                // Here, for nobody may wait for this any more: the other store is as a rule the faster one.
                if found.as_ref().is_some_and(|record| record.is_of(&first) && !record.is_over) {
                    is_checked[side.index()].store(true, Ordering::Release);
                }
                Ok((sent, found))
            }
        };
        // An answer counts from the moment of its question, and what takes longer than `fresh` is of no use.
        let bound = self.first.fresh.min(READ_WITHIN);
        let (sent, found) = self.readings[side.index()].get(|_| false, bound, ask).await?;
        let record = found.filter(|record| record.is_of(&self.first)).ok_or_else(|| {
            let why = "the record of the migration is not there any more, or is that of another one";
            Error::new(ErrorKind::Misconfigured, why)
        })?;
        if record.is_over {
            return Err(is_over(self.end.get_or_init(|| record)));
        }
        let mut seen = self.seen();
        // An older epoch tells nothing that a newer one, read as lately, does not overrule; a newer one counts also where it was asked for earlier.
        let (epoch, known) = (record.epoch, seen.record.epoch);
        if epoch > known || epoch == known && sent >= seen.sent || sent.since(seen.sent) >= self.first.fresh {
            *seen = SeenRecord { sent, record };
        }
        Ok(epoch)
    }

    /// The phase by the last reading, however old that is.
    pub(super) fn last_phase(&self) -> Phase {
        self.seen().record.phase
    }

    fn seen(&self) -> MutexGuard<'_, SeenRecord> {
        unpoisoned(&self.seen)
    }

    /// A holder's description, marked as a client of this migration (rule M12).
    pub(super) fn mark(&self, holder: &HolderInfo, phase: Phase) -> HolderInfo {
        record::mark(holder, &self.first.id, phase)
    }

    /// A holder's description as its client gave it.
    pub(super) fn unmark(&self, holder: &HolderInfo) -> HolderInfo {
        record::unmark(holder, &self.first.id).0
    }

    /// Until when a lease may be believed in that lasts until `ends` at its stores.
    pub(super) fn deadline(&self, ends: impl IntoIterator<Item = Moment>, confirmed: &Confirmed) -> Moment {
        rules::deadline(ends, confirmed.at, self.first.max_ttl)
    }

    /// When nothing is left of a lease that was granted before `at`; `None` if time alone does not end it.
    pub(super) fn lapse(&self, at: Moment) -> Option<Moment> {
        let by_time = self.info.capability.liveness.session.is_none();
        by_time.then(|| at + 2 * self.first.max_ttl)
    }

    /// Releases a claim at a store; `false` if that could not be told to it in time, and something may be left.
    pub(super) async fn drop_at(&self, entry: &Entry, side: Side, bound: Duration) -> bool {
        self.release_part(entry, side, &entry.release_at(side), bound).await
    }

    /// The same of a part whose release was noted.
    async fn release_part(&self, entry: &Entry, side: Side, claim: &Claim, bound: Duration) -> bool {
        let answer = tokio::time::timeout(bound, self.pair.at(side).release(claim)).await;
        matches!(answer, Ok(Ok(_))) && entry.released(side, claim).is_ok()
    }

    /// Releases what is left of a claim at a store that it is not held in, unless by now it is.
    pub(super) async fn leave_at(&self, entry: &Entry, side: Side, bound: Duration) {
        if let Some(claim) = entry.leave(side) {
            self.release_part(entry, side, &claim, bound).await;
        }
    }
}

fn is_over(record: &PhaseRecord) -> Error {
    let store = record.phase;
    let why = format!(
        "the migration is over: connect to the {store} store by itself, or start another: lockkit migrate start"
    );
    Error::new(ErrorKind::Misconfigured, why)
}

fn not_told(pair: &Pair, side: Side) -> Error {
    let name = &pair.at(side).info().name;
    let why = format!("{name} has not been told of the migration yet: repeat lockkit migrate start");
    Error::new(ErrorKind::Misconfigured, why)
}

fn without_record(pair: &Pair, side: Side) -> Error {
    let (name, other) = (&pair.at(side).info().name, &pair.at(side.other()).info().name);
    let why = format!(
        "{name} has no record of a migration, and {other} has one: it is not the {side} store, or lost its data"
    );
    Error::new(ErrorKind::Misconfigured, why)
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl LockStore for Dual {
    fn info(&self) -> &StoreInfo {
        &self.info
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        self.info.admit(request)?;
        self.acquire_in_phase(request).await
    }

    async fn renew(&self, renewals: &[Renewal]) -> Vec<Result<Renewed>> {
        let refused: Vec<_> = renewals.iter().map(|renewal| self.info.admit_mode(renewal.claim.mode).err()).collect();
        let admitted = renewals.iter().zip(&refused).filter(|(_, refused)| refused.is_none());
        let admitted: Vec<_> = admitted.map(|(renewal, _)| renewal.clone()).collect();
        let mut answers = self.renew_in_phase(&admitted).await.into_iter();
        let answer = |refused: Option<Error>| refused.map(Err).or_else(|| answers.next());
        refused.into_iter().map_while(answer).collect()
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        self.info.admit_mode(claim.mode)?;
        self.release_in_phase(claim).await
    }

    async fn inspect(&self, query: &Query) -> Result<Vec<KeyState>> {
        self.inspect_in_phase(query).await
    }

    fn records(&self) -> Vec<Box<dyn Records + '_>> {
        Vec::new()
    }
}

impl fmt::Debug for Dual {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dual").field("stores", &self.pair).field("phase", &self.phase()).finish_non_exhaustive()
    }
}
