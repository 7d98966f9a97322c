//! Exit codes, after BSD's sysexits, and the one line on stderr that goes with each.

use std::{
    io::{self, Write},
    process::ExitCode,
};

use lockkit::{Error, ErrorKind};

/// A lock let two in at once, or a compliance case failed.
pub(crate) const VIOLATED: u8 = 1;
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
/// The store is not fit for locks, or something puts them at risk (sysexits' `EX_CONFIG`).
pub(crate) const UNFIT: u8 = 78;
/// CMD is there but can't be executed.
pub(crate) const NOT_EXECUTABLE: u8 = 126;
/// There is no such CMD.
pub(crate) const NOT_FOUND: u8 = 127;

/// All exit codes, for the help and the manual.
pub(crate) const CODES: &str = "   0  done (run: CMD's own)
   1  race, compare, check: a lock let two in at once, or a compliance case failed
  64  bad usage or bad input
  69  the store can't be used: unreachable, no answer, access denied
  70  race, compare: a worker process failed
  74  run: the lease was lost while CMD ran, its work may have overlapped with another's;
      otherwise: the output could not be written
  75  the lock was not acquired, or not held by the token to break
  78  doctor: there are warnings or errors
 126  run: CMD can't be executed
 127  run: there is no such CMD
128+N run: CMD was killed by signal N, or lockkit by N while it waited for the lock;
      race, compare, check: interrupted by signal N";

/// How a verb ended: the exit code, or what to say first.
pub(crate) type Outcome = Result<u8, Failure>;

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
        let code = match error.kind() {
            ErrorKind::InvalidInput | ErrorKind::Unsupported => USAGE,
            ErrorKind::Lost => LOST,
            // Denied, Unavailable, TimedOut, Deadlock, Closed, Unexpected, and whatever may come to be added.
            _ => UNAVAILABLE,
        };
        Self::new(code, error.to_string())
    }
}

/// What clap has to say: help and version as they are, an error as one line.
pub(crate) fn from_clap(error: &clap::Error) -> Outcome {
    if !error.use_stderr() {
        return crate::show::print(|out| write!(out, "{}", error.render())).map(|()| 0);
    }
    if error.kind() == clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        return Err(Failure::new(USAGE, "which subcommand? lockkit --help lists them"));
    }
    let text = error.render().to_string();
    // The first paragraph is the error; what follows is advice and usage.
    let first: Vec<_> = text.lines().map(str::trim).take_while(|line| !line.is_empty()).collect();
    let mut message = first.join(" ").trim_start_matches("error: ").to_owned();
    if let Some(tip) = text.lines().map(str::trim).find_map(|line| line.strip_prefix("tip: ")) {
        message = format!("{message}; {tip}");
    }
    Err(Failure::new(USAGE, message))
}

/// Says what there is to say, and makes an exit code of it.
pub(crate) fn report(outcome: Outcome) -> ExitCode {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_error_has_its_code() {
        let code = |kind| Failure::from(Error::new(kind, "x")).code;
        assert_eq!(code(ErrorKind::InvalidInput), USAGE);
        assert_eq!(code(ErrorKind::Unsupported), USAGE);
        assert_eq!(code(ErrorKind::Lost), LOST);
        for kind in [ErrorKind::Denied, ErrorKind::Unavailable, ErrorKind::TimedOut, ErrorKind::Unexpected] {
            assert_eq!(code(kind), UNAVAILABLE);
        }
    }
}
