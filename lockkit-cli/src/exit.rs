//! Exit codes, after BSD's sysexits, and the one line on stderr that goes with each.

use std::{
    io::{self, Write},
    process::ExitCode,
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use lockkit::Error;

/// A lock let two in at once, or a compliance case failed.
pub(crate) const VIOLATED: u8 = 1;
/// Something is slower than in the comparison of `--baseline`, beyond the noise.
pub(crate) const WORSE: u8 = 2;
/// Bad usage or bad input.
pub(crate) const USAGE: u8 = 64;
/// The store can't be used now.
pub(crate) const UNAVAILABLE: u8 = 69;
/// A worker process of `race` or `compare` failed for a reason of its own.
pub(crate) const SOFTWARE: u8 = 70;
/// The lease was lost while CMD ran; or the output could not be written.
pub(crate) const LOST: u8 = 74;
/// Another holder has the lock.
pub(crate) const NOT_ACQUIRED: u8 = 75;
/// The store is not fit for locks, or not what its URL says it is, or something puts locks at risk (sysexits' `EX_CONFIG`).
pub(crate) const UNFIT: u8 = 78;
/// CMD is there but can't be executed.
pub(crate) const NOT_EXECUTABLE: u8 = 126;
/// There is no such CMD.
pub(crate) const NOT_FOUND: u8 = 127;

/// All exit codes, for the help and the manual.
pub(crate) const CODES: &str = "   0  done (run, elect: CMD's own)
   1  race, compare, check: a lock let two in at once, or a compliance case failed
   2  compare --baseline: a figure is worse than it was, by more than the noise of its rounds
  64  bad usage or bad input
  69  the store can't be used: unreachable, no answer, access denied
  70  race, compare: a worker process failed
  74  run, elect: the lease was lost while CMD ran, its work may have overlapped with another's;
      otherwise: the output could not be written
  75  the lock was not acquired, or not held by the token to break
  78  the store is not fit for locks, or lacks what it needs: a table, a database, the file of a
      password; or its URL is of another kind of server. doctor: there are warnings or errors
 126  run, elect: CMD can't be executed
 127  run, elect: there is no such CMD
128+N run, elect: CMD was killed by signal N, or lockkit by N while it waited for the lock;
      race, compare, check, top: interrupted by signal N";

/// How a verb ended: the exit code, or what to say first.
pub(crate) type Exit = Result<u8, Failure>;

/// An exit code and the line that explains it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    code: u8,
    message: String,
}

impl Failure {
    pub(crate) fn new(code: u8, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }

    pub(crate) fn code(&self) -> u8 {
        self.code
    }

    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    /// The system refused something that it usually grants.
    pub(crate) fn system(what: &str, error: &io::Error) -> Self {
        Self::new(UNAVAILABLE, format!("could not {what}: {error}"))
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        // What the store can't do, the command can't ask it for: it is the store that is of the wrong kind.
        lockkit_compare::Error::from(error).into()
    }
}

impl From<lockkit_compare::Error> for Failure {
    fn from(error: lockkit_compare::Error) -> Self {
        use lockkit_compare::ErrorKind as Kind;
        let code = match error.kind() {
            Kind::InvalidInput => USAGE,
            Kind::Unfit => UNFIT,
            Kind::Lost => LOST,
            Kind::Internal => SOFTWARE,
            // Unavailable, and whatever may come to be added.
            _ => UNAVAILABLE,
        };
        Self::new(code, error.to_string())
    }
}

/// Says what there is to say, and makes an exit code of it.
pub(crate) fn report(outcome: Exit) -> ExitCode {
    let code = outcome.unwrap_or_else(|failure| {
        say(&failure.message);
        failure.code
    });
    ExitCode::from(code)
}

/// Writes one line to stderr, whatever the text. That stderr may be closed is nobody's error.
pub(crate) fn say(message: &str) {
    let line: String = message.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    drop(writeln!(io::stderr(), "lockkit: {}", line.trim_end()));
}

/// Writes the line from another thread, for a caller that renews a lease: if nobody reads stderr, and its pipe is full, writing blocks. A line is
/// left out while another one is being written.
pub(crate) fn say_aside(message: String) {
    static IS_BUSY: AtomicBool = AtomicBool::new(false);
    if !IS_BUSY.swap(true, Ordering::AcqRel) {
        let speak = move || {
            say(&message);
            IS_BUSY.store(false, Ordering::Release);
        };
        if thread::Builder::new().spawn(speak).is_err() {
            IS_BUSY.store(false, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use lockkit::ErrorKind;

    use super::*;

    #[test]
    fn every_kind_of_error_has_its_code() {
        let code = |kind| Failure::from(Error::new(kind, "x")).code;
        assert_eq!(code(ErrorKind::InvalidInput), USAGE);
        assert_eq!((code(ErrorKind::Unsupported), code(ErrorKind::Misconfigured)), (UNFIT, UNFIT));
        assert_eq!(code(ErrorKind::Lost), LOST);
        for kind in [ErrorKind::Denied, ErrorKind::Unavailable, ErrorKind::TimedOut, ErrorKind::Unexpected] {
            assert_eq!(code(kind), UNAVAILABLE);
        }
    }
}
