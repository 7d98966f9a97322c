//! What several verbs show: tables and bars for people, JSON for scripts.

use std::{
    io::{self, Write},
    time::Duration,
};

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use lockkit::{Holder, KeyState, Liveness, Waiter};
use serde_json::{Value, json};

use crate::{
    duration::{millis, spoken},
    exit::{Exit, Failure, LOST},
};

/// How often a bar is drawn that shows the time.
pub(crate) const TICK: Duration = Duration::from_millis(500);

/// Writes to stdout. A reader that has seen enough and went away, as `head` does, is no error.
pub(crate) fn print(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<(), Failure> {
    is_printed(write).map(drop)
}

/// The same for a verb that goes on printing; tells whether there is still a reader.
pub(crate) fn is_printed(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<bool, Failure> {
    let mut out = io::stdout().lock();
    match write(&mut out).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(Failure::new(LOST, format!("could not write the output: {error}"))),
    }
}

/// Prints a text, which is all that the verb has to say.
pub(crate) fn tell(text: &str) -> Exit {
    print(|out| out.write_all(text.as_bytes()))?;
    Ok(0)
}

/// Prints a JSON value on lines of its own.
pub(crate) fn print_json(value: &Value) -> Result<(), Failure> {
    print(|out| writeln!(out, "{value:#}"))
}

/// A lock as JSON. Tokens are for those who ask about one lock.
pub(crate) fn lock_json(state: &KeyState, tokens: bool) -> Value {
    json!({
        "key": state.key.as_str(),
        "held": !state.holders.is_empty(),
        "fence": state.fence.map(|fence| fence.get()),
        "waiters": state.waiters,
        "queue": state.queue.as_ref().map(|queue| queue.iter().map(waiter_json).collect::<Vec<_>>()),
        "holders": state.holders.iter().map(|holder| holder_json(holder, tokens)).collect::<Vec<_>>(),
    })
}

fn waiter_json(waiter: &Waiter) -> Value {
    json!({ "holder": waiter.info.as_str(), "mode": waiter.mode.to_string() })
}

fn holder_json(holder: &Holder, tokens: bool) -> Value {
    let mut value = json!({
        "holder": holder.info.as_str(),
        "foreign": holder.token.is_none(),
        "mode": holder.mode.to_string(),
        "depth": holder.depth,
        "fence": holder.fence.map(|fence| fence.get()),
        "remaining_ms": holder.remaining.map(millis),
    });
    if tokens {
        value["token"] = holder.token.map(|token| token.reveal()).into();
    }
    value
}

/// Makes a table as wide as the terminal; one line each for whoever reads it by another program.
pub(crate) fn fit(table: &mut Table) {
    if let Some(width) = terminal_width() {
        table.set_content_arrangement(ContentArrangement::Dynamic).set_width(width);
    }
}

/// How many characters a line may have: as many as the terminal is wide; any number for whoever reads it by another program.
pub(crate) fn width() -> usize {
    terminal_width().map_or(usize::MAX, usize::from)
}

fn terminal_width() -> Option<u16> {
    let size = rustix::termios::tcgetwinsize(io::stdout()).ok()?;
    (size.ws_col > 0).then_some(size.ws_col)
}

/// A table without lines, so that it can be read by eye and cut by `awk`.
pub(crate) fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(header);
    for column in table.column_iter_mut() {
        column.set_padding((0, 2)).set_cell_alignment(CellAlignment::Left);
    }
    table
}

/// A bar that tells how far something is. Drawn only if stderr is a terminal, and not before it is told how far.
pub(crate) fn bar(length: u64, template: &str) -> ProgressBar {
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::with_draw_target(Some(length), ProgressDrawTarget::stderr()).with_style(style.progress_chars("=> "))
}

/// Text that can do no harm to a terminal: a lock's name may contain anything.
pub(crate) fn plain(text: &str) -> String {
    let mut clean = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() {
            clean.extend(c.escape_default());
        } else {
            clean.push(c);
        }
    }
    clean
}

/// The holder of a lock, in words.
pub(crate) fn holder(holder: &Holder) -> String {
    match (holder.info.as_str(), holder.token) {
        ("", None) => "a client that is not lockkit".to_owned(),
        (text, _) => named(text).to_owned(),
    }
}

/// The name of a client, in words.
pub(crate) fn named(info: &str) -> &str {
    if info.is_empty() { "somebody" } else { info }
}

/// What is left of a lease, in words.
pub(crate) fn left(holder: &Holder) -> String {
    holder.remaining.map_or_else(|| "-".to_owned(), spoken)
}

/// The holder of a lock and what is left of its lease, as half a sentence.
pub(crate) fn held_by(state: &KeyState, liveness: &Liveness) -> String {
    let Some(first) = state.holders.first() else { return "free by now, or not granted for the moment".to_owned() };
    let others = match state.holders.len() - 1 {
        0 => String::new(),
        others => format!(" and {others} more"),
    };
    let lease = match (first.remaining, liveness.session) {
        (Some(left), _) => format!("{} of its lease left", spoken(left)),
        (None, Some(_)) => "until it is released or its session ends".to_owned(),
        (None, None) => "with no time limit".to_owned(),
    };
    format!("held by {}{others}, {lease}", holder(first))
}

#[cfg(test)]
mod tests {
    use lockkit::{HolderInfo, LockKey, Mode, Token};

    use super::*;

    #[test]
    fn a_lease_that_no_time_ends_has_an_end_all_the_same() {
        let token = Some("00112233445566778899aabbccddeeff".parse::<Token>().expect("32 digits"));
        let ttl = Liveness { ttl: Some(Duration::from_millis(100)..=Duration::from_secs(300)), session: None };
        let session = Liveness { ttl: None, session: Some(Duration::from_secs(20)) };
        for (liveness, remaining, expected) in [
            (&ttl, Some(Duration::from_secs(5)), "held by me, 5.0s of its lease left"),
            (&session, None, "held by me, until it is released or its session ends"),
            (&ttl, None, "held by me, with no time limit"),
        ] {
            let info = HolderInfo::new("me");
            let holder = Holder { token, info, mode: Mode::Exclusive, depth: 1, fence: None, remaining };
            let key = LockKey::new("a").expect("a name");
            let state = KeyState { holders: vec![holder], ..KeyState::unknown(key) };
            assert_eq!(held_by(&state, liveness), expected);
        }
    }
}
