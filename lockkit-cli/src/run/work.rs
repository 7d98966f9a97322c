//! CMD as a child process.

use std::{
    ffi::OsString,
    io,
    os::unix::process::{CommandExt, ExitStatusExt},
    process::Child,
    time::Duration,
};

use lockkit::Moment;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, waitid};
use tokio::{
    signal::unix::{SignalKind, signal},
    time::timeout,
};

use super::{exec, process::started, report::Report, signals, targets::Targets};

/// How often to look whether CMD has ended, with or without SIGCHLD: the parent of this process may have blocked that signal.
const LOOK_ANYWAY: Duration = Duration::from_secs(1);

/// CMD, started and not yet reaped.
#[derive(Debug)]
pub(super) struct Work {
    child: Child,
    targets: Targets,
    children: tokio::signal::unix::Signal,
}

impl Work {
    /// Starts CMD, unless that moment has passed by then. Call it on the main thread: CMD dies with the thread that started
    /// it. If it `reports`, it tells when it has begun.
    pub(super) fn start<const N: usize>(
        command: &[OsString],
        vars: [(&str, String); N],
        run: String,
        until: Moment,
        reports: bool,
    ) -> io::Result<(Self, Option<Report>)> {
        // With a terminal, CMD has to be in the group that the terminal talks to, which is ours and our shell's affair.
        let own_group = signals::terminal().is_err();
        // Before the child exists, so that its end can't be missed.
        let children = signal(SignalKind::child())?;
        let mut starter = exec::this_program();
        starter.arg(exec::VERB).arg(std::process::id().to_string()).arg(until.as_nanos().to_string());
        let report = if reports { Some(Report::of(starter.arg(exec::REPORT))?) } else { None };
        starter.arg("--").args(command).envs(vars);
        if own_group {
            starter.process_group(0);
        }
        let child = starter.spawn()?;
        let leader = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let started = leader.and_then(started);
        let targets = Targets { leader, started, own_group, ..Targets::marked(run) };
        Ok((Self { child, targets, children }, report))
    }

    pub(super) fn targets(&self) -> &Targets {
        &self.targets
    }

    /// Returns when CMD has ended. It is not reaped, so that its number stays its own.
    pub(super) async fn ended(&mut self) {
        while !self.has_ended() {
            drop(timeout(LOOK_ANYWAY, self.children.recv()).await);
        }
    }

    fn has_ended(&self) -> bool {
        let Some(leader) = self.targets.leader else { return true };
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        // An error means that there is no such child any more.
        !matches!(waitid(WaitId::Pid(leader), options), Ok(None))
    }

    /// Buries CMD.
    pub(super) fn reap(mut self) -> io::Result<Ended> {
        let status = self.child.wait()?;
        let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
        let code = code.and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX);
        Ok(Ended { code, interrupted: status.signal() == Some(Signal::INT.as_raw()) && signals::in_foreground() })
    }
}

/// How CMD ended, or the wait for its lock.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ended {
    /// The exit code.
    pub(super) code: u8,
    /// Whether it died of Ctrl-C.
    pub(super) interrupted: bool,
}

impl Ended {
    /// The end of the wait for a lock, by a signal.
    pub(super) fn waiting(signal: Signal) -> Self {
        let code = u8::try_from(128 + signal.as_raw()).unwrap_or(u8::MAX);
        Self { code, interrupted: signal == Signal::INT && signals::in_foreground() }
    }
}
