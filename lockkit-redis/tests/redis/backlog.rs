//! A server out of reach, while a service goes on asking it for locks and giving up.

use std::{sync::Arc, time::Duration};

use lockkit_core::{LockStore, Locker, Result};
use lockkit_redis::{RedisConfig, RedisStore};
use lockkit_testkit::faults::{Direction, Proxy};
use tokio::{
    runtime::{Handle, Runtime},
    time::{Instant, interval, timeout},
};

use crate::support::*;

const LEASE: Duration = Duration::from_secs(2);
const BOUND: Duration = Duration::from_millis(500);

#[test]
fn what_a_server_out_of_reach_is_owed_ends_with_the_leases() {
    // The proxy has a task for each connection, which are not to be counted.
    let (outside, inside) = (Runtime::new().expect("a runtime"), Runtime::new().expect("a runtime"));
    let server = outside.block_on(Server::start());
    let at = ([127, 0, 0, 1], server.port()).into();
    let proxy = outside.block_on(Proxy::start(at)).expect("a proxy");
    inside.block_on(give_up_on(&proxy)).expect("the server is back");
    let keys = raw::<Vec<String>>(&mut server.raw(), "KEYS *");
    assert!(keys.iter().all(|key| key.ends_with(":fence")), "locks are left on the server: {keys:?}");
}

async fn give_up_on(proxy: &Proxy) -> Result<()> {
    let config = RedisConfig::new("127.0.0.1", proxy.addr().port()).timeout(BOUND);
    let store: Arc<dyn LockStore> = Arc::new(RedisStore::connect(config).await?);
    let locker = Locker::shared_builder(Arc::clone(&store)).build();
    _ = locker.lock("before").acquire().await?.release().await?;
    let tasks = alive();

    // First no answer comes back, then not even a connection comes about.
    proxy.hold(Direction::ToClient);
    let (unanswered, _) = ask_and_give_up(LEASE, "a", &locker).await;
    proxy.blackhole();
    let (unconnected, asked) = ask_and_give_up(LEASE * 2, "b", &locker).await;
    let owed = owed(&locker).await;
    // A thousand a second at most, for a lease, its drift and a last try; and not nothing.
    assert!((asked / 10..=4_200).contains(&owed), "{owed} releases are owed of {asked}");
    // A task for each that is owed, and those of the connections.
    let most = unanswered.max(unconnected);
    assert!(most <= tasks + 4_200 + 200, "{most} tasks, and {tasks} before");
    // The proxy keeps them all, for it does not hear either that they are closed.
    assert!(proxy.connections() < 200, "{} connections were made", proxy.connections());
    locker.shutdown(LEASE + BOUND * 2 + Duration::from_secs(2)).await?;

    drop(locker);
    proxy.heal();
    let again = Locker::shared_builder(store).build();
    let guard = again.lock("after").acquire_within(Duration::from_secs(5)).await?.expect("it is free");
    _ = guard.release().await?;
    let start = Instant::now();
    while alive() > tasks {
        assert!(start.elapsed() < Duration::from_secs(5), "{} tasks, and {tasks} before", alive());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}

/// Asks for a lock each millisecond and gives up a moment later. Returns the most tasks that there were, and how often it
/// asked.
async fn ask_and_give_up(time: Duration, name: &str, locker: &Locker) -> (usize, u32) {
    let (mut most, mut number, start) = (0, 0, Instant::now());
    let mut pace = interval(Duration::from_millis(1));
    while start.elapsed() < time {
        pace.tick().await;
        let lock = locker.lock(format!("{name}{number}")).ttl(LEASE);
        let granted = timeout(Duration::ZERO, lock.acquire()).await;
        assert!(granted.is_err(), "{granted:?} from a server out of reach");
        most = most.max(alive());
        number += 1;
    }
    (most, number)
}

fn alive() -> usize {
    Handle::current().metrics().num_alive_tasks()
}

/// How many releases are under way in the background, as an end that does not wait for them says.
async fn owed(locker: &Locker) -> u32 {
    let said = locker.shutdown(Duration::ZERO).await.map_err(|error| error.message().to_owned());
    said.map_or_else(|said| said.split(' ').next().and_then(|number| number.parse().ok()).expect("a number"), |()| 0)
}
