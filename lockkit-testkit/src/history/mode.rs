//! Which leases exclude each other, and how a mode is written in a history: as its own words, such as `permit of 3`.

use std::num::NonZeroU32;

use lockkit_core::Mode;
use serde::{Deserialize, Deserializer, Serializer, de::Error};

/// The words in front of the limit of a permit.
const PERMIT: &str = "permit of ";

/// Whether two leases may never be held at once, however many others are. Permits of one limit may, as long as there are enough.
pub(super) fn excludes(one: Mode, other: Mode) -> bool {
    one != other || limit(one) == 1
}

/// How many may hold a lock at once in this mode.
pub(super) fn limit(mode: Mode) -> usize {
    match mode {
        Mode::Shared => usize::MAX,
        Mode::Permit { limit } => limit.get() as usize,
        _ => 1,
    }
}

pub(super) fn alone() -> Mode {
    Mode::Exclusive
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands it over like this")]
pub(super) fn is_alone(mode: &Mode) -> bool {
    *mode == Mode::Exclusive
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands it over like this")]
pub(super) fn serialize<S: Serializer>(mode: &Mode, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(mode)
}

pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Mode, D::Error> {
    let text = String::deserialize(deserializer)?;
    let limit = text.strip_prefix(PERMIT).and_then(|limit| limit.parse::<NonZeroU32>().ok());
    match (text.as_str(), limit) {
        ("exclusive", _) => Ok(Mode::Exclusive),
        ("shared", _) => Ok(Mode::Shared),
        (_, Some(limit)) => Ok(Mode::Permit { limit }),
        _ => Err(D::Error::custom(format!("{text:?} is no mode"))),
    }
}
