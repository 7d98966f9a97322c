//! CMD and all that it started, and how to reach them.
//!
//! A process group alone does not do: with a terminal CMD shares ours, and shells put their jobs into groups of their
//! own. So every process that carries the mark of this run in its environment is looked up as well, which on Linux
//! finds children, orphans and daemons alike, and each descendant of those, which finds what has cleared its environment. What has
//! done so, and whose parents have all ended before, escapes; and so does an orphan whose environment this user may not read, or that takes
//! longer than a tenth of a second to load a program.

use std::{cell::RefCell, collections::HashSet, time::Duration};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};

use super::{
    nest,
    process::{Process, Stat, look, started},
    signals::{self, Route},
};

/// How often what was killed is looked for again.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// How many times. One that is not gone by then is beyond the reach of signals.
const ROUNDS: u32 = 100;

/// How often one that is loading a program is asked for its mark, and how many times: as a rule it takes less than a millisecond.
const ASK_AGAIN: Duration = Duration::from_millis(1);
const ASKED: u32 = 100;

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
        let mut all = with_descendants(&seen, |pid, _| leader == Some(pid) || in_group.contains(&pid));
        let send = |process: &Process| {
            if leader != Some(process.pid) && !in_group.contains(&process.pid) {
                process.signal(signal);
            }
        };
        all.iter().for_each(send);
        // These come last, for the same reason.
        let mut others = with_descendants(&seen, |pid, stat| stat.is_marked(pid, &self.run) == Some(true));
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
            let unsure;
            (found, unsure) = self.all();
            if left.is_empty() && found.is_empty() && self.are_others(unsure) {
                break;
            }
            std::thread::sleep(LOOK_AGAIN);
        }
        found.retain(|process| !left.iter().any(|known| known.is(process)));
        left.append(&mut found);
        left
    }

    /// The processes that run, each held by a descriptor, as far as there are any left: a mere number may be another's a moment later. And
    /// those of which it could not be told whether they belong to these.
    fn all(&self) -> (Vec<Process>, Vec<(Pid, Stat)>) {
        let (leader, seen, unsure) = (self.own_leader(), look(), RefCell::<Vec<_>>::default());
        let is_first = |pid, stat: &Stat| {
            let is_marked = || {
                let is_marked = stat.is_marked(pid, &self.run);
                if is_marked.is_none() {
                    unsure.borrow_mut().push((pid, *stat));
                }
                is_marked == Some(true)
            };
            leader == Some(pid) || is_marked()
        };
        (with_descendants(&seen, is_first), unsure.into_inner())
    }

    /// Asks these again until all have told, for a while. True if none of them was found to be marked.
    fn are_others(&self, mut unsure: Vec<(Pid, Stat)>) -> bool {
        for _ in 0..ASKED {
            let mut any = false;
            unsure.retain(|(pid, stat)| {
                let is_marked = stat.is_marked(*pid, &self.run);
                any |= is_marked == Some(true);
                is_marked.is_none()
            });
            if any || unsure.is_empty() {
                return !any;
            }
            std::thread::sleep(ASK_AGAIN);
        }
        true
    }
}

/// Those of the processes that are the first, or descend from one of them.
fn with_descendants(seen: &[(Pid, Stat)], is_first: impl Fn(Pid, &Stat) -> bool) -> Vec<Process> {
    let first = seen.iter().filter(|(pid, stat)| is_first(*pid, stat));
    let mut found: HashSet<Pid> = first.map(|(pid, _)| *pid).collect();
    loop {
        // The watchdog of a run within CMD has to outlive that run.
        let is_child = |(pid, stat): &&(Pid, Stat)| {
            !found.contains(pid)
                && Pid::from_raw(stat.parent).is_some_and(|parent| found.contains(&parent))
                && stat.is_marked(*pid, nest::WATCHDOG) != Some(true)
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
            while targets.all().0.len() < 2 {
                std::thread::yield_now();
            }
            assert!(targets.kill(Vec::new()).is_empty());
            let (left, _) = targets.all();
            assert!(left.is_empty(), "{left:?}, in round {round}");
            child.wait().unwrap();
        }
    }

    /// In the middle of loading a program a process has no environment for a moment.
    #[test]
    fn a_process_that_loads_a_program_is_found() {
        for round in 0..300 {
            let run = format!("LOCKKIT_TEST_EXEC={}.{round}", std::process::id());
            let (name, value) = run.split_once('=').unwrap();
            let script = r#"exec sh -c "$0" "$0""#;
            let mut child =
                std::process::Command::new("sh").args(["-c", script, script]).env(name, value).spawn().unwrap();
            let targets = Targets { run, leader: None, started: None, own_group: false };
            assert!(targets.kill(Vec::new()).is_empty());
            let has_ended = (0..200).any(|_| {
                std::thread::sleep(LOOK_AGAIN);
                child.try_wait().unwrap().is_some()
            });
            child.kill().unwrap();
            child.wait().unwrap();
            assert!(has_ended, "it was not found in round {round}");
        }
    }
}
