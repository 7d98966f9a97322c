//! Processes as the system shows them in `/proc`, and how to signal the one that is meant.

use std::{fs, io, os::fd::OwnedFd, sync::LazyLock};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    process::{Pid, PidfdFlags, Signal, getpid, kill_process, pidfd_open, pidfd_send_signal},
};

use super::exec;

/// When a process started, unless it has ended.
pub(super) fn started(pid: Pid) -> Option<u64> {
    Some(Stat::of(pid).ok()??.started)
}

/// All processes that run.
pub(super) fn look() -> Vec<(Pid, Stat)> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let number = |entry: fs::DirEntry| entry.file_name().to_str()?.parse().ok().and_then(Pid::from_raw);
    entries.flatten().filter_map(number).filter_map(|pid| Some((pid, Stat::of(pid).ok()??))).collect()
}

/// A process that was found.
#[derive(Debug)]
pub(super) struct Process {
    pub(super) pid: Pid,
    /// None if this process may not have it, or has too many already.
    handle: Option<OwnedFd>,
    started: u64,
}

impl Process {
    /// The process with this number, unless it is another one by now.
    pub(super) fn open(pid: Pid, stat: &Stat) -> Option<Self> {
        let process = Self { pid, handle: pidfd_open(pid, PidfdFlags::empty()).ok(), started: stat.started };
        // After its descriptor was opened: the number may be another's since it was seen.
        process.is_still_its_number().then_some(process)
    }

    pub(super) fn signal(&self, signal: Signal) {
        let _ = match &self.handle {
            Some(handle) => pidfd_send_signal(handle, signal),
            // Its number is given to another in the time between these two only if all numbers are.
            None if self.is_running() => kill_process(self.pid, signal),
            None => Ok(()),
        };
    }

    pub(super) fn is(&self, other: &Self) -> bool {
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stat {
    pub(super) parent: i32,
    /// Its process group; 0 if it is the kernel's.
    pub(super) group: i32,
    /// When it started, in ticks since the machine did.
    pub(super) started: u64,
    /// Whether it has the name that the system gives to a watchdog.
    pub(super) may_be_watchdog: bool,
    /// Whether its first thread has ended, and others go on.
    first_has_ended: bool,
    /// Whether its first thread is about to end, or has: it has no environment any more.
    first_ends: bool,
    threads: u32,
    /// Whether it is a thread of the kernel.
    is_kernel: bool,
    /// Whether its program is loaded. Linux notes where the code is after all else (`load_elf_binary` in fs/binfmt_elf.c).
    is_loaded: bool,
    /// The length of its environment in bytes.
    environment: u64,
}

/// The flags of a thread that is ending, and of one of the kernel (`PF_EXITING` and `PF_KTHREAD` in Linux' sched.h).
const ENDING: u32 = 0x4;
const KERNEL_THREAD: u32 = 0x0020_0000;

impl Stat {
    /// Whether this is in the environment of the process; `None` if that can't be told now. A process that loads a program has no
    /// environment until it is loaded, and what was read of the environment before may be a part of it. This may block for long.
    pub(super) fn is_marked(&self, pid: Pid, text: &str) -> Option<bool> {
        let is_in = |environment: &[u8]| environment.windows(text.len()).any(|window| window == text.as_bytes());
        if self.is_kernel {
            return Some(false);
        }
        match fs::read(format!("/proc/{pid}/environ")) {
            Ok(environment) if is_in(&environment) => return Some(true),
            Ok(environment) if Self::of(pid).is_ok_and(|now| now.is_some_and(|now| now.has_all(&environment))) => {
                return Some(false);
            }
            // The process is another user's, with few exceptions. Once its first thread has ended, the file belongs to the administrator.
            Err(error)
                if error.kind() == io::ErrorKind::PermissionDenied
                    && Self::of(pid).is_ok_and(|now| now.is_none_or(|now| !now.first_ends)) =>
            {
                return Some(false);
            }
            _ => {}
        }
        // Once the first thread has ended, only the others know it.
        let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        let mut told = threads.filter_map(|thread| fs::read(thread.path().join("environ")).ok());
        if told.any(|environment| is_in(&environment)) {
            return Some(true);
        }
        // One that is ending does nothing any more.
        let now = Self::of(pid).ok().flatten();
        now.is_none_or(|now| now.first_has_ended || now.first_ends && now.threads == 1).then_some(false)
    }

    /// Whether this is its whole environment.
    fn has_all(&self, environment: &[u8]) -> bool {
        static IS_TOLD: LazyLock<bool> =
            LazyLock::new(|| Stat::of(getpid()).is_ok_and(|own| own.is_some_and(|own| own.is_loaded)));
        !self.first_has_ended
            && (!*IS_TOLD
                || self.is_loaded && u64::try_from(environment.len()).is_ok_and(|length| length == self.environment))
    }

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
        let (name, fields) = text.rsplit_once(") ")?;
        let may_be_watchdog = name.split_once(" (")?.1 == exec::OWN_NAME;
        let mut fields = fields.split_ascii_whitespace();
        let has_ended = matches!(fields.next()?, "Z" | "X");
        let parent = fields.next()?.parse().ok()?;
        let group = fields.next()?.parse().ok()?;
        let flags: u32 = fields.nth(3)?.parse().ok()?;
        let threads: u32 = fields.nth(10)?.parse().ok()?;
        let started = fields.nth(1)?.parse().ok()?;
        // These two may be missing or zero on a system that is like Linux.
        let is_loaded = fields.nth(3).is_some_and(|code| code != "0");
        let mut address = |skipped| fields.nth(skipped).and_then(|field| field.parse::<u64>().ok()).unwrap_or_default();
        let begin = address(23);
        let environment = address(0).saturating_sub(begin);
        let (first_ends, is_kernel) = (has_ended || flags & ENDING != 0, flags & KERNEL_THREAD != 0);
        // One that has ended, and that nobody has waited for yet, does no more work. But its first thread may end before others.
        let stat = Self {
            parent,
            group,
            started,
            may_be_watchdog,
            first_has_ended: has_ended,
            first_ends,
            threads,
            is_kernel,
            is_loaded,
            environment,
        };
        (!has_ended || threads > 1).then_some(stat)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// A process without an environment is not asked again.
    #[test]
    fn a_process_without_an_environment_is_known_to_have_none() {
        let mut child = std::process::Command::new("sleep").arg("60").env_clear().spawn().unwrap();
        let pid = Pid::from_raw(child.id().cast_signed()).unwrap();
        let told = (0..200).find_map(|_| {
            std::thread::sleep(Duration::from_millis(5));
            Stat::of(pid).unwrap().expect("it runs").is_marked(pid, "LOCKKIT")
        });
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(told, Some(false));
    }

    /// Its first thread has ended, and what the system says of it looks as if it had.
    #[test]
    fn a_process_runs_as_long_as_its_last_thread() {
        let script = "import ctypes, threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\n\
            ctypes.CDLL(None).pthread_exit(None)";
        let mut python = std::process::Command::new("python3");
        let mut child = python.args(["-c", script]).env("LOCKKIT_TEST_THREAD", "1").spawn().unwrap();
        let pid = Pid::from_raw(child.id().cast_signed()).unwrap();
        while !fs::read_to_string(format!("/proc/{pid}/stat")).unwrap().contains(") Z ") {
            assert!(child.try_wait().unwrap().is_none(), "it has ended as a whole");
            std::thread::yield_now();
        }
        let stat = Stat::of(pid).unwrap().expect("a thread of it sleeps");
        let process = Process::open(pid, &stat).expect("a thread of it sleeps");
        let by_number = Process { handle: None, ..Process::open(pid, &stat).unwrap() };
        assert!(process.is_running() && by_number.is_running());
        assert_eq!(stat.is_marked(pid, "LOCKKIT_TEST_THREAD=1"), Some(true));
        process.signal(Signal::KILL);
        child.wait().unwrap();
        assert!(!process.is_running() && !by_number.is_running());
    }

    #[test]
    fn a_process_may_have_any_name() {
        let threads = |name: &str, state: &str, count: u32| {
            format!(
                "71 ({name}) {state} 70 71 71 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 {count} 0 4711 2 3 0 5{} 70 80",
                " 0".repeat(23)
            )
        };
        let line = |name: &str, state: &str| threads(name, state, 1);
        for name in ["sh", "a b", "a) R 1 (", "", "exe"] {
            assert_eq!(
                Stat::parse(&line(name, "S")),
                Some(Stat {
                    parent: 70,
                    group: 71,
                    started: 4711,
                    may_be_watchdog: name == "exe",
                    first_has_ended: false,
                    first_ends: false,
                    threads: 1,
                    is_kernel: false,
                    is_loaded: true,
                    environment: 10
                }),
                "{name}"
            );
        }
        assert_eq!(Stat::parse(&line("sh", "Z")), None);
        assert!(Stat::parse(&threads("sh", "Z", 2)).is_some(), "its other thread goes on");
        assert_eq!(Stat::parse("71 (sh"), None);
        let own = rustix::process::getpid();
        assert!(Stat::of(own).unwrap().is_some_and(|stat| stat.parent > 0 && stat.started > 0));
    }
}
