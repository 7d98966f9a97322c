//! Whether the servers can keep locks, asked when the store connects.

use lockkit_core::{ErrorKind, Result};
use redis::{Pipeline, Value};

use crate::{
    error::{self, Sent},
    node::Node,
    server,
    store::RedisStore,
};

/// Asks every server about itself; what their settings put at risk, in words.
pub(crate) async fn check(store: &RedisStore) -> Result<Vec<String>> {
    let (mut warnings, mut failures, mut reached) = (Vec::new(), Vec::new(), false);
    for node in store.nodes.all().await? {
        let told = ask(store, &node).await;
        match told {
            Ok(told) => {
                reached = true;
                warnings.extend(told);
            }
            // A cluster serves the slots of the others.
            Err(e) if store.nodes.is_cluster() && e.is_retryable() => failures.push(e),
            Err(e) => return Err(e),
        }
    }
    match failures.pop() {
        Some(e) if !reached => return Err(e),
        Some(e) => warnings.push(format!("a member of the cluster can't be asked: {}", e.message())),
        None => {}
    }
    warnings.sort();
    warnings.dedup();
    Ok(warnings)
}

async fn ask(store: &RedisStore, node: &Node) -> Result<Vec<String>> {
    let connection = node.link.connection().await?;
    let mut requests = Pipeline::new();
    requests.cmd("INFO");
    let replies = node.link.run_all(&connection, None, &requests, store.timeout, Sent::ReadOnly).await?;
    let info = match replies.into_iter().next() {
        Some(Value::ServerError(e)) => match error::map(&e.into(), Sent::ReadOnly) {
            e if e.kind() == ErrorKind::Denied => {
                let why = "the user may not use INFO: the server's role and eviction policy are not known";
                return Ok(vec![why.into()]);
            }
            e => return Err(e),
        },
        Some(reply) => redis::from_redis_value::<String>(reply).unwrap_or_default(),
        None => return Err(error::odd_reply(Sent::ReadOnly)),
    };
    let mut warnings = server::judge(&info, store.nodes.is_cluster())?;
    if connection.reign().is_some() && node.replicas.is_none() {
        warnings.extend(server::judge_isolation(&info));
    }
    if let Some(replicas) = &node.replicas {
        replicas.confirm(&connection).await?;
    }
    Ok(warnings)
}
