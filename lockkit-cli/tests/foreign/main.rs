//! Services whose locks are taken by other clients than lockkit, on their way to lockkit and to another store: redis-py's
//! `Lock`, kazoo's `Lock` and Curator's `InterProcessMutex`, on real servers. `docs/migration.md` has the procedure, and says
//! what it can't see to.
//!
//! A client that is absent is shown as ignored; a store that can't be started is a failure.

mod redisson;
mod setting;
mod story;
#[path = "../support/mod.rs"]
mod support;

use std::{future::Future, process::ExitCode};

use libtest_mimic::Trial;
use lockkit_testkit::{BoxError, OtherClient};

use crate::setting::{Kind, Setting};

/// The client that is left, and where its service goes.
const PAIRS: [(OtherClient, &str, Kind); 4] = [
    (OtherClient::RedisPy, "redis_py_to_mysql", Kind::MySql),
    (OtherClient::RedisPy, "redis_py_to_zookeeper", Kind::ZooKeeper),
    (OtherClient::Kazoo, "kazoo_to_redis", Kind::Redis),
    (OtherClient::Curator, "curator_to_redis", Kind::Redis),
];

fn main() -> ExitCode {
    let arguments = lockkit_testkit::arguments();
    let mut trials = vec![
        Trial::test("redisson::a_hash_is_an_error_and_is_left_alone", || run(redisson::a_hash_is_an_error())),
        Trial::test("redisson::no_step_sees_a_hash", || run(redisson::no_step_sees_a_hash())),
    ];
    for (client, name, new) in PAIRS {
        let (found, mut name) = (client.find(), name.to_owned());
        if let Err(reason) = &found {
            name = format!("{name} ({reason})");
        }
        let trial = Trial::test(name, move || run(async move { story::tell(Setting::new(client, new).await?).await }));
        trials.push(trial.with_ignored_flag(found.is_err()));
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn run(trial: impl Future<Output = Result<(), BoxError>>) -> Result<(), libtest_mimic::Failed> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let outcome = runtime.block_on(trial);
    runtime.shutdown_background();
    Ok(outcome.map_err(|error| error.to_string())?)
}
