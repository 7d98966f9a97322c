//! Worker processes, seen from the process that gives the orders. [`worker`](crate::worker) is the other end.

use std::{
    ffi::OsString,
    io,
    path::PathBuf,
    process::{ExitStatus, Stdio},
    time::Duration,
};

use lockkit::{Clock, Moment, SystemClock};
use rustix::{
    io::Errno,
    process::{Pid, Signal, kill_process},
};
use serde::Serialize;
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines},
    process::{Child, ChildStderr, ChildStdin, ChildStdout, Command},
    task::{JoinHandle, JoinSet},
    time::timeout,
};

use crate::{
    error::{Error, ErrorKind, Result},
    worker::{Answer, Assignment, Job},
};

/// The program that worker processes run: one that calls [`worker::run`](crate::worker::run) when it is started like this.
#[derive(Clone, Debug)]
pub struct WorkerProgram {
    program: PathBuf,
    args: Vec<OsString>,
    /// Variables of this process's environment that workers are not to have.
    without: Vec<OsString>,
}

impl WorkerProgram {
    /// This program, started with these arguments.
    ///
    /// # Errors
    /// [`Unavailable`](crate::ErrorKind::Unavailable) if the system does not tell where this program is.
    pub fn this<A: Into<OsString>>(args: impl IntoIterator<Item = A>) -> Result<Self> {
        let program = this_program().map_err(|error| Error::system("start a worker process", &error))?;
        Ok(Self { program, args: args.into_iter().map(Into::into).collect(), without: Vec::new() })
    }

    /// Another program, which does the jobs of a worker.
    pub(crate) fn of<A: Into<OsString>>(program: &str, args: impl IntoIterator<Item = A>) -> Self {
        Self { program: program.into(), args: args.into_iter().map(Into::into).collect(), without: Vec::new() }
    }

    /// Keeps a variable of the environment from the workers: one that may have a password in it, such as the URL of a store.
    #[must_use]
    pub fn without_variable(mut self, name: impl Into<OsString>) -> Self {
        self.without.push(name.into());
        self
    }

    fn command(&self) -> Result<Command> {
        if std::env::var_os(MARK).is_some() {
            let why =
                "a worker process was to start workers: its program has to call lockkit_compare::worker::run instead";
            return Err(Error::new(ErrorKind::InvalidInput, why));
        }
        let mut command = Command::new(&self.program);
        command.args(&self.args).env(MARK, "1");
        for name in &self.without {
            command.env_remove(name);
        }
        Ok(command)
    }
}

/// The program that this process runs. On Linux that is the same one also when its file was replaced meanwhile, as by a build or an
/// upgrade: what the workers do would then be measured of another program than the rest.
pub(crate) fn this_program() -> io::Result<PathBuf> {
    if cfg!(target_os = "linux") { Ok("/proc/self/exe".into()) } else { std::env::current_exe() }
}

/// The variable that a worker process is known by. Without it, a program that takes no notice of its arguments would start
/// workers that start workers.
const MARK: &str = "LOCKKIT_COMPARE_WORKER";
/// How long after the order the workers start: enough for all of them to have got it.
const NOTICE: Duration = Duration::from_millis(30);
/// How long a worker may take to prepare, or to get a lock that is free. It is longer than a worker's own bounds, so that
/// only one that hangs takes longer.
const PATIENCE: Duration = Duration::from_secs(180);
/// How long a worker that was killed may take to end.
const END_WITHIN: Duration = Duration::from_secs(5);

/// One worker process. Dropping it kills the process.
#[derive(Debug)]
pub(crate) struct Worker {
    child: Child,
    orders: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
    /// Reads all that the worker says on stderr, so that it never waits there, and returns the last line.
    last_words: JoinHandle<Option<String>>,
}

impl Worker {
    /// Starts a worker, and gives it its job on the store at this URL, or on none.
    pub(crate) async fn start(program: &WorkerProgram, job: Job, store: Option<&str>) -> Result<Self> {
        let mut command = program.command()?;
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        // A Ctrl-C is for this process to answer, which then ends its workers.
        command.process_group(0);
        let mut child = command.spawn().map_err(|error| Error::system("start a worker process", &error))?;
        let (Some(orders), Some(answers), Some(errors)) =
            (child.stdin.take(), child.stdout.take(), child.stderr.take())
        else {
            return Err(Error::internal("a worker process has no pipes"));
        };
        let (answers, last_words) = (BufReader::new(answers).lines(), tokio::spawn(last_line(errors)));
        let mut worker = Self { child, orders, answers, last_words };
        worker.tell(&Assignment { job, store: store.map(str::to_owned) }).await?;
        Ok(worker)
    }

    /// Gives one order.
    pub(crate) async fn tell(&mut self, order: &(impl Serialize + Sync)) -> Result<()> {
        let order = serde_json::to_string(order).map_err(|error| Error::internal(error.to_string()))?;
        match timeout(PATIENCE, self.orders.write_all(format!("{order}\n").as_bytes())).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) => Err(self.autopsy().await),
            Err(_) => Err(silent()),
        }
    }

    /// Waits for the answer to an order that is carried out in moments.
    pub(crate) async fn hear_soon(&mut self) -> Result<Answer> {
        timeout(PATIENCE, self.hear()).await.unwrap_or_else(|_| Err(silent()))
    }

    /// The number of its process; none once its end was noticed.
    pub(crate) fn process(&self) -> Option<u32> {
        self.child.id()
    }

    /// Ends it, without a word.
    pub(crate) fn kill(&mut self) -> Result<()> {
        self.child.start_kill().map_err(|error| Error::system("kill a worker process", &error))
    }

    /// Stops it, until it is [thawed](Self::thaw).
    pub(crate) fn freeze(&self) -> Result<()> {
        self.signal(Signal::STOP)
    }

    pub(crate) fn thaw(&self) -> Result<()> {
        self.signal(Signal::CONT)
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        // It is not reaped before it is dropped, so that its number is no other's.
        let pid = self.child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
        let sent = pid.map_or(Err(Errno::SRCH), |pid| kill_process(pid, signal));
        sent.map_err(|error| Error::system("stop a worker process", &error.into()))
    }

    /// Waits for the next answer, for as long as the worker lives. Nothing is lost of it if the waiting is dropped.
    pub(crate) async fn hear(&mut self) -> Result<Answer> {
        match self.answers.next_line().await {
            Ok(Some(line)) => match serde_json::from_str(&line) {
                Ok(Answer::Failed { kind, message }) => {
                    // No lease of the caller's was lost.
                    let kind = if kind == ErrorKind::Lost { ErrorKind::Internal } else { kind };
                    Err(Error::new(kind, format!("a worker process failed: {message}")))
                }
                Ok(answer) => Ok(answer),
                // It is not repeated: nobody knows what it is.
                Err(_) => {
                    Err(Error::internal("a worker process said what is no answer: its program has to be a worker"))
                }
            },
            Ok(None) | Err(_) => Err(self.autopsy().await),
        }
    }

    /// Why a worker ended, or does not talk any more. It has ended then.
    async fn autopsy(&mut self) -> Error {
        // No more than to report what there is can be done about an error here. It keeps its own status if it has ended.
        let ended = timeout(Duration::from_millis(100), self.child.wait()).await;
        if ended.is_err() {
            drop(self.child.start_kill());
        }
        let status = timeout(END_WITHIN, self.child.wait()).await.ok().and_then(std::io::Result::ok);
        // A process that it started may have its stderr, and go on.
        let said = timeout(END_WITHIN, &mut self.last_words).await.ok().and_then(std::result::Result::ok).flatten();
        cause_of_death(said.as_deref(), status)
    }
}

async fn last_line(errors: ChildStderr) -> Option<String> {
    let (mut lines, mut last) = (BufReader::new(errors).lines(), None);
    while let Ok(Some(line)) = lines.next_line().await {
        if !line.trim().is_empty() {
            last = Some(line);
        }
    }
    last
}

/// The error for a worker that died without reporting one; it quotes the last line of its stderr.
fn cause_of_death(said: Option<&str>, status: Option<ExitStatus>) -> Error {
    Error::internal(match (said, status) {
        (Some(line), _) => format!("a worker process failed: {line}"),
        (None, Some(status)) => format!("a worker process ended early: {status}"),
        (None, None) => "a worker process ended early".to_owned(),
    })
}

fn silent() -> Error {
    Error::internal(format!("a worker process did not answer within {PATIENCE:?}"))
}

/// A worker said something else than what its job ends with.
pub(crate) fn unexpected(answer: &Answer) -> Error {
    Error::internal(format!("a worker process answered {answer:?}"))
}

/// Starts all workers at the same moment, on the clock that they share, and returns that moment with their last answers.
pub(crate) async fn start_together(workers: Vec<Worker>) -> Result<(Moment, Vec<Answer>)> {
    let mut ready = Vec::new();
    for (worker, _) in hear_all(workers, Some(PATIENCE)).await? {
        ready.push(worker);
    }
    let start = SystemClock.now() + NOTICE;
    for worker in &mut ready {
        worker.tell(&start.as_nanos()).await?;
    }
    let ended = hear_all(ready, None).await?;
    Ok((start, ended.into_iter().map(|(_, answer)| answer).collect()))
}

/// Waits for the next answer of each worker, in the order of the workers. The first one that fails ends the waiting: the
/// others may wait for it.
async fn hear_all(workers: Vec<Worker>, patience: Option<Duration>) -> Result<Vec<(Worker, Answer)>> {
    let mut hearing: JoinSet<Result<_>> = JoinSet::new();
    for (index, mut worker) in workers.into_iter().enumerate() {
        hearing.spawn(async move {
            let answer = match patience {
                Some(patience) => timeout(patience, worker.hear()).await.unwrap_or_else(|_| Err(silent())),
                None => worker.hear().await,
            };
            Ok((index, worker, answer?))
        });
    }
    let mut heard = Vec::new();
    while let Some(ended) = hearing.join_next().await {
        heard.push(ended??);
    }
    heard.sort_by_key(|(index, ..)| *index);
    Ok(heard.into_iter().map(|(_, worker, answer)| (worker, answer)).collect())
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    const READY: &str = r#"echo '"Ready"'"#;

    fn shell(script: &str) -> WorkerProgram {
        WorkerProgram { program: "sh".into(), args: vec!["-c".into(), script.into()], without: Vec::new() }
    }

    async fn start(program: &WorkerProgram) -> Worker {
        Worker::start(program, Job::Take { key: "k".into(), in_order: false }, Some("memory:")).await.expect("sh")
    }

    #[test]
    fn a_worker_that_died_is_quoted_in_one_line() {
        let panicked = cause_of_death(Some("no memory"), Some(ExitStatus::from_raw(101 << 8)));
        assert_eq!(panicked.to_string(), "a worker process failed: no memory");
        let killed = cause_of_death(None, Some(ExitStatus::from_raw(9)));
        assert_eq!(killed.kind(), ErrorKind::Internal);
        assert!(killed.to_string().contains("signal: 9"), "{killed:?}");
    }

    #[tokio::test]
    async fn a_worker_tells_why_it_failed() {
        for (said, kind) in [("Unfit", ErrorKind::Unfit), ("Lost", ErrorKind::Internal)] {
            let report = format!(r#"read order; echo '{{"Failed":{{"kind":"{said}","message":"no table"}}}}'"#);
            let failure = start(&shell(&report)).await.hear().await.expect_err("it failed");
            assert_eq!((failure.kind(), &*failure.to_string()), (kind, "a worker process failed: no table"));
        }
    }

    #[tokio::test]
    async fn what_is_no_answer_is_not_repeated() {
        let mut worker = start(&shell("read order; echo $order")).await;
        let failure = worker.hear().await.expect_err("no answer").to_string();
        assert!(failure.contains("has to be a worker") && !failure.contains("memory:"), "{failure}");
    }

    #[tokio::test]
    async fn a_worker_that_says_much_on_stderr_is_heard() {
        let program = shell(&format!("read order; seq 100000 >&2; {READY}; read order; echo done >&2"));
        let mut worker = start(&program).await;
        assert!(matches!(worker.hear().await, Ok(Answer::Ready)));
        worker.tell(&false).await.expect("told");
        let failure = worker.hear().await.expect_err("it ended").to_string();
        assert_eq!(failure, "a worker process failed: done");
    }

    #[tokio::test]
    async fn the_end_of_one_worker_ends_the_waiting_for_the_others() {
        let (waits, dies) = (shell("read order; read forever"), shell("read order; echo broken >&2"));
        let workers = vec![start(&waits).await, start(&dies).await];
        let failure = start_together(workers).await.expect_err("the second died");
        assert_eq!(failure.to_string(), "a worker process failed: broken");
    }

    #[tokio::test(start_paused = true)]
    async fn a_worker_that_never_gets_ready_is_an_error() {
        let failure = start_together(vec![start(&shell("read order; read forever")).await]).await;
        assert!(failure.expect_err("it is silent").to_string().contains("did not answer within 180s"));
    }

    #[tokio::test]
    async fn the_answers_come_in_the_order_of_the_workers() {
        let at = |at: u64, after: &str| {
            shell(&format!(r#"read order; {READY}; read start; {after} echo '{{"Counted":{{"at":{at}}}}}'"#))
        };
        let mark = tempfile::NamedTempFile::new().expect("a file");
        let path = mark.path().display().to_string();
        // The first answers after the second.
        let first = start(&at(1, &format!("while [ ! -s {path} ]; do :; done;"))).await;
        let second = start(&at(2, &format!("echo 1 > {path};"))).await;
        let (_, answers) = start_together(vec![first, second]).await.expect("both answer");
        assert!(matches!(answers[..], [Answer::Counted { at: 1 }, Answer::Counted { at: 2 }]), "{answers:?}");
    }

    #[tokio::test]
    async fn a_variable_is_kept_from_workers() {
        let program = shell(r#"read order; echo "[${HOME-none}]" >&2"#);
        for (program, says) in [(program.clone(), false), (program.without_variable("HOME"), true)] {
            let failure = start(&program).await.hear().await.expect_err("it ended").to_string();
            assert_eq!(failure.ends_with("[none]"), says, "{failure}");
        }
    }
}
