//! The same lock in the hands of other clients: Apache Curator's `InterProcessMutex` and `LeaderSelector` (Java), and kazoo's `Lock` and
//! `Election` (Python).
//!
//! Debian packages them as `libcurator-recipes-java` and `python3-kazoo`. What is absent is shown as ignored.

use std::{
    fs,
    num::NonZeroU32,
    process::ExitCode,
    sync::Arc,
    time::{Duration, Instant},
};

use libtest_mimic::Trial;
use lockkit_core::{Guard, Lock, Locker, Outcome};
use lockkit_testkit::{
    BoxError, Other, OtherClient,
    faults::Proxy,
    servers::{ZooKeeperFlavor, ZooKeeperServer},
};
use lockkit_zk::{ZkConfig, ZkStore};

const SESSION: Duration = Duration::from_secs(4);
const TTL: Duration = Duration::from_secs(8);
const NAME: &str = "shared";

fn main() -> ExitCode {
    let arguments = lockkit_testkit::arguments();
    let mut trials = Vec::new();
    for client in [OtherClient::Curator, OtherClient::Kazoo] {
        let found = client.find();
        for (name, case) in CASES {
            let (mut name, reason) = (format!("{client:?}::{name}").to_lowercase(), found.as_ref().err());
            if let Some(reason) = reason {
                name = format!("{name} ({reason})");
            }
            let case = *case;
            let trial = Trial::test(name, move || {
                let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
                let outcome = runtime.block_on(Setting::run(client, case));
                runtime.shutdown_background();
                Ok(outcome.map_err(|e| e.to_string())?)
            });
            trials.push(trial.with_ignored_flag(reason.is_some()));
        }
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}

type Case = for<'a> fn(&'a mut Setting) -> std::pin::Pin<Box<dyn Future<Output = Result<(), BoxError>> + Send + 'a>>;

const CASES: &[(&str, Case)] = &[
    ("excludes_us_and_we_exclude_it", |setting| Box::pin(excludes(setting))),
    ("waits_for_us_and_we_wait_for_it", |setting| Box::pin(waits(setting))),
    ("loses_no_update_beside_us", |setting| Box::pin(counts(setting))),
    ("excludes_readers_and_permits_and_they_exclude_it", |setting| Box::pin(excludes_kinds(setting))),
    ("waits_for_readers_and_permits_and_they_wait_for_it", |setting| Box::pin(waits_for_kinds(setting))),
    ("leads_when_none_of_us_does_and_we_lead_when_it_does_not", |setting| Box::pin(leads(setting))),
    ("does_not_get_in_between_when_a_lease_is_taken_up", |setting| Box::pin(stays_behind(setting))),
    ("gives_up_the_lock_when_it_is_killed", |setting| Box::pin(is_killed(setting))),
    ("gets_the_lock_when_we_are_gone", |setting| Box::pin(survives_us(setting))),
];

async fn excludes(setting: &mut Setting) -> Result<(), BoxError> {
    for _ in 0..3 {
        let guard = setting.take().await?.ok_or("it is free")?;
        assert_eq!(setting.other.ask("acquire 200").await?, "refused");
        assert_eq!(guard.release().await?, Outcome::Released);
        assert_eq!(setting.other.ask("acquire 2000").await?, "acquired");
        assert!(setting.take().await?.is_none(), "granted twice");
        assert_eq!(setting.other.ask("release").await?, "released");
    }
    Ok(())
}

async fn waits(setting: &mut Setting) -> Result<(), BoxError> {
    let guard = setting.take().await?.ok_or("it is free")?;
    setting.other.order("acquire 10000").await?;
    setting.until_queued(2).await?;
    // Behind it in the queue, so the other goes first.
    let lock = setting.second_locker().await?.lock(NAME).ttl(TTL);
    let next = tokio::spawn(async move { lock.acquire_within(Duration::from_secs(10)).await });
    setting.until_queued(3).await?;
    assert_eq!(guard.release().await?, Outcome::Released);
    assert_eq!(setting.other.answer().await?, "acquired");
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(!next.is_finished(), "granted twice");
    assert_eq!(setting.other.ask("release").await?, "released");
    let guard = next.await??.ok_or("never granted")?;
    assert_eq!(guard.release().await?, Outcome::Released);
    Ok(())
}

async fn stays_behind(setting: &mut Setting) -> Result<(), BoxError> {
    let lockers = [setting.second_locker().await?, setting.second_locker().await?];
    let mut guard = setting.take().await?.ok_or("it is free")?;
    setting.other.order("acquire 20000").await?;
    setting.until_queued(2).await?;
    for locker in lockers.iter().cycle().take(6) {
        let token = guard.detach()?;
        guard = locker.lock(NAME).ttl(TTL).resume(token).await?.ok_or("it is there")?;
        let answer = tokio::time::timeout(Duration::from_millis(200), setting.other.answer()).await;
        assert!(answer.is_err(), "it got in between: {answer:?}");
    }
    assert_eq!(guard.release().await?, Outcome::Released);
    assert_eq!(setting.other.answer().await?, "acquired");
    assert_eq!(setting.other.ask("release").await?, "released");
    Ok(())
}

/// A reader, and a permit of two.
fn kinds(locker: &Locker) -> [Lock; 2] {
    let two = NonZeroU32::MIN.saturating_add(1);
    [locker.rw_lock(NAME).read().ttl(TTL), locker.semaphore(NAME, two).ttl(TTL)]
}

async fn excludes_kinds(setting: &mut Setting) -> Result<(), BoxError> {
    let second = kinds(&setting.second_locker().await?);
    for (one, two) in kinds(&setting.locker).into_iter().zip(second) {
        for guard in [one.try_acquire().await?, two.try_acquire().await?] {
            // While there are two, and while there is one.
            assert_eq!(setting.other.ask("acquire 200").await?, "refused");
            assert_eq!(guard.ok_or("they hold together")?.release().await?, Outcome::Released);
        }
        assert_eq!(setting.other.ask("acquire 2000").await?, "acquired");
        assert!(one.try_acquire().await?.is_none(), "granted beside it: {one:?}");
        assert_eq!(setting.other.ask("release").await?, "released");
    }
    Ok(())
}

async fn waits_for_kinds(setting: &mut Setting) -> Result<(), BoxError> {
    let late = kinds(&setting.second_locker().await?);
    for (early, late) in kinds(&setting.locker).into_iter().zip(late) {
        let guard = early.try_acquire().await?.ok_or("it is free")?;
        setting.other.order("acquire 10000").await?;
        setting.until_queued(2).await?;
        // It could hold beside the first, but the other came before it.
        let next = tokio::spawn(async move { late.acquire_within(Duration::from_secs(10)).await });
        setting.until_queued(3).await?;
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert!(!next.is_finished(), "it passed the other client");
        assert_eq!(guard.release().await?, Outcome::Released);
        assert_eq!(setting.other.answer().await?, "acquired");
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert!(!next.is_finished(), "granted beside the other client");
        assert_eq!(setting.other.ask("release").await?, "released");
        let guard = next.await??.ok_or("never granted")?;
        assert_eq!(guard.release().await?, Outcome::Released);
    }
    Ok(())
}

async fn leads(setting: &mut Setting) -> Result<(), BoxError> {
    let election = setting.locker.election(NAME).ttl(TTL);
    let mut leaders = election.observe(Duration::from_millis(20));
    for _ in 0..2 {
        assert_eq!(leaders.next().await?, None);
        let term = election.campaign().await?;
        assert!(leaders.next().await?.is_some_and(|leader| leader.term == Some(term.fence())));
        assert_eq!(setting.other.ask("lead 200").await?, "refused");
        // It has stopped, and its node may yet be there for a moment: it would be the next leader.
        setting.until_queued(1).await?;
        assert_eq!(term.resign().await?, Outcome::Released);
        assert_eq!(leaders.next().await?, None, "it gave up");
        assert_eq!(setting.other.ask("lead 2000").await?, "leads");
        assert!(election.try_campaign().await?.is_none(), "two lead at once");
        assert_eq!(leaders.next().await?.ok_or("its leader is not seen")?.info.as_str(), "another");
        let next = tokio::spawn({
            let election = election.clone();
            async move { election.campaign().await }
        });
        setting.until_queued(2).await?;
        assert_eq!(setting.other.ask("resign").await?, "resigned");
        let term = next.await??;
        // That nobody leads for a moment may be seen.
        while leaders.next().await?.is_none_or(|leader| leader.term != Some(term.fence())) {}
        assert_eq!(term.resign().await?, Outcome::Released);
    }
    Ok(())
}

async fn counts(setting: &mut Setting) -> Result<(), BoxError> {
    const EACH: usize = 150;
    let directory = tempfile::tempdir()?;
    let counter = directory.path().join("counter");
    fs::write(&counter, "0")?;
    setting.other.order(&format!("count {EACH} {}", counter.display())).await?;
    let mut ours = Vec::new();
    for _ in 0..2 {
        let (locker, counter) = (setting.second_locker().await?, counter.clone());
        ours.push(tokio::spawn(async move {
            for _ in 0..EACH {
                let guard = locker.lock(NAME).ttl(TTL).acquire().await?;
                let count: usize = fs::read_to_string(&counter)?.parse()?;
                tokio::time::sleep(Duration::from_millis(1)).await;
                fs::write(&counter, (count + 1).to_string())?;
                assert_eq!(guard.release().await?, Outcome::Released);
            }
            Ok::<_, BoxError>(())
        }));
    }
    for task in ours {
        task.await??;
    }
    assert_eq!(setting.other.answer().await?, "counted");
    assert_eq!(fs::read_to_string(&counter)?, (3 * EACH).to_string(), "updates were lost");
    Ok(())
}

async fn is_killed(setting: &mut Setting) -> Result<(), BoxError> {
    assert_eq!(setting.other.ask("acquire 2000").await?, "acquired");
    let killed = Instant::now();
    setting.other.kill().await?;
    let guard = setting.locker.lock(NAME).ttl(TTL).acquire_within(SESSION * 3).await?;
    assert!(guard.is_some(), "the lock of a dead client is held for ever");
    assert!(killed.elapsed() > SESSION / 2, "its session was not waited for: {:?}", killed.elapsed());
    Ok(())
}

async fn survives_us(setting: &mut Setting) -> Result<(), BoxError> {
    let proxy = Proxy::start(setting.server.addr()).await?;
    let config = ZkConfig::new([proxy.addr().to_string()]).session(SESSION);
    let cut_off = Locker::builder(ZkStore::connect(config).await?).build();
    let guard = cut_off.lock(NAME).ttl(TTL).try_acquire().await?.ok_or("it is free")?;
    proxy.blackhole();
    setting.other.order("acquire 20000").await?;
    let lost = guard.lost();
    let reason = tokio::time::timeout(SESSION * 2, lost).await?;
    assert!(!guard.is_held(), "{reason}");
    assert_eq!(setting.other.answer().await?, "acquired");
    assert_eq!(setting.other.ask("release").await?, "released");
    Ok(())
}

/// The two clients of one lock.
struct Setting {
    server: ZooKeeperServer,
    locker: Locker,
    other: Other,
}

impl Setting {
    /// Runs a case on a server of its own.
    async fn run(client: OtherClient, case: Case) -> Result<(), BoxError> {
        let server = ZooKeeperServer::start(ZooKeeperFlavor::Installed).await?;
        let locker = connect(&server).await?;
        let path = format!("{}/{NAME}", ZkConfig::BASE);
        let other = Other::start(client, server.addr(), SESSION, &path).await?;
        case(&mut Self { server, locker, other }).await
    }

    async fn take(&self) -> Result<Option<Guard>, BoxError> {
        Ok(self.locker.lock(NAME).ttl(TTL).try_acquire().await?)
    }

    async fn second_locker(&self) -> Result<Locker, BoxError> {
        connect(&self.server).await
    }

    /// Returns when so many are in the queue, neither more nor less, the holder included.
    async fn until_queued(&self, count: usize) -> Result<(), BoxError> {
        let raw = zookeeper_client::Client::connect(&self.server.addr().to_string()).await?;
        let start = Instant::now();
        let path = format!("{}/{NAME}", ZkConfig::BASE);
        loop {
            let nodes = raw.list_children(&path).await?;
            if nodes.iter().filter(|node| !node.starts_with('~')).count() == count {
                return Ok(());
            }
            assert!(start.elapsed() < Duration::from_secs(10), "not {count}: {nodes:?}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

async fn connect(server: &ZooKeeperServer) -> Result<Locker, BoxError> {
    let config = ZkConfig::new([server.addr().to_string()]).session(SESSION);
    Ok(Locker::shared_builder(Arc::new(ZkStore::connect(config).await?)).build())
}
