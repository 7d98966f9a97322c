//! How long a lock stays out of reach when its holder is gone without a word.

use std::time::Duration;

use lockkit::{Clock, Guard, Lock, Locker, Moment, SystemClock};
use tokio::{task::JoinSet, time::timeout};

use crate::{
    error::{Error, Result},
    plan::Plan,
    processes::await_waiter,
    results::{Figure, Takeover},
    worker::{Answer, Job, Keep},
    workers::{Worker, WorkerProgram, unexpected},
};

/// How long a waiter has patience, whatever the store's sessions last.
pub(crate) const TAKEN_WITHIN: Duration = Duration::from_secs(120);

/// What happens to a holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// It gets SIGKILL: its system closes its connections.
    Killed,
    /// It gets SIGSTOP: its connections stay open, and nothing comes over them any more.
    Frozen,
}

/// What became of one lock.
struct Taken {
    end: End,
    /// From the end of its holder to the moment when another had it.
    after: Duration,
    /// Whether the holder, which goes on then, believed that it still had the lock.
    is_believed: bool,
}

/// Ends several holders, each a process with a lock of its own for which a task of this process waits: all at once, for nearly all
/// the time goes by with waiting.
pub(crate) async fn of(program: &WorkerProgram, url: &str, locker: &Locker, key: &str) -> Result<Takeover> {
    let mut tasks = JoinSet::new();
    for end in [End::Killed, End::Frozen] {
        for number in 0..Plan::HOLDERS {
            let name = format!("{key}/takeover/{end:?}/{number}");
            let (lock, program, url) = (locker.lock(&name), program.clone(), url.to_owned());
            // At different moments between two renewals, for each starts the ttl anew.
            let pause = Plan::TAKEOVER_TTL / 3 * number / Plan::HOLDERS;
            tasks.spawn(async move { once(&program, &url, (lock, name), end, pause).await });
        }
    }
    let (mut killed, mut frozen, mut believed) = (Vec::new(), Vec::new(), 0);
    while let Some(taken) = tasks.join_next().await {
        let taken = taken??;
        believed += u64::from(taken.is_believed);
        if taken.end == End::Killed { &mut killed } else { &mut frozen }.push(taken.after.as_secs_f64());
    }
    let none = || Error::internal("no lock was taken over");
    let [killed, frozen] = [killed, frozen].map(Figure::median);
    Ok(Takeover { killed: killed.ok_or_else(none)?, frozen: frozen.ok_or_else(none)?, believed })
}

async fn once(
    program: &WorkerProgram,
    url: &str,
    (lock, key): (Lock, String),
    end: End,
    pause: Duration,
) -> Result<Taken> {
    let mut holder = Worker::start(program, Job::Keep(Keep { key, ttl: Plan::TAKEOVER_TTL }), Some(url)).await?;
    match holder.hear_soon().await? {
        Answer::Took { .. } => {}
        other => return Err(unexpected(&other)),
    }
    let lock = lock.ttl(Plan::TAKEOVER_TTL);
    let ended = async {
        await_waiter(&lock).await?;
        tokio::time::sleep(pause).await;
        match end {
            End::Killed => holder.kill()?,
            End::Frozen => holder.freeze()?,
        }
        Ok(SystemClock.now())
    };
    let (ended, (guard, taken)) = tokio::try_join!(ended, wait(&lock))?;
    let is_believed = match end {
        End::Killed => false,
        End::Frozen => {
            holder.thaw()?;
            holder.tell(&true).await?;
            match holder.hear_soon().await? {
                Answer::Believes { held } => held,
                other => return Err(unexpected(&other)),
            }
        }
    };
    let _ = guard.release().await?;
    Ok(Taken { end, after: taken.since(ended), is_believed })
}

async fn wait(lock: &Lock) -> Result<(Guard, Moment)> {
    let never = || Error::internal(format!("the lock of a holder that was gone stayed locked for {TAKEN_WITHIN:?}"));
    let guard = timeout(TAKEN_WITHIN, lock.acquire()).await.map_err(|_| never())??;
    Ok((guard, SystemClock.now()))
}
