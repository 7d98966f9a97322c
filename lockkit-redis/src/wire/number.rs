//! Answers that say to which question they belong.
//!
//! The protocol has no numbers: the first answer that comes is for the first question that waits. If one is lost on the way,
//! or comes twice, then every later one is taken for the answer to another question, for as long as the connection lives.
//! So each script is given a number, which comes back with its answer ([`Script`](crate::wire::scripts::Script)), and commands that
//! are no scripts are followed by one that does nothing else. An answer with another number, or none, ends the connection; of
//! what was asked nothing is known then.
//!
//! What the server refuses before it runs a script has no number. No grant follows from a refusal, and none says that a
//! lease was released. But a lease that a member of a cluster refuses to renew, for it has left this member, is lost: so a
//! renewal's refusal is believed only if the next question on the same connection is [answered as it should be](is_confirmed).

use std::io;

use redis::{Cmd, Pipeline, RedisResult, ServerError, Value};

use crate::wire::scripts;

/// A question that changes nothing and needs no more permissions than any script.
const ECHO: &str = "return ARGV[1]";

/// Takes the answer out of a script's reply; the refusal, if it was not run.
///
/// # Errors
/// If it belongs to another question.
pub(crate) fn answer(number: u64, reply: Value) -> RedisResult<Value> {
    match reply {
        Value::Array(parts) => match <[Value; 2]>::try_from(parts) {
            Ok([answer, echo]) if is_number(&echo, number) => Ok(answer),
            _ => Err(out_of_step()),
        },
        Value::ServerError(_) => Ok(reply),
        _ => Err(out_of_step()),
    }
}

/// Asks for nothing but the number.
pub(crate) fn echo(number: u64) -> Cmd {
    let mut echo = redis::cmd("EVAL");
    echo.arg(ECHO).arg(0).arg(number);
    echo
}

/// Judges the reply to [`echo`]. A server that does not run scripts for this user does not tell.
///
/// # Errors
/// If it belongs to another question.
pub(crate) fn heard(number: u64, reply: &Value) -> RedisResult<()> {
    let is_right = matches!(reply, Value::ServerError(_)) || is_number(reply, number);
    if is_right { Ok(()) } else { Err(out_of_step()) }
}

/// Judges the reply to [`echo`] behind a refusal: whether the refusal belongs to the question that was asked last. Where the server
/// refuses this one likewise, it refuses all scripts.
///
/// # Errors
/// If it does not.
pub(crate) fn is_confirmed(refused: &ServerError, number: u64, reply: &Value) -> RedisResult<()> {
    let is_right = match reply {
        Value::ServerError(again) => again.code() == refused.code(),
        reply => is_number(reply, number),
    };
    if is_right { Ok(()) } else { Err(out_of_step()) }
}

/// Requests that leave together, the last of which brings back a [number].
pub(crate) struct Numbered {
    pub(crate) requests: Pipeline,
    /// Of each request that is a script, and of what goes behind the others.
    numbers: Vec<Option<u64>>,
    /// How many of the replies are answers.
    answers: usize,
}

impl Numbered {
    /// `number` gives a new number each time.
    pub(crate) fn new(requests: &Pipeline, number: impl Fn() -> u64) -> Self {
        let answers = requests.len();
        let mut numbered = Pipeline::with_capacity(answers + 1);
        let mut numbers = Vec::with_capacity(answers + 1);
        for request in requests.cmd_iter() {
            let mut request = request.clone();
            let its_number = scripts::is_by_hash(&request).then(&number);
            its_number.iter().for_each(|number| _ = request.arg(*number));
            numbers.push(its_number);
            numbered.add_command(request);
        }
        if numbers.last() == Some(&None) {
            let its_number = number();
            numbered.add_command(echo(its_number));
            numbers.push(Some(its_number));
        }
        Self { requests: numbered, numbers, answers }
    }

    /// # Errors
    /// If a reply belongs to another request.
    pub(crate) fn answers(self, mut replies: Vec<Value>) -> RedisResult<Vec<Value>> {
        if let (Some(Some(number)), Some(echo)) = (self.numbers.get(self.answers), replies.get(self.answers)) {
            heard(*number, echo)?;
            replies.truncate(self.answers);
        }
        let answer = |(reply, number)| match number {
            Some(number) => answer(number, reply),
            None => Ok(reply),
        };
        replies.into_iter().zip(self.numbers).map(answer).collect()
    }
}

fn is_number(echo: &Value, number: u64) -> bool {
    let Value::BulkString(digits) = echo else { return false };
    str::from_utf8(digits).is_ok_and(|digits| digits.parse() == Ok(number))
}

/// The connection is of no use any more.
fn out_of_step() -> redis::RedisError {
    io::Error::new(io::ErrorKind::BrokenPipe, "an answer came that belongs to another question").into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_number_that_was_given_will_do() {
        let number = |text: &str| Value::BulkString(text.into());
        let reply = |echo| Value::Array(vec![Value::Int(7), echo]);
        assert_eq!(answer(12, reply(number("12"))), Ok(Value::Int(7)));
        for odd in [reply(number("11")), reply(number("")), reply(Value::Int(12)), number("12"), Value::Array(vec![])] {
            let error = answer(12, odd).expect_err("odd");
            assert!(error.is_unrecoverable_error(), "{error}");
        }
        assert!(heard(3, &number("3")).is_ok() && heard(3, &number("4")).is_err() && heard(3, &Value::Okay).is_err());
    }
}
