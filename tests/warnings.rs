//! What connecting warns of can be read, and is told to whoever observes.

use std::sync::{Arc, Mutex};

use lockkit::{Event, Locker, Observer};
use lockkit_testkit::servers::{RedisOptions, RedisServer};

#[derive(Clone, Debug, Default)]
struct Heard(Arc<Mutex<Vec<String>>>);

impl Observer for Heard {
    fn event(&self, event: &Event<'_>) {
        if let Event::Warned { warning } = event {
            self.0.lock().expect("nobody panics").push((*warning).to_owned());
        }
    }
}

async fn careless_server() -> RedisServer {
    let server = RedisServer::start(RedisOptions::default()).await.expect("a server");
    for (setting, value) in [("maxmemory", "100mb"), ("maxmemory-policy", "allkeys-lru")] {
        server.command(&["CONFIG", "SET", setting, value]).await.expect("set");
    }
    server
}

#[tokio::test]
async fn what_connecting_warns_of_is_not_lost() {
    let server = careless_server().await;
    let locker = lockkit::connect(&server.url()).await.expect("connect");
    assert!(locker.warnings().len() == 1 && locker.warnings()[0].contains("allkeys-lru"), "{:?}", locker.warnings());

    // A wrapper passes it on, and an observer is told once.
    let (heard, store) = (Heard::default(), lockkit::open(&server.url()).await.expect("open"));
    assert_eq!(*store.info().warnings, *locker.warnings());
    let observed = Locker::shared_builder(store).observer(heard.clone()).build();
    let guard = observed.clone().lock("k").acquire().await.expect("acquire");
    _ = guard.release().await.expect("release");
    assert_eq!(*heard.0.lock().expect("nobody panics"), locker.warnings());

    let nodes = [careless_server().await, careless_server().await, careless_server().await];
    let hosts = nodes.each_ref().map(|node| node.addr().to_string()).join(",");
    let quorum = lockkit::connect(&format!("redlock://{hosts}?delayed_restart=no")).await.expect("connect");
    assert_eq!(quorum.warnings().len(), 3, "{:?}", quorum.warnings());

    assert!(lockkit::connect("memory:").await.expect("memory").warnings().is_empty());
}
