//! Worker processes, seen from the process that gives the orders. [`worker`](crate::worker) is the other end.

use std::{
    ffi::OsString,
    path::PathBuf,
    process::{ExitStatus, Stdio},
    time::Duration,
};

use lockkit::{Clock, Moment, SystemClock};
use serde::Serialize;
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, Lines},
    process::{Child, ChildStdin, ChildStdout, Command},
};

use crate::{
    error::{Error, ErrorKind, Result},
    worker::{Answer, Job, Order},
};

/// The program that worker processes run: one that calls [`worker::run`](crate::worker::run) when it is started like this.
#[derive(Clone, Debug)]
pub struct WorkerProgram {
    program: PathBuf,
    args: Vec<OsString>,
}

impl WorkerProgram {
    /// This program, started with these arguments.
    ///
    /// # Errors
    /// [`Unavailable`](crate::ErrorKind::Unavailable) if the system does not tell where this program is.
    pub fn this<A: Into<OsString>>(args: impl IntoIterator<Item = A>) -> Result<Self> {
        let program = std::env::current_exe().map_err(|error| Error::system("start a worker process", &error))?;
        Ok(Self { program, args: args.into_iter().map(Into::into).collect() })
    }
}

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
    /// Starts a worker, and gives it its job on the store at this URL, or on none.
    pub(crate) async fn start(program: &WorkerProgram, job: Job, store: Option<&str>) -> Result<Self> {
        let mut command = Command::new(&program.program);
        command.args(&program.args);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        // A Ctrl-C is for this process to answer, which then ends its workers.
        command.process_group(0);
        let mut child = command.spawn().map_err(|error| Error::system("start a worker process", &error))?;
        let (Some(orders), Some(answers)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(Error::internal("a worker process has no pipes"));
        };
        let mut worker = Self { child, orders, answers: BufReader::new(answers).lines() };
        worker.tell(&Order { job, store: store.map(str::to_owned) }).await?;
        Ok(worker)
    }

    /// Gives one order.
    pub(crate) async fn tell(&mut self, order: &(impl Serialize + Sync)) -> Result<()> {
        let order = serde_json::to_string(order).map_err(|error| Error::internal(error.to_string()))?;
        match self.orders.write_all(format!("{order}\n").as_bytes()).await {
            Ok(()) => Ok(()),
            Err(_) => Err(self.autopsy().await),
        }
    }

    /// Waits for the next answer.
    pub(crate) async fn hear(&mut self) -> Result<Answer> {
        match self.answers.next_line().await {
            Ok(Some(line)) => match serde_json::from_str(&line) {
                Ok(Answer::Failed { kind, message }) => {
                    // No lease of the caller's was lost.
                    let kind = if kind == ErrorKind::Lost { ErrorKind::Internal } else { kind };
                    Err(Error::new(kind, format!("a worker process failed: {message}")))
                }
                Ok(answer) => Ok(answer),
                Err(_) => Err(Error::internal(format!("a worker process said {line:?}"))),
            },
            Ok(None) | Err(_) => Err(self.autopsy().await),
        }
    }

    /// Why a worker ended that should not have.
    async fn autopsy(&mut self) -> Error {
        let mut said = String::new();
        if let Some(stderr) = &mut self.child.stderr {
            // Nothing more can be done about an error here than to report what there is.
            drop(stderr.read_to_string(&mut said).await);
        }
        cause_of_death(&said, self.child.wait().await.ok())
    }
}

/// What a worker said last that died without a report.
fn cause_of_death(said: &str, status: Option<ExitStatus>) -> Error {
    let last = said.lines().rev().find(|line| !line.trim().is_empty());
    Error::internal(match (last, status) {
        (Some(line), _) => format!("a worker process failed: {line}"),
        (None, Some(status)) => format!("a worker process ended early: {status}"),
        (None, None) => "a worker process ended early".to_owned(),
    })
}

/// A worker said something else than what its job ends with.
pub(crate) fn unexpected(answer: &Answer) -> Error {
    Error::internal(format!("a worker process answered {answer:?}"))
}

/// Starts all workers at the same moment, on the clock that they share, and returns that moment with their last answers.
pub(crate) async fn start_together(workers: &mut [Worker]) -> Result<(Moment, Vec<Answer>)> {
    for worker in workers.iter_mut() {
        worker.hear().await?;
    }
    let start = SystemClock.now() + NOTICE;
    for worker in workers.iter_mut() {
        worker.tell(&start.as_nanos()).await?;
    }
    let mut answers = Vec::with_capacity(workers.len());
    for worker in workers.iter_mut() {
        answers.push(worker.hear().await?);
    }
    Ok((start, answers))
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;
    use crate::worker::Under;

    #[test]
    fn a_worker_that_died_is_quoted_in_one_line() {
        let panicked = cause_of_death("noise\nno memory\n\n", Some(ExitStatus::from_raw(101 << 8)));
        assert_eq!(panicked.to_string(), "a worker process failed: no memory");
        let killed = cause_of_death("", Some(ExitStatus::from_raw(9)));
        assert_eq!(killed.kind(), ErrorKind::Internal);
        assert!(killed.to_string().contains("signal: 9"), "{killed:?}");
    }

    #[tokio::test]
    async fn a_worker_tells_why_it_failed() {
        for (said, kind) in [("Unfit", ErrorKind::Unfit), ("Lost", ErrorKind::Internal)] {
            let report = format!(r#"read order; echo '{{"Failed":{{"kind":"{said}","message":"no table"}}}}'"#);
            let program = WorkerProgram { program: "sh".into(), args: vec!["-c".into(), report.into()] };
            let job = Job::Take { key: "k".into() };
            let mut worker = Worker::start(&program, job, Some("memory:")).await.expect("sh");
            let failure = worker.hear().await.expect_err("it failed");
            assert_eq!((failure.kind(), &*failure.to_string()), (kind, "a worker process failed: no table"));
        }
    }

    #[tokio::test]
    async fn a_worker_that_is_none_is_quoted() {
        let program = WorkerProgram { program: "sh".into(), args: vec!["-c".into(), "read order; echo hello".into()] };
        let job = crate::worker::Count { file: "f".into(), times: 1, key: "k".into(), under: Under::Nothing };
        let mut worker = Worker::start(&program, Job::Count(job), None).await.expect("sh");
        assert!(worker.hear().await.expect_err("no answer").to_string().contains("hello"));
    }
}
