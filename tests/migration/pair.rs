//! Two stores and a migration between them, as a store under test.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use lockkit::{
    Clock, LockStore, MemoryStore, ShiftedClock,
    migrate::{Dual, Migration, Phase, Start},
};
use lockkit_testkit::{Backend, BoxError};

/// The phases, and the steps that lead there.
pub(crate) const PHASES: [(&str, &[Phase]); 4] = [
    ("old", &[]),
    ("both", &[Phase::Both]),
    ("new", &[Phase::Both, Phase::New]),
    ("back", &[Phase::Both, Phase::New, Phase::Both]),
];

/// The shortest drains that the ttls of the cases allow.
pub(crate) fn start() -> Start {
    Start::new(Duration::from_secs(60), Duration::from_secs(1))
}

/// The same for real servers, whose clocks nobody moves: no step that waits is taken there.
pub(crate) fn short() -> Start {
    Start::new(Duration::from_secs(60), Duration::from_secs(2))
}

/// Two memory stores in one phase of a migration.
#[derive(Debug)]
pub(crate) struct Pair {
    name: String,
    old: MemoryStore,
    new: MemoryStore,
}

impl Pair {
    pub(crate) async fn memory(name: String, steps: &[Phase]) -> Result<Self, BoxError> {
        // Nothing acts on the phases before, so that the drains may be cut short.
        let clock = Arc::new(ShiftedClock::default());
        let [old, new] = [(), ()].map(|()| MemoryStore::with_clock(Arc::clone(&clock) as Arc<dyn Clock>));
        let migration = Migration::new(Arc::new(old.clone()), Arc::new(new.clone()));
        migration.start(start()).await?;
        for goal in steps {
            migration.step(*goal, |drain| clock.advance(drain.left)).await?;
        }
        Ok(Self { name, old, new })
    }
}

#[async_trait]
impl Backend for Pair {
    fn name(&self) -> &str {
        &self.name
    }

    async fn open(&self) -> Result<Arc<dyn LockStore>, BoxError> {
        Ok(Arc::new(Dual::connect(Arc::new(self.old.clone()), Arc::new(self.new.clone())).await?))
    }

    async fn open_with_clock(&self, clock: Arc<dyn Clock>) -> Result<Option<Arc<dyn LockStore>>, BoxError> {
        let client = |store: &MemoryStore| Arc::new(store.client_with_clock(Arc::clone(&clock)));
        Ok(Some(Arc::new(Dual::connect(client(&self.old), client(&self.new)).await?)))
    }
}
