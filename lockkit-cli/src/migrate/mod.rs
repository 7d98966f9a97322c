//! `lockkit migrate`: move a live service from one store to another, step by step.

mod drain;
mod plan;
mod status;
mod steps;

use std::{fmt, sync::Arc, time::Duration};

use clap::{Args as ClapArgs, Subcommand};
use lockkit::{
    Fence, LockStore,
    migrate::{Migration, Phase, PhaseRecord, Start},
};

use crate::{
    duration,
    exit::{Exit, Failure, USAGE},
    store::warn,
};

/// Move a live service from one store to another
///
/// The service uses both stores as one, with the URL migrate:?from=URL&to=URL; where its locks are is then changed from here, step
/// by step, forward or back, without a gap in mutual exclusion. docs/migration.md is the runbook.
///
/// Each of these can be repeated after it was killed: it finds out what was done, and goes on.
#[derive(Debug, ClapArgs)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Show what a migration between two stores would change, and what stands in its way; change nothing
    ///
    /// Exit status: 0 if nothing stands in its way, 78 if something does.
    ///
    /// With --json: an object with from, to, home, drain_ms, in_the_way, lost_on_the_way and advice (arrays of texts), and
    /// held: an array of objects with key, holder, mode, remaining_ms.
    Plan(PlanArgs),
    /// Start it: the phase is old, and services can be deployed with the URL of the migration
    Start(StartArgs),
    /// Show the phase, the clients of the migration, the holders of locks as of which phase, and what can be done next
    ///
    /// With --json: an object with phase, epoch, home, floor, alone_above_floor_in_ms (from when on the store of the phase gives
    /// fences above the floor by itself; null if never), max_ttl_ms, fresh_ms, drain_ms, at (from and to: whether each store
    /// has this record, or null if it can't be asked), next (the steps that lead on), and holders (null if a store of the phase can't be
    /// asked): an array of objects with store, key, holder, phase (null if it is no client of the migration), remaining_ms; clients (null if
    /// the home can't be asked): an array of objects with name, phase, seen_ms (how long ago; null if the store does not tell), and
    /// new_store: what it answered beside the old one, an object with granted, refused, failed, lost, mean_us, longest_us; and
    /// diverging: the keys of locks that one store has lost of those that are in both.
    Status(StatusArgs),
    /// Go one step on: from old to both, or from both to new
    ///
    /// With --to-phase shadow, from old: clients ask the new store, too, whose answers decide nothing; status shows them.
    ///
    /// A step out of the phase both waits until no client can act on that phase any more.
    ///
    /// If the last step led on as well, and one store has not been told of it, this tells that store and takes no other step.
    /// --to-phase says which step is meant.
    Advance(StepArgs),
    /// Go one step back: from new to both, or from both to old
    ///
    /// If the last step led back as well, and one store has not been told of it, this tells that store and takes no other step.
    /// --to-phase says which step is meant.
    Rollback(StepArgs),
    /// End it, in the phase old or new: clients of the migration get no locks from then on. All services must use one store by now. The
    /// command waits for a drain before the end, and after it until no client acts on an earlier reading of the phase
    Finish(FinishArgs),
}

/// The two stores.
#[derive(ClapArgs, Clone)]
pub(crate) struct Stores {
    /// URL of the old store; better in the environment, where no process list shows its password
    #[arg(long, value_name = "URL", env = "LOCKKIT_FROM", hide_env_values = true)]
    from: Option<String>,
    /// URL of the new store
    #[arg(long, value_name = "URL", env = "LOCKKIT_TO", hide_env_values = true)]
    to: Option<String>,
}

#[derive(Debug, ClapArgs)]
struct Settings {
    /// Longest time to live of any lock of the service; a part of each wait
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = duration::parse)]
    max_ttl: Duration,
    /// How long a client may act on what it read of the phase; a part of each wait
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = duration::parse)]
    fresh: Duration,
    /// The home store loses no confirmed write in a crash or failover: then the way back from both takes no wait, and needs
    /// the home alone. ZooKeeper counts as durable; lockkit can't check Redis and MySQL
    #[arg(long)]
    durable: bool,
    /// All fences lie above this: for a store whose clients have the option fence_above. A number above every fence that it has
    /// given so far
    #[arg(long, value_name = "NUMBER", default_value_t = 0, hide_default_value = true)]
    fence_above: u64,
}

impl Settings {
    fn start(&self) -> Start {
        Start {
            max_ttl: self.max_ttl,
            fresh: self.fresh,
            home_is_durable: self.durable,
            fence_above: Fence::new(self.fence_above),
        }
    }
}

#[derive(Debug, ClapArgs)]
struct PlanArgs {
    #[command(flatten)]
    stores: Stores,
    #[command(flatten)]
    settings: Settings,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, ClapArgs)]
struct StartArgs {
    #[command(flatten)]
    stores: Stores,
    #[command(flatten)]
    settings: Settings,
    /// Do not ask
    #[arg(long)]
    yes: bool,
}

#[derive(Debug, ClapArgs)]
struct StatusArgs {
    #[command(flatten)]
    stores: Stores,
    /// Refresh every second, until interrupted. After a change, also show how long a client may still act on the former phase
    #[arg(long, conflicts_with = "json")]
    watch: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct StepArgs {
    #[command(flatten)]
    stores: Stores,
    /// Phase to go to (old, shadow, both, new): nothing is done if it is the phase already, so that scripts can repeat the step
    #[arg(long, value_name = "PHASE", value_parser = Goal::named)]
    to_phase: Option<Goal>,
    /// Go on although clients that know nothing of the migration hold locks. Two can hold a lock at once then
    #[arg(long)]
    despite_others: bool,
    /// Do not ask
    #[arg(long)]
    yes: bool,
}

#[derive(Debug, ClapArgs)]
struct FinishArgs {
    #[command(flatten)]
    stores: Stores,
    /// All clients of the store that is left have the option fence_above, so that its fences go on above those that there were
    #[arg(long)]
    fences_are_set: bool,
    /// Do not ask
    #[arg(long)]
    yes: bool,
}

/// A phase as people know it: the shadow of the phase old is one of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Goal {
    Phase(Phase),
    Shadow,
}

impl Goal {
    fn named(text: &str) -> Result<Self, String> {
        let phases = [Phase::Old, Phase::Both, Phase::New].map(Self::Phase);
        let found = phases.into_iter().chain([Self::Shadow]).find(|goal| goal.to_string() == text);
        found.ok_or_else(|| "a phase is old, shadow, both or new".to_owned())
    }

    fn of(record: &PhaseRecord) -> Self {
        if record.is_shadowed { Self::Shadow } else { Self::Phase(record.phase) }
    }
}

impl fmt::Display for Goal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Phase(phase) => phase.fmt(f),
            Self::Shadow => f.write_str("shadow"),
        }
    }
}

pub(crate) fn run(args: Args) -> Exit {
    match args.what {
        What::Plan(args) => plan::run(args),
        What::Start(args) => steps::start(args),
        What::Status(args) => status::run(args),
        What::Advance(args) => steps::step(args, steps::Way::Forward),
        What::Rollback(args) => steps::step(args, steps::Way::Back),
        What::Finish(args) => steps::finish(args),
    }
}

impl Stores {
    /// Connects to both, one of which may be away.
    async fn open(&self) -> Result<[Arc<dyn LockStore>; 2], Failure> {
        let (from, to) = (given(self.from.as_deref(), "--from")?, given(self.to.as_deref(), "--to")?);
        let stores = lockkit::stores_of_migration(from, to).await?;
        stores.iter().for_each(|store| warn(&store.info().name, &store.info().warnings));
        Ok(stores)
    }

    async fn migration(&self) -> Result<Migration, Failure> {
        let [old, new] = self.open().await?;
        Ok(Migration::new(old, new))
    }
}

fn given<'a>(url: Option<&'a str>, option: &str) -> Result<&'a str, Failure> {
    let variable = if option == "--from" { "LOCKKIT_FROM" } else { "LOCKKIT_TO" };
    let message = || format!("give the URL of the store with {option}, or set {variable}");
    let url = url.filter(|url| !url.is_empty()).ok_or_else(|| Failure::new(USAGE, message()))?;
    if url.starts_with("memory:") || url.starts_with("migrate:") {
        let message = "a migration leads from one server to another: memory: and migrate: are neither";
        return Err(Failure::new(USAGE, message));
    }
    Ok(url)
}

impl fmt::Debug for Stores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The URLs may contain passwords.
        f.write_str("Stores(..)")
    }
}
