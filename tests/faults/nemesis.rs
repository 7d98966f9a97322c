//! What is done for each fault, from its beginning to its end.

use std::{io, time::Duration};

use lockkit_testkit::{
    BoxError,
    faults::{Direction, Proxy},
    history::What,
    servers::{Keep, MySqlServer, Process, RedisServer, ZooKeeperEnsemble},
};
use tokio::time::{sleep, timeout};

use crate::{
    arena::{Arena, SHARED},
    fault::{Fault, Which},
    storm::{Prey, Random},
    target::Target,
    trouble::{Trouble, shows},
    witness::{keys, metric, round_trip},
};

const HOUR: Duration = Duration::from_secs(3600);

/// What everything takes longer, each way, where it is delayed.
const DELAY: Duration = Duration::from_millis(20);

/// How long a fault that has no length of its own goes on.
pub(crate) const A_WHILE: Duration = Duration::from_millis(1200);

/// How long a holder is kept at its lock after a fault.
const AFTERMATH: Duration = Duration::from_millis(400);

/// After so long the members of an ensemble have given up one that is silent.
const NOTICED: Duration = Duration::from_secs(7);

/// How often one worker may be found with a lock that others want, too, before it seems that these get none.
const MOST_TURNS: u32 = 10;

/// How often the rows are locked before it seems that no statement ever waits for one.
const MOST_WAITS: u32 = 5;

impl Arena {
    /// Inflicts a fault, and ends it. It fails also if nothing shows that there was one.
    pub(crate) async fn inflict(&self, fault: Fault) -> Result<(), Trouble> {
        // Somebody holds a lock all the while, so that it has to be renewed, or lost in time.
        let caught = if fault.has_a_holder() { Some(self.catch().await?) } else { None };
        let op = self.nemesis.ask(What::Fault { note: fault.words(self.kind) })?;
        let done = self.torment(fault, &mut self.random(&fault.name())).await;
        if done.is_ok() && caught.is_some() {
            // What was held up may take effect only now.
            sleep(AFTERMATH).await;
        }
        self.nemesis.hear(op, What::Healed)?;
        drop(caught);
        done
    }

    async fn torment(&self, fault: Fault, random: &mut Random) -> Result<(), Trouble> {
        let past_the_lease = self.past_the_lease();
        match fault {
            Fault::Nothing => sleep(A_WHILE).await,
            Fault::ClientKill => self.kill_clients().await?,
            Fault::ClientFreeze => self.freeze(Prey::Writer).await?,
            Fault::SharersKill => self.kill_sharers().await?,
            Fault::ReaderFreeze => self.freeze(Prey::Reader).await?,
            Fault::WaitersKill => self.kill_waiters().await?,
            Fault::HolderCutOff => self.cut_off_holder().await?,
            Fault::Cut => {
                let mut cut = 0;
                for _ in 0..8 {
                    cut += self.cut_all().await;
                    sleep(random.millis(50, 250)).await;
                }
                let workers = self.workers.names().len();
                shows(cut > workers, format!("{cut} connections were cut, of {workers} workers"))?;
            }
            Fault::HeldReplies => {
                self.all_proxies().for_each(|proxy| proxy.hold(Direction::ToClient));
                sleep(past_the_lease).await;
                self.all_proxies().for_each(Proxy::heal);
            }
            Fault::Delay => {
                let store = self.proxied_store().await;
                for direction in [Direction::ToServer, Direction::ToClient] {
                    self.all_proxies().for_each(|proxy| proxy.delay(direction, DELAY));
                }
                let (took, ()) = tokio::join!(async { round_trip(&*store?).await }, sleep(past_the_lease));
                self.all_proxies().for_each(Proxy::heal);
                let took = took?;
                shows(took >= DELAY * 2, format!("there and back in {took:?}"))?;
            }
            Fault::ReplyLost => {
                let mut lost = 0;
                for _ in 0..8 {
                    self.all_proxies().for_each(|proxy| proxy.drop_reply_after("", 1 + random.below(5) as usize));
                    sleep(random.millis(100, 250)).await;
                    for proxy in self.all_proxies() {
                        lost += u32::from(timeout(Duration::ZERO, proxy.dropped()).await.is_ok());
                    }
                }
                self.all_proxies().for_each(Proxy::heal);
                shows(lost > 0, "no reply was lost")?;
            }
            Fault::Kill(which) => self.kill_servers(which, random).await?,
            Fault::KillEmpty(which) => {
                let caught = if which == Which::All { Some(self.catch().await?) } else { None };
                for (_, process) in self.victims(which, random).await? {
                    let before = process.pid();
                    process.restart(Keep::Nothing).await?;
                    shows(process.pid() != before, "the server is the same process")?;
                }
                match &caught {
                    Some(caught) => self.overtaken(caught).await?,
                    None => sleep(A_WHILE).await,
                }
            }
            Fault::Freeze(which) => {
                let victims = self.victims(which, random).await?;
                for (_, process) in &victims {
                    process.freeze().await?;
                }
                let mut answered = Vec::new();
                for (place, _) in &victims {
                    answered.extend(self.answers(*place).await.then_some(*place));
                }
                sleep(past_the_lease).await;
                victims.iter().try_for_each(|(_, process)| process.thaw())?;
                shows(answered.is_empty(), format!("frozen servers answer: {answered:?}"))?;
            }
            Fault::CutOff(which) => {
                let Target::Ensemble(ensemble) = &self.target else {
                    return Err(BoxError::from("there is nobody else").into());
                };
                let leader = ensemble.leader().await.ok_or(Trouble::NoLeader)?;
                let silent = if which == Which::Leader { leader } else { (leader + 1) % 3 };
                ensemble.silence(silent);
                let noticed = timeout(NOTICED, steps_down(ensemble, silent));
                let (noticed, ()) = tokio::join!(noticed, sleep(NOTICED));
                ensemble.unsilence();
                shows(noticed.is_ok(), "the member that was cut off went on as before")?;
            }
            Fault::ScriptFlush => {
                for _ in 0..10 {
                    for server in self.target.redis() {
                        server.command(&["SCRIPT", "FLUSH"]).await?;
                    }
                    sleep(random.millis(20, 150)).await;
                }
                shows(self.unknown_scripts().await? > 0, "no script was unknown")?;
            }
            Fault::DeleteAll(Which::All) => {
                let caught = self.catch().await?;
                match &self.target {
                    Target::MySql(server) => {
                        for table in ["resource_lock", "resource_lock_claim"] {
                            server.admin(&format!("DELETE FROM {table}")).await?;
                        }
                    }
                    target => flush(target.redis()).await?,
                }
                self.overtaken(&caught).await?;
            }
            Fault::DeleteAll(_) => {
                let mut deleted = 0;
                for _ in 0..5 {
                    let node = random.pick(self.target.redis()).map_or(&[][..], std::slice::from_ref);
                    for node in node {
                        deleted += keys(node).await?;
                    }
                    flush(node).await?;
                    // No more than one node at a time may be without a lease that it granted.
                    sleep(self.kind.ttl()).await;
                }
                shows(deleted > 0, "there was nothing to delete")?;
            }
            Fault::Evict => self.evict().await?,
            Fault::Connections => self.exhaust().await?,
            Fault::LockWait => {
                if let Target::MySql(server) = &self.target {
                    let before = metric(server, "lock_timeouts").await?;
                    // Each row for longer than the second for which a statement of the store waits.
                    let rows = rows(server).await?;
                    let lock = format!("SELECT SLEEP(1.3) FROM resource_lock WHERE id IN ({rows}) FOR UPDATE");
                    // Those that queue for a named lock meanwhile wait for no row: until one does.
                    let mut shown = false;
                    for _ in 0..MOST_WAITS {
                        server.admin(&lock).await?;
                        shown = metric(server, "lock_timeouts").await? > before;
                        if shown {
                            break;
                        }
                    }
                    shows(shown, "no statement waited in vain")?;
                }
            }
            Fault::Deadlock => self.deadlocks().await?,
            Fault::ClockForward(which) => {
                let caught = if which == Which::All { Some(self.catch().await?) } else { None };
                self.clock()?.forward(HOUR)?;
                let ahead = self.ahead_once(|ahead| ahead > 3500).await?;
                match &caught {
                    Some(caught) => self.overtaken(caught).await?,
                    None => sleep(A_WHILE).await,
                }
                self.clock()?.set_right()?;
                shows(ahead > 3500, format!("the server's clock was {ahead} s ahead"))?;
            }
            Fault::ClockBack(_) => {
                self.clock()?.back(HOUR)?;
                let ahead = self.ahead_once(|ahead| ahead < -3500).await?;
                sleep(A_WHILE).await;
                self.clock()?.set_right()?;
                shows(ahead < -3500, format!("the server's clock was {ahead} s ahead"))?;
            }
        }
        Ok(())
    }

    fn past_the_lease(&self) -> Duration {
        self.kind.ttl() + self.kind.ttl() / 2
    }

    fn clock(&self) -> io::Result<&lockkit_testkit::faults::ServerClock> {
        self.setup.clock.as_ref().ok_or_else(|| io::Error::other("the servers do not run on a clock that can be moved"))
    }

    /// Kills three workers, each while it holds a lock, and starts others.
    async fn kill_clients(&self) -> Result<(), Trouble> {
        let mut dead = Vec::new();
        for _ in 0..3 {
            let caught = self.catch().await?;
            self.replace(&caught.worker).await?;
            dead.push(caught);
        }
        // Their leases lapse, and the locks go to others.
        for caught in &dead {
            self.overtaken(caught).await?;
        }
        self.progress(10).await
    }

    /// What each of them holds is in the way of a writer, who must get in when their leases have lapsed.
    async fn kill_sharers(&self) -> Result<(), Trouble> {
        let reader = self.catch_a(Prey::Reader).await?;
        self.replace(&reader.worker).await?;
        self.overtaken(&reader).await?;
        // While these are held, there is no other.
        let permits = [self.catch_a(Prey::Permit).await?, self.catch_a(Prey::Permit).await?];
        self.progress(20).await?;
        let [killed, other] = permits;
        self.replace(&killed.worker).await?;
        drop(other);
        self.overtaken(&killed).await?;
        self.progress(10).await
    }

    /// The queue of a lock holds nobody but the dead when its holder gives it up.
    async fn kill_waiters(&self) -> Result<(), Trouble> {
        let caught = self.catch_a(Prey::WriterOf(SHARED)).await?;
        let waiting = self.waiting_for(SHARED, 2).await?;
        for worker in self.workers.names().into_iter().filter(|name| *name != caught.worker) {
            self.replace(&worker).await?;
        }
        shows(waiting >= 2, format!("{waiting} waited"))?;
        let (key, former) = (caught.key.clone(), caught.worker.clone());
        drop(caught);
        // It is for those who came after the dead, and not for the former holder alone.
        for _ in 0..MOST_TURNS {
            let next = self.catch_a(Prey::WriterOf(SHARED)).await?;
            shows(next.key == key, "another lock was taken")?;
            if next.worker != former {
                drop(next);
                return self.progress(10).await;
            }
        }
        shows(false, format!("{former} had the lock {MOST_TURNS} times in a row"))
    }

    /// The fault that every lock service has to live with.
    async fn freeze(&self, prey: Prey) -> Result<(), Trouble> {
        let caught = self.catch_a(prey).await?;
        self.workers.freeze(&caught.worker).await?;
        self.overtaken(&caught).await?;
        let worker = caught.worker.clone();
        // It will find the answer to its pass when it goes on.
        drop(caught);
        self.workers.thaw(&worker)?;
        self.progress(4).await
    }

    async fn cut_off_holder(&self) -> Result<(), Trouble> {
        let caught = self.catch().await?;
        let proxies = self.proxies_of(&caught.worker);
        proxies.iter().for_each(Proxy::blackhole);
        self.overtaken(&caught).await?;
        drop(caught);
        self.progress(4).await?;
        proxies.iter().for_each(Proxy::heal);
        Ok(())
    }

    /// Resets all connections of the workers, and returns how many there were.
    pub(crate) async fn cut_all(&self) -> usize {
        let mut cut = 0;
        for proxy in self.all_proxies() {
            cut += proxy.connections();
            proxy.cut().await;
        }
        cut
    }

    async fn victims(&self, which: Which, random: &mut Random) -> Result<Vec<(usize, &Process)>, Trouble> {
        let mut all: Vec<_> = self.target.processes().into_iter().enumerate().collect();
        let count = match which {
            Which::All => all.len(),
            Which::One => 1,
            Which::Two => 2,
            Which::Three => 3,
            Which::Leader | Which::Follower => {
                let Target::Ensemble(ensemble) = &self.target else {
                    return Err(BoxError::from("there is no leader").into());
                };
                let leader = ensemble.leader().await.ok_or(Trouble::NoLeader)?;
                let place = if which == Which::Leader { leader } else { (leader + 1) % all.len() };
                return Ok(vec![all.remove(place)]);
            }
        };
        while all.len() > count {
            let place = random.below(all.len() as u64) as usize;
            all.remove(place);
        }
        Ok(all)
    }

    async fn kill_servers(&self, which: Which, random: &mut Random) -> Result<(), Trouble> {
        let victims = self.victims(which, random).await?;
        let before: Vec<_> = victims.iter().map(|(_, process)| process.pid()).collect();
        for (_, process) in &victims {
            process.kill().await?;
        }
        sleep(if which == Which::All { Duration::from_millis(300) } else { A_WHILE }).await;
        for (_, process) in &victims {
            process.restart(Keep::Data).await?;
        }
        let same = victims.iter().zip(before).any(|((_, process), before)| process.pid() == before);
        shows(!same, "a server is the same process")
    }

    /// With next to no memory and leave to evict anything, the server evicts everything.
    async fn evict(&self) -> Result<(), Trouble> {
        let caught = self.catch().await?;
        for server in self.target.redis() {
            server.command(&["CONFIG", "SET", "maxmemory-policy", "allkeys-random"]).await?;
            server.command(&["CONFIG", "SET", "maxmemory", "1"]).await?;
            // It is refused once there is nothing left to evict.
            _ = server.command(&["SET", "ballast", "x"]).await;
            server.command(&["CONFIG", "SET", "maxmemory", "0"]).await?;
            server.command(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]).await?;
        }
        self.overtaken(&caught).await
    }

    /// A lock's update takes the entry of its name first and then its row. Here it is the other way round.
    async fn deadlocks(&self) -> Result<(), Trouble> {
        let Target::MySql(server) = &self.target else { return Ok(()) };
        let (before, rows) = (metric(server, "lock_deadlocks").await?, rows(server).await?);
        for _ in 0..40 {
            let reversed = format!(
                "SELECT STRAIGHT_JOIN a.id FROM resource_lock a FORCE INDEX (PRIMARY) \
                 JOIN resource_lock b FORCE INDEX (resource_name) \
                 ON b.resource_name = CONCAT(a.resource_name, IF(SLEEP(0.02) = 0, '', '')) WHERE a.id IN ({rows}) FOR UPDATE"
            );
            // It may be the one that is chosen to end the deadlock.
            _ = server.admin(&reversed).await;
            if metric(server, "lock_deadlocks").await? >= before + 3 {
                return Ok(());
            }
        }
        let seen = metric(server, "lock_deadlocks").await? - before;
        Err(Trouble::NoEffect(format!("{seen} deadlocks in 40 attempts")))
    }
}

/// Waits until a member of an ensemble says that it is not what it was. Silence says nothing.
async fn steps_down(ensemble: &ZooKeeperEnsemble, place: usize) {
    let mode = async || {
        let answer = ensemble.members()[place].word("srvr").await.ok()?;
        Some(answer.lines().find(|line| line.starts_with("Mode: ")).unwrap_or_default().to_owned())
    };
    let mut was = None;
    loop {
        let now = mode().await;
        if was.is_some() && now.is_some() && now != was {
            return;
        }
        was = was.or(now);
        sleep(Duration::from_millis(50)).await;
    }
}

/// The rows of the locks that all fight for.
async fn rows(server: &MySqlServer) -> Result<String, Trouble> {
    let rows = "SELECT GROUP_CONCAT(id) FROM resource_lock WHERE resource_name LIKE 'account%'";
    let ids = server.admin(rows).await?.into_iter().flatten().next().flatten();
    ids.ok_or(Trouble::NoRows)
}

async fn flush(servers: &[RedisServer]) -> Result<(), Trouble> {
    for server in servers {
        server.command(&["FLUSHALL"]).await?;
    }
    Ok(())
}
