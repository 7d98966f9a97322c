//! The checking half of fencing: resources that refuse who comes too late.
//!
//! A lock alone can't stop a holder that was frozen past its lease and then writes. A resource can, if it remembers the
//! highest fence that it has seen and refuses smaller ones ([`admit`]). [`FencedResource`] is that rule as a trait;
//! [`MemoryResource`] keeps it in memory, and the backends' modules of this name keep it in their stores:
//! `lockkit::redis::fenced`, `lockkit::mysql::fenced` and `lockkit::zk::fenced`. `docs/fencing.md` tells when to use which.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> lockkit_core::Result<()> {
//! use lockkit_core::{Locker, MemoryStore, fenced::{FencedResource, MemoryResource}};
//!
//! let (locker, account) = (Locker::new(MemoryStore::new()), MemoryResource::new());
//! let guard = locker.lock("account/7").acquire().await?;
//! account.claim(guard.fence()).await?.ok()?; // the first act, before the first read
//! let balance = account.read().await?.map_or(0, |bytes| bytes[0]);
//! account.write(guard.fence(), &[balance + 1]).await?.ok()?;
//! # guard.release().await?; Ok(()) }
//! ```

use std::{fmt, sync::Mutex};

use async_trait::async_trait;

use crate::{Error, ErrorKind, Fence, Result, store::unpoisoned};

/// A resource that checks fences. Each method is one atomic step.
///
/// A holder's first act is a [`claim`](Self::claim), also before it **reads** what will decide what it writes. Without
/// it the last holder could still write between that read and the new holder's first write, and its update would be
/// overwritten although no rule was broken.
#[async_trait]
pub trait FencedResource: fmt::Debug + Send + Sync + 'static {
    /// Shuts out all holders with smaller fences. From the moment this is admitted nobody before this holder can write.
    ///
    /// # Errors
    /// When the resource could not be asked. Claiming again is harmless.
    ///
    /// # Cancellation
    /// The claim may have been, or come to be, admitted.
    async fn claim(&self, fence: Fence) -> Result<Admission>;

    /// Writes the value, unless a higher fence was seen. Counts as a claim.
    ///
    /// # Errors
    /// When the resource could not be asked. If the effect is unknown, the same write again is harmless.
    ///
    /// # Cancellation
    /// The value may have been, or come to be, written.
    async fn write(&self, fence: Fence, value: &[u8]) -> Result<Admission>;

    /// Reads the value; `None` if none was ever written. Whoever writes what depends on it has claimed before.
    ///
    /// # Errors
    /// When the resource could not be asked.
    async fn read(&self) -> Result<Option<Vec<u8>>>;
}

/// What a resource answered to a fence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a refused holder must stop: a newer one has begun"]
pub enum Admission {
    /// No higher fence was seen before. Whatever was asked for is done.
    Admitted,
    /// Nothing was done: a newer holder has begun, or the fence is [`Fence::NONE`].
    Refused {
        /// The highest fence that the resource has seen.
        highest: Fence,
    },
}

impl Admission {
    /// Whether the holder was admitted.
    #[must_use]
    pub fn is_admitted(self) -> bool {
        self == Self::Admitted
    }

    /// A refusal as an error, for `?`.
    ///
    /// # Errors
    /// [`ErrorKind::Lost`] if the holder was refused.
    pub fn ok(self) -> Result<()> {
        match self {
            Self::Admitted => Ok(()),
            Self::Refused { highest: Fence::NONE } => {
                Err(Error::new(ErrorKind::Lost, "the resource refused a holder that has no fence"))
            }
            Self::Refused { highest } => {
                let message = format!("the resource refused the fence: a newer holder came with {highest}");
                Err(Error::new(ErrorKind::Lost, message))
            }
        }
    }
}

/// The rule: a smaller fence than the highest seen is refused, any other is remembered. To be called where nobody else
/// can change `highest` until the effect that it guards is done.
///
/// [`Fence::NONE`], which a store that does not fence hands out, is always refused.
///
/// ```
/// use lockkit_core::{Fence, fenced::admit};
///
/// let mut highest = Fence::NONE;
/// assert!(admit(&mut highest, Fence::new(7)).is_admitted());
/// assert!(admit(&mut highest, Fence::new(7)).is_admitted()); // one holder may write many times
/// assert!(!admit(&mut highest, Fence::new(6)).is_admitted());
/// ```
pub fn admit(highest: &mut Fence, fence: Fence) -> Admission {
    if fence == Fence::NONE || fence < *highest {
        return Admission::Refused { highest: *highest };
    }
    *highest = fence;
    Admission::Admitted
}

/// A fenced value in this process, for state in memory and for tests.
#[derive(Debug, Default)]
pub struct MemoryResource(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    highest: Fence,
    value: Option<Vec<u8>>,
}

impl MemoryResource {
    /// An empty resource that has seen no fence.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The highest fence seen so far.
    #[must_use]
    pub fn highest(&self) -> Fence {
        unpoisoned(&self.0).highest
    }
}

#[async_trait]
impl FencedResource for MemoryResource {
    async fn claim(&self, fence: Fence) -> Result<Admission> {
        Ok(admit(&mut unpoisoned(&self.0).highest, fence))
    }

    async fn write(&self, fence: Fence, value: &[u8]) -> Result<Admission> {
        let mut state = unpoisoned(&self.0);
        let admission = admit(&mut state.highest, fence);
        if admission.is_admitted() {
            state.value = Some(value.to_vec());
        }
        Ok(admission)
    }

    async fn read(&self) -> Result<Option<Vec<u8>>> {
        Ok(unpoisoned(&self.0).value.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_fence_is_refused_and_says_so() {
        let mut highest = Fence::NONE;
        let refused = admit(&mut highest, Fence::NONE);
        assert_eq!(refused, Admission::Refused { highest: Fence::NONE });
        assert!(refused.ok().expect_err("refused").to_string().contains("no fence"));
    }

    #[tokio::test]
    async fn a_late_writer_is_refused_and_changes_nothing() -> Result<()> {
        let resource = MemoryResource::new();
        resource.write(Fence::new(5), b"old").await?.ok()?;
        resource.claim(Fence::new(6)).await?.ok()?;
        let late = resource.write(Fence::new(5), b"late").await?;
        assert_eq!(late, Admission::Refused { highest: Fence::new(6) });
        assert_eq!(late.ok().expect_err("refused").kind(), ErrorKind::Lost);
        assert_eq!((resource.read().await?.as_deref(), resource.highest()), (Some(&b"old"[..]), Fence::new(6)));
        Ok(())
    }
}
