//! `lockkit elect`: run a command on one of many hosts, and on another when that one is gone.

use std::{ffi::OsString, time::Duration};

use clap::Args as ClapArgs;
use lockkit::{Election, ErrorKind, HolderInfo, Leader, LockKey, Locker};
use rustix::process::Signal;
use serde_json::json;
use tokio::time::sleep;

use super::{
    UNDO_WITHIN,
    acquire::announce,
    admit, admit_store, borrow, exec,
    hold::HeldLease,
    holder,
    kind::Kind,
    nest::Enclosing,
    notify::RenewalNotify,
    own, signals,
    under::{Finish, Task, run_under},
    work::Ended,
};
use crate::{
    duration,
    exit::{Exit, Failure, USAGE, say, say_aside},
    interrupt,
    show::{is_printed, named, plain},
    signals::Signals,
    store::{self, StoreArgs, block_on},
    who,
};

/// How long a candidate waits before it asks again a store that could not be used.
const PAUSE: Duration = Duration::from_secs(1);

/// Run a command on one of many hosts, and on another when that one is gone
///
/// All that give the same name are candidates; one of them leads at a time, and CMD runs there. It sees LOCKKIT_KEY, LOCKKIT_FENCE (the
/// number of the term, higher than that of any before: hand it to what CMD writes to, so that a former leader is refused) and
/// LOCKKIT_TTL_MS, as under lockkit run.
///
/// If the lease can't be renewed, CMD and all that it started get TERM, then KILL, so that they are gone before the lease can lapse;
/// then lockkit elect is a candidate again. When CMD ends by itself, the term is over, another can lead, and CMD's exit status passes
/// through. Once a candidate has been connected, it waits for a store that is away, and asks again each second.
///
/// A signal ends a candidate that waits (exit status 128+N), except USR1 and USR2. A leader passes signals to CMD as lockkit run does; after
/// TERM or INT it is no candidate again.
///
/// With --observe no CMD is run: lockkit elect prints the leader, and each change that it sees, until it is interrupted. With --json
/// each line is an object with leader (null if nobody leads) and term (null if it is not known).
#[derive(Debug, ClapArgs)]
pub(crate) struct Args {
    #[command(flatten)]
    store: StoreArgs,
    /// Name of the election; its leader holds the lock of that name
    #[arg(long, value_name = "NAME", value_parser = who::key)]
    key: LockKey,
    /// How long others wait for a leader that has crashed
    #[arg(long, value_name = "TIME", value_parser = duration::parse, default_value = "30s")]
    ttl: Duration,
    /// The candidate's name, as shown to others; by default CMD@host:pid
    #[arg(long, value_name = "TEXT", value_parser = store::text, conflicts_with = "observe")]
    candidate: Option<String>,
    /// Print who leads, and each change
    #[arg(long, conflicts_with = "command")]
    observe: bool,
    /// How often the store is asked who leads
    #[arg(long, value_name = "TIME", value_parser = duration::between_looks, default_value = "1s", conflicts_with = "command")]
    every: Duration,
    /// Print JSON
    #[arg(long, conflicts_with = "command")]
    json: bool,
    /// The command and its arguments
    #[arg(last = true, required_unless_present = "observe", value_name = "CMD")]
    command: Vec<OsString>,
}

pub(crate) fn run(args: Args) -> Exit {
    if args.observe {
        return interrupt::block_on(async move { observe(&args).await.map(|()| 0) });
    }
    admit(&args.command)?;
    // A candidate that could not lead must not keep others from it.
    exec::find(&args.command)?;
    let ended = block_on(async {
        let mut signals =
            Signals::listen(&signals::FORWARDED).map_err(|error| Failure::system("listen for signals", &error))?;
        let notify = RenewalNotify::default();
        let builder = tokio::select! {
            builder = args.store.builder() => builder?,
            signal = ending(&mut signals) => return Ok(Ended::waiting(signal)),
        };
        let name: HolderInfo = holder(args.candidate.as_deref(), &args.command);
        let locker = builder.holder(name).observer(notify.clone()).build();
        admit_store(&locker)?;
        let result = stand(&args, &locker, notify, &mut signals).await;
        // What was asked for must not come to be granted to nobody, and what is left of a lease keeps others from leading.
        drop(locker.shutdown(UNDO_WITHIN).await);
        result
    })?;
    if ended.interrupted {
        exec::die_of_interrupt();
    }
    Ok(ended.code)
}

/// Campaigns, and leads, until CMD ends by itself or a signal ends this.
async fn stand(args: &Args, locker: &Locker, notify: RenewalNotify, signals: &mut Signals) -> Result<Ended, Failure> {
    let enclosing = Enclosing::from_env();
    let enclosed = tokio::select! {
        borrowed = borrow::borrow(locker, (&args.key, Kind::default()), &enclosing, &notify) => borrowed?.is_some(),
        signal = ending(signals) => return Ok(Ended::waiting(signal)),
    };
    if enclosed {
        let message = format!("an enclosing run holds {:?}: the candidate would wait for itself", args.key);
        return Err(Failure::new(USAGE, message));
    }
    let election = locker.election(args.key.as_str()).ttl(args.ttl);
    loop {
        // What is heard of renewals is of the term to come.
        notify.set_error(None);
        let hold = tokio::select! {
            hold = campaign(args, &election, locker, &notify) => hold?,
            signal = ending(signals) => return Ok(Ended::waiting(signal)),
        };
        say_aside(format!("leads {:?}, term {}", args.key, hold.fence));
        let task = Task { key: &args.key, once_per: None, command: &args.command };
        match run_under(&task, hold, locker, &enclosing, signals).await? {
            Finish::Ended(ended) => return Ok(ended),
            Finish::Stopped(why) => say(&why),
        }
        if let Some(signal) = signals.end() {
            say(&format!("ends, for it got signal {} while CMD ran", signal.as_raw()));
            return Ok(Ended::waiting(signal));
        }
    }
}

/// The next signal that ends a candidate. USR1 and USR2 are for CMD, which does not run.
async fn ending(signals: &mut Signals) -> Signal {
    loop {
        let signal = signals.next().await;
        if !matches!(signal, Signal::USR1 | Signal::USR2) {
            return signal;
        }
    }
}

/// Waits until this candidate leads, however long the store is away.
async fn campaign(
    args: &Args,
    election: &Election,
    locker: &Locker,
    notify: &RenewalNotify,
) -> Result<HeldLease, Failure> {
    let mut said = None;
    let asked = async {
        loop {
            let term = async {
                let guard = election.campaign().await?.into_guard();
                own(guard, args.ttl, locker, notify.clone()).await
            };
            match term.await {
                // A term that was lost before it began is none.
                Err(error) if error.is_retryable() || error.kind() == ErrorKind::Lost => complain(&mut said, &error),
                outcome => return Ok(outcome?),
            }
            sleep(PAUSE).await;
        }
    };
    let lock = locker.lock(args.key.as_str());
    tokio::select! {
        hold = asked => hold,
        never = announce(&lock, &args.key, &locker.info().capability.liveness) => match never {},
    }
}

/// Prints who leads, as long as somebody reads it.
async fn observe(args: &Args) -> Result<(), Failure> {
    let locker = args.store.locker().await?;
    admit_store(&locker)?;
    let mut leaders = locker.election(args.key.as_str()).observe(args.every);
    let mut said = None;
    loop {
        match leaders.next().await {
            Ok(leader) => {
                said = None;
                let line = if args.json { json_line(leader.as_ref()) } else { line(leader.as_ref()) };
                if !is_printed(|out| writeln!(out, "{line}"))? {
                    return Ok(());
                }
            }
            Err(error) if error.is_retryable() => complain(&mut said, &error),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Says an error, unless it was the last thing said.
fn complain(said: &mut Option<String>, error: &lockkit::Error) {
    let text = error.to_string();
    if said.as_ref() != Some(&text) {
        say(&format!("{text}; will keep trying"));
        *said = Some(text);
    }
}

fn line(leader: Option<&Leader>) -> String {
    let Some(leader) = leader else { return "nobody leads".to_owned() };
    let name = plain(named(leader.info.as_str()));
    match leader.term {
        Some(term) => format!("{name} leads, term {term}"),
        None => format!("{name} leads"),
    }
}

fn json_line(leader: Option<&Leader>) -> String {
    let name = leader.map(|leader| leader.info.as_str());
    json!({ "leader": name, "term": leader.and_then(|leader| leader.term).map(|term| term.get()) }).to_string()
}

#[cfg(test)]
mod tests {
    use lockkit::Fence;

    use super::*;

    #[test]
    fn a_leader_is_one_line_whatever_its_name() {
        let leader = |name: &str, term| Leader { info: HolderInfo::new(name), term, remaining: None };
        for (leader, text, json) in [
            (None, "nobody leads", r#"{"leader":null,"term":null}"#),
            (Some(leader("a", Some(Fence::new(7)))), "a leads, term 7", r#"{"leader":"a","term":7}"#),
            (Some(leader("", None)), "somebody leads", r#"{"leader":"","term":null}"#),
            (Some(leader("a\nb", None)), "a b leads", r#"{"leader":"a b","term":null}"#),
        ] {
            assert_eq!((line(leader.as_ref()).as_str(), json_line(leader.as_ref()).as_str()), (text, json));
        }
    }
}
