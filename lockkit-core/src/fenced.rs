//! The checking half of fencing: resources that refuse who comes too late.
//!
//! A lock alone can't stop a holder that was frozen past its lease and then writes. A resource can, if it remembers the
//! highest fence that it has seen and refuses smaller ones ([`admit`]). One that is read under a
//! [readers-writer lock](crate::Locker::rw_lock) remembers two ([`SeenFences`]). [`FencedResource`] is that rule as a trait;
//! [`MemoryResource`] keeps it in memory, and the backends' modules of this name keep it in their stores:
//! `lockkit::redis::fenced`, `lockkit::mysql::fenced` and `lockkit::zk::fenced`. `docs/fencing.md` tells when to use which.
//!
//! The fence of a [permit](crate::Locker::semaphore) is an order and no admission: holders of permits hold at the same time, and
//! each has a number of its own, so that the rule would refuse some that hold theirs. Show it to no resource.
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
    /// When the resource could not be asked. If the effect is unknown, the same write again is harmless, and so are later ones: a resource
    /// sees to it that a write which it gets late undoes none that the holder made after it.
    ///
    /// # Cancellation
    /// The value may have been, or come to be, written.
    async fn write(&self, fence: Fence, value: &[u8]) -> Result<Admission>;

    /// The claim of a reader, the holder of a shared lock: shuts out all writers with smaller fences, and no reader. It is refused
    /// if a writer with a higher fence has claimed or written.
    ///
    /// A reader claims before it reads. If it claims again after its last read and is admitted again, no writer was admitted in
    /// between: all that it has read is of one state.
    ///
    /// # Errors
    /// When the resource could not be asked. Claiming again is harmless.
    ///
    /// # Cancellation
    /// The claim may have been, or come to be, admitted.
    async fn claim_shared(&self, fence: Fence) -> Result<Admission>;

    /// Reads the value; `None` if none was ever written. A holder that writes something that depends on it has claimed before.
    ///
    /// # Errors
    /// When the resource could not be asked.
    async fn read(&self) -> Result<Option<Vec<u8>>>;
}

/// What a resource answered to a fence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a refused holder must stop: a newer one has begun"]
pub enum Admission {
    /// No higher fence was seen before; for a reader, none of a writer. Whatever was asked for is done.
    Admitted,
    /// Nothing was done: a newer holder has begun, or the fence is [`Fence::NONE`].
    Refused {
        /// The highest fence that the resource has seen; for a reader, the highest of a writer.
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

/// What a resource remembers that has readers and writers: the highest fence of all, and that of the writers.
///
/// Readers share the lock, and on some stores each has a fence of its own. By one number, a reader that comes later would shut
/// out those that hold the lock beside it. By these two, a reader shuts out the writers before it, and a writer all before it:
///
/// ```
/// use lockkit_core::{Fence, fenced::SeenFences};
///
/// let mut seen = SeenFences::default();
/// assert!(seen.admit(Fence::new(5)).is_admitted()); // a writer
/// assert!(seen.admit_shared(Fence::new(8)).is_admitted()); // two readers that hold the lock together
/// assert!(seen.admit_shared(Fence::new(7)).is_admitted());
/// assert!(!seen.admit(Fence::new(5)).is_admitted()); // the writer is late
/// assert!(seen.admit(Fence::new(9)).is_admitted()); // the next writer
/// assert!(!seen.admit_shared(Fence::new(8)).is_admitted()); // a reader is late
/// ```
///
/// As [`admit`], both methods are to be called where nobody else can change what was seen until the effect is done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SeenFences {
    highest: Fence,
    writer: Fence,
}

impl SeenFences {
    /// What was seen by a resource that keeps it as two numbers. A `writer` above `highest` counts as the highest of all.
    #[must_use]
    pub fn new(highest: Fence, writer: Fence) -> Self {
        Self { highest: highest.max(writer), writer }
    }

    /// The highest fence of all: a writer below it is refused.
    #[must_use]
    pub const fn highest(&self) -> Fence {
        self.highest
    }

    /// The highest fence of a writer: a reader below it is refused.
    #[must_use]
    pub const fn writer(&self) -> Fence {
        self.writer
    }

    /// The rule for a writer, the holder of an exclusive lock: that of [`admit`].
    pub fn admit(&mut self, fence: Fence) -> Admission {
        let admission = admit(&mut self.highest, fence);
        if admission.is_admitted() {
            self.writer = fence;
        }
        admission
    }

    /// The rule for a reader, the holder of a shared lock: a smaller fence than the highest of a writer is refused, and so is
    /// [`Fence::NONE`]. Any other is remembered if it is the highest of all.
    pub fn admit_shared(&mut self, fence: Fence) -> Admission {
        if fence == Fence::NONE || fence < self.writer {
            return Admission::Refused { highest: self.writer };
        }
        self.highest = self.highest.max(fence);
        Admission::Admitted
    }
}

/// A fenced value in this process, for state in memory and for tests.
#[derive(Debug, Default)]
pub struct MemoryResource(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    seen: SeenFences,
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
        unpoisoned(&self.0).seen.highest()
    }
}

#[async_trait]
impl FencedResource for MemoryResource {
    async fn claim(&self, fence: Fence) -> Result<Admission> {
        Ok(unpoisoned(&self.0).seen.admit(fence))
    }

    async fn write(&self, fence: Fence, value: &[u8]) -> Result<Admission> {
        let mut state = unpoisoned(&self.0);
        let admission = state.seen.admit(fence);
        if admission.is_admitted() {
            state.value = Some(value.to_vec());
        }
        Ok(admission)
    }

    async fn claim_shared(&self, fence: Fence) -> Result<Admission> {
        Ok(unpoisoned(&self.0).seen.admit_shared(fence))
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

    #[test]
    fn a_reader_without_a_fence_is_refused() {
        let mut seen = SeenFences::default();
        assert_eq!(seen.admit_shared(Fence::NONE), Admission::Refused { highest: Fence::NONE });
        assert_eq!(seen, SeenFences::default());
    }

    /// All orders in which four holders can come, each twice: readers 2 and 3 of one group between the writers 1 and 4.
    #[test]
    fn a_writer_shuts_out_all_before_it_and_a_reader_the_writers_before_it() {
        for order in 0..4_u32.pow(6) {
            let (mut seen, mut came) = (SeenFences::default(), Vec::new());
            for number in (0..6).map(|step| u64::from(order / 4_u32.pow(step) % 4 + 1)) {
                let (fence, is_reader) = (Fence::new(number), matches!(number, 2 | 3));
                let is_shut_out = |other: &u64| *other > number && !(is_reader && matches!(other, 2 | 3));
                let admission = if is_reader { seen.admit_shared(fence) } else { seen.admit(fence) };
                assert_eq!(admission.is_admitted(), !came.iter().any(is_shut_out), "{number} after {came:?}");
                if admission.is_admitted() {
                    came.push(number);
                }
                assert_eq!(SeenFences::new(seen.highest(), seen.writer()), seen);
            }
        }
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
