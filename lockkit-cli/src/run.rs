//! `lockkit run`: run a command while holding a lock.
//!
//! ```text
//! lockkit run ──spawns── lockkit __exec ──becomes── CMD      dies with its parent (Linux)
//!      └──────spawns── lockkit __watch                       kills CMD when this process dies or stands still
//! ```
//!
//! The lock is acquired or, inside a run that holds it already, borrowed ([`nest`]). Then two things race: CMD's end
//! and the lease's ([`supervise`]). CMD must be gone before the lease can lapse.

mod acquire;
mod borrow;
pub(crate) mod exec;
mod hold;
mod kind;
mod lender;
mod nest;
mod notify;
mod plan;
mod signals;
mod supervise;
mod targets;
pub(crate) mod watchdog;
mod work;

use std::{ffi::OsString, time::Duration};

use clap::Args as ClapArgs;
use lockkit::{HolderInfo, Lock, LockKey, Locker};

use self::{
    hold::Hold,
    kind::Kind,
    lender::Lender,
    nest::{Enclosing, Entry},
    notify::RenewalNotify,
    plan::Plan,
    supervise::End,
    watchdog::Watchdog,
    work::{Ended, Work},
};
use crate::{
    duration,
    exit::{Exit, Failure, LOST, USAGE, say},
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
/// through; 128+N if signal N killed it. The lock is released when CMD itself ends; what it leaves behind in the
/// background runs on without it.
///
/// If the lease can't be renewed, CMD and all that it started get TERM, then KILL, so that they are gone before the
/// lease can lapse: exit status 74. The same happens if lockkit itself is killed or stands still.
///
/// Inside CMD, lockkit run on the same key does not wait for itself: it runs on the lease of the enclosing run, which
/// lasts until both have ended. If that run holds the lock in a way that does not cover what is asked for, as --read does
/// not cover --write, it is refused: it would wait for itself.
///
/// Signals: TERM, INT, HUP and QUIT are passed to CMD and all that it started, USR1 and USR2 to CMD alone. With a
/// controlling terminal CMD shares the process group, so that it can read from the terminal, pipes and job control work,
/// and Ctrl-C reaches it directly; INT and QUIT are then passed on only from the background. Without one CMD leads a
/// group of its own. What was ignored, as under nohup, stays ignored.
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
    /// Give up, with exit status 75, when the lock does not become free within this time; without it, wait for ever
    #[arg(long, value_name = "TIME", value_parser = duration::parse, conflicts_with = "no_wait")]
    wait: Option<Duration>,
    /// Give up at once, with exit status 75, when the lock is not free
    #[arg(long)]
    no_wait: bool,
    /// Run CMD once in this time among all that use the lock: it is kept for so long from when it was taken, also if CMD ends sooner,
    /// and whatever its exit status is. Unless --wait is given, a run that comes later gives up at once, with exit status 75. The
    /// time has to be shorter than that from one start to the next: 23h for what is started once a day. If lockkit itself is
    /// killed, others may run CMD when the lease has lapsed
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

    fn holder(&self) -> HolderInfo {
        let text = self.holder.clone().unwrap_or_else(|| {
            let program = self.command.first().map(std::path::Path::new).and_then(|path| path.file_name());
            let host = rustix::system::uname();
            let program = program.unwrap_or_default().to_string_lossy();
            format!("{program}@{}:{}", host.nodename().to_string_lossy(), std::process::id())
        });
        HolderInfo::new(&text)
    }
}

pub(crate) fn run(args: Args) -> Exit {
    if args.once_per.is_some_and(|time| time.is_zero()) {
        return Err(Failure::new(USAGE, "--once-per takes a time above zero, such as 1h"));
    }
    if args.command.first().and_then(|program| program.to_str()).is_some_and(store::is_store_url) {
        return Err(Failure::new(USAGE, "CMD is the URL of a store; that is given with --store, or in LOCKKIT_STORE"));
    }
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
        let locker = builder.holder(args.holder()).observer(notify.clone()).build();
        if locker.info().scheme == "memory" {
            let instead = "give a store that processes share, such as --store redis://host:6379";
            let message = format!("memory: excludes nobody, for every process has a memory of its own; {instead}");
            return Err(Failure::new(USAGE, message));
        }
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
            Ok(hold) => run_under(&args, hold, &locker, &enclosing, &mut signals).await,
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
async fn obtain(args: &Args, locker: &Locker, enclosing: &Enclosing, notify: RenewalNotify) -> Result<Hold, Failure> {
    if let Some(borrowed) = borrow::borrow(locker, (&args.key, args.kind), enclosing, &notify).await? {
        if args.once_per.is_some() {
            let message = format!("an enclosing run holds {:?} already: give --once-per to that one", args.key);
            return Err(Failure::new(USAGE, message));
        }
        return Ok(Hold::Borrowed(borrowed));
    }
    let lock: Lock = args.kind.lock(locker, &args.key).ttl(args.ttl).keep_for(args.once_per.unwrap_or_default());
    let liveness = &locker.info().capability.liveness;
    let guard = acquire::acquire(&lock, &args.key, args.wait(), liveness).await?;
    // Not before CMD is started: what goes wrong until then must not cost the others their window.
    guard.keep_for(Duration::ZERO)?;
    // A grant that came slowly has little left, and CMD would be stopped as soon as it started.
    if guard.remaining() < args.ttl / 2 {
        guard.renew().await?;
    }
    let ttl = match liveness.session {
        // The session decides how long the lease lasts, and it may give less than was asked for.
        Some(_) => args.ttl.min(guard.remaining()),
        None => args.ttl,
    };
    Ok(Hold::own(guard, ttl, notify))
}

/// Runs CMD under the lease and ends the lease.
async fn run_under(
    args: &Args,
    hold: Hold,
    locker: &Locker,
    enclosing: &Enclosing,
    signals: &mut Signals,
) -> Result<Ended, Failure> {
    let run = nest::run_id()?;
    let mut lender = None;
    let mut inside = enclosing.clone();
    inside.runs.push(run.clone());
    if let Hold::Own(own) = &hold {
        lender = Some(Lender::open(&run).map_err(|error| Failure::system("open a socket", &error))?);
        let (key, token) = (args.key.clone(), own.token());
        inside.held.push(Entry { key, token, ttl: hold.ttl(), lasts: hold.lasts(), run: run.clone() });
    }
    let mut watchdog = Watchdog::start(&run).map_err(|error| Failure::system("start the watchdog of CMD", &error))?;
    let plan = Plan::of(hold.lasts());
    watchdog.allow(hold.remaining(), &plan);
    let vars = [
        ("LOCKKIT_KEY", args.key.as_str().to_owned()),
        ("LOCKKIT_FENCE", hold.fence().to_string()),
        ("LOCKKIT_TTL_MS", hold.ttl().as_millis().to_string()),
        (nest::HELD, inside.held_text()),
        (nest::RUNS, inside.runs_text()),
    ];
    let mut work = match Work::start(&args.command, vars, run) {
        Ok(work) => work,
        Err(error) => {
            watchdog.dismiss().await;
            drop(hold);
            return Err(Failure::system("start CMD", &error));
        }
    };
    if let (Hold::Own(own), Some(window)) = (&hold, args.once_per) {
        own.keep_for(window)?;
    }
    watchdog.guard(work.targets());
    let end = supervise::supervise(&hold, &plan, &mut work, &mut watchdog, lender, signals).await;
    // Dismissed before CMD is reaped: until then its number can't be another's.
    let bitten = watchdog.dismiss().await;
    let ended = work.reap().map_err(|error| Failure::system("wait for CMD", &error))?;
    match end {
        End::Stopped { why, in_time: true } => {
            Err(Failure::new(LOST, format!("stopped CMD before its lease of {:?} could lapse: {why}", args.key)))
        }
        End::Stopped { why, in_time: false } => Err(Failure::new(
            LOST,
            format!(
                "stopped CMD, its work may have overlapped with another's: the lease of {:?} is lost: {why}",
                args.key
            ),
        )),
        End::Over if bitten => Err(Failure::new(
            LOST,
            format!("stopped CMD before its lease of {:?} could lapse: lockkit itself stood still", args.key),
        )),
        End::Over => released(args, hold, locker, signals).await.map(|()| ended),
    }
}

/// Ends the lease after CMD has ended by itself.
async fn released(args: &Args, hold: Hold, locker: &Locker, signals: &mut Signals) -> Result<(), Failure> {
    let left = hold.remaining();
    match hold.release().await {
        Ok(None) => Ok(()),
        Ok(Some(why)) => Err(Failure::new(
            LOST,
            format!(
                "CMD has ended, its work may have overlapped with another's: the lease of {:?} is lost: {why}",
                args.key
            ),
        )),
        Err(error) if args.once_per.is_some() => {
            let within = duration::spoken(left);
            say(&format!(
                "{:?}: unless the store answers within {within}, CMD may run again in this window: {error}",
                args.key
            ));
            tokio::select! {
                told = locker.shutdown(left) => drop(told),
                _ = signals.next() => {}
            }
            Ok(())
        }
        Err(error) => {
            // The lease was held until CMD's end. That it lasts longer than need be is no harm to CMD's work.
            say(&format!("{:?} stays locked for up to {}: {error}", args.key, duration::spoken(left)));
            Ok(())
        }
    }
}
