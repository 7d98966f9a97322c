//! `lockkit ls`: which locks are held.

use clap::Args as ClapArgs;
use comfy_table::Table;
use lockkit::{KeyState, store::Query};
use serde_json::Value;

use crate::{
    exit::Exit,
    show::{holder, left, lock_json, plain, print, print_json, table},
    store::{StoreArgs, block_on, text},
};

/// List the locks that are held
///
/// With --json: an array of objects sorted by key, each with key, held, fence, waiters, and holders: an array of objects
/// with holder, foreign (true if it is no lockkit client), mode, depth, fence, remaining_ms. Facts that are not known are null.
#[derive(Debug, ClapArgs)]
pub(crate) struct Args {
    #[command(flatten)]
    store: StoreArgs,
    /// Only names that start with this
    #[arg(default_value = "", hide_default_value = true, value_parser = text)]
    prefix: String,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Exit {
    let states = block_on(async {
        let locker = args.store.locker().await?;
        Ok(locker.inspect(&Query::Prefix(args.prefix.clone())).await?)
    })?;
    if args.json {
        let locks: Vec<_> = states.iter().map(|state| lock_json(state, false)).collect();
        print_json(&Value::from(locks))?;
        return Ok(0);
    }
    let rows = rows(&states);
    print(|out| writeln!(out, "{}", rows.trim_fmt()))?;
    Ok(0)
}

/// A table with a row for each holder.
pub(crate) fn rows<'a>(states: impl IntoIterator<Item = &'a KeyState>) -> Table {
    let mut rows = table(&["KEY", "HOLDER", "MODE", "DEPTH", "FENCE", "LEFT", "WAITERS"]);
    for state in states {
        let waiters = state.waiters.map_or_else(|| "-".to_owned(), |waiters| waiters.to_string());
        for hold in &state.holders {
            rows.add_row([
                plain(state.key.as_str()),
                plain(&holder(hold)),
                hold.mode.to_string(),
                hold.depth.to_string(),
                hold.fence.map_or_else(|| "-".to_owned(), |fence| fence.to_string()),
                left(hold),
                waiters.clone(),
            ]);
        }
    }
    rows
}
