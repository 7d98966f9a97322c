//! `lockkit run`: run a command while holding a lock.
//!
//! ```text
//! lockkit run ──spawns── lockkit __exec ──becomes── CMD      dies with its parent (Linux)
//!      └──────spawns── lockkit __watch                       kills CMD when this process dies or stands still
//! ```
//!
//! The lock is acquired or, inside a run that holds it already, borrowed ([`nest`]). Then two things race: CMD's end
//! and the lease's ([`under`], [`supervise`]). CMD must be gone before the lease can lapse. [`elect`] does so again and again.

mod acquire;
mod borrow;
pub(crate) mod elect;
pub(crate) mod exec;
mod hold;
mod kind;
mod lender;
mod margins;
mod marks;
mod nest;
mod notify;
mod process;
mod report;
mod signals;
mod supervise;
mod targets;
mod under;
pub(crate) mod watchdog;
mod work;

use std::{ffi::OsString, time::Duration};

use clap::Args as ClapArgs;
use lockkit::{Guard, HolderInfo, Lock, LockKey, Locker};

use self::{
    hold::HeldLease,
    kind::Kind,
    nest::Enclosing,
    notify::RenewalNotify,
    under::{Finish, Task, run_under},
    work::Ended,
};
use crate::{
    duration,
    exit::{Exit, Failure, LOST, USAGE},
    signals::Signals,
    store::{self, StoreArgs, block_on},
    who,
};

/// How long the background may take to release what was given up or lost, before the exit.
const UNDO_WITHIN: Duration = Duration::from_secs(1);

/// Run a command while holding a lock
///
/// CMD sees LOCKKIT_KEY, LOCKKIT_FENCE (hand it to what the lock protects) and LOCKKIT_TTL_MS (how long the lease lasts when
/// it is not renewed: on ZooKeeper no longer than the session). Its exit status passes
/// through; 128+N if signal N killed it. The lock is released when CMD itself ends; processes that CMD leaves behind in the
/// background run on without the lock.
///
/// If the lease can't be renewed, CMD and all that it started get TERM, then KILL, so that they are gone before the
/// lease can lapse: exit status 74. The same happens if lockkit itself is killed or stands still. (If the whole machine
/// stood still, suspended for longer than the lease, CMD may go on for a quarter of a second after it.) lockkit can't kill a
/// process that runs as another user (sudo, setuid). A process that has lost its parents is not found if it has cleared its
/// environment, or takes longer than a tenth of a second to load a program.
///
/// Inside CMD, lockkit run on the same key does not wait for itself: it runs on the lease of the enclosing run, which
/// lasts until both have ended. Several inner runs side by side do not exclude each other. The inner run is refused if the
/// outer run's mode does not cover it (--read does not cover --write), or if the outer run belongs to another user, since it
/// would wait for its own parent. While the outer run stands still, the inner one waits for its answer, even with --no-wait.
///
/// Signals: TERM, INT, HUP and QUIT are passed to CMD and all that it started, USR1 and USR2 to CMD alone. With a
/// controlling terminal CMD shares the process group, so that it can read from the terminal, pipes and job control work,
/// and Ctrl-C reaches it directly; INT and QUIT are then passed on only from the background. Without one CMD leads a
/// group of its own. CMD goes on ignoring signals that were ignored before (nohup).
#[derive(Debug, ClapArgs)]
pub(crate) struct Args {
    #[command(flatten)]
    store: StoreArgs,
    /// Name of the lock
    #[arg(long, value_name = "NAME", value_parser = who::key)]
    key: LockKey,
    #[command(flatten)]
    kind: Kind,
    /// How long the lease lasts when it is not renewed: how long others wait after a crash
    #[arg(long, value_name = "TIME", value_parser = duration::parse, default_value = "30s")]
    ttl: Duration,
    /// Give up, with exit status 75, when the lock does not become free within this time; without it, wait for ever, unless the
    /// store is away
    #[arg(long, value_name = "TIME", value_parser = duration::parse, conflicts_with = "no_wait")]
    wait: Option<Duration>,
    /// Give up at once, with exit status 75, when the lock is not free
    #[arg(long)]
    no_wait: bool,
    /// Run CMD once in this time, among all that use the lock. The lock stays taken for all of that time, counted from when it
    /// was taken, whatever CMD's exit status, unless CMD can't be executed. Unless --wait is given, a later run gives up at once,
    /// with exit status 75. Choose a time shorter than that from one start to the next: 23h for a daily job. If lockkit
    /// has to stop CMD, or is killed itself, others may run it as soon as the lease is free
    #[arg(long, value_name = "TIME", value_parser = duration::parse, conflicts_with_all = ["read", "permit"])]
    once_per: Option<Duration>,
    /// The holder's name, as shown to others; by default CMD@host:pid
    #[arg(long, value_name = "TEXT", value_parser = store::text)]
    holder: Option<String>,
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "CMD")]
    command: Vec<OsString>,
}

impl Args {
    fn wait(&self) -> Option<Duration> {
        let is_try = self.no_wait || self.once_per.is_some() && self.wait.is_none();
        if is_try { Some(Duration::ZERO) } else { self.wait }
    }
}

/// The holder's name that was given, or one that tells where CMD runs.
fn holder(given: Option<&str>, command: &[OsString]) -> HolderInfo {
    let text = given.map(str::to_owned).unwrap_or_else(|| {
        let program = command.first().map(std::path::Path::new).and_then(|path| path.file_name());
        let host = rustix::system::uname();
        let program = program.unwrap_or_default().to_string_lossy();
        format!("{program}@{}:{}", host.nodename().to_string_lossy(), std::process::id())
    });
    HolderInfo::new(&text)
}

/// Refuses what can't be meant to be CMD.
fn admit(command: &[OsString]) -> Result<(), Failure> {
    if command.first().and_then(|program| program.to_str()).is_some_and(store::is_store_url) {
        return Err(Failure::new(USAGE, "CMD is the URL of a store; that is given with --store, or in LOCKKIT_STORE"));
    }
    Ok(())
}

/// Refuses the store that no two processes share.
fn admit_store(locker: &Locker) -> Result<(), Failure> {
    if locker.info().scheme == "memory" {
        let instead = "give a store that processes share, such as --store redis://host:6379";
        let message = format!("memory: excludes nobody, for every process has a memory of its own; {instead}");
        return Err(Failure::new(USAGE, message));
    }
    Ok(())
}

pub(crate) fn run(args: Args) -> Exit {
    if args.once_per.is_some_and(|time| time.is_zero()) {
        return Err(Failure::new(USAGE, "--once-per takes a time above zero, such as 1h"));
    }
    admit(&args.command)?;
    // All on this one thread: the parent-death signal of CMD comes when the thread that started it ends.
    if args.once_per.is_some() {
        exec::find(&args.command)?;
    }
    let ended = block_on(async {
        let mut signals =
            Signals::listen(&signals::FORWARDED).map_err(|error| Failure::system("listen for signals", &error))?;
        let notify = RenewalNotify::default();
        let builder = tokio::select! {
            builder = args.store.builder() => builder?,
            signal = signals.next() => return Ok(Ended::waiting(signal)),
        };
        let locker = builder.holder(holder(args.holder.as_deref(), &args.command)).observer(notify.clone()).build();
        admit_store(&locker)?;
        let enclosing = Enclosing::from_env();
        let obtained = tokio::select! {
            hold = obtain(&args, &locker, &enclosing, notify) => hold,
            signal = signals.next() => {
                // What was asked for must not come to be granted to nobody.
                drop(locker.shutdown(UNDO_WITHIN).await);
                return Ok(Ended::waiting(signal));
            }
        };
        let result = match obtained {
            Ok(hold) => {
                let task = Task { key: &args.key, once_per: args.once_per, command: &args.command };
                match run_under(&task, hold, &locker, &enclosing, &mut signals).await {
                    Ok(Finish::Ended(ended)) => Ok(ended),
                    Ok(Finish::Stopped(why)) => Err(Failure::new(LOST, why)),
                    Err(failure) => Err(failure),
                }
            }
            Err(failure) => Err(failure),
        };
        if result.is_err() {
            // Others should not have to wait until what may be left of the lease lapses.
            drop(locker.shutdown(UNDO_WITHIN).await);
        }
        result
    })?;
    if ended.interrupted {
        exec::die_of_interrupt();
    }
    Ok(ended.code)
}

/// The lease of an enclosing run, or one of our own.
async fn obtain(
    args: &Args,
    locker: &Locker,
    enclosing: &Enclosing,
    notify: RenewalNotify,
) -> Result<HeldLease, Failure> {
    if let Some(borrowed) = borrow::borrow(locker, (&args.key, args.kind), enclosing, &notify).await? {
        if args.once_per.is_some() {
            let message = format!("an enclosing run holds {:?} already: give --once-per to that one", args.key);
            return Err(Failure::new(USAGE, message));
        }
        return Ok(HeldLease::borrowed(borrowed));
    }
    let lock: Lock = args.kind.lock(locker, &args.key).ttl(args.ttl).keep_for(args.once_per.unwrap_or_default());
    let liveness = &locker.info().capability.liveness;
    let guard = acquire::acquire(&lock, &args.key, args.wait(), liveness).await?;
    // Not before CMD is started: what goes wrong until then must not cost the others their window.
    guard.keep_for(Duration::ZERO)?;
    Ok(own(guard, args.ttl, locker, notify).await?)
}

/// A lease that was just granted, with enough left of it to begin.
async fn own(guard: Guard, ttl: Duration, locker: &Locker, notify: RenewalNotify) -> lockkit::Result<HeldLease> {
    // A grant that came slowly has little left, and CMD would be stopped as soon as it started.
    if guard.remaining() < ttl / 2 {
        guard.renew().await?;
    }
    let ttl = match locker.info().capability.liveness.session {
        // The session decides how long the lease lasts, and it may give less than was asked for.
        Some(_) => ttl.min(guard.remaining()),
        None => ttl,
    };
    Ok(HeldLease::own(guard, ttl, notify))
}
