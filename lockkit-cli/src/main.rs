//! The `lockkit` command.

mod compare;
mod contention;
mod crew;
mod exit;
mod interrupt;
mod ledger;
mod race;
mod targets;
mod worker;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Distributed locks from the command line.
#[derive(Debug, Parser)]
#[command(name = "lockkit", version)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    Race(race::RaceArgs),
    Compare(compare::CompareArgs),
    #[command(hide = true)]
    Worker(worker::WorkerArgs),
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            drop(error.print());
            return ExitCode::from(if error.use_stderr() { exit::USAGE } else { 0 });
        }
    };
    let result = match cli.verb {
        Verb::Race(args) => race::run(args),
        Verb::Compare(args) => compare::run(args),
        Verb::Worker(args) => worker::run(args),
    };
    match result {
        Ok(code) => code,
        Err(failure) => {
            eprintln!("lockkit: {failure}");
            ExitCode::from(failure.code)
        }
    }
}
