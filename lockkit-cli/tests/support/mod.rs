//! What the tests of the command share: a private server, the command, and ways to await what it does.

// Each test program uses its own part of this. And clippy knows a helper of tests only by its attribute.
#![allow(dead_code, unused_imports, clippy::unwrap_used)]

mod terminal;

use std::{
    fs::{self, File},
    io::{BufRead, BufReader, Read, Write},
    os::unix::fs::OpenOptionsExt,
    path::PathBuf,
    process::{Child, ChildStdin, ChildStdout, Command, Output, Stdio},
    sync::mpsc::{self, Receiver, RecvTimeoutError},
    time::{Duration, Instant, SystemTime},
};

use lockkit_testkit::servers::{RedisOptions, RedisServer};
use rustix::process::Signal;
use tempfile::TempDir;

pub(crate) use terminal::Terminal;

/// How long anything awaited may take. Not how long it does take.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// A store to run the command on.
#[derive(Clone)]
pub(crate) struct Store {
    url: String,
}

impl Store {
    pub(crate) fn at(url: String) -> Self {
        Self { url }
    }

    /// `lockkit` on this store.
    pub(crate) fn lockkit(&self, args: &[&str]) -> Command {
        let mut command = lockkit(args);
        command.env("LOCKKIT_STORE", &self.url);
        command
    }

    /// `lockkit run` on this store with a shell script as CMD.
    pub(crate) fn run(&self, key: &str, options: &[&str], script: &str) -> Command {
        let mut command = self.lockkit(&["run", "--key", key]);
        command.args(options).args(["--", "sh", "-c", script]);
        command
    }

    /// What `lockkit who` tells.
    pub(crate) fn who(&self, key: &str) -> serde_json::Value {
        let output = self.lockkit(&["who", key, "--json"]).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice(&output.stdout).unwrap()
    }
}

/// A private Redis server, for code that does not wait asynchronously.
pub(crate) struct Redis {
    runtime: tokio::runtime::Runtime,
    server: RedisServer,
}

impl Redis {
    pub(crate) fn start() -> Self {
        Self::start_with(RedisOptions::default())
    }

    pub(crate) fn start_with(options: RedisOptions) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let server = runtime.block_on(RedisServer::start(options)).unwrap();
        Self { runtime, server }
    }

    pub(crate) fn url(&self) -> String {
        self.server.url()
    }

    /// `lockkit` on this server.
    pub(crate) fn lockkit(&self, args: &[&str]) -> Command {
        self.store().lockkit(args)
    }

    /// `lockkit run` on this server with a shell script as CMD.
    pub(crate) fn run(&self, key: &str, options: &[&str], script: &str) -> Command {
        self.store().run(key, options, script)
    }

    fn store(&self) -> Store {
        Store::at(self.url())
    }

    pub(crate) fn command(&self, words: &[&str]) -> String {
        self.runtime.block_on(self.server.command(words)).unwrap()
    }

    pub(crate) fn freeze(&self) {
        self.runtime.block_on(self.server.freeze()).unwrap();
    }

    pub(crate) fn thaw(&self) {
        self.server.thaw().unwrap();
    }

    pub(crate) fn kill(&self) {
        self.runtime.block_on(self.server.kill()).unwrap();
    }

    /// Whether the lock is held, as `lockkit who` sees it.
    pub(crate) fn is_held(&self, key: &str) -> bool {
        self.who(key)["held"].as_bool().unwrap()
    }

    pub(crate) fn who(&self, key: &str) -> serde_json::Value {
        self.store().who(key)
    }

    /// What is left of the lease, on the server's clock.
    pub(crate) fn left(&self, key: &str) -> Duration {
        let millis: i64 = self.command(&["PTTL", &lock(key)]).parse().unwrap();
        Duration::from_millis(millis.max(0) as u64)
    }

    /// Returns just after the lease was renewed, with a moment just before that.
    #[track_caller]
    pub(crate) fn await_renewal(&self, key: &str) -> Instant {
        let (mut asked, mut last) = (Instant::now(), self.left(key));
        loop {
            let (since, before) = (asked, last);
            (asked, last) = (Instant::now(), self.left(key));
            assert!(!last.is_zero(), "the lease is gone");
            if last > before {
                return since;
            }
            std::thread::sleep(Duration::from_millis(3));
        }
    }

    /// Freezes the server between two renewals of a lease of this ttl; returns when that lapses, by the server's clock.
    #[track_caller]
    pub(crate) fn freeze_while_held(&self, key: &str, ttl: Duration) -> Instant {
        loop {
            let renewed = self.await_renewal(key);
            let lapse = Instant::now() + self.left(key);
            self.freeze();
            // The next renewal comes after a third, less a tenth of that. If it may have come before the server stood
            // still, what it said is of no use.
            if renewed.elapsed() < ttl / 4 {
                return lapse;
            }
            self.thaw();
        }
    }
}

/// The name of a plain lock's key on the server.
pub(crate) fn lock(key: &str) -> String {
    format!("lockkit:{key}")
}

/// The command, in a session of its own and with no signal ignored, so that the terminal of whoever runs the tests, `nohup`
/// and the background of a script play no part: the first is seen by the command, and what is ignored it passes on.
pub(crate) fn lockkit(args: &[&str]) -> Command {
    prepared(Command::new("setsid"), &["env", "--default-signal", env!("CARGO_BIN_EXE_lockkit")], args)
}

/// The command, started with these signals ignored.
pub(crate) fn ignoring(signals: &str, args: &[&str]) -> Command {
    let script = format!(r#"trap '' {signals}; exec "$@""#);
    let words = ["env", "--default-signal", "sh", "-c", &script, "sh", env!("CARGO_BIN_EXE_lockkit")];
    prepared(Command::new("setsid"), &words, args)
}

fn prepared(mut command: Command, words: &[&str], args: &[&str]) -> Command {
    command.args(words).args(args);
    command.env_remove("LOCKKIT_STORE").env_remove("LOCKKIT_HELD").env_remove("LOCKKIT_RUNS");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Waits until something is so.
#[track_caller]
pub(crate) fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(3));
    }
}

/// A line between a test and the processes that CMD consists of: a named pipe that they hold open for writing, each as
/// long as it lives. Scripts open it with `exec 3>$LINE` and say what they like.
pub(crate) struct Line {
    dir: TempDir,
    heard: Receiver<String>,
}

impl Line {
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        for name in ["line", "go"] {
            assert!(Command::new("mkfifo").arg(dir.path().join(name)).status().unwrap().success());
        }
        let (say, heard) = mpsc::channel();
        let path = dir.path().join("line");
        // On a thread of its own, so that a test need not wait for ever: opening waits for somebody at the other end.
        std::thread::spawn(move || {
            let lines = BufReader::new(File::open(path).unwrap()).lines();
            lines.map_while(Result::ok).take_while(|line| say.send(line.clone()).is_ok()).for_each(drop);
        });
        Self { dir, heard }
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.dir.path().join("line")
    }

    /// What a process has to have access to.
    pub(crate) fn files(&self) -> impl Iterator<Item = PathBuf> {
        ["", "line", "go"].map(|name| self.dir.path().join(name)).into_iter()
    }

    /// When a process was there for the last time that leaves a sign of life with `: >$LINE.alive` again and again. Its own
    /// time: when it ended is seen later than that, by as long as this machine stands still.
    #[track_caller]
    pub(crate) fn last_sign(&self) -> SystemTime {
        self.path().with_extension("alive").metadata().unwrap().modified().unwrap()
    }

    /// Gives a command's CMD the line as `$LINE`, and a pipe to wait at as `$GO`.
    pub(crate) fn give(&self, command: &mut Command) {
        command.env("LINE", self.path()).env("GO", self.dir.path().join("go"));
    }

    /// Starts a program that has this line.
    pub(crate) fn begin(&self, mut command: Command) -> Running {
        self.give(&mut command);
        Running::start(command)
    }

    /// Starts a program that says here when it is up.
    #[track_caller]
    pub(crate) fn start(&self, command: Command) -> Running {
        let running = self.begin(command);
        assert_eq!(self.hear(), "up");
        running
    }

    /// The next line that somebody says.
    #[track_caller]
    pub(crate) fn hear(&self) -> String {
        self.heard.recv_timeout(PATIENCE).expect("nobody says anything")
    }

    /// Returns when the last of those who hold the line open is gone, with the rest of what they said.
    #[track_caller]
    pub(crate) fn end(&self) -> (String, Instant) {
        let mut rest = String::new();
        loop {
            match self.heard.recv_timeout(PATIENCE) {
                Ok(line) => rest = rest + &line + "\n",
                Err(RecvTimeoutError::Disconnected) => return (rest, Instant::now()),
                Err(RecvTimeoutError::Timeout) => panic!("somebody is still there"),
            }
        }
    }

    /// Lets a script go on that waits at `read x <$GO`.
    #[track_caller]
    pub(crate) fn go(&self) {
        let nonblock = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
        // Refused for as long as nobody reads.
        eventually("somebody who waits for go", || {
            let go = File::options().write(true).custom_flags(nonblock).open(self.dir.path().join("go"));
            go.is_ok_and(|mut go| go.write_all(b"go\n").is_ok())
        });
    }
}

/// A moment by the clock that files have their times from.
pub(crate) fn by_the_clock(moment: Instant) -> SystemTime {
    // In this order: what passes between the two makes it later, and proves less.
    let left = moment.saturating_duration_since(Instant::now());
    SystemTime::now() + left
}

/// Whether a process is there, and not only its exit status.
pub(crate) fn is_alive(process: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| !rest.is_empty() && !rest.trim_start().starts_with('Z'))
}

/// A running command that is killed when the test fails.
pub(crate) struct Running(Option<Child>);

impl Running {
    pub(crate) fn start(mut command: Command) -> Self {
        Self(Some(command.spawn().unwrap()))
    }

    fn child(&mut self) -> &mut Child {
        self.0.as_mut().unwrap()
    }

    pub(crate) fn id(&mut self) -> u32 {
        self.child().id()
    }

    /// Its stdout, for the one who asks first.
    pub(crate) fn stdout(&mut self) -> ChildStdout {
        self.child().stdout.take().unwrap()
    }

    /// Its stdin, for the one who asks first.
    pub(crate) fn stdin(&mut self) -> ChildStdin {
        self.child().stdin.take().unwrap()
    }

    pub(crate) fn signal(&mut self, signal: &str) {
        let pid = self.child().id().to_string();
        assert!(Command::new("kill").args([&format!("-{signal}"), &pid]).status().unwrap().success());
    }

    /// The processes that it has started, and those that these have started.
    pub(crate) fn descendants(&mut self) -> Vec<u32> {
        let (mut found, mut next) = (Vec::new(), vec![self.child().id()]);
        while let Some(process) = next.pop() {
            let threads = std::fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
            for thread in threads {
                let children = std::fs::read_to_string(thread.path().join("children")).unwrap_or_default();
                next.extend(children.split_whitespace().map(|child| child.parse::<u32>().unwrap()));
            }
            found.push(process);
        }
        found.split_off(1)
    }

    /// The next line of its stderr.
    pub(crate) fn complaint(&mut self) -> String {
        let mut line = Vec::new();
        let stderr = self.child().stderr.as_mut().unwrap();
        let mut byte = [0];
        while stderr.read(&mut byte).unwrap() == 1 && byte[0] != b'\n' {
            line.push(byte[0]);
        }
        String::from_utf8(line).unwrap()
    }

    pub(crate) fn is_running(&mut self) -> bool {
        self.child().try_wait().unwrap().is_none()
    }

    #[track_caller]
    pub(crate) fn end(mut self) -> Output {
        eventually("the end of lockkit", || !self.is_running());
        self.0.take().unwrap().wait_with_output().unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// What it says on stderr, without what connecting to the store warned of.
pub(crate) fn complaints(output: &Output) -> String {
    let stderr = String::from_utf8(output.stderr.clone()).unwrap();
    assert!(!stderr.contains("panicked"), "{stderr}");
    stderr.lines().filter(|line| !line.starts_with("lockkit: warning: ")).map(|line| format!("{line}\n")).collect()
}

/// Sends a signal to the watchdog of a run.
#[track_caller]
pub(crate) fn signal_watchdog(lockkit: &str, signal: &str) {
    let found = Command::new("pkill").args([&format!("-{signal}"), "-P", lockkit, "-f", "__watch"]).status();
    assert!(found.expect("pkill, of procps").success());
}

/// The exit code, after a check that an error came with exactly one line.
#[track_caller]
pub(crate) fn code(output: &Output) -> i32 {
    let complaints = complaints(output);
    assert!(complaints.lines().count() <= 1, "more than one line: {complaints}");
    output.status.code().unwrap_or_else(|| panic!("{output:?}"))
}

/// The one line on stderr.
#[track_caller]
pub(crate) fn complaint(output: &Output) -> String {
    let complaints = complaints(output);
    assert_eq!(complaints.lines().count(), 1, "{complaints}");
    complaints.trim_end().to_owned()
}

#[track_caller]
pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// Whether a process has a handler for a signal.
pub(crate) fn catches(process: &str, signal: Signal) -> bool {
    is_in_mask(process, "SigCgt:", signal)
}

/// Whether a signal was sent to a process that it has not got.
pub(crate) fn is_pending(process: &str, signal: Signal) -> bool {
    is_in_mask(process, "ShdPnd:", signal)
}

fn is_in_mask(process: &str, name: &str, signal: Signal) -> bool {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
    u64::from_str_radix(mask.trim(), 16).unwrap_or(0) >> (signal.as_raw() - 1) & 1 == 1
}
