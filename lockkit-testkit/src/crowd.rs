//! Clients that hold one lock in all ways beside and after each other, and a resource that notices if two of them should not be there.

use std::{
    num::NonZeroU32,
    sync::{Mutex, MutexGuard},
    time::Duration,
};

use lockkit_core::{Fence, Lock, Locker, Mode, Outcome, store::unpoisoned};

const TWO: NonZeroU32 = NonZeroU32::MIN.saturating_add(1);

/// A resource that several kinds of holders use.
#[derive(Debug, Default)]
pub struct Resource(Mutex<Use>);

#[derive(Debug, Default)]
struct Use {
    writers: u32,
    readers: u32,
    permits: u32,
    grants: [u64; 3],
    highest: Highest,
}

/// The highest fence of a grant that returned: of all, and of those that are not shared.
#[derive(Clone, Copy, Debug, Default)]
pub struct Highest {
    all: Fence,
    alone: Fence,
}

impl Resource {
    /// The highest fences before a request.
    #[must_use]
    pub fn highest(&self) -> Highest {
        self.now().highest
    }

    /// How many grants were used: of writers, of readers, and of permits.
    #[must_use]
    pub fn grants(&self) -> [u64; 3] {
        self.now().grants
    }

    /// A holder begins to use it, with a fence that was granted after a request that was made when `before` were the highest.
    ///
    /// # Panics
    /// If another uses it that must not at the same time, or the fence is no higher than it has to be.
    pub fn enter(&self, mode: Mode, fence: Fence, before: Highest) {
        let mut now = self.now();
        let number = match mode {
            Mode::Exclusive => {
                now.writers += 1;
                0
            }
            Mode::Shared => {
                now.readers += 1;
                1
            }
            _ => {
                now.permits += 1;
                2
            }
        };
        now.grants[number] += 1;
        let Use { writers, readers, permits, .. } = *now;
        let kinds = u32::from(writers > 0) + u32::from(readers > 0) + u32::from(permits > 0);
        assert!(kinds == 1 && writers <= 1 && permits <= 2, "{writers} writers, {readers} readers, {permits} permits");
        if mode == Mode::Shared {
            assert!(fence >= before.all && fence > before.alone, "a reader's {fence} after {before:?}");
        } else {
            assert!(fence > before.all, "{fence} after {before:?}");
            now.highest.alone = now.highest.alone.max(fence);
        }
        now.highest.all = now.highest.all.max(fence);
    }

    /// A holder ends its use.
    pub fn leave(&self, mode: Mode) {
        let mut now = self.now();
        match mode {
            Mode::Exclusive => now.writers -= 1,
            Mode::Shared => now.readers -= 1,
            _ => now.permits -= 1,
        }
    }

    fn now(&self) -> MutexGuard<'_, Use> {
        unpoisoned(&self.0)
    }
}

/// Numbers that look random (xorshift, Marsaglia 2003). Not from 0.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// The next number, below `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

/// One of the ways to hold a lock: 0 and 1 as a writer, 2 to 4 as a reader, 5 and 6 with one of two permits, each in order; and else as
/// one that knows of none of these.
pub fn kind(locker: &Locker, name: &str, number: u64) -> (Lock, Mode) {
    match number {
        0..2 => (locker.rw_lock(name).write().fifo(), Mode::Exclusive),
        2..5 => (locker.rw_lock(name).read().fifo(), Mode::Shared),
        5..7 => (locker.semaphore(name, TWO).fifo(), Mode::Permit { limit: TWO }),
        _ => (locker.lock(name), Mode::Exclusive),
    }
}

/// One client takes the lock once, in one of these ways and with one limit or another, or gives up in the middle of anything.
///
/// # Panics
/// If the resource notices something, or a lease was lost.
pub async fn visit(locker: &Locker, name: &str, resource: &Resource, random: &mut Random, ttl: Duration) {
    let (lock, mode) = kind(locker, name, random.below(8));
    let (lock, before) = (lock.ttl(ttl), resource.highest());
    let asked = match random.below(4) {
        0 => lock.try_acquire().await,
        1 => lock.acquire_within(Duration::from_millis(random.below(20))).await,
        2 => match tokio::time::timeout(Duration::from_micros(random.below(5000)), lock.acquire()).await {
            Ok(asked) => asked.map(Some),
            Err(_) => return,
        },
        _ => lock.acquire_within(Duration::from_secs(2)).await,
    };
    let Ok(Some(guard)) = asked else { return };
    resource.enter(mode, guard.fence(), before);
    tokio::time::sleep(Duration::from_micros(random.below(1500))).await;
    resource.leave(mode);
    // An error tells nothing: the release goes on in the background.
    if let Ok(outcome) = guard.release().await {
        assert_eq!(outcome, Outcome::Released);
    }
}
