//! Names in the table: as they are, byte for byte (rule R11).
//!
//! The column is `VARBINARY`, which compares bytes: no case, accent or trailing space is folded, and 512 bytes fit into
//! a unique key of InnoDB. A text column folds names as its collation says; with most, `a`, `A`, `á` and `a `
//! would be one lock.

use lockkit_core::{Error, LockKey, Result};

/// The name as it stands in the table.
pub(crate) fn to_column(key: &LockKey) -> &[u8] {
    key.as_str().as_bytes()
}

/// The name of a record as it stands in the table: behind a byte that is in no lock's name.
///
/// # Errors
/// [`ErrorKind::InvalidInput`] if it has 512 bytes, as many as the column: there is no room for that byte.
pub(crate) fn record_to_column(name: &LockKey) -> Result<Vec<u8>> {
    if name.as_str().len() == LockKey::MAX_BYTES {
        return Err(Error::invalid("the name of a record has at most 511 bytes in a table"));
    }
    Ok([b"\xff", to_column(name)].concat())
}

/// The lock of a row; `None` if the row was not made by lockkit.
pub(crate) fn from_column(bytes: &[u8]) -> Option<LockKey> {
    LockKey::new(str::from_utf8(bytes).ok()?).ok()
}

/// The first name above all that begin with `prefix`.
pub(crate) fn after_prefix(prefix: &str) -> Vec<u8> {
    let mut end = prefix.as_bytes().to_vec();
    // No byte of UTF-8 is 0xff, so that adding one never carries, and 0xff alone is above all names.
    match end.last_mut() {
        Some(last) => *last += 1,
        None => end.push(0xff),
    }
    end
}

/// A table's name, checked and quoted so that it can stand in a statement.
///
/// # Errors
/// [`ErrorKind::InvalidInput`] for anything but 1 to 64 letters, digits, `_` and `$` of ASCII.
pub(crate) fn quoted_table(table: &str) -> Result<String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '$';
    if (1..=64).contains(&table.len()) && table.chars().all(plain) {
        Ok(format!("`{table}`"))
    } else {
        Err(Error::invalid("the name of the table has 1 to 64 ASCII letters, digits, _ and $"))
    }
}

#[cfg(test)]
mod tests {
    use lockkit_core::ErrorKind;

    use super::*;

    #[test]
    fn a_prefix_ends_behind_all_names_that_have_it() {
        for (prefix, inside, outside) in [("a", "a\u{10ffff}", "b"), ("", "\u{10ffff}", ""), ("é", "éz", "ê")] {
            let end = after_prefix(prefix);
            assert!(inside.as_bytes() < end.as_slice(), "{prefix}");
            assert!(outside.is_empty() || outside.as_bytes() >= end.as_slice(), "{prefix}");
        }
    }

    #[test]
    fn a_table_can_not_break_out() {
        assert_eq!(quoted_table("resource_lock").expect("plain"), "`resource_lock`");
        for bad in ["", "a b", "a`b", "a.b", "ä", &"x".repeat(65)] {
            assert_eq!(quoted_table(bad).expect_err(bad).kind(), ErrorKind::InvalidInput);
        }
    }
}
