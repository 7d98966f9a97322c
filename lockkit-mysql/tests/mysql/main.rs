//! The store against real servers: what the compliance suite can't ask, because it is about this kind of store.
//!
//! All tests run on MariaDB, which is required, and on MySQL, if there is one.

mod alone;
mod crowd;
mod doctor;
mod failover;
mod fenced;
mod fences;
mod fuzz;
mod in_doubt;
mod kinds;
mod named_locks;
mod queue;
mod renewals;
mod servers;
mod sharing;
mod support;
mod table;
#[cfg(feature = "tls")]
mod tls;
mod transactions;
mod traps;
mod unused;
mod versioned;

use std::{process::ExitCode, sync::Arc};

use libtest_mimic::Trial;
use lockkit_testkit::servers::MySqlFlavor;
use support::{Ctx, Test};

fn main() -> ExitCode {
    let arguments = lockkit_testkit::arguments();
    let mut trials = Vec::new();
    for (flavor, name) in [(MySqlFlavor::Installed, "mariadb"), (MySqlFlavor::Newer, "mysql")] {
        match flavor.program().find() {
            Ok(_) => {
                let ctx = Arc::new(Ctx::new(flavor));
                trials.extend(tests().into_iter().map(|(test, run)| trial(&ctx, format!("{name}::{test}"), run)));
            }
            Err(missing) if flavor == MySqlFlavor::Installed => {
                trials.push(Trial::test(name, move || Err(missing.to_string().into())));
            }
            Err(missing) => {
                trials.push(Trial::test(format!("{name} ({missing})"), || Ok(())).with_ignored_flag(true));
            }
        }
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn tests() -> Vec<(&'static str, Test)> {
    let mut tests = [
        traps::TESTS,
        table::TESTS,
        servers::TESTS,
        transactions::TESTS,
        fences::TESTS,
        fenced::TESTS,
        named_locks::TESTS,
        versioned::TESTS,
    ]
    .concat();
    tests.extend_from_slice(doctor::TESTS);
    tests.extend_from_slice(failover::TESTS);
    tests.extend_from_slice(in_doubt::TESTS);
    tests.extend_from_slice(fuzz::TESTS);
    tests.extend_from_slice(renewals::TESTS);
    tests.extend_from_slice(unused::TESTS);
    tests.extend_from_slice(kinds::TESTS);
    tests.extend_from_slice(sharing::TESTS);
    tests.extend_from_slice(queue::TESTS);
    tests.extend_from_slice(crowd::TESTS);
    tests.extend_from_slice(alone::TESTS);
    #[cfg(feature = "tls")]
    tests.extend_from_slice(tls::TESTS);
    tests
}

fn trial(ctx: &Arc<Ctx>, name: String, run: Test) -> Trial {
    let ctx = Arc::clone(ctx);
    Trial::test(name, move || {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        runtime.block_on(run(ctx));
        Ok(())
    })
}
