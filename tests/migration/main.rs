//! Every case of the compliance suite against the store of a migration, in each of its phases, as named trials.
//!
//! A store that is required and can't be found is a failure. `LOCKKIT_REQUIRE` names the required ones, separated by commas.

mod pair;
mod private;
mod servers;

use std::process::ExitCode;

use lockkit::migrate::{Phase, Side};
use lockkit_testkit::Suite;

use crate::{
    pair::{PHASES, Pair},
    private::Harmed,
    servers::{One, Servers},
};

const REQUIRED: &str = "memory-old,memory-both,memory-new,memory-back,redis-to-mysql,mysql-to-zk,zk-to-redis,redis-to-zk-old,old-harmed,new-harmed";

fn main() -> ExitCode {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let mut suite = Suite::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/migration/expected"), REQUIRED);
    for (phase, steps) in PHASES {
        let name = format!("memory-{phase}");
        suite.add(&name, runtime.block_on(Pair::memory(name.clone(), steps)));
    }
    let both = &[Phase::Both];
    let on = |name: &str, old, new, steps| {
        (name.to_owned(), runtime.block_on(Servers::start(name.to_owned(), old, new, steps)))
    };
    let pairs = [
        on("redis-to-mysql", runtime.block_on(One::redis()), runtime.block_on(One::mysql()), both),
        on("mysql-to-zk", runtime.block_on(One::mysql()), runtime.block_on(One::zookeeper()), both),
        on("zk-to-redis", runtime.block_on(One::zookeeper()), runtime.block_on(One::redis()), both),
        on("redis-to-zk-old", runtime.block_on(One::redis()), runtime.block_on(One::zookeeper()), &[]),
    ];
    for (name, servers) in pairs {
        suite.add(&name, servers);
    }
    for (name, side) in [("old-harmed", Side::Old), ("new-harmed", Side::New)] {
        suite.add(name, runtime.block_on(Harmed::start(name, side, Phase::Both)));
    }
    // What a call that is dropped leaves behind in the shadow is another store's to bear than in the other phases.
    for (name, side) in [("old-harmed-in-the-shadow", Side::Old), ("new-harmed-in-the-shadow", Side::New)] {
        let harmed = runtime.block_on(Harmed::start(name, side, Phase::Old));
        suite.add_cases(name, harmed, &["abandoned::a_dropped_call_answers_no_other"]);
    }
    suite.run()
}
