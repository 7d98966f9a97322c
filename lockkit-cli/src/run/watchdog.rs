//! `lockkit __watch`: a second process that kills CMD when `lockkit run` can't.
//!
//! CMD must not go on without a lease when `lockkit run` is killed or stands still: stopped, swapped out, or on a
//! machine that was suspended. The watchdog is told over a pipe until when CMD may run, and believes what it was told
//! last, which may be sooner than before. When that moment passes, or the pipe is closed without a farewell, it kills.
//!
//! Signals that are meant for CMD do not end it: a service manager sends them to all processes of a service. Should it be
//! killed all the same, `lockkit run` starts another.
//!
//! One line per message: `work LEADER OWN_GROUP STARTED`, `until NANOSECONDS`, `done`.

use std::{
    io::{self, Write},
    os::{fd::OwnedFd, unix::process::CommandExt},
    process::{Child, Stdio},
    time::{Duration, Instant},
};

use clap::Args as ClapArgs;
use lockkit::{Clock, Moment, SystemClock};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::Pid,
};

use super::{exec::this_program, nest, signals::FORWARDED, targets::Targets};
use crate::{
    exit::{Exit, Failure},
    signals::Signals,
    store::{URL_VARIABLE, block_on},
};

/// The hidden subcommand.
pub(crate) const VERB: &str = "__watch";

/// How the watchdog ends when it had to kill.
const BITTEN: u8 = 1;

/// The longest sleep. Sleep stands still while the machine is suspended, the deadline does not.
const LONGEST_SLEEP: Duration = Duration::from_millis(250);

/// How long the watchdog may take to leave. It takes longest when it is in the middle of killing.
const GONE_WITHIN: Duration = Duration::from_secs(1);

/// Kill what carries a mark when standard input says so
#[derive(Debug, ClapArgs)]
pub(crate) struct Args {
    /// The mark
    run: String,
    /// Until when CMD may run, in nanoseconds since the machine started
    until: u64,
}

/// The leash on the watchdog, in the hand of `lockkit run`.
#[derive(Debug)]
pub(super) struct Watchdog {
    child: Child,
    /// What it was told last of the time that CMD has.
    last: Moment,
}

impl Watchdog {
    /// Starts it, with the time that CMD has: this process may stand still before it can tell anything. It keeps `loan` open for as long as
    /// it is there, for what it is to kill may outlive this process.
    pub(super) fn start(run: &str, until: Moment, loan: Option<OwnedFd>) -> io::Result<Self> {
        let mut command = this_program();
        command.arg(VERB).arg(run).arg(until.as_nanos().to_string());
        // A run around this one must not take it for a part of its CMD: it has to outlive that.
        command.env_remove(nest::HELD).env_remove(nest::RUNS).env(nest::WATCHDOG, "1");
        // It asks no store.
        command.env_remove(URL_VARIABLE);
        // It must not die of the Ctrl-C that is meant for CMD, nor keep open what somebody reads CMD's output from.
        let loan = loan.map_or_else(Stdio::null, Stdio::from);
        command.process_group(0).stdin(Stdio::piped()).stdout(loan).stderr(Stdio::null());
        let child = command.spawn()?;
        if let Some(pipe) = &child.stdin {
            // One that stands still must not make this process do so, once the pipe is full.
            rustix::io::ioctl_fionbio(pipe, true)?;
        }
        Ok(Self { child, last: until })
    }

    /// Allows CMD to run until then. What is allowed may be less than it was.
    pub(super) fn allow(&mut self, until: Moment) {
        // One that stood still so long that the pipe is full is told the next time.
        if self.last != until && self.tell(&format!("until {}\n", until.as_nanos())) {
            self.last = until;
        }
    }

    /// Allows CMD to run until then at most.
    pub(super) fn shorten(&mut self, until: Moment) {
        self.allow(self.last.min(until));
    }

    /// Says whom to kill.
    pub(super) fn guard(&mut self, targets: &Targets) {
        if let Some(leader) = targets.leader {
            let started = targets.started.unwrap_or_default();
            self.tell(&format!("work {} {} {started}\n", leader.as_raw_nonzero(), targets.own_group));
        }
    }

    /// Whether it has left: it had to kill, or was killed.
    pub(super) fn is_gone(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }

    /// Whether it has left although it had nothing to kill.
    pub(super) fn was_killed(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(Some(status)) if status.code() != Some(i32::from(BITTEN)))
    }

    /// Ends the watch; returns whether the watchdog had to kill. The lease is renewed meanwhile.
    pub(super) async fn dismiss(&mut self) -> bool {
        self.tell("done\n");
        drop(self.child.stdin.take());
        let patience = Instant::now() + GONE_WITHIN;
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => return status.code() == Some(i32::from(BITTEN)),
                Ok(None) if Instant::now() < patience => tokio::time::sleep(Duration::from_millis(1)).await,
                // It stands still.
                _ => {
                    drop(self.child.kill().and_then(|()| self.child.wait()));
                    return false;
                }
            }
        }
    }

    /// Sends a message, and returns whether it was sent. If the watchdog was killed, CMD still dies with this process, this
    /// process still minds the deadline, and another watchdog is started soon.
    fn tell(&mut self, message: &str) -> bool {
        self.child.stdin.as_mut().is_some_and(|pipe| pipe.write_all(message.as_bytes()).is_ok())
    }
}

/// What the watchdog knows.
#[derive(Debug)]
struct Watch {
    targets: Targets,
    until: Moment,
    heard: Vec<u8>,
    done: bool,
}

pub(crate) fn run(args: &Args) -> Exit {
    block_on(async {
        // Signals that are caught do not end this process. Nobody has to read them.
        let _caught = Signals::listen(&FORWARDED).map_err(|error| Failure::system("listen for signals", &error))?;
        watch(args)
    })
}

/// Blocks the only thread, for nothing else has to be done here.
fn watch(args: &Args) -> Exit {
    let targets = Targets::marked(args.run.clone());
    let until = Moment::from_nanos(args.until);
    let mut watch = Watch { targets, until, heard: Vec::new(), done: false };
    let bite = watch.listen().map_err(|error| Failure::system("watch over CMD", &error))?;
    if bite {
        watch.targets.kill(Vec::new());
        return Ok(BITTEN);
    }
    Ok(0)
}

impl Watch {
    /// Listens until CMD is done or must be killed; returns which.
    fn listen(&mut self) -> io::Result<bool> {
        // Not through Rust's buffer, which would hide from `poll` what it has read ahead.
        let input = io::stdin();
        let mut chunk = [0; 256];
        loop {
            let left = self.until.since(SystemClock.now());
            // Also when no time is left: more may have been allowed while this process stood still.
            if !readable(left.min(LONGEST_SLEEP))? {
                if left.is_zero() {
                    return Ok(true);
                }
                continue;
            }
            match rustix::io::read(&input, &mut chunk)? {
                0 => return Ok(true),
                length => self.hear(&chunk[..length]),
            }
            if self.done {
                return Ok(false);
            }
        }
    }

    fn hear(&mut self, bytes: &[u8]) {
        self.heard.extend_from_slice(bytes);
        while let Some(end) = self.heard.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.heard.drain(..=end).collect();
            self.obey(String::from_utf8_lossy(&line).trim_end());
        }
    }

    fn obey(&mut self, line: &str) {
        let words: Vec<_> = line.split(' ').collect();
        match words[..] {
            ["work", leader, own_group, started] => {
                self.targets.leader = leader.parse().ok().and_then(Pid::from_raw);
                self.targets.own_group = own_group == "true";
                // Only the first process of the machine started in its first tick.
                self.targets.started = started.parse().ok().filter(|started| *started != 0);
            }
            ["until", nanos] => self.until = nanos.parse().map_or(self.until, Moment::from_nanos),
            ["done"] => self.done = true,
            _ => {}
        }
    }
}

/// Whether there is something to read within `limit`.
fn readable(limit: Duration) -> io::Result<bool> {
    let stdin = io::stdin();
    let mut wanted = [PollFd::new(&stdin, PollFlags::IN)];
    let limit = Timespec { tv_sec: limit.as_secs().cast_signed(), tv_nsec: limit.subsec_nanos().into() };
    match poll(&mut wanted, Some(&limit)) {
        Ok(ready) => Ok(ready > 0),
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_may_come_in_pieces() {
        let targets = Targets::marked("x".to_owned());
        let until = Moment::from_nanos(1);
        let mut watch = Watch { targets, until, heard: Vec::new(), done: false };
        watch.hear(b"work 12 tr");
        assert_eq!(watch.targets.leader, None);
        watch.hear(b"ue 5\nuntil 77\nnonsense\nunt");
        assert_eq!(watch.targets.leader, Pid::from_raw(12));
        assert!(watch.targets.own_group && !watch.done);
        assert_eq!(watch.targets.started, Some(5));
        assert_eq!(watch.until, Moment::from_nanos(77));
        watch.hear(b"il 99\nuntil 88\ndone\n");
        assert_eq!((watch.until, watch.done), (Moment::from_nanos(88), true));
    }
}
