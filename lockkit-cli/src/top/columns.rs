//! The columns of the table: which of them a screen has room for, and their texts for a lock.

use std::fmt::Display;

use lockkit::Holder;
use ratatui::{layout::Constraint, text::Span};

use super::watch::{Lock, Watch};
use crate::{
    duration::spoken,
    show::{holder, plain},
};

/// A column of the table.
pub(super) struct Column {
    pub(super) head: &'static str,
    /// From this width of the screen on it is shown: twenty columns for each of the names must remain.
    least: u16,
    pub(super) width: Constraint,
    pub(super) text: fn(&Lock, &Watch) -> String,
}

/// The columns that a screen of this width has room for. The others are facts about the marked lock, below.
pub(super) fn fitting(width: u16) -> impl Iterator<Item = &'static Column> {
    COLUMNS.iter().filter(move |column| width >= column.least)
}

const COLUMNS: [Column; 9] = [
    column("KEY", 0, Constraint::Fill(1), |lock, _| plain(lock.state.key.as_str())),
    column("HOLDER", 0, Constraint::Fill(1), |lock, _| holders_in_words(lock)),
    column("MODE", 80, Constraint::Length(9), |lock, _| of_first(lock, |holder| Some(holder.mode))),
    column("DEPTH", 90, Constraint::Length(5), |lock, _| of_first(lock, |holder| Some(holder.depth))),
    column("FENCE", 110, Constraint::Length(16), |lock, _| of_first(lock, |holder| holder.fence)),
    column("LEFT", 0, Constraint::Length(7), |lock, _| or_none(lock.left().map(|time| spoken(time) + late(lock)))),
    column("WAITERS", 50, Constraint::Length(7), |lock, _| or_none(lock.state.waiters)),
    column("CHANGES/S", 60, Constraint::Length(9), |lock, watch| {
        or_none(watch.rate(lock).map(|rate| format!("{rate:.1}")))
    }),
    // A lock whose leases have no time limit loses none by time.
    column("LAPSED", 70, Constraint::Length(6), |lock, _| {
        let is_endless = lock.is_held() && lock.left().is_none();
        or_none(Some(lock.lapses).filter(|lapses| *lapses > 0 || !is_endless))
    }),
];

const fn column(head: &'static str, least: u16, width: Constraint, text: fn(&Lock, &Watch) -> String) -> Column {
    Column { head, least, width, text }
}

fn or_none(value: Option<impl Display>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}

fn of_first<T: Display>(lock: &Lock, fact: fn(&Holder) -> Option<T>) -> String {
    or_none(lock.state.holders.first().and_then(fact))
}

fn holders_in_words(lock: &Lock) -> String {
    match lock.state.holders.as_slice() {
        [] => "free".to_owned(),
        [one] => plain(&holder(one)),
        [first, others @ ..] => format!("{} and {} more", plain(&holder(first)), others.len()),
    }
}

/// Whether a lease of it is not being renewed.
pub(super) fn is_late(lock: &Lock) -> bool {
    lock.state.holders.iter().any(|holder| lock.is_late(holder))
}

/// A mark beside the colour, which not every terminal has, nor can everybody see it.
fn late(lock: &Lock) -> &'static str {
    if is_late(lock) { "!" } else { "" }
}

/// A text of at most this width: names that begin alike differ at their end, so that the middle is left out.
pub(super) fn shortened(text: &str, width: usize) -> String {
    let wide = |text: &str| Span::raw(text).width();
    if wide(text) <= width {
        return text.to_owned();
    }
    let room = width.saturating_sub(1);
    let (mut head, mut tail) = (String::new(), Vec::new());
    let (mut used, mut chars) = (0, text.chars());
    // In turn from the front and from the back.
    for is_front in [true, false].into_iter().cycle() {
        let next = if is_front { chars.next() } else { chars.next_back() };
        let Some(c) = next.filter(|c| used + wide(c.encode_utf8(&mut [0; 4])) <= room) else { break };
        used += wide(c.encode_utf8(&mut [0; 4]));
        if is_front { head.push(c) } else { tail.push(c) }
    }
    let dots = if width > 0 { "…" } else { "" };
    head + dots + &tail.into_iter().rev().collect::<String>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_names_keep_both_ends() {
        assert_eq!(shortened("abcdefgh", 8), "abcdefgh");
        assert_eq!(shortened("abcdefgh", 5), "ab…gh");
        assert_eq!(shortened("漢字漢字", 5), "漢…字");
        assert_eq!((shortened("abc", 1), shortened("abc", 0)), ("…".to_owned(), String::new()));
    }

    #[test]
    fn a_narrow_screen_has_fewer_columns() {
        let heads = |width| fitting(width).map(|column| column.head).collect::<Vec<_>>().join(" ");
        assert_eq!(heads(120), "KEY HOLDER MODE DEPTH FENCE LEFT WAITERS CHANGES/S LAPSED");
        assert_eq!(heads(80), "KEY HOLDER MODE LEFT WAITERS CHANGES/S LAPSED");
        assert_eq!(heads(40), "KEY HOLDER LEFT");
    }
}
