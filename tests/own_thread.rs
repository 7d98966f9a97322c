//! A thread for the locker alone: leases are renewed while the application blocks the runtime that it calls from, and while
//! nobody drives it.

use std::{thread::sleep, time::Duration};

use lockkit::{Outcome, Result};
use lockkit_testkit::servers::{
    MySqlOptions, MySqlServer, RedisOptions, RedisServer, ZooKeeperFlavor, ZooKeeperServer,
};
use tokio::{
    runtime::{Builder, Runtime},
    time::timeout,
};

/// Long enough for a renewal to be late by a second, and another one.
const TTL: Duration = Duration::from_secs(3);
/// The shortest session of ZooKeeper that its server agrees to is 4 s.
const SESSION: Duration = Duration::from_secs(4);

fn undriven() -> Runtime {
    Builder::new_current_thread().enable_all().build().expect("a runtime")
}

fn driven() -> Runtime {
    Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime")
}

fn leases_survive(url: &str, ttl: Duration) -> Result<()> {
    let (app, other) = (undriven(), driven());
    let (locker, guard) = app.block_on(async {
        let locker = lockkit::connect_on_own_thread(url).await?;
        let guard = locker.lock("a").ttl(ttl).acquire().await?;
        // Within a call,
        sleep(ttl * 3 / 2);
        Ok::<_, lockkit::Error>((locker, guard))
    })?;
    // and between two of them.
    sleep(ttl * 3 / 2);
    assert!(guard.is_held());
    let stranger = other.block_on(lockkit::connect(url))?;
    assert!(other.block_on(stranger.lock("a").try_acquire())?.is_none(), "another holds it as well");
    assert_eq!(app.block_on(guard.release())?, Outcome::Released);
    let dropped = app.block_on(locker.lock("a").ttl(ttl).acquire())?;
    drop(dropped);
    let free = other.block_on(stranger.lock("a").acquire_within(ttl * 5))?;
    assert!(free.is_some_and(|guard| guard.is_held()));
    Ok(())
}

/// The connection breaks, and it is a call of the application that notices first, has no time to wait for another one, and is never
/// polled again.
#[test]
fn a_connection_that_is_made_anew_is_on_the_thread_as_well() -> Result<()> {
    let servers = driven();
    let server = servers.block_on(RedisServer::start(RedisOptions::default())).expect("a server");
    let app = undriven();
    let (locker, guard) = app.block_on(async {
        let locker = lockkit::connect_on_own_thread(&server.url()).await?;
        let guard = locker.lock("a").ttl(TTL).acquire().await?;
        Ok::<_, lockkit::Error>((locker, guard))
    })?;
    servers.block_on(server.command(&["CLIENT", "KILL", "TYPE", "normal"])).expect("killed");
    let asked = app.block_on(async { timeout(Duration::from_millis(1), locker.lock("b").try_acquire()).await });
    drop(asked);
    sleep(TTL * 3 / 2);
    assert!(guard.is_held());
    assert_eq!(app.block_on(guard.release())?, Outcome::Released);
    Ok(())
}

#[test]
fn on_redis() -> Result<()> {
    let servers = driven();
    let server = servers.block_on(RedisServer::start(RedisOptions::default())).expect("a server");
    leases_survive(&server.url(), TTL)
}

#[test]
fn on_mysql() -> Result<()> {
    let servers = driven();
    // Leases are renewed while nobody looks, and not by waiting for the disk.
    let options = MySqlOptions::default().args(["--innodb-flush-log-at-trx-commit=2"]);
    let server = servers.block_on(MySqlServer::start(options)).expect("a server");
    leases_survive(&format!("{}?create=true", server.url()), TTL)
}

#[test]
fn on_zookeeper() -> Result<()> {
    let servers = driven();
    let server = servers.block_on(ZooKeeperServer::start(ZooKeeperFlavor::Installed)).expect("a server");
    leases_survive(&format!("zk://{}?session=4s", server.addr()), SESSION)
}
