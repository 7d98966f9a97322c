//! Whether the servers can keep locks, asked when the store connects.

use lockkit_core::Result;

use crate::{client::node::Node, doctor, store::RedisStore};

/// Asks every server about itself; what their settings put at risk, in words.
pub(crate) async fn check(store: &RedisStore) -> Result<Vec<String>> {
    let (mut warnings, mut failures, mut reached) = (Vec::<String>::new(), Vec::new(), false);
    for node in store.nodes.all().await? {
        let told = ask(store, &node).await;
        match told {
            Ok(told) => {
                reached = true;
                let news: Vec<_> = told.into_iter().filter(|new| !warnings.contains(new)).collect();
                warnings.extend(news);
            }
            // A cluster serves the slots of the others.
            Err(e) if store.nodes.is_cluster() && e.is_retryable() => {
                store.nodes.note_failure(&e);
                failures.push(e);
            }
            Err(e) => return Err(e),
        }
    }
    match failures.pop() {
        Some(e) if !reached => return Err(e),
        Some(e) => warnings.push(format!("a member of the cluster can't be asked: {}", e.message())),
        None => {}
    }
    Ok(warnings)
}

async fn ask(store: &RedisStore, node: &Node) -> Result<Vec<String>> {
    let warnings = doctor::check(&node.link, &store.names, store.timeout, store.nodes.is_cluster()).await?;
    if let Some(replicas) = &node.replicas {
        replicas.confirm(&*node.link.connection().await?).await?;
    }
    Ok(warnings)
}
