//! The wall clock of a server, moved while it runs.

use std::{
    ffi::OsString,
    fs, io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
    time::Duration,
};

/// The library that is preloaded into the server. It is C, for it takes the place of functions of the C library.
const SHIM: &str = include_str!("clock_shim.c");

/// As much as the library maps.
const PAGE: u64 = 4096;

/// A wall clock that servers can be started on, and that is moved while they run. Only theirs: not the machine's, not
/// this process's, and not their monotonic one. Needs a C compiler, `cc`.
///
/// ```no_run
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use lockkit_testkit::{faults::ServerClock, servers::{RedisOptions, RedisServer}};
///
/// let clock = ServerClock::build()?;
/// let server = RedisServer::start(RedisOptions::default().clock(&clock)).await?;
/// clock.forward(Duration::from_secs(60))?; // every lease of the server has lapsed
/// clock.set_right()?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct ServerClock {
    library: PathBuf,
    offset: PathBuf,
    _dir: Arc<tempfile::TempDir>,
}

impl ServerClock {
    /// Builds the library, and a clock that is right.
    ///
    /// # Errors
    /// If there is no C compiler ([`io::ErrorKind::NotFound`]), or it fails.
    pub fn build() -> io::Result<Self> {
        let dir = tempfile::Builder::new().prefix("lockkit-clock-").tempdir()?;
        let (source, library) = (dir.path().join("clock.c"), dir.path().join("clock.so"));
        fs::write(&source, SHIM)?;
        let built = Command::new("cc").args(["-O1", "-shared", "-fPIC", "-o"]).args([&library, &source]).output();
        let output = built.map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => io::Error::new(error.kind(), "no C compiler, cc: apt-get install gcc libc6-dev"),
            _ => error,
        })?;
        if !output.status.success() {
            return Err(io::Error::other(String::from_utf8_lossy(&output.stderr).into_owned()));
        }
        let offset = dir.path().join("offset");
        fs::File::create(&offset)?.set_len(PAGE)?;
        Ok(Self { library, offset, _dir: Arc::new(dir) })
    }

    /// Sets the clock forward, as seen from the right time.
    ///
    /// # Errors
    /// If the offset can't be written.
    pub fn forward(&self, by: Duration) -> io::Result<()> {
        self.set(nanos(by))
    }

    /// Sets the clock back, as seen from the right time.
    ///
    /// # Errors
    /// If the offset can't be written.
    pub fn back(&self, by: Duration) -> io::Result<()> {
        self.set(-nanos(by))
    }

    /// Sets the clock right again.
    ///
    /// # Errors
    /// If the offset can't be written.
    pub fn set_right(&self) -> io::Result<()> {
        self.set(0)
    }

    fn set(&self, nanos: i64) -> io::Result<()> {
        fs::File::options().write(true).open(&self.offset)?.write_all_at(&nanos.to_ne_bytes(), 0)
    }

    /// What goes in front of a server's command so that it runs on this clock. `env` replaces itself by the server, so
    /// that the number of the process stays the same.
    pub(crate) fn prefix(&self) -> Vec<OsString> {
        let set = |name: &str, path: &Path| {
            let mut word = OsString::from(name);
            word.push(path);
            word
        };
        vec!["/usr/bin/env".into(), set("LD_PRELOAD=", &self.library), set("CLOCKSHIM=", &self.offset)]
    }
}

fn nanos(duration: Duration) -> i64 {
    i64::try_from(duration.as_nanos()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_has_its_own_time() -> io::Result<()> {
        let clock = match ServerClock::build() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            clock => clock?,
        };
        let year = || -> io::Result<u64> {
            let prefix = clock.prefix();
            let output = Command::new(&prefix[0]).args(&prefix[1..]).args(["date", "-u", "+%s"]).output()?;
            String::from_utf8_lossy(&output.stdout).trim().parse().map_err(io::Error::other)
        };
        let right = year()?;
        clock.forward(Duration::from_secs(100_000))?;
        assert!(year()? >= right + 100_000);
        clock.back(Duration::from_millis(100_000_500))?;
        assert!(year()? <= right - 90_000);
        clock.set_right()?;
        assert!((right..right + 100).contains(&year()?));
        Ok(())
    }
}
