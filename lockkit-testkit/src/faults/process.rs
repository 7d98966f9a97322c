//! Killing and freezing a process, such as a server or a worker of the test.

use rustix::process::{Pid, Signal, kill_process};
use std::{
    fs, io,
    path::Path,
    time::{Duration, Instant},
};

/// How long a process may take to stand still. A thread in the middle of a disk write finishes that first.
const FROZEN_WITHIN: Duration = Duration::from_secs(10);

/// Kills a process as `kill -9` does, even a frozen one. It is gone when its parent has waited for it.
///
/// # Errors
///
/// If there is no such process.
pub fn kill(pid: u32) -> io::Result<()> {
    signal(pid, Signal::KILL)
}

/// Stops a process in its tracks (`SIGSTOP`), and returns when none of its threads runs any more.
///
/// # Errors
///
/// If there is no such process, or it does not stand still.
pub async fn freeze(pid: u32) -> io::Result<()> {
    signal(pid, Signal::STOP)?;
    // The standard clock, because tokio's may be paused by the test.
    let deadline = Instant::now() + FROZEN_WITHIN;
    while !is_frozen(pid)? {
        if Instant::now() > deadline {
            return Err(io::Error::new(io::ErrorKind::TimedOut, format!("process {pid} does not stand still")));
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    Ok(())
}

/// Lets a frozen process go on where it was (`SIGCONT`).
///
/// # Errors
///
/// If there is no such process.
pub fn thaw(pid: u32) -> io::Result<()> {
    signal(pid, Signal::CONT)
}

/// Whether a process exists and has not ended. A frozen one has not.
#[must_use]
pub fn is_alive(pid: u32) -> bool {
    // What has ended but was not waited for yet is a zombie (Z); X is what a process is for the last instant.
    state(Path::new(&format!("/proc/{pid}"))).is_some_and(|state| !matches!(state, 'Z' | 'X'))
}

/// Whether every thread of a process stands still.
///
/// The first thread alone, which is what the state of the process shows, may stop a little earlier than the others.
fn is_frozen(pid: u32) -> io::Result<bool> {
    if !is_alive(pid) {
        return Err(io::Error::new(io::ErrorKind::NotFound, format!("process {pid} has ended")));
    }
    let mut threads = fs::read_dir(format!("/proc/{pid}/task"))?.filter_map(Result::ok);
    // A thread without a state ended since the directory was read.
    Ok(threads.all(|thread| state(&thread.path()).is_none_or(|state| state == 'T')))
}

/// The one-letter state of a process or thread, given its directory in `/proc`.
fn state(dir: &Path) -> Option<char> {
    let stat = fs::read_to_string(dir.join("stat")).ok()?;
    // The name of the program stands before it in parentheses, and may itself contain spaces and parentheses.
    stat.rsplit_once(") ")?.1.chars().next()
}

fn signal(pid: u32, signal: Signal) -> io::Result<()> {
    // 0 and negative numbers would address whole groups of processes.
    let pid = i32::try_from(pid).ok().filter(|&pid| pid > 0).and_then(Pid::from_raw);
    let pid = pid.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "not a process number"))?;
    Ok(kill_process(pid, signal)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[tokio::test]
    async fn a_process_is_frozen_thawed_and_killed() -> io::Result<()> {
        let mut child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn()?;
        let pid = child.id();
        freeze(pid).await?;
        assert!(is_frozen(pid)? && is_alive(pid));
        thaw(pid)?;
        assert!(!is_frozen(pid)?);
        freeze(pid).await?;
        kill(pid)?;
        child.wait()?;
        assert!(!is_alive(pid));
        assert!(freeze(pid).await.is_err());
        Ok(())
    }

    #[test]
    fn no_group_of_processes_is_ever_addressed() {
        for pid in [0, u32::MAX] {
            assert_eq!(kill(pid).expect_err("no process").kind(), io::ErrorKind::InvalidInput);
        }
    }
}
