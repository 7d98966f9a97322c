//! From lock names to node names and back (rule R11), and the names of the nodes of a claim.

use std::{borrow::Cow, fmt::Write};

use lockkit_core::{LockKey, Mode, Token, url_options};

/// What the node of an exclusive claim is called after its uuid, before its sequence number, as Curator's mutex has it. The
/// names of all others end like this, too, so that whoever knows only this sees their place in the queue, and waits for them.
pub(crate) const LOCK: &str = "lock-";

/// The same for readers.
const READ: &str = "read-lock-";

/// Begins the names of nodes beside the locks that are none: no lock name is encoded like this, because what follows
/// `%` there are digits.
const RESERVED: char = '%';

/// Begins the name of a record's node.
const RECORD: &str = "%record-";

/// The node that has the list of all windows as its children.
const WINDOWS: &str = "%kept";

/// The root of the locks, and what lies in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Names {
    /// Without a trailing slash, so empty for the root of the server.
    root: String,
}

impl Names {
    /// `root` is an absolute path, or empty.
    pub(crate) fn new(root: &str) -> Self {
        Self { root: root.trim_end_matches('/').to_owned() }
    }

    /// The path of the node that has the locks as its children.
    pub(crate) fn root(&self) -> &str {
        if self.root.is_empty() { "/" } else { &self.root }
    }

    /// The path of a lock: the directory of its queue.
    pub(crate) fn lock(&self, key: &LockKey) -> String {
        let mut path = String::with_capacity(self.root.len() + key.as_str().len() + 16);
        path.push_str(&self.root);
        path.push('/');
        encode(key.as_str(), &mut path);
        path
    }

    /// The path of the node that a session keeps to prove that it lives.
    pub(crate) fn session(&self, id: i64) -> String {
        format!("{}/{RESERVED}session-{id:016x}", self.root)
    }

    /// The path of a record.
    pub(crate) fn record(&self, name: &LockKey) -> String {
        let mut path = format!("{}/{RECORD}", self.root);
        encode(name.as_str(), &mut path);
        path
    }

    /// The path of a lock whose node in the root has this name.
    pub(crate) fn in_root(&self, node: &str) -> String {
        format!("{}/{node}", self.root)
    }

    /// The path of the list of all windows in which locks are kept though nobody holds them.
    pub(crate) fn windows(&self) -> String {
        self.in_root(WINDOWS)
    }

    /// The path in that list of a window that is over at `due`. In the order of text the first is due first.
    pub(crate) fn window(&self, due: u64, token: &Token) -> String {
        format!("{}/{due:020}-{}", self.windows(), token.reveal())
    }

    /// When a window of this name in the list is due, and its token.
    pub(crate) fn listed_window(node: &str) -> Option<(u64, Token)> {
        let (due, token) = node.split_once('-')?;
        Some((due.parse().ok()?, token.parse().ok()?))
    }

    /// The path of a node to try things out in.
    #[cfg(any(test, feature = "doctor"))]
    pub(crate) fn trial(&self, word: &str) -> String {
        format!("{}/{RESERVED}doctor-{word}", self.root)
    }

    /// Whether a node in the root belongs to lockkit, but is no lock.
    #[cfg(any(test, feature = "doctor"))]
    pub(crate) fn is_own(node: &str) -> bool {
        node == WINDOWS
            || node.starts_with(RECORD)
            || node
                .strip_prefix(RESERVED)
                .is_some_and(|rest| rest.starts_with("session-") || rest.starts_with("doctor-"))
    }

    /// The lock of a node in the root; `None` if it is not a lock of ours.
    pub(crate) fn key(&self, node: &str) -> Option<LockKey> {
        let name = url_options::percent_decode(node).ok()?;
        let mut again = String::with_capacity(node.len());
        encode(&name, &mut again);
        // Other spellings of the same name are other nodes, and none of ours.
        (again == node).then(|| LockKey::new(name).ok())?
    }
}

/// What the node of a claim is called after its uuid, before its sequence number: it tells the mode.
pub(crate) fn mark(mode: Mode) -> Cow<'static, str> {
    match mode {
        Mode::Shared => READ.into(),
        Mode::Permit { limit } => format!("permit{limit}-{LOCK}").into(),
        // Another there is not, or it is refused before it comes here.
        _ => LOCK.into(),
    }
}

/// How a node has or wants the lock. One that other clients made excludes all others, and so does one of a form that is not
/// known.
pub(crate) fn mode(node: &str) -> Mode {
    mode_beside_others(node).unwrap_or(Mode::Exclusive)
}

fn mode_beside_others(node: &str) -> Option<Mode> {
    let (uuid, rest) = node.strip_prefix("_c_")?.split_at_checked(36)?;
    if !uuid.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-') {
        return None;
    }
    let (kind, _) = rest.strip_prefix('-')?.rsplit_once("-lock-")?;
    if kind == "read" {
        return Some(Mode::Shared);
    }
    // Another spelling of the same limit is none of ours.
    let limit = kind.strip_prefix("permit").filter(|limit| !limit.starts_with(['0', '+']))?;
    Some(Mode::Permit { limit: limit.parse().ok()? })
}

/// What begins the names of all nodes of a claim, followed by its [`mark`] and the sequence number.
///
/// Curator protects its creations with a uuid in the same place; ours is the claim's token.
pub(crate) fn protection(token: &Token) -> String {
    let hex = token.reveal();
    format!("_c_{}-{}-{}-{}-{}-", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

/// The token in the name of a claim's node; `None` if the name has another form.
pub(crate) fn token(node: &str) -> Option<Token> {
    let uuid = node.strip_prefix("_c_")?.get(..36)?;
    let hex: String = uuid.chars().filter(|c| *c != '-').collect();
    let token: Token = hex.parse().ok()?;
    node.starts_with(&protection(&token)).then_some(token)
}

/// Spells a lock's name so that it is one valid node name, different for different names.
///
/// ZooKeeper has no `/`, no control characters, nothing that Java spells with surrogates, no private use characters and
/// no specials in node names, and neither `.` nor `..`; it keeps `/zookeeper` for itself (`PathUtils.validatePath`).
/// What is left is spelled as it is, so that Curator finds a simple name where one would look for it.
fn encode(name: &str, out: &mut String) {
    let whole = matches!(name, "." | "..");
    let mut buffer = [0; 4];
    for (at, c) in name.char_indices() {
        let reserved = at == 0 && name == "zookeeper";
        if !whole && !reserved && is_plain(c) {
            out.push(c);
        } else {
            for byte in c.encode_utf8(&mut buffer).bytes() {
                // Writing to a string can't fail.
                _ = write!(out, "%{byte:02X}");
            }
        }
    }
}

fn is_plain(c: char) -> bool {
    !matches!(c, '/' | '%' | '\0'..='\u{1f}' | '\u{7f}'..='\u{9f}' | '\u{d7ff}'..='\u{f8ff}' | '\u{fff0}'..)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMES: &[&str] = &[
        "a",
        "A",
        "a/b",
        "a%2Fb",
        "a%2fb",
        "/",
        "//",
        ".",
        "..",
        "%2E",
        "...",
        ".a",
        "a\0",
        "a\u{1}",
        "\u{7f}",
        "\u{9f}",
        "zookeeper",
        "%7Aookeeper",
        "zookeeper/quota",
        "Zookeeper",
        "ä",
        "a\u{308}",
        "\u{e000}",
        "\u{f8ff}",
        "\u{fff0}",
        "\u{ffff}",
        "\u{feff}",
        "\u{10000}",
        "🔒",
        "\u{10ffff}",
        "%",
        "%%",
        "%25",
        "%session-00",
        "~fence",
        " ",
        "lock-1",
    ];

    #[test]
    fn names_come_back_and_stay_apart() {
        let names = Names::new("/lockkit");
        let mut seen = Vec::new();
        for name in NAMES {
            let path = names.lock(&LockKey::new(*name).expect("name"));
            let node = path.strip_prefix("/lockkit/").expect("in the root");
            assert!(!node.is_empty() && !matches!(node, "." | ".." | "zookeeper") && !node.contains('/'), "{node:?}");
            assert!(node.chars().all(|c| is_plain(c) || c == '%'), "{node:?}");
            assert_eq!(names.key(node).expect("ours").as_str(), *name);
            assert!(!seen.contains(&path), "{path:?} twice");
            seen.push(path);
        }
    }

    #[test]
    fn a_simple_name_stays_itself() {
        let key = LockKey::new("invoice-42.pdf ü").expect("name");
        assert_eq!(Names::new("/a/b/").lock(&key), "/a/b/invoice-42.pdf ü");
        assert_eq!(Names::new("/").lock(&key), "/invoice-42.pdf ü");
        assert_eq!((Names::new("/").root(), Names::new("/a/").root()), ("/", "/a"));
    }

    #[test]
    fn what_is_not_a_lock_is_passed_over() {
        let names = Names::new("/lockkit");
        let session = names.session(0x1234);
        let trial = names.trial("0a");
        assert!(Names::is_own(&session[9..]) && Names::is_own(&trial[9..]) && !Names::is_own("session-1"));
        for node in [&session[9..], &trial[9..], "%", "%2", "%zz", "%2f", "%61", "%FF", "a%2", ""] {
            assert_eq!(names.key(node), None, "{node:?}");
        }
    }

    #[test]
    fn a_window_is_found_by_when_it_is_due() {
        let (names, token) = (Names::new("/lockkit"), Token::random().expect("random"));
        let path = |due| names.window(due, &token);
        assert!(path(999) < path(1000) && path(1000) < path(u64::MAX));
        let node = path(1000).strip_prefix("/lockkit/%kept/").map(Names::listed_window);
        assert_eq!(node, Some(Some((1000, token))));
        assert!(Names::is_own("%kept") && names.key("%kept").is_none());
        assert_eq!(names.in_root("a"), names.lock(&LockKey::new("a").expect("name")));
    }

    #[test]
    fn a_claims_node_is_named_as_curators() {
        let token: Token = "00112233445566778899aabbccddeeff".parse().expect("token");
        let node = format!("{}{LOCK}0000000007", protection(&token));
        assert_eq!(node, "_c_00112233-4455-6677-8899-aabbccddeeff-lock-0000000007");
        assert_eq!(super::token(&node), Some(token));
        for other in ["", "_c_", "lock-0000000001", "_c_00112233445566778899aabbccddeeff-lock-1", &node[1..]] {
            assert_eq!(super::token(other), None, "{other}");
        }
    }

    #[test]
    fn a_node_tells_its_mode() {
        let permit = |limit| Mode::Permit { limit: std::num::NonZeroU32::new(limit).expect("not zero") };
        let token: Token = "00112233445566778899aabbccddeeff".parse().expect("token");
        let begin = protection(&token);
        for mode in [Mode::Exclusive, Mode::Shared, permit(1), permit(20), permit(u32::MAX)] {
            let node = format!("{begin}{}0000000007", mark(mode));
            assert_eq!((super::mode(&node), super::token(&node)), (mode, Some(token)), "{node}");
            assert!(node.contains("-lock-0000000007"), "who knows Curator's mutex alone would not wait for {node}");
        }
        assert_eq!(format!("{begin}{}", mark(permit(3))), "_c_00112233-4455-6677-8899-aabbccddeeff-permit3-lock-");
        assert_eq!(format!("{begin}{}", mark(Mode::Shared)), "_c_00112233-4455-6677-8899-aabbccddeeff-read-lock-");
        for odd in
            ["permit0", "permit03", "permit+3", "permit", "permit4294967296", "read-read", "Read", "", "__READ__"]
        {
            let node = format!("{begin}{odd}-lock-0000000007");
            assert_eq!(super::mode(&node), Mode::Exclusive, "{node}");
        }
        for foreign in ["read-lock-0000000007", "_c_read-lock-0000000007", "a__rlock__0000000007", &begin] {
            assert_eq!(super::mode(foreign), Mode::Exclusive, "{foreign}");
        }
    }
}
