//! What Prometheus gets to see of a service's locks: metrics of their life, and of each call to the store.
//! `cargo run --example metrics --features metrics,redis -- redis://127.0.0.1`

use std::{error::Error, time::Duration};

use lockkit::{Locker, Metrics, Observed, Outcome};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "memory:".to_owned());

    // Times become buckets, which can be added up over many processes. A service would also call `with_http_listener`.
    let seconds = [0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 30.0, 120.0, 600.0];
    let exporter = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), &seconds)?
        .install_recorder()?;

    let store = Observed::new(lockkit::open(&url).await?);
    // The first word of a name is its class: names themselves never become labels, for there may be millions.
    let class = |key: &lockkit::LockKey| if key.as_str().starts_with("invoice/") { "invoice" } else { "other" };
    let locker = Locker::builder(store).observer(Metrics::classified(class)).build();

    let guard = locker.lock("invoice/42").ttl(Duration::from_secs(1)).acquire().await?;
    let other = locker.lock("invoice/42").acquire_within(Duration::from_millis(50)).await?;
    assert!(other.is_none(), "it is held");
    // By now it was renewed.
    tokio::time::sleep(Duration::from_millis(600)).await;
    if let Outcome::NotHeld(reason) = guard.release().await? {
        eprintln!("the work may have overlapped: {reason}");
    }

    print!("{}", exporter.render());
    Ok(())
}
