//! Faults on real servers: worker processes that use locks, a nemesis, and a checker that judges what all of them
//! recorded. `docs/testing.md` describes it.
//!
//! Options after `--`, besides those of every test: `--seed N`, `--soak MINUTES`, `--write FILE`.

mod arena;
mod crowd;
mod fault;
mod nemesis;
mod options;
mod run;
mod sabotage;
mod storm;
mod table;
mod target;
mod trouble;
mod witness;

use std::{
    env,
    process::ExitCode,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use libtest_mimic::{Failed, Trial};
use lockkit::store::unpoisoned;
use lockkit_testkit::{BoxError, faults::ServerClock};
use tokio::time::sleep;

use crate::{
    fault::Fault,
    options::Options,
    run::Row,
    sabotage::Sabotage,
    storm::{Orders, Random, work},
    target::Kind,
};

/// Tells this program that it is a worker.
pub(crate) const WORKER: &str = "LOCKKIT_FAULTS_WORKER";

/// How many pairs of faults each store gets besides the single ones.
const PAIRS: usize = 2;

fn main() -> ExitCode {
    if let Ok(orders) = env::var(WORKER) {
        return worker(&orders);
    }
    let options = Options::from_args();
    eprintln!("seed {}", options.seed);
    let clock = ServerClock::build();
    match options.soak {
        Some(minutes) => soak(&options, minutes, &clock),
        None => quick(options, &clock),
    }
}

fn worker(orders: &str) -> ExitCode {
    let result = serde_json::from_str::<Orders>(orders).map_err(BoxError::from).and_then(|orders| {
        runtime()?.block_on(async {
            let store = loop {
                // A worker may be started in the middle of a fault.
                match sabotage::open(&orders.url).await {
                    Ok(store) => break store,
                    Err(error) if error.is_retryable() => sleep(Duration::from_millis(20)).await,
                    Err(error) => return Err(error.into()),
                }
            };
            work(orders, store).await
        })
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("a worker failed: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Each fault alone, and a few pairs, for every store.
fn quick(options: Options, clock: &std::io::Result<ServerClock>) -> ExitCode {
    let rows: Arc<Mutex<Vec<Row>>> = Arc::default();
    let mut trials = Vec::new();
    for kind in Kind::ALL {
        if let Some(reason) = kind.missing() {
            trials.push(absent(kind, reason));
            continue;
        }
        // What befalls clients and the network is the same with each version of a server.
        let is_all = options.every_version || !kind.is_another_version();
        let faults = Fault::of(kind).into_iter().filter(|fault| is_all || fault.is_of_servers(kind));
        let singles = faults.map(|fault| vec![fault]);
        let mut random = Random::new(options.seed, kind.name());
        let pairs = (0..if is_all { PAIRS } else { 0 }).map(|_| pair(kind, clock.is_ok(), &mut random));
        for faults in singles.chain(pairs) {
            trials.push(trial(kind, faults, clock, options.seed, &rows));
        }
    }
    let seed = options.seed;
    trials.extend(Sabotage::ALL.map(|sabotage| {
        Trial::test(format!("judge::{}", sabotage.name()), move || {
            runtime()?.block_on(sabotage.is_found(seed)).map_err(|error| Failed::from(error.to_string()))
        })
    }));
    trials.push(Trial::test("judge::one_fault_explains_not_every_error_of_another", || {
        trouble::explains_no_more_than_it_can().map_err(|error| Failed::from(error.to_string()))
    }));
    trials.extend(storm::trials());
    let conclusion = libtest_mimic::run(&options.harness, trials);
    let undone = run::work_was_done(&unpoisoned(&rows));
    if let Err(message) = undone {
        eprintln!("{message}");
        return ExitCode::FAILURE;
    }
    if let Some(path) = options.write.filter(|_| !conclusion.has_failed()) {
        let rows = unpoisoned(&rows);
        if let Err(error) = table::write(&path, &table::render(&rows, options.seed)) {
            eprintln!("the table was not written: {error}");
            return ExitCode::FAILURE;
        }
    }
    conclusion.exit_code()
}

fn trial(
    kind: Kind,
    faults: Vec<Fault>,
    clock: &std::io::Result<ServerClock>,
    seed: u64,
    rows: &Arc<Mutex<Vec<Row>>>,
) -> Trial {
    let name = name(kind, &faults);
    if let (true, Err(reason)) = (faults.iter().any(|fault| fault.needs_clock()), clock) {
        return Trial::test(format!("{name} ({reason})"), || Ok(())).with_ignored_flag(true);
    }
    let (clock, rows) = (clock.as_ref().ok().cloned(), Arc::clone(rows));
    Trial::test(name, move || {
        // A clock of its own: it is moved for all servers that run on it.
        let clock = clock.filter(|_| faults.iter().any(|fault| fault.needs_clock()));
        let clock = clock.map(|_| ServerClock::build()).transpose()?;
        let row = runtime()?.block_on(run::run(kind, &faults, clock, seed)).map_err(|e| Failed::from(e.to_string()))?;
        unpoisoned(&rows).push(row);
        Ok(())
    })
}

fn absent(kind: Kind, reason: String) -> Trial {
    if kind.is_required() {
        let message = format!("{} is required: {reason}", kind.name());
        return Trial::test(format!("{}::is_there", kind.name()), move || Err(message.into()));
    }
    Trial::test(format!("{} ({reason})", kind.name()), || Ok(())).with_ignored_flag(true)
}

/// One run after the other, singles and pairs as the seed has it, until the time is up or something is found.
fn soak(options: &Options, minutes: u64, clock: &std::io::Result<ServerClock>) -> ExitCode {
    let kinds: Vec<_> = Kind::ALL
        .into_iter()
        .filter(|kind| options.harness.filter.as_ref().is_none_or(|only| kind.name().contains(only.as_str())))
        .filter(|kind| kind.missing().map(|reason| eprintln!("without {}: {reason}", kind.name())).is_none())
        .collect();
    let start = Instant::now();
    let (mut runs, mut failures) = (0_u64, 0_u64);
    while start.elapsed().as_secs() < minutes * 60 {
        let seed = options.seed.wrapping_add(runs);
        let mut random = Random::new(seed, "soak");
        // From the seed alone, so that this run is the first of a soak that begins with its seed.
        let Some(&kind) = random.pick(&kinds) else { break };
        let faults = pair(kind, clock.is_ok(), &mut random);
        let faults = if random.below(3) == 0 { vec![faults[0]] } else { faults };
        let moved = faults.iter().any(|fault| fault.needs_clock());
        let outcome = runtime().map_err(BoxError::from).and_then(|runtime| {
            let clock = if moved { Some(ServerClock::build()?) } else { None };
            runtime.block_on(run::run(kind, &faults, clock, seed))
        });
        runs += 1;
        let seconds = start.elapsed().as_secs();
        match outcome {
            Ok(row) => println!(
                "{seconds:>6} s  seed {seed}  {:<60} {:>5} grants, {} refused, {} lost on the twin{}",
                name(kind, &faults),
                row.report.grants,
                row.report.refused,
                row.report.lost_on_twins,
                row.cut_short.map(|why| format!(" (cut short: {why})")).unwrap_or_default()
            ),
            Err(error) => {
                failures += 1;
                println!("{seconds:>6} s  seed {seed}  {} FAILED: {error}", name(kind, &faults));
            }
        }
    }
    println!("{runs} runs, {failures} failed");
    if failures == 0 && runs > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Two different faults of a store.
fn pair(kind: Kind, has_clock: bool, random: &mut Random) -> Vec<Fault> {
    let mut all = Fault::of(kind);
    all.retain(|fault| *fault != Fault::Nothing && (has_clock || !fault.needs_clock()));
    let first = all.remove(random.below(all.len() as u64) as usize);
    all.retain(|second| first.goes_with(*second));
    vec![first, all[random.below(all.len() as u64) as usize]]
}

fn name(kind: Kind, faults: &[Fault]) -> String {
    let faults: Vec<_> = faults.iter().map(|fault| fault.name()).collect();
    format!("{}::{}", kind.name(), faults.join("+"))
}

fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()
}
