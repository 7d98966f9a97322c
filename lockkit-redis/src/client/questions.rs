//! Questions behind questions, whose answers say [to which they belong](crate::wire::number).

use redis::{Cmd, Pipeline, RedisResult, Value, aio::MultiplexedConnection};

use crate::wire::{number, scripts::Script};

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
