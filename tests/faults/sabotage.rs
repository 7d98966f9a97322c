//! Stores and workers that are wrong on purpose: a judge that never found anything proves nothing.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use async_trait::async_trait;
use lockkit::{
    Fence, LockKey, LockStore, Mode, Result, Token,
    store::{AcquireRequest, Attempt, Hold, Renewal, Renewed, unpoisoned},
};
use lockkit_testkit::{Alter, Altered, BoxError, history::Rule};

use crate::{
    arena::{Arena, SHARED},
    fault::Fault,
    run,
    storm::Prey,
    target::{Kind, Setup},
    trouble::Trouble,
};

/// What is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sabotage {
    /// Every grant has the same fence.
    SameFence,
    /// Every renewal succeeds, whatever the store says, also when it says nothing.
    DeafRenewal,
    /// Readers lock something else than writers do.
    ReadersApart,
    /// There are more permits than their limit says.
    MorePermits,
    /// The workers go to the store directly, where no fault reaches them.
    Bypass,
}

/// What stands in front of a URL whose store is to be spoilt, and how.
const MARKS: [(&str, Sabotage); 4] = [
    ("same-fence+", Sabotage::SameFence),
    ("deaf-renewal+", Sabotage::DeafRenewal),
    ("readers-apart+", Sabotage::ReadersApart),
    ("more-permits+", Sabotage::MorePermits),
];

impl Sabotage {
    pub(crate) const ALL: [Self; 5] =
        [Self::SameFence, Self::DeafRenewal, Self::ReadersApart, Self::MorePermits, Self::Bypass];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::SameFence => "the_same_fence_for_all_is_found",
            Self::DeafRenewal => "renewals_that_always_succeed_are_found",
            Self::ReadersApart => "readers_beside_a_writer_are_found",
            Self::MorePermits => "more_permits_than_there_are_are_found",
            Self::Bypass => "faults_that_reach_nobody_are_found",
        }
    }

    /// The URL of a store that is spoilt.
    pub(crate) fn spoil(self, url: &str) -> String {
        let mark = MARKS.iter().find(|(_, sabotage)| *sabotage == self).map_or("", |(mark, _)| mark);
        format!("{mark}{url}")
    }

    /// Waits until a store that is spoilt has let in one client too many. Left to chance, a short run may show nothing.
    pub(crate) async fn happens(self, arena: &Arena) -> Result<(), Trouble> {
        let together = match self {
            Self::ReadersApart => &[Prey::Reader, Prey::WriterOf(SHARED)][..],
            Self::MorePermits => &[Prey::Permit; 3],
            Self::SameFence | Self::DeafRenewal | Self::Bypass => &[],
        };
        let mut caught = Vec::new();
        for prey in together {
            caught.push(arena.catch_a(*prey).await?);
        }
        Ok(())
    }

    /// Runs with it, and fails unless the judge finds it.
    pub(crate) async fn is_found(self, seed: u64) -> Result<(), BoxError> {
        let (fault, rules) = match self {
            Self::SameFence => (Fault::ClientFreeze, &[Rule::FenceOrder, Rule::Resource][..]),
            Self::DeafRenewal => (Fault::HolderCutOff, &[Rule::Overlap][..]),
            Self::ReadersApart => (Fault::Nothing, &[Rule::Overlap][..]),
            Self::MorePermits => (Fault::Nothing, &[Rule::Overlap][..]),
            Self::Bypass => return reaches_nobody(seed).await,
        };
        let arena = Arena::open(Kind::Redis, Setup { sabotage: Some(self), ..Setup::default() }, seed).await?;
        let (row, _) = run::observe(arena, &[fault]).await?;
        if run::judge(&row).is_ok() {
            return Err("the judge found nothing wrong".into());
        }
        match rules.iter().find(|rule| row.report.count(**rule) == 0) {
            Some(rule) => Err(format!("the judge does not see: {rule}").into()),
            None => Ok(()),
        }
    }
}

/// Faults on the way to a store show nothing where nobody goes that way, and fail the run for it.
async fn reaches_nobody(seed: u64) -> Result<(), BoxError> {
    for fault in [Fault::Cut, Fault::ReplyLost, Fault::HeldReplies] {
        let setup = Setup { sabotage: Some(Sabotage::Bypass), ..Setup::default() };
        let seen = match run::observe(Arena::open(Kind::Redis, setup, seed).await?, &[fault]).await {
            Ok((row, _)) => run::judge(&row).is_ok(),
            Err(error) if error.to_string().contains("shows no effect") => false,
            Err(error) => return Err(error),
        };
        if seen {
            return Err(format!("{} reached nobody, and passed", fault.name()).into());
        }
    }
    Ok(())
}

/// Opens the store at a URL, spoilt if the URL says so.
pub(crate) async fn open(url: &str) -> Result<Arc<dyn LockStore>> {
    for (mark, sabotage) in MARKS {
        if let Some(url) = url.strip_prefix(mark) {
            let inner = lockkit::open(url).await?;
            return Ok(Arc::new(Altered(Spoilt { inner, sabotage, holds: Mutex::default() })));
        }
    }
    lockkit::open(url).await
}

#[derive(Debug)]
struct Spoilt {
    inner: Arc<dyn LockStore>,
    sabotage: Sabotage,
    holds: Mutex<HashMap<Token, Hold>>,
}

impl Spoilt {
    fn renewed(&self, renewal: &Renewal) -> Option<Hold> {
        let mut holds = unpoisoned(&self.holds);
        let hold = holds.get_mut(&renewal.claim.token)?;
        hold.until = self.inner.info().clock.now() + renewal.ttl;
        Some(hold.clone())
    }
}

#[async_trait]
impl Alter for Spoilt {
    fn inner(&self) -> &dyn LockStore {
        &self.inner
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        let mut spoilt = request.clone();
        match (self.sabotage, request.claim.mode) {
            (Sabotage::ReadersApart, Mode::Shared) => {
                spoilt.claim.key = LockKey::new(format!("{}/readers", request.claim.key))?;
            }
            (Sabotage::MorePermits, Mode::Permit { limit }) => {
                spoilt.claim.mode = Mode::Permit { limit: limit.saturating_add(limit.get()) };
            }
            _ => {}
        }
        let mut attempt = self.inner.acquire(&spoilt).await?;
        if let Attempt::Granted(hold) = &mut attempt {
            // The fences of two locks do not compare: a high one of the readers' would keep writers out of the resource.
            let apart = self.sabotage == Sabotage::ReadersApart && request.claim.mode == Mode::Shared;
            if apart || self.sabotage == Sabotage::SameFence {
                (hold.fence, hold.span) = (Fence::new(7), 1);
            }
            let mut holds = unpoisoned(&self.holds);
            holds.insert(hold.claim.token, hold.clone());
        }
        Ok(attempt)
    }

    async fn renew(&self, renewals: &[Renewal]) -> Vec<Result<Renewed>> {
        if self.sabotage != Sabotage::DeafRenewal {
            return self.inner.renew(renewals).await;
        }
        // It does ask, so that the lease goes on as long as it can.
        let asked = tokio::time::timeout(Duration::from_millis(100), self.inner.renew(renewals)).await;
        let told = asked.unwrap_or_default();
        let deaf = |(place, renewal): (usize, &Renewal)| match (self.renewed(renewal), told.get(place)) {
            (Some(hold), _) => Ok(Renewed::Held(hold)),
            (None, Some(told)) => told.clone(),
            (None, None) => Ok(Renewed::Lost(lockkit::LossReason::Gone)),
        };
        renewals.iter().enumerate().map(deaf).collect()
    }
}
