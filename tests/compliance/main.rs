//! Every case of the compliance suite against every store, as named trials.
//!
//! A store that is required and can't be found is a failure. `LOCKKIT_REQUIRE` names the required ones, separated by
//! commas; by default those whose servers Debian packages. The others are shown as ignored, with the reason.
//! What runs on each is held to the lists in `expected`.

mod redis;
mod redis_many;

use std::process::ExitCode;

use lockkit_testkit::{MemoryBackend, Suite, servers::RedisFlavor};

use crate::{redis::RedisBackend, redis_many::ManyBackend};

const REQUIRED: &str = "memory,redis,redis-sentinel,redis-cluster";

fn main() -> ExitCode {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let redis = |name, flavor| runtime.block_on(RedisBackend::start(name, flavor));
    let mut suite = Suite::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/compliance/expected"), REQUIRED);
    suite.add("memory", Ok(MemoryBackend::default()));
    suite.add("redis", redis("redis", RedisFlavor::Installed));
    suite.add("redis-newer", redis("redis-newer", RedisFlavor::Newer));
    suite.add("valkey", redis("valkey", RedisFlavor::Valkey));
    let flavor = RedisFlavor::Installed;
    suite.add("redis-sentinel", runtime.block_on(ManyBackend::sentinels("redis-sentinel", flavor.clone())));
    suite.add("redis-cluster", runtime.block_on(ManyBackend::cluster("redis-cluster", flavor)));
    suite.run()
}
