//! One run of CMD under a lease.

use std::{ffi::OsString, time::Duration};

use lockkit::{Clock, LockKey, Locker, SystemClock};

use super::{
    UNDO_WITHIN,
    hold::{HeldLease, Lease},
    lender::Lender,
    margins::Margins,
    nest::{self, Enclosing, Entry},
    supervise::{self, End},
    watchdog::Watchdog,
    work::{Ended, Work},
};
use crate::{
    duration,
    exit::{Failure, LOST, say},
    signals::Signals,
};

/// What runs under the lease.
#[derive(Clone, Copy, Debug)]
pub(super) struct Task<'a> {
    /// The name of the lock.
    pub(super) key: &'a LockKey,
    /// How long the lock is kept from others once CMD has started.
    pub(super) once_per: Option<Duration>,
    /// CMD.
    pub(super) command: &'a [OsString],
}

/// How a run ended.
#[derive(Debug)]
pub(super) enum Finish {
    /// CMD ended by itself, and held the lease until then.
    Ended(Ended),
    /// CMD was stopped, because its lease was lost or would have been: what is to be said of it.
    Stopped(String),
}

/// Runs CMD under the lease and ends the lease.
pub(super) async fn run_under(
    task: &Task<'_>,
    hold: HeldLease,
    locker: &Locker,
    enclosing: &Enclosing,
    signals: &mut Signals,
) -> Result<Finish, Failure> {
    let run = nest::run_id()?;
    let mut lender = None;
    let mut inside = enclosing.clone();
    inside.runs.push(run.clone());
    if let Lease::Own(guard, _) = &hold.lease {
        lender = Some(Lender::open(&run).map_err(|error| Failure::system("open a socket", &error))?);
        let (key, token) = (task.key.clone(), guard.token());
        let HeldLease { ttl, lasts, fence, .. } = hold;
        inside.held.push(Entry { key, token, ttl, lasts, fence, run: run.clone() });
    }
    let margins = Margins::of(hold.lasts);
    let ends = hold.ends();
    let until = ends - margins.kill;
    let started = hold.loan().and_then(|loan| Watchdog::start(&run, until, loan));
    let mut watchdog = started.map_err(|error| Failure::system("start the watchdog of CMD", &error))?;
    let vars = [
        ("LOCKKIT_KEY", task.key.as_str().to_owned()),
        ("LOCKKIT_FENCE", hold.fence.to_string()),
        ("LOCKKIT_TTL_MS", hold.ttl.as_millis().to_string()),
        (nest::HELD, inside.held_text()),
        (nest::RUNS, inside.runs_text()),
    ];
    // This process may have stood still since the grant, for longer than the lease lasts. A watchdog that found nothing to
    // kill meanwhile has left.
    let refused = if ends.since(SystemClock.now()) <= margins.term {
        Some(format!("CMD was not started: nothing is left of its lease of {:?}", task.key))
    } else if watchdog.is_gone() {
        Some(format!("CMD was not started: no watchdog is there for its lease of {:?}", task.key))
    } else {
        None
    };
    if let Some(refused) = refused {
        watchdog.dismiss().await;
        drop(hold);
        return Ok(Finish::Stopped(refused));
    }
    // The terminal may have sent Ctrl-C to its group while CMD was not in it yet. Signals come in when the runtime turns.
    tokio::task::yield_now().await;
    if let Some(signal) = signals.arrived_end() {
        watchdog.dismiss().await;
        drop(hold);
        drop(locker.shutdown(UNDO_WITHIN).await);
        return Ok(Finish::Ended(Ended::waiting(signal)));
    }
    let (mut work, report) = match Work::start(task.command, vars, run, until, task.once_per.is_some()) {
        Ok(started) => started,
        Err(error) => {
            watchdog.dismiss().await;
            drop(hold);
            return Err(Failure::system("start CMD", &error));
        }
    };
    watchdog.guard(work.targets());
    let begun = async {
        match report {
            Some(report) => report.has_begun().await,
            None => false,
        }
    };
    let liveness = &locker.info().capability.liveness;
    let supervised = supervise::supervise(&hold, liveness, margins, &mut work, &mut watchdog, lender, signals);
    let (end, has_begun) = tokio::join!(supervised, begun);
    // Dismissed before CMD is reaped: until then its number can't be another's.
    let bitten = watchdog.dismiss().await;
    let ended = work.reap().map_err(|error| Failure::system("wait for CMD", &error))?;
    let key = task.key;
    // A host that can't execute CMD does not keep the others from running it, nor does one whose CMD was stopped: its work is half done.
    if let (Lease::Own(guard, _), Some(window), End::Over) = (&hold.lease, task.once_per, &end)
        && has_begun
        && !bitten
    {
        // It can only be lost by now, which its release tells.
        drop(guard.keep_for(window));
    }
    match end {
        End::Stopped { why, in_time: true } => {
            Ok(Finish::Stopped(format!("stopped CMD before its lease of {key:?} could lapse: {why}")))
        }
        End::Stopped { why, in_time: false } => Ok(Finish::Stopped(format!(
            "stopped CMD, its work may have overlapped with another's: the lease of {key:?} is lost: {why}"
        ))),
        End::Over if bitten => Ok(Finish::Stopped(format!(
            "stopped CMD before its lease of {key:?} could lapse: lockkit itself stood still"
        ))),
        End::Over => released(task, hold, locker, signals).await.map(|()| Finish::Ended(ended)),
    }
}

/// Ends the lease after CMD has ended by itself.
async fn released(task: &Task<'_>, hold: HeldLease, locker: &Locker, signals: &mut Signals) -> Result<(), Failure> {
    let left = hold.remaining();
    match hold.release().await {
        Ok(None) => Ok(()),
        Ok(Some(why)) => Err(Failure::new(
            LOST,
            format!(
                "CMD has ended, its work may have overlapped with another's: the lease of {:?} is lost: {why}",
                task.key
            ),
        )),
        Err(error) if task.once_per.is_some() => {
            let within = duration::spoken(left);
            say(&format!(
                "{:?}: unless the store answers within {within}, CMD may run again in this window: {error}",
                task.key
            ));
            tokio::select! {
                told = locker.shutdown(left) => drop(told),
                _ = signals.next() => {}
            }
            Ok(())
        }
        Err(error) => {
            // The lease was held until CMD's end. That it lasts longer than need be is no harm to CMD's work.
            if locker.shutdown(UNDO_WITHIN).await.is_err() {
                say(&format!("{:?} stays locked for up to {}: {error}", task.key, duration::spoken(left)));
            }
            Ok(())
        }
    }
}
