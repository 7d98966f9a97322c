//! Which server is the primary, as the sentinels have it.
//!
//! All sentinels are asked at once. What counts is the answer with the highest configuration epoch among those of a
//! majority, or among those that came in time. All that answered are listened to for as long as the connection to the
//! primary is used: a `+switch-master` ends that connection, and what the former primary says after it does not count.
//! Should the message get lost, a primary that was replaced breaks its connections, refuses to write, or does not answer.

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use lockkit_core::{Error, ErrorKind, Result};
use redis::{AsyncConnectionConfig, Pipeline, PushInfo, PushKind, Value, aio::MultiplexedConnection, aio::SendError};
use tokio::{
    task::{AbortHandle, JoinSet},
    time::timeout,
};

use crate::{
    config::{Login, RedisConfig},
    error::{self, Sent},
    secret, stream, vote,
};

/// A host and a port.
pub(crate) type Place = (String, u16);

/// Called when another server became the primary.
pub(crate) type OnSwitch = Arc<dyn Fn() + Send + Sync>;

/// What the sentinels say.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) place: Place,
    /// To be kept for as long as it matters that another server takes over.
    pub(crate) watches: Vec<Watch>,
}

/// A connection to a sentinel that announces changes.
pub(crate) struct Watch {
    _connection: MultiplexedConnection,
    driver: AbortHandle,
}

/// Asks the sentinels for the primary.
///
/// # Errors
/// `InvalidInput` if they know no primary of this name; `Unavailable` if none answers; `Denied` if the login is wrong.
pub(crate) async fn find(
    config: &RedisConfig,
    sentinels: &[Place],
    primary: &str,
    login: &Login,
    on_switch: &OnSwitch,
) -> Result<Found> {
    let mut asked = JoinSet::new();
    for place in sentinels {
        let (config, place, primary) = (config.clone(), place.clone(), primary.to_owned());
        let (login, on_switch) = (login.clone(), Arc::clone(on_switch));
        asked.spawn(async move { ask(&config, &place, &primary, &login, on_switch).await });
    }
    let (mut newest, others) = vote::newest(asked, config.timeout / 4).await?;
    newest.watches.extend(others.into_iter().flat_map(|other| other.watches));
    Ok(newest)
}

/// What a sentinel was heard to say.
#[derive(Default)]
struct Heard {
    answer: Option<Place>,
    switched: Option<Place>,
}

async fn ask(
    config: &RedisConfig,
    (host, port): &Place,
    primary: &str,
    login: &Login,
    on_switch: OnSwitch,
) -> Result<(u64, Found)> {
    let named = |e: Error| {
        let message = format!("sentinel {host}:{port}: {}", e.message());
        Error::new(e.kind(), message).with_source(e)
    };
    let heard = Arc::new(Mutex::new(Heard::default()));
    let receiver = {
        let (heard, primary) = (Arc::clone(&heard), primary.to_owned());
        move |push: PushInfo| {
            if let Some(place) = switched(&push, &primary) {
                let mut heard = heard.lock().unwrap_or_else(PoisonError::into_inner);
                let is_news = heard.answer.as_ref().is_some_and(|answer| *answer != place);
                heard.switched = Some(place);
                if is_news {
                    on_switch();
                }
            }
            Ok::<_, SendError>(())
        }
    };
    let settings =
        AsyncConnectionConfig::new().set_push_sender(receiver).set_connection_timeout(None).set_response_timeout(None);
    let exchange = async {
        let stream = stream::open(config, host, *port, Arc::default()).await.map_err(error::map_open)?;
        let (connection, driver) = MultiplexedConnection::new_with_config(&secret::login(login, 0)?, stream, settings)
            .await
            .map_err(|e| error::map_login(&e))?;
        let watch = Watch { _connection: connection.clone(), driver: tokio::spawn(driver).abort_handle() };
        let mut requests = Pipeline::with_capacity(2);
        requests.cmd("SUBSCRIBE").arg("+switch-master").cmd("SENTINEL").arg("MASTER").arg(primary);
        let mut connection = connection;
        let replies = connection.send_packed_commands(&requests, 0, requests.len()).await;
        let reply = replies.map_err(|e| error::map(&e, Sent::No))?.pop().unwrap_or_default();
        Ok((watch, reply))
    };
    let within: Duration = config.timeout;
    let (watch, reply) =
        timeout(within, exchange).await.unwrap_or_else(|_| Err(error::timed_out(within, Sent::No))).map_err(named)?;
    let (mut place, epoch) = read(reply, primary).map_err(named)?;
    let mut heard = heard.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(switched) = &heard.switched {
        place = switched.clone();
    }
    heard.answer = Some(place.clone());
    Ok((epoch, Found { place, watches: vec![watch] }))
}

/// Reads the answer to `SENTINEL MASTER`.
fn read(reply: Value, primary: &str) -> Result<(Place, u64)> {
    let odd = || error::odd_reply(Sent::No);
    if let Value::ServerError(e) = reply {
        return Err(match e.details() {
            Some(details) if details.contains("No such master") => {
                Error::new(ErrorKind::InvalidInput, format!("it knows no primary called {primary:?}"))
            }
            _ => error::map(&e.into(), Sent::No),
        });
    }
    let fields: std::collections::HashMap<String, String> = redis::from_redis_value(reply).map_err(|_| odd())?;
    let number = |name: &str| fields.get(name).and_then(|text| text.parse::<u64>().ok());
    let port = number("port").and_then(|port| u16::try_from(port).ok()).ok_or_else(odd)?;
    let host = fields.get("ip").filter(|host| !host.is_empty()).ok_or_else(odd)?;
    Ok(((host.clone(), port), number("config-epoch").unwrap_or(0)))
}

/// Who became the primary of this name, if that is what was pushed:
/// `<name> <old host> <old port> <new host> <new port>`.
fn switched(push: &PushInfo, primary: &str) -> Option<Place> {
    let [Value::BulkString(channel), Value::BulkString(message)] = &push.data[..] else { return None };
    if push.kind != PushKind::Message || channel != b"+switch-master" {
        return None;
    }
    let rest = str::from_utf8(message).ok()?.strip_prefix(primary)?.strip_prefix(' ')?;
    let mut words = rest.split(' ').skip(2);
    Some((words.next()?.to_owned(), words.next()?.parse().ok()?))
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Watch(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(channel: &str, text: &str) -> PushInfo {
        let data = [channel, text].map(|text| Value::BulkString(text.into())).into();
        PushInfo { kind: PushKind::Message, data }
    }

    #[test]
    fn only_news_of_our_primary_counts() {
        let news = "orders 10.0.0.1 6379 10.0.0.2 6380";
        assert_eq!(switched(&message("+switch-master", news), "orders"), Some(("10.0.0.2".into(), 6380)));
        assert_eq!(switched(&message("+switch-master", news), "order"), None);
        assert_eq!(switched(&message("+slave", news), "orders"), None);
        assert_eq!(switched(&message("+switch-master", "orders 10.0.0.1"), "orders"), None);
    }

    #[test]
    fn an_unknown_name_is_bad_input() {
        let reply = redis::parse_redis_value(b"-ERR No such master with that name\r\n").expect("reply");
        assert_eq!(read(reply, "x").expect_err("unknown").kind(), ErrorKind::InvalidInput);
        let reply =
            Value::Array(["ip", "h", "port", "1", "config-epoch", "7"].map(|t| Value::BulkString(t.into())).into());
        assert_eq!(read(reply, "x").expect("known"), (("h".into(), 1), 7));
    }
}
