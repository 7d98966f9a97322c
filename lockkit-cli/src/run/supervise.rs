//! The race between the end of CMD and the end of the lease.

use std::{pin::pin, time::Duration};

use lockkit::{Clock, Liveness, Moment, SystemClock};
use rustix::process::Signal;
use tokio::time::sleep;

use super::{
    hold::HeldLease,
    lender::Lender,
    margins::{AFTER_LOSS, Margins},
    process::Process,
    targets::Targets,
    watchdog::Watchdog,
    work::Work,
};
use crate::{exit::say_aside, signals::Signals};

/// The longest sleep. Sleep stands still while the machine is suspended, the lease does not.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);

/// How often processes whose end is awaited are looked at again.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// How the race went.
#[derive(Debug)]
pub(super) enum End {
    /// CMD ended by itself.
    Over,
    /// CMD was stopped.
    Stopped {
        /// Why.
        why: String,
        /// Whether that was done before the lease could lapse.
        in_time: bool,
    },
}

/// Returns when CMD has ended, or was stopped because its lease would have.
pub(super) async fn supervise(
    hold: &HeldLease,
    liveness: &Liveness,
    mut margins: Margins,
    work: &mut Work,
    watchdog: &mut Watchdog,
    lender: Option<Lender>,
    signals: &mut Signals,
) -> End {
    let targets = work.targets().clone();
    let mut is_said = false;
    let mut keep = pin!(hold.keep());
    let mut over = Box::pin(async {
        match lender {
            Some(lender) => lender.serve_until(work.ended()).await,
            None => work.ended().await,
        }
    });
    let why = loop {
        let ends = hold.ends();
        let left = ends.since(SystemClock.now());
        if left <= margins.term {
            break hold.trouble();
        }
        replace_if_killed(watchdog, hold, ends - margins.kill, &targets, &mut is_said);
        watchdog.allow(ends - margins.kill);
        tokio::select! {
            // The lease first: after a freeze it must not be said that CMD ended in time.
            biased;
            never = &mut keep => match never {},
            () = hold.changed() => margins = Margins::of(hold.lasts_since_renewal(liveness)),
            () = sleep((left - margins.term).min(LONGEST_SLEEP)) => {}
            () = &mut over => return End::Over,
            signal = signals.next() => targets.forward(signal),
        }
    };
    // Before TERM: from then on it must make no difference whether this process stands still.
    watchdog.shorten(kill_at(hold, margins));
    let known = targets.signal(Signal::TERM);
    // What CMD started has as much time as CMD: a shell without a trap ends at once, and leaves behind what it waited for.
    let all_ended = async {
        (&mut over).await;
        while known.iter().any(Process::is_running) {
            sleep(LOOK_AGAIN).await;
        }
    };
    tokio::select! {
        () = all_ended => {}
        () = grace(hold, margins, watchdog) => {}
    }
    // Also when all of them have ended: they may have started others since.
    let mut left = targets.kill(known);
    if !left.is_empty() {
        let message = "CMD, or a process that it started, is still there after it was killed; the lock is kept until that process ends";
        say_aside(message.to_owned());
    }
    // Dropping the lender tells those who borrowed from it and were out of reach.
    drop(over);
    let mut ended = Box::pin(work.ended());
    loop {
        tokio::select! {
            () = &mut ended => break,
            signal = signals.next() => targets.forward(signal),
        }
    }
    // What could not be killed may still write. Its lock is not given back meanwhile.
    loop {
        left.retain(Process::is_running);
        if left.is_empty() || hold.remaining().is_zero() {
            break;
        }
        tokio::select! {
            never = &mut keep => match never {},
            () = sleep(LOOK_AGAIN) => {}
            signal = signals.next() => targets.forward(signal),
        }
    }
    End::Stopped { why, in_time: left.is_empty() && !hold.remaining().is_zero() }
}

/// Starts another watchdog in the place of one that was killed, and says so. Why that can't be done is said once, and it is tried again.
fn replace_if_killed(watchdog: &mut Watchdog, hold: &HeldLease, until: Moment, targets: &Targets, is_said: &mut bool) {
    if !watchdog.was_killed() {
        return;
    }
    match hold.loan().and_then(|loan| Watchdog::start(&targets.run, until, loan)) {
        Ok(mut other) => {
            other.guard(targets);
            *watchdog = other;
            say_aside("the watchdog of CMD was killed: another one has taken its place".to_owned());
        }
        Err(_) if *is_said => {}
        Err(error) => {
            *is_said = true;
            say_aside(format!("the watchdog of CMD was killed, and no other could be started: {error}"));
        }
    }
}

/// When CMD gets KILL if it gets TERM now.
fn kill_at(hold: &HeldLease, margins: Margins) -> Moment {
    let (now, ends) = (SystemClock.now(), hold.ends());
    if hold.remaining().is_zero() { now + AFTER_LOSS } else { ends - margins.kill }
}

/// The time between TERM and KILL.
async fn grace(hold: &HeldLease, margins: Margins, watchdog: &mut Watchdog) {
    let until_kill = sleep(kill_at(hold, margins).since(SystemClock.now()));
    let after_loss = async {
        hold.lost().await;
        watchdog.shorten(SystemClock.now() + AFTER_LOSS);
        sleep(AFTER_LOSS).await;
    };
    tokio::select! {
        () = until_kill => {}
        () = after_loss => {}
    }
}
