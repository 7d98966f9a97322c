//! What a fenced resource is for: a holder that stands still past its lease, and then writes.

use std::{
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use async_trait::async_trait;
use lockkit_core::{
    Fence, Guard, Lock, LockStore, Locker,
    fenced::{Admission, FencedResource},
};
use tokio::sync::oneshot;

use crate::BoxError;

/// How long the next holder waits for the lease of the frozen one to lapse, at most.
const LAPSED_WITHIN: Duration = Duration::from_secs(60);

/// Proves that a resource refuses the late write of a holder that was frozen past its lease, and not the writes of the
/// one who came after. Made for the resources of this project, and for those that you make yourself.
///
/// The holder lives on a thread of its own, which stops between its check of the guard and its write: nothing of it runs,
/// neither its renewals nor its connections. `open` makes a client of the store for each of the two.
///
/// # Errors
/// What went wrong, or which promise was broken.
pub async fn a_frozen_holder_is_refused(
    open: impl AsyncOpen + Clone,
    resource: Arc<dyn FencedResource>,
    name: &str,
    ttl: Duration,
) -> Result<(), BoxError> {
    let frozen = Frozen::holds(open.clone(), Arc::clone(&resource), alone, name, ttl).await?;
    let locker = Locker::shared_builder(open.open().await?).build();
    let guard = locker.lock(name).ttl(ttl).acquire_within(LAPSED_WITHIN).await?.ok_or("the lease never lapsed")?;
    expect(guard.fence() > frozen.fence, "the second holder's fence is not above the first's")?;
    resource.claim(guard.fence()).await?.ok()?;
    expect(resource.read().await?.as_deref() == Some(b"first"), "the second holder does not see the first's write")?;
    resource.write(guard.fence(), b"second").await?.ok()?;
    frozen.goes_on(guard.fence()).await?;
    expect(resource.read().await?.as_deref() == Some(b"second"), "the late write did something")?;
    resource.write(guard.fence(), b"third").await?.ok()?;
    expect(resource.read().await?.as_deref() == Some(b"third"), "the second holder can't write any more")?;
    expect(!resource.claim(Fence::NONE).await?.is_admitted(), "a holder without a fence was admitted")?;
    _ = guard.release().await?;
    Ok(())
}

/// Proves that a resource with readers refuses the late write of a writer that was frozen past its lease when readers came after it,
/// takes the claims of all readers that hold the lock together, whichever comes first, and refuses theirs after the next writer's. For
/// stores that have readers.
///
/// The writer lives and freezes as the holder of [`a_frozen_holder_is_refused`] does.
///
/// # Errors
/// What went wrong, or which promise was broken.
pub async fn a_frozen_writer_is_refused_after_readers(
    open: impl AsyncOpen + Clone,
    resource: Arc<dyn FencedResource>,
    name: &str,
    ttl: Duration,
) -> Result<(), BoxError> {
    let frozen = Frozen::holds(open.clone(), Arc::clone(&resource), writing, name, ttl).await?;
    let (mine, other) = (open.open().await?, open.open().await?);
    let (mine, other) = (Locker::shared_builder(mine).build(), Locker::shared_builder(other).build());
    let read = mine.rw_lock(name).read().ttl(ttl);
    let one = read.acquire_within(LAPSED_WITHIN).await?.ok_or("the lease never lapsed")?;
    // On some stores each reader has a number of its own anyway.
    let read = other.rw_lock(name).read().ttl(ttl).fence_above(one.fence());
    let two = read.try_acquire().await?.ok_or("readers must share")?;
    all_are_admitted(&resource, &[one.fence(), two.fence()]).await?;
    resource.claim_shared(two.fence()).await?.ok()?;
    // The lower one last: it takes nothing from what the other has shut out.
    expect(resource.claim_shared(one.fence()).await?.is_admitted(), SHARES)?;
    frozen.goes_on(two.fence()).await?;
    expect(resource.read().await?.as_deref() == Some(b"first"), "the late write did something")?;
    let readers = [one.fence(), two.fence()];
    _ = (one.release().await?, two.release().await?);
    let writer = writing(&mine, name).ttl(ttl).acquire_within(LAPSED_WITHIN).await?.ok_or("the readers have left")?;
    resource.claim(writer.fence()).await?.ok()?;
    for reader in readers {
        let late = resource.claim_shared(reader).await?;
        expect(late == Admission::Refused { highest: writer.fence() }, "a late reader was not refused")?;
    }
    resource.write(writer.fence(), b"second").await?.ok()?;
    expect(resource.read().await?.as_deref() == Some(b"second"), "the next writer can't write")?;
    expect(!resource.claim_shared(Fence::NONE).await?.is_admitted(), "a reader without a fence was admitted")?;
    _ = writer.release().await?;
    Ok(())
}

fn alone(locker: &Locker, name: &str) -> Lock {
    locker.lock(name)
}

/// The writing side of the lock.
fn writing(locker: &Locker, name: &str) -> Lock {
    locker.rw_lock(name).write()
}

const SHARES: &str = "a reader was refused because of another that holds the lock, too";

/// Readers that hold the lock together claim at once.
async fn all_are_admitted(resource: &Arc<dyn FencedResource>, fences: &[Fence]) -> Result<(), BoxError> {
    let claims = fences.iter().cycle().take(8).map(|fence| {
        let (resource, fence) = (Arc::clone(resource), *fence);
        tokio::spawn(async move { resource.claim_shared(fence).await })
    });
    for claim in claims.collect::<Vec<_>>() {
        expect(claim.await??.is_admitted(), SHARES)?;
    }
    Ok(())
}

/// Opens a client of the store, on the runtime that it will live on.
#[async_trait]
pub trait AsyncOpen: Send + Sync + 'static {
    /// A new client.
    ///
    /// # Errors
    /// When the store can't be reached.
    async fn open(&self) -> Result<Arc<dyn LockStore>, BoxError>;
}

#[async_trait]
impl<F, R> AsyncOpen for F
where
    F: Fn() -> R + Send + Sync + 'static,
    R: Future<Output = Result<Arc<dyn LockStore>, BoxError>> + Send,
{
    async fn open(&self) -> Result<Arc<dyn LockStore>, BoxError> {
        self().await
    }
}

/// A holder that stands still between its check of the guard and its write.
struct Frozen {
    fence: Fence,
    thread: thread::JoinHandle<Result<Late, BoxError>>,
    thaw: mpsc::Sender<()>,
}

impl Frozen {
    async fn holds(
        open: impl AsyncOpen,
        resource: Arc<dyn FencedResource>,
        lock: fn(&Locker, &str) -> Lock,
        name: &str,
        ttl: Duration,
    ) -> Result<Self, BoxError> {
        let (frozen, freezes) = oneshot::channel();
        let (thaw, thaws) = mpsc::channel();
        let holder = FrozenHolder { resource, lock, name: name.to_owned(), ttl, frozen, thaws };
        let thread = thread::spawn(move || holder.live(open));
        match freezes.await {
            Ok(fence) => Ok(Self { fence, thread, thaw }),
            Err(_) => Err(thread.join().map_err(|_| PANICKED)?.expect_err("it ended before it froze")),
        }
    }

    /// Lets it go on: it finds that another came with this fence.
    async fn goes_on(self, highest: Fence) -> Result<(), BoxError> {
        self.thaw.send(())?;
        let late = tokio::task::spawn_blocking(|| self.thread.join()).await?.map_err(|_| PANICKED)??;
        expect(late.write == Admission::Refused { highest }, "the late write was not refused")?;
        expect(!late.claim.is_admitted(), "the late claim was not refused")?;
        expect(!late.is_held, "the frozen holder still believes in its lease")
    }
}

const PANICKED: &str = "the first holder panicked";

/// The same on its own thread.
struct FrozenHolder {
    resource: Arc<dyn FencedResource>,
    lock: fn(&Locker, &str) -> Lock,
    name: String,
    ttl: Duration,
    frozen: oneshot::Sender<Fence>,
    thaws: mpsc::Receiver<()>,
}

/// What became of the frozen holder when it went on.
#[derive(Debug)]
struct Late {
    write: Admission,
    claim: Admission,
    is_held: bool,
}

impl FrozenHolder {
    fn live(self, open: impl AsyncOpen) -> Result<Late, BoxError> {
        tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
            let locker = Locker::shared_builder(open.open().await?).build();
            let guard = (self.lock)(&locker, &self.name).ttl(self.ttl).acquire().await?;
            self.resource.claim(guard.fence()).await?.ok()?;
            self.resource.write(guard.fence(), b"first").await?.ok()?;
            guard.ensure(Duration::ZERO)?;
            self.freeze_and_write(&guard).await
        })
    }

    async fn freeze_and_write(self, guard: &Guard) -> Result<Late, BoxError> {
        _ = self.frozen.send(guard.fence());
        // Blocking the only thread of the runtime is the point.
        self.thaws.recv()?;
        let write = self.resource.write(guard.fence(), b"late").await?;
        let claim = self.resource.claim(guard.fence()).await?;
        Ok(Late { write, claim, is_held: guard.is_held() })
    }
}

pub(crate) fn expect(is_true: bool, otherwise: &str) -> Result<(), BoxError> {
    if is_true { Ok(()) } else { Err(otherwise.into()) }
}
