//! Which server is the primary, as the sentinels have it.
//!
//! All sentinels are asked at once. What counts is the answer with the highest configuration epoch among those of a
//! majority, or among those that came in time. All that answered are listened to for as long as the connection to the
//! primary is used: a `+switch-master` ends that connection, and what the former primary says after it does not count.
//!
//! A primary that was replaced while it was cut off from the sentinels goes on as before, so somebody must be listened to
//! at all times. When the connection to a sentinel is lost, the next operation has the sentinels asked once more, beside
//! itself: they may all be down, which does not concern the primary.

use std::{
    fmt,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use lockkit_core::{Error, ErrorKind, Result, store::unpoisoned};
use redis::{AsyncConnectionConfig, Pipeline, PushInfo, PushKind, Value, aio::MultiplexedConnection, aio::SendError};
use tokio::{
    task::{AbortHandle, JoinSet},
    time::timeout,
};

use crate::{
    client::{connect, vote},
    config::{Login, RedisConfig, Topology},
    wire::{
        address::{self, Address},
        error::{self, Sent},
    },
};

/// How soon after the last time the sentinels are asked again, if no majority of them could be listened to.
const AGAIN: Duration = Duration::from_secs(5);

/// Called when another server became the primary.
pub(crate) type OnSwitch = Arc<dyn Fn() + Send + Sync>;

/// The primary, as the sentinels have it, and what is heard of them. To be kept for as long as the primary is used.
#[derive(Debug)]
pub(crate) struct Watches(Arc<Watched>);

struct Watched {
    config: RedisConfig,
    on_switch: OnSwitch,
    address: Address,
    epoch: u64,
    all: Mutex<Vec<Watch>>,
    /// Whether one of them was lost.
    is_lost: Arc<AtomicBool>,
    /// When the sentinels were asked again.
    asked: Mutex<Option<Instant>>,
}

/// A connection to a sentinel that announces changes.
struct Watch {
    _connection: MultiplexedConnection,
    driver: AbortHandle,
}

impl Watches {
    /// Asks the sentinels for the primary.
    ///
    /// # Errors
    /// `Misconfigured` if they know no primary of this name; `Unavailable` if none answers; `Denied` if the login is wrong.
    pub(crate) async fn begin(config: &RedisConfig, on_switch: OnSwitch) -> Result<Self> {
        let is_lost = Arc::new(AtomicBool::new(false));
        let Found { address, epoch, watches } = find(config, &on_switch, &is_lost).await?;
        let (config, all, asked) = (config.clone(), Mutex::new(watches), Mutex::default());
        Ok(Self(Arc::new(Watched { config, on_switch, address, epoch, all, is_lost, asked })))
    }

    /// Where the primary is.
    pub(crate) fn address(&self) -> &Address {
        &self.0.address
    }

    /// If the connection to a sentinel was lost, has all of them asked again: whether another took over meanwhile, and to
    /// be listened to. Returns at once.
    pub(crate) fn mend(&self) {
        if !self.0.is_lost.load(Ordering::Relaxed) {
            return;
        }
        let mut asked = unpoisoned(&self.0.asked);
        if asked.is_none_or(|asked| asked.elapsed() > AGAIN) {
            *asked = Some(Instant::now());
            let watched = Arc::clone(&self.0);
            tokio::spawn(async move { watched.ask_again().await });
        }
    }
}

impl Watched {
    async fn ask_again(&self) {
        // From now on another loss counts.
        self.is_lost.store(false, Ordering::Relaxed);
        let (all, count) = match find(&self.config, &self.on_switch, &self.is_lost).await {
            Ok(found) if found.address == self.address => {
                let count = found.watches.len();
                (Some(found.watches), count)
            }
            Ok(found) if found.epoch >= self.epoch => return (self.on_switch)(),
            // A sentinel that has not heard of our primary yet is not worth listening to.
            Ok(_) | Err(_) => (None, 0),
        };
        if let Some(all) = all {
            *unpoisoned(&self.all) = all;
        }
        if count < majority(&self.config) {
            self.is_lost.store(true, Ordering::Relaxed);
        }
    }
}

/// What the sentinels say.
struct Found {
    address: Address,
    epoch: u64,
    watches: Vec<Watch>,
}

async fn find(config: &RedisConfig, on_switch: &OnSwitch, is_lost: &Arc<AtomicBool>) -> Result<Found> {
    let Topology::Sentinel { sentinels, primary, login } = &config.topology else {
        return Err(Error::new(ErrorKind::InvalidInput, "no sentinels"));
    };
    let mut asked = JoinSet::new();
    for address in sentinels {
        let (config, address, primary) = (config.clone(), address.clone(), primary.clone());
        let (login, on_switch, is_lost) = (login.clone(), Arc::clone(on_switch), Arc::clone(is_lost));
        asked.spawn(async move { ask(&config, &address, &primary, &login, on_switch, is_lost).await });
    }
    let (mut newest, others) = vote::newest(asked, config.timeout / 4).await?;
    newest.watches.extend(others.into_iter().flat_map(|other| other.watches));
    Ok(newest)
}

fn majority(config: &RedisConfig) -> usize {
    match &config.topology {
        Topology::Sentinel { sentinels, .. } => sentinels.len() / 2 + 1,
        Topology::Single | Topology::Cluster { .. } => 0,
    }
}

/// What a sentinel was heard to say.
#[derive(Default)]
struct Heard {
    answer: Option<Address>,
    switched: Option<Address>,
}

async fn ask(
    config: &RedisConfig,
    at: &Address,
    primary: &str,
    login: &Login,
    on_switch: OnSwitch,
    is_lost: Arc<AtomicBool>,
) -> Result<(u64, Found)> {
    let named = |e: Error| {
        let message = format!("sentinel {}: {}", address::text(at), e.message());
        Error::new(e.kind(), message).with_source(e)
    };
    let heard = Arc::new(Mutex::new(Heard::default()));
    let receiver = {
        let (heard, primary) = (Arc::clone(&heard), primary.to_owned());
        move |push: PushInfo| {
            if push.kind == PushKind::Disconnection {
                is_lost.store(true, Ordering::Relaxed);
            }
            if let Some(address) = switched(&push, &primary) {
                let mut heard = unpoisoned(&heard);
                let is_news = heard.answer.as_ref().is_some_and(|answer| *answer != address);
                heard.switched = Some(address);
                if is_news {
                    on_switch();
                }
            }
            Ok::<_, SendError>(())
        }
    };
    let settings = AsyncConnectionConfig::new().set_push_sender(receiver);
    let exchange = async {
        let login = login.read(0)?;
        let (connection, driver) = connect::connect(config, at, &login, settings).await?;
        let watch = Watch { _connection: connection.clone(), driver };
        let mut requests = Pipeline::with_capacity(2);
        requests.cmd("SUBSCRIBE").arg("+switch-master").cmd("SENTINEL").arg("MASTER").arg(primary);
        let mut connection = connection;
        let replies = connection.send_packed_commands(&requests, 0, requests.len()).await;
        let reply = replies.map_err(|e| error::map(&e, Sent::No))?.pop().unwrap_or_default();
        Ok((watch, reply))
    };
    let within: Duration = config.timeout;
    let (watch, reply) =
        timeout(within, exchange).await.unwrap_or_else(|_| Err(Error::no_answer(within, Sent::No))).map_err(named)?;
    let (mut address, epoch) = read(reply, primary).map_err(named)?;
    let mut heard = unpoisoned(&heard);
    if let Some(switched) = &heard.switched {
        address = switched.clone();
    }
    heard.answer = Some(address.clone());
    Ok((epoch, Found { address, epoch, watches: vec![watch] }))
}

/// Reads the answer to `SENTINEL MASTER`.
pub(crate) fn read(reply: Value, primary: &str) -> Result<(Address, u64)> {
    let odd = || error::odd_reply(Sent::No);
    if let Value::ServerError(e) = reply {
        return Err(match e.details() {
            Some(details) if details.contains("No such master") => {
                Error::new(ErrorKind::Misconfigured, format!("it knows no primary called {primary:?}"))
            }
            Some(details) if details.contains("unknown command") => {
                Error::new(ErrorKind::Misconfigured, "the server is not a sentinel")
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

/// The server that became the primary of this name, if that is what was pushed:
/// `<name> <old host> <old port> <new host> <new port>`.
fn switched(push: &PushInfo, primary: &str) -> Option<Address> {
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

impl fmt::Debug for Watched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watched").field("place", &self.address).finish_non_exhaustive()
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
    fn what_is_not_there_is_misconfigured() {
        let reply = redis::parse_redis_value(b"-ERR No such master with that name\r\n").expect("reply");
        assert_eq!(read(reply, "x").expect_err("unknown").kind(), ErrorKind::Misconfigured);
        let reply =
            Value::Array(["ip", "h", "port", "1", "config-epoch", "7"].map(|t| Value::BulkString(t.into())).into());
        assert_eq!(read(reply, "x").expect("known"), (("h".into(), 1), 7));
    }
}
