//! Locks that are asked for in order, on every store that claims it: random traffic of readers, writers and tries while somebody
//! looks at the queue, judged by what all of them recorded. Stores that let some in before their turn are found out.

use std::{
    future::Future,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use lockkit::{
    Error, ErrorKind, HolderInfo, Lock, Locker, MemoryStore, Mode, Outcome,
    store::{AcquireRequest, Attempt, LockStore},
};
use lockkit_testkit::{
    Alter, Altered, Backend, BoxError,
    broken::{Bug, SimpleBackend},
    history::{History, Recorder, Report, Rule, What, check},
    servers::{MySqlOptions, MySqlServer, RedisOptions, RedisServer, ZooKeeperFlavor, ZooKeeperServer},
};
use tokio::time::sleep;

const KEY: &str = "line";
/// So long that a busy machine loses no place in the queue for want of an answer.
const TTL: Duration = Duration::from_secs(60);
/// How many of its turns each client takes: enough for many to wait at once, and for a try to meet a lock that is free for a moment.
const TURNS: u64 = 15;
const CLIENTS: usize = 6;

/// A store that says when an acquisition had no answer: its place may be lost, and the next one asks with another claim.
#[derive(Debug)]
struct Told {
    inner: Arc<dyn LockStore>,
    recorder: Recorder,
}

#[async_trait]
impl Alter for Told {
    fn inner(&self) -> &dyn LockStore {
        &*self.inner
    }

    async fn acquire(&self, request: &AcquireRequest) -> lockkit::Result<Attempt> {
        let answer = self.inner.acquire(request).await;
        if let Err(error) = &answer {
            let unrecorded = |e: std::io::Error| Error::new(ErrorKind::Unexpected, e.to_string());
            let op = self.recorder.ask(What::Fault { note: error.to_string() }).map_err(unrecorded)?;
            self.recorder.hear(op, What::Healed).map_err(unrecorded)?;
        }
        answer
    }
}

/// Clients, each under its own name, and one that looks.
async fn traffic<F: Future<Output = Result<Arc<dyn LockStore>, BoxError>>>(
    open: impl Fn() -> F,
) -> Result<Report, BoxError> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("order-{}-{number}", std::process::id()));
    std::fs::create_dir_all(&dir)?;
    let mut clients = Vec::new();
    for number in 0..CLIENTS {
        let name = format!("w{number}");
        let recorder = Recorder::create(name.as_str(), &dir.join(&name))?;
        let told = Told { inner: open().await?, recorder: recorder.another(format!("{name}'s store")) };
        let locker = Locker::builder(Altered(told)).holder(HolderInfo::new(&name)).build();
        clients.push(tokio::spawn(takes_turns(locker, recorder, number as u64)));
    }
    let lock = Locker::shared_builder(open().await?).build().lock(KEY);
    let recorder = Recorder::create("observer", &dir.join("observer"))?;
    let over = Arc::new(AtomicBool::new(false));
    let observer = tokio::spawn(looks(lock, recorder, Arc::clone(&over)));
    for client in clients {
        client.await??;
    }
    over.store(true, Ordering::Relaxed);
    observer.await??;
    let files = (0..CLIENTS).map(|number| format!("w{number}")).chain(["observer".to_owned()]);
    let history = History::read(files.map(|name| dir.join(name)))?;
    std::fs::remove_dir_all(&dir)?;
    Ok(check(&history))
}

/// One after the other: a writer, a reader, or a try of one of the two.
async fn takes_turns(locker: Locker, recorder: Recorder, number: u64) -> Result<(), BoxError> {
    let rw = locker.rw_lock(KEY);
    for turn in 0..TURNS {
        let is_reader = (turn * 7 + number * 3) % 5 < 3;
        let (mode, lock) = if is_reader { (Mode::Shared, rw.read()) } else { (Mode::Exclusive, rw.write()) };
        // One client does nothing but try, again and again.
        let tries = if number == 0 { 15 } else { 0 };
        for _ in 0..tries {
            take(&lock.clone().ttl(TTL), mode, &recorder, true).await?;
        }
        take(&lock.ttl(TTL), mode, &recorder, false).await?;
    }
    Ok(())
}

/// What fails for want of time is over with that.
async fn take(lock: &Lock, mode: Mode, recorder: &Recorder, is_try: bool) -> Result<(), BoxError> {
    let op = recorder.ask(What::Acquire { key: KEY.into(), within: None, owner: None, mode })?;
    let answer = if is_try { lock.try_acquire().await } else { lock.acquire().await.map(Some) };
    let guard = match answer {
        Ok(Some(guard)) => guard,
        Ok(None) => return Ok(recorder.hear(op, What::Contended)?),
        Err(error) => return Ok(recorder.hear(op, failed(error)?)?),
    };
    recorder.hear(op, What::Granted { fence: guard.fence().get() })?;
    sleep(Duration::from_millis(2)).await;
    let asked = recorder.ask(What::Ask { grant: op })?;
    let held = guard.is_held();
    recorder.hear(asked, if held { What::Held } else { What::Lost { reason: "it says so".into() } })?;
    let release = recorder.ask(What::Release { grant: op })?;
    let released = match guard.release().await {
        Ok(outcome) => What::Released { held: outcome == Outcome::Released, reason: None },
        Err(error) => failed(error)?,
    };
    Ok(recorder.hear(release, released)?)
}

fn failed(error: Error) -> Result<What, BoxError> {
    if error.is_retryable() { Ok(What::Failed { error: error.to_string() }) } else { Err(error.into()) }
}

/// Looks at the queue again and again.
async fn looks(lock: Lock, recorder: Recorder, over: Arc<AtomicBool>) -> Result<(), BoxError> {
    while !over.load(Ordering::Relaxed) {
        let op = recorder.ask(What::Look { key: KEY.into() })?;
        let seen = match lock.inspect_queue().await {
            Ok(state) => {
                let queue = state.queue.unwrap_or_default();
                What::Queue { waiting: queue.iter().map(|waiter| waiter.info.as_str().to_owned()).collect() }
            }
            Err(error) => failed(error)?,
        };
        recorder.hear(op, seen)?;
        sleep(Duration::from_millis(1)).await;
    }
    Ok(())
}

/// A client of the store at a URL, also on a machine that is too busy for the first attempt.
async fn open(url: &str) -> Result<Arc<dyn LockStore>, BoxError> {
    for _ in 0..10 {
        match lockkit::open(url).await {
            Err(error) if error.is_retryable() => {}
            answer => return Ok(answer?),
        }
    }
    Ok(lockkit::open(url).await?)
}

/// Nothing is found, in a history in which many were seen to wait.
#[track_caller]
fn in_order(report: &Report) {
    assert!(report.violations.is_empty(), "{}", report.violations[0]);
    assert!(report.queued >= 10, "{report:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_memory() -> Result<(), BoxError> {
    let store = MemoryStore::new();
    in_order(&traffic(async || Ok(Arc::new(store.clone()) as Arc<dyn LockStore>)).await?);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_redis() -> Result<(), BoxError> {
    let server = RedisServer::start(RedisOptions::default()).await?;
    in_order(&traffic(async || open(&server.url()).await).await?);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_mariadb() -> Result<(), BoxError> {
    let server = MySqlServer::start(MySqlOptions::default()).await?;
    let url = format!("{}?create=true", server.url());
    in_order(&traffic(async || open(&url).await).await?);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_zookeeper() -> Result<(), BoxError> {
    let server = ZooKeeperServer::start(ZooKeeperFlavor::Installed).await?;
    in_order(&traffic(async || open(&server.url()).await).await?);
    Ok(())
}

/// Stores that are wrong: the judge names the rule. Without a bug the same store keeps it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn those_that_let_some_pass_are_found_out() -> Result<(), BoxError> {
    for bug in [None, Some(Bug::ReaderPassesWriter), Some(Bug::TryBarges)] {
        let backend = SimpleBackend::start(bug).await?;
        let mut report = traffic(|| backend.open()).await?;
        // Somebody has to come in the very moment in which they let him pass.
        for _ in 0..4 {
            if bug.is_some() && report.count(Rule::Order) == 0 {
                report = traffic(|| backend.open()).await?;
            }
        }
        match bug {
            None => in_order(&report),
            Some(_) => assert!(report.count(Rule::Order) > 0, "{bug:?}: {report:?}"),
        }
    }
    Ok(())
}
