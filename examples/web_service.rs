//! A web service that charges for orders. Each order has a lock, so that of two requests for one order, at two hosts, one waits. A host
//! that stood still past its lease is refused by the database, for each write shows the fence of its lock.
//!
//! Start it on one host or on several, with a database that it may make tables in:
//!
//! ```text
//! cargo run --example web_service --features mysql -- 'mysql://user:pass@127.0.0.1/shop?create=true' 127.0.0.1:8080
//! for i in 1 2 3 4 5; do curl --request POST http://127.0.0.1:8080/orders/7/pay & done; wait
//! ```
//!
//! One answer is `order 7 is paid`, four are `order 7 was paid before`, and the service prints `charging for order 7` once. Then
//! pretend that a newer holder was there for order 8, and pay it: the answer is `409 Conflict`, and nothing is written.
//!
//! ```text
//! mariadb shop --execute "INSERT INTO fenced_resource (resource_name, fence) VALUES ('order/8', 18000000000000000000)"
//! curl --include --request POST http://127.0.0.1:8080/orders/8/pay
//! ```

use std::{env, error::Error, sync::Arc, time::Duration};

use axum::{
    Router,
    extract::{Path, State},
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::post,
};
use lockkit::{ErrorKind, Fence, Locker, Outcome, mysql::fenced};
use sqlx::{MySql, MySqlPool, Transaction};
use tokio::net::TcpListener;

/// The state that all requests share. Locks and orders are in one database here, and need not be: the fence must be checked where the
/// orders are.
struct Shop {
    locker: Locker,
    orders: MySqlPool,
}

/// `POST /orders/{id}/pay`
async fn pay(State(shop): State<Arc<Shop>>, Path(id): Path<u64>) -> Result<String, Refusal> {
    let lock = shop.locker.lock(order(id)).ttl(Duration::from_secs(10));
    let Some(guard) = lock.acquire_within(Duration::from_secs(10)).await? else {
        return Err(Refusal(StatusCode::CONFLICT, format!("order {id} is being paid")));
    };
    // The lease is renewed for as long as this takes. If that fails, the work is dropped before the lease can lapse; if the
    // client goes away, axum drops all of this, and the lock is released in the background.
    let answer = guard.run(pay_as_holder(&shop, id, guard.fence())).await??;
    match guard.release().await {
        Ok(Outcome::Released) => {}
        // The answer stands, for the database has admitted the fence of each write.
        Ok(Outcome::NotHeld(reason)) => eprintln!("order {id}: the lock was lost at the end: {reason}"),
        // Others may have to wait until the lease lapses.
        Err(error) => eprintln!("order {id}: {error}"),
    }
    Ok(answer)
}

/// The work under the lock.
async fn pay_as_holder(shop: &Shop, id: u64, fence: Fence) -> Result<String, Refusal> {
    // A holder shows its fence first: data that it read before could still be changed by a former holder.
    let mut transaction = shop.begin(id, fence).await?;
    let paid = sqlx::query("SELECT id FROM paid_order WHERE id = ?").bind(id).fetch_optional(&mut *transaction).await?;
    transaction.commit().await?;
    if paid.is_some() {
        return Ok(format!("order {id} was paid before\n"));
    }
    charge(id).await;
    // This may have taken long. If a newer holder has begun meanwhile, the fence is too low now, and nothing is written.
    let mut transaction = shop.begin(id, fence).await?;
    sqlx::query("INSERT INTO paid_order (id) VALUES (?)").bind(id).execute(&mut *transaction).await?;
    transaction.commit().await?;
    Ok(format!("order {id} is paid\n"))
}

impl Shop {
    /// A transaction in which a holder of the order's lock may write: the row with the highest fence is locked to its end.
    async fn begin(&self, id: u64, fence: Fence) -> Result<Transaction<'static, MySql>, Refusal> {
        let mut transaction = self.orders.begin().await?;
        // Refused, it is an error of the kind `Lost`, like that of a guard, and the transaction is rolled back.
        fenced::claim(&mut transaction, &order(id), fence).await?.ok()?;
        Ok(transaction)
    }
}

/// The name of the lock, and of what the fence protects.
fn order(id: u64) -> String {
    format!("order/{id}")
}

/// Asks the bank. It can check no fence; give it the number of the order, so that it can tell a second charge from the first.
async fn charge(id: u64) {
    println!("charging for order {id}");
    tokio::time::sleep(Duration::from_millis(200)).await;
}

/// The answer to a request that failed.
struct Refusal(StatusCode, String);

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        (self.0, self.1 + "\n").into_response()
    }
}

impl From<lockkit::Error> for Refusal {
    fn from(error: lockkit::Error) -> Self {
        eprintln!("{error}");
        match error.kind() {
            ErrorKind::Lost => Self(StatusCode::CONFLICT, "another host has taken over; ask again".to_owned()),
            _ if error.is_retryable() => Self(StatusCode::SERVICE_UNAVAILABLE, "ask again later".to_owned()),
            _ => Self(StatusCode::INTERNAL_SERVER_ERROR, "this should not happen".to_owned()),
        }
    }
}

impl From<sqlx::Error> for Refusal {
    fn from(error: sqlx::Error) -> Self {
        eprintln!("the database of the orders: {error}");
        Self(StatusCode::SERVICE_UNAVAILABLE, "ask again later".to_owned())
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut args = env::args().skip(1);
    let url = args.next().ok_or("the URL of a MySQL or MariaDB server is missing")?;
    let listen = args.next().unwrap_or_else(|| "127.0.0.1:8080".to_owned());

    let locker = lockkit::connect(&url).await?;
    // The options are lockkit's own.
    let orders = MySqlPool::connect(url.split('?').next().unwrap_or(&url)).await?;
    sqlx::query(fenced::DDL).execute(&orders).await?;
    sqlx::query("CREATE TABLE IF NOT EXISTS paid_order (id BIGINT UNSIGNED PRIMARY KEY)").execute(&orders).await?;

    let shop = Arc::new(Shop { locker: locker.clone(), orders });
    let service = Router::new().route("/orders/{id}/pay", post(pay)).with_state(shop);
    let listener = TcpListener::bind(listen).await?;
    println!("listening on {}", listener.local_addr()?);
    let interrupted = async { drop(tokio::signal::ctrl_c().await) };
    axum::serve(listener, service).with_graceful_shutdown(interrupted).await?;
    // Releases in the background come to their end before the process does.
    if let Err(error) = locker.shutdown(Duration::from_secs(5)).await {
        eprintln!("{error}; those leases end by time");
    }
    Ok(())
}
