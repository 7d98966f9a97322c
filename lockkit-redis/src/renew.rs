//! Renewal of many leases in few requests.

use std::{
    future::{Future, poll_fn},
    pin::Pin,
    task::Poll,
    time::Duration,
};

use lockkit_core::{Error, ErrorKind, Hold, LossReason, Moment, Renewal, Renewed, Result};
use redis::{Cmd, Pipeline, Value};

use crate::{
    error::{self, Sent},
    link::Connection,
    name,
    scripts::RENEW,
    store::{RedisStore, check_floor, exclusive, milliseconds},
    value,
};

/// How many leases one script extends: the server serves nobody else while it runs, some 0.1 ms.
const CHUNK: usize = 128;
/// How many scripts are sent, and answered, together.
const BATCH: usize = 16;

/// Extends leases. All requests are on their way at once, each with its own bound.
pub(crate) async fn renew(store: &RedisStore, renewals: &[Renewal]) -> Vec<Result<Renewed>> {
    let mut answers: Vec<Option<Result<Renewed>>> = Vec::new();
    answers.resize_with(renewals.len(), || None);
    let mut todo = Vec::with_capacity(renewals.len());
    for (index, renewal) in renewals.iter().enumerate() {
        match check(renewal) {
            Ok(ttl) => todo.push(Item { index, ttl, with_floor: renewal.fence_floor.is_some() }),
            Err(e) => answers[index] = Some(Err(e)),
        }
    }
    // Leases of the same ttl share a script. It is usually the same for all, so there is nothing to sort.
    todo.sort_by_key(|item| (item.with_floor, item.ttl));
    let chunks: Vec<&[Item]> = todo
        .chunk_by(|a, b| (a.with_floor, a.ttl) == (b.with_floor, b.ttl))
        .flat_map(|alike| alike.chunks(CHUNK))
        .collect();
    match store.link.connection().await {
        Ok(connection) => {
            let batches = chunks.chunks(BATCH).map(|chunks| send(store, &connection, renewals, chunks)).collect();
            for (index, answer) in join(batches).await.into_iter().flatten() {
                answers[index] = Some(answer);
            }
        }
        Err(e) => todo.iter().for_each(|item| answers[item.index] = Some(Err(e.clone()))),
    }
    let answers = answers.into_iter().map(|answer| answer.unwrap_or_else(|| Err(error::odd_reply(Sent::Yes))));
    answers
        .zip(renewals)
        .map(|(answer, renewal)| answer.map_err(|e| e.at("renew", Some(&renewal.claim.key), &store.info.name)))
        .collect()
}

/// A renewal that is in order.
struct Item {
    index: usize,
    ttl: u64,
    with_floor: bool,
}

fn check(renewal: &Renewal) -> Result<u64> {
    exclusive(&renewal.claim)?;
    renewal.fence_floor.map_or(Ok(()), check_floor)?;
    milliseconds(renewal.ttl)
}

type Answers = Vec<(usize, Result<Renewed>)>;

/// Sends a few scripts together, and gives the answers that belong to each renewal.
async fn send(store: &RedisStore, connection: &Connection, renewals: &[Renewal], chunks: &[&[Item]]) -> Answers {
    let shortest = chunks.iter().filter_map(|chunk| chunk.first()).map(|item| renewals[item.index].ttl).min();
    let bound = store.bound(shortest.unwrap_or(Duration::MAX));
    let mut requests = Pipeline::with_capacity(chunks.len());
    for chunk in chunks {
        requests.add_command(script(store, renewals, chunk));
    }
    let sent = store.info.clock.now();
    let mut answers = Vec::with_capacity(chunks.len() * CHUNK);
    match store.link.run_all(connection, Some(&RENEW), &requests, bound, Sent::Yes).await {
        Ok(replies) => {
            for (chunk, reply) in chunks.iter().zip(replies) {
                match store.link.accept(connection, reply, Sent::Yes) {
                    Ok(Value::Array(parts)) => answers.extend(
                        chunk
                            .iter()
                            .zip(parts)
                            .map(|(item, part)| (item.index, read(&renewals[item.index], part, sent))),
                    ),
                    Ok(_) => fail(&mut answers, chunk, &error::odd_reply(Sent::Yes)),
                    // Some of the chunk may have been extended before the error.
                    Err(e) => fail(&mut answers, chunk, &e.unknown_effect()),
                }
            }
        }
        Err(e) => chunks.iter().for_each(|chunk| fail(&mut answers, chunk, &e)),
    }
    answers
}

fn script(store: &RedisStore, renewals: &[Renewal], chunk: &[Item]) -> Cmd {
    let with_floor = chunk[0].with_floor;
    let each = if with_floor { 2 } else { 1 };
    let mut script = RENEW.by_hash(chunk.len() * each, 2 + chunk.len() * each, chunk.len() * each * 80);
    let locks = || chunk.iter().map(|item| store.names.lock(&renewals[item.index].claim.key));
    for lock in locks() {
        script.arg(lock);
    }
    for lock in locks().filter(|_| with_floor) {
        script.arg(name::counter(&lock));
    }
    script.arg(chunk[0].ttl).arg(chunk.len());
    let mut head = String::with_capacity(48);
    for renewal in chunk.iter().map(|item| &renewals[item.index]) {
        head.clear();
        value::push_head(&mut head, &renewal.claim.token, renewal.depth);
        script.arg(&head);
    }
    for floor in chunk.iter().filter_map(|item| renewals[item.index].fence_floor) {
        script.arg(floor.get());
    }
    script
}

fn read(renewal: &Renewal, part: Value, sent: Moment) -> Result<Renewed> {
    match part {
        Value::BulkString(value) => {
            let (fence, span, depth) = value::numbers(&value).ok_or_else(|| error::odd_reply(Sent::Yes))?;
            let until = sent + renewal.ttl;
            Ok(Renewed::Held(Hold { claim: renewal.claim.clone(), fence, span, until, depth }))
        }
        Value::Int(0) => Ok(Renewed::Lost(LossReason::Gone)),
        Value::Int(1) => Ok(Renewed::Lost(LossReason::Taken)),
        Value::Int(2) => Err(Error::new(ErrorKind::Unexpected, "the fence counter is no number").unknown_effect()),
        _ => Err(error::odd_reply(Sent::Yes)),
    }
}

fn fail(answers: &mut Answers, chunk: &[Item], error: &Error) {
    answers.extend(chunk.iter().map(|item| (item.index, Err(error.clone()))));
}

/// Runs futures side by side in this task: few of them, so that asking all each time is cheap.
async fn join<F: Future>(futures: Vec<F>) -> Vec<F::Output> {
    let mut running: Vec<Option<Pin<Box<F>>>> = futures.into_iter().map(|future| Some(Box::pin(future))).collect();
    let mut outputs: Vec<Option<F::Output>> = running.iter().map(|_| None).collect();
    poll_fn(|cx| {
        for (slot, output) in running.iter_mut().zip(&mut outputs) {
            if let Some(future) = slot
                && let Poll::Ready(value) = future.as_mut().poll(cx)
            {
                *output = Some(value);
                *slot = None;
            }
        }
        if running.iter().all(Option::is_none) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    outputs.into_iter().flatten().collect()
}
