//! Which processes carry a mark in their environment, found out without waiting for any one of them.
//!
//! Reading the environment of another process blocks while that process loads a new program or maps memory, and that may take as long as its disk
//! likes. So threads read, and where one of them gets no answer, another goes on with the next process.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::{
        Arc, Mutex,
        mpsc::{Sender, channel},
    },
    thread,
    time::Duration,
};

use lockkit::store::unpoisoned;
use rustix::process::Pid;

use super::process::Stat;

/// How long no answer may come before another thread goes on with the next process: as a rule it takes a few microseconds.
const NEXT_AFTER: Duration = Duration::from_millis(5);

/// How long the last ones are waited for.
const LAST_WITHIN: Duration = Duration::from_millis(50);

/// Asks processes for marks.
#[derive(Clone, Debug)]
pub(super) struct Marks {
    /// May block.
    read: fn(&Stat, Pid, &str) -> Option<bool>,
    /// Those that have been asked and have not answered, with the moments at which they started. They are not asked, and waited for, once more.
    silent: Arc<Mutex<HashSet<(Pid, u64)>>>,
}

impl Default for Marks {
    fn default() -> Self {
        Self { read: Stat::is_marked, silent: Arc::default() }
    }
}

impl Marks {
    /// Tells of each process, as soon as it is known, whether this is in its environment; `None` if it can't be told now.
    pub(super) fn ask(&self, processes: Vec<(Pid, Stat)>, text: &str, mut tell: impl FnMut((Pid, Stat), Option<bool>)) {
        let mut open: HashMap<_, _> = processes.iter().copied().collect();
        let (answer, answers) = channel();
        let left = Arc::new(Mutex::new(VecDeque::from(processes)));
        let reader = Reader { marks: self.clone(), text: text.to_owned(), left, answer };
        if !open.is_empty() {
            reader.begin();
        }
        while !open.is_empty() {
            let are_last = unpoisoned(&reader.left).is_empty();
            match answers.recv_timeout(if are_last { LAST_WITHIN } else { NEXT_AFTER }) {
                Ok((pid, is_marked)) => {
                    if let Some(stat) = open.remove(&pid) {
                        tell((pid, stat), is_marked);
                    }
                }
                Err(_) if are_last => break,
                Err(_) => reader.begin(),
            }
        }
        open.into_iter().for_each(|process| tell(process, None));
    }

    #[cfg(test)]
    pub(super) fn read_by(read: fn(&Stat, Pid, &str) -> Option<bool>) -> Self {
        Self { read, ..Self::default() }
    }
}

/// What asks one process after the other.
#[derive(Clone, Debug)]
struct Reader {
    marks: Marks,
    text: String,
    /// Those that are still to be asked.
    left: Arc<Mutex<VecDeque<(Pid, Stat)>>>,
    answer: Sender<(Pid, Option<bool>)>,
}

impl Reader {
    fn begin(&self) {
        let other = self.clone();
        if thread::Builder::new().spawn(move || other.read()).is_err() {
            // There are too many processes or threads: better here than not at all.
            self.read();
        }
    }

    fn read(&self) {
        while let Some((pid, stat)) = self.next() {
            let process = (pid, stat.started);
            let is_silent = !unpoisoned(&self.marks.silent).insert(process);
            let is_marked = if is_silent { None } else { (self.marks.read)(&stat, pid, &self.text) };
            if !is_silent {
                unpoisoned(&self.marks.silent).remove(&process);
            }
            // Nobody may wait for it any more.
            let _ = self.answer.send((pid, is_marked));
        }
    }

    fn next(&self) -> Option<(Pid, Stat)> {
        unpoisoned(&self.left).pop_front()
    }
}
