//! Reentrancy: an explicit identity whose acquisitions of one lock nest.

use std::{
    collections::HashMap,
    pin::pin,
    sync::{Arc, Mutex, Weak},
};

use tokio::sync::Notify;

use crate::{
    Error, ErrorKind, Fence, LockKey, LossReason, Mode, Result,
    engine::{Ask, Doubts, Engine, Lease, LeaseStatus, Limit},
    store::unpoisoned,
};

/// An identity that may hold the same lock several times at once.
///
/// Identity is this value and its clones, never a thread or a task: tasks move between threads, and two tasks may
/// share one. A nested acquisition renews the lease, which checks that it is still held, keeps its fence, and shows
/// the new count in the store. The lock is free when the last guard of the owner is gone, in whatever order they go.
///
/// All guards that an owner has of a lock share one lease (unless two of its tasks ask to read at the same moment), with the ttl, the renewal and the [`max_hold`](crate::Lock::max_hold) of the first
/// acquisition. A nested acquisition that asks for others is refused as `InvalidInput`. What it does not set it takes as it is,
/// except that a lock is to be renewed unless it is set to [`no_renewal`](crate::Lock::no_renewal): all have to say that, or none.
///
/// One owner used by two tasks gives **no** exclusion between them: that is what reentrancy means.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> lockkit_core::Result<()> {
/// use lockkit_core::{Locker, MemoryStore};
///
/// let locker = Locker::new(MemoryStore::new());
/// let owner = locker.owner();
/// let outer = owner.lock("ledger").acquire().await?;
/// let inner = owner.lock("ledger").acquire().await?;
/// assert_eq!(inner.fence(), outer.fence());
/// assert_eq!(locker.lock("ledger").inspect().await?.holders[0].depth, 2);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Owner {
    pub(crate) engine: Arc<Engine>,
    held: Arc<Mutex<Slots>>,
}

#[derive(Debug)]
struct Slots {
    by_key: HashMap<LockKey, Arc<Slot>>,
    /// At how many of them those that are of no use any more are looked for: at twice as many as were of use the last time,
    /// so that the looking costs each key the same, however many there are.
    tidy_at: usize,
}

/// What this owner has of one key.
#[derive(Debug, Default)]
struct Slot {
    /// More than one only if tasks of the owner that asked to read at the same time got a lease each.
    leases: Mutex<Vec<Weak<Lease>>>,
    /// Tells tasks of the owner that ask for the lock that one of them has it.
    came: Notify,
}

impl Owner {
    pub(crate) fn new(engine: Arc<Engine>) -> Self {
        Self { engine, held: Arc::new(Mutex::new(Slots { by_key: HashMap::new(), tidy_at: 64 })) }
    }

    pub(crate) async fn acquire(&self, ask: &Ask, limit: Limit, doubts: &mut Doubts) -> Result<Option<Arc<Lease>>> {
        let engine = &self.engine;
        engine.check_open().map_err(|error| doubts.leave_open(error))?;
        let slot = self.slot(&ask.key);
        // From before the look at what there is, so that nothing comes unnoticed.
        let mut came = pin!(slot.came.notified());
        came.as_mut().enable();
        if let Some(nested) = slot.nest(engine, ask, limit).await.map_err(|error| doubts.leave_open(error))? {
            return Ok(Some(nested));
        }
        // Each asks for itself: one that waited for another's answer would wait for ever if that is not polled any more.
        let mut asking = pin!(engine.acquire(ask, limit, doubts));
        loop {
            tokio::select! {
                biased;
                answer = &mut asking => return Ok(answer?.inspect(|lease| slot.put(lease))),
                () = &mut came => {
                    came.set(slot.came.notified());
                    came.as_mut().enable();
                    // A claim of its own may be at the store.
                    if let Some(nested) = slot.nest(engine, ask, limit).await.map_err(Error::unknown_effect)? {
                        return Ok(Some(nested));
                    }
                }
            }
        }
    }

    /// Makes a lease this owner's, for its acquisitions to nest in.
    pub(crate) fn adopt(&self, lease: &Arc<Lease>) {
        self.slot(&lease.claim.key).put(lease);
    }

    fn slot(&self, key: &LockKey) -> Arc<Slot> {
        let mut held = unpoisoned(&self.held);
        if held.by_key.len() >= held.tidy_at && !held.by_key.contains_key(key) {
            // What nobody holds and nobody acquires is of no use any more.
            held.by_key.retain(|_, slot| Arc::strong_count(slot) > 1 || slot.is_used());
            held.tidy_at = (held.by_key.len() * 2).max(64);
        }
        Arc::clone(held.by_key.entry(key.clone()).or_default())
    }
}

impl Slot {
    /// Adds a hold to a lease that there is, if there is one.
    async fn nest(&self, engine: &Arc<Engine>, ask: &Ask, limit: Limit) -> Result<Option<Arc<Lease>>> {
        // The latest first: that of a resumed lease comes after the one whose place it took.
        for lease in self.leases().into_iter().rev() {
            if let Some(nested) = nest(engine, &lease, ask, limit).await? {
                return Ok(Some(nested));
            }
        }
        Ok(None)
    }

    fn put(&self, lease: &Arc<Lease>) {
        let mut leases = unpoisoned(&self.leases);
        leases.retain(|lease| lease.strong_count() > 0);
        leases.push(Arc::downgrade(lease));
        self.came.notify_waiters();
    }

    /// Whether something still keeps a lease.
    fn is_used(&self) -> bool {
        unpoisoned(&self.leases).iter().any(|lease| lease.strong_count() > 0)
    }

    /// Those that something still keeps.
    fn leases(&self) -> Vec<Arc<Lease>> {
        unpoisoned(&self.leases).iter().filter_map(Weak::upgrade).collect()
    }
}

/// Adds a hold to a lease; `None` if it was released in the meantime.
async fn nest(engine: &Arc<Engine>, lease: &Arc<Lease>, ask: &Ask, limit: Limit) -> Result<Option<Arc<Lease>>> {
    engine.look(lease);
    {
        let mut state = lease.state();
        match state.status() {
            // Others than guards may keep the lease alive for a moment: what counts is whether a guard does.
            LeaseStatus::Lost(reason) if state.holds() > 0 => {
                drop(state);
                return Err(lost(engine, lease, reason));
            }
            LeaseStatus::Lost(_) | LeaseStatus::Released => return Ok(None),
            LeaseStatus::Held | LeaseStatus::Suspect => honour(engine, lease, ask)?,
        }
        if !state.begin_nesting() {
            drop(state);
            return Err(refused(engine, lease, "the lock is nested too deeply".to_owned()));
        }
    }
    let hold = NestedHold { engine, lease: Some(lease) };
    if let Some(reason) = engine.confirm(lease, limit).await? {
        return Err(lost(engine, lease, reason));
    }
    // The answer may have come too late.
    match engine.look(lease) {
        LeaseStatus::Lost(reason) => Err(lost(engine, lease, reason)),
        LeaseStatus::Held | LeaseStatus::Suspect | LeaseStatus::Released => Ok(hold.keep()),
    }
}

/// Refuses what the lease that there is can't give: all guards of an owner share it. What was not asked for is taken as it is.
fn honour(engine: &Engine, lease: &Lease, ask: &Ask) -> Result<()> {
    let (has, wants) = (lease.terms, ask.terms);
    let message = if lease.claim.mode == Mode::Shared && ask.mode == Mode::Exclusive {
        "the owner reads under the lock, and would wait for itself if it asked to write: release what it has for reading first".to_owned()
    } else if ask.ttl_is_set && wants.ttl != has.ttl {
        format!("the owner holds the lock with a ttl of {:?}: a nested acquisition can't have {:?}", has.ttl, wants.ttl)
    } else if wants.fence_above > Fence::NONE && wants.fence_above >= lease.fence {
        let (fence, wanted) = (lease.fence, wants.fence_above);
        format!("the owner holds the lock with the fence {fence}: a nested acquisition can't have one above {wanted}")
    } else if wants.renew && !has.renew {
        "the owner holds the lock without renewal: a nested acquisition can't have it renewed".to_owned()
    } else if has.renew && !wants.renew {
        "the owner holds the lock with renewal: a nested acquisition can't do without".to_owned()
    } else if let Some(wanted) = wants.max_hold.filter(|_| wants.max_hold != has.max_hold) {
        format!(
            "the owner holds the lock with another max_hold than {wanted:?}, which a nested acquisition can't change"
        )
    } else if let Some(wanted) = wants.keep_for.filter(|_| wants.keep_for != has.keep_for) {
        format!(
            "the owner holds the lock with another keep_for than {wanted:?}, which a nested acquisition can't change"
        )
    } else {
        return Ok(());
    };
    Err(refused(engine, lease, message))
}

fn refused(engine: &Engine, lease: &Lease, message: String) -> Error {
    Error::invalid(message).at("acquire", Some(&lease.claim.key), &engine.store.info().name)
}

/// A hold that is asked for; given back when dropped.
struct NestedHold<'a> {
    engine: &'a Arc<Engine>,
    lease: Option<&'a Arc<Lease>>,
}

impl NestedHold<'_> {
    /// The lease, if it was not released meanwhile with the last of the other holds.
    fn keep(mut self) -> Option<Arc<Lease>> {
        let lease = self.lease?;
        let mut state = lease.state();
        if !state.is_live() {
            return None;
        }
        state.nesting -= 1;
        self.lease = None;
        Some(Arc::clone(lease))
    }
}

impl Drop for NestedHold<'_> {
    fn drop(&mut self) {
        if let Some(lease) = self.lease {
            self.engine.give_up_nesting(lease);
        }
    }
}

fn lost(engine: &Engine, lease: &Lease, reason: LossReason) -> Error {
    Error::new(ErrorKind::Lost, format!("an outer hold was lost: {reason}")).at(
        "acquire",
        Some(&lease.claim.key),
        &engine.store.info().name,
    )
}
