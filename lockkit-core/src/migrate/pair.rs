//! The two stores of a migration, and the record that both keep.

use std::{
    fmt,
    future::{Future, poll_fn},
    pin::Pin,
    sync::Arc,
    task::Poll,
    time::Duration,
};

use super::{phase::Side, record::PhaseRecord, rules};
use crate::{
    Alarm, Capability, Error, ErrorKind, Fencing, Liveness, LockKey, LockStore, Moment, Result, StoreInfo, Waiting,
    store::{Reconnections, Record, Records, Swap, join_all, known_identity},
};

/// The name of the record.
const NAME: &str = "lockkit/migration";

/// The old store and the new one.
#[derive(Clone)]
pub(super) struct Pair([Arc<dyn LockStore>; 2]);

impl fmt::Debug for Pair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.iter().map(|store| &store.info().name)).finish()
    }
}

impl Pair {
    pub(super) fn new(old: Arc<dyn LockStore>, new: Arc<dyn LockStore>) -> Self {
        Self([old, new])
    }

    pub(super) fn at(&self, side: Side) -> &Arc<dyn LockStore> {
        &self.0[side.index()]
    }

    /// The present moment. All is measured on the clock of the old store.
    pub(super) fn now(&self) -> Moment {
        self.0[0].info().clock.now()
    }

    /// What both stores can do, and the protocol covers.
    pub(super) fn info(&self, record: &PhaseRecord) -> Result<StoreInfo> {
        let [old, new] = Side::ALL.map(|side| self.at(side).info());
        let ttls = [old, new].map(|info| info.capability.liveness.ttl.clone());
        let shortest = ttls.iter().flatten().map(|range| *range.start()).max().unwrap_or(Duration::from_millis(1));
        let longest =
            ttls.iter().flatten().map(|range| *range.end()).min().unwrap_or(record.max_ttl).min(record.max_ttl);
        if shortest > longest {
            let why = format!("no ttl suits both stores and the migration: at least {shortest:?}, at most {longest:?}");
            return Err(Error::new(ErrorKind::Misconfigured, why));
        }
        let [of_old, of_new] = [&old.capability, &new.capability];
        let polls = of_old.waiting == Waiting::Poll || of_new.waiting == Waiting::Poll;
        Ok(StoreInfo {
            scheme: "migrate",
            name: format!("migration from {} to {}", old.name, new.name).into(),
            capability: Capability {
                max_key_bytes: of_old.max_key_bytes.min(of_new.max_key_bytes),
                ..Capability::exclusive(
                    if polls { Waiting::Poll } else { Waiting::Notify },
                    Liveness {
                        ttl: Some(shortest..=longest),
                        session: of_old.liveness.session.max(of_new.liveness.session),
                    },
                    weaker(of_old.fencing, of_new.fencing),
                )
            },
            clock: Arc::clone(&old.clock),
            alarm: Alarm::of_both(old.alarm.as_ref(), new.alarm.as_ref()),
            reconnections: Reconnections::of([old, new].map(|info| info.reconnections.clone())),
            warnings: old.warnings.iter().chain(&*new.warnings).cloned().collect(),
        })
    }

    /// A moment of a store's clock on the clock of this pair, or one before it.
    pub(super) fn here(&self, side: Side, moment: Moment) -> Moment {
        match side {
            Side::Old => moment,
            Side::New => {
                // The clock of the pair first, so that what is told by it is rather too early.
                let here = self.now();
                here + moment.since(self.at(side).info().clock.now())
            }
        }
    }

    /// Whether a store keeps what it confirmed.
    pub(super) fn is_durable(&self, side: Side) -> bool {
        self.at(side).info().capability.fencing == Fencing::Strict
    }

    /// Whether a store can be the home: only one that keeps its records in one place can change them in one step.
    pub(super) fn can_be_home(&self, side: Side) -> bool {
        self.at(side).records().len() == 1
    }

    /// What a client may act on: what a store has as the record of a migration; of a quorum the newest of a majority of nodes that
    /// have one. A node that lost its record has no say: beside one that missed the last changes, it would make a majority that
    /// knows nothing of them.
    ///
    /// # Errors
    /// As those of [`Records::read`], `Unavailable` also if some nodes have a record, but no majority; `Misconfigured` if it is the
    /// other one of the two stores; `Unexpected` if what is there has another form; `Unsupported` if it keeps no records.
    pub(super) async fn read(&self, side: Side) -> Result<Option<PhaseRecord>> {
        let (name, keepers) = (LockKey::new(NAME)?, self.keepers(side)?);
        let calls = keepers.iter().map(|keeper| -> Call<'_> {
            Box::pin(async {
                let text = keeper.read(&name).await?;
                text.map(|text| PhaseRecord::from_record(&text, side)).transpose()
            })
        });
        majority(calls.collect()).await?.ok_or_else(|| {
            let name = &self.at(side).info().name;
            let why = format!("too few nodes of {name} have the record of the migration");
            Error::new(ErrorKind::Unavailable, why)
        })
    }

    /// What a store has, for those that move the migration on: of a quorum the [current](rules::current) one of all nodes that answer, as long as
    /// they are a majority.
    ///
    /// # Errors
    /// As [`read`](Self::read); `Misconfigured` if its nodes have the records of two migrations.
    pub(super) async fn read_all(&self, side: Side) -> Result<Option<PhaseRecord>> {
        let (mut records, mut failed, answers) = (Vec::new(), None, self.at_nodes(side).await?);
        let nodes = answers.len();
        for answer in answers {
            match answer {
                Ok(record) => records.push(record),
                Err(error) if is_wrong(&error) => return Err(error),
                Err(error) => failed = Some(error),
            }
        }
        match failed {
            Some(error) if records.len() <= nodes / 2 => Err(error),
            _ => rules::current(records.into_iter().flatten()),
        }
    }

    /// What each node of a store has, as far as it answers.
    async fn at_nodes(&self, side: Side) -> Result<Vec<Result<Option<PhaseRecord>>>> {
        let (name, keepers) = (LockKey::new(NAME)?, self.keepers(side)?);
        let answers = join_all(keepers.iter().map(|keeper| keeper.read(&name))).await;
        let record = |text: Option<Record>| text.map(|text| PhaseRecord::from_record(&text, side)).transpose();
        Ok(answers.into_iter().map(|text| text.and_then(record)).collect())
    }

    /// What each node of a store has.
    ///
    /// # Errors
    /// As those of [`Records::read`], for any of them.
    pub(super) async fn at_all_nodes(&self, side: Side) -> Result<Vec<Option<PhaseRecord>>> {
        self.at_nodes(side).await?.into_iter().collect()
    }

    /// Makes the record of the home `new` if it is `seen`.
    pub(super) async fn change_home(&self, seen: Option<&PhaseRecord>, new: &PhaseRecord) -> Result<()> {
        let (name, keepers) = (LockKey::new(NAME)?, self.keepers(new.home)?);
        let seen = seen.map(|seen| seen.to_record(new.home)).transpose()?;
        let new = new.to_record(new.home)?;
        let [home] = &keepers[..] else {
            return Err(Error::new(ErrorKind::Unsupported, "a quorum can't be the home of a migration"));
        };
        match home.compare_and_set(&name, seen.as_ref(), Some(&new)).await? {
            Swap::Done => Ok(()),
            Swap::Differs(_) => Err(overtaken()),
        }
    }

    /// Makes a store have this record, or a newer one; of a quorum a majority of its nodes.
    ///
    /// # Errors
    /// As those of [`Records`]; `Misconfigured` if it has no record of this migration, and is another store than the one that the migration was
    /// started with; `Unexpected` if it has another one of the same epoch.
    pub(super) async fn lift(&self, side: Side, record: &PhaseRecord) -> Result<()> {
        let keepers = self.keepers(side)?;
        // All of them, as far as they answer: one that has an older record would spoil the drain.
        let lifted = join_all(keepers.iter().map(|keeper| self.lift_at(&**keeper, side, record))).await;
        let done = lifted.iter().filter(|done| done.is_ok()).count();
        match lifted.into_iter().find_map(Result::err) {
            Some(error) if done <= keepers.len() / 2 => Err(error),
            _ => Ok(()),
        }
    }

    /// Whether no node of a quorum that answers has another record than this, or none.
    pub(super) async fn is_nowhere_behind(&self, side: Side, record: &PhaseRecord) -> Result<bool> {
        let found = self.at_nodes(side).await?;
        Ok(found.len() == 1 || found.iter().flatten().all(|found| rules::is_copy(found.as_ref(), record)))
    }

    /// Whether a store has this very record; of a quorum, whether a majority of its nodes has it, and none that answers a newer one. One node is
    /// not enough: clients may read an older record at the others.
    pub(super) async fn has(&self, side: Side, record: &PhaseRecord) -> Result<bool> {
        let (mut copies, mut differs, mut is_ahead, mut failed) = (0, false, false, None);
        let answers = self.at_nodes(side).await?;
        let nodes = answers.len();
        for answer in answers {
            match answer {
                Ok(found) => {
                    let is_copy = rules::is_copy(found.as_ref(), record);
                    copies += usize::from(is_copy);
                    differs |= !is_copy;
                    // A step that was not finished: clients that read it there act on it.
                    is_ahead |= !is_copy && found.is_some_and(|found| found.epoch >= record.epoch);
                }
                Err(error) if is_wrong(&error) => return Err(error),
                Err(error) => failed = Some(error),
            }
        }
        match failed {
            _ if copies > nodes / 2 && !is_ahead => Ok(true),
            Some(error) if !differs => Err(error),
            _ => Ok(false),
        }
    }

    async fn lift_at(&self, keeper: &dyn Records, side: Side, record: &PhaseRecord) -> Result<()> {
        let (name, text) = (LockKey::new(NAME)?, record.to_record(side)?);
        let mut found = keeper.read(&name).await?;
        loop {
            let known = found.as_ref().map(|known| PhaseRecord::from_record(known, side)).transpose()?;
            if !rules::is_lifted(known.as_ref(), record)? {
                return Ok(());
            }
            if known.is_none_or(|known| !known.is_of(record)) {
                // A store that the URL leads to by mistake has none of this migration either.
                self.check_identity(side, record).await?;
            }
            match keeper.compare_and_set(&name, found.as_ref(), Some(&text)).await? {
                Swap::Done => return Ok(()),
                Swap::Differs(other) => found = other,
            }
        }
    }

    /// Refuses a store that is not the one that the migration was started with.
    ///
    /// # Errors
    /// `Misconfigured` if it is another one; as those of [`Records::read`].
    pub(super) async fn check_identity(&self, side: Side, record: &PhaseRecord) -> Result<()> {
        if known_identity(&**self.at(side)).await? == Some(record.stores[side.index()]) {
            return Ok(());
        }
        let name = &self.at(side).info().name;
        let why =
            format!("{name} is not the {side} store that the migration was started with, or it has lost all its data");
        Err(Error::new(ErrorKind::Misconfigured, why))
    }

    fn keepers(&self, side: Side) -> Result<Vec<Box<dyn Records + '_>>> {
        let store = self.at(side);
        let keepers = store.records();
        if keepers.is_empty() {
            let why = format!("{} keeps no records, and can't be migrated", store.info().name);
            return Err(Error::new(ErrorKind::Unsupported, why));
        }
        Ok(keepers)
    }
}

/// Whether it is what a store has that is wrong, and not that it can't be asked.
pub(super) fn is_wrong(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Misconfigured | ErrorKind::Unexpected)
}

pub(super) fn overtaken() -> Error {
    Error::new(ErrorKind::Unavailable, "somebody else has just moved the migration on: look at where it is")
}

/// A question to a node for its record.
type Call<'a> = Pin<Box<dyn Future<Output = Result<Option<PhaseRecord>>> + Send + 'a>>;

/// What a majority of nodes says, as soon as it does; `None` if there is no such majority, and an error if one failed that might have been
/// part of it. What is wrong with a record is said at once.
async fn majority(calls: Vec<Call<'_>>) -> Result<Option<Option<PhaseRecord>>> {
    let needed = calls.len() / 2 + 1;
    let mut calls: Vec<_> = calls.into_iter().map(Some).collect();
    let (mut found, mut failed) = (Vec::with_capacity(calls.len()), None);
    poll_fn(|cx| {
        for slot in &mut calls {
            let Some(Poll::Ready(answer)) = slot.as_mut().map(|call| call.as_mut().poll(cx)) else { continue };
            *slot = None;
            match answer {
                Ok(record) => found.push(record),
                Err(error) if is_wrong(&error) => return Poll::Ready(Err(error)),
                Err(error) => failed = Some(error),
            }
        }
        match said(&found, needed) {
            Some(record) => Poll::Ready(Ok(Some(record))),
            None if calls.iter().any(Option::is_some) => Poll::Pending,
            None => Poll::Ready(failed.take().map_or(Ok(None), Err)),
        }
    })
    .await
}

/// What so many nodes say: the newest of those records that are of one migration, or that there is none.
fn said(found: &[Option<PhaseRecord>], needed: usize) -> Option<Option<PhaseRecord>> {
    let records = || found.iter().flatten();
    if records().next().is_none() {
        return (found.len() >= needed).then_some(None);
    }
    let like = |one: &PhaseRecord| records().filter(|other| other.is_of(one)).cloned().collect::<Vec<_>>();
    records().map(like).find(|like| like.len() >= needed).map(rules::newest)
}

/// How long a call may take that is not what the caller waits for.
pub(super) fn aside(ttl: Duration) -> Duration {
    (ttl / 8).min(Duration::from_millis(250))
}

fn weaker(one: Fencing, other: Fencing) -> Fencing {
    let order = [Fencing::None, Fencing::BestEffort, Fencing::Hybrid, Fencing::Strict];
    order.into_iter().find(|fencing| *fencing == one || *fencing == other).unwrap_or(Fencing::None)
}
