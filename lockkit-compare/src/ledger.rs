//! A counter that breaks as soon as two change it at once: what the locks of `race` and `compare` have to protect.
//!
//! It is read, changed and written back in separate steps, as a program does that relies on its lock. Next to the
//! count stands the fence of the last holder, so that a holder who comes out of turn is seen at once.

use std::{
    fs::File,
    io::{self, Write},
    os::unix::fs::FileExt,
    path::Path,
    sync::atomic::{AtomicU64, Ordering},
};

/// What is written in a ledger.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) count: u64,
    pub(crate) fence: u64,
}

impl Entry {
    /// The entry that a holder with this fence leaves behind, and whether the holder came in turn.
    pub(crate) fn next(self, fence: u64) -> (Self, bool) {
        (Self { count: self.count + 1, fence }, fence > self.fence)
    }
}

/// A place for one entry.
pub(crate) trait Ledger: Send + Sync + 'static {
    fn read(&self) -> io::Result<Entry>;
    fn write(&self, entry: Entry) -> io::Result<()>;

    /// What a holder does in its critical section; returns whether it came in turn.
    fn pass(&self, fence: u64) -> io::Result<bool> {
        let (entry, in_turn) = self.read()?.next(fence);
        self.write(entry)?;
        Ok(in_turn)
    }
}

/// A ledger in a file, shared by processes: two decimal numbers of fixed width, so that a write never makes the file
/// shorter for a moment and a reader always finds numbers.
#[derive(Debug)]
pub(crate) struct FileLedger(File);

const WIDTH: usize = 20;

impl FileLedger {
    /// Makes a new ledger that stands at zero.
    pub(crate) fn create(path: &Path) -> io::Result<Self> {
        File::create_new(path)?.write_all(render(Entry::default()).as_bytes())?;
        Self::open(path)
    }

    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        Ok(Self(File::options().read(true).write(true).open(path)?))
    }
}

impl Ledger for FileLedger {
    fn read(&self) -> io::Result<Entry> {
        let mut bytes = [0; 2 * WIDTH + 2];
        self.0.read_exact_at(&mut bytes, 0)?;
        parse(&bytes).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "the counter's file has no numbers"))
    }

    fn write(&self, entry: Entry) -> io::Result<()> {
        self.0.write_all_at(render(entry).as_bytes(), 0)
    }
}

fn render(entry: Entry) -> String {
    format!("{:0WIDTH$} {:0WIDTH$}\n", entry.count, entry.fence)
}

fn parse(bytes: &[u8]) -> Option<Entry> {
    let mut numbers = std::str::from_utf8(bytes).ok()?.split_ascii_whitespace();
    Some(Entry { count: numbers.next()?.parse().ok()?, fence: numbers.next()?.parse().ok()? })
}

/// A ledger in memory, shared by tasks. Each number is loaded and stored, never changed in one step.
#[derive(Debug, Default)]
pub(crate) struct MemoryLedger {
    count: AtomicU64,
    fence: AtomicU64,
}

impl Ledger for MemoryLedger {
    fn read(&self) -> io::Result<Entry> {
        Ok(Entry { count: self.count.load(Ordering::Relaxed), fence: self.fence.load(Ordering::Relaxed) })
    }

    fn write(&self, entry: Entry) -> io::Result<()> {
        self.count.store(entry.count, Ordering::Relaxed);
        self.fence.store(entry.fence, Ordering::Relaxed);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_keeps_what_was_written() {
        let dir = tempfile::tempdir().expect("directory");
        let path = dir.path().join("ledger");
        let ledger = FileLedger::create(&path).expect("create");
        assert_eq!(ledger.read().expect("read"), Entry::default());
        let entry = Entry { count: 7, fence: u64::MAX };
        ledger.write(entry).expect("write");
        assert_eq!(FileLedger::open(&path).expect("open").read().expect("read"), entry);
        assert!(FileLedger::create(&path).is_err(), "a ledger is never overwritten");
    }

    #[test]
    fn whoever_comes_out_of_turn_is_seen() {
        let ledger = MemoryLedger::default();
        assert!(ledger.pass(5).expect("pass"));
        assert!(ledger.pass(6).expect("pass"));
        assert!(!ledger.pass(6).expect("pass"), "the same fence twice");
        assert!(!ledger.pass(2).expect("pass"), "an older fence");
        assert_eq!(ledger.read().expect("read").count, 4);
    }
}
