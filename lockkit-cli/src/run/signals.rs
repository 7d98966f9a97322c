//! The signals that are passed on to CMD.

use std::{future::poll_fn, io, task::Poll};

use rustix::{
    process::{Signal, getpgrp},
    termios::tcgetpgrp,
};
use tokio::signal::unix::{SignalKind, signal};

/// What is passed on. The first four are meant to end; the others mean what CMD makes of them.
const FORWARDED: [Signal; 6] = [Signal::TERM, Signal::INT, Signal::HUP, Signal::QUIT, Signal::USR1, Signal::USR2];

/// The arriving signals.
#[derive(Debug)]
pub(super) struct Signals {
    streams: Vec<(Signal, tokio::signal::unix::Signal)>,
}

impl Signals {
    /// Listens, except for signals that are ignored: they would cease to be, for this process and for CMD, and `nohup`
    /// would have no effect.
    pub(super) fn listen() -> io::Result<Self> {
        let ignored = ignored();
        let wanted = FORWARDED.into_iter().filter(|signal| ignored >> (signal.as_raw() - 1) & 1 == 0);
        let streams = wanted
            .map(|which| Ok((which, signal(SignalKind::from_raw(which.as_raw()))?)))
            .collect::<io::Result<_>>()?;
        Ok(Self { streams })
    }

    /// The next signal to arrive.
    pub(super) async fn next(&mut self) -> Signal {
        poll_fn(|context| {
            for (which, stream) in &mut self.streams {
                if stream.poll_recv(context).is_ready() {
                    return Poll::Ready(*which);
                }
            }
            Poll::Pending
        })
        .await
    }
}

/// Whether the terminal sends Ctrl-C and Ctrl-\ to this process's group, and so to CMD, by itself.
pub(super) fn in_foreground() -> bool {
    terminal().and_then(|terminal| Ok(tcgetpgrp(terminal)? == getpgrp())).unwrap_or(false)
}

/// The controlling terminal, if there is one.
pub(super) fn terminal() -> io::Result<std::fs::File> {
    std::fs::File::open("/dev/tty")
}

/// The signals that this process was started to ignore, as a bit mask. Where there is no such file: none.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap_or_default();
    u64::from_str_radix(mask.trim(), 16).unwrap_or(0)
}
