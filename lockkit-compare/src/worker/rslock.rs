//! The jobs of a worker whose locks are those of the crate `rslock`.

use std::time::Duration;

use ::rslock::{LockGuard, LockManager};
use lockkit::{Clock, SystemClock};

use super::{Answer, Job, Orders, contend::contend_for, say, take::take_each_time};
use crate::{
    error::{Error, ErrorKind, Result},
    exclusive::Exclusive,
    measure,
    plan::Plan,
};

/// Does one job with locks of `rslock` on this server.
pub(super) async fn work(job: Job, server: &str, mut orders: Orders) -> Result<Answer> {
    let manager = LockManager::new(vec![server]);
    let lock = |key: String| Rslock { manager: manager.clone(), key };
    // So that the connection is up and the script is loaded.
    lock(format!("warm-up/{}", std::process::id())).take_and_give_back().await?;
    match job {
        Job::Contend(job) => contend_for(lock(job.key.clone()), job, orders).await,
        Job::Take { key, .. } => take_each_time(&lock(key), orders).await,
        Job::Give { key } => give_each_time(&lock(key), orders).await,
        Job::Pairs { key, slice } => {
            say(&Answer::Ready)?;
            while orders.next().await? {
                // On a thread of the runtime, as the stores are measured.
                say(&tokio::spawn(pairs(lock(key.clone()), slice)).await??)?;
            }
            Ok(Answer::Finished)
        }
        _ => Err(Error::internal("a peer does not do this job")),
    }
}

async fn pairs(lock: Rslock, slice: Duration) -> Result<Answer> {
    let (mut acquire, mut release) = (Vec::new(), Vec::new());
    let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    measure::each_pair(&lock, slice, |acquired, released| {
        acquire.push(nanos(acquired));
        release.push(nanos(released));
    })
    .await?;
    Ok(Answer::Paired { acquire, release })
}

async fn give_each_time(lock: &Rslock, mut orders: Orders) -> Result<Answer> {
    say(&Answer::Ready)?;
    while orders.next().await? {
        let held = lock.take().await?;
        say(&Answer::Took { at: SystemClock.now().as_nanos() })?;
        let _: bool = orders.next().await?;
        let at = SystemClock.now().as_nanos();
        Rslock::give_back(held).await?;
        say(&Answer::Gave { at })?;
    }
    Ok(Answer::Finished)
}

#[derive(Clone, Debug)]
struct Rslock {
    manager: LockManager,
    key: String,
}

impl Rslock {
    async fn take_and_give_back(&self) -> Result<()> {
        Self::give_back(self.take().await?).await
    }
}

impl Exclusive for Rslock {
    type Held = LockGuard;

    async fn take(&self) -> Result<LockGuard> {
        // It asks until it has the lock, and rests between two questions for as long as its default says.
        let held = self.manager.acquire(self.key.as_str(), Plan::TTL).await;
        held.map_err(|error| Error::new(ErrorKind::Unavailable, error.to_string()))
    }

    fn fence(_: &LockGuard) -> Option<u64> {
        None
    }

    async fn give_back(held: LockGuard) -> Result<()> {
        // Whether it was released it does not say.
        held.release().await;
        Ok(())
    }
}
