//! Locks for code that is not async: called from plain threads, and from within runtimes.

use std::{
    num::NonZeroU32,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use lockkit::{ErrorKind, HolderInfo, LossReason, MultiLock, Outcome, Result, blocking};
use lockkit_testkit::servers::{
    MySqlOptions, MySqlServer, RedisOptions, RedisServer, ZooKeeperFlavor, ZooKeeperServer,
};
use tokio::runtime::{Builder, Runtime};

/// Long enough for a renewal to be late by a second, and another one.
const TTL: Duration = Duration::from_secs(3);

fn runtime() -> Runtime {
    Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime")
}

/// Threads of two clients count with a lock between reading and writing, and the leases outlast the ttl.
fn threads_exclude_each_other(url: &str, ttl: Duration) -> Result<()> {
    let clients = [blocking::connect(url)?, blocking::connect(url)?];
    let count = Arc::new(std::sync::Mutex::new(0));
    let threads: Vec<_> = (0..6)
        .map(|number| {
            let (lock, count) = (clients[number % 2].lock("a").ttl(ttl), Arc::clone(&count));
            thread::spawn(move || {
                for _ in 0..10 {
                    let guard = lock.acquire()?;
                    let read = *count.lock().expect("unpoisoned");
                    thread::yield_now();
                    *count.lock().expect("unpoisoned") = read + 1;
                    assert_eq!(guard.release()?, Outcome::Released);
                }
                Ok::<_, lockkit::Error>(())
            })
        })
        .collect();
    for thread in threads {
        thread.join().expect("no panic")?;
    }
    assert_eq!(*count.lock().expect("unpoisoned"), 60);

    let [one, other] = clients;
    let guard = one.lock("a").ttl(ttl).acquire()?;
    assert!(guard.lost_within(ttl * 2).is_none(), "nobody renews it");
    assert!(guard.is_held() && guard.fence().get() > 0);
    let asked = Instant::now();
    assert!(other.lock("a").acquire_within(Duration::from_millis(200))?.is_none());
    assert!(asked.elapsed() >= Duration::from_millis(195));
    let [holder] = &other.lock("a").inspect()?.holders[..] else { panic!("one holds it") };
    assert_eq!(holder.token, Some(guard.token()));
    drop(guard);
    assert!(other.lock("a").acquire_within(ttl * 5)?.is_some_and(|guard| guard.renew().is_ok()));
    other.shutdown(ttl)?;
    assert_eq!(other.lock("a").acquire().expect_err("it is closed").kind(), ErrorKind::Closed);
    Ok(())
}

/// Threads of two clients take three locks in different orders: each has all of them or none, and none waits for ever.
fn several_locks_are_had_or_none(url: &str, ttl: Duration) -> Result<()> {
    let (one, other) = (blocking::connect(url)?, blocking::connect(url)?);
    let mut names = ["m/1", "m/2", "m/3"];
    let held = other.lock("m/2").ttl(ttl).acquire()?;
    assert!(one.multi(names).try_acquire()?.is_none());
    assert!(other.lock("m/1").try_acquire()?.is_some(), "what could not be had together is given back");
    let asked = Instant::now();
    assert!(one.multi(names).acquire_within(Duration::from_millis(200))?.is_none());
    assert!(asked.elapsed() >= Duration::from_millis(195));
    assert_eq!(held.release()?, Outcome::Released);
    let inside = Arc::new(std::sync::Mutex::new(()));
    let threads: Vec<_> = [&one, &other, &one]
        .map(|client| {
            names.rotate_left(1);
            let (several, inside) = (client.multi(names), Arc::clone(&inside));
            thread::spawn(move || {
                for _ in 0..3 {
                    let all = several.acquire()?;
                    let alone = inside.try_lock().expect("two have all of them");
                    assert!(all.is_held() && all.guards().len() == 3);
                    drop(alone);
                    assert_eq!(all.release()?, Outcome::Released);
                }
                Ok::<_, lockkit::Error>(())
            })
        })
        .into();
    for thread in threads {
        thread.join().expect("no panic")?;
    }
    // With settings of their own, and a loss of one.
    let locks = names.map(|name| one.asynchronous().lock(name).ttl(ttl));
    let all = one.of_multi(MultiLock::new(locks)).acquire()?;
    assert!(all.lost_within(Duration::from_millis(50)).is_none());
    other.block_on(other.asynchronous().break_lock("m/3", all.guards()[2].token()))?;
    assert!(all.lost_within(ttl * 5).is_some() && !all.is_held());
    drop(all);
    assert!(other.lock("m/1").acquire_within(ttl * 5)?.is_some());
    Ok(())
}

/// Candidates on threads lead one after the other; another client is told of each.
fn one_leads_at_a_time(url: &str, ttl: Duration) -> Result<()> {
    let candidate = |name: &'static str| {
        let url = url.to_owned();
        blocking::Locker::build(|thread| async move {
            let builder = lockkit::Locker::shared_builder(lockkit::open(&url).await?);
            Ok(builder.holder(HolderInfo::new(name)).own_thread(thread).build())
        })
    };
    let (one, two) = (candidate("one")?.election("e").ttl(ttl), candidate("two")?.election("e").ttl(ttl));
    let mut leaders = two.observe(Duration::from_millis(20));
    assert_eq!(leaders.next()?, None);
    assert_eq!(leaders.next_within(Duration::from_millis(100))?, None, "nobody else leads");
    let term = one.campaign()?;
    assert!(two.try_campaign()?.is_none());
    let leader = leaders.next()?.expect("it leads");
    assert_eq!((leader.info.as_str(), leader.term), ("one", Some(term.fence())));
    assert_eq!(two.leader()?.map(|leader| leader.term), Some(Some(term.fence())));
    assert!(term.lost_within(ttl * 2).is_none() && term.is_held(), "nobody renews it");
    let before = term.fence();
    let next = thread::spawn(move || two.campaign());
    assert_eq!(term.resign()?, Outcome::Released);
    let term = next.join().expect("no panic")?;
    assert!(term.fence() > before);
    let told = leaders.next_within(ttl * 5)?.expect("another leads");
    let told = if told.is_none() { leaders.next()? } else { told };
    assert_eq!(told.map(|leader| leader.info), Some(HolderInfo::new("two")));
    let before = term.fence();
    let guard = match term.hand_over() {
        Ok(token) => {
            assert!(one.take_over(token)?.is_some_and(|term| term.fence() > before));
            assert!(one.take_over(token)?.is_none(), "it was taken over already");
            one.campaign()?.into_guard()
        }
        // A lease that ends with the session.
        Err(refused) => {
            assert_eq!(refused.kind(), ErrorKind::Unsupported);
            one.campaign()?.into_guard()
        }
    };
    assert_eq!(guard.release()?, Outcome::Released);
    Ok(())
}

#[test]
fn in_memory() -> Result<()> {
    // One store of two clients.
    let store = lockkit::MemoryStore::new();
    let locker = |store: lockkit::MemoryStore| {
        blocking::Locker::build(|thread| async move { Ok(lockkit::Locker::builder(store).own_thread(thread).build()) })
    };
    let (one, other) = (locker(store.clone())?, locker(store)?);
    let all = one.multi(["a", "b"]).acquire()?;
    assert!(other.multi(["b", "c"]).try_acquire()?.is_none() && other.lock("c").try_acquire()?.is_some());
    assert_eq!(all.release()?, Outcome::Released);
    let none: [&str; 0] = [];
    assert_eq!(one.multi(none).acquire().expect_err("it has at least one").kind(), ErrorKind::InvalidInput);
    let term = one.election("a").campaign()?;
    assert!(other.election("a").try_campaign()?.is_none());
    let leader = other.election("a").leader()?.expect("one leads");
    assert_eq!(leader.term, Some(term.fence()));
    drop(term);
    assert!(other.election("a").campaign()?.is_held());
    Ok(())
}

#[test]
fn on_redis() -> Result<()> {
    let servers = runtime();
    let server = servers.block_on(RedisServer::start(RedisOptions::default())).expect("a server");
    threads_exclude_each_other(&server.url(), TTL)?;
    several_locks_are_had_or_none(&server.url(), TTL)?;
    one_leads_at_a_time(&server.url(), TTL)?;
    let (one, other) = (blocking::connect(&server.url())?, blocking::connect(&server.url())?);
    let broken = one.lock("b").ttl(TTL).acquire()?;
    other.block_on(other.asynchronous().break_lock("b", broken.token()))?;
    assert_eq!(broken.lost_within(TTL * 5), Some(LossReason::Gone));
    Ok(())
}

#[test]
fn on_mysql() -> Result<()> {
    let servers = runtime();
    // Leases are renewed while nobody looks, and not by waiting for the disk.
    let options = MySqlOptions::default().args(["--innodb-flush-log-at-trx-commit=2"]);
    let server = servers.block_on(MySqlServer::start(options)).expect("a server");
    threads_exclude_each_other(&format!("{}?create=true", server.url()), TTL)
}

#[test]
fn on_zookeeper() -> Result<()> {
    let servers = runtime();
    let server = servers.block_on(ZooKeeperServer::start(ZooKeeperFlavor::Installed)).expect("a server");
    let url = format!("{}?session=4s", server.url());
    threads_exclude_each_other(&url, Duration::from_secs(4))?;
    one_leads_at_a_time(&url, Duration::from_secs(4))
}

/// A thread of a runtime may be blocked, however much of its budget its task has used, and whatever kind of runtime it is.
#[test]
fn within_a_runtime() -> Result<()> {
    let current = Builder::new_current_thread().enable_all().build().expect("a runtime");
    for runtime in [current, runtime()] {
        runtime.block_on(async {
            tokio::spawn(async {
                let locker = blocking::connect("memory:")?;
                let two = NonZeroU32::MIN.saturating_add(1);
                for _ in 0..500 {
                    // Uses up what the runtime lets a task do at once.
                    tokio::task::consume_budget().await;
                    for lock in [locker.lock("a"), locker.read("a"), locker.write("a"), locker.semaphore("a", two)] {
                        assert_eq!(lock.acquire()?.release()?, Outcome::Released);
                    }
                }
                Ok(())
            })
            .await
            .expect("no panic")
        })?;
    }
    Ok(())
}

/// What blocks a thread may do so within what blocks it already.
#[test]
fn within_another_call() -> Result<()> {
    let (one, other) = (blocking::connect("memory:")?, blocking::connect("memory:")?);
    let held = one.block_on(async { other.block_on(async { one.lock("a").acquire() }) })?;
    assert_eq!(held.release()?, Outcome::Released);
    Ok(())
}

#[test]
fn what_connecting_refuses_is_said() {
    let error = blocking::connect("nothing://here").expect_err("no store");
    assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
    let error = blocking::connect("redis://127.0.0.1:1").expect_err("nobody listens");
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
}

#[test]
fn a_call_on_the_thread_of_its_locker_is_refused() -> lockkit::Result<()> {
    let locker = lockkit::blocking::connect("memory:")?;
    let held = locker.lock("held").acquire()?;
    let lock = locker.lock("a");
    // What is spawned there runs on that thread.
    let called = locker.block_on(async { tokio::spawn(async move { lock.acquire().map(drop) }).await });
    assert!(called.expect_err("it would wait for itself").is_panic());
    held.renew()?;
    Ok(())
}
