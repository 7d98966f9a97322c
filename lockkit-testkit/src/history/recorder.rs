//! Writing a history while it happens.

use std::{
    fs::File,
    io::{self, Write},
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use lockkit_core::{Clock, SystemClock, store::unpoisoned};

use super::{Event, What};

/// Records the events of one process in a file of its own. Each is one write, so that a process that is killed leaves
/// whole lines behind, and at most one cut short.
#[derive(Debug)]
pub struct Recorder {
    process: String,
    file: Arc<Mutex<File>>,
    next: AtomicU64,
}

impl Recorder {
    /// Records for `process` in a new file.
    ///
    /// # Errors
    /// If the file is there already, or can't be made.
    pub fn create(process: impl Into<String>, file: &Path) -> io::Result<Self> {
        let file = File::options().append(true).create_new(true).open(file)?;
        Ok(Self { process: process.into(), file: Arc::new(Mutex::new(file)), next: AtomicU64::new(1) })
    }

    /// Records for somebody else, such as another task of the same process, in the same file.
    #[must_use]
    pub fn another(&self, process: impl Into<String>) -> Self {
        Self { process: process.into(), file: Arc::clone(&self.file), next: AtomicU64::new(1) }
    }

    /// Records that something is asked, **before** it is sent, and returns the number of the operation.
    ///
    /// # Errors
    /// If it can't be written.
    pub fn ask(&self, what: What) -> io::Result<u64> {
        let op = self.next.fetch_add(1, Ordering::Relaxed);
        self.record(op, what)?;
        Ok(op)
    }

    /// Records what was heard of an operation, **after** it was heard.
    ///
    /// # Errors
    /// If it can't be written.
    pub fn hear(&self, op: u64, what: What) -> io::Result<()> {
        self.record(op, what)
    }

    fn record(&self, op: u64, what: What) -> io::Result<()> {
        let mut file = unpoisoned(&self.file);
        let event = Event { at: SystemClock.now().as_nanos(), process: self.process.clone(), op, what };
        let mut line = serde_json::to_vec(&event)?;
        line.push(b'\n');
        file.write_all(&line)
    }
}
