//! Asking several servers the same question about who is in charge.

use lockkit_core::{Error, ErrorKind, Result};
use std::time::Duration;
use tokio::{
    task::JoinSet,
    time::{Instant, timeout_at},
};

/// The answer of the highest epoch among those of a majority, or else among those that came within `grace`; at least
/// one is waited for in any case. The others come with it. Each task gives the epoch with its answer.
///
/// # Errors
/// If there is no answer: the error that says most.
///
/// # Cancellation
/// The tasks end.
pub(crate) async fn newest<T: 'static>(mut asked: JoinSet<Result<(u64, T)>>, grace: Duration) -> Result<(T, Vec<T>)> {
    let majority = asked.len() / 2 + 1;
    let grace = Instant::now() + grace;
    let mut answers: Vec<(u64, T)> = Vec::new();
    let mut failure = Error::new(ErrorKind::Unavailable, "no server answers");
    let mut is_told = false;
    while answers.len() < majority {
        let next = match answers.len() {
            0 => asked.join_next().await,
            _ => timeout_at(grace, asked.join_next()).await.unwrap_or(None),
        };
        match next {
            None => break,
            Some(Ok(Ok(answer))) => answers.push(answer),
            // That a name is unknown, or a login wrong, says more than that another does not answer.
            Some(Ok(Err(e))) if !is_told || !e.is_retryable() => (failure, is_told) = (e, true),
            Some(Ok(Err(_)) | Err(_)) => {}
        }
    }
    answers.sort_by_key(|(epoch, _)| *epoch);
    let mut answers: Vec<T> = answers.into_iter().map(|(_, answer)| answer).collect();
    answers.pop().map(|newest| (newest, answers)).ok_or(failure)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRACE: Duration = Duration::from_millis(100);

    fn asked(answers: &[(u64, Result<(u64, char)>)]) -> JoinSet<Result<(u64, char)>> {
        let mut asked = JoinSet::new();
        for (delay, answer) in answers.iter().cloned() {
            asked.spawn(async move {
                tokio::time::sleep(Duration::from_millis(delay)).await;
                answer
            });
        }
        asked
    }

    fn error(kind: ErrorKind) -> Result<(u64, char)> {
        Err(Error::new(kind, "no"))
    }

    #[tokio::test(start_paused = true)]
    async fn the_newest_of_a_majority_counts() {
        let start = Instant::now();
        let outcome = newest(asked(&[(1, Ok((7, 'a'))), (20, Ok((8, 'b'))), (5000, Ok((9, 'c')))]), GRACE).await;
        assert_eq!(outcome.expect("answers"), ('b', vec!['a']));
        assert!(start.elapsed() < GRACE, "the last one is not waited for");
    }

    #[tokio::test(start_paused = true)]
    async fn a_minority_is_better_than_nothing() {
        let silent = (60_000, Ok((9, 'c')));
        let outcome = newest(asked(&[(300, Ok((7, 'a'))), silent.clone(), silent]), GRACE).await;
        assert_eq!(outcome.expect("an answer"), ('a', vec![]));
    }

    #[tokio::test(start_paused = true)]
    async fn the_error_that_says_most_is_told() {
        let answers =
            [(1, error(ErrorKind::Unavailable)), (2, error(ErrorKind::Denied)), (3, error(ErrorKind::TimedOut))];
        assert_eq!(newest(asked(&answers), GRACE).await.expect_err("none").kind(), ErrorKind::Denied);
        assert_eq!(newest(asked(&[]), GRACE).await.expect_err("none").kind(), ErrorKind::Unavailable);
    }
}
