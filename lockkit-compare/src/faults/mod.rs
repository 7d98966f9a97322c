//! What becomes of a lock when its holder or its server meets with a fault: several processes fight for it, one of them keeps it, and the
//! fault comes.

mod stage;

use std::time::Duration;

use lockkit::{Clock, SystemClock};
use lockkit_testkit::{faults::process, history::What, servers::Keep};
use tokio::time::sleep;

use crate::{
    delay::through_proxies,
    error::{Error, Result},
    plan::Plan,
    race::count_to,
    results::LostUpdates,
    takeover::TAKEN_WITHIN,
    targets::Target,
    timeline::{Fault, Struck, Timeline},
    worker::{Order, TICK},
    workers::WorkerProgram,
};
use stage::Stage;

/// How long the processes fight before one is told to keep the lock.
const BEFORE: Duration = Duration::from_millis(1_200);
/// How long one has kept the lock when the fault comes: longer than any does who was not told to.
const KEPT: Duration = Duration::from_millis(500);
/// How long one may wait for its turn.
const TURN_WITHIN: Duration = Duration::from_secs(60);
/// How long a fault goes on after another had the lock.
const GOES_ON: Duration = Duration::from_millis(600);
/// How long the processes fight after the fault.
const AFTER: Duration = Duration::from_millis(1_500);
/// The one that meets with the fault.
const VICTIM: usize = 0;

/// Inflicts all faults on processes that fight for locks of this store: first those of holders, all at once, for nearly all the time goes
/// by with waiting.
pub(crate) async fn inflict_all(program: &WorkerProgram, target: &Target, key: &str) -> Vec<(Fault, Result<Timeline>)> {
    let inflict = async |fault| (fault, inflict(fault, program, target, key).await);
    let (killed, frozen, cut) = tokio::join!(inflict(Fault::Killed), inflict(Fault::Frozen), inflict(Fault::Cut));
    vec![killed, frozen, cut, inflict(Fault::Restarted).await]
}

/// Inflicts one fault on processes that fight for a lock of this store, or on its server.
pub(crate) async fn inflict(fault: Fault, program: &WorkerProgram, target: &Target, key: &str) -> Result<Timeline> {
    let mut stage = Stage::new(format!("{key}/faults/{fault}"));
    let (through, proxies) = match fault {
        Fault::Cut => through_proxies(target).await?,
        _ => (target.url().to_owned(), Vec::new()),
    };
    for number in 0..Plan::PROCESSES {
        let url = if number == VICTIM { &through } else { target.url() };
        stage.enter(program, url, Plan::TAKEOVER_TTL).await?;
    }
    stage.watch(BEFORE).await?;
    await_keeper(&mut stage).await?;
    let struck = match fault {
        Fault::Killed => killed(&mut stage).await?,
        Fault::Frozen => frozen(&mut stage).await?,
        Fault::Cut => {
            let began = now();
            proxies.iter().for_each(|proxy| proxy.blackhole());
            await_successor(&mut stage).await?;
            stage.watch(GOES_ON).await?;
            proxies.iter().for_each(|proxy| proxy.heal());
            Struck { began, ended: Some(now()), victim: Some(VICTIM), forgets: false }
        }
        Fault::Restarted => restarted(&mut stage, target).await?,
    };
    stage.order(VICTIM, Order::Briefly);
    stage.watch(AFTER).await?;
    let names = stage.names();
    Timeline::of(fault, target.name(), names, &struck, stage.end().await?)
}

/// Has the victim keep the lock, and the others wait for it. Returns as it rests between two writes.
async fn await_keeper(stage: &mut Stage) -> Result<()> {
    let by = stage::name(VICTIM);
    let never = || Error::internal(format!("one of the processes did not get the lock within {TURN_WITHIN:?}"));
    stage.order(VICTIM, Order::Keep);
    // Whose way to the store is longer may never have its turn otherwise.
    stage.order_others(VICTIM, Order::Rest);
    if stage.has_held(VICTIM).is_none() {
        let granted =
            stage.until(TURN_WITHIN, |_, event| event.process == by && matches!(event.what, What::Granted { .. }));
        granted.await?.ok_or_else(never)?;
    }
    stage.order_others(VICTIM, Order::Briefly);
    let kept = stage.until(TURN_WITHIN, |stage, event| {
        event.process == by && event.what == What::Held && stage.has_held(VICTIM).is_some_and(|held| held >= KEPT)
    });
    kept.await?.ok_or_else(never)?;
    stage.during(sleep(TICK / 5)).await
}

/// Waits until another has the lock.
async fn await_successor(stage: &mut Stage) -> Result<()> {
    let by = stage::name(VICTIM);
    let taken = stage.until(TAKEN_WITHIN, |_, event| event.process != by && matches!(event.what, What::Granted { .. }));
    let never = || Error::internal(format!("the lock of a holder that was gone stayed locked for {TAKEN_WITHIN:?}"));
    taken.await?.map(drop).ok_or_else(never)
}

async fn killed(stage: &mut Stage) -> Result<Struck> {
    let victim = stage.process(VICTIM)?;
    stage.is_killed(VICTIM);
    process::kill(victim).map_err(|error| Error::system("kill a worker process", &error))?;
    let began = now();
    await_successor(stage).await?;
    Ok(Struck { began, ended: None, victim: Some(VICTIM), forgets: false })
}

async fn frozen(stage: &mut Stage) -> Result<Struck> {
    let victim = stage.process(VICTIM)?;
    let failed = |error| Error::system("stop a worker process", &error);
    process::freeze(victim).await.map_err(failed)?;
    let began = now();
    await_successor(stage).await?;
    stage.watch(GOES_ON).await?;
    process::thaw(victim).map_err(failed)?;
    Ok(Struck { began, ended: Some(now()), victim: Some(VICTIM), forgets: false })
}

/// The holder goes on as if nothing had happened for as long as it may, and at the longest for a ttl.
async fn restarted(stage: &mut Stage, target: &Target) -> Result<Struck> {
    let none = || Error::internal("a store without private servers was to be restarted");
    let server = target.servers().first().ok_or_else(none)?;
    let (began, by) = (now(), stage::name(VICTIM));
    stage.during(server.process().restart(Keep::Data)).await??;
    let ended = Some(now());
    let lost = |_: &Stage, event: &lockkit_testkit::history::Event| {
        event.process == by && matches!(event.what, What::Lost { .. })
    };
    if stage.has_held(VICTIM).is_some() {
        stage.until(Plan::TAKEOVER_TTL, lost).await?;
    }
    // What a majority of the servers keeps is not forgotten.
    let forgets = target.servers().len() == 1 && !server.keeps();
    Ok(Struck { began, ended, victim: None, forgets })
}

/// Lets the processes count, first without a lock, then under the lock of the store at this URL.
pub(crate) async fn lost_updates(program: &WorkerProgram, url: &str) -> Result<LostUpdates> {
    let (without, under) = (counted(program, None).await?, counted(program, Some(url)).await?);
    Ok(LostUpdates { without: Plan::UPDATES.abs_diff(without), under: Plan::UPDATES.abs_diff(under) })
}

async fn counted(program: &WorkerProgram, store: Option<&str>) -> Result<u64> {
    Ok(count_to(Plan::UPDATES, Plan::PROCESSES as u64, Plan::UPDATE_TAKES, program, store).await?.0)
}

/// The same in this process, with a lock for each that fights, and without a fault: to see whether what must not be would be seen.
#[cfg(test)]
pub(crate) async fn without_a_fault(locks: Vec<lockkit::Lock>, key: &str) -> Result<Timeline> {
    let mut stage = Stage::new(key.to_owned());
    locks.into_iter().for_each(|lock| stage.enter_here(lock));
    await_keeper(&mut stage).await?;
    let struck = Struck { began: now(), ended: None, victim: None, forgets: false };
    stage.order(VICTIM, Order::Briefly);
    stage.until(2 * AFTER, |stage, _| stage.holders() > 1).await?;
    stage.watch(AFTER / 2).await?;
    let names = stage.names();
    Timeline::of(Fault::Killed, "known", names, &struck, stage.end().await?)
}

fn now() -> u64 {
    SystemClock.now().as_nanos()
}
