//! Small texts beside the locks, for what all clients of a store have to agree on.

use std::{fmt, str::FromStr, sync::Arc};

use async_trait::async_trait;

use super::LockStore;
use crate::{Error, ErrorKind, LockKey, Result, Token};

/// The name of the record with a store's [`Identity`].
const IDENTITY: &str = "lockkit/identity";

/// Keeps records: texts that change only from what was seen to what is new, in one atomic step. The names of records have
/// nothing to do with those of locks, and at most 511 bytes. Records do not lapse.
///
/// Both questions are **linearizable**: a read shows what was written last before it was sent, or later. So each goes to
/// the primary, and on ZooKeeper to the leader. What a server may lose of its data (a fail-over without `replicas`, a restart
/// from a snapshot) it may lose of its records.
#[async_trait]
pub trait Records: Send + Sync {
    /// Reads a record; `None` if there is none.
    ///
    /// # Errors
    /// As those of [`LockStore::inspect`]; `Unexpected` if what is there is no record.
    async fn read(&self, name: &LockKey) -> Result<Option<Record>>;

    /// Makes the record `new` if it is `seen`; `None` is no record. It is done, too, if the record is `new` already, so
    /// that the same can be asked again after an answer that did not come. Use no text twice (put a random number into each), so
    /// that `Done` always means this change.
    ///
    /// # Errors
    /// As those of [`LockStore::acquire`].
    ///
    /// # Cancellation
    /// It may be done, or come to be done, after the future was dropped.
    async fn compare_and_set(&self, name: &LockKey, seen: Option<&Record>, new: Option<&Record>) -> Result<Swap>;
}

#[async_trait]
impl<R: Records + ?Sized> Records for &R {
    async fn read(&self, name: &LockKey) -> Result<Option<Record>> {
        (**self).read(name).await
    }

    async fn compare_and_set(&self, name: &LockKey, seen: Option<&Record>, new: Option<&Record>) -> Result<Swap> {
        (**self).compare_and_set(name, seen, new).await
    }
}

/// What became of a [`compare_and_set`](Records::compare_and_set).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Swap {
    /// The record is what it was to be.
    Done,
    /// Nothing was changed, for the record was this.
    Differs(Option<Record>),
}

impl Swap {
    /// What a store that has `found` answers without writing; `None` if it is to write, if what it found is still there.
    #[must_use]
    pub fn of(found: Option<&Record>, seen: Option<&Record>, new: Option<&Record>) -> Option<Self> {
        if found == new {
            Some(Self::Done)
        } else if found == seen {
            None
        } else {
            Some(Self::Differs(found.cloned()))
        }
    }
}

/// The text of a record: 1 to 256 visible characters of ASCII, without spaces, so that every store keeps it as it is.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Record(Arc<str>);

impl Record {
    /// The longest text.
    pub const MAX_BYTES: usize = 256;

    /// Checks a text.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if it is empty or too long, or has other characters.
    pub fn new(text: impl Into<Arc<str>>) -> Result<Self> {
        let text = text.into();
        if (1..=Self::MAX_BYTES).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic()) {
            Ok(Self(text))
        } else {
            let message = format!("a record has 1 to {} visible ASCII characters, without spaces", Self::MAX_BYTES);
            Err(Error::invalid(message))
        }
    }

    /// What a store found, which may be anything.
    ///
    /// # Errors
    /// [`ErrorKind::Unexpected`] if it is no record.
    pub fn found(bytes: &[u8]) -> Result<Self> {
        let text = str::from_utf8(bytes).ok().and_then(|text| Self::new(text).ok());
        text.ok_or_else(|| {
            Error::new(ErrorKind::Unexpected, "the store has something else than a record under this name")
        })
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", &self.0)
    }
}

/// Which store it is: 128 bits, the same for all clients of one store, whatever URL they know it by, and different for any
/// two stores. Two prefixes, tables or roots on one server are two stores.
///
/// Identities have an order, which is the same everywhere: clients that need several stores at once ask for them in it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Identity(u128);

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl FromStr for Identity {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let number = Token::from_str(text).map(|number| u128::from_be_bytes(*number.as_bytes()));
        number.map(Self).map_err(|_| Error::invalid("an identity has 32 lower-case hexadecimal digits"))
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Identity({self})")
    }
}

/// Which store this is. The first client that asks gives it its identity, which stays with the store's data: a store that
/// lost all is another one. A quorum's is made of those of its nodes, all of which are asked.
///
/// # Errors
/// [`ErrorKind::Unsupported`] if the store keeps no records; [`ErrorKind::InvalidInput`] if two nodes of a quorum are one; else
/// as those of [`Records`], for every part of the store.
///
/// # Cancellation
/// The store may have been given its identity.
pub async fn identity(store: &dyn LockStore) -> Result<Identity> {
    identity_of(store, true).await?.ok_or_else(|| Error::new(ErrorKind::Unexpected, "the store has no identity"))
}

/// The same, but `None` if any part of the store has not been given its identity yet.
pub(crate) async fn known_identity(store: &dyn LockStore) -> Result<Option<Identity>> {
    identity_of(store, false).await
}

async fn identity_of(store: &dyn LockStore, may_give: bool) -> Result<Option<Identity>> {
    let keepers = store.records();
    if keepers.is_empty() {
        let why = format!("{} keeps no records, and has no identity", store.info().scheme);
        return Err(Error::new(ErrorKind::Unsupported, why));
    }
    let mut parts = Vec::with_capacity(keepers.len());
    for keeper in keepers {
        let Some(part) = identity_at(&*keeper, may_give).await? else { return Ok(None) };
        if parts.contains(&part) {
            return Err(Error::invalid("two of the store's nodes are one and the same"));
        }
        parts.push(part);
    }
    // The order of a quorum's nodes does not matter, and one node alone is itself.
    Ok(Some(Identity(parts.into_iter().fold(0, |whole, part| whole ^ part))))
}

async fn identity_at(keeper: &dyn Records, may_give: bool) -> Result<Option<u128>> {
    let name = LockKey::new(IDENTITY)?;
    let known = match keeper.read(&name).await? {
        Some(known) => known,
        None if !may_give => return Ok(None),
        None => {
            let new = Record::new(Token::random()?.reveal())?;
            match keeper.compare_and_set(&name, None, Some(&new)).await? {
                Swap::Done => new,
                Swap::Differs(Some(known)) => known,
                Swap::Differs(None) => {
                    let why = "the record of the store's identity was removed while it was made";
                    return Err(Error::new(ErrorKind::Unexpected, why).unknown_effect());
                }
            }
        }
    };
    let bytes = Token::from_str(known.as_str()).map(|number| u128::from_be_bytes(*number.as_bytes()));
    bytes
        .map(Some)
        .map_err(|_| Error::new(ErrorKind::Unexpected, "the record of the store's identity has another form"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_a_word_of_ascii() {
        for bad in ["", "a b", "a ", "\n", "ä", &"x".repeat(257)] {
            assert_eq!(Record::new(bad).expect_err(bad).kind(), ErrorKind::InvalidInput);
            assert_eq!(Record::found(bad.as_bytes()).expect_err(bad).kind(), ErrorKind::Unexpected);
        }
        assert!(Record::new(r#"{"a":[1]}"#).is_ok() && Record::new("~".repeat(256)).is_ok());
        assert_eq!(Record::found(b"\xff").expect_err("no text").kind(), ErrorKind::Unexpected);
    }
}
