//! Steps: what will happen is said first, and then asked for.

use std::{
    io::{self, BufRead, IsTerminal, Write},
    time::Duration,
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use lockkit::migrate::{Drain, Phase, PhaseRecord, Step};

use super::{FinishArgs, StartArgs, StepArgs};
use crate::{
    duration::spoken,
    exit::{Exit, Failure, UNAVAILABLE, USAGE, say},
    interrupt,
    show::print,
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
        tell(&format!(
            "the phase is {}, its home is the {} store. Now deploy every service with the URL migrate:?from=URL&to=URL\n",
            record.phase, record.home,
        ))
    })
}

pub(super) fn step(args: StepArgs, way: Way) -> Exit {
    let stores = args.stores.clone();
    let before = interrupt::block_on(async move { Ok(stores.migration().await?.state().await?.record) })?;
    let goal = goal(&args, way, &before)?;
    if goal != before.phase {
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
        let bar = bar();
        let step = migration.step(goal, |drain| show(&bar, drain)).await;
        bar.finish_and_clear();
        let Step { record, copied } = step?;
        if let Err(error) = copied {
            say(&format!("warning: the other store could not be told yet, repeat this when it is back: {error}"));
        }
        let already = if goal == before.phase { " already, and both stores know it" } else { "" };
        tell(&format!("the phase is {}{already}\n", record.phase))
    })
}

pub(super) fn finish(args: FinishArgs) -> Exit {
    let text = "Both stores will forget the migration. A client that still uses the URL of the migration gets no locks then:\n\
                deploy every service with the URL of the one store first.\n";
    confirm(text, args.yes)?;
    interrupt::block_on(async move {
        let mut migration = args.stores.migration().await?;
        if args.fences_are_set {
            migration = migration.fences_are_set();
        }
        let bar = bar();
        let finished = migration.finish(|drain| show(&bar, drain)).await;
        bar.finish_and_clear();
        finished?;
        tell("the migration is over\n")
    })
}

/// Where the step leads: to the phase that it is already, if there is no other this way.
fn goal(args: &StepArgs, way: Way, record: &PhaseRecord) -> Result<Phase, Failure> {
    let next = match (way, record.phase) {
        (Way::Forward, Phase::Old) | (Way::Back, Phase::New) => Phase::Both,
        (Way::Forward, Phase::Both) => Phase::New,
        (Way::Back, Phase::Both) => Phase::Old,
        (Way::Forward, Phase::New) | (Way::Back, Phase::Old) => record.phase,
    };
    match args.to_phase.unwrap_or(next) {
        wanted if wanted == record.phase || wanted == next => Ok(wanted),
        wanted => {
            let message = format!("the phase is {}: one step this way does not lead to {wanted}", record.phase);
            Err(Failure::new(USAGE, message))
        }
    }
}

fn what_happens(record: &PhaseRecord, goal: Phase) -> String {
    let now = record.phase;
    let wait = spoken(record.drain());
    let then = match goal {
        Phase::Both => {
            "Each lock needs both stores from then on: it takes the time of both, and none is granted while one of them is down.\n\
             Locks that are held go along at their next renewal."
                .to_owned()
        }
        goal if record.may_go(goal, record.home_is_durable) => "This is the way back, which takes no wait.".to_owned(),
        goal => format!(
            "It waits {wait} first, until no client can act on the phase before any more; locks go on working meanwhile.\n\
             From then on the {goal} store alone has the locks."
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
        return Err(Failure::new(USAGE, "nobody can be asked here: give --yes"));
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

fn bar() -> ProgressBar {
    let style = ProgressStyle::with_template("waiting until nobody acts on the phase before: {bar:30} {msg} left")
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::with_draw_target(Some(1), ProgressDrawTarget::stderr()).with_style(style)
}

fn show(bar: &ProgressBar, drain: Drain) {
    let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    bar.set_length(millis(drain.whole));
    bar.set_position(millis(drain.whole - drain.left));
    bar.set_message(spoken(drain.left));
}

fn tell(text: &str) -> Exit {
    print(|out| out.write_all(text.as_bytes()))?;
    Ok(0)
}
