//! Every case of the compliance suite against every store, as named trials.

use std::{process::ExitCode, sync::Arc};

use lockkit_testkit::{MemoryBackend, trials};

fn main() -> ExitCode {
    let arguments = libtest_mimic::Arguments::from_args();
    let trials = trials(Arc::new(MemoryBackend::default())).expect("memory is always there");
    libtest_mimic::run(&arguments, trials).exit_code()
}
