//! `lockkit run` where it can't keep its promise.

use std::ffi::OsString;

use clap::Args as ClapArgs;

use crate::exit::{Exit, Failure, NOT_EXECUTABLE};

/// Run a command while holding a lock: on Linux only
///
/// CMD is to be gone before a lost lease can lapse, also when lockkit itself is killed or stands still. That takes
/// parent-death signals, pidfds and /proc, which only Linux has. Here no command is started. A program of your own can hold a
/// lock with the library.
#[derive(Debug, ClapArgs)]
pub(crate) struct Args {
    #[arg(hide = true, trailing_var_arg = true, allow_hyphen_values = true)]
    all: Vec<OsString>,
}

pub(crate) fn run(_: Args) -> Exit {
    let why = "run works on Linux only, for elsewhere CMD could outlive its lock; CMD was not started";
    Err(Failure::new(NOT_EXECUTABLE, why))
}

pub(crate) mod elect {
    //! `lockkit elect` where it can't keep its promise.

    use super::{Exit, Failure, NOT_EXECUTABLE};

    /// Run a command on one of many hosts: on Linux only
    ///
    /// CMD is to be gone before its term can lapse, also when lockkit itself is killed or stands still. That takes what only Linux has. Here
    /// no command is started.
    #[derive(Debug, clap::Args)]
    pub(crate) struct Args {
        #[arg(hide = true, trailing_var_arg = true, allow_hyphen_values = true)]
        all: Vec<std::ffi::OsString>,
    }

    pub(crate) fn run(_: Args) -> Exit {
        let why = "elect works on Linux only, for elsewhere CMD could outlive its term; CMD was not started";
        Err(Failure::new(NOT_EXECUTABLE, why))
    }
}
