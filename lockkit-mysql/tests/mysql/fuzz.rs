//! Whatever stands in a lock's row: no panic, no grant that is none, an error of its kind. `PROPTEST_CASES` says how many rows
//! are tried.

use std::sync::Arc;

use lockkit_core::{Attempt, Error, Fence, LockStore, Query, Release, Renewed};
use lockkit_mysql::MySqlStore;
use proptest::{
    collection::vec,
    prelude::*,
    sample::select,
    test_runner::{Config, TestRunner},
};
use sqlx::{Connection as _, Executor as _, MySqlConnection};
use tokio::{runtime::Handle, task::block_in_place};

use crate::support::{Ctx, attempt, claim, renew, renewal, tests};

tests! {
    whatever_stands_in_a_row_is_no_lease_of_ours
}

/// A few seconds, unless `PROPTEST_CASES` says otherwise.
const CASES: u32 = 60;

#[derive(Clone, Debug)]
struct Row {
    token: Option<Vec<u8>>,
    fence: u64,
    last: u64,
    span: u32,
    count: u32,
    holder: String,
    /// As SQL spells it, and whether it is in the future.
    expires: (&'static str, bool),
    /// Bytes of another row's name.
    other: Vec<u8>,
}

fn row() -> impl Strategy<Value = Row> {
    let number = || {
        prop_oneof![
            select(vec![
                0,
                1,
                i64::MAX as u64 - 1,
                i64::MAX as u64,
                i64::MAX as u64 + 1,
                u64::MAX - 70,
                u64::MAX - 1,
                u64::MAX
            ]),
            any::<u64>(),
        ]
    };
    let small = || prop_oneof![select(vec![0, 1, i32::MAX as u32, u32::MAX]), any::<u32>()];
    let expires = select(vec![
        ("NULL", false),
        ("'1000-01-01'", false),
        ("'1970-01-01 00:00:01'", false),
        ("UTC_TIMESTAMP(6) - INTERVAL 1 MICROSECOND", false),
        ("UTC_TIMESTAMP(6) + INTERVAL 1 HOUR", true),
        ("'9999-12-31 23:59:59.999999'", true),
    ]);
    let token = prop::option::of(vec(any::<u8>(), 16));
    (token, number(), number(), small(), small(), "#?\\PC{0,9}[\\n\\t\\x00]?", expires, vec(any::<u8>(), 1..20))
        .prop_map(|(token, fence, last, span, count, holder, expires, other)| Row {
            token,
            fence,
            last,
            span,
            count,
            holder,
            expires,
            other,
        })
}

async fn whatever_stands_in_a_row_is_no_lease_of_ours(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let store = MySqlStore::connect(crate::support::config(&server)).await.expect("connect");
    let raw = MySqlConnection::connect(&server.url()).await.expect("raw connection");
    let cases = if std::env::var_os("PROPTEST_CASES").is_some() { Config::default().cases } else { CASES };
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    let raw = tokio::sync::Mutex::new(raw);
    let judged = TestRunner::new(config).run(&row(), |row| {
        let case = async {
            let mut raw = raw.lock().await;
            raw.execute("DELETE FROM resource_lock").await.expect("empty");
            judge(&store, &mut raw, &row).await
        };
        block_in_place(|| Handle::current().block_on(case)).map_err(TestCaseError::fail)
    });
    judged.unwrap_or_else(|broken| panic!("{broken}"));
}

async fn plant(raw: &mut MySqlConnection, row: &Row, name: &[u8]) {
    let insert = format!(
        "INSERT INTO resource_lock (resource_name, create_time, update_time, token, fence, fence_last, span, `count`, node_info, expires) \
         VALUES (?, UTC_TIMESTAMP(6), UTC_TIMESTAMP(6), ?, ?, ?, ?, ?, ?, {})",
        row.expires.0
    );
    let insert = sqlx::query(sqlx::AssertSqlSafe(insert)).bind(name).bind(&row.token).bind(row.fence).bind(row.last);
    insert.bind(row.span).bind(row.count).bind(&row.holder).execute(raw).await.expect("a row");
}

/// Judges the answers of a client about a lock with this row.
async fn judge(store: &MySqlStore, raw: &mut MySqlConnection, row: &Row) -> Result<(), String> {
    let says = |error: Error| error.to_string();
    let mine = claim();
    plant(raw, row, mine.key.as_str().as_bytes()).await;
    plant(raw, row, &row.other).await;
    let is_taken = row.expires.1;
    match (attempt(store, &mine).await, is_taken) {
        (Ok(Attempt::Contended(_)), true) => {}
        (Ok(Attempt::Granted(hold)), false) if hold.fence > Fence::new(row.last) => {
            match renew(store, &renewal(&mine)).await.map_err(says)? {
                Renewed::Held(again) if again.fence == hold.fence => {}
                other => return Err(format!("{hold:?} was granted, and renewed: {other:?}")),
            }
            released(store.release(&mine).await, true)?;
        }
        // No fences are left for a counter at its end.
        // They end at 2^62: beyond that an answer looks like one to another question, and its effect is open.
        (Err(_), false) if row.last >= (1 << 62) - 100 => return store.release(&mine).await.map(drop).map_err(says),
        (other, _) => return Err(format!("{other:?}")),
    }
    if is_taken {
        match renew(store, &renewal(&mine)).await {
            Ok(Renewed::Lost(_)) => {}
            other => return Err(format!("renewed: {other:?}")),
        }
        released(store.release(&mine).await, false)?;
    }
    for query in [Query::Keys(vec![mine.key.clone()]), Query::Prefix(String::new())] {
        let states = store.inspect(&query).await.map_err(|error| format!("inspected: {error}"))?;
        let shown = states
            .iter()
            .flat_map(|state| &state.holders)
            .any(|holder| holder.info.as_str().contains(char::is_control));
        if shown || states.iter().any(|state| state.key == mine.key && state.holders.len() != usize::from(is_taken)) {
            return Err(format!("{states:?}"));
        }
    }
    Ok(())
}

fn released(answer: lockkit_core::Result<Release>, was_held: bool) -> Result<(), String> {
    match answer {
        Ok(Release::Released { .. }) if was_held => Ok(()),
        Ok(Release::NotHeld(_)) if !was_held => Ok(()),
        other => Err(format!("released: {other:?}")),
    }
}
