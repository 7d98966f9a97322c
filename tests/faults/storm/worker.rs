//! A worker process: its tasks, and how it ends.

use std::{
    io,
    net::SocketAddr,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use lockkit::{HolderInfo, LockStore, Locker};
use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;

use super::{Random, client::Client, hand::Hand};
use lockkit_testkit::{BoxError, history::Recorder};

/// How many tasks of a worker use locks: they hand leases over to each other.
const HANDS: usize = 3;

/// How many locks each of them has for itself, to hold all at once.
const OWN: usize = 8;

/// What a worker is to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Orders {
    /// Its name in the history. Tasks are named `w1/0`, `w1/1`, ...; whoever takes the place of `w1` is `w1.2`.
    pub(crate) name: String,
    /// The store, through whatever stands between it and this worker.
    pub(crate) url: String,
    /// Where the [`Register`](super::Register) listens.
    pub(crate) register: SocketAddr,
    /// The locks to fight for.
    pub(crate) keys: Vec<String>,
    /// What is used in all modes, where the store has them.
    pub(crate) sharing: Option<Sharing>,
    /// How long a lease lasts, in milliseconds.
    pub(crate) ttl_ms: u64,
    /// How long a task rests at most between one lock and the next, in milliseconds.
    pub(crate) rest_ms: u64,
    /// What its choices come from.
    pub(crate) seed: u64,
    /// The file of its history.
    pub(crate) history: PathBuf,
}

/// The names that are used in all modes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Sharing {
    /// Of the locks to fight for, the one that readers share.
    pub(crate) lock: String,
    /// The semaphore.
    pub(crate) permits: String,
}

impl Orders {
    /// The locks that only this worker, or whoever takes its place, ever asks for.
    #[must_use]
    pub(crate) fn own_keys(&self) -> Vec<String> {
        (0..HANDS).flat_map(|hand| self.keys_of(hand)).collect()
    }

    fn keys_of(&self, hand: usize) -> impl Iterator<Item = String> {
        let place = self.name.split('.').next().unwrap_or(&self.name).to_owned();
        (0..OWN).map(move |number| format!("{place}/{hand}/{number}"))
    }
}

/// Takes locks and uses what they protect, until told to stop (a line on the standard input). Ends the process when
/// whoever started it is gone.
///
/// # Errors
/// When the register or the history's file is out of reach. That the store is, is what is being tested.
pub(crate) async fn work(orders: Orders, store: Arc<dyn LockStore>) -> Result<(), BoxError> {
    let stop = Arc::new(AtomicBool::new(false));
    listen(Arc::clone(&stop));
    let locker = Locker::shared_builder(store).holder(HolderInfo::new(&orders.name)).build();
    let recorder = Recorder::create(orders.name.clone(), &orders.history)?;
    let mut hands = JoinSet::new();
    for number in 0..HANDS {
        let name = format!("{}/{number}", orders.name);
        let mut hand = Hand {
            number,
            locker: locker.clone(),
            keys: orders.keys.clone(),
            sharing: orders.sharing.clone(),
            own: orders.keys_of(number).collect(),
            ttl: Duration::from_millis(orders.ttl_ms),
            rest_ms: orders.rest_ms,
            random: Random::new(orders.seed, &name),
            recorder: Arc::new(recorder.another(&name)),
            register: Client::connect(orders.register, &name).await?,
            owners: 0,
        };
        let stop = Arc::clone(&stop);
        hands.spawn(async move {
            hand.begin().await?;
            while !stop.load(Ordering::Relaxed) {
                hand.round().await?;
            }
            Ok::<_, BoxError>(())
        });
    }
    while let Some(ended) = hands.join_next().await {
        ended??;
    }
    // What is still to be released is released, if there is anybody to tell.
    _ = locker.shutdown(Duration::from_secs(2)).await;
    Ok(())
}

/// A thread of its own, for it has to notice the end of the input whatever the runtime is busy with.
fn listen(stop: Arc<AtomicBool>) {
    std::thread::spawn(move || {
        let mut line = String::new();
        match io::stdin().read_line(&mut line) {
            Ok(0) | Err(_) => std::process::exit(0),
            Ok(_) => stop.store(true, Ordering::Relaxed),
        }
    });
}
