//! Transactions that check fences.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use lockkit_core::{
    Error, ErrorKind, Fence, LockStore, Result,
    fenced::{Admission, FencedResource},
};
use lockkit_mysql::{MySqlStore, fenced};
use lockkit_testkit::{AsyncOpen, BoxError, a_frozen_holder_is_refused, a_frozen_writer_is_refused_after_readers};
use sqlx::{Connection as _, Executor as _, MySqlConnection, Row as _};
use tokio::sync::Mutex;

use crate::support::{Ctx, raw, tests};

tests! {
    a_holder_that_was_frozen_past_its_lease_is_refused
    a_writer_that_was_frozen_is_refused_after_readers
    readers_and_writers_that_come_at_once_are_admitted_in_some_order
    a_claim_is_recorded_by_the_commit
    a_claim_keeps_others_out_until_the_commit
    a_name_that_is_none_is_said
    a_table_that_is_missing_is_said
    a_table_from_before_readers_claimed_is_said
}

/// What a service would write around [`fenced::claim`]: a row of its own, changed in the transaction that claims.
#[derive(Debug)]
struct Stock(Mutex<MySqlConnection>);

const NAME: &str = "stock/7";

impl Stock {
    async fn open(mut connection: MySqlConnection) -> Self {
        connection.execute(fenced::DDL).await.expect("table of fences");
        connection.execute("CREATE TABLE IF NOT EXISTS stock (value VARBINARY(64))").await.expect("table");
        Self(Mutex::new(connection))
    }

    async fn change(&self, fence: Fence, is_reader: bool, value: Option<&[u8]>) -> Result<Admission> {
        let failed = |e: sqlx::Error| Error::new(ErrorKind::Unexpected, e.to_string());
        let mut connection = self.0.lock().await;
        let mut transaction = connection.begin().await.map_err(failed)?;
        let admission = match is_reader {
            true => fenced::claim_shared(&mut transaction, NAME, fence).await?,
            false => fenced::claim(&mut transaction, NAME, fence).await?,
        };
        if let (true, Some(value)) = (admission.is_admitted(), value) {
            transaction.execute("DELETE FROM stock").await.map_err(failed)?;
            let insert = sqlx::query("INSERT INTO stock VALUES (?)").bind(value);
            insert.execute(&mut *transaction).await.map_err(failed)?;
        }
        transaction.commit().await.map_err(failed)?;
        Ok(admission)
    }
}

#[async_trait]
impl FencedResource for Stock {
    async fn claim(&self, fence: Fence) -> Result<Admission> {
        self.change(fence, false, None).await
    }

    async fn write(&self, fence: Fence, value: &[u8]) -> Result<Admission> {
        self.change(fence, false, Some(value)).await
    }

    async fn claim_shared(&self, fence: Fence) -> Result<Admission> {
        self.change(fence, true, None).await
    }

    async fn read(&self) -> Result<Option<Vec<u8>>> {
        let row = self.0.lock().await.fetch_optional("SELECT value FROM stock").await.expect("read");
        Ok(row.map(|row| row.get(0)))
    }
}

async fn a_holder_that_was_frozen_past_its_lease_is_refused(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let stock = Stock::open(raw(&server).await).await;
    let proof = a_frozen_holder_is_refused(opens(server.url()), Arc::new(stock), NAME, Duration::from_secs(1)).await;
    proof.expect("the late write is refused");
}

async fn a_writer_that_was_frozen_is_refused_after_readers(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let (stock, ttl) = (Stock::open(raw(&server).await).await, Duration::from_secs(1));
    let proof = a_frozen_writer_is_refused_after_readers(opens(server.url()), Arc::new(stock), NAME, ttl).await;
    proof.expect("the late write is refused, and readers share");
}

/// Clients of the locks' server.
fn opens(url: String) -> impl AsyncOpen + Clone {
    move || {
        let url = url.clone();
        async move { Ok::<_, BoxError>(Arc::new(MySqlStore::from_url(&url).await?) as Arc<dyn LockStore>) }
    }
}

/// Each on a connection of its own, all at once, also the first ones of the resource. Who is admitted was so in some order of all.
async fn readers_and_writers_that_come_at_once_are_admitted_in_some_order(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    raw(&server).await.execute(fenced::DDL).await.expect("table");
    for isolation in ["REPEATABLE READ", "READ COMMITTED"] {
        for (name, known) in [("new", false), ("known", true)] {
            let name = format!("{name} {isolation}");
            if known {
                one(&mut raw(&server).await, &name, 1, false).await.ok().expect("it is the first");
            }
            // The writers 1, 4, 7 and 10, and readers between them.
            let mut come = Vec::new();
            for fence in 1..=10_u64 {
                let (mut connection, name) = (raw(&server).await, name.clone());
                let set = format!("SET SESSION TRANSACTION ISOLATION LEVEL {isolation}");
                connection.execute(sqlx::AssertSqlSafe(set)).await.expect("isolation");
                let is_reader = fence % 3 != 1;
                come.push(async move { one(&mut connection, &name, fence, is_reader).await.is_admitted() });
            }
            let come: Vec<_> = come.into_iter().map(tokio::spawn).collect();
            let mut admitted = Vec::new();
            for came in come {
                admitted.push(came.await.expect("no panic"));
            }
            assert!(admitted[9], "nobody is above the last writer: {admitted:?}");
            let mut late = raw(&server).await;
            let refused = Admission::Refused { highest: Fence::new(10) };
            assert_eq!(one(&mut late, &name, 9, true).await, refused);
            assert_eq!(one(&mut late, &name, 9, false).await, refused);
            assert_eq!(one(&mut late, &name, 12, true).await, Admission::Admitted);
            assert_eq!(one(&mut late, &name, 13, true).await, Admission::Admitted);
            assert_eq!(one(&mut late, &name, 11, true).await, Admission::Admitted);
            assert_eq!(one(&mut late, &name, 12, false).await, Admission::Refused { highest: Fence::new(13) });
            assert_eq!(one(&mut late, &name, 13, false).await, Admission::Admitted);
            assert_eq!(one(&mut late, &name, 12, true).await, Admission::Refused { highest: Fence::new(13) });
        }
    }
}

/// A transaction that claims and nothing else; again after a deadlock, which new resources may meet.
async fn one(connection: &mut MySqlConnection, name: &str, fence: u64, is_reader: bool) -> Admission {
    loop {
        let mut transaction = connection.begin().await.expect("begin");
        let fence = Fence::new(fence);
        let claimed = match is_reader {
            true => fenced::claim_shared(&mut transaction, name, fence).await,
            false => fenced::claim(&mut transaction, name, fence).await,
        };
        match claimed {
            Ok(Admission::Admitted) => {
                transaction.commit().await.expect("commit");
                return Admission::Admitted;
            }
            Err(e) if e.kind() == ErrorKind::Deadlock => transaction.rollback().await.expect("rollback"),
            refused => {
                transaction.rollback().await.expect("rollback");
                return refused.expect("an answer");
            }
        }
    }
}

async fn a_claim_is_recorded_by_the_commit(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let mut connection = raw(&server).await;
    connection.execute(fenced::DDL).await.expect("table");
    for (fence, commits, admitted) in
        [(7, false, true), (6, true, true), (6, true, true), (9, true, true), (8, true, false), (u64::MAX, true, true)]
    {
        let mut transaction = connection.begin().await.expect("begin");
        let admission = fenced::claim(&mut transaction, NAME, Fence::new(fence)).await.expect("claim");
        assert_eq!(admission.is_admitted(), admitted, "{fence}");
        if commits { transaction.commit().await } else { transaction.rollback().await }.expect("end");
    }
    let mut transaction = connection.begin().await.expect("begin");
    let none = fenced::claim(&mut transaction, "other", Fence::NONE).await.expect("claim");
    assert_eq!(none, Admission::Refused { highest: Fence::NONE });
}

/// The newer holder's claim waits for the older one's commit, and the older one's next transaction is refused.
async fn a_claim_keeps_others_out_until_the_commit(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let (mut one, mut two) = (raw(&server).await, raw(&server).await);
    one.execute(fenced::DDL).await.expect("table");
    let mut first = one.begin().await.expect("begin");
    fenced::claim(&mut first, NAME, Fence::new(1)).await.expect("claim").ok().expect("admitted");
    first.commit().await.expect("commit");
    let mut first = one.begin().await.expect("begin");
    fenced::claim(&mut first, NAME, Fence::new(1)).await.expect("claim").ok().expect("admitted");
    let newer = tokio::spawn(async move {
        let mut second = two.begin().await.expect("begin");
        fenced::claim(&mut second, NAME, Fence::new(2)).await.expect("claim").ok().expect("admitted");
        second.commit().await.expect("commit");
    });
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(!newer.is_finished(), "the newer holder came between the older one's claim and its commit");
    first.commit().await.expect("commit");
    newer.await.expect("the newer holder");
    let mut first = one.begin().await.expect("begin");
    let late = fenced::claim(&mut first, NAME, Fence::new(1)).await.expect("claim");
    assert_eq!(late, Admission::Refused { highest: Fence::new(2) });
}

async fn a_name_that_is_none_is_said(ctx: Arc<Ctx>) {
    let mut connection = ctx.raw().await;
    let mut transaction = connection.begin().await.expect("begin");
    let error = fenced::claim(&mut transaction, "", Fence::new(1)).await.expect_err("no name");
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
}

async fn a_table_that_is_missing_is_said(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let mut connection = crate::support::raw(&server).await;
    let mut transaction = connection.begin().await.expect("begin");
    let error = fenced::claim(&mut transaction, NAME, Fence::new(1)).await.expect_err("there is no table");
    assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error}");
    assert!(error.message().contains(fenced::TABLE) && error.message().contains("fenced::DDL"), "{error}");
}

/// It had a column less.
async fn a_table_from_before_readers_claimed_is_said(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let mut connection = raw(&server).await;
    connection.execute(fenced::DDL).await.expect("table");
    connection.execute("ALTER TABLE fenced_resource DROP writer").await.expect("the older shape");
    let mut transaction = connection.begin().await.expect("begin");
    let error = fenced::claim_shared(&mut transaction, NAME, Fence::new(1)).await.expect_err("it lacks a column");
    assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error}");
    let (_, remedy) = error.message().split_once("column: ").expect("a remedy");
    let remedy = remedy.trim_end_matches(" adds it").to_owned();
    transaction.rollback().await.expect("rollback");
    connection.execute(sqlx::AssertSqlSafe(remedy)).await.expect("the remedy that the message names");
    assert_eq!(one(&mut connection, NAME, 1, true).await, Admission::Admitted);
}
