//! Options in the URL of a store, `?timeout=2s&prefix=shop:`, read alike by every backend.
//!
//! All errors are [`InvalidInput`](crate::ErrorKind::InvalidInput) and one line. None repeats the URL, which may
//! contain a password.

use std::{str::FromStr, time::Duration};

use crate::{Error, ErrorKind, Result};

/// The options and their values, already decoded, in order.
///
/// # Errors
/// If one is given twice.
pub fn unique<K: AsRef<str>, V>(pairs: impl IntoIterator<Item = (K, V)>) -> Result<Vec<(K, V)>> {
    let mut seen: Vec<(K, V)> = Vec::new();
    for (option, value) in pairs {
        if seen.iter().any(|(earlier, _)| earlier.as_ref() == option.as_ref()) {
            return Err(invalid(format!("the option {:?} is given twice", option.as_ref())));
        }
        seen.push((option, value));
    }
    Ok(seen)
}

/// The error for an option that there is not; `known` lists those that there are.
#[must_use]
pub fn unknown(option: &str, known: &str) -> Error {
    invalid(format!("no option {option:?}; there are: {known}"))
}

/// Reads `250ms`, `2s` or `1m`.
///
/// # Errors
/// For anything else, and for zero.
pub fn duration(text: &str) -> Result<Duration> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &text[digits.len()..] {
        "ms" => Duration::from_millis(1),
        "s" => Duration::from_secs(1),
        "m" => Duration::from_secs(60),
        _ => Duration::ZERO,
    };
    let duration = digits.parse().ok().and_then(|number| unit.checked_mul(number)).unwrap_or_default();
    if duration.is_zero() {
        Err(invalid(format!("no duration: {text:?}; write 250ms, 2s or 1m")))
    } else {
        Ok(duration)
    }
}

/// Reads a whole number.
///
/// # Errors
/// For anything else, and for what does not fit.
pub fn number<T: FromStr>(option: &str, text: &str) -> Result<T> {
    text.parse().map_err(|_| invalid(format!("{option} is a number, not {text:?}")))
}

/// Reads `true` or `yes`, `false` or `no`.
///
/// # Errors
/// For anything else.
pub fn boolean(option: &str, text: &str) -> Result<bool> {
    match text {
        "true" | "yes" => Ok(true),
        "false" | "no" => Ok(false),
        _ => Err(invalid(format!("{option} is yes or no, or true or false, not {text:?}"))),
    }
}

/// Decodes `%` and two hexadecimal digits as a byte each, as in the user and the password of a URL.
///
/// # Errors
/// For a `%` without them, and if the bytes are no UTF-8.
pub fn percent_decode(text: &str) -> Result<String> {
    let malformed = || invalid("malformed percent-encoding in the URL");
    let digit = |byte: Option<&u8>| byte.and_then(|byte| char::from(*byte).to_digit(16)).ok_or_else(malformed);
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes().iter();
    while let Some(byte) = rest.next() {
        if *byte == b'%' {
            let code = digit(rest.next())? * 16 + digit(rest.next())?;
            bytes.extend(u8::try_from(code));
        } else {
            bytes.push(*byte);
        }
    }
    String::from_utf8(bytes).map_err(|_| malformed())
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidInput, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_read() {
        assert_eq!(duration("250ms").expect("ms"), Duration::from_millis(250));
        assert_eq!(duration("2s").expect("s"), Duration::from_secs(2));
        assert_eq!(duration("1m").expect("m"), Duration::from_secs(60));
        assert_eq!(number::<u32>("connections", "16").expect("number"), 16);
        assert_eq!(
            ["true", "yes", "false", "no"].map(|text| boolean("create", text).ok()),
            [Some(true), Some(true), Some(false), Some(false)]
        );
        assert_eq!(percent_decode("a%40b%C3%a4%25").expect("text"), "a@bä%");
        let pairs = [("a", 1), ("b", 2)];
        assert_eq!(unique(pairs).expect("two options"), pairs);
    }

    #[test]
    fn what_is_wrong_is_said() {
        for text in ["", "2", "0s", "s", "-1s", "1h", "99999999999999999999s", "4294967295m1", "ä"] {
            assert!(duration(text).expect_err(text).message().contains("250ms"));
        }
        for text in ["%", "%4", "%zz", "%+f", "%ff", "a%"] {
            assert!(percent_decode(text).expect_err(text).message().contains("percent"));
        }
        assert!(number::<u32>("connections", "-1").expect_err("-1").message().contains("connections"));
        assert!(boolean("create", "1").expect_err("1").message().contains("create is yes or no"));
        assert!(unique([("a", 1), ("a", 2)]).expect_err("twice").message().contains("twice"));
        assert_eq!(unknown("x", "a, b").message(), "no option \"x\"; there are: a, b");
    }
}
