//! Renewal of many leases in few requests.

use std::{sync::Arc, time::Duration};

use lockkit_core::{
    Effect, Error, ErrorKind, Hold, LossReason, Mode, Moment, Renewal, Renewed, Result, store::join_all,
};
use redis::{Cmd, Pipeline, Value};

use crate::{
    client::{
        connection::Connection,
        node::{Node, Sorted},
    },
    store::{RedisStore, order},
    wire::{
        error::{self, Sent},
        name,
        redirect::{self, Redirect},
        scripts::{RENEW, RENEW_GUARDED},
        value::{self, check_floor, milliseconds},
    },
};

/// How many leases one script extends: the server serves nobody else while it runs, some 0.1 ms.
const CHUNK: usize = 128;
/// How often leases are asked for that turn out to be elsewhere in a cluster.
const ROUNDS: u32 = 3;

/// Extends leases. All requests are on their way at once, each with its own bound.
pub(crate) async fn renew(store: &RedisStore, renewals: &[Renewal]) -> Vec<Result<Renewed>> {
    let mut answers: Vec<Option<Result<Renewed>>> = Vec::new();
    answers.resize_with(renewals.len(), || None);
    let mut todo = Vec::with_capacity(renewals.len());
    for (index, renewal) in renewals.iter().enumerate() {
        match check(store, renewal) {
            Ok(ttl) => todo.push(Item {
                index,
                ttl,
                changes: renewal.fence_floor.is_some() || renewal.holder.is_some(),
                shares: renewal.claim.mode != Mode::Exclusive,
                alone: renewal.claim.mode != Mode::Exclusive,
            }),
            Err(e) => answers[index] = Some(Err(e)),
        }
    }
    let shortest = todo.iter().map(|item| renewals[item.index].ttl).min().unwrap_or_default();
    for round in 1.. {
        let (mut moved, mut redirects) = (Vec::new(), Vec::new());
        for (item, answer) in renew_round(store, renewals, shortest, std::mem::take(&mut todo)).await {
            match answer {
                Err(e) if round < ROUNDS && store.nodes.is_redirected(&e) => {
                    moved.push(item);
                    redirects.push(e);
                }
                // The user may use some of the keys and not others. None of the leases in the script was extended.
                Err(e) if is_denied(&e) && !item.alone => moved.push(Item { alone: true, ..item }),
                answer => answers[item.index] = Some(answer.map_err(|e| store.nodes.settle(e))),
            }
        }
        if moved.is_empty() {
            break;
        }
        if !redirects.is_empty() {
            store.nodes.redirect(&redirects).await;
        }
        todo = moved;
    }
    answers.into_iter().map(|answer| answer.unwrap_or_else(|| Err(error::odd_reply(Sent::Yes)))).collect()
}

/// Asks each server once. None may take longer than the lease of the shortest ttl can wait, which may be at another.
async fn renew_round(store: &RedisStore, renewals: &[Renewal], shortest: Duration, todo: Vec<Item>) -> Answers {
    let (orphans, failure, by_node) = match store.nodes.sort(todo.clone(), |item| lock(store, renewals, item)).await {
        Ok(Sorted { by_node, orphans }) => (orphans, redirect::unserved(), by_node),
        Err(e) => (todo, e, Vec::new()),
    };
    let mut answers: Answers = orphans.into_iter().map(|item| (item, Err(failure.clone()))).collect();
    let servers = by_node.into_iter().map(|(node, items)| renew_at(store, renewals, shortest, node, items));
    answers.extend(join_all(servers).await.into_iter().flatten());
    answers
}

/// Asks one server.
async fn renew_at(
    store: &RedisStore,
    renewals: &[Renewal],
    shortest: Duration,
    node: Arc<Node>,
    mut todo: Vec<Item>,
) -> Answers {
    // The core waits for a sixth of the ttl before it takes all of the leases for doubtful. The answers of those that can be
    // reached come before that; and the attempt to connect goes on, for the next call.
    let connection = match node.dialer.connection_within(store.timeout.min(shortest / 8)).await {
        Ok(connection) => connection,
        Err(e) => {
            store.nodes.note_failure(&e);
            return todo.into_iter().map(|item| (item, Err(e.clone()))).collect();
        }
    };
    // The core asks again after a sixth of the ttl. An attempt that went on for longer would keep the next one from finding the
    // connection dead: that takes two that time out one after the other.
    let bound = store.timeout.min(shortest / 6);
    // Leases of the same ttl share a script. It is usually the same for all, so there is nothing to sort. In a cluster
    // they would have to share a slot as well, which is not worth looking for.
    let chunk = if store.nodes.is_cluster() { 1 } else { CHUNK };
    let kind = |item: &Item| (item.shares, item.alone, item.changes, item.ttl);
    todo.sort_by_key(kind);
    let chunks: Vec<&[Item]> = todo
        .chunk_by(|a, b| kind(a) == kind(b))
        .flat_map(|alike| alike.chunks(if alike[0].alone { 1 } else { chunk }))
        .collect();
    let mut answers = send(store, &connection, renewals, bound, &chunks).await;
    if let Some(replicas) = &node.replicas
        && answers.iter().any(|(_, answer)| matches!(answer, Ok(Renewed::Held(_))))
        && let Err(e) = replicas.confirm(&connection).await
    {
        let held = answers.iter_mut().filter(|(_, answer)| matches!(answer, Ok(Renewed::Held(_))));
        held.for_each(|(_, answer)| *answer = Err(e.clone().unknown_effect()));
    }
    answers.iter().filter_map(|(_, answer)| answer.as_ref().err()).for_each(|e| store.nodes.note_failure(e));
    answers
}

/// A renewal that is in order.
#[derive(Clone)]
struct Item {
    index: usize,
    ttl: u64,
    /// It changes more than the end of the lease and the depth: the fence counter, or the holder's name.
    changes: bool,
    /// It shares its lock with others.
    shares: bool,
    /// It is to have a script of its own.
    alone: bool,
}

/// The script was refused before it began.
fn is_denied(error: &Error) -> bool {
    error.kind() == ErrorKind::Denied && error.effect() == Effect::None
}

fn check(store: &RedisStore, renewal: &Renewal) -> Result<u64> {
    store.info.admit_mode(renewal.claim.mode)?;
    store.info.admit_ttl(renewal.ttl)?;
    renewal.fence_floor.map_or(Ok(()), check_floor)?;
    Ok(milliseconds(renewal.ttl))
}

fn lock(store: &RedisStore, renewals: &[Renewal], item: &Item) -> String {
    store.names.lock(&renewals[item.index].claim.key)
}

type Answers = Vec<(Item, Result<Renewed>)>;

/// Sends the scripts together, and gives the answers that belong to each renewal.
async fn send(
    store: &RedisStore,
    connection: &Connection,
    renewals: &[Renewal],
    bound: Duration,
    chunks: &[&[Item]],
) -> Answers {
    let mut requests = Pipeline::with_capacity(chunks.len());
    for chunk in chunks {
        requests.add_command(match chunk {
            [Item { shares: true, index, ttl, .. }] => order::renewal(store, connection, &renewals[*index], *ttl),
            _ => script(store, connection, renewals, chunk),
        });
    }
    let sent = store.info.clock.now();
    let mut answers = Vec::with_capacity(chunks.iter().map(|chunk| chunk.len()).sum());
    match connection.run_all(&requests, bound, Sent::Yes).await {
        Ok(replies) => {
            for (chunk, reply) in chunks.iter().zip(replies) {
                match connection.accept(reply, Sent::Yes) {
                    Ok(Value::Array(parts)) => answers.extend(chunk.iter().zip(parts).map(|(item, part)| {
                        // It may have been extended before the error.
                        let part = connection.accept(part, Sent::Yes).map_err(Error::unknown_effect);
                        (item.clone(), part.and_then(|part| read(&renewals[item.index], part, sent)))
                    })),
                    Ok(_) => fail(&mut answers, chunk, &error::odd_reply(Sent::Yes)),
                    // A script with several keys is sent on while any of them is not here; the lock may be.
                    Err(e)
                        if matches!(chunk, [Item { shares: true, .. } | Item { changes: true, .. }])
                            && Redirect::of(&e).is_some_and(|to| to.asking) =>
                    {
                        fail(&mut answers, chunk, &redirect::undecided());
                    }
                    // The lease has left this server, and no other may renew it.
                    Err(e) if Redirect::of(&e).is_some_and(|to| to.asking) && store.nodes.is_cluster() => {
                        answers.extend(chunk.iter().map(|item| (item.clone(), Ok(Renewed::Lost(LossReason::Gone)))));
                    }
                    Err(e) if store.nodes.is_redirected(&e) || is_denied(&e) => fail(&mut answers, chunk, &e),
                    Err(e) => fail(&mut answers, chunk, &e.unknown_effect()),
                }
            }
        }
        Err(e) => chunks.iter().for_each(|chunk| fail(&mut answers, chunk, &e)),
    }
    answers
}

fn script(store: &RedisStore, connection: &Connection, renewals: &[Renewal], chunk: &[Item]) -> Cmd {
    let changes = chunk[0].changes;
    let (keys_each, args_each) = if changes { (2, 4) } else { (1, 1) };
    let script = if connection.epoch().is_some() { &*RENEW_GUARDED } else { &*RENEW };
    let mut cmd =
        script.by_hash(chunk.len() * keys_each, 4 + chunk.len() * args_each, 50 + chunk.len() * args_each * 80);
    let locks = || chunk.iter().map(|item| lock(store, renewals, item));
    for lock in locks() {
        cmd.arg(lock);
    }
    for lock in locks().filter(|_| changes) {
        cmd.arg(name::counter(&lock));
    }
    cmd.arg(chunk[0].ttl).arg(chunk.len());
    let mut head = String::with_capacity(48);
    for renewal in chunk.iter().map(|item| &renewals[item.index]) {
        head.clear();
        value::push_head(&mut head, &renewal.claim.token, renewal.depth);
        cmd.arg(&head);
    }
    for renewal in chunk.iter().filter(|_| changes).map(|item| &renewals[item.index]) {
        cmd.arg(renewal.fence_floor.map_or_else(String::new, |floor| floor.get().to_string()));
    }
    for renewal in chunk.iter().filter(|_| changes).map(|item| &renewals[item.index]) {
        cmd.arg(renewal.holder.as_ref().map_or_else(String::new, |holder| format!(":{}", holder.as_str())));
    }
    connection.push_epoch(&mut cmd);
    cmd
}

fn read(renewal: &Renewal, part: Value, sent: Moment) -> Result<Renewed> {
    match part {
        Value::BulkString(value) => {
            let (fence, span, depth) =
                value::own(&value, &renewal.claim.token).ok_or_else(|| error::odd_reply(Sent::Yes))?;
            let until = sent + renewal.ttl;
            Ok(Renewed::Held(Hold { claim: renewal.claim.clone(), fence, span, until, depth }))
        }
        // Deleted, or granted by a server that another one took over from.
        Value::Int(0 | 3) => Ok(Renewed::Lost(LossReason::Gone)),
        Value::Int(1) => Ok(Renewed::Lost(LossReason::Taken)),
        Value::Int(2) => Err(Error::new(ErrorKind::Unexpected, "the fence counter is no number").unknown_effect()),
        _ => Err(error::odd_reply(Sent::Yes)),
    }
}

fn fail(answers: &mut Answers, chunk: &[Item], error: &Error) {
    answers.extend(chunk.iter().map(|item| (item.clone(), Err(error.clone()))));
}
