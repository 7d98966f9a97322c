//! The `lockkit` command: run programs under a lock, see who holds what, free what is
//! stuck, compare stores, and move a service from one to another.

mod break_lock;
mod check;
mod compare;
mod completions;
mod doctor;
mod duration;
mod exit;
mod init;
mod interrupt;
mod ls;
mod man;
mod migrate;
mod race;
#[cfg_attr(not(target_os = "linux"), path = "run_elsewhere.rs")]
mod run;
mod show;
mod signals;
mod store;
mod sweep;
mod targets;
mod top;
mod usage;
mod who;
mod worker;

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

use crate::exit::Exit;

/// Distributed locks on the command line.
#[derive(Debug, Parser)]
#[command(name = "lockkit", version, after_long_help = format!("Exit status:\n{}", exit::CODES))]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    Run(run::Args),
    Elect(run::elect::Args),
    Ls(ls::Args),
    Who(who::Args),
    Top(top::Args),
    Break(break_lock::Args),
    Doctor(doctor::Args),
    Check(check::Args),
    Init(init::Args),
    Gc(init::GcArgs),
    Race(race::Args),
    Compare(compare::Args),
    Migrate(migrate::Args),
    Completions(completions::Args),
    Man(man::Args),
    #[command(name = worker::VERB, hide = true)]
    Worker,
    #[cfg(target_os = "linux")]
    #[command(name = run::exec::VERB, hide = true)]
    Exec(run::exec::Args),
    #[cfg(target_os = "linux")]
    #[command(name = run::watchdog::VERB, hide = true)]
    Watch(run::watchdog::Args),
    #[cfg(target_os = "linux")]
    #[command(name = run::exec::DIE, hide = true)]
    Die,
}

fn main() -> ExitCode {
    let outcome = match Cli::try_parse() {
        Ok(cli) => dispatch(cli.verb),
        Err(error) => usage::from_clap(&error),
    };
    exit::report(outcome)
}

fn dispatch(verb: Verb) -> Exit {
    match verb {
        Verb::Run(args) => run::run(args),
        Verb::Elect(args) => run::elect::run(args),
        Verb::Ls(args) => ls::run(&args),
        Verb::Who(args) => who::run(&args),
        Verb::Top(args) => top::run(args),
        Verb::Break(args) => break_lock::run(args),
        Verb::Doctor(args) => doctor::run(&args),
        Verb::Check(args) => check::run(&args),
        Verb::Init(args) => init::run(&args),
        Verb::Gc(args) => init::collect(&args),
        Verb::Race(args) => race::run(args),
        Verb::Compare(args) => compare::run(args),
        Verb::Migrate(args) => migrate::run(args),
        Verb::Completions(args) => completions::run(&args, Cli::command()),
        Verb::Man(args) => man::run(&args, Cli::command()),
        Verb::Worker => worker::run(),
        #[cfg(target_os = "linux")]
        Verb::Exec(args) => run::exec::run(&args),
        #[cfg(target_os = "linux")]
        Verb::Watch(args) => run::watchdog::run(&args),
        #[cfg(target_os = "linux")]
        Verb::Die => run::exec::die(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }
}
