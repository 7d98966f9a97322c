//! Each write that was answered is in the record of the resource, with that answer and at its time, and each in the record
//! was asked for. A count would not do: a write that was acknowledged and lost hides behind one that was never answered
//! and done.

use std::collections::HashMap;

use super::{Event, What};

/// The writes under way, by who writes and to what.
#[derive(Debug, Default)]
pub(super) struct Writes<'a> {
    open: HashMap<(&'a str, &'a str), Vec<Write>>,
    /// What will be heard of an operation, and when.
    answers: HashMap<(&'a str, u64), (u64, bool)>,
}

#[derive(Debug)]
struct Write {
    op: u64,
    fence: u64,
    /// Whether the resource admitted it, once it has come there.
    recorded: Option<bool>,
}

impl<'a> Writes<'a> {
    pub(super) fn new(events: &'a [Event]) -> Self {
        let answer = |event: &'a Event| match event.what {
            What::Written => Some(((event.process.as_str(), event.op), (event.at, true))),
            What::Refused => Some(((event.process.as_str(), event.op), (event.at, false))),
            _ => None,
        };
        Self { open: HashMap::new(), answers: events.iter().filter_map(answer).collect() }
    }

    pub(super) fn asked(&mut self, by: &'a str, key: &'a str, op: u64, fence: u64) {
        self.open.entry((by, key)).or_default().push(Write { op, fence, recorded: None });
    }

    /// The resource has recorded a write. Whether somebody had asked for it.
    pub(super) fn recorded(&mut self, by: &'a str, key: &'a str, fence: u64, admitted: bool) -> bool {
        let answers = &self.answers;
        let open = self.open.get_mut(&(by, key)).into_iter().flatten();
        let candidates = open.filter(|write| write.fence == fence && write.recorded.is_none());
        // With several under way, the one that is to hear this answer first; then those that never hear any.
        let write = candidates.min_by_key(|write| match answers.get(&(by, write.op)) {
            Some((at, answer)) => (u8::from(*answer != admitted) * 2, *at),
            None => (1, 0),
        });
        write.map(|write| write.recorded = Some(admitted)).is_some()
    }

    /// The writer has heard. What the resource has recorded of that write; `None` also if it has nothing.
    pub(super) fn answered(&mut self, by: &'a str, key: &'a str, op: u64) -> Option<bool> {
        let open = self.open.get_mut(&(by, key))?;
        let place = open.iter().position(|write| write.op == op)?;
        open.remove(place).recorded
    }
}
