//! `lockkit __exec`: what stands between `lockkit run` and CMD for an instant, and becomes CMD.
//!
//! A process can ask the kernel to be killed when its parent dies, but only for itself, and between `fork` and `exec`
//! nothing can be run without unsafe code. So this does it, and then replaces itself by CMD. It also looks at the clock once
//! more: `lockkit run` may have stood still after it did so.

use std::{
    env,
    ffi::{OsStr, OsString},
    io,
    os::unix::process::CommandExt,
    path::Path,
    process::Command,
};

use clap::Args as ClapArgs;
use lockkit::{Clock, Moment, SystemClock};
use rustix::{
    fs::{Access, access},
    process::{Signal, getpid, getppid, kill_process, set_parent_process_death_signal},
};

use super::report::Reporter;
use crate::exit::{Exit, Failure, LOST, NOT_EXECUTABLE, NOT_FOUND};

/// The hidden subcommand.
pub(crate) const VERB: &str = "__exec";

/// Its option that has it report.
pub(super) const REPORT: &str = "--report";

/// Become a command that dies with its parent
#[derive(Debug, ClapArgs)]
pub(crate) struct Args {
    /// The process number that the parent must have
    parent: i32,
    /// Until when the command may run, in nanoseconds of the system's clock
    until: u64,
    /// Whether standard input is a socket that has that of the command, and is to hear whether that has begun
    #[arg(long)]
    report: bool,
    /// The command
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

pub(crate) fn run(args: &Args) -> Exit {
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|error| Failure::system("have CMD end with lockkit", &error.into()))?;
    // It may have died before the kernel was asked.
    if getppid().map(|parent| parent.as_raw_nonzero().get()) != Some(args.parent) {
        return Err(Failure::new(LOST, "CMD was not started: lockkit run is gone"));
    }
    let mut reporter = args.report.then(Reporter::take).transpose();
    let reporter = reporter.as_mut().map_err(|error| Failure::system("get the standard input of CMD", error))?;
    let Some((program, arguments)) = args.command.split_first() else {
        return Err(Failure::new(NOT_FOUND, "there is no CMD"));
    };
    // Last of all. If time runs out after this, the watchdog finds this process, or what it has become.
    if SystemClock.now() >= Moment::from_nanos(args.until) {
        return Err(Failure::new(LOST, "CMD was not started: nothing is left of its lease"));
    }
    reporter.as_mut().map(Reporter::begins);
    let error = Command::new(program).args(arguments).exec();
    reporter.as_mut().map(Reporter::failed);
    let code = if error.kind() == io::ErrorKind::NotFound { NOT_FOUND } else { NOT_EXECUTABLE };
    Err(Failure::new(code, format!("could not run {program:?}: {error}")))
}

/// Looks for CMD before a window begins, so that a host which lacks CMD does not keep the other hosts from running it.
pub(super) fn find(command: &[OsString]) -> Result<(), Failure> {
    let program = Path::new(command.first().map_or(OsStr::new(""), OsString::as_os_str));
    let can_run = |path: &Path| path.is_file() && access(path, Access::EXEC_OK).is_ok();
    let is_there = if program.as_os_str().as_encoded_bytes().contains(&b'/') {
        can_run(program)
    } else {
        // Without a PATH the system looks where it likes.
        env::var_os("PATH")
            .is_none_or(|path| env::split_paths(&path).any(|directory| can_run(&directory.join(program))))
    };
    if is_there {
        Ok(())
    } else {
        // Without its name: before a store is connected to, what stands here may be a part of its URL.
        Err(Failure::new(NOT_FOUND, "CMD is not there, or can't be executed"))
    }
}

/// The hidden subcommand that dies of SIGINT.
pub(crate) const DIE: &str = "__die";

/// Ends this process as Ctrl-C would have, had it not been caught: an exit code of 130 would tell a shell that the
/// interrupt was dealt with, and its loop would go on. What was caught is reset only by becoming another program.
pub(super) fn die_of_interrupt() {
    // Should it fail, the exit code has to do.
    drop(this_program().arg(DIE).exec());
}

/// Dies of SIGINT; where that is ignored, with the exit code.
pub(crate) fn die() -> Exit {
    let _ = kill_process(getpid(), Signal::INT);
    Ok(130)
}

/// A command that runs this very program, also if its file was replaced since.
pub(super) fn this_program() -> Command {
    let mut command = Command::new(format!("/proc/self/{OWN_NAME}"));
    command.arg0("lockkit");
    command
}

/// The system names a process after the file that it was told to run.
pub(super) const OWN_NAME: &str = "exe";
