//! `lockkit top`: the locks of a store, live.

mod columns;
mod draw;
mod live;
mod looks;
mod order;
mod pace;
mod screen;
mod view;
mod watch;

use std::{
    io::{self, IsTerminal},
    time::{Duration, Instant, SystemTime},
};

use clap::Args as ClapArgs;
use lockkit::Locker;
use serde_json::{Value, json};
use tokio::time::sleep;

use self::{
    looks::Looks,
    order::Order,
    watch::{Lock, Watch},
};
use crate::{
    duration::{self, millis},
    exit::{Exit, Failure},
    interrupt, ls,
    show::{is_printed, lock_json, print},
    store::{StoreArgs, text},
};

/// Watch the locks that are held, live in the terminal
///
/// Keys: q, Esc or Ctrl-C quits; the arrows or j and k mark a lock, and more about it is shown below; s changes the order; / asks
/// for a prefix of names, and counting begins anew.
///
/// Changes of holder are a lower bound: one look counts at most one change of each lock. A lock that was taken and released between
/// two lists is not seen, nor is a lease that tasks of one process hand on. CHANGES/S is of the last 10 seconds of looks.
///
/// LAPSED counts leases that ran out. A lease counts as lapsed if one look found less than half of its longest time left and the next
/// found it gone after its end. A ! behind LEFT marks such a lease while it is still held: it is not being
/// renewed. A lease that is meant to run out, as after lockkit run --once-per, counts, too. A session of ZooKeeper does not run out
/// by time: its LEFT is -. A lock that became free is shown for another 10 seconds.
///
/// The load on the store: each time --every has passed, the known locks are asked for; lists of all held locks take less than a tenth
/// of the time. If the store does not answer, the view says so, with the age of its figures, and goes on asking.
///
/// With --once, or without a terminal: prints one table, as ls does, and ends.
///
/// With --json: prints an object on a line for each look, with at_ms (since 1970), held, waiters, changes, changes_per_s (null at
/// first), lapses, and locks: an array of objects as of ls, with changes, changes_per_s and lapses of each; a lock that became free
/// has held: false. Facts that are not known are null. A look that fails, except the first, has at_ms and error alone.
#[derive(Debug, ClapArgs)]
pub(crate) struct Args {
    #[command(flatten)]
    store: StoreArgs,
    /// Only names that start with this
    #[arg(default_value = "", hide_default_value = true, value_parser = text)]
    prefix: String,
    /// How often to look
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = duration::between_looks)]
    every: Duration,
    /// The order of the locks
    #[arg(long, value_name = "ORDER", default_value = "waiters")]
    sort: Order,
    /// Print one table, or with --json one line, and end
    #[arg(long)]
    once: bool,
    /// Print JSON, a line for each look
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: Args) -> Exit {
    let is_live = !args.once && !args.json && io::stdin().is_terminal() && io::stdout().is_terminal();
    interrupt::block_on(async move {
        // Before the terminal is taken, so that an error of the store is reported as by any other verb.
        let locker = args.store.locker().await?;
        match (is_live, args.json) {
            (true, _) => live::run(args, locker).await,
            (false, true) => lines(&args, locker).await,
            (false, false) => once(&args, locker).await,
        }
    })
}

/// One table.
async fn once(args: &Args, locker: Locker) -> Exit {
    let mut looks = Looks::new(locker, args.prefix.clone(), args.every);
    first(&mut looks, args.sort).await?;
    let locks = args.sort.sorted(&looks.watch);
    let rows = ls::rows(locks.iter().map(|lock| &lock.state));
    print(|out| writeln!(out, "{}", rows.trim_fmt()))?;
    Ok(0)
}

/// A line for each look, for as long as somebody reads them.
async fn lines(args: &Args, locker: Locker) -> Exit {
    let mut looks = Looks::new(locker, args.prefix.clone(), args.every);
    first(&mut looks, args.sort).await?;
    loop {
        let line = to_json(&looks, args.sort);
        if !is_printed(|out| writeln!(out, "{line}"))? || args.once {
            return Ok(0);
        }
        sleep(looks.due().saturating_duration_since(Instant::now())).await;
        looks.take(looks.ask(args.sort, 0).await);
    }
}

/// The first look. A store that can't be asked ends the verb, as it ends `ls`: a script is to know at once.
async fn first(looks: &mut Looks, order: Order) -> Result<(), Failure> {
    looks.take(looks.ask(order, 0).await);
    looks.failed.take().map_or(Ok(()), |failed| Err(failed.why))
}

fn to_json(looks: &Looks, order: Order) -> Value {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let at = millis(now);
    if let Some(failed) = &looks.failed {
        return json!({ "at_ms": at, "error": failed.why.message() });
    }
    let totals = looks.watch.totals();
    json!({
        "at_ms": at,
        "held": totals.held,
        "waiters": totals.waiters,
        "changes": totals.changes,
        "changes_per_s": totals.rate,
        "lapses": totals.lapses,
        "locks": order.sorted(&looks.watch).iter().map(|lock| of_lock(lock, &looks.watch)).collect::<Vec<_>>(),
    })
}

fn of_lock(lock: &Lock, watch: &Watch) -> Value {
    let mut value = lock_json(&lock.state, false);
    value["changes"] = lock.changes.into();
    value["changes_per_s"] = watch.rate(lock).into();
    value["lapses"] = lock.lapses.into();
    value
}
