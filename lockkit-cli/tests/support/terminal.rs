//! A terminal, which util-linux's `script` provides.

use std::{
    io::{Read, Write},
    process::{Child, Command, Stdio},
    time::Instant,
};

use super::{Line, PATIENCE, Redis};

/// A shell command line in a terminal of its own.
pub(crate) struct Terminal {
    child: Child,
    pub(crate) screen: String,
}

impl Terminal {
    pub(crate) fn start(redis: &Redis, line: &Line, script: &str) -> Self {
        let mut command = Command::new("script");
        // -e: the exit code is that of the command.
        command.args(["-qefc", script, "/dev/null"]).env("LOCKKIT_STORE", redis.url()).env("SHELL", "/bin/sh");
        command.env("LOCKKIT", env!("CARGO_BIN_EXE_lockkit"));
        line.give(&mut command);
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("script, of util-linux");
        Self { child, screen: String::new() }
    }

    pub(crate) fn typed(&mut self, keys: &str) {
        self.child.stdin.as_mut().unwrap().write_all(keys.as_bytes()).unwrap();
    }

    /// Waits until the screen shows something.
    pub(crate) fn await_text(&mut self, text: &str) {
        let deadline = Instant::now() + PATIENCE;
        let mut chunk = [0; 256];
        while !self.screen.contains(text) {
            assert!(Instant::now() < deadline, "{:?}", self.screen);
            let length = self.child.stdout.as_mut().unwrap().read(&mut chunk).unwrap();
            assert!(length > 0, "the terminal was closed: {:?}", self.screen);
            self.screen.push_str(&String::from_utf8_lossy(&chunk[..length]));
        }
    }

    pub(crate) fn end(mut self) -> (i32, String) {
        self.child.stdout.take().unwrap().read_to_string(&mut self.screen).unwrap();
        (self.child.wait().unwrap().code().unwrap(), self.screen)
    }
}
