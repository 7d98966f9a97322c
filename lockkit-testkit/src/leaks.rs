//! What many leases leave behind: nothing.

use std::{
    fmt, fs,
    time::{Duration, Instant},
};

use lockkit_core::{Error, Guard, Locker, Outcome, Query};
use tokio::runtime::Handle;

use crate::{AsyncOpen, BoxError, cases::abandon_after, frozen::expect};

/// Tasks that take locks side by side.
const WORKERS: u32 = 4;
/// The locks of each.
const LOCKS: u32 = 2;
/// A ttl that no lease comes to the end of.
const LONG: Duration = Duration::from_secs(20);
/// How long what goes on in the background may take to end.
const SETTLED_WITHIN: Duration = Duration::from_secs(5);
/// Some may come and go: a pool makes another connection, a server is asked for a list. What is lost in one cycle of a
/// hundred comes to more.
const MAY_GROW: u64 = 8;

/// Proves that a store and its client are as they were after so many `cycles`: the file descriptors of this process, the
/// tasks of the present runtime, the locks that are held, and what `stored` counts of the server's keys, rows or nodes.
///
/// A cycle is an acquisition: one that is released, or dropped, renewed by hand, refused to another client, waited for by
/// another, or given up at any moment. All cycles together use eight locks, so that what a store keeps of each does not
/// count. `open` makes a client for each of two processes; in the end all that they had must be gone.
///
/// Descriptors are those of the whole process: **nothing else may happen in it meanwhile**. Reads `/proc`, so Linux only.
///
/// # Errors
/// What grew, with the counts, or what went wrong.
pub async fn cycles_leave_nothing<S, R>(open: impl AsyncOpen, stored: S, cycles: u32) -> Result<(), BoxError>
where
    S: Fn() -> R + Send + Sync,
    R: Future<Output = Result<u64, BoxError>> + Send,
{
    let nothing = || async { Ok(0) };
    // What a process makes once, and keeps: a driver's own thread has descriptors.
    drop(open.open().await?);
    let alone = settled(&nothing, None).await?;
    let mine = Locker::shared_builder(open.open().await?).build();
    let other = Locker::shared_builder(open.open().await?).build();
    // What is made once, such as connections, scripts and directories.
    run(&mine, &other, (cycles / 20).max(WORKERS * 16)).await?;
    let before = settled(&stored, None).await?;
    run(&mine, &other, cycles).await?;
    let after = settled(&stored, Some(&before)).await?;
    expect(after.is_within(&before, MAY_GROW), &format!("after {cycles} cycles there are {after}; before, {before}"))?;
    let held = mine.inspect(&Query::Prefix("leaks/".to_owned())).await?;
    expect(held.is_empty(), &format!("after {cycles} cycles {} locks are still held", held.len()))?;
    // After an error a release is repeated until the lease must have lapsed.
    let shut = tokio::join!(mine.shutdown(2 * LONG), other.shutdown(2 * LONG));
    shut.0.and(shut.1)?;
    drop((mine, other));
    let end = settled(&nothing, Some(&alone)).await?;
    expect(end.is_within(&alone, 0), &format!("without clients there are {end}; before there were any, {alone}"))
}

/// What there is of all that can leak.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Count {
    descriptors: u64,
    tasks: u64,
    stored: u64,
}

impl Count {
    fn now(stored: u64) -> Result<Self, BoxError> {
        let descriptors = u64::try_from(fs::read_dir("/proc/self/fd")?.count())?;
        let tasks = u64::try_from(Handle::current().metrics().num_alive_tasks())?;
        Ok(Self { descriptors, tasks, stored })
    }

    /// What the store keeps is counted exactly.
    fn is_within(&self, before: &Self, more: u64) -> bool {
        let is_within = |now: u64, before: u64| now <= before + more;
        is_within(self.descriptors, before.descriptors)
            && is_within(self.tasks, before.tasks)
            && self.stored <= before.stored
    }
}

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { descriptors, tasks, stored } = self;
        write!(f, "{descriptors} descriptors, {tasks} tasks and {stored} entries in the store")
    }
}

/// Counts when all is quiet: when there is no more than before, or, the first time, twice the same.
async fn settled<S, R>(stored: &S, before: Option<&Count>) -> Result<Count, BoxError>
where
    S: Fn() -> R + Sync,
    R: Future<Output = Result<u64, BoxError>> + Send,
{
    let (start, mut last) = (Instant::now(), None);
    loop {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let now = Count::now(stored().await?)?;
        let is_quiet = before.map_or(last == Some(now), |before| now.is_within(before, 0));
        if is_quiet || start.elapsed() > SETTLED_WITHIN {
            return Ok(now);
        }
        last = Some(now);
    }
}

async fn run(mine: &Locker, other: &Locker, cycles: u32) -> Result<(), BoxError> {
    let mut workers = Vec::new();
    for worker in 0..WORKERS {
        let (mine, other) = (mine.clone(), other.clone());
        workers.push(tokio::spawn(async move {
            for round in 0..cycles / WORKERS {
                let name = format!("leaks/{worker}/{}", round % LOCKS);
                let ended = cycle(&mine, &other, &name, round).await;
                ended.map_err(|error| BoxError::from(format!("cycle {round} of {name}: {error}")))?;
            }
            Ok::<_, BoxError>(())
        }));
    }
    for worker in workers {
        worker.await??;
    }
    Ok(())
}

/// One acquisition, of as many kinds as there are.
async fn cycle(mine: &Locker, other: &Locker, name: &str, round: u32) -> Result<(), BoxError> {
    let theirs = other.lock(name).ttl(LONG);
    // A different moment each time, from at once to long after.
    let moment = Duration::from_micros(u64::from(round) * 37 % 1000);
    match round % 8 {
        0 => release(take(mine, name).await?).await,
        1 => {
            let guard = take(mine, name).await?;
            is_refused(theirs.try_acquire().await)?;
            release(guard).await
        }
        2 => {
            let guard = take(mine, name).await?;
            guard.renew().await?;
            release(guard).await
        }
        3 => {
            drop(take(mine, name).await?);
            Ok(())
        }
        4 => {
            drop(abandon_after(moment, mine.lock(name).ttl(LONG).acquire()).await.transpose()?);
            Ok(())
        }
        5 => {
            let guard = take(mine, name).await?;
            drop(abandon_after(moment, theirs.acquire()).await.transpose()?);
            release(guard).await
        }
        6 => {
            let guard = take(mine, name).await?;
            is_refused(theirs.acquire_within(Duration::from_millis(2)).await)?;
            _ = abandon_after(moment, guard.release()).await.transpose()?;
            Ok(())
        }
        _ => {
            let guard = take(mine, name).await?;
            let (next, released) = tokio::join!(theirs.acquire_within(LONG), release(guard));
            released?;
            release(next?.ok_or("a waiter was forgotten")?).await
        }
    }
}

/// Takes a lock that is free, or will be when a release in the background is done.
async fn take(locker: &Locker, name: &str) -> Result<Guard, BoxError> {
    let guard = locker.lock(name).ttl(LONG).acquire_within(LONG).await?;
    Ok(guard.ok_or("a lock that nobody has was not granted")?)
}

/// A held lock is not granted. On a busy machine a store may answer too late, which is an error, and leaves nothing either.
fn is_refused(asked: Result<Option<Guard>, Error>) -> Result<(), BoxError> {
    match asked {
        Ok(granted) => expect(granted.is_none(), "a held lock was granted"),
        Err(late) if late.is_retryable() => Ok(()),
        Err(error) => Err(error.into()),
    }
}

async fn release(guard: Guard) -> Result<(), BoxError> {
    expect(guard.release().await? == Outcome::Released, "a held lock was not released")
}
