//! What was done with one lock, as far as it is known.

use lockkit_core::Mode;

use super::Event;

/// All that was done with one lock and its resource.
#[derive(Clone, Debug, Default)]
pub(super) struct Ops {
    pub(super) grants: Vec<Grant>,
    pub(super) wanted: Vec<Wanted>,
    pub(super) wishes: Vec<Wish>,
    /// The resource's own record, in its own order.
    pub(super) records: Vec<Event>,
    /// How many have asked for the lock so far.
    pub(super) asked: u64,
}

/// A lock that was granted.
#[derive(Clone, Debug)]
pub(super) struct Grant {
    pub(super) process: String,
    pub(super) op: u64,
    pub(super) owner: Option<u64>,
    pub(super) mode: Mode,
    pub(super) fence: u64,
    /// Whether it has the very next fence after another of its process: handed over, most likely.
    pub(super) handed: bool,
    /// When it was asked for.
    pub(super) asked: u64,
    /// When the grant was heard of.
    pub(super) heard: u64,
    /// When the holder last asked its guard and was told yes, if it ever was: until here it surely believed.
    pub(super) believed: Option<u64>,
    /// When the holder was first told no.
    pub(super) lost: Option<u64>,
    /// When it began to give the guard up: from here on it has none to ask.
    pub(super) given_up: Option<u64>,
    /// When the guard was surely gone.
    pub(super) ended: Option<u64>,
}

impl Grant {
    pub(super) fn new(event: &Event, asked: u64, (owner, mode): (Option<u64>, Mode), fence: u64) -> Self {
        Self {
            process: event.process.clone(),
            op: event.op,
            owner,
            mode,
            fence,
            handed: false,
            asked,
            heard: event.at,
            believed: None,
            lost: None,
            given_up: None,
            ended: None,
        }
    }
}

/// An acquisition, granted or not.
#[derive(Clone, Debug)]
pub(super) struct Wish {
    pub(super) process: String,
    pub(super) mode: Mode,
    pub(super) asked: u64,
    /// When it was answered, or given up.
    pub(super) answered: Option<u64>,
    /// Whether the answer was that another has the lock, or an error.
    pub(super) is_refused: bool,
    /// Whether it was an error: it may have been granted, and nobody knows.
    pub(super) is_in_doubt: bool,
    /// With which fence it was granted, if it was.
    pub(super) fence: Option<u64>,
    /// When it was seen to wait in the queue, if it was and nothing went wrong since.
    pub(super) seen: Option<Sighting>,
}

impl Wish {
    pub(super) fn new(event: &Event, mode: Mode) -> Self {
        Self {
            process: event.process.clone(),
            mode,
            asked: event.at,
            answered: None,
            is_refused: false,
            is_in_doubt: false,
            fence: None,
            seen: None,
        }
    }
}

/// When the store has shown an acquisition among those that wait.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sighting {
    /// By then it had its place.
    pub(super) first: u64,
    /// It waited still at some moment after this.
    pub(super) last: u64,
}

/// An acquisition that must succeed within some time.
#[derive(Clone, Debug)]
pub(super) struct Wanted {
    pub(super) process: String,
    pub(super) asked: u64,
    pub(super) within: u64,
    /// When it was granted, if it was.
    pub(super) granted: Option<u64>,
    /// When it was answered otherwise.
    pub(super) denied: Option<u64>,
}
