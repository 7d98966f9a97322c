//! Changes without a lock, of rows that count their versions.

use std::sync::Arc;

use lockkit_core::ErrorKind;
use lockkit_mysql::{VersionedUpdate, update_versioned};
use sqlx::{Connection as _, Executor as _, MySqlConnection};

use crate::support::{Ctx, claim, tests};

tests! {
    what_was_changed_since_it_was_read_is_not_overwritten
    many_writers_lose_nothing
    more_rows_than_one_are_refused
    a_server_that_refuses_an_old_view_says_so
}

const ADD: &str = "UPDATE stock SET n = ?, version = version + 1 WHERE id = ? AND version = ?";

/// Makes a row with 0 at version 1, and gives its key.
async fn row(connection: &mut MySqlConnection) -> String {
    let table = "CREATE TABLE IF NOT EXISTS stock \
                 (id VARCHAR(512) PRIMARY KEY, n BIGINT NOT NULL, version BIGINT UNSIGNED NOT NULL) ENGINE=InnoDB";
    connection.execute(table).await.expect("create");
    let id = claim().key.as_str().to_owned();
    sqlx::query("INSERT INTO stock VALUES (?, 0, 1)").bind(&id).execute(connection).await.expect("insert");
    id
}

async fn read(connection: &mut MySqlConnection, id: &str) -> (i64, u64) {
    let row = sqlx::query_as("SELECT n, version FROM stock WHERE id = ?").bind(id);
    row.fetch_one(connection).await.expect("read")
}

/// Adds one to what was read, in a transaction of its own.
async fn add(connection: &mut MySqlConnection, id: &str, (n, version): (i64, u64)) -> VersionedUpdate {
    let mut transaction = connection.begin().await.expect("begin");
    let update = sqlx::query(ADD).bind(n + 1).bind(id).bind(version);
    let updated = update_versioned(&mut transaction, update).await.expect("update");
    transaction.commit().await.expect("commit");
    updated
}

async fn what_was_changed_since_it_was_read_is_not_overwritten(ctx: Arc<Ctx>) {
    let (mut one, mut two) = (ctx.raw().await, ctx.raw().await);
    let id = row(&mut one).await;

    // Without the version the second writes over what the first wrote: the lost update.
    let seen = [read(&mut one, &id).await.0, read(&mut two, &id).await.0];
    for (connection, seen) in [&mut one, &mut two].into_iter().zip(seen) {
        let update = sqlx::query("UPDATE stock SET n = ? WHERE id = ?").bind(seen + 1).bind(&id);
        update.execute(connection).await.expect("update");
    }
    assert_eq!(read(&mut one, &id).await, (1, 1), "two were added, and one is counted");

    // In a transaction that has its view of the data already, too, the update sees what was committed since.
    let (seen_by_one, mut transaction) = (read(&mut one, &id).await, two.begin().await.expect("begin"));
    let (n, version) = read(&mut transaction, &id).await;
    assert_eq!(add(&mut one, &id, seen_by_one).await, VersionedUpdate::Done);
    assert_eq!(read(&mut transaction, &id).await, (n, version), "the view of the transaction is old");
    let update = sqlx::query(ADD).bind(n + 1).bind(&id).bind(version);
    assert_eq!(update_versioned(&mut transaction, update).await.expect("update"), VersionedUpdate::Stale);
    transaction.rollback().await.expect("rollback");
    assert_eq!(read(&mut two, &id).await, (2, 2));

    // A row that is written as it was counts as changed.
    let mut transaction = one.begin().await.expect("begin");
    let same = sqlx::query("UPDATE stock SET n = n WHERE id = ? AND version = 2").bind(&id);
    assert!(update_versioned(&mut transaction, same).await.expect("update").is_done());
    transaction.rollback().await.expect("rollback");
    sqlx::query("DELETE FROM stock WHERE id = ?").bind(&id).execute(&mut one).await.expect("delete");
    assert_eq!(add(&mut two, &id, (2, 2)).await, VersionedUpdate::Stale, "it is gone");
}

async fn many_writers_lose_nothing(ctx: Arc<Ctx>) {
    let mut first = ctx.raw().await;
    let id = row(&mut first).await;
    let mut writers = Vec::new();
    for _ in 0..6 {
        let (mut connection, id) = (ctx.raw().await, id.clone());
        writers.push(tokio::spawn(async move {
            let (mut done, mut stale) = (0, 0);
            while done < 20 {
                let seen = read(&mut connection, &id).await;
                match add(&mut connection, &id, seen).await {
                    VersionedUpdate::Done => done += 1,
                    VersionedUpdate::Stale => stale += 1,
                }
            }
            stale
        }));
    }
    let mut stale = 0;
    for writer in writers {
        stale += writer.await.expect("no panic");
    }
    assert_eq!(read(&mut first, &id).await, (120, 121), "{stale} were stale");
}

async fn more_rows_than_one_are_refused(ctx: Arc<Ctx>) {
    let mut connection = ctx.raw().await;
    let ids = [row(&mut connection).await, row(&mut connection).await];
    let mut transaction = connection.begin().await.expect("begin");
    let both = sqlx::query("UPDATE stock SET version = version + 1 WHERE id IN (?, ?) AND version = 1");
    let both = both.bind(&ids[0]).bind(&ids[1]);
    let error = update_versioned(&mut transaction, both).await.expect_err("two rows");
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert!(error.to_string().contains("changed 2 rows"), "{error}");
    transaction.rollback().await.expect("rollback");
    assert_eq!(read(&mut connection, &ids[0]).await, (0, 1));
}

/// MariaDB with `innodb_snapshot_isolation` ends a transaction that has an old view of the row. Others don't know the setting.
async fn a_server_that_refuses_an_old_view_says_so(ctx: Arc<Ctx>) {
    let (mut one, mut two) = (ctx.raw().await, ctx.raw().await);
    let known = two.execute("SET SESSION innodb_snapshot_isolation = ON").await;
    if known.is_err() {
        return;
    }
    let id = row(&mut one).await;
    let mut transaction = two.begin().await.expect("begin");
    let (n, version) = read(&mut transaction, &id).await;
    assert_eq!(add(&mut one, &id, (n, version)).await, VersionedUpdate::Done);
    let update = sqlx::query(ADD).bind(n + 1).bind(&id).bind(version);
    let error = update_versioned(&mut transaction, update).await.expect_err("its view is old");
    assert_eq!(error.kind(), ErrorKind::Deadlock, "{error}");
    assert!(error.is_retryable(), "{error}");
    transaction.rollback().await.expect("rollback");
    let seen = read(&mut two, &id).await;
    assert_eq!(add(&mut two, &id, seen).await, VersionedUpdate::Done);
}
