//! CMD and all that it started, and how to reach them.
//!
//! A process group alone does not do: with a terminal CMD shares ours, and shells put their jobs into groups of their
//! own. So every process that carries the mark of this run in its environment is looked up as well, which on Linux
//! finds children, orphans and daemons alike, and each descendant of those, which finds what has cleared its environment. What has
//! done so, and whose parents have all ended before, escapes; and so does an orphan whose environment this user may not read, or that takes
//! longer than a tenth of a second to load a program or to map memory. One that takes half as long may get KILL without TERM before.

use std::{collections::HashSet, time::Duration};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};

use super::{
    marks::Marks,
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
    pub(super) marks: Marks,
}

impl Targets {
    /// What carries the mark of this run.
    pub(super) fn marked(run: String) -> Self {
        Self { run, leader: None, started: None, own_group: false, marks: Marks::default() }
    }

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
        // CMD comes first, and nothing is asked for its mark before. An error is fine: CMD may be gone, and `kill` tells of what may not be
        // signalled.
        if let Some(leader) = leader {
            let _ = if self.own_group { kill_process_group(leader, signal) } else { kill_process(leader, signal) };
        }
        let mut all = Vec::new();
        self.find(&seen, leader, |process, stat| {
            if !self.is_cmd(leader, process.pid, stat) {
                process.signal(signal);
            }
            all.push(process);
        });
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
        let (seen, leader) = (look(), self.own_leader());
        let mut all = Vec::new();
        let unsure = self.find(&seen, leader, |process, _| all.push(process));
        (all, unsure)
    }

    /// Whether this is CMD itself, or of its group.
    fn is_cmd(&self, leader: Option<Pid>, pid: Pid, stat: &Stat) -> bool {
        leader.is_some_and(|leader| leader == pid || self.own_group && leader.as_raw_nonzero().get() == stat.group)
    }

    /// Finds all of them among those that were seen, each as soon as it is known to be one; returns those of which it could not be told.
    fn find(&self, seen: &[(Pid, Stat)], leader: Option<Pid>, found: impl FnMut(Process, &Stat)) -> Vec<(Pid, Stat)> {
        let mut family = Family { seen, known: HashSet::new(), maybe_watchdogs: Vec::new(), found };
        family.add(seen.iter().filter(|(pid, stat)| self.is_cmd(leader, *pid, stat)).copied().collect());
        let mut unsure = Vec::new();
        let others = seen.iter().filter(|(pid, _)| !family.known.contains(pid)).copied().collect();
        self.marks.ask(others, &self.run, |process, is_marked| match is_marked {
            Some(true) => family.add(vec![process]),
            Some(false) => {}
            None => unsure.push(process),
        });
        unsure.retain(|(pid, _)| !family.known.contains(pid));
        self.marks.ask(std::mem::take(&mut family.maybe_watchdogs), nest::WATCHDOG, |(pid, stat), is_marked| {
            if is_marked != Some(true) {
                family.tell(pid, &stat);
            }
        });
        unsure
    }

    /// Asks these again until all have told, for a while. True if none of them was found to be marked.
    fn are_others(&self, mut unsure: Vec<(Pid, Stat)>) -> bool {
        for _ in 0..ASKED {
            let (mut any, mut still) = (false, Vec::new());
            self.marks.ask(unsure, &self.run, |process, is_marked| match is_marked {
                Some(is_marked) => any |= is_marked,
                None => still.push(process),
            });
            if any || still.is_empty() {
                return !any;
            }
            unsure = still;
            std::thread::sleep(ASK_AGAIN);
        }
        true
    }
}

/// CMD and all that it started, as far as it was found.
struct Family<'a, F> {
    seen: &'a [(Pid, Stat)],
    known: HashSet<Pid>,
    /// Those that may be the watchdog of a run within CMD, which has to outlive that run.
    maybe_watchdogs: Vec<(Pid, Stat)>,
    found: F,
}

impl<F: FnMut(Process, &Stat)> Family<'_, F> {
    /// Adds these, and all that descend from them.
    fn add(&mut self, mut next: Vec<(Pid, Stat)>) {
        let mut is_child = false;
        while !next.is_empty() {
            for (pid, stat) in next {
                match self.known.insert(pid) {
                    true if is_child && stat.may_be_watchdog => self.maybe_watchdogs.push((pid, stat)),
                    true => self.tell(pid, &stat),
                    false => {}
                }
            }
            let is_new = |(pid, stat): &&(Pid, Stat)| {
                !self.known.contains(pid)
                    && Pid::from_raw(stat.parent).is_some_and(|parent| self.known.contains(&parent))
            };
            (next, is_child) = (self.seen.iter().filter(is_new).copied().collect(), true);
        }
    }

    fn tell(&mut self, pid: Pid, stat: &Stat) {
        if let Some(process) = Process::open(pid, stat) {
            (self.found)(process, stat);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead, BufReader},
        process::{Child, Command, Stdio},
        sync::{Mutex, mpsc},
    };

    use super::*;

    /// Each look at all processes takes a while, in which one of them may start another and end.
    #[test]
    fn nothing_that_was_born_meanwhile_is_left() {
        for round in 0..60 {
            let run = format!("LOCKKIT_TEST_KILL={}.{round}", std::process::id());
            let (name, value) = run.split_once('=').unwrap();
            let script = "while :; do sleep 0.02; done";
            let mut child = Command::new("sh").args(["-c", script]).env(name, value).spawn().unwrap();
            let leader = Pid::from_raw(child.id().cast_signed());
            let targets = Targets { started: leader.and_then(started), leader, ..Targets::marked(run.clone()) };
            while targets.all().0.len() < 2 {
                std::thread::yield_now();
            }
            assert!(targets.kill(Vec::new()).is_empty());
            let (left, _) = targets.all();
            assert!(left.is_empty(), "{left:?}, in round {round}");
            child.wait().unwrap();
        }
    }

    static SILENT: Mutex<Vec<Pid>> = Mutex::new(Vec::new());

    fn read_all_but_some(stat: &Stat, pid: Pid, text: &str) -> Option<bool> {
        while SILENT.lock().unwrap().contains(&pid) {
            std::thread::park();
        }
        stat.is_marked(pid, text)
    }

    fn started_with(run: &str, command: &mut Command) -> (Child, Pid) {
        let (name, value) = run.split_once('=').unwrap();
        let child = command.env(name, value).stdout(Stdio::piped()).spawn().unwrap();
        let pid = Pid::from_raw(child.id().cast_signed()).unwrap();
        // Its own mark, and not that of the shell that it was forked by, or half of it.
        while look().iter().all(|(other, stat)| *other != pid || stat.is_marked(pid, run) != Some(true)) {
            std::thread::yield_now();
        }
        (child, pid)
    }

    /// One of them hangs on its disk, with its memory map locked. What is no child of CMD stands for what has lost its parent.
    #[test]
    fn one_that_can_not_be_asked_shields_no_other() {
        let run = format!("LOCKKIT_TEST_SILENT={}", std::process::id());
        let script = "sleep 600 & echo $!; sleep 600 & echo $!; wait";
        let (mut cmd, leader) = started_with(&run, Command::new("sh").args(["-c", script]));
        let mut lines = BufReader::new(cmd.stdout.take().unwrap()).lines();
        let [first, second] = [(); 2].map(|()| Pid::from_raw(lines.next().unwrap().unwrap().parse().unwrap()).unwrap());
        let (stranger, silent) = started_with(&run, Command::new("sleep").arg("600"));
        let (orphan, _) = started_with(&run, Command::new("sleep").arg("600"));
        SILENT.lock().unwrap().extend([leader, first, silent]);
        let marks = Marks::read_by(read_all_but_some);
        let targets = Targets { started: started(leader), leader: Some(leader), marks, ..Targets::marked(run) };
        let (done, killed) = mpsc::channel();
        std::thread::spawn(move || {
            drop(targets.signal(Signal::CONT));
            done.send(targets.kill(Vec::new()).is_empty())
        });
        let killed = killed.recv_timeout(Duration::from_secs(20));
        let mut children = [cmd, orphan, stranger];
        let have_ended = children.each_mut().map(|child| child.try_wait().unwrap().is_some());
        for child in &mut children {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        assert_eq!((killed, have_ended), (Ok(true), [true, true, false]));
        assert_eq!([first, second].map(started), [None; 2]);
    }

    /// In the middle of loading a program a process has no environment for a moment.
    #[test]
    fn a_process_that_loads_a_program_is_found() {
        for round in 0..300 {
            let run = format!("LOCKKIT_TEST_EXEC={}.{round}", std::process::id());
            let (name, value) = run.split_once('=').unwrap();
            let script = r#"exec sh -c "$0" "$0""#;
            let mut child = Command::new("sh").args(["-c", script, script]).env(name, value).spawn().unwrap();
            let targets = Targets::marked(run.clone());
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
