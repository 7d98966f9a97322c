//! A terminal, which util-linux's `script` provides.

use std::{
    io::{Read, Write},
    process::{Child, Command, Stdio},
    sync::mpsc::{self, Receiver, RecvTimeoutError},
    time::Instant,
};

use super::{Line, PATIENCE, Redis};

/// A shell command line in a terminal of its own.
pub(crate) struct Terminal {
    child: Child,
    shown: Receiver<String>,
    screen: String,
}

impl Terminal {
    pub(crate) fn start(redis: &Redis, line: &Line, script: &str) -> Self {
        // A shell can't take up a signal that was ignored when it started.
        let mut command = Command::new("env");
        // -e: the exit code is that of the command.
        command
            .args(["--default-signal", "script", "-qefc", script, "/dev/null"])
            .env("LOCKKIT_STORE", redis.url())
            .env("SHELL", "/bin/sh");
        command.env("LOCKKIT", env!("CARGO_BIN_EXE_lockkit"));
        line.give(&mut command);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("script, of util-linux");
        let mut output = child.stdout.take().unwrap();
        let (show, shown) = mpsc::channel();
        std::thread::spawn(move || {
            let mut chunk = [0; 256];
            while let Ok(length @ 1..) = output.read(&mut chunk) {
                if show.send(String::from_utf8_lossy(&chunk[..length]).into_owned()).is_err() {
                    return;
                }
            }
        });
        Self { child, shown, screen: String::new() }
    }

    pub(crate) fn typed(&mut self, keys: &str) {
        self.child.stdin.as_mut().unwrap().write_all(keys.as_bytes()).unwrap();
    }

    /// Waits until the screen shows something.
    #[track_caller]
    pub(crate) fn await_text(&mut self, text: &str) {
        // In all: a view that is drawn again and again is never silent.
        let deadline = Instant::now() + PATIENCE;
        while !self.screen.contains(text) {
            match self.shown.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(shown) => self.screen.push_str(&shown),
                Err(error) => panic!("no {text:?}, {error}: {:?}", self.screen),
            }
        }
    }

    pub(crate) fn screen(&self) -> &str {
        &self.screen
    }

    /// The exit code, and all that was shown.
    #[track_caller]
    pub(crate) fn end(mut self) -> (i32, String) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.shown.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(shown) => self.screen.push_str(&shown),
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => panic!("no end: {:?}", self.screen),
            }
        }
        (self.child.wait().unwrap().code().unwrap(), std::mem::take(&mut self.screen))
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
