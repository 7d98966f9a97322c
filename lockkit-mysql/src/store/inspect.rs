//! Reading locks and their holders.

use std::collections::HashMap;

use lockkit_core::{KeyState, LockKey, Query, Result, Waiter};
use sqlx::mysql::MySqlRow;

use crate::{
    client::{
        connection::{Bound, Connection},
        pool::ConnectionClass,
    },
    store::MySqlStore,
    wire::{
        error::Sent,
        name::{after_prefix, to_column},
        row::{self, LockRow},
        size::Size,
    },
};

/// How many held locks are read at once.
const PAGE: u32 = 1000;

/// Reads locks by name, hundreds in one statement, or by the beginning of their names.
pub(crate) async fn inspect(store: &MySqlStore, query: &Query) -> Result<Vec<KeyState>> {
    let mut states = Vec::new();
    match query {
        Query::Keys(keys) => {
            for keys in keys.chunks(Size::MOST) {
                let mut connection = store.pool.connection(ConnectionClass::Common, Bound::new(store.timeout)).await?;
                states.extend(named(store, &mut connection, keys).await?);
            }
        }
        Query::Queue(key) => {
            let mut connection = store.pool.connection(ConnectionClass::Common, Bound::new(store.timeout)).await?;
            states = named(store, &mut connection, std::slice::from_ref(key)).await?;
            if store.info.capability.fifo {
                let queue = queue(store, &mut connection, key).await?;
                states.iter_mut().for_each(|state| state.queue = Some(queue.clone()));
            }
        }
        Query::Prefix(prefix) => {
            let mut last = Vec::new();
            loop {
                let mut connection = store.pool.connection(ConnectionClass::Common, Bound::new(store.timeout)).await?;
                let page = page(store, &mut connection, prefix, &last).await?;
                let is_last = page.len() < usize::try_from(PAGE).unwrap_or(usize::MAX);
                last = page.last().map(|lock| lock.name.clone()).unwrap_or_default();
                // A row whose name no lockkit client could have written is not a lock.
                states.extend(page.into_iter().filter_map(LockRow::into_named_state));
                if is_last {
                    break;
                }
            }
        }
    }
    Ok(states)
}

/// The states of these locks, in order; there are at most [`Size::MOST`].
async fn named(store: &MySqlStore, connection: &mut Connection, keys: &[LockKey]) -> Result<Vec<KeyState>> {
    let found = read(store, connection, &keys.iter().collect::<Vec<_>>(), store.info.capability.fifo).await?;
    // A name may stand in the query twice.
    let state = |key: &LockKey| match found.get(to_column(key)) {
        Some(lock) => lock.clone().into_state(key.clone()),
        None => KeyState::unknown(key.clone()),
    };
    Ok(keys.iter().map(state).collect())
}

/// Those that wait for a lock in order.
async fn queue(store: &MySqlStore, connection: &mut Connection, key: &LockKey) -> Result<Vec<Waiter>> {
    let most = u32::try_from(KeyState::LONGEST_QUEUE).unwrap_or(u32::MAX);
    let statement = |question| store.statements.queue().bind(question).bind(to_column(key)).bind(most);
    connection.numbered_rows(statement).await?.iter().map(row::waiter).collect()
}

/// The rows of these locks by their names, without locks that have no row, and with the claims on them if these are wanted. There are at most [`Size::MOST`] locks.
pub(crate) async fn read(
    store: &MySqlStore,
    connection: &mut Connection,
    keys: &[&LockKey],
    with_claims: bool,
) -> Result<HashMap<Vec<u8>, LockRow>> {
    let size = Size::of(keys.len());
    let statement = |question| {
        let statement =
            if with_claims { store.statements.inspect_claims(size) } else { store.statements.inspect(size) };
        let statement = statement.bind(question);
        size.fill(keys).fold(statement, |statement, key| statement.bind(to_column(key)))
    };
    let rows = connection.numbered_rows(statement).await?;
    let found: HashMap<_, _> = locks(&rows, with_claims)?.into_iter().map(|lock| (lock.name.clone(), lock)).collect();
    if keys.iter().filter(|key| found.contains_key(to_column(key))).count() < found.len() {
        // These rows were not asked for.
        return Err(connection.out_of_step(Sent::ReadOnly));
    }
    Ok(found)
}

async fn page(store: &MySqlStore, connection: &mut Connection, prefix: &str, last: &[u8]) -> Result<Vec<LockRow>> {
    let with_claims = store.info.capability.fifo;
    let statement = |question| {
        let page = if with_claims { store.statements.page_claims() } else { store.statements.page() };
        let page = page.bind(question).bind(last);
        page.bind(prefix.as_bytes()).bind(after_prefix(prefix)).bind(PAGE)
    };
    locks(&connection.numbered_rows(statement).await?, with_claims)
}

fn locks(rows: &[MySqlRow], with_claims: bool) -> Result<Vec<LockRow>> {
    if !with_claims {
        return rows.iter().map(LockRow::read).collect();
    }
    let mut locks = Vec::with_capacity(rows.len());
    rows.iter().try_for_each(|row| LockRow::read_with_claim(row, &mut locks))?;
    Ok(locks)
}
