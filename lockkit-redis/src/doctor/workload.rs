//! What the servers have done, and what memory they use.

use std::time::Duration;

use lockkit_core::{Result, Workload};

use crate::{
    config::RedisConfig,
    store::{RedisStore, check::ask_info},
    wire::server::field,
};

/// What the servers that keep locks have done since they started: the one, the primary, or all primaries of a cluster. Commands that
/// scripts call count, too. The buffers of clients do not: what a server keeps of them for a while says nothing of locks. A user who may not use `INFO` is told nothing.
///
/// # Errors
/// `InvalidInput` for a wrong configuration; `Unavailable`, `TimedOut` or `Denied` if a server can't be asked at all.
pub async fn workload(config: &RedisConfig) -> Result<Workload> {
    let store = RedisStore::new(config.clone())?;
    let told = async {
        let mut servers = Vec::new();
        for node in store.nodes.all().await? {
            let connection = node.dialer.connection().await?;
            let (info, _) = ask_info(&node.dialer, &connection, store.timeout).await?;
            servers.push(read(&info));
        }
        Ok(servers.into_iter().reduce(|sum, server| sum + server).unwrap_or_default())
    };
    told.await.map_err(|e: lockkit_core::Error| e.at("examine", None, &store.info.name))
}

/// Reads the answer to `INFO`.
fn read(info: &str) -> Workload {
    let number = |name| field(info, name).parse::<u64>().ok();
    let seconds = |name| field(info, name).parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    Workload {
        requests: number("total_commands_processed"),
        processor: seconds("used_cpu_sys").and_then(|system| Some(system + seconds("used_cpu_user")?)),
        memory: number("used_memory").and_then(|all| all.checked_sub(number("mem_clients_normal")?)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_server_says_is_read_and_nothing_made_up() {
        let info = "used_memory:1048576\r\nused_memory_rss:9\r\nmem_clients_normal:576\r\ntotal_commands_processed:42\r\nused_cpu_sys:1.5\r\n\
            used_cpu_user:0.250000\r\nused_cpu_sys_children:7\r\n";
        let processor = Some(Duration::from_millis(1750));
        assert_eq!(read(info), Workload { requests: Some(42), processor, memory: Some(1_048_000) });
        assert_eq!(read(""), Workload::default());
        assert_eq!(read("used_cpu_sys:1.5\r\n").processor, None);
    }
}
