//! Asking several servers the same question about who is in charge.

use lockkit_core::{Error, ErrorKind, Result};
use std::time::Duration;
use tokio::{
    task::JoinSet,
    time::{Instant, timeout_at},
};

/// The answer of the highest epoch among those of a majority, or else among those that came within `grace`; at least
/// one is waited for in any case. Each task gives the epoch with its answer.
///
/// # Errors
/// If there is no answer: the error that says most.
///
/// # Cancellation
/// The tasks end.
pub(crate) async fn newest<T: 'static>(mut asked: JoinSet<Result<(u64, T)>>, grace: Duration) -> Result<T> {
    let majority = asked.len() / 2 + 1;
    let grace = Instant::now() + grace;
    let (mut best, mut answers): (Option<(u64, T)>, usize) = (None, 0);
    let mut failure = Error::new(ErrorKind::Unavailable, "no server answers");
    let mut is_told = false;
    while answers < majority {
        let next = match &best {
            None => asked.join_next().await,
            Some(_) => timeout_at(grace, asked.join_next()).await.unwrap_or(None),
        };
        match next {
            None => break,
            Some(Ok(Ok(answer))) => {
                answers += 1;
                best = match best {
                    Some(best) if best.0 >= answer.0 => Some(best),
                    _ => Some(answer),
                };
            }
            // That a name is unknown, or a login wrong, says more than that another does not answer.
            Some(Ok(Err(e))) if !is_told || !e.is_retryable() => (failure, is_told) = (e, true),
            Some(Ok(Err(_)) | Err(_)) => {}
        }
    }
    best.map(|(_, answer)| answer).ok_or(failure)
}
