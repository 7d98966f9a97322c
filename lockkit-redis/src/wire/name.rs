//! From a lock's name to its keys and back (rule R11).
//!
//! | prefix    | name                                             | lock key                                |
//! |-----------|--------------------------------------------------|-----------------------------------------|
//! | not empty | any                                              | prefix + name, `{` `}` `%` as `%7B`...  |
//! | empty     | begins with `{` and ends in `:fence`,            | `lockkit:esc:` + name                   |
//! |           | or begins with `lockkit:esc:`                    |                                         |
//! | empty     | any other                                        | the name                                |
//!
//! The fence counter lies in the hash slot of its lock wherever that is possible, so that one script may touch both:
//!
//! | lock key                                             | fence counter      |
//! |------------------------------------------------------|--------------------|
//! | no `}`                                               | `{` key `}:fence`  |
//! | hash tag `t` (between the first `{` and the next `}`)| `{t}:` key `:fence`|
//! | `}`, but no tag (only with an empty prefix)          | `{}` key `:fence`  |
//!
//! What else there is of a lock that is shared, or has a queue, lies beside its counter. `word` is `members`, `leases`, `queue` or
//! `places`:
//!
//! | lock key             | key                                             |
//! |----------------------|-------------------------------------------------|
//! | no `}`               | `{` key `}:` word `:fence`                      |
//! | hash tag `t`         | `{t}:` word `:` key, with `%7B`..., `:fence`    |
//! | `}`, but no tag      | `{}` word `:` key, with `%7B`..., `:fence`      |
//!
//! No two names share a lock key, no two lock keys share any of the others, and no lock key is one of these: they all begin
//! with `{` and end in `:fence`, which no lock key does.
//!
//! Where servers can take over from each other, each keeps a note of its epoch: `{<prefix><n>}:reign`, where `n` is chosen
//! such that the key lies in a slot of the server. With an empty prefix it is `lockkit:esc:{<n>}:reign`, which no name
//! is spelt as. (Reign is the former word for epoch; the key keeps it for clients of earlier versions.) The key that is
//! written to see replicas acknowledge it ends in `:written` instead.

use lockkit_core::{Error, LockKey, Result, url_options};

/// Begins the lock keys of names that can't be keys themselves when the prefix is empty.
const ESCAPE: &str = "lockkit:esc:";
const COUNTER_END: &str = ":fence";
const NOTE_END: &str = ":reign";
/// How many slots a cluster has.
pub(crate) const SLOTS: u16 = 16384;

/// How a store spells its keys.
#[derive(Clone, Debug, Default)]
pub(crate) struct Names {
    prefix: String,
}

impl Names {
    /// Keys under `prefix`, or bare names if it is empty.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if the prefix contains a brace: it would be a hash tag, and put all locks into one
    /// slot of a cluster.
    pub(crate) fn new(prefix: &str) -> Result<Self> {
        if prefix.contains(['{', '}']) {
            return Err(Error::invalid("the key prefix must not contain braces"));
        }
        Ok(Self { prefix: prefix.to_owned() })
    }

    /// The key of a lock; also the channel on which its releases are announced.
    pub(crate) fn lock(&self, name: &LockKey) -> String {
        let name = name.as_str();
        let mut key = String::with_capacity(self.prefix.len() + name.len() + ESCAPE.len());
        if self.prefix.is_empty() {
            key.push_str(if needs_escape(name) { ESCAPE } else { "" });
            key.push_str(name);
        } else {
            key.push_str(&self.prefix);
            encode(name, &mut key);
        }
        key
    }

    /// What every key begins with.
    pub(crate) fn prefix(&self) -> &str {
        &self.prefix
    }

    /// A key, and channel, beside those of the locks: under the same permissions, but no lock's. `word` is ASCII letters,
    /// digits, dashes and colons that don't begin with two hexadecimal digits.
    pub(crate) fn reserved(&self, word: &str) -> String {
        if self.prefix.is_empty() { format!("{ESCAPE}{word}") } else { format!("{}%{word}", self.prefix) }
    }

    /// A key that nothing is ever written to.
    pub(crate) fn unused(&self) -> String {
        self.reserved("unused")
    }

    /// The key of a record. It has no hash tag, so that records lie anywhere in a cluster.
    pub(crate) fn record(&self, name: &LockKey) -> String {
        let mut key = self.reserved("record:");
        encode(name.as_str(), &mut key);
        key
    }

    /// The name of the lock with this key; `None` if no name has it.
    pub(crate) fn name(&self, key: &[u8]) -> Option<LockKey> {
        let key = str::from_utf8(key).ok()?;
        let name = if !self.prefix.is_empty() {
            url_options::percent_decode(key.strip_prefix(&self.prefix)?).ok()?
        } else if let Some(escaped) = key.strip_prefix(ESCAPE) {
            escaped.to_owned()
        } else {
            key.to_owned()
        };
        let name = LockKey::new(name).ok()?;
        // Other spellings of the same name are other keys, and none of ours.
        (self.lock(&name) == key).then_some(name)
    }

    /// The key of a server's note about its epoch, in a slot that it serves.
    ///
    /// The slots of consecutive numbers are as good as random. So when a server of many slots gains or loses some, the key
    /// most likely stays the same; and for one of a single slot it takes about a millisecond to find.
    pub(crate) fn note(&self, serves: impl Fn(u16) -> bool) -> String {
        let escape = if self.prefix.is_empty() { ESCAPE } else { "" };
        let tag = (0_u32..)
            .map(|n| format!("{}{n}", self.prefix))
            .find(|tag| serves(slot_of(tag.as_bytes())))
            .unwrap_or_default();
        format!("{escape}{{{tag}}}{NOTE_END}")
    }

    /// The patterns for `SCAN` that together match the key of every lock whose name starts with `start`.
    pub(crate) fn patterns(&self, start: &str) -> Vec<String> {
        let pattern = |beginning: &str, rest: &str| {
            let mut pattern = String::with_capacity(beginning.len() + rest.len() + 1);
            for c in beginning.chars().chain(rest.chars()) {
                if matches!(c, '*' | '?' | '[' | ']' | '\\') {
                    pattern.push('\\');
                }
                pattern.push(c);
            }
            pattern.push('*');
            pattern
        };
        if self.prefix.is_empty() {
            return vec![pattern("", start), pattern(ESCAPE, start)];
        }
        let mut encoded = String::with_capacity(start.len());
        encode(start, &mut encoded);
        vec![pattern(&self.prefix, &encoded)]
    }
}

/// The fence counter of the lock with this key.
pub(crate) fn counter(lock: &str) -> String {
    let mut key = String::with_capacity(lock.len() + 2 + COUNTER_END.len());
    push_counter(&mut key, lock);
    key
}

/// Appends the fence counter of the lock with this key.
pub(crate) fn push_counter(text: &mut String, lock: &str) {
    let parts = match hash_tag(lock) {
        Some(tag) => ["{", tag, "}:", lock],
        None if lock.contains('}') => ["{}", "", "", lock],
        None => ["{", lock, "}", ""],
    };
    for part in parts {
        text.push_str(part);
    }
    text.push_str(COUNTER_END);
}

/// All keys of the lock with this key: itself, its counter, and those of `queue.lua`, in its order.
pub(crate) fn all(lock: &str) -> [String; 6] {
    let [members, leases, queue] = sharers(lock);
    [lock.to_owned(), counter(lock), members, leases, queue, beside(lock, "places")]
}

/// Those of them that `sharers.lua` reads.
pub(crate) fn sharers(lock: &str) -> [String; 3] {
    ["members", "leases", "queue"].map(|word| beside(lock, word))
}

/// Those of them that `waiters.lua` reads.
pub(crate) fn waiters(lock: &str) -> [String; 2] {
    ["queue", "places"].map(|word| beside(lock, word))
}

/// What there is of a lock with this key beside its counter.
fn beside(lock: &str, word: &str) -> String {
    let mut key = String::with_capacity(lock.len() + word.len() + COUNTER_END.len() + 4);
    match hash_tag(lock) {
        None if !lock.contains('}') => {
            for part in ["{", lock, "}:", word] {
                key.push_str(part);
            }
        }
        tag => {
            key.push_str(&tag.map_or_else(|| "{}".to_owned(), |tag| format!("{{{tag}}}:")));
            key.push_str(word);
            key.push(':');
            encode(lock, &mut key);
        }
    }
    key.push_str(COUNTER_END);
    key
}

/// The part of a key that decides its slot: between the first `{` and the next `}`, if it is not empty.
/// (Redis cluster specification, "Hash tags".)
fn hash_tag(key: &str) -> Option<&str> {
    let (_, rest) = key.split_once('{')?;
    let (tag, _) = rest.split_once('}')?;
    (!tag.is_empty()).then_some(tag)
}

/// The key that is written to see replicas acknowledge it, in the slot of the note.
pub(crate) fn mark_of_note(note: &str) -> String {
    format!("{}:written", note.strip_suffix(NOTE_END).unwrap_or(note))
}

/// The slot of a key in a cluster. (Redis cluster specification, "Key distribution model".)
pub(crate) fn slot(key: &str) -> u16 {
    slot_of(hash_tag(key).unwrap_or(key).as_bytes())
}

/// CRC-16/XMODEM, modulo the number of slots.
fn slot_of(tag: &[u8]) -> u16 {
    let step = |crc: u16, _| if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 };
    let crc = tag.iter().fold(0_u16, |crc, byte| (0..8).fold(crc ^ (u16::from(*byte) << 8), step));
    crc % SLOTS
}

fn needs_escape(name: &str) -> bool {
    name.starts_with(ESCAPE) || (name.starts_with('{') && name.ends_with(COUNTER_END))
}

fn encode(name: &str, into: &mut String) {
    for c in name.chars() {
        match c {
            '%' => into.push_str("%25"),
            '{' => into.push_str("%7B"),
            '}' => into.push_str("%7D"),
            c => into.push(c),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use lockkit_core::ErrorKind;

    use super::*;

    /// All strings of up to `parts` pieces that could confuse the encoding.
    fn tricky(parts: usize) -> Vec<String> {
        let pieces = ["{", "}", "%", "7B", "a", ":fence", "lockkit:esc:", ":"];
        let mut all = vec![String::new()];
        let mut last = all.clone();
        for _ in 0..parts {
            last = last.iter().flat_map(|start| pieces.iter().map(move |piece| format!("{start}{piece}"))).collect();
            all.extend(last.iter().cloned());
        }
        all.retain(|name| !name.is_empty());
        all.sort();
        all.dedup();
        all
    }

    #[test]
    fn no_two_names_share_a_key_and_no_lock_is_a_counter_or_another_key() {
        for prefix in ["", "lockkit:", "a%7B"] {
            let names = Names::new(prefix).expect("prefix");
            let mut seen: HashMap<String, String> = HashMap::new();
            for name in tricky(5) {
                let key = LockKey::new(name.as_str()).expect("name");
                let (lock, record) = (names.lock(&key), names.record(&key));
                assert_eq!((hash_tag(&record), names.name(record.as_bytes())), (None, None), "{record} is a record");
                let mut keys = vec![counter(&lock), record];
                keys.extend(["members", "queue"].map(|word| beside(&lock, word)));
                keys.push(lock);
                for key in keys {
                    if let Some(other) = seen.insert(key.clone(), name.clone()) {
                        panic!("prefix {prefix:?}: {name:?} and {other:?} share {key:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_name_survives_its_key() {
        for prefix in ["", "lockkit:", "a%7B", "x*["] {
            let names = Names::new(prefix).expect("prefix");
            for name in tricky(4) {
                let name = LockKey::new(name).expect("name");
                assert_eq!(names.name(names.lock(&name).as_bytes()), Some(name.clone()), "{name}");
                let lock = names.lock(&name);
                for key in [counter(&lock), beside(&lock, "queue")] {
                    assert_eq!(names.name(key.as_bytes()), None, "{key} is no lock");
                }
            }
        }
    }

    #[test]
    fn what_belongs_to_a_lock_lies_in_its_slot() {
        let slot = |key: &str| hash_tag(key).unwrap_or(key).to_owned();
        for name in tricky(4) {
            let name = LockKey::new(name).expect("name");
            let lock = Names::new("lockkit:").expect("prefix").lock(&name);
            assert!(!lock.contains(['{', '}']));
            assert_eq!(slot(&counter(&lock)), slot(&lock));
            assert_eq!(slot(&beside(&lock, "queue")), slot(&lock));
            let lock = Names::new("").expect("prefix").lock(&name);
            if hash_tag(&lock).is_some() || !lock.contains('}') {
                assert_eq!(slot(&counter(&lock)), slot(&lock), "{lock}");
                assert_eq!(slot(&beside(&lock, "queue")), slot(&lock), "{lock}");
            }
        }
    }

    #[test]
    fn patterns_are_literal() {
        let names = Names::new("app[1]:").expect("prefix");
        assert_eq!(names.patterns("a*{"), [r"app\[1\]:a\*%7B*"]);
        assert_eq!(Names::new("").expect("prefix").patterns("j?"), [r"j\?*", r"lockkit:esc:j\?*"]);
    }

    #[test]
    fn slots_are_those_of_the_specification() {
        // `CLUSTER KEYSLOT` on a server.
        for (key, expected) in
            [("123456789", 12739), ("foo", 12182), ("{user1000}.following", 3443), ("foo{}{bar}", 8363)]
        {
            assert_eq!(slot(key), expected, "{key}");
        }
        for (prefix, wanted) in [("lockkit:", 0), ("", 5461), ("x%7B", SLOTS - 1)] {
            let names = Names::new(prefix).expect("prefix");
            let note = names.note(|slot| slot == wanted);
            for key in [mark_of_note(&note), note] {
                assert_eq!((slot(&key), names.name(key.as_bytes())), (wanted, None), "{key} is no lock");
            }
        }
    }

    #[test]
    fn a_prefix_has_no_braces() {
        assert_eq!(Names::new("{x}").expect_err("braces").kind(), ErrorKind::InvalidInput);
    }
}
