//! Several tasks of several processes fight for one lock.

use std::sync::Arc;

use super::{Answer, Contend, Orders};
use crate::{
    contention::{Window, contend},
    error::{Error, Result},
    exclusive::Exclusive,
    ledger::FileLedger,
    plan::Plan,
};

pub(super) async fn run(job: Contend, store: Option<&str>, orders: Orders) -> Result<Answer> {
    let locker = super::connect(store).await?;
    super::warm_up(&locker, &job.key).await?;
    contend_for(locker.lock(&job.key).ttl(Plan::TTL), job, orders).await
}

/// The job with this lock, whoever it is from.
pub(super) async fn contend_for<X: Exclusive>(lock: X, job: Contend, mut orders: Orders) -> Result<Answer> {
    let ledger = FileLedger::open(&job.file).map_err(|error| Error::system("open the counter", &error))?;
    let start = orders.start().await?;
    let window = Window::after(start, job.warm_up, job.length);
    Ok(Answer::Contended(contend(&lock, job.tasks, window, Arc::new(ledger)).await?))
}
