//! Work that leaves nothing behind when it is interrupted: no temporary file, no server, no worker process.

use std::future::Future;

use rustix::process::Signal;

use crate::{
    exit::{Failure, SOFTWARE},
    signals::Signals,
};

/// What shells add to the number of the signal that a program died of.
const SIGNAL: u8 = 128;

/// Runs `work` on a runtime of its own; on SIGINT, SIGTERM or SIGHUP, unless they were ignored, drops it, with all that it has
/// open, and fails with the code that shells give to a program which died of that signal.
pub(crate) fn block_on<T: Send + 'static>(
    work: impl Future<Output = Result<T, Failure>> + Send + 'static,
) -> Result<T, Failure> {
    let failed = |error: std::io::Error| Failure::system("start the runtime", &error);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(failed)?;
    runtime.block_on(async {
        let mut signals = Signals::listen(&[Signal::INT, Signal::TERM, Signal::HUP]).map_err(failed)?;
        // On a thread of the runtime rather than on this one, which can't share its work with the others.
        let mut task = tokio::spawn(work);
        let signal = tokio::select! {
            ended = &mut task => return ended.unwrap_or_else(|error| Err(Failure::new(SOFTWARE, error.to_string()))),
            signal = signals.next() => signal,
        };
        task.abort();
        drop(task.await);
        let code = SIGNAL + u8::try_from(signal.as_raw()).unwrap_or_default();
        Err(Failure::new(code, "interrupted"))
    })
}

/// Whether it was a signal that ended the work.
pub(crate) fn is_signal(failure: &Failure) -> bool {
    failure.code() > SIGNAL
}
