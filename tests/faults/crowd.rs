//! Connections exhausted: the nemesis takes all that there are.

use std::{io, time::Duration};

use tokio::{net::TcpStream, time::sleep};

use crate::{
    arena::Arena,
    nemesis::A_WHILE,
    target::Target,
    trouble::{Trouble, shows},
};

/// So many connections exhaust a server that allows few.
const CROWD: u64 = 40;

impl Arena {
    /// Takes all the connections that there are, while the workers have none.
    pub(crate) async fn exhaust(&self) -> Result<(), Trouble> {
        let process = self.target.processes().remove(0);
        let before = self.turned_away().await?;
        self.limit_connections(Some(12)).await?;
        self.shut_out().await;
        let mut taken = Vec::new();
        for _ in 0..CROWD {
            // The other fault may have killed the server.
            taken.push(TcpStream::connect(process.addr()).await.map_err(|error| Trouble::Server(error.into()))?);
        }
        self.all_proxies().for_each(|proxy| proxy.refuse(false));
        sleep(A_WHILE).await;
        let own = taken.iter().filter(|stream| is_turned_away(stream)).count() as u64;
        // The workers take every place that becomes free, also the one that is kept for an administrator.
        self.shut_out().await;
        drop(taken);
        let mut tries = 0;
        while let Err(error) = self.limit_connections(None).await {
            tries += 1;
            if tries > 50 {
                return Err(error);
            }
            sleep(Duration::from_millis(20)).await;
        }
        self.all_proxies().for_each(|proxy| proxy.refuse(false));
        let all = self.turned_away().await?.saturating_sub(before);
        shows(all > own, format!("{all} connections were turned away, {own} of them the nemesis' own"))
    }

    /// Resets all connections of the workers, and lets them make no new ones.
    async fn shut_out(&self) {
        self.all_proxies().for_each(|proxy| proxy.refuse(true));
        self.cut_all().await;
    }

    async fn limit_connections(&self, limit: Option<u32>) -> Result<(), Trouble> {
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
}

/// Whether a server has refused a connection: Redis says so in a line, MySQL in its first packet, and either hangs up.
fn is_turned_away(stream: &TcpStream) -> bool {
    let mut said = [0; 5];
    match stream.try_read(&mut said) {
        Ok(0) => true,
        Ok(_) => said[0] == b'-' || said[4] == 0xff,
        Err(error) => error.kind() != io::ErrorKind::WouldBlock,
    }
}
