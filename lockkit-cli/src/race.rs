//! `lockkit race`: what happens to a counter that several processes change at once.

use clap::Args as ClapArgs;
use lockkit_compare::{Targets, race};

use crate::{
    duration,
    exit::{Exit, Failure, VIOLATED},
    interrupt::block_on,
    show::print,
    targets::StoresArgs,
    worker,
};

/// Show what a lock is for: processes that add one to the same number, with and without
///
/// Worker processes read a number from a file, add one and write it back, again and again: under no lock, under a lock
/// that each process keeps to itself, and under each store. Prints how many updates were lost.
///
/// With --json: an object with workers, total, and schemes: an array of objects with under, shared_lock, expected,
/// counted, lost, seconds, per_second.
#[derive(Debug, ClapArgs)]
pub(crate) struct Args {
    #[command(flatten)]
    stores: StoresArgs,
    /// How many processes take part
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = duration::number(1, 256))]
    workers: u64,
    /// How many times they add one, all together
    #[arg(long, value_name = "N", default_value_t = 5000, value_parser = duration::number(1, 100_000_000))]
    total: u64,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs the race.
pub(crate) fn run(args: Args) -> Exit {
    block_on(compete(args))
}

async fn compete(args: Args) -> Exit {
    let targets = args.stores.targets().await?;
    let race = race(&targets, args.workers, args.total, &worker::program()?).await?;
    print(|out| match args.json {
        true => writeln!(out, "{}", race.as_json()),
        false => writeln!(out, "{}{}", race.as_text(), absentees(&targets)),
    })?;
    match race.broken() {
        Some(score) => Err(Failure::new(VIOLATED, format!("{} updates were lost under {}", score.lost(), score.name))),
        None => Ok(0),
    }
}

/// How a store could take part, if none did.
fn absentees(targets: &Targets) -> String {
    if targets.list().iter().any(|target| !target.is_in_process()) {
        return String::new();
    }
    let mut text = "\n\nNo store that processes can share took part. Give one with --store".to_owned();
    if !targets.missing().is_empty() {
        text += ", or install one:";
        targets.missing().iter().for_each(|how| text += &format!("\n  {how}"));
    }
    text
}
