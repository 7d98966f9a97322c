//! Every case of the compliance suite against every store, as named trials.
//!
//! A store that is required and can't be found is a failure. `LOCKKIT_REQUIRE` names the required ones, separated by
//! commas; by default those whose servers Debian packages. The others are shown as ignored, with the reason.

mod redis;
mod redis_many;

use std::{env, process::ExitCode, sync::Arc};

use libtest_mimic::{Arguments, Trial};
use lockkit_testkit::{Backend, BoxError, MemoryBackend, servers::RedisFlavor, trials};

use crate::{redis::RedisBackend, redis_many::ManyBackend};

const REQUIRED: &str = "memory,redis,redis-sentinel,redis-cluster";

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let required = env::var("LOCKKIT_REQUIRE").unwrap_or_else(|_| REQUIRED.to_owned());
    let redis = |name, flavor| runtime.block_on(RedisBackend::start(name, flavor));
    let mut all = Vec::new();
    add(&mut all, &required, "memory", Ok(MemoryBackend::default()));
    add(&mut all, &required, "redis", redis("redis", RedisFlavor::Installed));
    add(&mut all, &required, "redis-newer", redis("redis-newer", RedisFlavor::Newer));
    add(&mut all, &required, "valkey", redis("valkey", RedisFlavor::Valkey));
    let flavor = RedisFlavor::Installed;
    let sentinels = runtime.block_on(ManyBackend::sentinels("redis-sentinel", flavor.clone()));
    add(&mut all, &required, "redis-sentinel", sentinels);
    let cluster = runtime.block_on(ManyBackend::cluster("redis-cluster", flavor));
    add(&mut all, &required, "redis-cluster", cluster);
    libtest_mimic::run(&arguments, all).exit_code()
}

/// Adds the trials of a store, or one that says why there are none.
fn add<B: Backend>(all: &mut Vec<Trial>, required: &str, name: &str, backend: Result<B, BoxError>) {
    let found = backend.and_then(|backend| trials(Arc::new(backend)));
    match found {
        Ok(trials) => all.extend(trials),
        Err(error) if required.split(',').any(|required| required.trim() == name) => {
            let message = format!("{name} is required: {error}");
            all.push(Trial::test(format!("{name}::is_there"), move || Err(message.into())));
        }
        Err(error) => all.push(Trial::test(format!("{name} ({error})"), || Ok(())).with_ignored_flag(true)),
    }
}
