//! Renewal of many leases in few statements.
//!
//! One update extends all leases of a chunk that are still held by their claims, and says how many. If that is not all of
//! them, or a grant is not known here, the rows are read. Leases with the same terms go into one statement: nearly all
//! have the same ttl, a depth of one, and no floor.

use std::collections::{BTreeMap, HashMap, HashSet};

use lockkit_core::{Claim, Error, ErrorKind, Hold, LockKey, Mode, Moment, Renewal, Renewed, Result};

use crate::{
    client::{connection::Connection, pool::ConnectionClass},
    store::{MySqlStore, inspect, named_lock_queue},
    wire::{
        error::{self, Sent},
        name::to_column,
        row::{LockRow, why_not},
        statements::Size,
        value::{RenewalTerms, check_floor, is_answer, microseconds},
    },
};

/// How many leases one statement extends. Its rows stay locked until all of them are written.
pub(crate) const CHUNK: usize = 64;

type Answers = Vec<Option<Result<Renewed>>>;

/// Extends leases.
pub(crate) async fn renew(store: &MySqlStore, renewals: &[Renewal]) -> Vec<Result<Renewed>> {
    let mut answers: Answers = renewals.iter().map(|_| None).collect();
    let mut groups: BTreeMap<(bool, RenewalTerms), Vec<usize>> = BTreeMap::new();
    for (index, renewal) in renewals.iter().enumerate() {
        match terms(store, renewal) {
            Ok(terms) => groups.entry((is_share(&renewal.claim), terms)).or_default().push(index),
            Err(e) => answers[index] = Some(Err(e)),
        }
    }
    for ((_, terms), mut group) in groups {
        // In the order of the index, so that statements that meet on the same rows lock them in the same order.
        group.sort_by_key(|index| &renewals[*index].claim.key);
        for chunk in group.chunks(CHUNK) {
            renew_chunk(store, renewals, chunk, &terms, &mut answers).await;
        }
    }
    let held = answers.iter().zip(renewals).filter(|(answer, _)| matches!(answer, Some(Ok(Renewed::Held(_)))));
    store.queues.extended(held.map(|(_, renewal)| renewal));
    let answers = answers.into_iter().map(|answer| answer.unwrap_or_else(|| Err(error::odd_reply(Sent::Yes))));
    let forget_lost = |(answer, Renewal { claim, .. }): (Result<Renewed>, &Renewal)| {
        if matches!(answer, Ok(Renewed::Lost(_))) {
            // It will not be released.
            store.grants.forget(&claim.token);
            store.ordered.forget(&claim.token);
            named_lock_queue::release(store.queues.named_lock_of(&claim.key, &claim.token));
        }
        answer
    };
    answers.zip(renewals).map(forget_lost).collect()
}

/// Whether a claim shares its lock. Then its lease is no row of its own.
fn is_share(claim: &Claim) -> bool {
    claim.mode != Mode::Exclusive
}

fn terms(store: &MySqlStore, renewal: &Renewal) -> Result<RenewalTerms> {
    store.info.admit_mode(renewal.claim.mode)?;
    store.info.admit_ttl(renewal.ttl)?;
    let floor = renewal.fence_floor.unwrap_or_default();
    check_floor(floor)?;
    let holder = renewal.holder.as_ref().map(|holder| holder.as_str().to_owned());
    Ok(RenewalTerms { ttl: microseconds(renewal.ttl), depth: Some(renewal.depth), floor: floor.get(), holder })
}

/// Extends the leases of one chunk. When one of several rows is busy, each is tried alone, so that a row that a transaction
/// keeps locked does not cost the others their leases.
async fn renew_chunk(
    store: &MySqlStore,
    renewals: &[Renewal],
    chunk: &[usize],
    terms: &RenewalTerms,
    answers: &mut Answers,
) {
    let failed = match try_chunk(store, renewals, chunk, terms, answers).await {
        Ok(()) => return,
        Err(failed) => failed,
    };
    if chunk.len() > 1 && error::is_row_busy(&failed) {
        for index in chunk {
            if let Err(alone) = try_chunk(store, renewals, &[*index], terms, answers).await {
                answers[*index] = Some(Err(alone));
            }
        }
    } else {
        chunk.iter().for_each(|index| answers[*index] = Some(Err(failed.clone())));
    }
}

async fn try_chunk(
    store: &MySqlStore,
    renewals: &[Renewal],
    chunk: &[usize],
    terms: &RenewalTerms,
    answers: &mut Answers,
) -> Result<()> {
    let Some(first) = chunk.first() else { return Ok(()) };
    if is_share(&renewals[*first].claim) {
        let shares: Vec<&Renewal> = chunk.iter().map(|index| &renewals[*index]).collect();
        for (index, answer) in chunk.iter().zip(store.renew_shares(&shares, terms).await?) {
            answers[*index] = Some(Ok(answer));
        }
        return Ok(());
    }
    let bound = store.bound(renewals[*first].ttl);
    let mut connection = store.pool.connection(ConnectionClass::Reserved, bound).await?;
    let claims: Vec<&Claim> = chunk.iter().map(|index| &renewals[*index].claim).collect();
    let sent = store.info.clock.now();
    let extended = extend(store, &mut connection, &claims, terms).await?;
    // A claim that stands in the chunk twice is one row: then the rows are read.
    if usize::try_from(extended) == Ok(claims.len())
        && let Some(grants) = store.grants.of(&claims)
    {
        for (index, (fence, span)) in chunk.iter().zip(grants) {
            let Renewal { claim, ttl, depth, .. } = &renewals[*index];
            let hold = Hold { claim: claim.clone(), fence, span, until: sent + *ttl, depth: *depth };
            answers[*index] = Some(Ok(Renewed::Held(hold)));
        }
        return Ok(());
    }
    let found = read_back(store, &mut connection, &claims).await.map_err(Error::unknown_effect)?;
    judge(renewals, chunk, sent, extended, &found, answers);
    Ok(())
}

/// Extends the leases that these claims still hold, and says how many they are. There are at most [`Size::MOST`] claims.
pub(crate) async fn extend(
    store: &MySqlStore,
    connection: &mut Connection,
    claims: &[&Claim],
    terms: &RenewalTerms,
) -> Result<u64> {
    let size = Size::of(claims.len());
    let statement = |question| {
        let terms_of = store
            .statements
            .renew(size)
            .bind(terms.ttl)
            .bind(terms.depth)
            .bind(question)
            .bind(terms.floor)
            .bind(terms.holder.as_deref());
        let named = size.fill(claims).fold(terms_of, |statement, claim| statement.bind(to_column(&claim.key)));
        size.fill(claims).fold(named, |statement, claim| {
            statement.bind(to_column(&claim.key)).bind(claim.token.as_bytes().as_slice())
        })
    };
    let (done, question) = connection.execute(statement, None).await?;
    if is_answer(&done, question) { Ok(done.rows_affected()) } else { Err(connection.out_of_step(Sent::Yes)) }
}

async fn read_back(
    store: &MySqlStore,
    connection: &mut Connection,
    claims: &[&Claim],
) -> Result<HashMap<Vec<u8>, LockRow>> {
    let keys: Vec<&LockKey> = claims.iter().map(|claim| &claim.key).collect();
    inspect::read(store, connection, &keys, false).await
}

/// Gives each renewal its answer. A lease that is the claim's now was extended: nobody else can have had it in between,
/// for a token comes once. Unless the server's clock was set back meanwhile, and revived what had run out; then more
/// are held than were extended, and nothing is known.
fn judge(
    renewals: &[Renewal],
    chunk: &[usize],
    sent: Moment,
    extended: u64,
    found: &HashMap<Vec<u8>, LockRow>,
    answers: &mut Answers,
) {
    let lease_of = |claim: &Claim| found.get(to_column(&claim.key)).and_then(|lock| lock.lease.as_ref());
    let claims = chunk.iter().map(|index| &renewals[*index].claim);
    let held: HashSet<&Claim> =
        claims.filter(|claim| lease_of(claim).is_some_and(|lease| lease.is_of(claim))).collect();
    let revived = u64::try_from(held.len()).is_ok_and(|held| held > extended);
    for index in chunk {
        let Renewal { claim, ttl, .. } = &renewals[*index];
        let answer = match lease_of(claim) {
            Some(lease) if lease.is_of(claim) && revived => {
                let message = "leases that had run out are there again: the server's clock was set back";
                Err(Error::new(ErrorKind::Unexpected, message).unknown_effect())
            }
            Some(lease) if lease.is_of(claim) => Ok(Renewed::Held(lease.hold(claim, sent, *ttl))),
            other => Ok(Renewed::Lost(why_not(other))),
        };
        answers[*index] = Some(answer);
    }
}
