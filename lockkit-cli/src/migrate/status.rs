//! Where a migration is.

use std::{
    io::{self, IsTerminal},
    time::{Duration, Instant},
};

use indicatif::ProgressBar;
use lockkit::{
    Token,
    migrate::{Client, Fences, Migration, Phase, PhaseRecord, Seen, Side, State, Tally},
};
use serde_json::{Value, json};
use tokio::time::sleep;

use super::{
    Goal, StatusArgs,
    drain::{self, Onlooker},
};
use crate::{
    duration::{millis, spoken},
    exit::Exit,
    interrupt,
    show::{holder, is_printed, left, plain, print_json, table},
};

/// How many holders are shown one by one.
const SHOWN: usize = 20;
/// A lock that is in one store only may be on its way to the other, or be given back, for so long.
const ON_THE_WAY: Duration = Duration::from_millis(500);

/// What is shown.
struct Status {
    state: State,
    fences: Option<Fences>,
    seen: lockkit::Result<Vec<Seen>>,
    clients: lockkit::Result<Vec<Client>>,
    /// The locks that one store has lost of those that are in both.
    diverging: Vec<String>,
}

pub(super) fn run(args: StatusArgs) -> Exit {
    interrupt::block_on(async move {
        let migration = args.stores.migration().await?;
        let (mut fences, mut round) = (None, 0_u32);
        let (mut onlooker, mut bar) = (Onlooker::default(), None::<ProgressBar>);
        loop {
            let state = migration.state().await?;
            let drain = onlooker.look(&state, Instant::now()).filter(|_| args.watch);
            // It takes a lock for that: not each second.
            if round.is_multiple_of(10) {
                fences = if state.record.phase == Phase::Both { None } else { migration.fences().await.ok() };
            }
            round = round.wrapping_add(1);
            let (seen, diverging) = holders_of(&migration, &state.record).await;
            let status = Status { state, fences, seen, clients: migration.clients().await, diverging };
            if args.json {
                print_json(&to_json(&status))?;
                return Ok(0);
            }
            let mut text = in_words(&status);
            if let Some(drain) = drain.filter(|_| !io::stderr().is_terminal()) {
                text += &drain::in_words(drain);
            }
            let clear = args.watch && io::stdout().is_terminal();
            let write = || is_printed(|out| write!(out, "{}{text}", if clear { "\x1b[2J\x1b[H" } else { "" }));
            let is_read = bar.as_ref().map_or_else(write, |bar| bar.suspend(write))?;
            match drain {
                Some(drain) => drain::show(bar.get_or_insert_with(|| drain::bar("at most {msg} left")), drain),
                None => drop(bar.take().map(|bar| bar.finish_and_clear())),
            }
            if !args.watch || !is_read {
                return Ok(0);
            }
            sleep(Duration::from_secs(1)).await;
        }
    })
}

/// All holders, and the locks that one store has lost of those that are in both.
async fn holders_of(migration: &Migration, record: &PhaseRecord) -> (lockkit::Result<Vec<Seen>>, Vec<String>) {
    let first = migration.holders().await;
    let Ok(seen) = &first else { return (first, Vec::new()) };
    let before = in_one(record, seen);
    if before.is_empty() {
        return (first, Vec::new());
    }
    sleep(ON_THE_WAY).await;
    let second = migration.holders().await;
    let still = second.as_deref().map(|seen| in_one(record, seen)).unwrap_or_default();
    let diverging = before.iter().filter(|lease| still.contains(lease)).map(|lease| plain(&lease.0)).collect();
    (second, diverging)
}

/// The leases as of the phase both that one store has and the other has not: the key, the store, and the lease's token there, which
/// tells it from those of other holders.
fn in_one(record: &PhaseRecord, seen: &[Seen]) -> Vec<(String, Side, Option<Token>)> {
    if record.phase != Phase::Both {
        return Vec::new();
    }
    let in_both = || seen.iter().filter(|seen| seen.phase == Some(Phase::Both));
    let is_other = |one: &Seen, other: &Seen| other.key == one.key && other.side != one.side && other.phase.is_some();
    let is_alone = |one: &&Seen| !seen.iter().any(|other| is_other(one, other));
    let lease = |seen: &Seen| (seen.key.as_str().to_owned(), seen.side, seen.holder.token);
    in_both().filter(is_alone).map(lease).collect()
}

/// The holders that are no clients of the migration, where none should be: in the old store, and in the new one while the old one
/// has the locks, too.
fn others(record: &PhaseRecord, seen: &[Seen]) -> Vec<String> {
    let is_wrong = |side: Side| side == Side::Old || record.phase == Phase::Both;
    let others = seen.iter().filter(|seen| seen.phase.is_none() && is_wrong(seen.side));
    others.map(|seen| format!("{}, which holds {}", plain(&holder(&seen.holder)), plain(seen.key.as_str()))).collect()
}

/// The phases to which one step leads.
fn next(record: &PhaseRecord) -> &'static [Goal] {
    match record.phase {
        Phase::Old if record.is_shadowed => &[Goal::Phase(Phase::Both), Goal::Phase(Phase::Old)],
        Phase::Old => &[Goal::Phase(Phase::Both), Goal::Shadow],
        Phase::Both => &[Goal::Phase(Phase::New), Goal::Phase(Phase::Old)],
        Phase::New => &[Goal::Phase(Phase::Both)],
    }
}

fn in_words(status: &Status) -> String {
    let Status { state, fences, seen, clients, diverging } = status;
    let record = &state.record;
    let mut text = format!("phase   {} (change {})\n", record.phase_name(), record.epoch);
    for side in Side::ALL {
        let has = match &state.has[side.index()] {
            Ok(true) => "knows it".to_owned(),
            Ok(false) => "has an older record, or none: the next step brings it there".to_owned(),
            Err(error) => format!("can't be asked: {error}"),
        };
        let home = if record.home == side { ", the home" } else { "" };
        text += &format!("{:<7} {has}{home}\n", side.to_string());
    }
    let (ttl, fresh, drain) = (spoken(record.max_ttl), spoken(record.fresh), spoken(record.drain()));
    text += &format!("limits  locks of up to {ttl}; clients act on the phase for {fresh}; a wait is {drain}\n");
    if record.floor.get() > 0 {
        text += &format!("fences  above {}{}\n", record.floor, fences_in_words(record, *fences));
    }
    text += &format!("next    {}\n", next_in_words(record));
    text += &match clients {
        Ok(clients) => clients_in_words(record, clients),
        Err(error) => format!("\nthe clients can't be shown: {error}\n"),
    };
    if let Some(first) = diverging.first() {
        let many = diverging.len();
        text += &format!("\nwarning: locks that one store has lost and the other has not: {many}, such as {first}\n");
    }
    match seen {
        Ok(seen) => text + &holders(record, seen),
        Err(error) => text + &format!("\nthe holders can't be shown: {error}\n"),
    }
}

/// The clients that have signed on, those first that have read another phase, and what the new store has answered to them.
fn clients_in_words(record: &PhaseRecord, clients: &[Client]) -> String {
    let tally = Tally::sum(clients.iter().map(|client| client.tally));
    let behind = clients.iter().filter(|client| client.phase != record.phase);
    let all = behind.chain(clients.iter().filter(|client| client.phase == record.phase));
    let mut rows = table(&["CLIENT", "PHASE", "SEEN", "NEW STORE"]);
    for client in all.take(SHOWN) {
        let seen = client.seen.map_or_else(|| "-".to_owned(), |seen| format!("{} ago", spoken(seen)));
        rows.add_row([plain(client.name.as_str()), client.phase.to_string(), seen, answers(&client.tally)]);
    }
    if clients.is_empty() {
        return "\nno client of the migration has signed on\n".to_owned();
    }
    let mut text = format!("\n{}\n", rows.trim_fmt());
    if clients.len() > SHOWN {
        text += &format!("and {} more; in all {}\n", clients.len() - SHOWN, answers(&tally));
    }
    if tally.disagrees() && record.is_shadowed {
        text += "\nwarning: the new store refused or lost locks that the old one had granted: see docs/migration.md\n";
    }
    text
}

fn answers(tally: &Tally) -> String {
    if *tally == Tally::default() {
        return "-".to_owned();
    }
    let Tally { granted, refused, failed, lost, mean, longest } = tally;
    let millis = |time: &Duration| format!("{:.1}ms", time.as_secs_f64() * 1e3);
    format!(
        "granted {granted}, refused {refused}, failed {failed}, lost {lost}; {} more each, at most {}",
        millis(mean),
        millis(longest)
    )
}

/// When clients of the one store can do without the migration, as far as fences go.
fn fences_in_words(record: &PhaseRecord, fences: Option<Fences>) -> String {
    let (phase, floor) = (record.phase, record.floor);
    match fences {
        Some(Fences::Higher) => format!("; the {phase} store by itself goes on above that"),
        Some(Fences::HigherIn(time)) => {
            format!(
                "; the {phase} store by itself goes on above that in {}: not before then use it alone",
                spoken(time)
            )
        }
        Some(Fences::Lower) => {
            format!("; the {phase} store by itself stays below: to use it alone, add fence_above={floor} to its URL")
        }
        _ => String::new(),
    }
}

fn next_in_words(record: &PhaseRecord) -> &'static str {
    match record.phase {
        Phase::Old if record.is_shadowed => "advance, to the phase both; or rollback, to the phase old",
        Phase::Old => "advance, to the phase both, or first --to-phase shadow; or finish, to give the migration up",
        Phase::Both => "advance, to the phase new; or rollback, to the phase old",
        Phase::New => "finish, once every service uses the new store alone; or rollback, to the phase both",
    }
}

fn holders(record: &PhaseRecord, seen: &[Seen]) -> String {
    let count = |side: Side, phase: Option<Phase>| {
        seen.iter().filter(|seen| seen.side == side && seen.phase == phase).count().to_string()
    };
    let mut counts = table(&["HELD IN", "AS OLD", "AS BOTH", "AS NEW", "BY OTHERS"]);
    for side in Side::ALL {
        let mut row = vec![side.to_string()];
        row.extend([Some(Phase::Old), Some(Phase::Both), Some(Phase::New), None].map(|phase| count(side, phase)));
        counts.add_row(row);
    }
    let mut text = format!("\n{}\n", counts.trim_fmt());
    let others = others(record, seen);
    if let Some(first) = others.first() {
        let many = others.len();
        text += &format!(
            "\nwarning: locks held by clients that know nothing of the migration: {many}, such as by {first}\n"
        );
    }
    if !seen.is_empty() {
        let mut rows = table(&["KEY", "STORE", "PHASE", "HOLDER", "LEFT"]);
        for seen in seen.iter().take(SHOWN) {
            let phase = seen.phase.map_or_else(|| "-".to_owned(), |phase| phase.to_string());
            let (key, who) = (plain(seen.key.as_str()), plain(&holder(&seen.holder)));
            rows.add_row([key, seen.side.to_string(), phase, who, left(&seen.holder)]);
        }
        text += &format!("\n{}\n", rows.trim_fmt());
        if seen.len() > SHOWN {
            text += &format!("and {} more\n", seen.len() - SHOWN);
        }
    }
    text
}

fn to_json(status: &Status) -> Value {
    let Status { state, fences, seen, clients, diverging } = status;
    let record = &state.record;
    let has = |side: Side| state.has[side.index()].as_ref().ok().copied();
    let holder = |seen: &Seen| {
        json!({
            "store": seen.side.to_string(),
            "key": seen.key.as_str(),
            "holder": seen.holder.info.as_str(),
            "phase": seen.phase.map(|phase| phase.to_string()),
            "remaining_ms": seen.holder.remaining.map(millis),
        })
    };
    let holders = seen.as_ref().ok().map(|seen| seen.iter().map(holder).collect::<Vec<_>>());
    let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
    let client = |client: &Client| {
        let Tally { granted, refused, failed, lost, mean, longest } = client.tally;
        json!({
            "name": client.name.as_str(),
            "phase": client.phase.to_string(),
            "seen_ms": client.seen.map(millis),
            "new_store": {
                "granted": granted, "refused": refused, "failed": failed, "lost": lost,
                "mean_us": micros(mean), "longest_us": micros(longest),
            },
        })
    };
    let clients = clients.as_ref().ok().map(|clients| clients.iter().map(client).collect::<Vec<_>>());
    json!({
        "phase": record.phase_name(),
        "epoch": record.epoch,
        "home": record.home.to_string(),
        "floor": record.floor.get(),
        "alone_above_floor_in_ms": match fences {
            Some(Fences::Higher) => Some(0),
            Some(Fences::HigherIn(time)) => Some(millis(*time)),
            _ => None,
        },
        "max_ttl_ms": millis(record.max_ttl),
        "fresh_ms": millis(record.fresh),
        "drain_ms": millis(record.drain()),
        "at": { "from": has(Side::Old), "to": has(Side::New) },
        "next": next(record).iter().map(ToString::to_string).collect::<Vec<_>>(),
        "holders": holders,
        "clients": clients,
        "diverging": diverging,
    })
}

#[cfg(test)]
pub(super) mod tests {
    use lockkit::{
        Fence, HolderInfo, LockKey, Mode,
        migrate::Start,
        store::{Holder, Identity},
    };

    use super::*;

    fn token() -> Token {
        Token::random().expect("random")
    }

    pub(in crate::migrate) fn record() -> PhaseRecord {
        let Start { max_ttl, fresh, home_is_durable, .. } = Start::default();
        PhaseRecord {
            id: token(),
            stores: [token(), token()].map(|token| token.reveal().parse::<Identity>().expect("an identity")),
            home: Side::Old,
            home_is_durable,
            max_ttl,
            fresh,
            epoch: 2,
            phase: Phase::Both,
            is_over: false,
            is_told: false,
            is_shadowed: false,
            came_from: Phase::Old,
            floor: Fence::NONE,
            logs: 0,
            stamp: token(),
        }
    }

    fn seen(key: &str, side: Side, phase: Option<Phase>) -> Seen {
        let info = HolderInfo::new("billing");
        let token = Some(token());
        let holder = Holder { token, info, mode: Mode::Exclusive, depth: 1, fence: None, remaining: None };
        Seen { key: LockKey::new(key).expect("a name"), side, phase, holder }
    }

    #[test]
    fn a_lock_diverges_if_one_lease_is_in_one_store_only() {
        let both = Some(Phase::Both);
        let in_both = [seen("a", Side::Old, both), seen("a", Side::New, both)];
        assert!(in_one(&record(), &in_both).is_empty());
        // On its way into both, and not yet shown as such in the old store.
        let taken_along = [seen("a", Side::Old, Some(Phase::Old)), seen("a", Side::New, both)];
        assert!(in_one(&record(), &taken_along).is_empty());
        let stranger = [seen("a", Side::Old, None), seen("a", Side::New, both)];
        assert_eq!(in_one(&record(), &stranger).len(), 1, "the old store has lost it to a plain client");
        // Two holders, one after the other: each is in one store for a moment.
        let (first, second) = ([seen("a", Side::Old, both)], [seen("a", Side::Old, both)]);
        assert_ne!(in_one(&record(), &first), in_one(&record(), &second));
        assert!(in_one(&PhaseRecord { phase: Phase::Old, ..record() }, &first).is_empty());
    }
}
