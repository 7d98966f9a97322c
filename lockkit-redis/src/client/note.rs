//! Where a server's note about its epoch is.
//!
//! In a cluster it lies in one of the server's slots, and while that is on its way to another member, the server answers for no key
//! of it that has left already, or never was there (`ASK`). Then the note is kept in another slot.

use std::{collections::HashSet, sync::Mutex};

use lockkit_core::{Error, Result, store::unpoisoned};

use crate::wire::{name::Names, redirect::Redirect};

/// Ranges of slots: the first and the last of each.
pub(crate) type Ranges = [(u16, u16)];

/// How many slots are tried. As a rule slots move one after the other, and one other slot is enough.
const SLOTS_TRIED: usize = 8;

/// The key of a server's note about its epoch.
#[derive(Debug, Default)]
pub(crate) struct NoteKey {
    names: Names,
    slots: Mutex<UsableSlots>,
}

#[derive(Debug, Default)]
struct UsableSlots {
    key: String,
    slots: Vec<(u16, u16)>,
    /// Those of them that were on their way to another server.
    shunned: HashSet<u16>,
}

impl NoteKey {
    /// The key of the note of a server with these slots, or with all that there are. One without slots keeps none.
    pub(crate) fn new(names: &Names, slots: &Ranges) -> Self {
        let note = Self { names: names.clone(), slots: Mutex::default() };
        note.keep_in(slots);
        note
    }

    /// The slots of the server have changed. Whether the key has.
    pub(crate) fn keep_in(&self, slots: &Ranges) -> bool {
        self.change(|usable| {
            usable.slots = slots.to_vec();
            usable.shunned.retain(|slot| contains(slots, *slot));
        })
    }

    /// Asks something with the key, and with another one while its slot is on its way to another server.
    ///
    /// # Errors
    /// What is answered last.
    pub(crate) async fn ask<T, F>(&self, ask: impl Fn(String) -> F) -> Result<T>
    where
        F: Future<Output = Result<T>>,
    {
        let mut answer = ask(self.key()).await;
        for _ in 1..SLOTS_TRIED {
            match &answer {
                Err(e) if self.evade(e) => answer = ask(self.key()).await,
                _ => break,
            }
        }
        answer
    }

    fn key(&self) -> String {
        unpoisoned(&self.slots).key.clone()
    }

    /// Chooses another slot, if the error says that the present one is on its way. Whether there is reason to ask again.
    fn evade(&self, error: &Error) -> bool {
        let moving = Redirect::of(error).filter(|to| to.asking);
        moving.is_some_and(|to| self.change(|usable| _ = usable.shunned.insert(to.slot)))
    }

    fn change(&self, change: impl FnOnce(&mut UsableSlots)) -> bool {
        let mut usable = unpoisoned(&self.slots);
        change(&mut usable);
        if usable.slots.is_empty() {
            return false;
        }
        let count: usize = usable.slots.iter().map(|(first, last)| usize::from(last - first) + 1).sum();
        if usable.shunned.len() >= count {
            // All were on their way, at one time or another.
            usable.shunned.clear();
        }
        let key = self.names.note(|slot| contains(&usable.slots, slot) && !usable.shunned.contains(&slot));
        std::mem::replace(&mut usable.key, key) != usable.key
    }
}

fn contains(slots: &Ranges, slot: u16) -> bool {
    slots.iter().any(|(first, last)| (*first..=*last).contains(&slot))
}
