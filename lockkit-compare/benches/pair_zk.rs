//! Acquire and release, in pairs: this store against the bare driver, which creates a node and deletes it again; and what
//! renewals cost.
//!
//! The server is private. `cargo bench -p lockkit-compare --bench pair_zk [-- rounds]`

use std::{future::Future, pin::Pin, sync::Arc, time::Duration};

use lockkit::{
    LockStore,
    zk::{ZkConfig, ZkStore},
};
use lockkit_compare::pairs::{self, BoxError, Contestant, Leases, Rounds, median_millis};
use lockkit_testkit::servers::{ZooKeeperFlavor, ZooKeeperServer};
use zookeeper_client::{Acls, Client, CreateMode, CreateOptions};

const RENEWED: usize = 10_000;
const RENEWALS: usize = 10;

type Pair = Pin<Box<dyn Future<Output = Result<(), BoxError>> + Send>>;

fn main() -> Result<(), BoxError> {
    // On a worker, as in a service; the thread of `main` is none.
    pairs::main(15, async |rounds| tokio::spawn(run(rounds)).await?)
}

async fn run(rounds: Rounds) -> Result<(), BoxError> {
    let server = ZooKeeperServer::start(ZooKeeperFlavor::Installed).await?;
    let address = server.addr().to_string();
    let store: Arc<dyn LockStore> = Arc::new(ZkStore::connect(ZkConfig::new([address.clone()])).await?);
    let bare = Client::connector().with_session_timeout(Duration::from_secs(20)).connect(&address).await?;
    let ours = Contestant::store(Arc::clone(&store));
    let bare = Contestant::new("bare driver", move |number| theirs(&bare, number));

    // The virtual machine compiles what is hot; and the directories come into being.
    Rounds::new(4).many_tasks(&[&ours, &bare]).await?;
    let one = rounds.one_task(&[&ours, &bare]).await?;
    let many = rounds.many_tasks(&[&ours, &bare]).await?;
    print!("{one}{many}");
    println!("ratios, medians of the rounds' own");
    println!("{}\n{}", one.ratio(1, 0.95), many.ratio(1, 0.90));
    renewals(store, &server).await
}

const NODE: CreateOptions<'static> = CreateMode::EphemeralSequential.with_acls(Acls::anyone_all());
const PARENT: CreateOptions<'static> = CreateMode::Container.with_acls(Acls::anyone_all());

fn theirs(bare: &Client, number: usize) -> impl FnMut() -> Pair + use<> {
    let (bare, directory) = (bare.clone(), format!("/bare/bench-{number}"));
    move || {
        let (bare, directory) = (bare.clone(), directory.clone());
        Box::pin(async move {
            let prefix = format!("{directory}/_c_00112233-4455-6677-8899-aabbccddeeff-lock-");
            let created = match bare.create(&prefix, b"lockkit:1:1::bench@host:1234", &NODE).await {
                Err(zookeeper_client::Error::NoNode) => {
                    bare.mkdir(&directory, &PARENT).await?;
                    bare.create(&prefix, b"", &NODE).await
                }
                created => created,
            };
            bare.delete(&format!("{prefix}{}", created?.1), None).await?;
            Ok(())
        })
    }
}

/// What it costs to renew many leases of one session.
async fn renewals(store: Arc<dyn LockStore>, server: &ZooKeeperServer) -> Result<(), BoxError> {
    let leases = Leases::take(store, RENEWED).await?;
    let pause = || tokio::time::sleep(Duration::from_millis(300));
    pause().await;
    println!("renewing {RENEWED} leases in one call");
    // Each node is looked at, and a watch is set.
    println!("  the first time                     {:>9.1} ms", median_millis(&[leases.renew().await?]));
    let (before, mut wall) = (received(server).await?, Vec::new());
    for _ in 0..RENEWALS {
        pause().await;
        wall.push(leases.renew().await?);
    }
    println!("  then                               {:>9.1} ms", median_millis(&wall));
    println!("  requests of all clients meanwhile  {:>9}", received(server).await? - before);
    Ok(())
}

/// How many packets the server has received.
async fn received(server: &ZooKeeperServer) -> Result<u64, BoxError> {
    let answer = server.word("srvr").await?;
    let count = answer.lines().find_map(|line| line.strip_prefix("Received: ")).ok_or("no count")?;
    Ok(count.trim().parse()?)
}
