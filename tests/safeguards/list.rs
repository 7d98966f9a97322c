//! What a safeguard is, and all of them.

use crate::{belief, engine, migration, mysql, redis, redlock, zookeeper};

/// A line or two of code without which something bad can happen.
pub(crate) struct Safeguard {
    /// What it does, for the table in `docs/testing.md`.
    pub(crate) does: &'static str,
    /// Its name.
    pub(crate) name: &'static str,
    /// Where it is switched off, from the root of the workspace: a file of Rust.
    pub(crate) file: &'static str,
    /// The expression that is replaced, between « and », with as much around it as makes it the only one of its kind. No constant's,
    /// for the switch is looked at when the code runs. A safeguard in the text of a script or a statement has the expression that
    /// gives the whole text, which several may share, and what replaces it is that text with other words in it.
    pub(crate) code: &'static str,
    /// What replaces it.
    pub(crate) without: &'static str,
    /// The test that must fail then: `package/target::name`, where the target of unit tests is `lib`.
    pub(crate) noticed_by: &'static str,
}

/// Makes the list of one store or part. An entry says on its lines: the name and the file, what the safeguard does, the code and what
/// replaces it (on two lines if they are long), and the test.
macro_rules! safeguards {
    ($($name:ident in $file:tt $does:literal $code:literal => $without:literal by $noticed_by:literal;)*) => {
        pub(crate) const ALL: &[$crate::list::Safeguard] = &[$($crate::list::Safeguard {
            name: stringify!($name),
            does: $does,
            file: $file,
            code: $code,
            without: $without,
            noticed_by: $noticed_by,
        }),*];
    };
}

pub(crate) use safeguards;

/// All safeguards.
pub(crate) fn all() -> impl Iterator<Item = &'static Safeguard> {
    let lists = [engine::ALL, belief::ALL, redlock::ALL, redis::ALL, mysql::ALL, zookeeper::ALL, migration::ALL];
    lists.into_iter().flatten()
}
