//! What the verbs print: tables for people, JSON for scripts.

use std::io::{self, Write};

use serde_json::Value;

use crate::exit::{Failure, LOST};

/// Writes to stdout. A reader that has seen enough and went away, as `head` does, is no error.
pub(crate) fn print(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    match write(&mut out).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(Failure::new(LOST, format!("could not write the output: {error}")))
        }
        _ => Ok(()),
    }
}

/// Prints a JSON value on lines of its own.
pub(crate) fn print_json(value: &Value) -> Result<(), Failure> {
    print(|out| writeln!(out, "{value:#}"))
}
