//! From the driver's errors to lockkit's: the one place that knows them.

use std::{borrow::Cow, time::Duration};

pub(crate) use lockkit_core::store::Sent;
use lockkit_core::store::one_line;
use lockkit_core::{Error, ErrorKind};
use zookeeper_client as zk;

/// Why a request came to nothing.
#[derive(Clone, Debug)]
pub(crate) enum Failure {
    /// The driver's word.
    Driver(zk::Error),
    /// No answer within our own bound. The driver queues requests without a limit while it is not connected.
    TimedOut(Duration),
}

impl Failure {
    /// What the server answered, if the answer is definite.
    pub(crate) fn is(&self, error: &zk::Error) -> bool {
        matches!(self, Self::Driver(own) if own == error)
    }

    /// Whether the session is over, or what is left of it is of no use: its task in the driver is gone.
    pub(crate) fn ends_session(&self) -> bool {
        use zk::Error::{AuthFailed, ClientClosed, SessionExpired, UnexpectedError, UnmarshalError};
        let Self::Driver(error) = self else { return false };
        matches!(error, SessionExpired | AuthFailed | ClientClosed | UnexpectedError(_) | UnmarshalError { .. })
    }

    /// Whether the server gave this answer, so that it has heard from us.
    pub(crate) fn is_answer(&self) -> bool {
        use zk::Error::{BadVersion, NoNode, NodeExists, NotEmpty};
        matches!(self, Self::Driver(NoNode | NodeExists | NotEmpty | BadVersion))
    }
}

/// What was asked of a node; `None` if there is no such node.
pub(crate) fn unless_gone<T>(answer: Result<T, Failure>) -> Result<Option<T>, Failure> {
    match answer {
        Err(failure) if failure.is(&zk::Error::NoNode) => Ok(None),
        other => other.map(Some),
    }
}

impl From<zk::Error> for Failure {
    fn from(error: zk::Error) -> Self {
        Self::Driver(error)
    }
}

/// Maps the failure of a request that reads, or whose effect is a node that ends with the session.
///
/// Three of the driver's errors say nothing about the effect: a lost connection is `ConnectionLoss` only if the server
/// hung up; a broken socket and a missed heartbeat are `Custom`; and a request may have been sent before a `Timeout`.
pub(crate) fn map(failure: &Failure, sent: Sent) -> Error {
    use zk::Error as E;
    let error = match failure {
        Failure::TimedOut(bound) => return Error::no_answer(*bound, sent),
        Failure::Driver(error) => error,
    };
    let text = || one_line(&error.to_string());
    let (kind, message): (_, Cow<'_, str>) = match error {
        E::ConnectionLoss | E::Custom(_) => return open(ErrorKind::Unavailable, text(), error, sent),
        E::Timeout => return open(ErrorKind::TimedOut, "no session could be had in time".into(), error, sent),
        // The session ends, and the next operation has another.
        E::UnexpectedError(_) | E::UnmarshalError { .. } => return open(ErrorKind::Unavailable, text(), error, sent),
        E::NoHosts => (ErrorKind::Unavailable, "no server takes a connection".into()),
        // Whatever the request made was ephemeral, and ended with the session.
        E::SessionExpired => (ErrorKind::Unavailable, "the session expired".into()),
        E::ClientClosed => (ErrorKind::Unavailable, "the session is closed".into()),
        E::SessionMoved | E::NotReadOnly | E::Throttled | E::QuotaExceeded => (ErrorKind::Unavailable, text().into()),
        E::NoAuth => (ErrorKind::Denied, "the access control list of a node forbids it".into()),
        E::AuthFailed => (ErrorKind::Denied, "the servers refused the login".into()),
        E::InvalidAcl => (
            ErrorKind::Denied,
            "creating nodes requires authentication: the servers have to verify what auth= or cert= gives".into(),
        ),
        E::BadArguments(_) => (ErrorKind::InvalidInput, text().into()),
        E::Unimplemented => (ErrorKind::Unsupported, "the servers are older than ZooKeeper 3.6".into()),
        E::NoChildrenForEphemerals => {
            (ErrorKind::Unexpected, "the path of the lock leads through an ephemeral node".into())
        }
        E::NoNode | E::NodeExists | E::NotEmpty | E::BadVersion => (ErrorKind::Unexpected, text().into()),
        // A server that has trouble of its own does not say whether it did what it was asked.
        _ => return open(ErrorKind::Unexpected, text(), error, sent),
    };
    Error::new(kind, message).with_source(error.clone())
}

/// The same for one that only reads.
pub(crate) fn read_only(failure: &Failure) -> Error {
    map(failure, Sent::ReadOnly)
}

/// The same for one that may have been sent, so that there may be a node.
pub(crate) fn doubtful(failure: &Failure) -> Error {
    map(failure, Sent::Yes)
}

/// Maps the failure of a request whose effect does not end with the session.
///
/// The driver tells all requests under way that the session is over, also those that the servers have carried out.
pub(crate) fn map_lasting(failure: &Failure, sent: Sent) -> Error {
    let error = map(failure, sent);
    if sent == Sent::Yes && failure.ends_session() { error.unknown_effect() } else { error }
}

/// The same for one that may have been sent.
pub(crate) fn lasting(failure: &Failure) -> Error {
    map_lasting(failure, Sent::Yes)
}

/// The session ended while something was under way in it. What it had made ends with it.
pub(crate) fn session_over() -> Error {
    Error::new(ErrorKind::Unavailable, "the session ended")
}

fn open(kind: ErrorKind, message: String, source: &zk::Error, sent: Sent) -> Error {
    Error::new(kind, message).after(sent).with_source(source.clone())
}

#[cfg(test)]
mod tests {
    use lockkit_core::Effect;

    use super::*;

    #[test]
    fn an_answer_of_the_server_has_no_effect() {
        for (error, kind) in [
            (zk::Error::NoAuth, ErrorKind::Denied),
            (zk::Error::AuthFailed, ErrorKind::Denied),
            (zk::Error::SessionExpired, ErrorKind::Unavailable),
            (zk::Error::NoHosts, ErrorKind::Unavailable),
            (zk::Error::Throttled, ErrorKind::Unavailable),
            (zk::Error::Unimplemented, ErrorKind::Unsupported),
            (zk::Error::BadVersion, ErrorKind::Unexpected),
        ] {
            let mapped = map(&Failure::Driver(error.clone()), Sent::Yes);
            assert_eq!((mapped.kind(), mapped.effect()), (kind, Effect::None), "{error}");
            assert_eq!(mapped.to_string().lines().count(), 1);
        }
    }

    #[test]
    fn a_lost_answer_leaves_the_effect_open() {
        let lost = [
            Failure::Driver(zk::Error::ConnectionLoss),
            Failure::Driver(zk::Error::Timeout),
            Failure::Driver(zk::Error::UnexpectedError("no response".into())),
            Failure::TimedOut(Duration::from_secs(2)),
        ];
        for failure in lost {
            assert_eq!(map(&failure, Sent::Yes).effect(), Effect::Unknown, "{failure:?}");
            assert_eq!(map(&failure, Sent::ReadOnly).effect(), Effect::None, "{failure:?}");
            assert!(map(&failure, Sent::Yes).is_retryable(), "{failure:?}");
            assert!(map(&failure, Sent::ReadOnly).is_retryable(), "{failure:?}");
        }
        // A server that has trouble of its own.
        let failure = Failure::Driver(zk::Error::MarshallingError);
        assert_eq!(map(&failure, Sent::Yes).effect(), Effect::Unknown);
        assert_eq!(map(&Failure::Driver(zk::Error::NoNode), Sent::Yes).effect(), Effect::None);
    }
}
