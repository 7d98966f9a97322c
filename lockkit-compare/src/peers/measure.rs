//! The measures of a peer: those that its lock can be compared in.

use std::{path::Path, time::Duration};

use lockkit::Moment;

use super::PeerProgram;
use crate::{
    error::Result,
    plan::{Plan, Step},
    processes::{self, LEAST_HAND_OFFS},
    results::Results,
    stats::Latencies,
    worker::{Answer, Job},
    workers::{Worker, WorkerProgram, unexpected},
};

/// How long the waiter of a hand-off is left alone at least: it asks in vain, and says that it wants to be woken if it can be.
const SETTLE: Duration = Duration::from_millis(10);

/// A peer while it is measured.
#[derive(Debug)]
pub(crate) struct Measured {
    program: PeerProgram,
    /// The process that takes and releases alone. It lives for all rounds: a virtual machine that has just been started is slow.
    alone: Option<Worker>,
}

impl Measured {
    pub(crate) fn new(program: PeerProgram) -> Self {
        Self { program, alone: None }
    }

    /// Takes one of the measures [of peers](Step::OF_PEERS).
    pub(crate) async fn take(
        &mut self,
        step: Step,
        at: &At<'_>,
        plan: &Plan,
        program: &WorkerProgram,
        results: &mut Results,
    ) -> Result<()> {
        let program = self.program.other.as_ref().map_or(program, |(other, _)| other).clone();
        let slice = plan.process_slice;
        match step {
            Step::Pair => self.pairs(&program, at, plan.slice, results).await?,
            Step::Processes => {
                results.processes.push(processes::contest(&program, at.url, at.key, slice, at.dir).await?);
            }
            Step::HandOff => results.hand_off.add(hand_offs(&program, at, self.program.peer.rest(), slice).await?),
            _ => {}
        }
        Ok(())
    }

    async fn pairs(
        &mut self,
        program: &WorkerProgram,
        at: &At<'_>,
        slice: Duration,
        results: &mut Results,
    ) -> Result<()> {
        let worker = match &mut self.alone {
            Some(worker) => worker,
            none => none.insert(start(program, Job::Pairs { key: format!("{}/pair", at.key), slice }, at.url).await?),
        };
        worker.tell(&true).await?;
        let (acquire, release) = match worker.hear_soon().await? {
            Answer::Paired { acquire, release } => (acquire, release),
            answer => return Err(unexpected(&answer)),
        };
        let rounds = |samples: &mut dyn Iterator<Item = u64>| {
            let mut latencies = Latencies::new();
            samples.for_each(|nanos| latencies.record(Duration::from_nanos(nanos)));
            latencies
        };
        results.pair.add(rounds(&mut acquire.iter().zip(&release).map(|(acquire, release)| acquire + release)));
        results.acquire.add(rounds(&mut acquire.into_iter()));
        results.release.add(rounds(&mut release.into_iter()));
        Ok(())
    }
}

/// Where a peer is measured.
#[derive(Clone, Copy, Debug)]
pub(crate) struct At<'a> {
    pub(crate) url: &'a str,
    /// What the names of its locks start with.
    pub(crate) key: &'a str,
    pub(crate) dir: &'a Path,
}

/// A process that is ready for orders.
async fn start(program: &WorkerProgram, job: Job, url: &str) -> Result<Worker> {
    let mut worker = Worker::start(program, job, Some(url)).await?;
    match worker.hear_soon().await? {
        Answer::Ready => Ok(worker),
        answer => Err(unexpected(&answer)),
    }
}

/// The time from the call that releases a lock in one process to the moment when a waiter in another has it.
async fn hand_offs(program: &WorkerProgram, at: &At<'_>, rest: Duration, slice: Duration) -> Result<Latencies> {
    let key = format!("{}/hand-off", at.key);
    let mut giver = start(program, Job::Give { key: key.clone() }, at.url).await?;
    let mut taker = start(program, Job::Take { key, in_order: false }, at.url).await?;
    let (mut latencies, began) = (Latencies::new(), tokio::time::Instant::now());
    for done in 0_u32.. {
        // A waiter that rests between two questions is met at another moment of its rest each time.
        let phase = (f64::from(done) * 0.618_034).fract();
        let took = hand_off(&mut giver, &mut taker, SETTLE + rest.mul_f64(phase)).await?;
        // The first goes are warm-up.
        if done >= 3 {
            latencies.record(took);
        }
        if done >= 3 + LEAST_HAND_OFFS && began.elapsed() >= slice {
            break;
        }
    }
    for worker in [&mut giver, &mut taker] {
        worker.tell(&false).await?;
        worker.hear_soon().await?;
    }
    Ok(latencies)
}

async fn hand_off(giver: &mut Worker, taker: &mut Worker, settle: Duration) -> Result<Duration> {
    let moment = |answer| match answer {
        Answer::Took { at } | Answer::Gave { at } => Ok(Moment::from_nanos(at)),
        answer => Err(unexpected(&answer)),
    };
    giver.tell(&true).await?;
    moment(giver.hear_soon().await?)?;
    taker.tell(&true).await?;
    tokio::time::sleep(settle).await;
    giver.tell(&true).await?;
    let gave = moment(giver.hear_soon().await?)?;
    Ok(moment(taker.hear_soon().await?)?.since(gave))
}
