//! `lockkit break`: end another holder's lease.

use std::io::{self, IsTerminal, Write};

use clap::Args as ClapArgs;
use lockkit::{LockKey, Locker, Token, store::Release};
use serde_json::json;

use crate::{
    exit::{Exit, Failure, NOT_ACQUIRED, USAGE},
    show::{held_by, plain, print, print_json},
    store::{StoreArgs, block_on},
    who,
};

/// End the lease of a lock's holder
///
/// The holder is named by its token, as `lockkit who KEY` shows it, so that a newer holder can't be hit. The broken holder
/// learns of it at its next renewal, within a third of its ttl (on ZooKeeper at once): until then it may still be at work.
/// A holder that is not a lockkit client has no token and can't be broken. Without --token it is asked for on the terminal.
///
/// With --json: an object with key and broken (true). When the lock is not held by that token: exit status 75.
#[derive(Debug, ClapArgs)]
pub(crate) struct Args {
    #[command(flatten)]
    store: StoreArgs,
    /// Name of the lock
    #[arg(value_parser = who::key)]
    key: LockKey,
    /// Token of the holder
    #[arg(long, value_parser = token)]
    token: Option<Token>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn token(text: &str) -> Result<Token, String> {
    text.parse().map_err(|_| "a token has 32 lower-case hexadecimal digits; lockkit who KEY shows it".to_owned())
}

pub(crate) fn run(args: Args) -> Exit {
    if args.token.is_none() && !io::stdin().is_terminal() {
        let message = format!("break needs --token; see: lockkit who {}", plain(args.key.as_str()));
        return Err(Failure::new(USAGE, message));
    }
    block_on(async {
        let locker = args.store.locker().await?;
        let token = match args.token {
            Some(token) => token,
            None => ask(&locker, &args.key).await?,
        };
        match locker.break_lock(args.key.as_str(), token).await? {
            Release::Released { .. } => Ok(()),
            Release::NotHeld(_) => Err(not_held(&locker, &args.key).await?),
        }
    })?;
    if args.json {
        print_json(&json!({ "key": args.key.as_str(), "broken": true }))?;
    } else {
        print(|out| writeln!(out, "broke {}", plain(args.key.as_str())))?;
    }
    Ok(0)
}

/// Shows the holder and asks for its token.
async fn ask(locker: &Locker, key: &LockKey) -> Result<Token, Failure> {
    let state = locker.lock(key.as_str()).inspect().await?;
    if state.holders.iter().all(|holder| holder.token.is_none()) {
        return not_held(locker, key).await.and_then(Err);
    }
    let mut out = io::stderr();
    drop(write!(out, "{}token to break: ", who::describe(&state)).and_then(|()| out.flush()));
    // Meanwhile the store may want a sign of life.
    let read = tokio::task::spawn_blocking(|| io::stdin().lines().next().transpose()).await.map_err(io::Error::other);
    let line = read.flatten().map_err(|error| Failure::system("read the token", &error))?.unwrap_or_default();
    token(line.trim()).map_err(|message| Failure::new(USAGE, message))
}

/// Why there was nothing to break.
async fn not_held(locker: &Locker, key: &LockKey) -> Result<Failure, Failure> {
    let state = locker.lock(key.as_str()).inspect().await?;
    let (name, held) = (plain(key.as_str()), held_by(&state, &locker.info().capability.liveness));
    let message = match state.holders.first() {
        None => format!("{name} is free: nothing to break"),
        Some(holder) if holder.token.is_none() => {
            format!("{name} is {held}; that is no lockkit client and can't be broken")
        }
        Some(_) => format!("{name} is not held by that token; it is {held}"),
    };
    Ok(Failure::new(NOT_ACQUIRED, message))
}
