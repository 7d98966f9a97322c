//! Which server is the primary, as the sentinels have it.
//!
//! All sentinels are asked at once. What counts is the answer with the highest configuration epoch among those of a
//! majority, or among those that came in time. All that answered are listened to for as long as the connection to the
//! primary is used: a `+switch-master` to another server ends that connection, and what the former primary says after it
//! does not count.
//!
//! The sentinel that leads a failover has the new epoch as soon as the replica is promoted, but its `SENTINEL MASTER` names the
//! former primary until all other replicas follow the new one: for `failover-timeout`, 3 minutes, if one of them hangs. So the
//! address is that of `SENTINEL GET-MASTER-ADDR-BY-NAME`, which changes together with the epoch.
//!
//! A primary that was replaced while it was cut off from the sentinels goes on as before, so somebody must be listened to
//! at all times. When the connection to a sentinel is lost, the next operation has the sentinels asked once more, beside
//! itself: they may all be down, which does not concern the primary. They are asked, and listened to, on the runtime of the
//! connection to the primary: that of the operation may not be driven any more when the operation is over.

use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use lockkit_core::{Error, ErrorKind, Result, store::unpoisoned};
use redis::{AsyncConnectionConfig, Pipeline, PushInfo, PushKind, Value, aio::MultiplexedConnection, aio::SendError};
use tokio::{
    runtime::Handle,
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
    config_epoch: u64,
    all: Mutex<Vec<Watch>>,
    /// Where the connection to the primary lives.
    home: Handle,
    /// When the sentinels were asked again.
    asked: Mutex<Option<Instant>>,
}

/// A connection to a sentinel that announces changes.
struct Watch {
    _connection: MultiplexedConnection,
    driver: AbortHandle,
    news: Arc<News>,
}

/// What a sentinel announces, and whether it is news.
struct News {
    on_switch: OnSwitch,
    heard: Mutex<Heard>,
}

#[derive(Default)]
struct Heard {
    /// The server that is used, which another sentinel may have named. Nobody knows it before enough of them have answered.
    used: Option<Address>,
    announced: Option<Address>,
}

impl Watches {
    /// Asks the sentinels for the primary. To be called where the connection to it is to live.
    ///
    /// # Errors
    /// `Misconfigured` if they know no primary of this name; `Unavailable` if none answers, or if they name several at
    /// the same epoch and no majority names one; `Denied` if the login is wrong.
    pub(crate) async fn begin(config: &RedisConfig, on_switch: OnSwitch) -> Result<Self> {
        let Found { address, config_epoch, watches } = find(config, &on_switch).await?;
        watches.iter().for_each(|watch| watch.news.expect(&address));
        let (config, all, asked) = (config.clone(), Mutex::new(watches), Mutex::default());
        Ok(Self(Arc::new(Watched { config, on_switch, address, config_epoch, all, home: Handle::current(), asked })))
    }

    /// Where the primary is.
    pub(crate) fn address(&self) -> &Address {
        &self.0.address
    }

    /// If the connection to a sentinel was lost, has all of them asked again: whether another took over meanwhile, and to
    /// be listened to. Returns at once.
    pub(crate) fn mend(&self) {
        if !self.0.is_lacking() {
            return;
        }
        let mut asked = unpoisoned(&self.0.asked);
        if asked.is_none_or(|asked| asked.elapsed() > AGAIN) {
            *asked = Some(Instant::now());
            let watched = Arc::clone(&self.0);
            self.0.home.spawn(async move { watched.ask_again().await });
        }
    }
}

impl Watched {
    /// Whether one of the connections to sentinels was lost, or there are too few. It is seen from them alone, so an attempt to
    /// replace them that does not end changes nothing.
    fn is_lacking(&self) -> bool {
        let all = unpoisoned(&self.all);
        // That a connection was lost, or its runtime has ended, nothing announces.
        all.len() < majority(&self.config) || all.iter().any(|watch| watch.driver.is_finished())
    }

    async fn ask_again(&self) {
        match find(&self.config, &self.on_switch).await {
            Ok(found) if found.address == self.address => {
                found.watches.iter().for_each(|watch| watch.news.expect(&self.address));
                *unpoisoned(&self.all) = found.watches;
            }
            // At the same epoch one of the two names is wrong: whoever connects anew asks once more.
            Ok(found) if found.config_epoch >= self.config_epoch => (self.on_switch)(),
            // A sentinel that has not heard of our primary yet is not worth listening to.
            Ok(_) | Err(_) => {}
        }
    }
}

/// What the sentinels say.
struct Found {
    address: Address,
    config_epoch: u64,
    watches: Vec<Watch>,
}

async fn find(config: &RedisConfig, on_switch: &OnSwitch) -> Result<Found> {
    let Topology::Sentinel { sentinels, primary, login } = &config.topology else {
        return Err(Error::invalid("no sentinels"));
    };
    let mut asked = JoinSet::new();
    for address in sentinels {
        let (config, address, primary) = (config.clone(), address.clone(), primary.clone());
        let (login, on_switch) = (login.clone(), Arc::clone(on_switch));
        asked.spawn(async move { ask(&config, &address, &primary, &login, on_switch).await });
    }
    let (mut newest, others) =
        vote::newest(asked, config.timeout / 4, |one, other| one.address == other.address).await?;
    newest.watches.extend(others.into_iter().flat_map(|other| other.watches));
    Ok(newest)
}

fn majority(config: &RedisConfig) -> usize {
    match &config.topology {
        Topology::Sentinel { sentinels, .. } => sentinels.len() / 2 + 1,
        Topology::Single | Topology::Cluster { .. } => 0,
    }
}

impl News {
    fn new(on_switch: OnSwitch) -> Self {
        Self { on_switch, heard: Mutex::default() }
    }

    /// From now on it is news if another server than this one is the primary. It may have been announced already.
    fn expect(&self, used: &Address) {
        self.hear(|heard| heard.used = Some(used.clone()));
    }

    fn announce(&self, primary: Address) {
        self.hear(|heard| heard.announced = Some(primary));
    }

    fn hear(&self, change: impl FnOnce(&mut Heard)) {
        let is_news = {
            let mut heard = unpoisoned(&self.heard);
            change(&mut heard);
            heard.used.is_some() && heard.announced.is_some() && heard.announced != heard.used
        };
        if is_news {
            (self.on_switch)();
        }
    }
}

async fn ask(
    config: &RedisConfig,
    at: &Address,
    primary: &str,
    login: &Login,
    on_switch: OnSwitch,
) -> Result<(u64, Found)> {
    let named = |e: Error| {
        let message = format!("sentinel {}: {}", address::text(at), e.message());
        Error::new(e.kind(), message).with_source(e)
    };
    let news = Arc::new(News::new(on_switch));
    let receiver = {
        let (news, primary) = (Arc::clone(&news), primary.to_owned());
        move |push: PushInfo| {
            switched(&push, &primary).into_iter().for_each(|address| news.announce(address));
            Ok::<_, SendError>(())
        }
    };
    let settings = AsyncConnectionConfig::new().set_push_sender(receiver);
    let exchange = async {
        let login = login.read(0)?;
        let (connection, driver) = connect::connect(config, at, &login, settings).await?;
        let watch = Watch { _connection: connection.clone(), driver, news };
        // What changes after it has answered is announced, for it was subscribed to before.
        let mut requests = Pipeline::with_capacity(1 + QUESTIONS.len());
        requests.cmd("SUBSCRIBE").arg("+switch-master");
        ask_for(&mut requests, primary);
        let mut connection = connection;
        let replies = connection.send_packed_commands(&requests, 0, requests.len()).await;
        let mut replies = replies.map_err(|e| error::map(&e, Sent::No))?;
        Ok((watch, replies.split_off(replies.len().min(1))))
    };
    let within: Duration = config.timeout;
    let (watch, replies) =
        timeout(within, exchange).await.unwrap_or_else(|_| Err(Error::no_answer(within, Sent::No))).map_err(named)?;
    let (address, config_epoch) = read(&replies, primary).map_err(named)?;
    Ok((config_epoch, Found { address, config_epoch, watches: vec![watch] }))
}

/// Which server is the primary, and since which configuration epoch. A failover may come between the two answers. Then the address must be the
/// newer one: at an epoch that is too low it loses against the others' answers, while a former primary at the new epoch
/// would win.
const QUESTIONS: [&str; 2] = ["MASTER", "GET-MASTER-ADDR-BY-NAME"];

/// Adds the questions whose answers are for [`read`].
pub(crate) fn ask_for(requests: &mut Pipeline, primary: &str) {
    for question in QUESTIONS {
        requests.cmd("SENTINEL").arg(question).arg(primary);
    }
}

/// Reads what a sentinel answers to [these questions](ask_for).
///
/// # Errors
/// `Misconfigured` if it knows no primary of this name, or is no sentinel; `Denied`; `Unexpected` for another answer.
pub(crate) fn read(replies: &[Value], primary: &str) -> Result<(Address, u64)> {
    let odd = || error::odd_reply(Sent::No);
    let unknown = || Error::new(ErrorKind::Misconfigured, format!("it knows no primary called {primary:?}"));
    let [master, address] = replies else { return Err(odd()) };
    for reply in replies {
        match reply {
            Value::ServerError(e) => {
                return Err(match e.details() {
                    Some(details) if details.contains("No such master") => unknown(),
                    Some(details) if details.contains("unknown command") => {
                        Error::new(ErrorKind::Misconfigured, "the server is not a sentinel")
                    }
                    _ => error::map(&e.clone().into(), Sent::No),
                });
            }
            Value::Nil => return Err(unknown()),
            _ => {}
        }
    }
    let fields: HashMap<String, String> = redis::from_redis_value(master.clone()).map_err(|_| odd())?;
    let (host, port): (String, u16) = redis::from_redis_value(address.clone()).map_err(|_| odd())?;
    if host.is_empty() {
        return Err(odd());
    }
    Ok(((host, port), fields.get("config-epoch").and_then(|epoch| epoch.parse().ok()).unwrap_or(0)))
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
    use std::sync::atomic::{AtomicU64, Ordering};

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

    fn replies(text: &str) -> Vec<Value> {
        let mut parser = redis::Parser::new();
        let mut bytes = text.as_bytes();
        [(), ()].map(|()| parser.parse_value(&mut bytes).expect("reply")).into()
    }

    #[test]
    fn what_is_not_there_is_misconfigured() {
        for none in ["-ERR No such master with that name\r\n*-1\r\n", "*0\r\n*-1\r\n"] {
            assert_eq!(read(&replies(none), "x").expect_err("unknown").kind(), ErrorKind::Misconfigured);
        }
    }

    #[test]
    fn the_address_is_that_of_the_server_that_was_promoted() {
        let master = "*6\r\n$2\r\nip\r\n$6\r\nformer\r\n$4\r\nport\r\n$1\r\n1\r\n$12\r\nconfig-epoch\r\n$1\r\n7\r\n";
        let address = "*2\r\n$3\r\nnew\r\n$1\r\n2\r\n";
        assert_eq!(read(&replies(&[master, address].concat()), "x").expect("known"), (("new".into(), 2), 7));
    }

    #[test]
    fn only_another_server_than_the_one_in_use_is_news() {
        let count = Arc::new(AtomicU64::new(0));
        let on_switch: OnSwitch = {
            let count = Arc::clone(&count);
            Arc::new(move || _ = count.fetch_add(1, Ordering::Relaxed))
        };
        let address = |host: &str| (host.to_owned(), 1);
        let news = News::new(on_switch);
        news.announce(address("new"));
        news.expect(&address("new"));
        news.announce(address("new"));
        assert_eq!(count.load(Ordering::Relaxed), 0);
        news.announce(address("newer"));
        assert_eq!(count.load(Ordering::Relaxed), 1);
        news.expect(&address("new"));
        assert_eq!(count.load(Ordering::Relaxed), 2, "it was announced before the choice");
    }
}
