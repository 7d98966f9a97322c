//! The URL of a store, `redis://app:secret@host:6379/0?timeout=2s&prefix=shop:`, read alike by every backend.
//!
//! All errors are [`InvalidInput`](crate::ErrorKind::InvalidInput) and one line. **None repeats anything of the URL** but
//! the names of options that there are: a password that was not percent-encoded may turn up anywhere in it, as the port, the
//! path or the name of an option.

use std::{fmt, net::Ipv6Addr, ops::Deref, str::FromStr, time::Duration};

use crate::{Error, Result};

/// What must not be shown: a password, or what may be one that was given in a wrong place. Its `Debug` output says only
/// whether there is any.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Hidden<T>(pub Option<T>);

impl<T> Deref for Hidden<T> {
    type Target = Option<T>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl<T> fmt::Debug for Hidden<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_ref().map(|_| "..").fmt(f)
    }
}

/// The parts of `scheme://[user[:password]@]hosts[/path][?options]`, not yet decoded.
#[derive(Clone)]
pub struct Parts<'a> {
    /// The scheme, in lower case.
    pub scheme: String,
    /// What stands before the `@`.
    pub login: Option<&'a str>,
    /// One host, or several with commas between them.
    pub hosts: &'a str,
    /// What comes after the first slash behind the hosts, without it.
    pub path: &'a str,
    /// What comes after the question mark. See [`options`].
    pub options: &'a str,
}

impl<'a> Parts<'a> {
    /// Takes a URL apart. Nothing is guessed: what could be a piece of a password that was not percent-encoded is refused.
    ///
    /// # Errors
    /// For what is no such URL, a `#`, and an `@` in the path.
    pub fn of(url: &'a str) -> Result<Self> {
        let well_formed = |scheme: &str| scheme.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c));
        let (scheme, rest) = url
            .split_once("://")
            .filter(|(scheme, _)| !scheme.is_empty() && well_formed(scheme))
            .ok_or_else(|| Error::invalid("no URL; one begins with a scheme, such as redis://, mysql:// or zk://"))?;
        if rest.contains('#') {
            return Err(Error::invalid("a # in a URL is written %23"));
        }
        let (place, options) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = place.split_once('/').unwrap_or((place, ""));
        if path.contains('@') {
            return Err(Error::invalid(
                "an @ behind the host: in a user or password / is written %2F, and in the path @ is written %40",
            ));
        }
        let (login, hosts) =
            authority.rsplit_once('@').map_or((None, authority), |(login, hosts)| (Some(login), hosts));
        Ok(Self { scheme: scheme.to_ascii_lowercase(), login, hosts, path, options })
    }

    /// User and password, decoded. An empty user is none.
    ///
    /// # Errors
    /// As [`percent_decode`].
    pub fn user_and_password(&self) -> Result<(Option<String>, Option<String>)> {
        let Some(login) = self.login else { return Ok((None, None)) };
        let (user, password) = login.split_once(':').map_or((login, None), |(user, word)| (user, Some(word)));
        let user = Some(percent_decode(user)?).filter(|user| !user.is_empty());
        Ok((user, password.map(percent_decode).transpose()?))
    }
}

impl fmt::Debug for Parts<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Parts(..)")
    }
}

/// Reads `host[:port]`, with an IPv6 address in brackets.
///
/// # Errors
/// For anything else.
pub fn address(text: &str, default_port: u16) -> Result<(String, u16)> {
    let no_host =
        || Error::invalid("the URL names no host, or has what no host's name has; it is written host or host:port");
    let bracketed = text.strip_prefix('[').map(|rest| rest.split_once(']').ok_or_else(no_host)).transpose()?;
    let (host, rest) = match bracketed {
        Some((address, rest)) if address.parse::<Ipv6Addr>().is_ok() => (address, rest),
        Some(_) => return Err(no_host()),
        None => text.split_at(text.find(':').unwrap_or(text.len())),
    };
    let of_name = |c: char| c.is_alphanumeric() || "-._".contains(c);
    if host.is_empty() || (bracketed.is_none() && !host.chars().all(of_name)) {
        return Err(no_host());
    }
    let port = match rest {
        "" => default_port,
        rest => rest
            .strip_prefix(':')
            .and_then(|port| port.parse().ok())
            .filter(|port| *port != 0)
            .ok_or_else(|| Error::invalid("the port in the URL is no number from 1 to 65535"))?,
    };
    Ok((host.to_owned(), port))
}

/// Reads several with commas between them.
///
/// # Errors
/// As [`address`].
pub fn addresses(text: &str, default_port: u16) -> Result<Vec<(String, u16)>> {
    text.split(',').map(|host| address(host, default_port)).collect()
}

/// Reads `option=value&option=value`: the values, decoded, each with which of the `known` options it is for, in order. A `+`
/// is a space.
///
/// # Errors
/// For an option that there is not, or that is given twice, and as [`percent_decode`].
pub fn options<'k>(text: &str, known: &[&'k str]) -> Result<Vec<(&'k str, String)>> {
    let mut seen: Vec<(&str, String)> = Vec::new();
    for pair in text.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let Some(option) = known.iter().find(|known| **known == name) else { return Err(unknown(known)) };
        if seen.iter().any(|(earlier, _)| earlier == option) {
            return Err(Error::invalid(format!("the option {option} is given twice")));
        }
        seen.push((option, percent_decode(&value.replace('+', " "))?));
    }
    Ok(seen)
}

/// The error for an option that there is not. It does not name it, for it may be the rest of a password.
#[must_use]
pub fn unknown(known: &[&str]) -> Error {
    let known = known.join(", ");
    Error::invalid(format!(
        "after the ? comes an option that there is not; there are: {known}. In a password ? is written %3F, and & %26"
    ))
}

/// Reads `250ms`, `2s`, `1m` or `1h`.
///
/// # Errors
/// For anything else, and for zero.
pub fn duration(option: &str, text: &str) -> Result<Duration> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &text[digits.len()..] {
        "ms" => Duration::from_millis(1),
        "s" => Duration::from_secs(1),
        "m" => Duration::from_secs(60),
        "h" => Duration::from_secs(3600),
        _ => Duration::ZERO,
    };
    let duration = digits.parse().ok().and_then(|number| unit.checked_mul(number)).unwrap_or_default();
    if duration.is_zero() {
        Err(Error::invalid(format!("{option} is a time above zero, such as 250ms, 2s, 1m or 1h")))
    } else {
        Ok(duration)
    }
}

/// Reads a whole number.
///
/// # Errors
/// For anything else, and for what does not fit.
pub fn number<T: FromStr>(option: &str, text: &str) -> Result<T> {
    text.parse().map_err(|_| Error::invalid(format!("{option} is a whole number, and not a large one")))
}

/// Reads `true` or `yes`, `false` or `no`.
///
/// # Errors
/// For anything else.
pub fn boolean(option: &str, text: &str) -> Result<bool> {
    match text {
        "true" | "yes" => Ok(true),
        "false" | "no" => Ok(false),
        _ => Err(Error::invalid(format!("{option} is yes or no, or true or false"))),
    }
}

/// Decodes `%` and two hexadecimal digits as a byte each, as in the user and the password of a URL.
///
/// # Errors
/// For a `%` without them, and if the bytes are no UTF-8.
pub fn percent_decode(text: &str) -> Result<String> {
    let malformed = || Error::invalid("malformed percent-encoding in the URL");
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_has_parts() {
        let parts = Parts::of("Redis+Sentinel://a%40b:p%2Fw@h,[::1]:7/name/3?x=1&y=a@b").expect("a URL");
        assert_eq!((parts.scheme.as_str(), parts.hosts, parts.path), ("redis+sentinel", "h,[::1]:7", "name/3"));
        assert_eq!(parts.user_and_password().expect("login"), (Some("a@b".to_owned()), Some("p/w".to_owned())));
        assert_eq!(addresses(parts.hosts, 9).expect("hosts"), [("h".to_owned(), 9), ("::1".to_owned(), 7)]);
        let read = options(parts.options, &["x", "y"]).expect("options");
        assert_eq!(read, [("x", "1".to_owned()), ("y", "a@b".to_owned())]);
        let login = |url| Parts::of(url).and_then(|parts| parts.user_and_password()).expect("login");
        assert_eq!(login("zk://h"), (None, None));
        assert_eq!(login("redis://:pw@h"), (None, Some("pw".to_owned())));
        assert_eq!(login("redis://me@h"), (Some("me".to_owned()), None));
        assert_eq!(login("redis://:p@w@h").1, Some("p@w".to_owned()));
    }

    #[test]
    fn what_could_be_a_piece_of_a_password_is_refused() {
        for url in
            ["h", "redis:h", "://h", "re dis://h", "a@b://h", "redis://u:p#w@h", "redis://h?x=#", "redis://u:1/w@h"]
        {
            Parts::of(url).expect_err(url);
        }
        for host in ["", ":1", "h:", "h:x", "h:0", "h:65536", "a b", "a%20b", "a:1:2", "[x]", "[::1", "[::1]x", "a\\b"]
        {
            address(host, 1).expect_err(host);
        }
        for text in ["z", "z=1", "x&x", "x=1&x=2", "x=%", "X=1", "%78=1"] {
            let error = options(text, &["x", "y"]).expect_err(text);
            assert!(!error.message().contains('z'), "{error}");
        }
    }

    #[test]
    fn values_are_read() {
        assert_eq!(duration("t", "250ms").expect("ms"), Duration::from_millis(250));
        assert_eq!(duration("t", "2s").expect("s"), Duration::from_secs(2));
        assert_eq!(duration("t", "1m").expect("m"), Duration::from_secs(60));
        assert_eq!(duration("t", "1h").expect("h"), Duration::from_secs(3600));
        assert_eq!(number::<u32>("connections", "16").expect("number"), 16);
        assert_eq!(
            ["true", "yes", "false", "no"].map(|text| boolean("create", text).ok()),
            [Some(true), Some(true), Some(false), Some(false)]
        );
        assert_eq!(percent_decode("a%40b%C3%a4%25").expect("text"), "a@bä%");
    }

    #[test]
    fn what_is_wrong_is_said() {
        for text in ["", "2", "0s", "s", "-1s", "1d", "99999999999999999999s", "4294967295m1", "ä"] {
            assert!(duration("t", text).expect_err(text).message().contains("250ms"));
        }
        for text in ["%", "%4", "%zz", "%+f", "%ff", "a%"] {
            assert!(percent_decode(text).expect_err(text).message().contains("percent"));
        }
        assert!(number::<u32>("connections", "-1").expect_err("-1").message().contains("connections"));
        assert!(boolean("create", "1").expect_err("1").message().contains("create is yes or no"));
        assert!(options("x=1&x=2", &["x"]).expect_err("twice").message().contains("x is given twice"));
        assert!(unknown(&["a", "b"]).message().contains("there are: a, b."));
    }
}
