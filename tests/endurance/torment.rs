//! The faults that the child with the leases meets, and the conditions that must hold after each.

use std::{process::Stdio, time::Duration};

use lockkit_testkit::{BoxError, faults::process};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines},
    process::{Child, ChildStdin, ChildStdout, Command},
    time::{Instant, sleep, timeout},
};

use crate::{
    FEW,
    child::{self, LONG, Orders, Report},
    target::Target,
};

/// How long the process stands still: for longer than the tasks' leases last, and for less than what is left of the others
/// when they are renewed.
const PAUSE: Duration = Duration::from_secs(4);
/// The first answer comes when all leases were taken.
const TAKEN_WITHIN: Duration = Duration::from_secs(900);
/// After a fault each task must have had its lock within so long: all that wait for one lock take turns, and a lease may
/// have to lapse first.
const SERVED_WITHIN: Duration = Duration::from_secs(30);
/// Descriptors may come and go with the connections of a pool.
const MAY_GROW: usize = 8;

/// Goes through all rounds.
pub(crate) async fn run(target: &Target, orders: Orders, rounds: usize) -> Result<(), BoxError> {
    let rival = Orders { leases: 0, tasks: 10.min(orders.tasks), ..orders.clone() };
    let mut big = Process::start(&orders)?;
    let mut rival = Process::start(&rival)?;
    let start = Instant::now();
    big.ask(TAKEN_WITHIN).await?;
    println!("{}: {} leases after {:.1} s", target.kind.name(), orders.leases, start.elapsed().as_secs_f64());
    let mut before: Option<Report> = None;
    for round in 1..=rounds {
        match round % 3 {
            1 => target.cut().await,
            2 => big.pause().await?,
            _ => target.fail_over().await?,
        }
        all_served(&mut [&mut big, &mut rival]).await?;
        // By then each lease has been renewed since the fault, or was lost. The few of a short test are renewed at once.
        if orders.leases > FEW {
            sleep(LONG).await;
        }
        let report = big.ask(SERVED_WITHIN).await?;
        println!("{}: round {round}: {}", target.kind.name(), tell(&report));
        // After two rounds all is there that is made once, such as connections.
        judge(&report, before.as_ref()).map_err(|wrong| format!("round {round}: {wrong}: {}", tell(&report)))?;
        if round == 2 {
            before = Some(report);
        }
    }
    big.end().await?;
    rival.end().await
}

fn judge(report: &Report, before: Option<&Report>) -> Result<(), String> {
    if !report.lost.is_empty() {
        return Err("leases were lost that nobody took".to_owned());
    }
    if let Some(before) = before {
        if report.descriptors > before.descriptors + MAY_GROW {
            return Err(format!("{} descriptors were open after two rounds", before.descriptors));
        }
        // A tenth for what the allocator does not give back.
        if report.memory > before.memory + before.memory / 10 + 4096 {
            return Err(format!("{} KiB were in use after two rounds", before.memory));
        }
    }
    Ok(())
}

/// Waits until each task of all has had its lock again, twice: it may just have had it.
async fn all_served(processes: &mut [&mut Process]) -> Result<(), BoxError> {
    for process in processes {
        let before = process.ask(SERVED_WITHIN).await?.served;
        let start = Instant::now();
        loop {
            let report = process.ask(SERVED_WITHIN).await?;
            let waiting = report.served.iter().zip(&before).filter(|(now, before)| **now < **before + 2).count();
            if waiting == 0 {
                break;
            }
            if start.elapsed() > SERVED_WITHIN {
                return Err(
                    format!("{waiting} tasks were not served within {SERVED_WITHIN:?}: {}", tell(&report)).into()
                );
            }
            sleep(Duration::from_millis(50)).await;
        }
    }
    Ok(())
}

fn tell(report: &Report) -> String {
    let Report { lost, lost_by_tasks, errors, served, longest_wait, descriptors, memory, .. } = report;
    let least = served.iter().min().copied().unwrap_or(0);
    let sum: u64 = served.iter().sum();
    format!(
        "lost {lost:?}, by tasks {lost_by_tasks:?}, {sum} grants to tasks (least {least}), longest wait {longest_wait} ms, \
         {errors} errors, {descriptors} descriptors, {} MiB",
        memory / 1024
    )
}

/// A child that is asked how it is. It is killed when this is dropped.
#[derive(Debug)]
struct Process {
    child: Child,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
}

impl Process {
    fn start(orders: &Orders) -> Result<Self, BoxError> {
        let mut command = Command::new(std::env::current_exe()?);
        command.env(child::ORDERS, serde_json::to_string(orders)?);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit()).kill_on_drop(true);
        // Of its own, so that a stopped one does not outlive a test that is killed: the kernel ends a group of stopped
        // processes that nobody is left to continue.
        command.process_group(0);
        let mut child = command.spawn()?;
        let input = child.stdin.take().ok_or("no input")?;
        let output = BufReader::new(child.stdout.take().ok_or("no output")?).lines();
        Ok(Self { child, input, output })
    }

    async fn ask(&mut self, within: Duration) -> Result<Report, BoxError> {
        self.input.write_all(b"how\n").await?;
        let report = self.answer(within).await?;
        match report.broken {
            Some(why) => Err(format!("a task ended: {why}").into()),
            None => Ok(report),
        }
    }

    async fn answer(&mut self, within: Duration) -> Result<Report, BoxError> {
        let line =
            timeout(within, self.output.next_line()).await.map_err(|_| format!("no answer within {within:?}"))??;
        Ok(serde_json::from_str(&line.ok_or("a child has ended")?)?)
    }

    async fn pause(&self) -> Result<(), BoxError> {
        let pid = self.child.id().ok_or("a child has ended")?;
        process::freeze(pid).await?;
        sleep(PAUSE).await;
        Ok(process::thaw(pid)?)
    }

    /// Tells it to release all that it has, and waits until it has ended.
    async fn end(&mut self) -> Result<(), BoxError> {
        self.input.write_all(b"end\n").await?;
        self.answer(TAKEN_WITHIN).await?;
        let status = self.child.wait().await?;
        if status.success() { Ok(()) } else { Err(format!("a child ended with {status}").into()) }
    }
}
