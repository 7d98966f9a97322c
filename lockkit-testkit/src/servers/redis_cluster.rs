//! Private Redis clusters.

use std::io;

use super::{RedisFlavor, RedisOptions, RedisServer, Result, ServerError, hosts, port::Port, until};

const NAME: &str = "Redis Cluster";
/// How many primaries share the slots.
const PRIMARIES: usize = 3;
/// How many slots there are.
const SLOTS: usize = 16384;
/// For how long a member must not answer before the others take it for down.
const NODE_TIMEOUT: &str = "1000";

/// Three primaries that share the slots, each with a replica or none.
#[derive(Debug)]
pub struct RedisCluster {
    members: Vec<RedisServer>,
    /// What the members talk over.
    _buses: Vec<Port>,
}

impl RedisCluster {
    /// Starts the members, and returns when all of them agree that all slots are served.
    ///
    /// # Errors
    ///
    /// If the program is not installed, or a server does not come up.
    pub async fn start(flavor: RedisFlavor, with_replicas: bool) -> Result<Self> {
        Self::start_with(RedisOptions::default().flavor(flavor), with_replicas).await
    }

    /// The same with options for all members. With TLS they also use it among themselves.
    ///
    /// # Errors
    ///
    /// As for [`start`](Self::start).
    pub async fn start_with(options: RedisOptions, with_replicas: bool) -> Result<Self> {
        let count = if with_replicas { 2 * PRIMARIES } else { PRIMARIES };
        let (mut members, mut buses) = (Vec::with_capacity(count), Vec::with_capacity(count));
        for _ in 0..count {
            let (member, bus) = start_member(&options).await?;
            members.push(member);
            buses.push(bus);
        }
        let cluster = Self { members, _buses: buses };
        cluster.form().await?;
        Ok(cluster)
    }

    /// The members: three primaries, and then their replicas in the same order.
    #[must_use]
    pub fn members(&self) -> &[RedisServer] {
        &self.members
    }

    /// The URL that names all members. With TLS it takes the authority's file: `?ca=`.
    #[must_use]
    pub fn url(&self) -> String {
        format!("{}+cluster://{}", self.members[0].scheme(), hosts(&self.members))
    }

    /// Which primary serves the slot of a key at the start, by its place in [`members`](Self::members).
    ///
    /// # Errors
    ///
    /// If no member answers.
    pub async fn primary_of(&self, key: &str) -> Result<usize> {
        let slot = self.slot_of(key).await?;
        Ok((0..PRIMARIES).find(|&index| slots(index).contains(&slot)).unwrap_or(0))
    }

    /// The slot of a key.
    ///
    /// # Errors
    ///
    /// If no member answers.
    pub async fn slot_of(&self, key: &str) -> Result<usize> {
        let mut failure = None;
        for member in &self.members {
            match member.command(&["CLUSTER", "KEYSLOT", key]).await {
                Ok(slot) => {
                    let odd = |_| failed(io::Error::other(format!("no slot: {slot:?}")));
                    return slot.parse().map_err(odd);
                }
                Err(error) => failure = Some(error),
            }
        }
        Err(failure.unwrap_or_else(|| failed(io::ErrorKind::NotConnected.into())))
    }

    /// Moves a slot with all its keys from one primary to another.
    ///
    /// # Errors
    ///
    /// If a member refuses.
    pub async fn move_slot(&self, slot: usize, from: usize, to: usize) -> Result<()> {
        self.begin_to_move(slot, from, to).await?;
        let (text, port) = (slot.to_string(), self.members[to].port().to_string());
        loop {
            let keys = self.members[from].command(&["CLUSTER", "GETKEYSINSLOT", &text, "100"]).await?;
            let keys: Vec<&str> = keys.lines().filter(|key| !key.is_empty()).collect();
            if keys.is_empty() {
                break;
            }
            let mut words = vec!["MIGRATE", "127.0.0.1", &port, "", "0", "5000", "KEYS"];
            words.extend(keys);
            self.members[from].command(&words).await?;
        }
        let new = self.id(to).await?;
        for index in [to, from].into_iter().chain((0..PRIMARIES).filter(|&index| index != to && index != from)) {
            self.members[index].command(&["CLUSTER", "SETSLOT", &text, "NODE", &new]).await?;
        }
        Ok(())
    }

    /// Declares that a slot is on its way from one primary to another. Its keys stay where they are.
    ///
    /// # Errors
    ///
    /// If a member refuses.
    pub async fn begin_to_move(&self, slot: usize, from: usize, to: usize) -> Result<()> {
        let (text, old, new) = (slot.to_string(), self.id(from).await?, self.id(to).await?);
        self.members[to].command(&["CLUSTER", "SETSLOT", &text, "IMPORTING", &old]).await?;
        self.members[from].command(&["CLUSTER", "SETSLOT", &text, "MIGRATING", &new]).await?;
        Ok(())
    }

    /// Waits until the others know this member as a primary that serves, and it says so itself.
    ///
    /// # Errors
    ///
    /// If that does not come to pass within half a minute.
    pub async fn until_primary(&self, index: usize) -> Result<()> {
        let id = self.id(index).await?;
        until(NAME, "the replica takes over", async || {
            let mut agree = 0;
            for member in &self.members {
                let nodes = member.command(&["CLUSTER", "NODES"]).await.unwrap_or_default();
                let line = nodes.lines().find(|line| line.starts_with(&id)).unwrap_or_default().to_owned();
                // Flags come third, slots after eight fields.
                let is_primary = line.split(' ').nth(2).is_some_and(|flags| flags.contains("master"));
                agree += usize::from(is_primary && line.split(' ').count() > 8);
            }
            let info = self.members[index].command(&["CLUSTER", "INFO"]).await.unwrap_or_default();
            agree > PRIMARIES && info.contains("cluster_state:ok")
        })
        .await
    }

    async fn form(&self) -> Result<()> {
        for (index, member) in self.members.iter().enumerate() {
            // Each with an epoch of its own, so that there is nothing to settle.
            member.command(&["CLUSTER", "SET-CONFIG-EPOCH", &(index + 1).to_string()]).await?;
            if index < PRIMARIES {
                let slots: Vec<String> = slots(index).map(|slot| slot.to_string()).collect();
                let words = ["CLUSTER", "ADDSLOTS"].into_iter().chain(slots.iter().map(String::as_str));
                member.command(&words.collect::<Vec<_>>()).await?;
            }
        }
        let first = &self.members[0];
        for member in &self.members[1..] {
            let bus = bus_port(member).await?;
            first.command(&["CLUSTER", "MEET", "127.0.0.1", &member.port().to_string(), &bus]).await?;
        }
        let all_known = async || {
            let mut known = true;
            for member in &self.members {
                let info = member.command(&["CLUSTER", "INFO"]).await.unwrap_or_default();
                let count = format!("cluster_known_nodes:{}", self.members.len());
                known &= info.lines().any(|line| line == count) && info.contains("cluster_state:ok");
            }
            known
        };
        until(NAME, "the members find each other", all_known).await?;
        for (index, replica) in self.members.iter().enumerate().skip(PRIMARIES) {
            replica.command(&["CLUSTER", "REPLICATE", &self.id(index - PRIMARIES).await?]).await?;
        }
        until(NAME, "the replicas are in sync", async || {
            let mut in_sync = true;
            for replica in &self.members[PRIMARIES..] {
                let info = replica.command(&["INFO", "replication"]).await.unwrap_or_default();
                in_sync &= info.contains("master_link_status:up");
            }
            // All have to know of all of them: who is asked next may be any.
            for member in &self.members {
                let nodes = member.command(&["CLUSTER", "NODES"]).await.unwrap_or_default();
                in_sync &= nodes.matches("slave").count() == self.members.len() - PRIMARIES;
            }
            in_sync
        })
        .await
    }

    async fn id(&self, index: usize) -> Result<String> {
        self.members[index].command(&["CLUSTER", "MYID"]).await
    }
}

/// The slots of a primary at the start.
fn slots(index: usize) -> std::ops::Range<usize> {
    SLOTS * index / PRIMARIES..SLOTS * (index + 1) / PRIMARIES
}

/// Starts a member, and gives the port of the bus that the members talk over. By default that is beyond those that a test
/// may use.
async fn start_member(options: &RedisOptions) -> Result<(RedisServer, Port)> {
    let mut tried = 1;
    loop {
        let bus = Port::free().map_err(failed)?;
        let options = options.clone().args([
            "--cluster-enabled",
            "yes",
            "--cluster-port",
            &bus.number().to_string(),
            "--cluster-node-timeout",
            NODE_TIMEOUT,
            "--repl-diskless-sync-delay",
            "0",
        ]);
        match RedisServer::start(options).await {
            Err(error) if tried < 3 && !error.is_missing() => tried += 1,
            other => return Ok((other?, bus)),
        }
    }
}

async fn bus_port(member: &RedisServer) -> Result<String> {
    let answer = member.command(&["CONFIG", "GET", "cluster-port"]).await?;
    Ok(answer.lines().nth(1).unwrap_or_default().to_owned())
}

fn failed(error: io::Error) -> ServerError {
    ServerError::io(NAME, error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_slot_moves_with_its_keys() -> Result<()> {
        let cluster = RedisCluster::start(RedisFlavor::Installed, false).await?;
        let (from, slot) = (cluster.primary_of("a").await?, cluster.slot_of("a").await?);
        let to = (from + 1) % PRIMARIES;
        cluster.members()[from].command(&["SET", "a", "1"]).await?;
        cluster.move_slot(slot, from, to).await?;
        assert_eq!(cluster.members()[to].command(&["GET", "a"]).await?, "1");
        let error = cluster.members()[from].command(&["GET", "a"]).await.expect_err("moved");
        assert!(error.to_string().contains("MOVED"), "{error}");
        Ok(())
    }

    #[tokio::test]
    async fn a_replica_takes_over() -> Result<()> {
        let cluster = RedisCluster::start(RedisFlavor::Installed, true).await?;
        cluster.members()[0].kill().await?;
        cluster.until_primary(PRIMARIES).await
    }
}
