//! What the parser of the command line has to say, in one line.

use std::error::Error as _;

use clap::error::ContextValue;

use crate::{
    duration::ADVICE,
    exit::{Exit, Failure, USAGE},
    show::print,
    store::is_store_url,
};

/// What clap has to say: help and version as they are, an error as one line.
pub(crate) fn from_clap(error: &clap::Error) -> Exit {
    if !error.use_stderr() {
        return print(|out| write!(out, "{}", error.render())).map(|()| 0);
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
        K::UnknownArgument => {
            let meant = or_nothing("; did you mean ", known(C::SuggestedArg));
            unexpected(&known(C::InvalidArg), &format!("{meant}; {} --help lists them", verb(error)))
        }
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
    usage.split(' ').take_while(|word| !word.starts_with(['<', '[', '-'])).collect::<Vec<_>>().join(" ")
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
    let is_url = is_store_url(argument) || argument == "--url";
    let url = if is_url { "; the URL of a store is given with --store, or in LOCKKIT_STORE" } else { "" };
    format!("there is no such argument{place}{url}{meant}")
}
