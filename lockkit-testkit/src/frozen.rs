//! What a fenced resource is for: a holder that stands still past its lease, and then writes.

use std::{
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use async_trait::async_trait;
use lockkit_core::{
    Fence, Guard, LockStore, Locker,
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
    let (frozen, freezes) = oneshot::channel();
    let (thaw, thaws) = mpsc::channel();
    let holder = FrozenHolder { resource: Arc::clone(&resource), name: name.to_owned(), ttl, frozen, thaws };
    let first = thread::spawn({
        let open = open.clone();
        move || holder.live(open)
    });
    let Ok(old) = freezes.await else {
        return Err(first.join().map_err(|_| "the first holder panicked")?.expect_err("it ended before it froze"));
    };
    let locker = Locker::shared_builder(open.open().await?).build();
    let guard = locker.lock(name).ttl(ttl).acquire_within(LAPSED_WITHIN).await?.ok_or("the lease never lapsed")?;
    expect(guard.fence() > old, "the second holder's fence is not above the first's")?;
    resource.claim(guard.fence()).await?.ok()?;
    expect(resource.read().await?.as_deref() == Some(b"first"), "the second holder does not see the first's write")?;
    resource.write(guard.fence(), b"second").await?.ok()?;
    thaw.send(())?;
    let late = tokio::task::spawn_blocking(|| first.join()).await?.map_err(|_| "the first holder panicked")??;
    expect(late.write == Admission::Refused { highest: guard.fence() }, "the late write was not refused")?;
    expect(!late.claim.is_admitted(), "the late claim was not refused")?;
    expect(!late.is_held, "the frozen holder still believes in its lease")?;
    expect(resource.read().await?.as_deref() == Some(b"second"), "the late write did something")?;
    resource.write(guard.fence(), b"third").await?.ok()?;
    expect(resource.read().await?.as_deref() == Some(b"third"), "the second holder can't write any more")?;
    expect(!resource.claim(Fence::NONE).await?.is_admitted(), "a holder without a fence was admitted")?;
    _ = guard.release().await?;
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

/// The holder that freezes.
struct FrozenHolder {
    resource: Arc<dyn FencedResource>,
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
            let guard = locker.lock(&self.name).ttl(self.ttl).acquire().await?;
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
