//! From the driver's errors to lockkit's: the one place that knows them.

use std::{error::Error as StdError, io, sync::Arc};

pub(crate) use lockkit_core::store::Sent;
use lockkit_core::store::one_line;
use lockkit_core::{Error, ErrorKind, LockKey};
use redis::{RedisError, ServerErrorKind};

/// The code by which our scripts say that the server is not the one any more that it was.
pub(crate) const TAKEN_OVER: &str = "TAKENOVER";

/// Maps an error of the driver.
///
/// An error that the **server** answered has no effect: no lock was taken or freed, for a script that is refused something
/// frees what it took. (A fence counter may have moved, which is harmless.)
pub(crate) fn map(error: &RedisError, sent: Sent) -> Error {
    let detail = || one_line(error.detail().unwrap_or_default());
    let (kind, message) = match error.kind() {
        redis::ErrorKind::Io => {
            let kind = if error.is_timeout() { ErrorKind::TimedOut } else { ErrorKind::Unavailable };
            return Error::new(kind, one_line(&error.to_string())).after(sent).with_source(error.clone());
        }
        redis::ErrorKind::AuthenticationFailed => (ErrorKind::Denied, "the server refused the login".to_owned()),
        redis::ErrorKind::RESP3NotSupported => {
            (ErrorKind::Unsupported, "the server does not speak RESP3; lockkit needs Redis 6.2 or Valkey".to_owned())
        }
        redis::ErrorKind::Server(ServerErrorKind::ExecAbort) => (ErrorKind::Unexpected, detail()),
        redis::ErrorKind::Server(_) | redis::ErrorKind::Extension => {
            return server_error(error.code().unwrap_or_default(), &detail()).with_source(error.clone());
        }
        redis::ErrorKind::InvalidClientConfig => (ErrorKind::InvalidInput, one_line(&error.to_string())),
        _ => {
            let unexpected = Error::new(ErrorKind::Unexpected, one_line(&error.to_string()));
            return unexpected.after(sent).with_source(error.clone());
        }
    };
    Error::new(kind, message).with_source(error.clone())
}

/// Maps an error of the login, before anything else was sent. With TLS it is here that the server's verdict on the
/// client's certificate arrives.
pub(crate) fn map_login(error: &RedisError) -> Error {
    // The driver shares its causes.
    let cause = error.source().and_then(|cause| cause.downcast_ref::<Arc<dyn StdError + Send + Sync>>());
    match cause.and_then(|cause| cause.downcast_ref::<io::Error>()) {
        Some(io) if io.kind() == io::ErrorKind::InvalidData => {
            Error::new(ErrorKind::Denied, one_line(&io.to_string())).with_source(error.clone())
        }
        _ => map(error, Sent::No),
    }
}

/// Maps an error of opening the stream, before anything was sent. Those of TLS are not transient.
pub(crate) fn map_open(error: io::Error) -> Error {
    let kind = match error.kind() {
        io::ErrorKind::TimedOut => ErrorKind::TimedOut,
        // The files of TLS.
        io::ErrorKind::InvalidInput => ErrorKind::Misconfigured,
        io::ErrorKind::InvalidData => ErrorKind::Denied,
        _ => ErrorKind::Unavailable,
    };
    Error::new(kind, one_line(&error.to_string())).with_source(error)
}

/// Whether an error that the server answered says that it is not in charge, or not any more.
pub(crate) fn is_not_in_charge(error: &RedisError) -> bool {
    let (code, _) = innermost(error.code().unwrap_or_default(), error.detail().unwrap_or_default());
    matches!(code, "READONLY" | TAKEN_OVER)
}

/// Redis 6.2 reports the error of a command in a script as `ERR Error running script (..): .. -READONLY ..`; or, where the
/// script gives it as an answer, as `@user_script: 3: -READONLY ..`, or without a code.
fn innermost<'a>(code: &'a str, detail: &'a str) -> (&'a str, &'a str) {
    let is_answer = code.starts_with("@user_script");
    let is_wrapped = is_answer || (code == "ERR" && detail.starts_with("Error running script"));
    // It has a code of its own behind the number of the line.
    let coded = detail.split_once(": -").filter(|_| is_wrapped);
    match coded.and_then(|(_, inner)| inner.split_once(' ')) {
        Some(inner) => inner,
        None if is_answer => ("ERR", detail),
        None => (code, detail),
    }
}

/// Names an error that the server answered, by its code. Without effect.
fn server_error(code: &str, detail: &str) -> Error {
    let (code, detail) = innermost(code, detail);
    let kind = match code {
        "NOAUTH" | "WRONGPASS" | "NOPERM" => ErrorKind::Denied,
        TAKEN_OVER | "READONLY" | "LOADING" | "MASTERDOWN" | "CLUSTERDOWN" | "TRYAGAIN" | "OOM" | "BUSY"
        | "MISCONF" | "NOREPLICAS" => ErrorKind::Unavailable,
        "MOVED" | "ASK" | "CROSSSLOT" | "NOPROTO" => ErrorKind::Unsupported,
        "ERR" if detail.contains("max number of clients") => ErrorKind::Unavailable,
        // A command within a script.
        "ERR" if detail.contains("ACL failure") || detail.contains("can't run this command") => ErrorKind::Denied,
        "ERR" if detail.contains("AUTH") || detail.contains("invalid password") => ErrorKind::Denied,
        "ERR" if detail.contains("unknown command") => ErrorKind::Unsupported,
        _ => ErrorKind::Unexpected,
    };
    let message = match code {
        "MOVED" | "ASK" => "the server is part of a cluster; use redis+cluster://host,host,host".to_owned(),
        "CROSSSLOT" => "the lock and its fence counter can't lie in the same slot of a cluster".to_owned(),
        "ERR" | "LOCKKIT" | TAKEN_OVER => detail.to_owned(),
        _ => format!("{code} {detail}"),
    };
    Error::new(kind, message)
}

/// The connection leads to a server that is not in charge any more.
pub(crate) fn taken_over(sent: Sent) -> Error {
    Error::new(ErrorKind::Unavailable, "the connection was given up: another server may be in charge").after(sent)
}

/// An answer that the script never gives.
pub(crate) fn odd_reply(sent: Sent) -> Error {
    Error::new(ErrorKind::Unexpected, "the server gave an answer that its script never gives").after(sent)
}

/// Adds what is at the key of a lock, or of its counter, to the error that it caused.
pub(crate) fn wrong_type(cause: Error, key: &LockKey, lock_type: &str, counter_type: &str) -> Error {
    let message = match (lock_type, counter_type) {
        ("none" | "string", "string") if cause.message().contains("not an integer") => {
            format!("the fence counter of {key:?} is no number")
        }
        ("none" | "string", "none" | "string") => return cause,
        ("none" | "string", other) => format!("the fence counter of {key:?} is no number but a {other}"),
        (other, _) => format!("the key of {key:?} is no lock but a {other}"),
    };
    Error::new(ErrorKind::Unexpected, message).with_source(cause)
}

#[cfg(test)]
mod tests {
    use lockkit_core::Effect;

    use super::*;

    fn server(code: &str, detail: &str) -> Error {
        map(&redis::make_extension_error(code.into(), Some(detail.into())), Sent::Yes)
    }

    #[test]
    fn a_server_error_has_no_effect() {
        for (code, detail, kind) in [
            ("WRONGPASS", "invalid username-password pair", ErrorKind::Denied),
            ("NOPERM", "this user has no permissions", ErrorKind::Denied),
            ("READONLY", "You can't write against a read only replica.", ErrorKind::Unavailable),
            ("OOM", "command not allowed", ErrorKind::Unavailable),
            ("ERR", "max number of clients reached", ErrorKind::Unavailable),
            ("CROSSSLOT", "Keys in request don't hash to the same slot", ErrorKind::Unsupported),
            ("WRONGTYPE", "Operation against a key", ErrorKind::Unexpected),
            ("ERR", "a\r\nb", ErrorKind::Unexpected),
            ("@user_script:", "3: -READONLY You can't write", ErrorKind::Unavailable),
            ("@user_script:", "3: The user executing the script can't run this command", ErrorKind::Denied),
            ("ERR", "Error running script (call to f_1): @user_script:3: x", ErrorKind::Unexpected),
            (
                "ERR",
                "Error running script (call to f_1): @user_script:3: @user_script: 3: -READONLY You can't write",
                ErrorKind::Unavailable,
            ),
        ] {
            let error = server(code, detail);
            assert_eq!((error.kind(), error.effect()), (kind, Effect::None), "{code} {detail}");
            assert_eq!(error.to_string().lines().count(), 1);
        }
    }

    #[test]
    fn a_demoted_server_is_known_whatever_its_version() {
        let wrapped = "Error running script (call to f_1): @user_script:3: @user_script: 3: -READONLY You can't write";
        for (code, detail, demoted) in [
            ("READONLY", "You can't write against a read only replica.", true),
            ("ERR", wrapped, true),
            (TAKEN_OVER, "the server is a replica", true),
            ("@user_script:", "3: -READONLY You can't write", true),
            ("@user_script:", "3: The user executing the script can't run this command", false),
            ("OOM", "command not allowed", false),
            ("ERR", "Error running script (call to f_1): @user_script:3: x", false),
        ] {
            let error = redis::make_extension_error(code.into(), Some(detail.into()));
            assert_eq!(is_not_in_charge(&error), demoted, "{code} {detail}");
        }
    }

    #[test]
    fn a_broken_connection_leaves_the_effect_open_once_something_was_sent() {
        let io = RedisError::from(io::Error::from(io::ErrorKind::ConnectionReset));
        for (sent, effect) in [(Sent::No, Effect::None), (Sent::ReadOnly, Effect::None), (Sent::Yes, Effect::Unknown)] {
            let error = map(&io, sent);
            assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, effect));
        }
    }
}
