//! The choices that keys make: the order, the prefix, the lock that is marked. Decisions alone.

use lockkit::LockKey;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use super::{order::Order, watch::Lock};
use crate::store;

/// The effect of a key beyond the view itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Wish {
    Nothing,
    Quit,
    /// Show the locks whose names start with this, and count anew.
    Filter(String),
}

/// The choices.
#[derive(Debug, Default)]
pub(super) struct View {
    pub(super) order: Order,
    /// A prefix that is being typed.
    pub(super) typed: Option<String>,
    /// Why the text that was typed can't be used.
    pub(super) refused: Option<String>,
    /// The lock that is marked. It stays marked when the order changes. `None`: whichever lock is the first.
    marked: Option<LockKey>,
    /// Where it is among the locks.
    pub(super) place: usize,
    /// Which lock is in the first row of the screen.
    pub(super) first: usize,
    /// How many rows the screen has for locks.
    page: usize,
}

impl View {
    pub(super) fn new(order: Order) -> Self {
        Self { order, ..Self::default() }
    }

    /// Finds the mark again among the locks as they are now, and moves as many rows into sight as there is room for.
    pub(super) fn settle(&mut self, locks: &[&Lock], page: usize) {
        let last = locks.len().saturating_sub(1);
        let is_marked = |lock: &&Lock| Some(&lock.state.key) == self.marked.as_ref();
        self.place = match (&self.marked, locks.iter().position(is_marked)) {
            (None, _) => 0,
            (Some(_), Some(place)) => place,
            // It is gone: the one in its place is marked.
            (Some(_), None) => self.place.min(last),
        };
        if self.marked.is_some() {
            self.marked = locks.get(self.place).map(|lock| lock.state.key.clone());
        }
        self.page = page.max(1);
        let least = (self.place + 1).saturating_sub(self.page);
        self.first = self.first.clamp(least, self.place).min(locks.len().saturating_sub(self.page)).max(least);
    }

    /// A key was pressed; `locks` are those on show, in their order.
    pub(super) fn pressed(&mut self, key: KeyEvent, locks: &[&Lock]) -> Wish {
        if key.kind == KeyEventKind::Release {
            return Wish::Nothing;
        }
        let is_control = key.modifiers.contains(KeyModifiers::CONTROL);
        if is_control && matches!(key.code, KeyCode::Char('c')) {
            return Wish::Quit;
        }
        self.refused = None;
        if let Some(typed) = self.typed.take() {
            return self.typing(typed, key, is_control);
        }
        match key.code {
            KeyCode::Char('q') | KeyCode::Esc => return Wish::Quit,
            KeyCode::Char('s') => self.order = self.order.next(),
            KeyCode::Char('/') => self.typed = Some(String::new()),
            KeyCode::Down | KeyCode::Char('j') => self.mark(self.place.saturating_add(1), locks),
            KeyCode::Up | KeyCode::Char('k') => self.mark(self.place.saturating_sub(1), locks),
            KeyCode::PageDown => self.mark(self.place.saturating_add(self.page), locks),
            KeyCode::PageUp => self.mark(self.place.saturating_sub(self.page), locks),
            KeyCode::End | KeyCode::Char('G') => self.mark(usize::MAX, locks),
            // Back to whichever lock comes first.
            KeyCode::Home | KeyCode::Char('g') => self.mark(0, &[]),
            _ => {}
        }
        Wish::Nothing
    }

    fn mark(&mut self, place: usize, locks: &[&Lock]) {
        self.place = place.min(locks.len().saturating_sub(1));
        self.marked = locks.get(self.place).map(|lock| lock.state.key.clone());
    }

    fn typing(&mut self, mut typed: String, key: KeyEvent, is_control: bool) -> Wish {
        match key.code {
            KeyCode::Esc => return Wish::Nothing,
            KeyCode::Enter => match store::text(&typed) {
                Ok(prefix) => {
                    (self.marked, self.place, self.first) = (None, 0, 0);
                    return Wish::Filter(prefix);
                }
                Err(why) => {
                    self.refused = Some(why);
                    return Wish::Nothing;
                }
            },
            KeyCode::Backspace => drop(typed.pop()),
            KeyCode::Char('u') if is_control => typed.clear(),
            // A longer one is the beginning of no name.
            KeyCode::Char(c) if !is_control && typed.len() + c.len_utf8() <= LockKey::MAX_BYTES => typed.push(c),
            _ => {}
        }
        self.typed = Some(typed);
        Wish::Nothing
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::{
        super::watch::{
            Watch,
            tests::{at, lock},
        },
        *,
    };

    fn watch(names: &[&str]) -> Watch {
        let mut watch = Watch::default();
        watch.listed(names.iter().map(|name| lock(name, &[(1, 30)])).collect(), at(Instant::now(), 0));
        watch
    }

    fn key(code: KeyCode) -> KeyEvent {
        KeyEvent::new(code, KeyModifiers::NONE)
    }

    fn types(view: &mut View, text: &str) -> Wish {
        text.chars().map(|c| view.pressed(key(KeyCode::Char(c)), &[])).last().expect("some text")
    }

    #[test]
    fn three_keys_quit() {
        let control_c = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        for quits in [key(KeyCode::Char('q')), key(KeyCode::Esc), control_c] {
            assert_eq!(View::default().pressed(quits, &[]), Wish::Quit);
        }
        // While a prefix is typed, one of them is a letter, and one ends the typing.
        let mut view = View::default();
        assert_eq!(types(&mut view, "/q"), Wish::Nothing);
        assert_eq!(view.typed.as_deref(), Some("q"));
        assert_eq!((view.pressed(key(KeyCode::Esc), &[]), view.typed.as_deref()), (Wish::Nothing, None));
        types(&mut view, "/q");
        assert_eq!(view.pressed(control_c, &[]), Wish::Quit);
    }

    #[test]
    fn a_prefix_is_typed() {
        let mut view = View::default();
        types(&mut view, "/orderx");
        view.pressed(key(KeyCode::Backspace), &[]);
        assert_eq!(types(&mut view, "s/"), Wish::Nothing);
        assert_eq!(view.pressed(key(KeyCode::Enter), &[]), Wish::Filter("orders/".to_owned()));
        assert_eq!(view.typed, None);
        types(&mut view, "/orders");
        view.pressed(KeyEvent::new(KeyCode::Char('u'), KeyModifiers::CONTROL), &[]);
        assert_eq!(view.pressed(key(KeyCode::Enter), &[]), Wish::Filter(String::new()));
    }

    #[test]
    fn a_url_is_no_prefix() {
        let mut view = View::default();
        types(&mut view, "/redis://:hunter2@h");
        assert_eq!(view.pressed(key(KeyCode::Enter), &[]), Wish::Nothing);
        let refused = view.refused.clone().expect("refused");
        assert!(refused.contains("--store") && !refused.contains("hunter2"), "{refused}");
        // It has been read when the next key is pressed.
        types(&mut view, "j");
        assert_eq!(view.refused, None);
    }

    #[test]
    fn the_mark_stays_with_its_lock() {
        let mut view = View::default();
        let four = watch(&["b", "c", "d", "e"]);
        let locks = Order::Key.sorted(&four);
        view.settle(&locks, 10);
        view.pressed(key(KeyCode::Down), &locks);
        view.pressed(key(KeyCode::Char('j')), &locks);
        view.settle(&locks, 10);
        assert_eq!(view.place, 2);
        // Another one came before it.
        let more = watch(&["a", "b", "c", "d", "e"]);
        view.settle(&Order::Key.sorted(&more), 10);
        assert_eq!(view.place, 3);
        // It is gone, then all are.
        let fewer = watch(&["a", "b"]);
        view.settle(&Order::Key.sorted(&fewer), 10);
        assert_eq!(view.place, 1);
        view.settle(&[], 10);
        assert_eq!((view.place, view.pressed(key(KeyCode::Down), &[])), (0, Wish::Nothing));
    }

    #[test]
    fn without_a_mark_the_first_one_is_meant() {
        let mut view = View::default();
        view.settle(&Order::Key.sorted(&watch(&["b"])), 10);
        view.settle(&Order::Key.sorted(&watch(&["a", "b"])), 10);
        assert_eq!(view.place, 0);
    }

    #[test]
    fn the_mark_is_always_in_sight() {
        let names: Vec<_> = (0..100).map(|n| format!("{n:03}")).collect();
        let hundred = watch(&names.iter().map(String::as_str).collect::<Vec<_>>());
        let locks = Order::Key.sorted(&hundred);
        let mut view = View::default();
        view.settle(&locks, 10);
        for (code, page, place, first) in [
            (KeyCode::PageDown, 10, 10, 1),
            (KeyCode::Up, 10, 9, 1),
            (KeyCode::End, 10, 99, 90),
            // The screen shrank, then grew beyond what there is.
            (KeyCode::Null, 3, 99, 97),
            (KeyCode::Null, 200, 99, 0),
            (KeyCode::Null, 0, 99, 99),
            (KeyCode::Home, 10, 0, 0),
        ] {
            view.pressed(key(code), &locks);
            view.settle(&locks, page);
            assert_eq!((view.place, view.first), (place, first), "{code:?}");
        }
    }
}
