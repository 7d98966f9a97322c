//! Steps: what will happen is said first, and then asked for.

use std::io::{self, BufRead, IsTerminal, Write};

use lockkit::{
    ErrorKind,
    migrate::{Client, Migration, Phase, PhaseRecord, State, Step},
};

use super::{
    FinishArgs, Goal, StartArgs, StepArgs,
    drain::{bar, show},
};
use crate::{
    duration::spoken,
    exit::{Exit, Failure, UNAVAILABLE, USAGE, say},
    interrupt,
    show::{plain, tell},
};

/// Which way a step leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    Forward,
    Back,
}

pub(super) fn start(args: StartArgs) -> Exit {
    let start = args.settings.start();
    let text = format!(
        "Both stores will have the record of a migration, in the phase old. Nothing else changes.\n\
         Locks may last up to {}; each step out of the phase both takes {}.\n",
        spoken(start.max_ttl),
        spoken(start.drain()),
    );
    confirm(&text, args.yes)?;
    interrupt::block_on(async move {
        let record = args.stores.migration().await?.start(start).await?;
        // It may have been started before, and be under way.
        let next = match record.phase {
            Phase::Old => "Now deploy every service with the URL migrate:?from=URL&to=URL",
            Phase::Both | Phase::New => "It was started before; see lockkit migrate status",
        };
        tell(&format!("the phase is {}, its home is the {} store. {next}\n", record.phase, record.home))
    })
}

pub(super) fn step(args: StepArgs, way: Way) -> Exit {
    let stores = args.stores.clone();
    let State { record: before, has } =
        interrupt::block_on(async move { Ok(stores.migration().await?.state().await?) })?;
    // What was killed may be repeated: without a goal, it is not to lead any further. The other way is open.
    let led_here = match (before.phase, before.came_from) {
        (Phase::New, _) | (Phase::Both, Phase::Old) => Way::Forward,
        _ => Way::Back,
    };
    let is_repeated = args.to_phase.is_none() && way == led_here;
    let is_unfinished = is_repeated && has.iter().any(|has| matches!(has, Ok(false)));
    let goal = if is_unfinished { Goal::of(&before) } else { goal(&args, way, &before)? };
    if goal != Goal::of(&before) {
        confirm(&what_happens(&before, goal), args.yes)?;
    }
    interrupt::block_on(async move {
        let mut migration = args.stores.migration().await?;
        if args.despite_others {
            migration = migration.despite_others();
        }
        if migration.state().await?.record.epoch != before.epoch {
            let message = "somebody else has moved the migration on meanwhile: nothing was done";
            return Err(Failure::new(UNAVAILABLE, message));
        }
        let Step { record, copied } = go(&migration, goal).await?;
        let is_copied = copied.is_ok();
        if let Err(error) = copied {
            say(&format!("warning: the other store could not be told yet, repeat this when it is back: {error}"));
        }
        let already = match is_copied && goal == Goal::of(&before) {
            true if is_unfinished => ": a store did not know that yet, and no other step was taken",
            true => " already, and both stores know it",
            false => "",
        };
        tell(&format!("the phase is {}{already}\n", record.phase_name()))
    })
}

async fn go(migration: &Migration, goal: Goal) -> lockkit::Result<Step> {
    match goal {
        Goal::Shadow => migration.shadow(true).await,
        Goal::Phase(phase) => {
            let bar = bar("{msg} left");
            let step = migration.step(phase, |drain| show(&bar, drain)).await;
            bar.finish_and_clear();
            step
        }
    }
}

pub(super) fn finish(args: FinishArgs) -> Exit {
    let what = "The migration ends in both stores. A client that still uses its URL gets no locks then:\n\
                deploy every service with the URL of the one store first.\n";
    let stores = args.stores.clone();
    let clients = interrupt::block_on(async move {
        match stores.migration().await?.clients().await {
            // It may be over in one of the stores, and is finished once more.
            Err(error) if error.kind() == ErrorKind::Misconfigured => Ok(Vec::new()),
            clients => Ok(clients?),
        }
    })?;
    let still_there = clients.first().map(|client| still_there(client, clients.len()));
    confirm(&format!("{what}{}", still_there.as_deref().unwrap_or_default()), args.yes)?;
    interrupt::block_on(async move {
        let mut migration = args.stores.migration().await?;
        if args.fences_are_set {
            migration = migration.fences_are_set();
        }
        let bar = bar("{msg} left");
        let finished = migration.finish(|drain| show(&bar, drain)).await;
        bar.finish_and_clear();
        finished?;
        if let Some(clients) = still_there.filter(|_| args.yes) {
            say(&format!("warning: {}", clients.trim_end()));
        }
        tell("the migration is over\n")
    })
}

fn still_there(client: &Client, count: usize) -> String {
    let seen = client.seen.map(|seen| format!(", seen {} ago", spoken(seen))).unwrap_or_default();
    let name = plain(client.name.as_str());
    format!("clients that were using the URL of the migration just now: {count}, such as {name}{seen}\n")
}

/// Where the step leads: to the phase that it is already, if there is no other this way.
fn goal(args: &StepArgs, way: Way, record: &PhaseRecord) -> Result<Goal, Failure> {
    let next = match (way, record.phase) {
        (Way::Forward, Phase::Old) | (Way::Back, Phase::New) => Phase::Both,
        (Way::Forward, Phase::Both) => Phase::New,
        (Way::Back, Phase::Both | Phase::Old) => Phase::Old,
        (Way::Forward, Phase::New) => Phase::New,
    };
    let (now, next) = (Goal::of(record), Goal::Phase(next));
    let is_reached = |goal: Goal| {
        goal == now || goal == next || (goal == Goal::Shadow && way == Way::Forward && record.phase == Phase::Old)
    };
    match args.to_phase.unwrap_or(next) {
        wanted if is_reached(wanted) => Ok(wanted),
        wanted => {
            let message = format!("the phase is {now}: one step this way does not lead to {wanted}");
            Err(Failure::new(USAGE, message))
        }
    }
}

fn what_happens(record: &PhaseRecord, goal: Goal) -> String {
    let now = record.phase_name();
    let wait = spoken(record.drain());
    let phase = match goal {
        Goal::Phase(phase) => phase,
        Goal::Shadow => {
            return format!(
                "From the phase {now} to {goal}.\n\
                 Clients ask the new store, too, behind the back of the service: its answers decide nothing and delay nothing.\n"
            );
        }
    };
    let then = match phase {
        Phase::Old if record.is_shadowed => "Clients ask the new store no more.".to_owned(),
        Phase::Both => {
            "Each lock needs both stores from then on: it takes the time of both, and none is granted while one of them is down.\n\
             Locks that are held go along at their next renewal."
                .to_owned()
        }
        phase if record.may_go(phase, record.home_is_durable) => "This is the way back, which takes no wait.".to_owned(),
        phase => format!(
            "It waits {wait} first, until no client can act on the phase before any more; locks go on working meanwhile.\n\
             From then on the {phase} store alone has the locks."
        ),
    };
    format!("From the phase {now} to {goal}.\n{then}\n")
}

/// Says what will happen, and asks.
fn confirm(what: &str, yes: bool) -> Result<(), Failure> {
    if yes {
        return Ok(());
    }
    if !io::stdin().is_terminal() {
        return Err(Failure::new(USAGE, "stdin is no terminal, so that nobody can be asked: give --yes"));
    }
    let mut out = io::stderr();
    drop(write!(out, "{what}Go on? [y/N] ").and_then(|()| out.flush()));
    let mut line = String::new();
    io::stdin().lock().read_line(&mut line).map_err(|error| Failure::system("read the answer", &error))?;
    match line.trim() {
        "y" | "Y" | "yes" => Ok(()),
        _ => Err(Failure::new(USAGE, "nothing was done")),
    }
}
