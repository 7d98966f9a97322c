//! The signals that this process answers.

use std::{
    future::poll_fn,
    io,
    task::{Context, Poll, Waker},
};

use rustix::process::Signal;
use tokio::signal::unix::{SignalKind, signal};

/// The arriving signals.
#[derive(Debug)]
pub(crate) struct Signals {
    streams: Vec<(Signal, tokio::signal::unix::Signal)>,
    end: Option<Signal>,
}

impl Signals {
    /// Listens, except for signals that are ignored: they would cease to be, for this process and for those that it starts,
    /// and `nohup` would have no effect.
    pub(crate) fn listen(wanted: &[Signal]) -> io::Result<Self> {
        let ignored = ignored();
        let wanted = wanted.iter().filter(|signal| ignored >> (signal.as_raw() - 1) & 1 == 0);
        let streams = wanted
            .map(|which| Ok((*which, signal(SignalKind::from_raw(which.as_raw()))?)))
            .collect::<io::Result<_>>()?;
        Ok(Self { streams, end: None })
    }

    /// The next signal to arrive.
    pub(crate) async fn next(&mut self) -> Signal {
        let signal = poll_fn(|context| {
            for (which, stream) in &mut self.streams {
                if stream.poll_recv(context).is_ready() {
                    return Poll::Ready(*which);
                }
            }
            Poll::Pending
        })
        .await;
        if matches!(signal, Signal::TERM | Signal::INT) {
            self.end = Some(signal);
        }
        signal
    }

    /// A signal that has arrived already, of those that end what has not begun: all but USR1 and USR2.
    pub(crate) fn arrived_end(&mut self) -> Option<Signal> {
        let mut context = Context::from_waker(Waker::noop());
        let mut ends = self.streams.iter_mut().filter(|(which, _)| !matches!(*which, Signal::USR1 | Signal::USR2));
        ends.find_map(|(which, stream)| stream.poll_recv(&mut context).is_ready().then_some(*which))
    }

    /// The last signal that arrived of those which always ask a program to end.
    pub(crate) fn end(&self) -> Option<Signal> {
        self.end
    }
}

/// The signals that this process was started to ignore, as a bit mask. Where there is no such file: none.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap_or_default();
    u64::from_str_radix(mask.trim(), 16).unwrap_or(0)
}
