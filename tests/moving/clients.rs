//! Clients of a migration, as workers have them: sound ones, and some that leave a rule out.

use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex},
};

use async_trait::async_trait;
use lockkit::{
    Error, Fence, LockKey, LockStore, Result, Token,
    migrate::{Dual, Side},
    store::{AcquireRequest, Attempt, Hold, Record, Records, Renewal, Renewed, Swap, unpoisoned},
};
use lockkit_testkit::{Alter, Altered};

/// What a client leaves out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bad {
    /// It renews in the old store alone, and believes that the new one has renewed, too (against rule M8).
    RenewsOneSide,
    /// What it has read of the record once counts for ever, as it does for one that can't read it any more and goes on (against
    /// rule M6).
    FailsOpen,
    /// It asks the new store for no fence above those of the old one (against rule M8).
    ForgetsFences,
}

impl Bad {
    const ALL: [Self; 3] = [Self::RenewsOneSide, Self::FailsOpen, Self::ForgetsFences];

    /// What stands in front of the URL of such a client.
    pub(crate) fn mark(self) -> &'static str {
        match self {
            Self::RenewsOneSide => "renews-one-side+",
            Self::FailsOpen => "fails-open+",
            Self::ForgetsFences => "forgets-fences+",
        }
    }
}

/// Opens the store of a migration, by a client that leaves out what the URL says.
pub(crate) async fn open(url: &str) -> Result<Arc<dyn LockStore>> {
    let marked = Bad::ALL.into_iter().find_map(|bad| Some((bad, url.strip_prefix(bad.mark())?)));
    let Some((bad, url)) = marked else { return lockkit::open(url).await };
    let urls = url.strip_prefix("migrate:?from=").and_then(|urls| urls.split_once("&to="));
    let (from, to) = urls.ok_or_else(|| Error::invalid("no URL of a migration"))?;
    let [old, new] = lockkit::stores_of_migration(from, to).await?;
    let spoilt =
        |side, inner| Arc::new(Altered(Spoilt { inner, side, bad, holds: Mutex::default(), read: Mutex::default() }));
    Ok(Arc::new(Dual::connect(spoilt(Side::Old, old), spoilt(Side::New, new)).await?))
}

/// One of the two stores, as a bad client sees it.
struct Spoilt {
    inner: Arc<dyn LockStore>,
    side: Side,
    bad: Bad,
    holds: Mutex<HashMap<Token, Hold>>,
    /// What each of the nodes has said of a record, once.
    read: Mutex<HashMap<(usize, LockKey), Option<Record>>>,
}

impl Spoilt {
    fn is(&self, bad: Bad, side: Side) -> bool {
        self.bad == bad && self.side == side
    }

    fn renewed(&self, renewal: &Renewal) -> Renewed {
        match unpoisoned(&self.holds).get_mut(&renewal.claim.token) {
            Some(hold) => {
                hold.until = self.inner.info().clock.now() + renewal.ttl;
                Renewed::Held(hold.clone())
            }
            None => Renewed::Lost(lockkit::LossReason::Gone),
        }
    }
}

#[async_trait]
impl Alter for Spoilt {
    fn inner(&self) -> &dyn LockStore {
        &*self.inner
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        let mut request = request.clone();
        if self.is(Bad::ForgetsFences, Side::New) {
            request.fence.floor = Fence::NONE;
        }
        let attempt = self.inner.acquire(&request).await?;
        if let Attempt::Granted(hold) = &attempt {
            unpoisoned(&self.holds).insert(hold.claim.token, hold.clone());
        }
        Ok(attempt)
    }

    async fn renew(&self, renewals: &[Renewal]) -> Vec<Result<Renewed>> {
        if self.is(Bad::RenewsOneSide, Side::New) {
            return renewals.iter().map(|renewal| Ok(self.renewed(renewal))).collect();
        }
        self.inner.renew(renewals).await
    }

    fn records(&self) -> Vec<Box<dyn Records + '_>> {
        let records = self.inner.records();
        if self.bad != Bad::FailsOpen {
            return records;
        }
        let remembered = |(node, inner)| Box::new(Remembered { inner, node, of: self }) as Box<dyn Records>;
        records.into_iter().enumerate().map(remembered).collect()
    }
}

impl fmt::Debug for Spoilt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Spoilt").field("bad", &self.bad).field("side", &self.side).finish_non_exhaustive()
    }
}

/// Records that are read once.
struct Remembered<'a> {
    inner: Box<dyn Records + 'a>,
    node: usize,
    of: &'a Spoilt,
}

#[async_trait]
impl Records for Remembered<'_> {
    async fn read(&self, name: &LockKey) -> Result<Option<Record>> {
        let place = (self.node, name.clone());
        let known = unpoisoned(&self.of.read).get(&place).cloned();
        if let Some(record) = known {
            return Ok(record);
        }
        let record = self.inner.read(name).await?;
        unpoisoned(&self.of.read).insert(place, record.clone());
        Ok(record)
    }

    async fn compare_and_set(&self, name: &LockKey, seen: Option<&Record>, new: Option<&Record>) -> Result<Swap> {
        self.inner.compare_and_set(name, seen, new).await
    }
}
