//! What shows that a fault took place: the servers' own counts and clocks, and what comes back through a proxy.

use std::{
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use lockkit::{LockKey, LockStore, store::Query};
use lockkit_testkit::{
    BoxError,
    servers::{MySqlServer, RedisServer},
};
use tokio::time::{sleep, timeout};

use crate::{arena::Arena, target::Target, trouble::Trouble};

/// How long a server that stands still is given to answer nevertheless.
const MUTE: Duration = Duration::from_millis(100);

/// How long a server is given to notice that its clock was moved.
const NOTICED: Duration = Duration::from_secs(5);

impl Arena {
    /// A store behind the proxies of the first worker.
    pub(crate) async fn proxied_store(&self) -> Result<Arc<dyn LockStore>, Trouble> {
        let opened = lockkit::open(&self.proxied_url(0)).await;
        opened.map_err(|error| Trouble::NoEffect(format!("no store to time: {error}")))
    }

    /// Whether one of the servers, by its place, answers at all.
    pub(crate) async fn answers(&self, place: usize) -> bool {
        let answer = async {
            match &self.target {
                Target::Redis(server) => server.command(&["PING"]).await.is_ok(),
                Target::Redlock(nodes, _) => nodes[place].command(&["PING"]).await.is_ok(),
                Target::MySql(server) => server.admin("SELECT 1").await.is_ok(),
                Target::ZooKeeper(server) => server.word("srvr").await.is_ok(),
                Target::Ensemble(ensemble) => ensemble.members()[place].word("srvr").await.is_ok(),
            }
        };
        timeout(MUTE, answer).await.unwrap_or(false)
    }

    /// How many seconds the first server's wall clock is ahead of this machine's.
    async fn ahead(&self) -> Result<i64, Trouble> {
        let time = match &self.target {
            Target::MySql(server) => first(server, "SELECT UNIX_TIMESTAMP()").await?,
            target => match target.redis().first() {
                Some(server) => server.command(&["TIME"]).await?,
                None => return Err(BoxError::from("this server does not tell the time").into()),
            },
        };
        let digits = |c: char| !c.is_ascii_digit();
        let seconds = time.split(digits).find(|word| !word.is_empty()).unwrap_or_default().parse::<i64>();
        let seconds = seconds.map_err(|error| BoxError::from(format!("{time:?}: {error}")))?;
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_err(BoxError::from)?;
        Ok(seconds - now.as_secs() as i64)
    }

    /// Asks until the server's clock is ahead as expected, and for no longer than a bound; returns the last answer. Valkey answers with a time that it read before, and
    /// on a busy machine that may be from before its clock was moved.
    pub(crate) async fn ahead_once(&self, is_expected: impl Fn(i64) -> bool) -> Result<i64, Trouble> {
        let asked = Instant::now();
        loop {
            let ahead = self.ahead().await?;
            if is_expected(ahead) || asked.elapsed() > NOTICED {
                return Ok(ahead);
            }
            sleep(Duration::from_millis(5)).await;
        }
    }

    /// Waits until so many clients wait for a lock, by what the store says, and for no longer than a bound; returns the last answer.
    pub(crate) async fn waiting_for(&self, name: &str, least: u32) -> Result<u32, Trouble> {
        // Another fault may keep the servers from answering.
        let unanswered = |error: lockkit::Error| Trouble::NoEffect(format!("nobody can be asked who waits: {error}"));
        let store = lockkit::open(&self.direct_url()).await.map_err(unanswered)?;
        let key = LockKey::new(name).map_err(BoxError::from)?;
        let asked = Instant::now();
        loop {
            let states = store.inspect(&Query::Keys(vec![key.clone()])).await.map_err(unanswered)?;
            let waiting = states.iter().filter_map(|state| state.waiters).max().unwrap_or(0);
            if waiting >= least || asked.elapsed() > NOTICED {
                return Ok(waiting);
            }
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// How many connections the servers have turned away.
    pub(crate) async fn turned_away(&self) -> Result<u64, Trouble> {
        match &self.target {
            Target::MySql(server) => {
                let ask = "SELECT VARIABLE_VALUE FROM information_schema.GLOBAL_STATUS \
                           WHERE VARIABLE_NAME = 'CONNECTION_ERRORS_MAX_CONNECTIONS'";
                let ask = if server.admin(ask).await.is_ok() {
                    ask.to_owned()
                } else {
                    ask.replace("information_schema.GLOBAL_STATUS", "performance_schema.global_status")
                };
                Ok(first(server, &ask).await?.parse::<u64>().map_err(BoxError::from)?)
            }
            target => {
                let mut sum = 0;
                for server in target.redis() {
                    sum += info(server, "stats", "rejected_connections:").await?;
                }
                Ok(sum)
            }
        }
    }

    /// How many calls of scripts failed because the servers did not know them.
    pub(crate) async fn unknown_scripts(&self) -> Result<u64, Trouble> {
        let mut sum = 0;
        for server in self.target.redis() {
            sum += info(server, "errorstats", "errorstat_NOSCRIPT:count=").await?;
        }
        Ok(sum)
    }
}

/// How long a store takes to answer a question.
pub(crate) async fn round_trip(store: &dyn LockStore) -> Result<Duration, Trouble> {
    let key = LockKey::new("nobody").map_err(BoxError::from)?;
    let start = Instant::now();
    let answer = store.inspect(&Query::Keys(vec![key])).await;
    answer.map_err(|error| Trouble::NoEffect(format!("no answer to time: {error}")))?;
    Ok(start.elapsed())
}

/// How many keys a server has.
pub(crate) async fn keys(server: &RedisServer) -> Result<u64, Trouble> {
    Ok(server.command(&["DBSIZE"]).await?.trim().parse().map_err(BoxError::from)?)
}

/// A number of a server's `INFO`; 0 if it has not counted anything yet.
async fn info(server: &RedisServer, section: &str, name: &str) -> Result<u64, Trouble> {
    let text = server.command(&["INFO", section]).await?;
    let line = text.lines().find_map(|line| line.trim().strip_prefix(name));
    Ok(line.map(str::parse).transpose().map_err(BoxError::from)?.unwrap_or(0))
}

/// One of the server's own counts.
pub(crate) async fn metric(server: &MySqlServer, name: &str) -> Result<u64, Trouble> {
    let ask = format!("SELECT COUNT FROM information_schema.INNODB_METRICS WHERE NAME = '{name}'");
    Ok(first(server, &ask).await?.parse().map_err(BoxError::from)?)
}

/// The first value of the first row.
async fn first(server: &MySqlServer, statement: &str) -> Result<String, Trouble> {
    let value = server.admin(statement).await?.into_iter().flatten().next().flatten();
    value.ok_or_else(|| BoxError::from(format!("nothing came of {statement:?}")).into())
}
