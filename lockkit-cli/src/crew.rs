//! Worker processes, seen from the process that gives the orders. `worker` is the other end.

use std::{
    process::{ExitStatus, Stdio},
    time::Duration,
};

use lockkit::{Clock, Moment, SystemClock};
use serde_json::Value;
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, Lines},
    process::{Child, ChildStdin, ChildStdout, Command},
};

use crate::{
    exit::{Failure, SOFTWARE, UNAVAILABLE, UNFIT, USAGE},
    worker::{STORE, VERB},
};

/// How long after the order the workers start: enough for all of them to have got it.
const NOTICE: Duration = Duration::from_millis(30);

/// One worker process. Dropping it kills the process.
#[derive(Debug)]
pub(crate) struct Worker {
    child: Child,
    orders: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Worker {
    /// Starts this program again as a worker on the store at this URL, or on none.
    pub(crate) fn spawn(args: &[String], store: Option<&str>) -> Result<Self, Failure> {
        let failed = |error| Failure::system("start a worker process", &error);
        let mut command = Command::new(std::env::current_exe().map_err(failed)?);
        command.arg(VERB).args(args).env_remove(STORE);
        if let Some(url) = store {
            command.env(STORE, url);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        // A Ctrl-C is for this process to answer, which then ends its workers.
        command.process_group(0);
        let mut child = command.spawn().map_err(failed)?;
        match (child.stdin.take(), child.stdout.take()) {
            (Some(orders), Some(answers)) => Ok(Self { child, orders, answers: BufReader::new(answers).lines() }),
            _ => Err(Failure::new(SOFTWARE, "a worker process has no pipes")),
        }
    }

    /// Gives one order.
    pub(crate) async fn tell(&mut self, order: &str) -> Result<(), Failure> {
        match self.orders.write_all(format!("{order}\n").as_bytes()).await {
            Ok(()) => Ok(()),
            Err(_) => Err(self.autopsy().await),
        }
    }

    /// Waits for the next answer.
    pub(crate) async fn hear(&mut self) -> Result<Value, Failure> {
        match self.answers.next_line().await {
            Ok(Some(line)) => serde_json::from_str(&line)
                .map_err(|_| Failure::new(SOFTWARE, format!("a worker process said {line:?}"))),
            Ok(None) | Err(_) => Err(self.autopsy().await),
        }
    }

    /// Why a worker ended that should not have.
    async fn autopsy(&mut self) -> Failure {
        let mut said = String::new();
        if let Some(stderr) = &mut self.child.stderr {
            // Nothing more can be done about an error here than to report what there is.
            drop(stderr.read_to_string(&mut said).await);
        }
        cause_of_death(&said, self.child.wait().await.ok())
    }
}

/// What a dead worker said last, with the code it ended with if that means something to the user.
fn cause_of_death(said: &str, status: Option<ExitStatus>) -> Failure {
    let last = said.lines().rev().find(|line| !line.trim().is_empty());
    let code = status.and_then(|status| status.code()).and_then(|code| u8::try_from(code).ok());
    match (last, status) {
        (Some(line), _) => {
            let code = code.filter(|code| [USAGE, UNAVAILABLE, UNFIT].contains(code)).unwrap_or(SOFTWARE);
            Failure::new(code, format!("a worker process failed: {}", line.trim_start_matches("lockkit: ")))
        }
        (None, Some(status)) => Failure::new(SOFTWARE, format!("a worker process ended early: {status}")),
        (None, None) => Failure::new(SOFTWARE, "a worker process ended early"),
    }
}

/// Starts all workers at the same moment, on the clock that they share, and returns that moment with their reports.
pub(crate) async fn start_together(workers: &mut [Worker]) -> Result<(Moment, Vec<Value>), Failure> {
    for worker in workers.iter_mut() {
        worker.hear().await?;
    }
    let start = SystemClock.now() + NOTICE;
    for worker in workers.iter_mut() {
        worker.tell(&start.as_nanos().to_string()).await?;
    }
    let mut reports = Vec::with_capacity(workers.len());
    for worker in workers.iter_mut() {
        reports.push(worker.hear().await?);
    }
    Ok((start, reports))
}

/// A whole number in a worker's report.
pub(crate) fn number(report: &Value, name: &str) -> Result<u64, Failure> {
    report[name].as_u64().ok_or_else(|| Failure::new(SOFTWARE, format!("a worker's report has no {name}: {report}")))
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    #[test]
    fn a_worker_that_died_is_quoted_in_one_line() {
        let refused = ExitStatus::from_raw(i32::from(UNAVAILABLE) << 8);
        let failure = cause_of_death("noise\nlockkit: connect: unavailable\n\n", Some(refused));
        assert_eq!((failure.code(), failure.message()), (UNAVAILABLE, "a worker process failed: connect: unavailable"));
        let killed = cause_of_death("", Some(ExitStatus::from_raw(9)));
        assert_eq!(killed.code(), SOFTWARE);
        assert!(killed.message().contains("signal: 9"), "{killed:?}");
    }
}
