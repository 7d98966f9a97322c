//! Questions whose answers say [to which they belong](crate::wire::number), on a connection that may be new.

use lockkit_core::{Fence, Result};
use redis::{Cmd, Pipeline, RedisResult, Value, aio::MultiplexedConnection};

use crate::wire::{
    error::{self, Sent},
    number::{self, Numbered},
    scripts::Script,
    server::{self, ServerFacts},
};

/// Sends commands anew whose scripts the server did not know by their hashes, the first of each script with its code: then it knows
/// the others. They leave together, however many they are: one after the other they would not be answered in time. The refusal that
/// said so has no number, and if it came twice, it would be taken for the answer to this: so a question goes right behind, whose
/// answer has one. `asking` is for a single command.
///
/// # Errors
/// If an answer belongs to another question.
pub(crate) async fn run_with_code<'a>(
    driver: &mut MultiplexedConnection,
    commands: impl Iterator<Item = &'a Cmd>,
    asking: bool,
    number: u64,
) -> RedisResult<Vec<Value>> {
    let mut requests = Pipeline::new();
    if asking {
        requests.cmd("ASKING");
    }
    let mut told: Vec<&Script> = Vec::new();
    for command in commands {
        let unknown = Script::of(command).filter(|script| !told.iter().any(|other| std::ptr::eq(*other, *script)));
        told.extend(unknown);
        requests.add_command(unknown.map_or_else(|| command.clone(), |script| script.by_code(command)));
    }
    requests.add_command(number::echo(number));
    let mut replies = driver.send_packed_commands(&requests, 0, requests.len()).await?;
    number::heard(number, &replies.pop().unwrap_or_default())?;
    Ok(replies.split_off(usize::from(asking).min(replies.len())))
}

/// Makes sure that a refusal, if it is one, belongs to the question that was asked last: then the next reply is the one to
/// this question.
///
/// # Errors
/// If it does not.
pub(crate) async fn confirm(driver: &mut MultiplexedConnection, number: u64, last: Option<&Value>) -> RedisResult<()> {
    let Some(Value::ServerError(refused)) = last else { return Ok(()) };
    number::is_confirmed(refused, number, &driver.send_packed_command(&number::echo(number)).await?)
}

/// Asks what every new connection asks, and returns the answers in order, among them refusals. One number is enough, for
/// none of the requests names a script by its hash.
///
/// # Errors
/// If the connection fails, or what comes does not belong to the requests.
pub(crate) async fn ask(
    connection: &MultiplexedConnection,
    number: u64,
    requests: &Pipeline,
) -> RedisResult<Vec<Value>> {
    let asked = Numbered::new(requests, || number);
    let mut driver = MultiplexedConnection::clone(connection);
    let replies = driver.send_packed_commands(&asked.requests, 0, asked.requests.len()).await?;
    asked.answers(replies)
}

/// What the server says of itself. What this user may not ask for is not known.
pub(crate) async fn facts(connection: &MultiplexedConnection, number: u64) -> Result<ServerFacts> {
    let replies = ask(connection, number, &server::questions()).await.map_err(|e| error::map(&e, Sent::No))?;
    Ok(ServerFacts::read_replies(replies))
}

/// The server's clock, as a fence: above all that it gave out before, so that a counter that comes back older than it was
/// (from a snapshot, or on a replica that took over) does not go on from there. No connection outlives a restart.
///
/// # Errors
/// If the connection fails. What the server says against it is within.
pub(crate) async fn clock(connection: &MultiplexedConnection, number: u64) -> Result<Result<Fence>> {
    let mut requests = Pipeline::with_capacity(1);
    requests.cmd("TIME");
    let replies = ask(connection, number, &requests).await.map_err(|e| error::map(&e, Sent::No))?;
    server::clock(replies.into_iter().next().unwrap_or_default())
}
