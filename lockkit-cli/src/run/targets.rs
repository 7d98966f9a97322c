//! CMD and all that it started, and how to reach them.
//!
//! A process group alone does not do: with a terminal CMD shares ours, and shells put their jobs into groups of their
//! own. So every process that carries the mark of this run in its environment is looked up as well, which on Linux
//! finds children, orphans and daemons alike, and each descendant of those, which finds what has cleared its environment. What has
//! done so, and whose parents have all ended before, escapes.

use std::{collections::HashSet, fs, io, os::fd::OwnedFd, time::Duration};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    process::{Pid, PidfdFlags, Signal, kill_process, kill_process_group, pidfd_open, pidfd_send_signal},
};

use super::{
    nest,
    signals::{self, Route},
};

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
    /// When it started, in ticks since the machine did, if that is known. A number may be another process's later.
    pub(super) started: Option<u64>,
    /// Whether CMD leads a process group of its own.
    pub(super) own_group: bool,
}

/// When a process started, unless it has ended.
pub(super) fn started(pid: Pid) -> Option<u64> {
    Some(Stat::of(pid).ok()??.started)
}

impl Targets {
    /// CMD itself, unless its number is another's by now, and with it that of its group.
    fn own_leader(&self) -> Option<Pid> {
        self.leader.filter(|leader| match (self.started, started(*leader)) {
            (Some(then), Some(now)) => then == now,
            _ => true,
        })
    }

    /// Passes on a signal that this process got.
    pub(super) fn forward(&self, signal: Signal) {
        match (Route::of(signal, self.own_group, signals::in_foreground()), self.leader) {
            (Route::All, _) => drop(self.signal(signal)),
            (Route::Leader, Some(leader)) => {
                let _ = kill_process(leader, signal);
            }
            (Route::Leader, None) | (Route::Nobody, _) => {}
        }
    }

    /// Sends a signal to all of them, once each, and says which they were: once the parent of one has ended, it may not be found again.
    pub(super) fn signal(&self, signal: Signal) -> Vec<Process> {
        let (seen, leader) = (look(), self.own_leader());
        let group = leader.filter(|_| self.own_group).map(|leader| leader.as_raw_nonzero().get());
        let in_group: HashSet<_> =
            seen.iter().filter(|(_, stat)| group == Some(stat.group)).map(|(pid, _)| *pid).collect();
        // CMD comes first: reading the environment of another process blocks while that process loads a new program or maps memory, and
        // that may take as long as its disk likes. An error is fine: CMD may be gone, and `kill` tells of what may not be signalled.
        if let Some(leader) = leader {
            let _ = if self.own_group { kill_process_group(leader, signal) } else { kill_process(leader, signal) };
        }
        let mut all = with_descendants(&seen, |pid| leader == Some(pid) || in_group.contains(&pid));
        let send = |process: &Process| {
            if leader != Some(process.pid) && !in_group.contains(&process.pid) {
                process.signal(signal);
            }
        };
        all.iter().for_each(send);
        // These come last, for the same reason.
        let mut others = with_descendants(&seen, |pid| is_in_environment(pid, &self.run));
        others.retain(|process| !all.iter().any(|known| known.is(process)));
        others.iter().for_each(send);
        all.append(&mut others);
        all
    }

    /// Kills all of them, and those that were `known` before, and looks again for what was being born meanwhile, until a look finds none.
    /// Returns those that are left all the same: they are another user's, say.
    pub(super) fn kill(&self, known: Vec<Process>) -> Vec<Process> {
        let (mut left, mut found) = (known, self.signal(Signal::KILL));
        for _ in 0..ROUNDS {
            found.retain(|process| !left.iter().any(|known| known.is(process)));
            left.append(&mut found);
            left.retain(|process| {
                process.signal(Signal::KILL);
                process.is_running()
            });
            // Also when all have ended: one of them may have started another in the middle of the last look.
            found = self.all();
            if left.is_empty() && found.is_empty() {
                break;
            }
            std::thread::sleep(LOOK_AGAIN);
        }
        found.retain(|process| !left.iter().any(|known| known.is(process)));
        left.append(&mut found);
        left
    }

    /// The processes that run, each held by a descriptor, as far as there are any left: a mere number may be another's a moment later.
    fn all(&self) -> Vec<Process> {
        let leader = self.own_leader();
        with_descendants(&look(), |pid| leader == Some(pid) || is_in_environment(pid, &self.run))
    }
}

/// All processes that run.
fn look() -> Vec<(Pid, Stat)> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let number = |entry: fs::DirEntry| entry.file_name().to_str()?.parse().ok().and_then(Pid::from_raw);
    entries.flatten().filter_map(number).filter_map(|pid| Some((pid, Stat::of(pid).ok()??))).collect()
}

/// Those of the processes that are the first, or descend from one of them.
fn with_descendants(seen: &[(Pid, Stat)], is_first: impl Fn(Pid) -> bool) -> Vec<Process> {
    let mut found: HashSet<Pid> = seen.iter().map(|(pid, _)| *pid).filter(|pid| is_first(*pid)).collect();
    loop {
        // The watchdog of a run within CMD has to outlive that run.
        let is_child = |(pid, stat): &&(Pid, Stat)| {
            !found.contains(pid)
                && Pid::from_raw(stat.parent).is_some_and(|parent| found.contains(&parent))
                && !is_in_environment(*pid, nest::WATCHDOG)
        };
        let children: Vec<_> = seen.iter().filter(is_child).map(|(pid, _)| *pid).collect();
        if children.is_empty() {
            break;
        }
        found.extend(children);
    }
    let found = seen.iter().filter(|(pid, _)| found.contains(pid));
    found.filter_map(|(pid, stat)| Process::open(*pid, stat)).collect()
}

fn is_in_environment(pid: Pid, text: &str) -> bool {
    let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    environment.windows(text.len()).any(|window| window == text.as_bytes())
}

/// A process that was found.
#[derive(Debug)]
pub(super) struct Process {
    pid: Pid,
    /// None if this process may not have it, or has too many already.
    handle: Option<OwnedFd>,
    started: u64,
}

impl Process {
    /// The process with this number, unless it is another one by now.
    fn open(pid: Pid, stat: &Stat) -> Option<Self> {
        let process = Self { pid, handle: pidfd_open(pid, PidfdFlags::empty()).ok(), started: stat.started };
        // After its descriptor was opened: the number may be another's since it was seen.
        process.is_still_its_number().then_some(process)
    }

    fn signal(&self, signal: Signal) {
        let _ = match &self.handle {
            Some(handle) => pidfd_send_signal(handle, signal),
            // Its number is given to another in the time between these two only if all numbers are.
            None if self.is_running() => kill_process(self.pid, signal),
            None => Ok(()),
        };
    }

    fn is(&self, other: &Self) -> bool {
        (self.pid, self.started) == (other.pid, other.started)
    }

    /// Whether any thread of it may still do something. If that can't be told, it may.
    pub(super) fn is_running(&self) -> bool {
        match &self.handle {
            // The descriptor is readable once the last thread has ended.
            Some(handle) => {
                !matches!(poll(&mut [PollFd::new(handle, PollFlags::IN)], Some(&Timespec::default())), Ok(ended) if ended > 0)
            }
            None => self.is_still_its_number(),
        }
    }

    /// Whether this is its number, as far as that can be told, and it has not ended.
    fn is_still_its_number(&self) -> bool {
        Stat::of(self.pid).map_or(true, |stat| stat.is_some_and(|stat| stat.started == self.started))
    }
}

/// What the system says of a process that has not ended.
#[derive(Debug, PartialEq, Eq)]
struct Stat {
    parent: i32,
    /// Its process group; 0 if it is the kernel's.
    group: i32,
    /// When it started, in ticks since the machine did.
    started: u64,
}

impl Stat {
    /// `None` if there is no such process, or it has ended.
    fn of(pid: Pid) -> io::Result<Option<Self>> {
        match fs::read_to_string(format!("/proc/{pid}/stat")) {
            Ok(text) => Ok(Self::parse(&text)),
            Err(error)
                if error.kind() == io::ErrorKind::NotFound
                    || error.raw_os_error() == Some(Errno::SRCH.raw_os_error()) =>
            {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// See proc_pid_stat(5): the name in parentheses may have spaces and parentheses of its own.
    fn parse(text: &str) -> Option<Self> {
        let mut fields = text.rsplit_once(") ")?.1.split_ascii_whitespace();
        let has_ended = matches!(fields.next()?, "Z" | "X");
        let parent = fields.next()?.parse().ok()?;
        let group = fields.next()?.parse().ok()?;
        let threads: u32 = fields.nth(14)?.parse().ok()?;
        let started = fields.nth(1)?.parse().ok()?;
        // One that has ended, and that nobody has waited for yet, does no more work. But its first thread may end before others.
        (!has_ended || threads > 1).then_some(Self { parent, group, started })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each look at all processes takes a while, in which one of them may start another and end.
    #[test]
    fn nothing_that_was_born_meanwhile_is_left() {
        for round in 0..60 {
            let run = format!("LOCKKIT_TEST_KILL={}.{round}", std::process::id());
            let (name, value) = run.split_once('=').unwrap();
            let script = "while :; do sleep 0.02; done";
            let mut child = std::process::Command::new("sh").args(["-c", script]).env(name, value).spawn().unwrap();
            let leader = Pid::from_raw(child.id().cast_signed());
            let targets = Targets { started: leader.and_then(started), run, leader, own_group: false };
            while targets.all().len() < 2 {
                std::thread::yield_now();
            }
            assert!(targets.kill(Vec::new()).is_empty());
            let left = targets.all();
            assert!(left.is_empty(), "{left:?}, in round {round}");
            child.wait().unwrap();
        }
    }

    /// Its first thread has ended, and what the system says of it looks as if it had.
    #[test]
    fn a_process_runs_as_long_as_its_last_thread() {
        let script = "import ctypes, threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\n\
            ctypes.CDLL(None).pthread_exit(None)";
        let mut child = std::process::Command::new("python3").args(["-c", script]).spawn().unwrap();
        let pid = Pid::from_raw(child.id().cast_signed()).unwrap();
        while !fs::read_to_string(format!("/proc/{pid}/stat")).unwrap().contains(") Z ") {
            assert!(child.try_wait().unwrap().is_none(), "it has ended as a whole");
            std::thread::yield_now();
        }
        let stat = Stat::of(pid).unwrap().expect("a thread of it sleeps");
        let process = Process::open(pid, &stat).expect("a thread of it sleeps");
        let by_number = Process { handle: None, ..Process::open(pid, &stat).unwrap() };
        assert!(process.is_running() && by_number.is_running());
        process.signal(Signal::KILL);
        child.wait().unwrap();
        assert!(!process.is_running() && !by_number.is_running());
    }

    #[test]
    fn a_process_may_have_any_name() {
        let threads = |name: &str, state: &str, count: u32| {
            format!("71 ({name}) {state} 70 71 71 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 {count} 0 4711 2 3")
        };
        let line = |name: &str, state: &str| threads(name, state, 1);
        for name in ["sh", "a b", "a) R 1 (", ""] {
            assert_eq!(Stat::parse(&line(name, "S")), Some(Stat { parent: 70, group: 71, started: 4711 }), "{name}");
        }
        assert_eq!(Stat::parse(&line("sh", "Z")), None);
        assert!(Stat::parse(&threads("sh", "Z", 2)).is_some(), "its other thread goes on");
        assert_eq!(Stat::parse("71 (sh"), None);
        let own = rustix::process::getpid();
        assert!(Stat::of(own).unwrap().is_some_and(|stat| stat.parent > 0 && stat.started > 0));
    }
}
