//! Locks that live with the user's own transaction.
//!
//! Where a new name is locked without a store, its neighbourhood is locked too, so those tests have a server of their own.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use lockkit_core::{Effect, ErrorKind};
use lockkit_mysql::{TransactionLock, lock_in_transaction};
use sqlx::{Connection as _, Executor as _, MySqlConnection};

use crate::support::{Ctx, attempt, claim, contended, free, hold, raw, tests};

tests! {
    a_transaction_excludes_others_until_it_ends
    a_new_name_is_locked_by_one_of_many
    neighbours_are_not_locked
    a_transaction_and_a_lease_exclude_each_other
    a_lost_client_frees_its_lock
    a_deadlock_is_typed
    what_is_read_after_the_lock_is_new
}

async fn lock(connection: &mut MySqlConnection, name: &str) -> lockkit_core::Result<()> {
    let mut transaction = connection.begin().await.expect("begin");
    let locked = lock_in_transaction(&mut transaction, name).await?;
    assert!(locked.is_locked());
    tokio::time::sleep(Duration::from_millis(50)).await;
    transaction.commit().await.expect("commit");
    Ok(())
}

async fn a_transaction_excludes_others_until_it_ends(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let (mut one, mut two, name) = (raw(&server).await, raw(&server).await, claim().key);
    for commits in [true, false] {
        let mut first = one.begin().await.expect("begin");
        assert!(lock_in_transaction(&mut first, name.as_str()).await.expect("lock").is_locked());
        let started = Instant::now();
        let (second, ()) = tokio::join!(lock(&mut two, name.as_str()), async {
            tokio::time::sleep(Duration::from_millis(200)).await;
            if commits { first.commit().await } else { first.rollback().await }.expect("end");
        });
        second.expect("lock");
        assert!(started.elapsed() >= Duration::from_millis(200), "both had it");
    }
}

/// The row is not there yet, and all make it at once.
async fn a_new_name_is_locked_by_one_of_many(ctx: Arc<Ctx>) {
    let (store, name) = (Arc::new(ctx.store().await), claim().key);
    let inside = Arc::new(AtomicU32::new(0));
    let mut tasks = Vec::new();
    for _ in 0..8 {
        let (store, mut connection) = (Arc::clone(&store), ctx.raw().await);
        let (name, inside) = (name.clone(), Arc::clone(&inside));
        tasks.push(tokio::spawn(async move {
            let mut transaction = connection.begin().await.expect("begin");
            assert!(store.lock_in_transaction(&mut transaction, name.as_str()).await.expect("lock").is_locked());
            assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two have it");
            tokio::time::sleep(Duration::from_millis(10)).await;
            inside.fetch_sub(1, Ordering::SeqCst);
            transaction.commit().await.expect("commit");
        }));
    }
    for task in tasks {
        task.await.expect("no panic");
    }
}

/// A lock in a transaction must not lock what lies between the names, else it would stop all who use new ones.
async fn neighbours_are_not_locked(ctx: Arc<Ctx>) {
    let (store, mut raw, mine) = (ctx.store().await, ctx.raw().await, claim());
    let mut transaction = raw.begin().await.expect("begin");
    assert!(store.lock_in_transaction(&mut transaction, mine.key.as_str()).await.expect("lock").is_locked());
    for end in ["", "a", "~"] {
        let mut neighbour = claim();
        let name = if end.is_empty() { &mine.key.as_str()[..12] } else { &format!("{}{end}", mine.key) };
        neighbour.key = lockkit_core::LockKey::new(name).expect("name");
        hold(&store, &neighbour).await;
    }
    transaction.commit().await.expect("commit");
}

async fn a_transaction_and_a_lease_exclude_each_other(ctx: Arc<Ctx>) {
    let (store, mut raw, mine) = (ctx.store().await, ctx.raw().await, claim());
    hold(&store, &mine).await;
    let mut transaction = raw.begin().await.expect("begin");
    match lock_in_transaction(&mut transaction, mine.key.as_str()).await.expect("ask") {
        TransactionLock::Leased(by) => assert_eq!(by.holder.expect("holder").as_str(), "test: holder"),
        TransactionLock::Locked => panic!("both have it"),
    }
    transaction.rollback().await.expect("rollback");
    free(&store, &mine).await;
    let mut transaction = raw.begin().await.expect("begin");
    assert!(lock_in_transaction(&mut transaction, mine.key.as_str()).await.expect("lock").is_locked());
    let error = attempt(&store, &mine).await.expect_err("the row is locked");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, Effect::None), "{error}");
    transaction.commit().await.expect("commit");
    hold(&store, &mine).await;
    contended(attempt(&store, &crate::support::rival(&mine)).await.expect("acquire"));
}

async fn a_lost_client_frees_its_lock(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let (mut one, mut two, name) = (raw(&server).await, raw(&server).await, claim().key);
    let mut first = one.begin().await.expect("begin");
    assert!(lock_in_transaction(&mut first, name.as_str()).await.expect("lock").is_locked());
    drop(first);
    drop(one);
    lock(&mut two, name.as_str()).await.expect("free");
}

/// Error 1213: the server has rolled one of the two back, and says so.
async fn a_deadlock_is_typed(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let (mut one, mut two, a, b) = (raw(&server).await, raw(&server).await, claim().key, claim().key);
    // Not yet there, the rows would be locked with their neighbourhood.
    lock(&mut one, a.as_str()).await.expect("make the row");
    lock(&mut one, b.as_str()).await.expect("make the row");
    let (mut first, mut second) = (one.begin().await.expect("begin"), two.begin().await.expect("begin"));
    assert!(lock_in_transaction(&mut first, a.as_str()).await.expect("lock").is_locked());
    assert!(lock_in_transaction(&mut second, b.as_str()).await.expect("lock").is_locked());
    // Whoever gets the deadlock is rolled back, and the other goes on.
    let (x, y) =
        tokio::join!(lock_in_transaction(&mut first, b.as_str()), lock_in_transaction(&mut second, a.as_str()));
    let error = match (x, y) {
        (Err(error), Ok(locked)) | (Ok(locked), Err(error)) => {
            assert!(locked.is_locked());
            error
        }
        other => panic!("{other:?}"),
    };
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Deadlock, Effect::None), "{error}");
    assert!(error.is_retryable());
}

/// Under the default isolation a transaction sees the database as of its first read, which must not be the lock's.
async fn what_is_read_after_the_lock_is_new(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let (mut one, mut two, name) = (raw(&server).await, raw(&server).await, claim().key);
    one.execute("CREATE TABLE account (balance INT)").await.expect("ddl");
    one.execute("INSERT INTO account VALUES (0)").await.expect("row");
    let mut first = one.begin().await.expect("begin");
    assert!(lock_in_transaction(&mut first, name.as_str()).await.expect("lock").is_locked());
    let (balance, ()) = tokio::join!(
        async {
            let mut second = two.begin().await.expect("begin");
            assert!(lock_in_transaction(&mut second, name.as_str()).await.expect("lock").is_locked());
            let row: (i32,) =
                sqlx::query_as("SELECT balance FROM account").fetch_one(&mut *second).await.expect("read");
            row.0
        },
        async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            first.execute("UPDATE account SET balance = 7").await.expect("write");
            first.commit().await.expect("commit");
        }
    );
    assert_eq!(balance, 7, "it read what was before the lock");
}
