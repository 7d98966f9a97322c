//! CMD and all that it started, and how to reach them.
//!
//! A process group alone does not do: with a terminal CMD shares ours, and shells put their jobs into groups of their
//! own. So every process that carries the mark of this run in its environment is looked up as well, which on Linux
//! finds children, orphans and daemons alike. What has cleared its environment, and is not in the group, escapes.

use std::{fs, os::fd::OwnedFd, time::Duration};

use rustix::process::{
    Pid, PidfdFlags, Signal, getpgid, kill_process, kill_process_group, pidfd_open, pidfd_send_signal,
};

use super::signals::{self, Route};

/// How often what was killed is looked for again.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// How many times. One that is not gone by then is beyond the reach of signals.
const ROUNDS: u32 = 100;

/// CMD and all that it started.
#[derive(Clone, Debug)]
pub(super) struct Targets {
    /// The mark: the number of this run, in the environment of CMD.
    pub(super) run: String,
    /// CMD itself, as long as it was not reaped.
    pub(super) leader: Option<Pid>,
    /// Whether CMD leads a process group of its own.
    pub(super) own_group: bool,
}

impl Targets {
    /// Passes on a signal that this process got.
    pub(super) fn forward(&self, signal: Signal) {
        match (Route::of(signal, self.own_group, signals::in_foreground()), self.leader) {
            (Route::All, _) => self.signal(signal),
            (Route::Leader, Some(leader)) => {
                let _ = kill_process(leader, signal);
            }
            (Route::Leader, None) | (Route::Nobody, _) => {}
        }
    }

    /// Sends a signal to all of them, once each.
    pub(super) fn signal(&self, signal: Signal) {
        // That somebody is gone already is fine, and what may not be signalled can't be helped.
        if let Some(leader) = self.leader {
            let _ = if self.own_group { kill_process_group(leader, signal) } else { kill_process(leader, signal) };
        }
        for (pid, process) in self.marked() {
            let reached = match self.leader {
                Some(leader) if self.own_group => getpgid(Some(pid)).is_ok_and(|group| group == leader),
                leader => leader == Some(pid),
            };
            if !reached {
                let _ = pidfd_send_signal(&process, signal);
            }
        }
    }

    /// Kills all of them, and looks again for what was being born meanwhile, until none is left.
    pub(super) fn kill(&self) {
        self.signal(Signal::KILL);
        for _ in 0..ROUNDS {
            // A dying process has no environment any more; a new one has it at once.
            let left = self.marked();
            if left.is_empty() {
                return;
            }
            for (_, process) in left {
                let _ = pidfd_send_signal(&process, Signal::KILL);
            }
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    /// The processes with the mark, each held by a descriptor: a mere number may be another's a moment later.
    fn marked(&self) -> Vec<(Pid, OwnedFd)> {
        let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
        let number = |entry: fs::DirEntry| entry.file_name().to_str()?.parse().ok().and_then(Pid::from_raw);
        entries.flatten().filter_map(number).filter_map(|pid| self.marks(pid).map(|process| (pid, process))).collect()
    }

    fn marks(&self, pid: Pid) -> Option<OwnedFd> {
        let process = pidfd_open(pid, PidfdFlags::empty()).ok()?;
        let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
        let mark = self.run.as_bytes();
        environment.windows(mark.len()).any(|window| window == mark).then_some(process)
    }
}
