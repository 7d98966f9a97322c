//! Two stores, the migration between them, and the two clients of one lock.

use std::{
    fs,
    net::SocketAddr,
    process::Output,
    time::{Duration, Instant},
};

use lockkit::{
    Fence, Guard, Locker, Outcome,
    migrate::{Migration, Phase, Side, Start},
    mysql::{MySqlConfig, schema},
};
use lockkit_testkit::{
    BoxError, Other, OtherClient,
    servers::{MySqlOptions, MySqlServer, RedisOptions, RedisServer, ZooKeeperFlavor, ZooKeeperServer},
};
use tokio::process::Command;

use crate::support;

/// The name of the lock, for lockkit.
pub(crate) const NAME: &str = "shared";
pub(crate) const TTL: Duration = Duration::from_secs(3);
/// Each drain takes 3.4 s.
pub(crate) const START: Start = Start::new(TTL, Duration::from_millis(300));
const SESSION: Duration = Duration::from_secs(4);
/// For as long as the lock of redis-py lasts, which is not renewed: longer than a trial.
const UNTIL_RELEASED: Duration = Duration::from_secs(300);

/// How long anything awaited may take. Not how long it does take.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// A kind of store.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    Redis,
    MySql,
    ZooKeeper,
}

/// A store's server; it is stopped when this is dropped.
pub(crate) enum Server {
    Redis(RedisServer),
    MySql(MySqlServer),
    ZooKeeper(ZooKeeperServer),
}

impl Server {
    pub(crate) async fn start(kind: Kind) -> Result<Self, BoxError> {
        Ok(match kind {
            Kind::Redis => Self::Redis(RedisServer::start(RedisOptions::default()).await?),
            Kind::MySql => {
                let options = MySqlOptions::default().init(schema::ddl(MySqlConfig::TABLE)?);
                // Nothing here depends on what is on the disk.
                let server = MySqlServer::start(options.args(["--innodb-flush-log-at-trx-commit=2"]));
                Self::MySql(server.await?)
            }
            Kind::ZooKeeper => Self::ZooKeeper(ZooKeeperServer::start(ZooKeeperFlavor::Installed).await?),
        })
    }

    fn addr(&self) -> SocketAddr {
        match self {
            Self::Redis(server) => server.addr(),
            Self::MySql(server) => server.addr(),
            Self::ZooKeeper(server) => server.addr(),
        }
    }

    /// The URL of a store that shares its locks with another client: with that one's prefix, or below its base.
    pub(crate) fn shared_url(&self) -> String {
        match self {
            Self::Redis(server) => format!("redis://{}?prefix=theirs:", server.addr()),
            Self::MySql(server) => server.url(),
            Self::ZooKeeper(server) => format!("zk://{}?session=4s&base=/theirs", server.addr()),
        }
    }

    /// The URL of a store for lockkit alone.
    pub(crate) fn url(&self) -> String {
        match self {
            Self::Redis(server) => server.url(),
            Self::MySql(server) => server.url(),
            Self::ZooKeeper(server) => format!("zk://{}?session=4s", server.addr()),
        }
    }
}

/// Everything that takes part in one trial.
pub(crate) struct Setting {
    pub(crate) migration: Migration,
    pub(crate) other: Other,
    /// What the stores say of the other client; `None` if that depends on the machine.
    pub(crate) called: Option<&'static str>,
    urls: [String; 2],
    locker: Locker,
    highest: Fence,
    _servers: [Server; 2],
}

impl Setting {
    /// A migration that has been started, from a store that the other client uses.
    pub(crate) async fn new(client: OtherClient, new: Kind) -> Result<Self, BoxError> {
        let (kind, lock, bound, called) = match client {
            // The value of its key is its token, which nobody may see.
            OtherClient::RedisPy => {
                (Kind::Redis, "theirs:shared", UNTIL_RELEASED, Some("a client that is not lockkit"))
            }
            OtherClient::Kazoo => (Kind::ZooKeeper, "/theirs/shared", SESSION, Some("kazoo")),
            // The address of its machine.
            OtherClient::Curator => (Kind::ZooKeeper, "/theirs/shared", SESSION, None),
            _ => return Err(format!("{client:?} has no place here").into()),
        };
        let servers = [Server::start(kind).await?, Server::start(new).await?];
        let other = Other::start(client, servers[0].addr(), bound, lock).await?;
        let urls = [servers[0].shared_url(), servers[1].url()];
        let migration = Migration::new(lockkit::open(&urls[0]).await?, lockkit::open(&urls[1]).await?);
        migration.start(START).await?;
        let locker = connect(&urls).await?;
        Ok(Self { migration, other, called, urls, locker, highest: Fence::NONE, _servers: servers })
    }

    /// Tries to take the lock, as a service does that was deployed with the URL of the migration. A try that failed, for a call
    /// has a quarter of the ttl, is made again: it has said nothing.
    pub(crate) async fn take(&mut self) -> Result<Option<Guard>, BoxError> {
        let asked = Instant::now();
        loop {
            match self.take_within(Duration::ZERO).await {
                Err(error) if asked.elapsed() < PATIENCE && is_retryable(&error) => {}
                answer => return answer,
            }
        }
    }

    /// The same with a wait. Each grant must have a higher fence than those before it, whatever the phase.
    pub(crate) async fn take_within(&mut self, wait: Duration) -> Result<Option<Guard>, BoxError> {
        let guard = self.locker.lock(NAME).ttl(TTL).acquire_within(wait).await?;
        if let Some(guard) = &guard {
            assert!(guard.fence() > self.highest, "the fence {} after {}", guard.fence(), self.highest);
            self.highest = guard.fence();
        }
        Ok(guard)
    }

    /// Has the other client and two clients of the migration count in one file, that nothing but the lock protects.
    pub(crate) async fn count(&mut self, each: usize) -> Result<(), BoxError> {
        let directory = tempfile::tempdir()?;
        let counter = directory.path().join("counter");
        fs::write(&counter, "0")?;
        self.other.order(&format!("count {each} {}", counter.display())).await?;
        let mut ours = Vec::new();
        for _ in 0..2 {
            let (locker, counter) = (connect(&self.urls).await?, counter.clone());
            ours.push(tokio::spawn(async move {
                let mut fences = Vec::new();
                for _ in 0..each {
                    let guard = locker.lock(NAME).ttl(TTL).acquire().await?;
                    fences.push(guard.fence());
                    let count: usize = fs::read_to_string(&counter)?.parse()?;
                    tokio::time::sleep(Duration::from_millis(1)).await;
                    fs::write(&counter, (count + 1).to_string())?;
                    assert_eq!(guard.release().await?, Outcome::Released);
                }
                Ok::<_, BoxError>(fences)
            }));
        }
        let before = self.highest;
        for task in ours {
            let fences = task.await??;
            assert!(fences.is_sorted(), "fences went back: {fences:?}");
            assert!(fences[0] > before, "the fence {} after {before}", fences[0]);
            self.highest = self.highest.max(fences[each - 1]);
        }
        assert_eq!(self.other.answer().await?, "counted");
        assert_eq!(fs::read_to_string(&counter)?, (3 * each).to_string(), "updates were lost");
        Ok(())
    }

    /// `lockkit migrate` between the two stores.
    pub(crate) async fn command(&self, args: &[&str]) -> Result<Output, BoxError> {
        let mut command = support::lockkit(&[&["migrate"], args].concat());
        command.env("LOCKKIT_FROM", &self.urls[0]).env("LOCKKIT_TO", &self.urls[1]);
        Ok(Command::from(command).kill_on_drop(true).output().await?)
    }

    /// What the command prints when it succeeds.
    pub(crate) async fn done(&self, args: &[&str]) -> Result<String, BoxError> {
        let output = self.command(args).await?;
        assert_eq!(support::code(&output), 0, "{output:?}");
        Ok(support::stdout(&output))
    }

    /// What the steps say of the other client, which holds the lock in the old store.
    pub(crate) async fn named(&self) -> Result<String, BoxError> {
        let seen = self.migration.holders().await?;
        let others: Vec<_> = seen.iter().filter(|seen| seen.phase.is_none()).collect();
        let [other] = others[..] else { return Err(format!("one other client holds one lock: {seen:?}").into()) };
        assert_eq!((other.key.as_str(), other.side), (NAME, Side::Old));
        if let Some(called) = self.called {
            assert_eq!(other.holder.info.as_str(), called);
        }
        Ok(format!("{NAME:?}, held by {:?} in the old store", other.holder.info))
    }

    pub(crate) async fn phase(&self) -> Result<Phase, BoxError> {
        Ok(self.migration.state().await?.record.phase)
    }
}

fn is_retryable(error: &BoxError) -> bool {
    error.downcast_ref::<lockkit::Error>().is_some_and(lockkit::Error::is_retryable)
}

async fn connect(urls: &[String; 2]) -> Result<Locker, BoxError> {
    Ok(lockkit::connect(&format!("migrate:?from={}&to={}", urls[0], urls[1])).await?)
}
