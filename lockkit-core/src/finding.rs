//! What a look at a store brought up: `lockkit doctor`, and the checks when a store connects.

use std::{
    fmt,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use crate::{Error, ErrorKind, Result};

/// How much a [`Finding`] matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Severity {
    /// It is as it should be.
    Ok,
    /// Good to know. It breaks nothing.
    Note,
    /// Locks work, but may break or stop under circumstances that are to be expected some day.
    Warning,
    /// Locks don't work here, or do not exclude.
    Error,
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Ok => "ok",
            Self::Note => "note",
            Self::Warning => "warning",
            Self::Error => "error",
        })
    }
}

/// One thing that was found out about a store.
///
/// The texts are for people and may change; scripts go by [`code`](Self::code).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Finding {
    /// How much it matters.
    pub severity: Severity,
    /// What it is about, in one lasting word, such as `eviction`.
    pub code: &'static str,
    /// Which of several servers it is about; `None` for the store as a whole.
    pub server: Option<Arc<str>>,
    /// What was found: one line, without secrets.
    pub summary: String,
    /// What to do about it: one line, empty if nothing.
    pub advice: String,
    kind: ErrorKind,
}

impl Finding {
    fn new(severity: Severity, code: &'static str, summary: impl Into<String>, advice: impl Into<String>) -> Self {
        let (summary, advice) = (summary.into(), advice.into());
        Self { severity, code, server: None, summary, advice, kind: ErrorKind::Unsupported }
    }

    /// It is as it should be.
    #[must_use]
    pub fn ok(code: &'static str, summary: impl Into<String>) -> Self {
        Self::new(Severity::Ok, code, summary, "")
    }

    /// Good to know.
    #[must_use]
    pub fn note(code: &'static str, summary: impl Into<String>, advice: impl Into<String>) -> Self {
        Self::new(Severity::Note, code, summary, advice)
    }

    /// A risk.
    #[must_use]
    pub fn warning(code: &'static str, summary: impl Into<String>, advice: impl Into<String>) -> Self {
        Self::new(Severity::Warning, code, summary, advice)
    }

    /// A reason not to use the store; `kind` is that of the error with which connecting to it fails.
    #[must_use]
    pub fn error(kind: ErrorKind, code: &'static str, summary: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { kind, ..Self::new(Severity::Error, code, summary, advice) }
    }

    /// Names the server that it is about, unless one is named already.
    #[must_use]
    pub fn at(mut self, server: &Arc<str>) -> Self {
        self.server.get_or_insert_with(|| Arc::clone(server));
        self
    }

    /// Summary and advice on one line.
    #[must_use]
    pub fn in_words(&self) -> String {
        if self.advice.is_empty() { self.summary.clone() } else { format!("{}; {}", self.summary, self.advice) }
    }

    /// What connecting makes of findings: the warnings among them, in words.
    ///
    /// # Errors
    /// The first error among them.
    pub fn admit(findings: &[Self]) -> Result<Vec<String>> {
        match findings.iter().find(|finding| finding.severity == Severity::Error) {
            Some(refusal) => Err(Error::new(refusal.kind, refusal.in_words())),
            None => {
                let warnings = findings.iter().filter(|finding| finding.severity == Severity::Warning);
                Ok(warnings.map(Self::in_words).collect())
            }
        }
    }
}

/// Says once what was found in the same words at all of `servers` servers, as a finding about `all` of them. What is
/// well is left as it is.
#[must_use]
pub fn said_once(findings: Vec<Finding>, servers: usize, all: &str) -> Vec<Finding> {
    let same = |one: &Finding, other: &Finding| {
        (one.code, &one.summary, &one.advice) == (other.code, &other.summary, &other.advice)
    };
    let mut merged: Vec<Finding> = Vec::new();
    for finding in &findings {
        let times = findings.iter().filter(|other| same(finding, other)).count();
        if times < servers || servers == 1 || finding.severity == Severity::Ok {
            merged.push(finding.clone());
        } else if !merged.iter().any(|other| same(finding, other)) {
            let mut finding = finding.clone();
            finding.server = Some(all.into());
            merged.push(finding);
        }
    }
    merged
}

/// By how much the wall clock of a server is ahead of this machine's, within the bounds of what a round trip can tell.
///
/// In microseconds; below zero it is behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockOffset {
    least: i64,
    most: i64,
}

impl ClockOffset {
    /// Clocks that are apart by less are as good as equal.
    const CLOSE: Duration = Duration::from_secs(1);

    /// `server` is what the server's clock showed, in microseconds since 1970, at some moment between `sent` and
    /// `received` on this machine's. `step` is the server's unit of time, in microseconds.
    #[must_use]
    pub fn measured(sent: SystemTime, received: SystemTime, server: i64, step: i64) -> Self {
        let micros = |time: SystemTime| {
            let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
            i64::try_from(since.as_micros()).unwrap_or(i64::MAX)
        };
        let (sent, received) = (micros(sent), micros(received).max(micros(sent)));
        Self { least: server.saturating_sub(received), most: server.saturating_add(step).saturating_sub(sent) }
    }

    /// The offset of another server's clock from this server's.
    #[must_use]
    pub fn between(self, other: Self) -> Self {
        Self { least: other.least.saturating_sub(self.most), most: other.most.saturating_sub(self.least) }
    }

    /// The offset for certain: what is left of it if the measurement erred as much as it can have.
    #[must_use]
    pub fn certain(self) -> Duration {
        Duration::from_micros(match (self.least, self.most) {
            (least @ 0.., _) => least.unsigned_abs(),
            (_, most @ ..0) => most.unsigned_abs(),
            _ => 0,
        })
    }

    /// What the offset of a server's clock from this machine's means.
    ///
    /// No lease depends on it. But the clock of one of the two is wrong, and when a server's is put right in one step,
    /// its leases end early or late.
    #[must_use]
    pub fn finding(self) -> Finding {
        if self.certain() < Self::CLOSE {
            return Finding::ok("clock", format!("the server's clock is {self} this machine's"));
        }
        let summary = format!("the server's clock is {self} this machine's");
        let advice = "find out which of the two is wrong, and slew it: a step ends leases early or late";
        Finding::warning("clock", summary, advice)
    }
}

impl fmt::Display for ClockOffset {
    /// For example `1.25s ± 0.001s ahead of`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = |micros: u64| {
            // Longer than anybody's clock is wrong; beyond that only the format would suffer.
            Duration::from_micros(micros).as_secs_f64()
        };
        let middle = self.least.midpoint(self.most);
        let error = seconds(self.most.abs_diff(self.least) / 2);
        if self.certain().is_zero() {
            return write!(f, "within {:.3}s of", seconds(self.least.unsigned_abs().max(self.most.unsigned_abs())));
        }
        let side = if middle < 0 { "behind" } else { "ahead of" };
        write!(f, "{:.3}s (± {error:.3}s) {side}", seconds(middle.unsigned_abs()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(micros: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_micros(micros)
    }

    #[test]
    fn connecting_refuses_errors_and_passes_warnings_on() {
        let fine = [Finding::ok("a", "fine"), Finding::note("b", "so", "so"), Finding::warning("c", "risk", "act")];
        assert_eq!(Finding::admit(&fine).expect("no error"), ["risk; act"]);
        let bad = [Finding::warning("c", "risk", "act"), Finding::error(ErrorKind::Denied, "d", "bad", "worse")];
        let error = Finding::admit(&bad).expect_err("an error");
        assert_eq!((error.kind(), error.message()), (ErrorKind::Denied, "bad; worse"));
    }

    #[test]
    fn a_round_trip_bounds_the_offset() {
        // 2 ms on the way; the server is 5 s ahead.
        let offset = ClockOffset::measured(at(1_000_000), at(1_002_000), 6_001_000, 1);
        assert_eq!(offset.certain(), Duration::from_micros(4_999_000));
        assert_eq!(offset.finding().severity, Severity::Warning);
        assert_eq!(offset.to_string(), "5.000s (± 0.001s) ahead of");
        let behind = ClockOffset::measured(at(9_000_000), at(9_002_000), 4_001_000, 1);
        assert_eq!(behind.to_string(), "5.000s (± 0.001s) behind");
        assert_eq!(offset.between(behind).certain(), Duration::from_micros(9_997_999));
        // A slow answer can't tell clocks apart.
        let slow = ClockOffset::measured(at(1_000_000), at(9_000_000), 6_001_000, 1);
        assert_eq!((slow.certain(), slow.finding().severity), (Duration::ZERO, Severity::Ok));
        // This machine's clock was set back in between.
        let back = ClockOffset::measured(at(5_000_000), at(1_000_000), 5_000_000, 1);
        assert_eq!(back.certain(), Duration::ZERO);
    }
}
