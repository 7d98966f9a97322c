//! Asking several servers the same question about who is in charge.

use lockkit_core::{Error, ErrorKind, Result};
use std::time::Duration;
use tokio::{
    task::JoinSet,
    time::{Instant, timeout_at},
};

/// The answer of the highest configuration epoch among those of a majority, or else among those that came within `grace`; at least
/// one is waited for in any case. The others come with it. Each task gives the epoch with its answer.
///
/// Answers of the highest epoch that do not say the same, as `agree` tells, can't both be right, and which one came first means
/// nothing. Then the others are waited for within `grace`, too, and the answer of a majority counts.
///
/// # Errors
/// If there is no answer: the error that says most. `Unavailable` if there is no majority for one of several.
///
/// # Cancellation
/// The tasks end.
pub(crate) async fn newest<T: 'static>(
    mut asked: JoinSet<Result<(u64, T)>>,
    grace: Duration,
    agree: impl Fn(&T, &T) -> bool,
) -> Result<(T, Vec<T>)> {
    let majority = asked.len() / 2 + 1;
    let grace = Instant::now() + grace;
    let mut answers: Vec<(u64, T)> = Vec::new();
    let mut failure = Error::new(ErrorKind::Unavailable, "no server answers");
    let mut is_told = false;
    while answers.len() < majority || chosen(&answers, majority, &agree).is_none() {
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
    if answers.is_empty() {
        return Err(failure);
    }
    let undecided = || Error::new(ErrorKind::Unavailable, "the servers do not agree on who is in charge");
    let (_, newest) = answers.swap_remove(chosen(&answers, majority, &agree).ok_or_else(undecided)?);
    Ok((newest, answers.into_iter().map(|(_, answer)| answer).collect()))
}

/// Which answer counts: the last one of the highest epoch, if all of that epoch agree, or one that a majority agrees with.
fn chosen<T>(answers: &[(u64, T)], majority: usize, agree: impl Fn(&T, &T) -> bool) -> Option<usize> {
    let highest = answers.iter().map(|(epoch, _)| *epoch).max()?;
    let newest = || answers.iter().enumerate().filter(|(_, (epoch, _))| *epoch == highest);
    newest()
        .map(|(index, (_, answer))| (index, newest().filter(|(_, (_, other))| agree(answer, other)).count()))
        .rfind(|(_, like)| *like >= majority || *like == newest().count())
        .map(|(index, _)| index)
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

    fn same(one: &char, other: &char) -> bool {
        one == other
    }

    fn error(kind: ErrorKind) -> Result<(u64, char)> {
        Err(Error::new(kind, "no"))
    }

    #[tokio::test(start_paused = true)]
    async fn the_newest_of_a_majority_counts() {
        let start = Instant::now();
        let outcome = newest(asked(&[(1, Ok((7, 'a'))), (20, Ok((8, 'b'))), (5000, Ok((9, 'c')))]), GRACE, same).await;
        assert_eq!(outcome.expect("answers"), ('b', vec!['a']));
        assert!(start.elapsed() < GRACE, "the last one is not waited for");
    }

    #[tokio::test(start_paused = true)]
    async fn a_minority_is_better_than_nothing() {
        let silent = (60_000, Ok((9, 'c')));
        let outcome = newest(asked(&[(300, Ok((7, 'a'))), silent.clone(), silent]), GRACE, same).await;
        assert_eq!(outcome.expect("an answer"), ('a', vec![]));
    }

    #[tokio::test(start_paused = true)]
    async fn the_error_that_says_most_is_told() {
        let answers =
            [(1, error(ErrorKind::Unavailable)), (2, error(ErrorKind::Denied)), (3, error(ErrorKind::TimedOut))];
        assert_eq!(newest(asked(&answers), GRACE, same).await.expect_err("none").kind(), ErrorKind::Denied);
        assert_eq!(newest(asked(&[]), GRACE, same).await.expect_err("none").kind(), ErrorKind::Unavailable);
    }

    #[tokio::test(start_paused = true)]
    async fn the_order_of_arrival_decides_nothing() {
        let tie = [(1, Ok((7, 'a'))), (2, Ok((7, 'b')))];
        for last in ['a', 'b'] {
            let third = [(50, Ok((7, last)))];
            let outcome = newest(asked(&[&tie[..], &third].concat()), GRACE, same).await;
            assert_eq!(outcome.expect("a majority").0, last);
        }
        let newer = [(50, Ok((8, 'c')))];
        assert_eq!(newest(asked(&[&tie[..], &newer].concat()), GRACE, same).await.expect("one is newer").0, 'c');
        let late = [(5000, Ok((7, 'a')))];
        let error = newest(asked(&[&tie[..], &late].concat()), GRACE, same).await.expect_err("no majority");
        assert_eq!(error.kind(), ErrorKind::Unavailable);
    }
}
