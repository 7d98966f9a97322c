//! The `lockkit` command.

mod compare;
mod contention;
mod crew;
mod exit;
mod interrupt;
mod ledger;
mod race;
mod show;
mod targets;
mod worker;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::exit::Outcome;

/// Distributed locks on the command line.
#[derive(Debug, Parser)]
#[command(name = "lockkit", version, about)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    Race(race::Args),
    Compare(compare::Args),
    #[command(name = worker::VERB, hide = true)]
    Worker(worker::Args),
}

fn main() -> ExitCode {
    let outcome = match Cli::try_parse() {
        Ok(cli) => dispatch(cli.verb),
        Err(error) => exit::from_clap(&error),
    };
    exit::report(outcome)
}

fn dispatch(verb: Verb) -> Outcome {
    match verb {
        Verb::Race(args) => race::run(args),
        Verb::Compare(args) => compare::run(args),
        Verb::Worker(args) => worker::run(args),
    }
}
