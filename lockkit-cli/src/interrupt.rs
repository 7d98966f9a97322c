//! Work that leaves nothing behind when it is interrupted: no temporary file, no server, no worker process.

use std::{future::Future, time::Duration};

use rustix::process::Signal;
use tokio::sync::watch;

use crate::{
    exit::{Failure, SOFTWARE},
    signals::Signals,
};

/// What shells add to the number of the signal that a program died of.
const SIGNAL: u8 = 128;

/// How long work that was interrupted twice has to drop what it has open. What blocks it, such as a pipe that nobody reads, may
/// never end.
const DROPPED_WITHIN: Duration = Duration::from_secs(1);

/// Runs `work` on a runtime of its own; on SIGINT, SIGTERM or SIGHUP, unless they were ignored, drops it, with all that it has
/// open, and fails with the code that shells give to a program which died of that signal.
pub(crate) fn block_on<T: Send + 'static>(
    work: impl Future<Output = Result<T, Failure>> + Send + 'static,
) -> Result<T, Failure> {
    block_on_told(|mut interruption| async move {
        tokio::select! {
            ended = work => ended,
            failure = interruption.arrived() => Err(failure),
        }
    })
}

/// The same for work that is told of the first signal and has something left to do then. The second signal drops it.
pub(crate) fn block_on_told<T, W>(work: impl FnOnce(Interruption) -> W) -> Result<T, Failure>
where
    T: Send + 'static,
    W: Future<Output = Result<T, Failure>> + Send + 'static,
{
    let failed = |error: std::io::Error| Failure::system("start the runtime", &error);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(failed)?;
    let mut twice = false;
    let ended = runtime.block_on(async {
        let mut signals = Signals::listen(&[Signal::INT, Signal::TERM, Signal::HUP]).map_err(failed)?;
        let (tell, told) = watch::channel(None);
        // On a thread of the runtime rather than on this one, which can't share its work with the others.
        let mut task = tokio::spawn(work(Interruption(told)));
        loop {
            let signal = tokio::select! {
                ended = &mut task => return ended.unwrap_or_else(|error| Err(Failure::new(SOFTWARE, error.to_string()))),
                signal = signals.next() => signal,
            };
            if let Some(first) = tell.send_replace(Some(signal)) {
                twice = true;
                task.abort();
                drop(tokio::time::timeout(DROPPED_WITHIN, task).await);
                return Err(interrupted(first));
            }
        }
    });
    if twice {
        // To drop the runtime would be to wait for what blocks its threads.
        runtime.shutdown_background();
    }
    ended
}

/// What tells work that it is to end.
#[derive(Clone, Debug)]
pub(crate) struct Interruption(watch::Receiver<Option<Signal>>);

impl Interruption {
    /// Returns when a signal has arrived: at once if one has already. The failure is what the work is to end with.
    pub(crate) async fn arrived(&mut self) -> Failure {
        let signal = self.0.wait_for(Option::is_some).await.ok().and_then(|signal| *signal);
        match signal {
            Some(signal) => interrupted(signal),
            // Nobody is left to tell of a signal.
            None => std::future::pending().await,
        }
    }
}

fn interrupted(signal: Signal) -> Failure {
    Failure::new(SIGNAL + u8::try_from(signal.as_raw()).unwrap_or_default(), "interrupted")
}

/// Whether it was a signal that ended the work.
pub(crate) fn is_signal(failure: &Failure) -> bool {
    failure.code() > SIGNAL
}
