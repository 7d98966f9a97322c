//! Transactions that check fences.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use lockkit_core::{
    Error, ErrorKind, Fence, LockStore, Result,
    fenced::{Admission, FencedResource},
};
use lockkit_mysql::{MySqlStore, fenced};
use lockkit_testkit::{BoxError, a_frozen_holder_is_refused};
use sqlx::{Connection as _, Executor as _, MySqlConnection, Row as _};
use tokio::sync::Mutex;

use crate::support::{Ctx, raw, tests};

tests! {
    a_holder_that_was_frozen_past_its_lease_is_refused
    a_claim_is_recorded_by_the_commit
    a_claim_keeps_others_out_until_the_commit
    a_name_that_is_none_is_said
    a_table_that_is_missing_is_said
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

    async fn change(&self, fence: Fence, value: Option<&[u8]>) -> Result<Admission> {
        let failed = |e: sqlx::Error| Error::new(ErrorKind::Unexpected, e.to_string());
        let mut connection = self.0.lock().await;
        let mut transaction = connection.begin().await.map_err(failed)?;
        let admission = fenced::claim(&mut transaction, NAME, fence).await?;
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
        self.change(fence, None).await
    }

    async fn write(&self, fence: Fence, value: &[u8]) -> Result<Admission> {
        self.change(fence, Some(value)).await
    }

    async fn read(&self) -> Result<Option<Vec<u8>>> {
        let row = self.0.lock().await.fetch_optional("SELECT value FROM stock").await.expect("read");
        Ok(row.map(|row| row.get(0)))
    }
}

async fn a_holder_that_was_frozen_past_its_lease_is_refused(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let stock = Stock::open(raw(&server).await).await;
    let url = server.url();
    let open = move || {
        let url = url.clone();
        async move { Ok::<_, BoxError>(Arc::new(MySqlStore::from_url(&url).await?) as Arc<dyn LockStore>) }
    };
    let proof = a_frozen_holder_is_refused(open, Arc::new(stock), NAME, Duration::from_secs(1)).await;
    proof.expect("the late write is refused");
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
