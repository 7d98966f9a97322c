//! What the members of a cluster say about who serves which slot.

use std::{sync::Arc, time::Duration};

use lockkit_core::{Error, ErrorKind, Result};
use redis::{AsyncConnectionConfig, Pipeline, RedisError, Value};
use tokio::time::timeout;

use crate::{
    client::{
        connection::{Connection, Link},
        dial,
        sentinel::Place,
    },
    config::{RedisConfig, secret},
    wire::error::{self, Sent},
};

/// A range of slots, and who serves it: the primary first.
#[derive(Debug, PartialEq)]
pub(crate) struct Range {
    pub(crate) first: u16,
    pub(crate) last: u16,
    pub(crate) places: Vec<Place>,
}

/// What a member says, with the epoch that it knows.
pub(crate) type Told = (u64, Vec<Range>);

/// Asks a member that there is a connection to.
pub(crate) async fn ask(link: &Link, connection: &Connection, bound: Duration) -> Result<Told> {
    let replies = link.run_all(connection, None, &questions(), bound, Sent::ReadOnly).await?;
    read(replies, link.host())
}

/// Asks a member over a connection for this alone.
pub(crate) async fn ask_anew(config: &RedisConfig, place: &Place) -> Result<Told> {
    let (host, port) = place;
    let exchange = async {
        let (login, settings) = (secret::login(&config.login, 0)?, AsyncConnectionConfig::new());
        let (mut connection, driver) = dial::connect(config, place, &login, settings, Arc::default()).await?;
        let requests = questions();
        let replies = connection.send_packed_commands(&requests, 0, requests.len()).await;
        driver.abort();
        read(replies.map_err(|e| error::map(&e, Sent::No))?, host)
    };
    let outcome = timeout(config.timeout, exchange).await;
    outcome.unwrap_or_else(|_| Err(Error::no_answer(config.timeout, Sent::No))).map_err(|e| {
        let message = format!("member {host}:{port}: {}", e.message());
        Error::new(e.kind(), message).with_source(e)
    })
}

fn questions() -> Pipeline {
    let mut requests = Pipeline::with_capacity(2);
    requests.cmd("CLUSTER").arg("SLOTS").cmd("CLUSTER").arg("INFO");
    requests
}

/// Reads the answers of the member at this host.
fn read(replies: Vec<Value>, host: &str) -> Result<Told> {
    let [slots, info] = <[Value; 2]>::try_from(replies).map_err(|_| error::odd_reply(Sent::No))?;
    if let Value::ServerError(e) = slots {
        return Err(match e.details() {
            Some(details) if details.contains("cluster support disabled") => {
                Error::new(ErrorKind::Misconfigured, "the server is not part of a cluster")
            }
            _ => error::map(&e.into(), Sent::No),
        });
    }
    let ranges = ranges(slots, host).ok_or_else(|| error::odd_reply(Sent::No))?;
    if ranges.is_empty() {
        return Err(Error::new(ErrorKind::Unavailable, "it serves no slots and knows nobody who does"));
    }
    let info = redis::from_redis_value::<String>(info).unwrap_or_default();
    let epoch = info.lines().find_map(|line| line.strip_prefix("cluster_current_epoch:")?.trim().parse().ok());
    Ok((epoch.unwrap_or(0), ranges))
}

/// Reads the answer to `CLUSTER SLOTS`: `[first, last, [host, port, ..], ..]` for each range.
fn ranges(reply: Value, asked: &str) -> Option<Vec<Range>> {
    let Value::Array(entries) = reply else { return None };
    let number = |value: &Value| match value {
        Value::Int(number) => u16::try_from(*number).ok(),
        _ => None,
    };
    let place = |value: &Value| {
        let Value::Array(parts) = value else { return None };
        let host = match parts.first()? {
            Value::BulkString(host) if !host.is_empty() && host != b"?" => String::from_utf8(host.clone()).ok()?,
            // The member does not know its own address: it is the one that led there.
            _ => asked.to_owned(),
        };
        Some((host, number(parts.get(1)?)?))
    };
    let range = |entry: &Value| {
        let Value::Array(parts) = entry else { return None };
        let places = parts.get(2..)?.iter().map(place).collect::<Option<_>>()?;
        Some(Range { first: number(parts.first()?)?, last: number(parts.get(1)?)?, places })
    };
    let mut ranges: Vec<Range> = entries.iter().map(range).collect::<Option<_>>()?;
    ranges.sort_by_key(|range| range.first);
    Some(ranges)
}

/// Where an error says that a slot is.
#[derive(Debug, PartialEq)]
pub(crate) struct Signpost {
    pub(crate) place: Place,
    pub(crate) slot: u16,
    pub(crate) asking: bool,
}

impl Signpost {
    /// What `MOVED` and `ASK` say.
    pub(crate) fn of(error: &Error) -> Option<Self> {
        let cause = std::error::Error::source(error)?.downcast_ref::<RedisError>()?;
        let (address, slot) = cause.redirect_node()?;
        let (host, port) = address.rsplit_once(':')?;
        let asking = cause.code() == Some("ASK");
        Some(Self { place: (host.to_owned(), port.parse().ok()?), slot, asking })
    }

    /// An empty host means that of the member that answered.
    pub(crate) fn at_host(mut self, host: &str) -> Self {
        if self.place.0.is_empty() {
            host.clone_into(&mut self.place.0);
        }
        self
    }
}

/// A slot is on its way, or its members do not agree on whose it is. Nothing was done.
pub(crate) fn undecided() -> Error {
    Error::new(ErrorKind::Unavailable, "the lock's slot is moving from one member of the cluster to another")
}

/// Nobody serves a slot.
pub(crate) fn unserved() -> Error {
    Error::new(ErrorKind::Unavailable, "no member of the cluster serves the lock's slot")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(host: Value, port: i64) -> Value {
        Value::Array(vec![host, Value::Int(port), Value::BulkString(b"id".into())])
    }

    #[test]
    fn ranges_are_read() {
        let named = |name: &str| Value::BulkString(name.into());
        let entry = |first, last, mut members: Vec<Value>| {
            members.splice(0..0, [Value::Int(first), Value::Int(last)]);
            Value::Array(members)
        };
        let reply = Value::Array(vec![
            entry(100, 16383, vec![member(named("b"), 2), member(named("c"), 3)]),
            entry(0, 99, vec![member(named(""), 1)]),
        ]);
        let expected = [
            Range { first: 0, last: 99, places: vec![("asked".into(), 1)] },
            Range { first: 100, last: 16383, places: vec![("b".into(), 2), ("c".into(), 3)] },
        ];
        assert_eq!(ranges(reply, "asked").expect("ranges"), expected);
        assert_eq!(ranges(Value::Array(vec![entry(0, 99, vec![Value::Nil])]), "asked"), None);
        assert_eq!(ranges(Value::Nil, "asked"), None);
    }

    #[test]
    fn signposts_are_read() {
        let error = |text: &str| {
            let reply = redis::parse_redis_value(text.as_bytes()).expect("reply");
            let Value::ServerError(e) = reply else { panic!("{reply:?}") };
            error::map(&e.into(), Sent::Yes)
        };
        let read = |text| Signpost::of(&error(text));
        let moved = Signpost { place: ("10.0.0.1".into(), 7000), slot: 7, asking: false };
        assert_eq!(read("-MOVED 7 10.0.0.1:7000\r\n"), Some(moved));
        assert_eq!(read("-ASK 7 ::1:7000\r\n").map(|to| (to.place.0, to.asking)), Some(("::1".into(), true)));
        assert_eq!(read("-MOVED 7 :7000\r\n").map(|to| to.place.0), Some(String::new()));
        assert_eq!(read("-CLUSTERDOWN Hash slot not served\r\n"), None);
    }
}
