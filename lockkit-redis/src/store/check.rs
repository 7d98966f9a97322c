//! Whether the servers can keep locks, asked when the store connects.

use std::{collections::HashMap, time::Duration};

use lockkit_core::{ErrorKind, Finding, Result, Token};
use redis::Value;

use crate::{
    client::{connection::Connection, dialer::Dialer, node::Node},
    store::RedisStore,
    wire::{
        access::Subject,
        error::{self, Sent},
        server,
    },
};

/// The setting that says for how long a primary without replicas remembers that it took over.
pub(crate) const BACKLOG: &str = "repl-backlog-ttl";

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

/// Asks one server whether it can keep locks; what its settings put at risk, in words.
async fn ask(store: &RedisStore, node: &Node) -> Result<Vec<String>> {
    let (dialer, bound) = (&*node.dialer, store.timeout);
    let connection = node.dialer.connection().await?;
    let (info, mut findings) = ask_info(dialer, &connection, bound).await?;
    findings.extend(server::judge(&info, store.nodes.is_cluster()));
    // Where another server takes over by itself, the former one should know when to stop.
    findings.extend(server::judge_isolation(&info).filter(|_| dialer.fails_over() && dialer.replicas() == 0));
    findings.extend(backlog(dialer, &connection, bound).await?);
    // A server that can't keep locks has nothing more to say.
    let mut warnings = Finding::admit(&findings)?;
    let subject = Subject::new(&store.names, &Token::random()?, dialer.username(), &[]);
    let replies = connection.run_all(&subject.basics(), bound, Sent::ReadOnly).await?;
    warnings.extend(Finding::admit(&subject.judge_basics(replies))?);
    if let Some(replicas) = &node.replicas {
        replicas.confirm(&*node.dialer.connection().await?).await?;
    }
    Ok(warnings)
}

/// What the server says of itself, or a warning that it does not.
pub(crate) async fn ask_info(
    dialer: &Dialer,
    connection: &Connection,
    bound: Duration,
) -> Result<(String, Vec<Finding>)> {
    match connection.run_one(redis::cmd("INFO"), bound, Sent::ReadOnly).await? {
        Value::ServerError(e) => match error::map(&e.into(), Sent::ReadOnly) {
            e if matches!(e.kind(), ErrorKind::Denied | ErrorKind::Unsupported) => {
                let summary = "the user may not use INFO: the server's role and eviction policy are not known";
                let advice = format!("ACL SETUSER {} +info", dialer.username().unwrap_or("default"));
                Ok((String::new(), vec![Finding::warning("info", summary, advice)]))
            }
            e => Err(e),
        },
        Value::Nil => Err(error::odd_reply(Sent::ReadOnly)),
        reply => Ok((redis::from_redis_value::<String>(reply).unwrap_or_default(), Vec::new())),
    }
}

/// Whether the server remembers for long enough that it took over, if this user may ask.
async fn backlog(dialer: &Dialer, connection: &Connection, bound: Duration) -> Result<Option<Finding>> {
    let Some(pause) = dialer.pause() else { return Ok(None) };
    let mut request = redis::cmd("CONFIG");
    request.arg("GET").arg(BACKLOG);
    let reply = connection.run_one(request, bound, Sent::ReadOnly).await?;
    let setting = redis::from_redis_value::<HashMap<String, String>>(reply).unwrap_or_default();
    Ok(server::judge_backlog(setting.get(BACKLOG).map(String::as_str), pause))
}
