//! `lockkit who`: who holds a lock.

use clap::Args as ClapArgs;
use lockkit::{Holder, KeyState, LockKey};

use crate::{
    exit::Exit,
    show::{self, left, lock_json, plain, print, print_json},
    store::{self, StoreArgs, block_on},
};

/// Show who holds a lock, with the token that `lockkit break` asks for
///
/// A free lock is an answer too: exit status 0.
///
/// With --json: an object with key, held, fence, waiters, queue: an array of those that wait in order, the next one first and at most
/// 32, objects with holder and mode; and holders: an array of objects with token, holder, foreign
/// (true if it is no lockkit client; it has no token), mode, depth, fence, remaining_ms. Facts that are not known are null.
#[derive(Debug, ClapArgs)]
pub(crate) struct Args {
    #[command(flatten)]
    store: StoreArgs,
    /// Name of the lock
    #[arg(value_parser = key)]
    key: LockKey,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Reads the name of a lock.
pub(crate) fn key(text: &str) -> Result<LockKey, String> {
    let text = store::text(text)?;
    // The kind is said by the exit code; what is wrong is said once.
    LockKey::new(text).map_err(|error| error.to_string().trim_start_matches("invalid input: ").to_owned())
}

pub(crate) fn run(args: &Args) -> Exit {
    let state = block_on(async { Ok(args.store.locker().await?.lock(args.key.as_str()).inspect_queue().await?) })?;
    if args.json {
        print_json(&lock_json(&state, true))?;
    } else {
        print(|out| out.write_all(describe(&state).as_bytes()))?;
    }
    Ok(0)
}

/// The holders of a lock, for people.
pub(crate) fn describe(state: &KeyState) -> String {
    let key = plain(state.key.as_str());
    if state.holders.is_empty() {
        return format!("{key} is free\n");
    }
    let mut text = format!("{key} is held\n");
    for holder in &state.holders {
        for (name, value) in facts(holder) {
            text.push_str(&format!("  {name:<8}  {value}\n"));
        }
    }
    if let Some(waiters) = state.waiters {
        text.push_str(&format!("  {:<8}  {waiters}\n", "waiters"));
    }
    for (place, waiter) in
        state.queue.iter().flatten().zip(1..).map(|(waiter, place)| (format!("next {place}"), waiter))
    {
        text.push_str(&format!("  {place:<8}  {} ({})\n", plain(show::named(waiter.info.as_str())), waiter.mode));
    }
    text
}

fn facts(holder: &Holder) -> Vec<(&'static str, String)> {
    let token = holder.token.map_or_else(|| "none: this holder can't be broken".to_owned(), |token| token.reveal());
    let mut facts = vec![("holder", plain(&show::holder(holder))), ("token", token), ("mode", holder.mode.to_string())];
    if holder.depth != 1 {
        facts.push(("depth", holder.depth.to_string()));
    }
    facts.extend(holder.fence.map(|fence| ("fence", fence.to_string())));
    facts.push(("left", left(holder)));
    facts
}
