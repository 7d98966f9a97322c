//! Exit codes, after BSD's sysexits, and the one line on stderr that goes with each.

use std::{
    error::Error as _,
    io::{self, Write},
    process::ExitCode,
};

use clap::error::ContextValue;
use lockkit::Error;

use crate::{duration::ADVICE, store::is_store_url};

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
/// The store is not fit for locks, or not what its URL says it is, or something puts locks at risk (sysexits' `EX_CONFIG`).
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
  78  the store is not fit for locks, or lacks what it needs: a table, a database, the file of a
      password; or its URL is of another kind of server. doctor: there are warnings or errors
 126  run: CMD can't be executed
 127  run: there is no such CMD
128+N run: CMD was killed by signal N, or lockkit by N while it waited for the lock;
      race, compare, check: interrupted by signal N";

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

/// What clap has to say: help and version as they are, an error as one line.
pub(crate) fn from_clap(error: &clap::Error) -> Exit {
    if !error.use_stderr() {
        return crate::show::print(|out| write!(out, "{}", error.render())).map(|()| 0);
    }
    if error.kind() == clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        return Err(Failure::new(USAGE, format!("which subcommand? {} --help lists them", verb(error))));
    }
    Err(Failure::new(USAGE, in_words(error)))
}

/// What is wrong with the command line. What was given is not repeated: it may be the URL of a store, with a password, in the
/// wrong place.
fn in_words(error: &clap::Error) -> String {
    use clap::error::{ContextKind as C, ErrorKind as K};
    let known = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => text.clone(),
        Some(ContextValue::Strings(texts)) => texts.join(", "),
        _ => String::new(),
    };
    let or_nothing = |before: &str, text: String| if text.is_empty() { text } else { format!("{before}{text}") };
    match error.kind() {
        K::UnknownArgument => unexpected(&known(C::InvalidArg), &or_nothing("; did you mean ", known(C::SuggestedArg))),
        K::InvalidSubcommand => {
            // A verb that is for the command itself is not for people to try.
            let meant = Some(known(C::SuggestedSubcommand)).filter(|verb| !verb.starts_with("__")).unwrap_or_default();
            let meant = or_nothing("; did you mean ", meant);
            format!("there is no such subcommand{meant}; {} --help lists them", verb(error))
        }
        K::MissingRequiredArgument => format!("missing: {}", known(C::InvalidArg)),
        K::ArgumentConflict => {
            format!("{} can't be used{}", known(C::InvalidArg), or_nothing(" with ", known(C::PriorArg)))
        }
        K::InvalidValue if known(C::InvalidValue).is_empty() => format!("{} needs a value", known(C::InvalidArg)),
        K::InvalidValue | K::ValueValidation => {
            let why = error.source().map(|why| format!(": {why}")).unwrap_or_default();
            let values = or_nothing("; possible: ", known(C::ValidValue));
            format!("{} can't have this value{why}{values}", known(C::InvalidArg))
        }
        K::InvalidUtf8 => "an argument is no text".to_owned(),
        _ => format!("bad usage{}; see --help", or_nothing(" of ", known(C::InvalidArg))),
    }
}

/// The command, or the verb of it, whose usage the parser shows: what stands before the first placeholder.
fn verb(error: &clap::Error) -> String {
    let rendered = error.render().to_string();
    let usage = rendered.lines().find_map(|line| line.trim_start().strip_prefix("Usage: ")).unwrap_or("lockkit");
    usage.split(' ').take_while(|word| !word.starts_with(['<', '['])).collect::<Vec<_>>().join(" ")
}

/// What to say of an argument that is none. The parser gives its name, without the value after `=`.
fn unexpected(argument: &str, meant: &str) -> String {
    if argument.strip_prefix('-').is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit())) {
        return format!("neither a time nor a number can be negative; of a time {ADVICE}");
    }
    let is_it =
        |given: &String| given.strip_prefix(argument).is_some_and(|rest| rest.is_empty() || rest.starts_with('='));
    let given = std::env::args_os().map(|given| given.to_string_lossy().into_owned()).position(|given| is_it(&given));
    let place = given.map(|place| format!(" (argument {place})")).unwrap_or_default();
    let url =
        if is_store_url(argument) { "; the URL of a store is given with --store, or in LOCKKIT_STORE" } else { "" };
    format!("there is no such argument{place}{url}{meant}")
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
