//! The Lua scripts. Each runs as one atomic step on the server, which is what the rules of the contract rest on.
//!
//! Each but [`EPOCH`] takes a [number](crate::wire::number) as its last argument, and returns it behind its answer.

use std::sync::LazyLock;

use redis::Cmd;

/// Goes before a script that may answer without a write, where no other server can take over: deletes a key that does not exist.
/// A server that was made a replica refuses that. It would answer with what it has, which may be old.
const WRITABLE: &str = "redis.call('DEL', KEYS[#KEYS])\n";
/// Goes before a script that changes leases, where servers can take over from each other.
const GUARD: &str = include_str!("scripts/guard.lua");
const MARK: &str = include_str!("scripts/mark.lua");
/// In the place of [`MARK`], where leases have none.
const NO_MARK: &str = "local mark, run_mark\n";

pub(crate) static BATCH: LazyLock<Script> = LazyLock::new(|| Script::new(&[include_str!("scripts/batch.lua")]));
/// [`BATCH`] where servers can take over from each other. Its last argument is the server's replication id.
pub(crate) static BATCH_GUARDED: LazyLock<Script> =
    LazyLock::new(|| Script::new(&[GUARD, include_str!("scripts/batch.lua")]));
pub(crate) static RENEW: LazyLock<Script> =
    LazyLock::new(|| Script::new(&[NO_MARK, include_str!("scripts/renew.lua")]));
/// [`RENEW`] where servers can take over from each other. Its last arguments are the mark of the leases, that of the server's run, and
/// the server's replication id.
pub(crate) static RENEW_GUARDED: LazyLock<Script> =
    LazyLock::new(|| Script::new(&[GUARD, MARK, include_str!("scripts/renew.lua")]));
/// Its last key is the one that [`WRITABLE`] deletes.
pub(crate) static REPLACE: LazyLock<Script> =
    LazyLock::new(|| Script::new(&[WRITABLE, NO_MARK, include_str!("scripts/replace.lua")]));
/// [`REPLACE`] where servers can take over from each other. Its last arguments are as those of [`RENEW_GUARDED`].
pub(crate) static REPLACE_GUARDED: LazyLock<Script> =
    LazyLock::new(|| Script::new(&[GUARD, MARK, include_str!("scripts/replace.lua")]));
pub(crate) static QUEUE: LazyLock<Script> =
    LazyLock::new(|| Script::new(&[NO_MARK, include_str!("scripts/queue.lua")]));
/// [`QUEUE`] where servers can take over from each other. Its last arguments are as those of [`RENEW_GUARDED`].
pub(crate) static QUEUE_GUARDED: LazyLock<Script> =
    LazyLock::new(|| Script::new(&[GUARD, MARK, include_str!("scripts/queue.lua")]));
pub(crate) static EPOCH: LazyLock<Script> = LazyLock::new(|| Script::plain(include_str!("scripts/epoch.lua").into()));
pub(crate) static INSPECT: LazyLock<Script> = LazyLock::new(|| Script::new(&[include_str!("scripts/inspect.lua")]));
pub(crate) static SHARERS: LazyLock<Script> = LazyLock::new(|| Script::new(&[include_str!("scripts/sharers.lua")]));
pub(crate) static WAITERS: LazyLock<Script> = LazyLock::new(|| Script::new(&[include_str!("scripts/waiters.lua")]));
/// Its last key is the one that [`WRITABLE`] deletes.
pub(crate) static RECORD: LazyLock<Script> =
    LazyLock::new(|| Script::new(&[WRITABLE, include_str!("scripts/record.lua")]));
/// [`RECORD`] where servers can take over from each other. Its last argument is the server's replication id.
pub(crate) static RECORD_GUARDED: LazyLock<Script> =
    LazyLock::new(|| Script::new(&[GUARD, include_str!("scripts/record.lua")]));
pub(crate) const FENCED_CODE: &str = include_str!("scripts/fenced.lua");
pub(crate) static FENCED: LazyLock<Script> = LazyLock::new(|| Script::new(&[FENCED_CODE]));
pub(crate) const FENCED_SHARED_CODE: &str = include_str!("scripts/fenced_shared.lua");
pub(crate) static FENCED_SHARED: LazyLock<Script> = LazyLock::new(|| Script::new(&[FENCED_SHARED_CODE]));

#[cfg(feature = "doctor")]
pub(crate) static PROBE: LazyLock<Script> = LazyLock::new(|| Script::new(&[include_str!("scripts/probe.lua")]));

/// All that are run by their hashes.
static ALL: &[&LazyLock<Script>] = &[
    &BATCH,
    &BATCH_GUARDED,
    &RENEW,
    &RENEW_GUARDED,
    &REPLACE,
    &REPLACE_GUARDED,
    &QUEUE,
    &QUEUE_GUARDED,
    &INSPECT,
    &SHARERS,
    &WAITERS,
    &RECORD,
    &RECORD_GUARDED,
    &FENCED,
    &FENCED_SHARED,
    #[cfg(feature = "doctor")]
    &PROBE,
];

/// A script and its name on the server.
#[derive(Debug)]
pub(crate) struct Script {
    code: String,
    sha: String,
}

impl Script {
    /// A script whose answers are numbered. The number is taken away before the script's own code runs, whose arguments
    /// are those that this module's callers know. The parts go one after the other.
    fn new(parts: &[&str]) -> Self {
        let code = parts.concat();
        let numbered =
            format!("local number = table.remove(ARGV)\nlocal function run()\n{code}\nend\nreturn {{run(), number}}\n");
        Self::plain(numbered)
    }

    fn plain(code: String) -> Self {
        let sha = redis::Script::new(&code).get_hash().to_owned();
        Self { code, sha }
    }

    /// A command that runs the script by its hash, to which the keys and arguments are to be added, and then the number.
    ///
    /// `bytes` is a guess at their size in all, so that the command is built without growing.
    pub(crate) fn by_hash(&self, keys: usize, arguments: usize, bytes: usize) -> Cmd {
        let mut cmd = Cmd::with_capacity(4 + keys + arguments, 7 + self.sha.len() + 24 + bytes);
        cmd.arg("EVALSHA").arg(&self.sha).arg(keys);
        cmd
    }

    /// A command that runs the script by its code, to which the keys and arguments are to be added.
    pub(crate) fn by_own_code(&self, keys: usize) -> Cmd {
        let mut cmd = Cmd::new();
        cmd.arg("EVAL").arg(&self.code).arg(keys);
        cmd
    }

    /// The script that a command runs by its hash.
    pub(crate) fn of(cmd: &Cmd) -> Option<&'static Self> {
        let mut words = words(cmd);
        let hash = words.next().filter(|word| *word == b"EVALSHA").and_then(|_| words.next())?;
        ALL.iter().map(|script| &***script).find(|script| script.sha.as_bytes() == hash)
    }

    /// The same command with the code in place of the hash, for a server that does not know it (`NOSCRIPT`).
    pub(crate) fn by_code(&self, by_hash: &Cmd) -> Cmd {
        let mut cmd = Cmd::new();
        cmd.arg("EVAL").arg(&self.code);
        for word in words(by_hash).skip(2) {
            cmd.arg(word);
        }
        cmd
    }
}

/// Whether a command runs a script by its hash.
pub(crate) fn is_by_hash(cmd: &Cmd) -> bool {
    words(cmd).next() == Some(b"EVALSHA")
}

fn words(cmd: &Cmd) -> impl Iterator<Item = &[u8]> {
    cmd.args_iter().filter_map(|word| if let redis::Arg::Simple(bytes) = word { Some(bytes) } else { None })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_script_is_known_by_its_hash() {
        let made = include_str!("scripts.rs").lines().filter(|line| line.contains("LazyLock::new(|| Script::new(&"));
        // The line above is one of them.
        assert_eq!(made.count() - 1, ALL.len());
        for script in ALL {
            let found = Script::of(&script.by_hash(0, 0, 0)).expect("it is one of them");
            assert_eq!(found.code, script.code);
        }
        assert!(Script::of(&EPOCH.by_own_code(0)).is_none());
    }

    #[test]
    fn the_code_replaces_the_hash() {
        let mut by_hash = INSPECT.by_hash(1, 1, 2);
        by_hash.arg("k").arg("t");
        let by_code = INSPECT.by_code(&by_hash).get_packed_command();
        let text = String::from_utf8(by_code).expect("text");
        assert!(text.starts_with("*5\r\n$4\r\nEVAL\r\n"), "{text}");
        assert!(text.ends_with("\r\n$1\r\n1\r\n$1\r\nk\r\n$1\r\nt\r\n"), "{text}");
    }
}
