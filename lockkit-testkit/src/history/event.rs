//! The format of a history: one line of JSON for each event.

use std::{fs, io, path::Path};

use lockkit_core::Mode;
use serde::{Deserialize, Serialize};

use super::mode;

/// Something that a process did or heard.
///
/// ```
/// use lockkit_testkit::history::{Event, What};
///
/// let line = r#"{"at":5000000,"process":"w1","op":7,"event":"granted","fence":12}"#;
/// let event: Event = serde_json::from_str(line)?;
/// assert_eq!(event.what, What::Granted { fence: 12 });
/// assert_eq!(serde_json::to_string(&event)?, line);
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// When, in nanoseconds of `CLOCK_BOOTTIME`: for what is asked, before it was sent; for what is heard, after.
    pub at: u64,
    /// Who, such as `w1`.
    pub process: String,
    /// Which operation of that process; what is asked and what is heard of it have the same number. For the resource,
    /// the place in its order, from 0 on without a gap.
    pub op: u64,
    /// What.
    #[serde(flatten)]
    pub what: What,
}

/// What a process did or heard. An operation that is asked and never answered may have happened or not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
#[non_exhaustive]
pub enum What {
    /// Asks for a lock.
    Acquire {
        /// The lock.
        key: String,
        /// That it must be granted within so many nanoseconds, because all is well.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        within: Option<u64>,
        /// For which owner of this process, if for one: what an owner acquires while it holds the lock is nested.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        owner: Option<u64>,
        /// Alone, or together with others; alone if nothing is said.
        #[serde(default = "mode::alone", skip_serializing_if = "mode::is_alone", with = "mode")]
        mode: Mode,
    },
    /// The answer: it is yours.
    Granted {
        /// The fence.
        fence: u64,
    },
    /// The answer: another has it.
    Contended,
    /// Nobody waits for the answer any more: the acquisition was dropped, and its effect is not known.
    Cancelled,
    /// No answer, but an error: the effect is not known.
    Failed {
        /// The error's words.
        error: String,
    },
    /// Asks the guard whether the lock is still held.
    Ask {
        /// The operation that acquired it.
        grant: u64,
    },
    /// Renews the lease; answered by [`Held`](Self::Held), [`Lost`](Self::Lost) or [`Failed`](Self::Failed).
    Renew {
        /// The operation that acquired it.
        grant: u64,
    },
    /// The guard's answer: it is.
    Held,
    /// The guard's answer: it is lost.
    Lost {
        /// Why.
        reason: String,
    },
    /// Gives the lock back or drops its guard, and believes in it no more.
    Release {
        /// The operation that acquired it.
        grant: u64,
    },
    /// The answer to a release.
    Released {
        /// Whether it was held until then.
        held: bool,
        /// Why it was not.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
    },
    /// The guard was dropped, which answers nothing.
    Dropped,
    /// Writes to the fenced resource.
    Write {
        /// The resource, which has the name of its lock.
        key: String,
        /// The fence shown.
        fence: u64,
    },
    /// The answer: it is written.
    Written,
    /// The answer: a newer holder has begun.
    Refused,
    /// **The resource's own record**: somebody claimed.
    Claimed {
        /// The resource.
        key: String,
        /// Who.
        by: String,
        /// The fence shown.
        fence: u64,
        /// Whether the resource admitted it.
        admitted: bool,
    },
    /// **The resource's own record**: somebody wrote, from what it had read before.
    Updated {
        /// The resource.
        key: String,
        /// Who.
        by: String,
        /// The fence shown.
        fence: u64,
        /// Whether the resource admitted it.
        admitted: bool,
        /// The version that was read.
        base: u64,
        /// The version that stood there. If it is another, somebody's update is lost by this one.
        version: u64,
    },
    /// **The unfenced twin's own record**: the same write without a check.
    Twin {
        /// The resource.
        key: String,
        /// Who.
        by: String,
        /// The version that was read.
        base: u64,
        /// The version that stood there.
        version: u64,
    },
    /// Asks the store who waits for a lock that all ask for in [order](lockkit_core::Lock::fifo), each under its process's name as
    /// [holder](lockkit_core::LockerBuilder::holder).
    Look {
        /// The lock.
        key: String,
    },
    /// The answer: these processes, in any order, as the store shows them.
    Queue {
        /// Their names.
        waiting: Vec<String>,
    },
    /// A fault begins.
    Fault {
        /// What is done.
        note: String,
    },
    /// The fault is over.
    Healed,
}

impl What {
    /// Asks for a lock, for nobody but the one who asks, without an owner and without a bound.
    #[must_use]
    pub fn acquire(key: impl Into<String>) -> Self {
        Self::Acquire { key: key.into(), within: None, owner: None, mode: Mode::Exclusive }
    }
}

/// The events of all processes, in the order of time.
#[derive(Clone, Debug, Default)]
pub struct History {
    pub(super) events: Vec<Event>,
}

impl History {
    /// Puts events in order.
    #[must_use]
    pub fn new(mut events: Vec<Event>) -> Self {
        // Stable, so that of two events of one process at one moment the one that was written first comes first.
        events.sort_by_key(|event| event.at);
        Self { events }
    }

    /// Reads the files of all processes. A last line that was cut short by the death of its process is left out.
    ///
    /// # Errors
    /// If a file can't be read, or has a whole line that is no event; the text says where.
    pub fn read<P: AsRef<Path>>(files: impl IntoIterator<Item = P>) -> io::Result<Self> {
        let mut events = Vec::new();
        for file in files {
            let file = file.as_ref();
            let text = fs::read_to_string(file)?;
            for (number, line) in text.split_inclusive('\n').enumerate().filter(|(_, line)| line.ends_with('\n')) {
                let event = serde_json::from_str(line).map_err(|error| {
                    let place = format!("{}, line {}: {error}", file.display(), number + 1);
                    io::Error::new(io::ErrorKind::InvalidData, place)
                })?;
                events.push(event);
            }
        }
        Ok(Self::new(events))
    }

    /// The events, in the order of time.
    #[must_use]
    pub fn events(&self) -> &[Event] {
        &self.events
    }

    /// The same history as lines of JSON.
    #[must_use]
    pub fn to_lines(&self) -> String {
        let line = |event: &Event| serde_json::to_string(event).unwrap_or_default() + "\n";
        self.events.iter().map(line).collect()
    }
}
