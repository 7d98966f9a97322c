//! `lockkit init` and `lockkit gc`: what a store needs done once, or now and then.

use std::time::Duration;

use clap::Args as ClapArgs;
use lockkit::{
    LockStore,
    mysql::{MySqlConfig, MySqlStore, schema},
};

use crate::{
    duration,
    exit::{Exit, Failure, USAGE},
    show::tell,
    store::{StoreArgs, block_on, warn},
};

/// Prepare a store: make the table that MySQL and MariaDB keep locks in
///
/// A table that is there and right is left alone. Other stores need no preparation, and this says so.
#[derive(Debug, ClapArgs)]
pub(crate) struct Args {
    #[command(flatten)]
    store: StoreArgs,
    /// Bring a table of the classic shape (id, resource_name, node_info, count, create_time, update_time) forward,
    /// keeping its rows. Stop its other users first: afterwards every lock is free
    #[arg(long)]
    upgrade: bool,
}

/// Remove the rows of locks that nobody used for a week
///
/// Only MySQL and MariaDB keep a row for every name that was ever locked. Rows of held locks stay; fences go on growing.
#[derive(Debug, ClapArgs)]
pub(crate) struct GcArgs {
    #[command(flatten)]
    store: StoreArgs,
    /// Remove the rows of locks that were last used longer ago than this
    #[arg(long, value_name = "TIME", default_value = "168h", value_parser = duration::parse)]
    unused_for: Duration,
}

pub(crate) fn run(args: &Args) -> Exit {
    let url = args.store.url()?;
    let Some(config) = table_of(url)? else {
        return tell(&format!("{} needs no preparation\n", scheme(url)));
    };
    let upgraded = block_on(async {
        schema::create(&config).await?;
        let upgraded = args.upgrade && schema::upgrade(&config).await?;
        schema::check(&config).await?;
        // The user who makes the table need not be allowed to lock, so a missing permission is no failure here.
        if let Ok(store) = MySqlStore::connect(config).await {
            warn(&store.info().name, store.warnings());
        }
        Ok(upgraded)
    })?;
    tell(if upgraded { "the table was brought forward\n" } else { "the table is there\n" })
}

pub(crate) fn collect(args: &GcArgs) -> Exit {
    let url = args.store.url()?;
    let Some(config) = table_of(url)? else {
        return tell(&format!("{} keeps nothing that would have to be removed\n", scheme(url)));
    };
    let removed = block_on(async {
        let store = MySqlStore::connect(config).await?;
        warn(&store.info().name, store.warnings());
        Ok(store.remove_unused(args.unused_for).await?)
    })?;
    tell(&format!("removed {removed} rows\n"))
}

/// The configuration of a store that keeps locks in a table; `None` for other stores.
fn table_of(url: &str) -> Result<Option<MySqlConfig>, Failure> {
    // `redis+sentinel` and its like are of the family of `redis`.
    match scheme(url).split('+').next().unwrap_or_default() {
        "mysql" | "mariadb" => Ok(Some(MySqlConfig::from_url(url)?)),
        "memory" | "redis" | "rediss" | "valkey" | "valkeys" | "redlock" | "redlocks" | "zk" | "zks" => Ok(None),
        _ => Err(block_on(async { Ok(lockkit::open(url).await.err()) })?.map_or_else(
            || Failure::new(USAGE, "a migration has two stores: give the URL of one of them"),
            Failure::from,
        )),
    }
}

/// What stands before the colon, in lower case.
fn scheme(url: &str) -> String {
    url.split_once(':').map_or(url, |(scheme, _)| scheme).to_ascii_lowercase()
}
