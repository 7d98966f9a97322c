//! Draws the view. Nothing is decided here but how much of it there is room for.

use std::time::{Duration, Instant};

use lockkit::Holder;
use ratatui::{
    Frame,
    layout::{Alignment, Constraint, Layout, Rect},
    style::{Color, Modifier, Style},
    text::{Line, Span},
    widgets::{Block, Borders, Cell, Paragraph, Row, Table, Wrap},
};

use super::{
    columns::{fitting, is_late, shortened},
    looks::{Looks, NAMED},
    view::View,
    watch::{Lock, Watch},
};
use crate::{
    duration::spoken,
    show::{holder, left, plain},
};

/// From this height on there is room for details of the marked lock.
const HEIGHT_WITH_DETAILS: u16 = 16;
/// The rows for them, with a line above.
const DETAILS: u16 = 6;

/// Lists that come more seldom than this are mentioned: a new lock may be missing for as long.
const SELDOM: Duration = Duration::from_secs(2);

/// All that is drawn.
pub(super) struct Scene<'a> {
    pub(super) store: &'a str,
    pub(super) warnings: &'a [String],
    pub(super) looks: &'a Looks,
    /// In the order in which they are shown.
    pub(super) locks: &'a [&'a Lock],
    pub(super) now: Instant,
}

/// Draws all of it, and lets the view know how many locks have room.
pub(super) fn draw(frame: &mut Frame<'_>, scene: &Scene<'_>, view: &mut View) {
    let has_warning = u16::from(!scene.warnings.is_empty());
    let details = if frame.area().height >= HEIGHT_WITH_DETAILS { DETAILS } else { 0 };
    let text = news_of(scene);
    // An error is worth more than a row, and the rest of it is cut.
    let is_long = scene.looks.failed.is_some() && text.width() > usize::from(frame.area().width);
    let [title, figures, news, warning, table, below, keys] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Length(if is_long { 3 } else { 1 }),
        Constraint::Length(has_warning),
        Constraint::Min(2),
        Constraint::Length(details),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    view.settle(scene.locks, usize::from(table.height.saturating_sub(1)));
    frame.render_widget(title_of(scene, view), title);
    if scene.looks.watch.last().is_some() {
        frame.render_widget(Line::raw(figures_of(&scene.looks.watch)), figures);
    }
    frame.render_widget(Paragraph::new(text).wrap(Wrap { trim: true }), news);
    if let Some(text) = scene.warnings.first() {
        let more = if scene.warnings.len() > 1 { " (and more)" } else { "" };
        frame.render_widget(Line::styled(format!("warning: {}{more}", plain(text)), Color::Yellow), warning);
    }
    draw_table(frame, scene, view, table);
    if let Some(lock) = scene.locks.get(view.place).filter(|_| details > 0) {
        draw_details(frame, lock, below);
    }
    draw_keys(frame, scene, view, keys);
}

fn title_of<'a>(scene: &Scene<'_>, view: &View) -> Line<'a> {
    let names = match scene.looks.prefix.as_str() {
        "" => "all names".to_owned(),
        prefix => format!("names that start with {}", plain(prefix)),
    };
    let title = Span::styled(format!("locks on {}", plain(scene.store)), Modifier::BOLD);
    Line::from(vec![title, Span::raw(format!("  {names}, sorted by {}", view.order.name()))])
}

fn figures_of(watch: &Watch) -> String {
    let totals = watch.totals();
    let waiters =
        totals.waiters.map_or_else(|| "waiters are not known".to_owned(), |waiters| format!("{waiters} waiting"));
    let rate = totals.rate.map_or_else(|| "-".to_owned(), |rate| format!("{rate:.1}"));
    let since = spoken(totals.since);
    let (held, changes, lapses) = (totals.held, totals.changes, totals.lapses);
    format!("{held} held, {waiters}, {rate} changes/s; in {since}: {changes} changes, {lapses} lapsed")
}

/// The age of the figures, and the reason if there are no newer ones.
fn news_of<'a>(scene: &Scene<'_>) -> Line<'a> {
    let ago = |moment: Instant| spoken(scene.now.saturating_duration_since(moment));
    let looks = scene.looks;
    let age = looks.watch.last().map(ago);
    if let Some(failed) = &looks.failed {
        let age = age.map_or_else(|| "there are no figures yet".to_owned(), |age| format!("the figures are {age} old"));
        let text = format!("STORE AWAY for {}, {age}: {}", ago(failed.since), plain(failed.why.message()));
        return Line::styled(text, Style::new().fg(Color::Red).add_modifier(Modifier::BOLD));
    }
    let (Some(age), Some(listed)) = (age, looks.pace.listed) else { return Line::raw("asking the store") };
    let mut text = format!("as of {age} ago");
    let rest = looks.pace.list_due.saturating_duration_since(listed);
    // Else nobody notices: on a store with few locks each look is a list.
    if rest > SELDOM {
        text += &format!("; other locks were looked for {} ago, as they are every {}", ago(listed), spoken(rest));
    }
    if scene.locks.len() > NAMED {
        text += &format!("; in between, only the {NAMED} around the marked one are looked at");
    }
    Line::styled(text, Modifier::DIM)
}

fn draw_table(frame: &mut Frame<'_>, scene: &Scene<'_>, view: &View, area: Rect) {
    let columns: Vec<_> = fitting(area.width).collect();
    let widths: Vec<_> = columns.iter().map(|column| column.width).collect();
    // As the table does it itself, to know how long a name may be.
    let areas = Layout::horizontal(&widths).spacing(1).split(Rect { x: 0, ..area });
    let row = |(place, lock): (usize, &&Lock)| {
        let cells = columns.iter().zip(areas.iter()).map(|(column, area)| {
            Cell::from(shortened(&(column.text)(lock, &scene.looks.watch), usize::from(area.width)))
        });
        let style = match () {
            () if !lock.is_held() => Style::new().add_modifier(Modifier::DIM),
            () if is_late(lock) => Style::new().fg(Color::Yellow),
            () => Style::new(),
        };
        let mark = if place == view.place { Modifier::REVERSED } else { Modifier::empty() };
        Row::new(cells).style(style.add_modifier(mark))
    };
    let page = usize::from(area.height.saturating_sub(1));
    let rows = scene.locks.iter().enumerate().skip(view.first).take(page).map(row);
    let head = Row::new(columns.iter().map(|column| column.head)).style(Modifier::BOLD);
    frame.render_widget(Table::new(rows, widths).header(head).column_spacing(1), area);
    if scene.locks.is_empty() && scene.looks.watch.last().is_some() && area.height > 1 {
        let below = Rect { y: area.y + 1, height: 1, ..area };
        frame.render_widget(Line::styled("nothing is held", Modifier::DIM), below);
    }
}

/// All that is known of the holders of one lock, as far as there is room.
fn draw_details(frame: &mut Frame<'_>, lock: &Lock, area: Rect) {
    let width = usize::from(area.width);
    let name = shortened(&plain(lock.state.key.as_str()), width.saturating_sub(4));
    let block = Block::new().borders(Borders::TOP).title(format!(" {name} "));
    let fence = lock.state.fence.map_or_else(|| "not known".to_owned(), |fence| fence.to_string());
    let waiters = match lock.state.waiters {
        None => "waiters not known".to_owned(),
        Some(0) => "nobody waits".to_owned(),
        Some(waiters) => format!("{waiters} waiting"),
    };
    let mut lines = vec![Line::raw(format!(
        "{} changes of holder, {} lapsed; {waiters}; last fence {fence}",
        lock.changes, lock.lapses
    ))];
    let room = usize::from(block.inner(area).height).saturating_sub(lines.len());
    let holders = &lock.state.holders;
    let shown = if holders.len() > room { room.saturating_sub(1) } else { holders.len() };
    lines.extend(holders[..shown].iter().map(|holder| of_holder(holder, lock, width)));
    if holders.len() > shown {
        lines.push(Line::raw(format!("and {} more: lockkit who", holders.len() - shown)));
    }
    frame.render_widget(Paragraph::new(lines).block(block), area);
}

fn of_holder<'a>(hold: &Holder, lock: &Lock, width: usize) -> Line<'a> {
    let fence = hold.fence.map_or_else(String::new, |fence| format!(", fence {fence}"));
    let depth = if hold.depth == 1 { String::new() } else { format!(", depth {}", hold.depth) };
    let time = match (hold.remaining, lock.is_late(hold)) {
        (None, _) => "no time limit".to_owned(),
        (Some(_), false) => format!("{} left", left(hold)),
        (Some(_), true) => format!("{} left! It is not being renewed", left(hold)),
    };
    let facts = format!(": {}{depth}{fence}, {time}", hold.mode);
    let name = shortened(&plain(&holder(hold)), width.saturating_sub(Span::raw(&facts).width()).max(20));
    Line::raw(name + &facts)
}

fn draw_keys(frame: &mut Frame<'_>, scene: &Scene<'_>, view: &View, area: Rect) {
    if let Some(typed) = &view.typed {
        let before = "prefix of names: ";
        // One column is for the cursor.
        let room = usize::from(area.width).saturating_sub(before.len() + 1);
        let line = Line::raw(before.to_owned() + &shortened(&plain(typed), room));
        let end = u16::try_from(line.width()).unwrap_or(u16::MAX).min(area.width.saturating_sub(1));
        frame.render_widget(line, area);
        frame.set_cursor_position((area.x + end, area.y));
        return;
    }
    if let Some(refused) = &view.refused {
        frame.render_widget(Line::styled(refused.clone(), Color::Red), area);
        return;
    }
    let place = match scene.locks.len() {
        0 => String::new(),
        all => format!("{} of {all} ", view.place + 1),
    };
    let keys = "q quit   j/k or arrows: mark   s sort   / prefix";
    frame.render_widget(Line::styled(keys, Modifier::DIM), area);
    if usize::from(area.width) > keys.len() + place.len() {
        frame.render_widget(Line::styled(place, Modifier::DIM).alignment(Alignment::Right), area);
    }
}

/// How often the screen is drawn although nothing came: ages go on.
pub(super) const REDRAW: Duration = Duration::from_millis(500);

#[cfg(test)]
mod tests {
    use lockkit::{Fence, Locker, MemoryStore};
    use ratatui::{Terminal, backend::TestBackend};

    use super::{
        super::{looks::Failed, order::Order, watch::tests as seen},
        *,
    };
    use crate::exit::Failure;

    fn looks() -> Looks {
        Looks::new(Locker::new(MemoryStore::new()), String::new(), Duration::from_secs(1))
    }

    /// What is on a screen of this size, line by line.
    fn screen(looks: &Looks, view: &mut View, width: u16, height: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("a screen");
        let locks = view.order.sorted(&looks.watch);
        let warnings = ["it may evict locks".to_owned()];
        let scene = Scene { store: "redis h:1", warnings: &warnings, looks, locks: &locks, now: Instant::now() };
        terminal.draw(|frame| draw(frame, &scene, view)).expect("drawn");
        let buffer = terminal.backend().buffer().clone();
        let rows = buffer.content().chunks(usize::from(width.max(1)));
        rows.map(|row| row.iter().map(|cell| cell.symbol()).collect::<String>().trim_end().to_owned() + "\n").collect()
    }

    #[test]
    fn what_is_known_is_shown() {
        let (mut looks, start) = (looks(), Instant::now());
        looks
            .watch
            .listed(vec![seen::lock("order/1", &[(1, 30)]), seen::lock("a\u{1b}[31m", &[(2, 9)])], seen::at(start, 0));
        let mut state = seen::lock("order/1", &[(1, 12), (3, 30)]);
        state.fence = Some(Fence::new(77));
        looks.watch.looked(vec![state], seen::at(start, 1));
        let mut view = View::new(Order::Changes);
        let text = screen(&looks, &mut view, 120, 24);
        for part in [
            "locks on redis h:1  all names, sorted by changes",
            "2 held, 2 waiting, 1.0 changes/s; in 1.0s: 1 changes, 0 lapsed",
            "warning: it may evict locks",
            "host-1 and 1 more",
            "12.0s!",
            "a\\u{1b}[31m",
            "1 changes of holder, 0 lapsed; 1 waiting; last fence 77",
            "host-1: exclusive, fence 1, 12.0s left! It is not being renewed",
            "q quit",
            "1 of 2",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(!text.contains('\u{1b}'), "{text}");
    }

    #[test]
    fn a_store_that_is_away_is_seen_to_be() {
        let mut looks = looks();
        let since = Instant::now();
        looks.failed = Some(Failed { why: Failure::new(69, "unavailable: refused"), since });
        let text = screen(&looks, &mut View::default(), 100, 24);
        assert!(
            text.contains("STORE AWAY for ") && text.contains("there are no figures yet: unavailable: refused"),
            "{text}"
        );
        looks.watch.listed(vec![seen::lock("a", &[(1, 30)])], seen::at(since, 0));
        let text = screen(&looks, &mut View::default(), 100, 24);
        assert!(text.contains("the figures are ") && text.contains("host-1"), "{text}");
        // The reason has room on a small screen, too.
        let text = screen(&looks, &mut View::default(), 40, 10);
        assert!(text.contains("unavailable: refused") && text.contains("host-1"), "{text}");
    }

    /// No size is too small, whatever the names and however many there are.
    #[test]
    fn every_size_of_screen_is_drawn() {
        let (mut looks, start) = (looks(), Instant::now());
        let names: Vec<_> = (0..40).map(|n| format!("{}é漢字{n}", "long/".repeat(n))).collect();
        looks.watch.listed(names.iter().map(|name| seen::lock(name, &[(1, 30), (2, 9)])).collect(), seen::at(start, 0));
        for width in [0, 1, 19, 40, 62, 79, 130] {
            for height in [0, 1, 3, 6, 15, 16, 30] {
                let mut view = View::default();
                screen(&looks, &mut view, width, height);
                view.typed = Some("x".repeat(100));
                screen(&looks, &mut view, width, height);
            }
        }
    }
}
