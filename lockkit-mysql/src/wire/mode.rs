//! How the modes of locks stand in the tables.
//!
//! Claims that share a lock are rows of their own, and the lock's row then says that they do ([`GROUP_MARK`]). **But one that shares it with nobody
//! is the lock's row**, as an exclusive lease is: with its token, and with a mark in front of the holder's name. So it takes one
//! statement to come, and one to go. Before anything else, the second that comes makes a claim of it, and marks the row as
//! shared, by a [transaction](crate::wire::order); the others [come to both](crate::wire::sharing).

use std::num::NonZeroU32;

use lockkit_core::Mode;

/// So begins what stands for the holder while claims share a lock.
pub(crate) const GROUP_MARK: &str = "#";
/// And so it goes on: for readers, or for permits, with their number behind it.
pub(crate) const READERS: &str = "readers";
pub(crate) const PERMITS: &str = "permits of ";

pub(crate) const EXCLUSIVE: u8 = 0;
pub(crate) const SHARED: u8 = 1;
pub(crate) const PERMIT: u8 = 2;

/// So begins the holder of a lock who shares it with nobody: no name has such a character. Behind it are as many
/// digits, the number of permits, or zero for a reader, and then the name.
pub(crate) const ALONE: char = '\u{1}';
pub(crate) const DIGITS: usize = 10;
/// The longest `node_info`, in characters.
const LONGEST: usize = 256;

/// A mode as it stands in the table, with how many may hold the lock in it.
pub(crate) fn columns(mode: Mode) -> (u8, u32) {
    match mode {
        Mode::Shared => (SHARED, 0),
        Mode::Permit { limit } => (PERMIT, limit.get()),
        _ => (EXCLUSIVE, 0),
    }
}

/// The mode of these columns.
pub(crate) fn mode(mode: u8, permits: u32) -> Mode {
    match (mode, NonZeroU32::new(permits)) {
        (PERMIT, Some(limit)) => Mode::Permit { limit },
        (EXCLUSIVE, _) => Mode::Exclusive,
        _ => Mode::Shared,
    }
}

/// What a lock's row says in place of the holder while claims share it, in words for people.
pub(crate) fn sharers(node_info: &str) -> Option<&str> {
    node_info.strip_prefix(GROUP_MARK).filter(|words| *words == READERS || words.starts_with(PERMITS))
}

/// What it says while claims of this mode do.
pub(crate) fn group(mode: Mode) -> String {
    match mode {
        Mode::Permit { limit } => format!("{GROUP_MARK}{PERMITS}{limit}"),
        _ => format!("{GROUP_MARK}{READERS}"),
    }
}

/// What a lock's row says of a holder who has it alone. `None` if the name is too long.
pub(crate) fn alone(mode: Mode, holder: &str) -> Option<String> {
    let fits = holder.chars().count() + DIGITS < LONGEST;
    match mode {
        Mode::Exclusive => Some(holder.to_owned()),
        _ => fits.then(|| format!("{ALONE}{:0DIGITS$}{holder}", columns(mode).1)),
    }
}

/// The mode and the name of the one who has a lock alone.
pub(crate) fn holder(node_info: &str) -> (Mode, &str) {
    let digits = node_info.strip_prefix(ALONE).and_then(|rest| rest.split_at_checked(DIGITS));
    match digits.filter(|(digits, _)| digits.bytes().all(|byte| byte.is_ascii_digit())) {
        Some((digits, name)) => match digits.parse() {
            Ok(0) => (Mode::Shared, name),
            Ok(limit) => (mode(PERMIT, limit), name),
            Err(_) => (Mode::Exclusive, node_info),
        },
        None => (Mode::Exclusive, node_info),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_a_lock_alone_is_read_as_it_was_written() {
        let permit = Mode::Permit { limit: NonZeroU32::MAX };
        for (mode, name) in [(Mode::Shared, "me"), (permit, "a 1"), (Mode::Shared, ""), (permit, &"\u{fc}".repeat(245))]
        {
            let written = alone(mode, name).expect("it fits");
            assert_eq!(holder(&written), (mode, name));
        }
        assert_eq!(alone(Mode::Exclusive, "me").as_deref(), Some("me"));
        assert_eq!(alone(Mode::Shared, &"x".repeat(246)), None);
    }

    #[test]
    fn what_stands_for_many_is_told_from_a_holder() {
        let limit = NonZeroU32::new(20).expect("not zero");
        for (mode, words) in [(Mode::Shared, "readers"), (Mode::Permit { limit }, "permits of 20")] {
            assert_eq!(sharers(&group(mode)), Some(words));
        }
        assert_eq!(sharers("#me"), None);
    }

    #[test]
    fn any_other_holder_is_an_exclusive_one() {
        for odd in [
            "",
            "me",
            "#readers",
            "\u{1}",
            "\u{1}000000000",
            "\u{1}00000000x0me",
            "\u{1}9999999999me",
            "\u{1}000000000\u{fc}",
        ] {
            assert_eq!(holder(odd), (Mode::Exclusive, odd));
        }
    }
}
