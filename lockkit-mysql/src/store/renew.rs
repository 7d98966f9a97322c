//! Renewal of many leases in few statements.
//!
//! One update extends all leases of a chunk that are still held by their claims, and says how many. If that is not all of
//! them, or a grant is not known here, the rows are read. Leases with the same terms go into one statement: nearly all
//! have the same ttl, a depth of one, and no floor.
//!
//! **A row that somebody keeps locked costs no other lease its time.** Where there is time enough, the statement waits for it: that
//! is the cheaper one, and rows are locked for moments all the time. Else, and when it has waited in vain, another statement
//! passes over the rows that are locked. What it left is then asked for alone.

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use lockkit_core::{
    Claim, Error, ErrorKind, Hold, LockKey, Mode, Moment, Renewal, Renewed, Result, drift, store::join_all,
};

use crate::{
    client::{
        connection::{Bound, Connection},
        pool::ConnectionClass,
        raw::LONGEST_WAIT,
    },
    store::{MySqlStore, inspect},
    wire::{
        error::{self, Sent},
        name::to_column,
        row::{LockRow, StoredLease, why_not},
        size::Size,
        statements::Statement,
        terms::{LockedRow, Question, RenewalTerms, check_floor, is_answer, microseconds},
    },
};

/// How many leases one statement extends. Its rows stay locked until all of them are written.
pub(crate) const CHUNK: usize = 64;

/// By the indexes of the renewals.
type Answers = HashMap<usize, Result<Renewed>>;

/// Extends leases.
pub(crate) async fn renew(store: &MySqlStore, renewals: &[Renewal]) -> Vec<Result<Renewed>> {
    let mut answers = Answers::new();
    let mut groups: BTreeMap<(bool, RenewalTerms), Vec<usize>> = BTreeMap::new();
    for (index, renewal) in renewals.iter().enumerate() {
        match terms(store, renewal) {
            Ok(terms) => groups.entry((is_share(store, renewal), terms)).or_default().push(index),
            Err(e) => drop(answers.insert(index, Err(e))),
        }
    }
    // Side by side: the rows of one group may be locked for as long as there is time.
    let renewed = join_all(groups.into_iter().map(|((are_shares, terms), group)| async move {
        Batch { store, renewals, terms: &terms, are_shares }.renew_group(group).await
    }));
    answers.extend(renewed.await.into_iter().flatten());
    let held =
        renewals.iter().enumerate().filter(|(index, _)| matches!(answers.get(index), Some(Ok(Renewed::Held(_)))));
    let held = held.map(|(_, renewal)| renewal);
    store.named_locks.extended(held.clone());
    store.ordered.extended(held);
    let answers =
        (0..renewals.len()).map(|index| answers.remove(&index).unwrap_or_else(|| Err(error::odd_reply(Sent::Yes))));
    let forget_lost = |(answer, Renewal { claim, .. }): (Result<Renewed>, &Renewal)| {
        if matches!(answer, Ok(Renewed::Lost(_))) {
            // It will not be released.
            store.grants.forget(&claim.token);
            store.ordered.forget(&claim.token);
            drop(store.named_locks.named_lock_of(&claim.key, &claim.token));
        }
        answer
    };
    answers.zip(renewals).map(forget_lost).collect()
}

/// Whether a claim shares its lock, so that its lease is no row of its own. One that has its lock alone becomes such a one to be given
/// a name: in its row there is more than that.
fn is_share(store: &MySqlStore, renewal: &Renewal) -> bool {
    let Renewal { claim, holder, .. } = renewal;
    if claim.mode == Mode::Exclusive {
        return false;
    }
    if holder.is_some() {
        store.grants.forget(&claim.token);
    }
    !store.grants.knows(&claim.token)
}

fn terms(store: &MySqlStore, renewal: &Renewal) -> Result<RenewalTerms> {
    store.info.admit_mode(renewal.claim.mode)?;
    store.info.admit_ttl(renewal.ttl)?;
    let floor = renewal.fence_floor.unwrap_or_default();
    check_floor(floor)?;
    let holder = renewal.holder.as_ref().map(|holder| holder.as_str().to_owned());
    Ok(RenewalTerms { ttl: microseconds(renewal.ttl), depth: Some(renewal.depth), floor: floor.get(), holder })
}

fn fail(chunk: &[usize], failed: &Error, answers: &mut Answers) {
    answers.extend(chunk.iter().map(|index| (*index, Err(failed.clone()))));
}

/// Renewals on the same terms, of leases in rows or of those in claims.
#[derive(Clone, Copy)]
struct Batch<'a> {
    store: &'a MySqlStore,
    renewals: &'a [Renewal],
    terms: &'a RenewalTerms,
    are_shares: bool,
}

impl Batch<'_> {
    async fn renew_group(self, mut group: Vec<usize>) -> Answers {
        let mut answers = Answers::new();
        // In the order of the index, so that statements that meet on the same rows lock them in the same order.
        group.sort_by_key(|index| &self.renewals[*index].claim.key);
        self.renew(&group, &mut answers).await;
        // Those that others share a lock with since.
        group.retain(|index| !answers.contains_key(index));
        Batch { are_shares: true, ..self }.renew(&group, &mut answers).await;
        answers
    }

    /// Extends these leases. No answer to those that have turned out to be in claims.
    async fn renew(self, group: &[usize], answers: &mut Answers) {
        for chunk in group.chunks(CHUNK) {
            self.renew_chunk(chunk, answers).await;
        }
    }

    fn bound(self, index: usize) -> Bound {
        self.store.bound(self.renewals[index].ttl)
    }

    /// Extends the leases of one chunk.
    async fn renew_chunk(self, chunk: &[usize], answers: &mut Answers) {
        let Some(first) = chunk.first() else { return };
        let has_time = self.bound(*first).whole >= 2 * LONGEST_WAIT;
        let share_one_lock = |one: &usize, other: &usize| {
            self.are_shares && self.renewals[*one].claim.key == self.renewals[*other].claim.key
        };
        let are_of_one_lock = chunk.chunk_by(share_one_lock).count() == 1;
        let left = if are_of_one_lock {
            chunk.to_vec()
        } else {
            match self.renew_together(chunk, has_time, answers).await {
                Ok(passed_over) => passed_over,
                Err(failed) => return fail(chunk, &failed, answers),
            }
        };
        // Most rows are locked for a moment only. Once one is not, the rest is not waited for: each would cost what is left of the time,
        // and a connection on which the server goes on waiting.
        let mut left = left.chunk_by(share_one_lock);
        for alone in left.by_ref() {
            let bound = self.bound(*first);
            let bound = if are_of_one_lock || has_time { bound } else { bound.half_of_what_is_left() };
            if let Err(failed) = self.try_chunk(alone, LockedRow::Awaited, bound, answers).await {
                fail(alone, &failed, answers);
                break;
            }
        }
        left.for_each(|alone| fail(alone, &error::row_busy(), answers));
    }

    /// Extends several leases. Gives back those whose rows are locked.
    async fn renew_together(self, chunk: &[usize], has_time: bool, answers: &mut Answers) -> Result<Vec<usize>> {
        if has_time && !self.are_shares {
            match self.try_chunk(chunk, LockedRow::Awaited, self.bound(chunk[0]), answers).await {
                Err(busy) if error::is_row_busy(&busy) => {}
                tried => return tried,
            }
        }
        self.try_chunk(chunk, LockedRow::PassedOver, self.bound(chunk[0]), answers).await
    }

    /// Asks once for the leases of a chunk. Gives back those whose rows were passed over.
    async fn try_chunk(
        self,
        chunk: &[usize],
        locked: LockedRow,
        bound: Bound,
        answers: &mut Answers,
    ) -> Result<Vec<usize>> {
        let Self { store, renewals, terms, are_shares } = self;
        if are_shares {
            let shares: Vec<&Renewal> = chunk.iter().map(|index| &renewals[*index]).collect();
            let answered = store.renew_shares(&shares, terms, locked, bound).await?;
            let mut left = Vec::new();
            for (index, answer) in chunk.iter().zip(answered) {
                match answer {
                    Some(answer) => drop(answers.insert(*index, Ok(answer))),
                    None => left.push(*index),
                }
            }
            return Ok(left);
        }
        let mut connection = store.pool.connection(ConnectionClass::Reserved, bound).await?;
        let claims: Vec<&Claim> = chunk.iter().map(|index| &renewals[*index].claim).collect();
        let sent = store.info.clock.now();
        let extended = extend(store, &mut connection, &claims, terms, locked).await?;
        // A claim that stands in the chunk twice is one row: then the rows are read.
        let are_all = usize::try_from(extended) == Ok(claims.len());
        if are_all && let Some(grants) = store.grants.of(&claims) {
            for (index, (fence, span)) in chunk.iter().zip(grants) {
                let Renewal { claim, ttl, depth, .. } = &renewals[*index];
                let hold = Hold { claim: claim.clone(), fence, span, until: sent + *ttl, depth: *depth };
                answers.insert(*index, Ok(Renewed::Held(hold)));
            }
            return Ok(Vec::new());
        }
        let asked = store.info.clock.now();
        let keys: Vec<&LockKey> = claims.iter().map(|claim| &claim.key).collect();
        let found = inspect::read(store, &mut connection, &keys, false).await.map_err(Error::unknown_effect)?;
        let seen = Seen { found, sent, asked, answered: store.info.clock.now(), are_all };
        seen.judge(self, chunk, answers)
    }
}

/// Extends the leases that these claims still hold, and says how many they are. There are at most [`Size::MOST`] claims.
pub(crate) async fn extend(
    store: &MySqlStore,
    connection: &mut Connection,
    claims: &[&Claim],
    terms: &RenewalTerms,
    locked: LockedRow,
) -> Result<u64> {
    let size = Size::of(claims.len());
    let statement = |question| match locked {
        LockedRow::Awaited => bind_claims(bind_terms(store.statements.renew(size), terms, question), size, claims),
        LockedRow::PassedOver => {
            bind_terms(bind_claims(store.statements.renew_unlocked(size), size, claims), terms, question)
        }
    };
    let (done, question) = connection.execute(statement, None).await?;
    if is_answer(&done, question) { Ok(done.rows_affected()) } else { Err(connection.out_of_step(Sent::Yes)) }
}

fn bind_terms(statement: Statement, terms: &RenewalTerms, question: Question) -> Statement {
    statement.bind(terms.ttl).bind(terms.depth).bind(question).bind(terms.floor).bind(terms.holder.as_deref())
}

fn bind_claims(statement: Statement, size: Size, claims: &[&Claim]) -> Statement {
    let named = size.fill(claims).fold(statement, |statement, claim| statement.bind(to_column(&claim.key)));
    size.fill(claims)
        .fold(named, |statement, claim| statement.bind(to_column(&claim.key)).bind(claim.token.as_bytes().as_slice()))
}

/// What the rows say after a renewal.
struct Seen {
    found: HashMap<Vec<u8>, LockRow>,
    /// When the renewal was sent, when the question for the rows, and when they came.
    sent: Moment,
    asked: Moment,
    answered: Moment,
    /// Whether as many rows were extended as were asked for.
    are_all: bool,
}

impl Seen {
    /// Gives the renewals their answers, but for leases that go on and were not extended: those it gives back. Where a lock is shared by
    /// claims, one of them may be the lease, which had the row before: that has no answer yet.
    ///
    /// # Errors
    /// If the one lease that was asked for was not extended, and is the claim's now.
    fn judge(self, batch: Batch<'_>, chunk: &[usize], answers: &mut Answers) -> Result<Vec<usize>> {
        let mut left = Vec::new();
        for index in chunk {
            let Renewal { claim, ttl, .. } = &batch.renewals[*index];
            let lock = self.found.get(to_column(&claim.key));
            let answer = match lock.and_then(|lock| Some((lock, lock.lease.as_ref()?))) {
                Some((_, lease)) if lease.is_of(claim) && chunk.len() == 1 && !self.are_all => return Err(revived()),
                Some((lock, lease)) if lease.is_of(claim) => match self.until(lock, lease, *ttl, batch.terms) {
                    Some(until) => Renewed::Held(Hold { until, ..lease.hold(claim, self.sent, *ttl) }),
                    None => {
                        left.push(*index);
                        continue;
                    }
                },
                Some((lock, _)) if claim.mode != Mode::Exclusive && lock.is_shared() => {
                    batch.store.grants.forget(&claim.token);
                    continue;
                }
                other => Renewed::Lost(why_not(other.map(|(_, lease)| lease))),
            };
            answers.insert(*index, Ok(answer));
        }
        Ok(left)
    }

    /// Until when a claim may believe in the lease that it has; `None` if it was not extended.
    ///
    /// If all were, it was: nobody else can have had it in between, for a token comes once. Else the number does not tell which
    /// were: of those that were, some may be over already, and of the others some were locked. The row does: it says all that was
    /// asked for, whoever wrote it, and no row promises more than it says.
    fn until(&self, lock: &LockRow, lease: &StoredLease, ttl: Duration, terms: &RenewalTerms) -> Option<Moment> {
        if self.are_all {
            return Some(self.sent + ttl);
        }
        let lasts = lease.remaining + self.answered.since(self.sent) + drift(ttl) >= ttl;
        let says_so = terms.depth.is_none_or(|depth| lease.depth == depth)
            && lock.last >= terms.floor
            && terms.holder.as_deref().is_none_or(|holder| lease.holder.as_str() == holder);
        (lasts && says_so).then(|| (self.sent + ttl).min(self.asked + lease.remaining))
    }
}

/// A lease that had run out when it was to be extended, and is the claim's: nothing is known.
pub(crate) fn revived() -> Error {
    let message = "leases that had run out are there again: the server's clock was set back";
    Error::new(ErrorKind::Unexpected, message).unknown_effect()
}
