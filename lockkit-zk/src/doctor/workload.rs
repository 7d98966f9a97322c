//! What the servers have done, and how much they keep.

use lockkit_core::{Result, Workload, store::join_all};
use tokio::time::timeout;

use super::server;
use crate::config::ZkConfig;

/// What the servers have done since they started: packets that they received from clients, and the bytes that their trees of nodes
/// take, each server's copy for itself. Most tell the second only if `mntr` is in their `4lw.commands.whitelist`; none tells the processor
/// time, nor anything over TLS, nor where it can't be reached.
///
/// # Errors
/// `InvalidInput` for a wrong configuration.
pub async fn workload(config: &ZkConfig) -> Result<Workload> {
    config.check()?;
    if config.tls.is_some() {
        return Ok(Workload::default());
    }
    let asked = config.addresses().into_iter().map(|server| async move {
        let ask = async |word| {
            let answer = timeout(config.timeout, server::answer(&server, word)).await;
            answer.ok().and_then(|answer| answer.ok()).unwrap_or_default()
        };
        read(&ask("srvr").await, &ask("mntr").await)
    });
    Ok(join_all(asked).await.into_iter().reduce(|sum, server| sum + server).unwrap_or_default())
}

/// Reads the answers to `srvr`, which servers give by default, and to `mntr`.
fn read(srvr: &str, mntr: &str) -> Workload {
    let number = |answer: &str, name| answer.lines().find_map(|line| line.strip_prefix(name))?.trim().parse().ok();
    Workload {
        requests: number(srvr, "Received:"),
        processor: None,
        memory: number(mntr, "zk_approximate_data_size\t"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_server_says_is_read_and_nothing_made_up() {
        let srvr = "Zookeeper version: 3.8.0\nLatency min/avg/max: 0/0.5/9\nReceived: 77\nSent: 78\nMode: standalone\n";
        let mntr = "zk_version\t3.8.0\nzk_approximate_data_size\t4711\nzk_packets_received\t77\n";
        assert_eq!(read(srvr, mntr), Workload { requests: Some(77), processor: None, memory: Some(4711) });
        let refused = "mntr is not executed because it is not in the whitelist.\n";
        assert_eq!(read(srvr, refused), Workload { requests: Some(77), ..Workload::default() });
        assert_eq!(read("", ""), Workload::default());
    }
}
