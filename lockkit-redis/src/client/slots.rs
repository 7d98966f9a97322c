//! What the members of a cluster say about who serves which slot.

use std::time::Duration;

use lockkit_core::{Error, ErrorKind, Result};
use redis::{AsyncConnectionConfig, Pipeline, Value};
use tokio::time::timeout;

use crate::{
    client::{connect, connection::Connection},
    config::RedisConfig,
    wire::{
        address::{self, Address},
        error::{self, Sent},
        name::SLOTS,
    },
};

/// A range of slots, and who serves it: the primary first.
#[derive(Debug, PartialEq)]
pub(crate) struct Range {
    pub(crate) first: u16,
    pub(crate) last: u16,
    pub(crate) addresses: Vec<Address>,
}

/// Which slots are whose as one member has it, and the configuration epoch that it knows.
pub(crate) type MemberMap = (u64, Vec<Range>);

/// Asks a member that there is a connection to.
pub(crate) async fn ask(host: &str, connection: &Connection, bound: Duration) -> Result<MemberMap> {
    let replies = connection.run_all(&questions(), bound, Sent::ReadOnly).await?;
    read(replies, host)
}

/// Asks a member over a connection for this alone.
pub(crate) async fn ask_anew(config: &RedisConfig, address: &Address) -> Result<MemberMap> {
    let exchange = async {
        let (login, settings) = (config.login.read(0)?, AsyncConnectionConfig::new());
        let (mut connection, driver) = connect::connect(config, address, &login, settings).await?;
        let requests = questions();
        let replies = connection.send_packed_commands(&requests, 0, requests.len()).await;
        driver.abort();
        read(replies.map_err(|e| error::map(&e, Sent::No))?, &address.0)
    };
    let outcome = timeout(config.timeout, exchange).await;
    outcome.unwrap_or_else(|_| Err(Error::no_answer(config.timeout, Sent::No))).map_err(|e| {
        let message = format!("member {}: {}", address::text(address), e.message());
        Error::new(e.kind(), message).with_source(e)
    })
}

fn questions() -> Pipeline {
    let mut requests = Pipeline::with_capacity(2);
    requests.cmd("CLUSTER").arg("SLOTS").cmd("CLUSTER").arg("INFO");
    requests
}

/// Reads the answers of the member at this host.
fn read(replies: Vec<Value>, host: &str) -> Result<MemberMap> {
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
        return Err(Error::new(ErrorKind::Unavailable, "the member serves no slots and knows no member that does"));
    }
    let info = redis::from_redis_value::<String>(info).unwrap_or_default();
    let config_epoch = info.lines().find_map(|line| line.strip_prefix("cluster_current_epoch:")?.trim().parse().ok());
    Ok((config_epoch.unwrap_or(0), ranges))
}

/// Reads the answer to `CLUSTER SLOTS`: `[first, last, [host, port, ..], ..]` for each range.
fn ranges(reply: Value, asked: &str) -> Option<Vec<Range>> {
    let Value::Array(entries) = reply else { return None };
    let number = |value: &Value| match value {
        Value::Int(number) => u16::try_from(*number).ok(),
        _ => None,
    };
    let address = |value: &Value| {
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
        let (first, last) = (number(parts.first()?)?, number(parts.get(1)?)?);
        let addresses = parts.get(2..)?.iter().map(address).collect::<Option<_>>()?;
        (first <= last && last < SLOTS).then_some(Range { first, last, addresses })
    };
    let mut ranges: Vec<Range> = entries.iter().map(range).collect::<Option<_>>()?;
    ranges.sort_by_key(|range| range.first);
    Some(ranges)
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
            Range { first: 0, last: 99, addresses: vec![("asked".into(), 1)] },
            Range { first: 100, last: 16383, addresses: vec![("b".into(), 2), ("c".into(), 3)] },
        ];
        assert_eq!(ranges(reply, "asked").expect("ranges"), expected);
        assert_eq!(ranges(Value::Array(vec![entry(0, 99, vec![Value::Nil])]), "asked"), None);
        assert_eq!(ranges(Value::Nil, "asked"), None);
        for (first, last) in [(2, 1), (0, 16384), (70000, 70001)] {
            assert_eq!(ranges(Value::Array(vec![entry(first, last, vec![member(named("b"), 2)])]), "asked"), None);
        }
    }
}
