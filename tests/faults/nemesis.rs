//! What is done for each fault, from its beginning to its end.

use std::{io, time::Duration};

use lockkit_testkit::{
    BoxError,
    faults::{Direction, Proxy},
    history::What,
    servers::{Keep, MySqlServer, Process, RedisServer},
    storm::Random,
};
use tokio::{net::TcpStream, time::sleep};

use crate::{
    arena::Arena,
    fault::{Fault, Which},
    target::Target,
};

const HOUR: Duration = Duration::from_secs(3600);

/// How long a fault that has no length of its own goes on.
const A_WHILE: Duration = Duration::from_millis(1200);

/// How long a holder is kept at its lock after a fault.
const AFTERMATH: Duration = Duration::from_millis(400);

/// After so long the members of an ensemble have given up one that is silent.
const NOTICED: Duration = Duration::from_secs(7);

impl Arena {
    /// Inflicts a fault, and ends it.
    pub(crate) async fn inflict(&self, fault: Fault) -> Result<(), BoxError> {
        let op = self.nemesis.ask(What::Fault { note: fault.words(self.kind) })?;
        let done = self.with_a_holder(fault, &mut self.random(&fault.name())).await;
        self.nemesis.hear(op, What::Healed)?;
        done
    }

    async fn with_a_holder(&self, fault: Fault, random: &mut Random) -> Result<(), BoxError> {
        // Somebody holds a lock all the while, so that it has to be renewed, or lost in time.
        let caught = if fault.has_a_holder() { Some(self.catch().await?) } else { None };
        self.torment(fault, random).await?;
        if let Some(caught) = caught {
            // What was held up may take effect only now.
            sleep(AFTERMATH).await;
            drop(caught);
        }
        Ok(())
    }

    async fn torment(&self, fault: Fault, random: &mut Random) -> Result<(), BoxError> {
        let past_the_lease = self.past_the_lease();
        match fault {
            Fault::Nothing => sleep(A_WHILE).await,
            Fault::ClientKill => self.kill_clients().await?,
            Fault::ClientFreeze => self.freeze_client().await?,
            Fault::HolderCutOff => self.cut_off_holder().await?,
            Fault::Cut => {
                for _ in 0..8 {
                    self.cut_all().await;
                    sleep(random.millis(50, 250)).await;
                }
            }
            Fault::HeldReplies => {
                self.all_proxies().for_each(|proxy| proxy.hold(Direction::ToClient));
                sleep(past_the_lease).await;
                self.all_proxies().for_each(Proxy::heal);
            }
            Fault::Delay => {
                for direction in [Direction::ToServer, Direction::ToClient] {
                    self.all_proxies().for_each(|proxy| proxy.delay(direction, Duration::from_millis(20)));
                }
                sleep(past_the_lease).await;
                self.all_proxies().for_each(Proxy::heal);
            }
            Fault::ReplyLost => {
                for _ in 0..8 {
                    self.all_proxies().for_each(|proxy| proxy.drop_reply_after("", 1 + random.below(5) as usize));
                    sleep(random.millis(100, 250)).await;
                }
                self.all_proxies().for_each(Proxy::heal);
            }
            Fault::Kill(which) => self.kill_servers(which, random).await?,
            Fault::KillEmpty(which) => {
                let caught = if which == Which::All { Some(self.catch().await?) } else { None };
                for process in self.victims(which, random).await? {
                    process.restart(Keep::Nothing).await?;
                }
                match &caught {
                    Some(caught) => self.overtaken(caught).await?,
                    None => sleep(A_WHILE).await,
                }
            }
            Fault::Freeze(which) => {
                let victims = self.victims(which, random).await?;
                for process in &victims {
                    process.freeze().await?;
                }
                sleep(past_the_lease).await;
                victims.iter().try_for_each(|process| process.thaw())?;
            }
            Fault::CutOff(which) => {
                let Target::Ensemble(ensemble) = &self.target else { return Err("there is nobody else".into()) };
                let leader = ensemble.leader().await.ok_or("the ensemble has no leader")?;
                ensemble.silence(if which == Which::Leader { leader } else { (leader + 1) % 3 });
                sleep(NOTICED).await;
                ensemble.unsilence();
            }
            Fault::ScriptFlush => {
                for _ in 0..10 {
                    for server in self.target.redis() {
                        server.command(&["SCRIPT", "FLUSH"]).await?;
                    }
                    sleep(random.millis(20, 150)).await;
                }
            }
            Fault::DeleteAll(Which::All) => {
                let caught = self.catch().await?;
                match &self.target {
                    Target::MySql(server) => drop(server.admin("DELETE FROM resource_lock").await?),
                    target => flush(target.redis()).await?,
                }
                self.overtaken(&caught).await?;
            }
            Fault::DeleteAll(_) => {
                for _ in 0..5 {
                    flush(random.pick(self.target.redis()).map_or(&[], std::slice::from_ref)).await?;
                    // No more than one node at a time may be without a lease that it granted.
                    sleep(self.kind.ttl()).await;
                }
            }
            Fault::Evict => self.evict().await?,
            Fault::Connections => self.exhaust().await?,
            Fault::LockWait => {
                if let Target::MySql(server) = &self.target {
                    let before = metric(server, "lock_timeouts").await?;
                    // Each row for longer than the second for which a statement of the store waits.
                    server.admin("SELECT SLEEP(1.3) FROM resource_lock FOR UPDATE").await?;
                    if metric(server, "lock_timeouts").await? == before {
                        return Err("no statement waited in vain: the nemesis is broken".into());
                    }
                }
            }
            Fault::Deadlock => self.deadlocks().await?,
            Fault::ClockForward(which) => {
                let caught = if which == Which::All { Some(self.catch().await?) } else { None };
                self.clock()?.forward(HOUR)?;
                match &caught {
                    Some(caught) => self.overtaken(caught).await?,
                    None => sleep(A_WHILE).await,
                }
                self.clock()?.set_right()?;
            }
            Fault::ClockBack(_) => {
                self.clock()?.back(HOUR)?;
                sleep(A_WHILE).await;
                self.clock()?.set_right()?;
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

    /// Kills three workers, each while it holds a lock, and hires others.
    async fn kill_clients(&self) -> Result<(), BoxError> {
        for _ in 0..3 {
            let caught = self.catch().await?;
            self.replace(&caught.worker).await?;
        }
        self.progress(10).await
    }

    /// The fault that every lock service has to live with.
    async fn freeze_client(&self) -> Result<(), BoxError> {
        let caught = self.catch().await?;
        self.crew.freeze(&caught.worker).await?;
        self.overtaken(&caught).await?;
        let worker = caught.worker.clone();
        // It will find the answer to its pass when it goes on.
        drop(caught);
        self.crew.thaw(&worker)?;
        self.progress(4).await
    }

    async fn cut_off_holder(&self) -> Result<(), BoxError> {
        let caught = self.catch().await?;
        let proxies = self.proxies_of(&caught.worker);
        proxies.iter().for_each(Proxy::blackhole);
        self.overtaken(&caught).await?;
        drop(caught);
        self.progress(4).await?;
        proxies.iter().for_each(Proxy::heal);
        Ok(())
    }

    async fn cut_all(&self) {
        for proxy in self.all_proxies() {
            proxy.cut().await;
        }
    }

    async fn victims(&self, which: Which, random: &mut Random) -> Result<Vec<&Process>, BoxError> {
        let mut all = self.target.processes();
        let count = match which {
            Which::All => all.len(),
            Which::One => 1,
            Which::Two => 2,
            Which::Three => 3,
            Which::Leader | Which::Follower => {
                let Target::Ensemble(ensemble) = &self.target else { return Err("there is no leader".into()) };
                let leader = ensemble.leader().await.ok_or("the ensemble has no leader")?;
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

    async fn kill_servers(&self, which: Which, random: &mut Random) -> Result<(), BoxError> {
        let victims = self.victims(which, random).await?;
        for process in &victims {
            process.kill().await?;
        }
        sleep(if which == Which::All { Duration::from_millis(300) } else { A_WHILE }).await;
        for process in &victims {
            process.restart(Keep::Data).await?;
        }
        Ok(())
    }

    /// With next to no memory and leave to evict anything, the server evicts everything.
    async fn evict(&self) -> Result<(), BoxError> {
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

    /// Takes all the connections that there are, and then those of the workers.
    async fn exhaust(&self) -> Result<(), BoxError> {
        let process = self.target.processes().remove(0);
        self.limit_connections(Some(12)).await?;
        let mut taken = Vec::new();
        for _ in 0..40 {
            taken.push(TcpStream::connect(process.addr()).await?);
        }
        self.cut_all().await;
        sleep(A_WHILE).await;
        drop(taken);
        let mut tries = 0;
        while let Err(error) = self.limit_connections(None).await {
            tries += 1;
            if tries > 50 {
                return Err(error);
            }
            sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    async fn limit_connections(&self, limit: Option<u32>) -> Result<(), BoxError> {
        let limit = limit.unwrap_or(1000).to_string();
        match &self.target {
            Target::MySql(server) => drop(server.admin(&format!("SET GLOBAL max_connections = {limit}")).await?),
            target => {
                for server in target.redis() {
                    server.command(&["CONFIG", "SET", "maxclients", &limit]).await?;
                }
            }
        }
        Ok(())
    }

    /// A lock's update takes the entry of its name first and then its row. Here it is the other way round.
    async fn deadlocks(&self) -> Result<(), BoxError> {
        let Target::MySql(server) = &self.target else { return Ok(()) };
        let before = metric(server, "lock_deadlocks").await?;
        for _ in 0..40 {
            let reversed = "SELECT STRAIGHT_JOIN a.id FROM resource_lock a FORCE INDEX (PRIMARY) \
                            JOIN resource_lock b FORCE INDEX (resource_name) \
                            ON b.resource_name = CONCAT(a.resource_name, IF(SLEEP(0.02) = 0, '', '')) FOR UPDATE";
            // It may be the one that is chosen to end the deadlock.
            _ = server.admin(reversed).await;
            if metric(server, "lock_deadlocks").await? >= before + 3 {
                return Ok(());
            }
        }
        let seen = metric(server, "lock_deadlocks").await? - before;
        Err(format!("{seen} deadlocks in 40 attempts: the nemesis is broken").into())
    }
}

async fn flush(servers: &[RedisServer]) -> Result<(), BoxError> {
    for server in servers {
        server.command(&["FLUSHALL"]).await?;
    }
    Ok(())
}

/// One of the server's own counts.
async fn metric(server: &MySqlServer, name: &str) -> Result<u64, BoxError> {
    let ask = format!("SELECT COUNT FROM information_schema.INNODB_METRICS WHERE NAME = '{name}'");
    let rows = server.admin(&ask).await?;
    let count = rows.into_iter().flatten().next().flatten().ok_or_else(|| format!("the server has no {name}"))?;
    Ok(count.parse()?)
}
