//! Why a server could not be had.

use std::{fmt, io};

/// What the functions around servers return.
pub type Result<T, E = ServerError> = std::result::Result<T, E>;

/// Why a server could not be had, with the end of what it printed.
#[derive(Debug, thiserror::Error)]
#[error("{message}{}", .source.as_ref().map(|source| format!(": {source}")).unwrap_or_default())]
pub struct ServerError {
    kind: Kind,
    message: String,
    source: Option<io::Error>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Missing,
    PortTaken,
    Other,
}

impl ServerError {
    /// Whether the server's program is not installed, in which case the text says how to install it.
    #[must_use]
    pub fn is_missing(&self) -> bool {
        self.kind == Kind::Missing
    }

    pub(crate) fn is_port_taken(&self) -> bool {
        self.kind == Kind::PortTaken
    }

    pub(crate) fn missing(message: String) -> Self {
        Self { kind: Kind::Missing, message, source: None }
    }

    /// The server did not come up, and `log` is what it printed.
    pub(crate) fn not_ready(server: &str, why: &str, log: &str) -> Self {
        // The one phrase that all kinds of servers print, for all take it from the operating system.
        let kind = if log.contains("Address already in use") { Kind::PortTaken } else { Kind::Other };
        Self { kind, message: format!("{server} {why}; the end of its log:\n{}", tail(log)), source: None }
    }

    pub(crate) fn io(what: impl fmt::Display, source: io::Error) -> Self {
        Self { kind: Kind::Other, message: what.to_string(), source: Some(source) }
    }
}

/// As much of a log as helps in an error.
fn tail(log: &str) -> String {
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(20)..].join("\n")
}
