//! What the servers of a store do while something else goes on.

use std::{fmt, fs, time::Duration};

use lockkit::{Clock, SystemClock, Workload};
use rustix::param::clock_ticks_per_second;

use crate::{error::Result, targets::Target};

/// Reads what the servers of one store have done by now.
#[derive(Clone)]
pub(crate) struct Meter {
    url: String,
    /// The processes of private servers; none where that of a server is not known.
    processes: Vec<u32>,
}

impl fmt::Debug for Meter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The URL may contain a password.
        f.debug_struct("Meter").field("processes", &self.processes).finish_non_exhaustive()
    }
}

/// In how many parts servers are watched: enough to show how much they differ.
const PARTS: u32 = 5;

/// What servers did in each part of some time, and what they had in use at its end; nothing of what they do not tell.
#[derive(Clone, Debug, Default)]
pub(crate) struct Watched {
    /// Requests per second.
    pub(crate) requests: Vec<f64>,
    /// Microseconds of processor time per second.
    pub(crate) micros: Vec<f64>,
    /// Bytes of memory.
    pub(crate) bytes: Vec<f64>,
}

impl Meter {
    pub(crate) fn of(target: &Target) -> Self {
        let processes = target.servers().iter().map(|server| server.process().pid()).collect::<Option<_>>();
        Self { url: target.url().to_owned(), processes: processes.unwrap_or_default() }
    }

    /// Watches the servers for so long. What reading itself costs is read at the beginning, and left out.
    pub(crate) async fn watch(&self, time: Duration) -> Result<Watched> {
        let (first, mut from) = (self.read().await?, SystemClock.now());
        let mut before = self.read().await?;
        let reading = before.since(first);
        let mut watched = Watched::default();
        for _ in 0..PARTS {
            tokio::time::sleep(time / PARTS).await;
            let (until, now) = (SystemClock.now(), self.read().await?);
            let (spent, seconds) = (now.since(before), until.since(from).as_secs_f64());
            let rate = |spent: Option<f64>, reading: Option<f64>| Some((spent? - reading?).max(0.0) / seconds);
            watched.requests.extend(rate(spent.requests, reading.requests));
            watched.micros.extend(rate(spent.micros, reading.micros));
            watched.bytes.extend(now.bytes());
            (before, from) = (now, until);
        }
        Ok(watched)
    }

    /// What the servers have in use now, in bytes, if they tell.
    pub(crate) async fn bytes(&self) -> Result<Option<f64>> {
        Ok(self.read().await?.bytes())
    }

    async fn read(&self) -> Result<Reading> {
        let mut told = lockkit::workload(&self.url).await?;
        if told.processor.is_none() && !self.processes.is_empty() {
            told.processor = self.processes.iter().map(|process| processor_time(*process)).sum();
        }
        Ok(Reading(told))
    }
}

#[derive(Clone, Copy, Debug)]
struct Reading(Workload);

/// Between two readings.
#[derive(Clone, Copy, Debug)]
struct Spent {
    requests: Option<f64>,
    micros: Option<f64>,
}

impl Reading {
    fn bytes(self) -> Option<f64> {
        self.0.memory.map(|bytes| bytes as f64)
    }

    fn since(self, earlier: Self) -> Spent {
        let (Workload { requests, processor, .. }, before) = (self.0, earlier.0);
        let requests = requests.zip(before.requests);
        let processor = processor.zip(before.processor);
        // Less than before is what a server tells that was started anew.
        Spent {
            requests: requests.and_then(|(now, before)| Some(now.checked_sub(before)? as f64)),
            micros: processor.and_then(|(now, before)| Some(now.checked_sub(before)?.as_secs_f64() * 1e6)),
        }
    }
}

/// The processor time that all threads of a process have used, from `/proc`; `None` where there is no such process.
pub(crate) fn processor_time(process: u32) -> Option<Duration> {
    let ticks = ticks(&fs::read_to_string(format!("/proc/{process}/stat")).ok()?)?;
    Some(Duration::from_secs_f64(ticks as f64 / clock_ticks_per_second() as f64))
}

/// The time in user mode and in the kernel, fields 14 and 15 (proc_pid_stat(5)). The name of the program, field 2, is in parentheses,
/// and may have some of its own.
fn ticks(stat: &str) -> Option<u64> {
    let (_, fields) = stat.rsplit_once(')')?;
    let mut times = fields.split_ascii_whitespace().skip(11).map(|field| field.parse::<u64>().ok());
    Some(times.next()?? + times.next()??)
}

#[cfg(test)]
mod tests {
    use lockkit_testkit::servers::{
        MySqlOptions, MySqlServer, RedisCluster, RedisFlavor, RedisOptions, RedisSentinels, RedisServer,
        ZooKeeperFlavor, ZooKeeperServer,
    };

    use super::*;
    use crate::targets::{PrivateServer, Targets, redlock};

    #[test]
    fn the_processor_time_of_a_process_is_read() {
        let stat = "7 (odd) name) S 1 7 7 0 -1 4194304 100 0 1 0 250 50 0 0 20 0 1 0 70031 3133440 377";
        assert_eq!(ticks(stat), Some(300));
        assert!(processor_time(std::process::id()).is_some());
        assert_eq!(processor_time(u32::MAX), None);
    }

    /// An idle server does nothing, for what reading takes is left out; one that is used does what it is used for.
    async fn watch_idle_and_busy(target: &Target, least: f64) {
        let (meter, name) = (Meter::of(target), target.name());
        let time = Duration::from_secs(1);
        let locker = lockkit::connect(target.url()).await.expect("store");
        let idle = meter.watch(time).await.expect("told");
        let sum = |parts: &[f64]| parts.iter().sum::<f64>() / f64::from(PARTS);
        assert_eq!([&idle.requests, &idle.micros, &idle.bytes].map(Vec::len), [5; 3], "{name}: {idle:?}");
        let use_it = async {
            let mut ticks = tokio::time::interval(Duration::from_millis(10));
            loop {
                ticks.tick().await;
                let guard = locker.lock("used").acquire().await.expect("granted");
                let _ = guard.release().await.expect("released");
            }
        };
        let busy = tokio::select! {
            busy = meter.watch(time) => busy.expect("told"),
            never = use_it => never,
        };
        let (idle, busy) = (sum(&idle.requests), sum(&busy.requests));
        // A busy machine may keep the task from its ticks.
        assert!(idle < 5.0 && busy > least / 2.0, "{name}: {idle} and {busy} requests a second");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn each_server_tells_what_it_does() {
        let redis = RedisServer::start(RedisOptions::default()).await.expect("redis");
        let mysql = MySqlServer::start(MySqlOptions::default()).await.expect("mysql");
        let zookeeper = ZooKeeperServer::start(ZooKeeperFlavor::Installed).await.expect("zookeeper");
        let (redlock, url) = redlock().await.expect("redlock");
        let mut targets = Targets::default();
        targets.start("redis".to_owned(), redis.url(), vec![PrivateServer::forgetful(redis)]);
        let nodes = redlock.into_iter().map(PrivateServer::forgetful).collect();
        targets.start("redlock".to_owned(), url, nodes);
        let created = format!("{}?create=true", mysql.url());
        targets.start("mysql".to_owned(), created, vec![PrivateServer::of(mysql)]);
        targets.start("zookeeper".to_owned(), zookeeper.url(), vec![PrivateServer::of(zookeeper)]);
        for target in targets.list() {
            let nodes = target.servers().len() as f64;
            watch_idle_and_busy(target, 200.0 * nodes).await;
        }
    }

    /// Where servers can take over from each other, nothing is granted for so long at first.
    const TTL: Duration = Duration::from_secs(1);

    #[tokio::test(flavor = "multi_thread")]
    async fn servers_that_belong_together_tell_it_together() {
        let cluster = RedisCluster::start(RedisFlavor::Installed, false).await.expect("cluster");
        let sentinels = RedisSentinels::start(RedisFlavor::Installed).await.expect("sentinels");
        let mut targets = Targets::default();
        targets.start("cluster".to_owned(), format!("{}?max_ttl=1s", cluster.url()), Vec::new());
        targets.start("sentinels".to_owned(), format!("{}?max_ttl=1s", sentinels.url()), Vec::new());
        for target in targets.list() {
            let locker = lockkit::connect(target.url()).await.expect("store");
            let before = Meter::of(target).read().await.expect("told").0;
            // Locks of all members.
            for number in 0..100 {
                let guard = locker.lock(format!("used {number}")).ttl(TTL).acquire().await.expect("granted");
                let _ = guard.release().await.expect("released");
            }
            let after = Meter::of(target).read().await.expect("told").0;
            assert!(after.requests >= before.requests.map(|before| before + 400), "{target:?}: {before:?} {after:?}");
            assert!(after.memory.is_some() && after.processor > before.processor, "{target:?}: {after:?}");
        }
    }

    #[test]
    fn a_server_that_was_started_anew_tells_nothing_of_before() {
        let reading = |requests| Reading(Workload { requests: Some(requests), ..Workload::default() });
        assert_eq!(reading(7).since(reading(5)).requests, Some(2.0));
        assert_eq!(reading(1).since(reading(5)).requests, None);
    }
}
