//! The dashboard and the alert rules ask for metrics that are there, by labels that they have: held against what a Prometheus
//! exporter really shows of locks that were taken, refused, renewed and lost.

use std::{
    collections::{BTreeMap, BTreeSet},
    error::Error,
    fs,
    path::Path,
    sync::Arc,
    time::Duration,
};

use lockkit::{LockStore, Locker, MemoryStore, Metrics, Observed, Outcome, redlock};
use lockkit_testkit::servers::{RedisOptions, RedisServer};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder};
use tokio::time::timeout;

const TTL: Duration = Duration::from_secs(1);
const PATIENCE: Duration = Duration::from_secs(20);

/// Which labels each metric has.
type Shown = BTreeMap<String, BTreeSet<String>>;

#[tokio::test]
async fn what_the_dashboard_and_the_alerts_ask_for_is_there() -> Result<(), Box<dyn Error>> {
    let suffix = Matcher::Suffix("_seconds".to_owned());
    let exporter = PrometheusBuilder::new().set_buckets_for_metric(suffix, &[0.01, 1.0])?.install_recorder()?;
    live_and_lose().await?;
    vote().await?;
    let shown = shown(&exporter.render());
    let asked = [dashboard()?, alerts()?].concat();
    assert!(asked.len() > 15, "{asked:?}");
    for question in asked {
        for (metric, labels) in named(&question) {
            let has = shown.get(&metric).ok_or_else(|| format!("{question}: no {metric} among {:?}", shown.keys()))?;
            let missing: Vec<_> = labels.difference(has).collect();
            assert!(missing.is_empty(), "{question}: {metric} has no {missing:?}, only {has:?}");
        }
    }
    Ok(())
}

/// A lock is taken, refused, renewed and given back; then its server is gone.
async fn live_and_lose() -> Result<(), Box<dyn Error>> {
    let server = RedisServer::start(RedisOptions::default()).await?;
    let store = Observed::new(lockkit::open(&server.url()).await?);
    let locker = Locker::builder(store).observer(Metrics::default()).build();
    let guard = locker.lock("job").ttl(TTL).acquire().await?;
    assert!(locker.lock("job").try_acquire().await?.is_none());
    guard.renew().await?;
    assert_eq!(guard.release().await?, Outcome::Released);
    let guard = locker.lock("job").ttl(TTL).acquire().await?;
    server.kill().await?;
    timeout(PATIENCE, guard.lost()).await?;
    Ok(())
}

/// A quorum is had, at once and in a second round, and missed.
async fn vote() -> Result<(), Box<dyn Error>> {
    let nodes: Vec<Arc<dyn LockStore>> = (0..3).map(|_| Arc::new(MemoryStore::new()) as Arc<dyn LockStore>).collect();
    let quorum = nodes.iter().map(|node| redlock::Node::new(Arc::clone(node)).durable(true)).collect();
    let locker = Locker::new(redlock::RedlockStore::new(quorum, redlock::RedlockConfig::new())?);
    // Of two nodes the counters are ahead.
    for (node, floor) in nodes.iter().zip([1 << 60, 1 << 61]) {
        let node = Locker::shared_builder(Arc::clone(node)).build();
        let guard = node.lock("job").fence_above(lockkit::Fence::new(floor)).acquire().await?;
        assert_eq!(guard.release().await?, Outcome::Released);
    }
    assert_eq!(locker.lock("job").acquire().await?.release().await?, Outcome::Released);
    // Two others have a node each.
    let mut others = Vec::new();
    for node in &nodes[..2] {
        others.push(Locker::shared_builder(Arc::clone(node)).build().lock("job").acquire().await?);
    }
    assert!(locker.lock("job").try_acquire().await?.is_none());
    Ok(())
}

/// The metrics of an exporter's text.
fn shown(text: &str) -> Shown {
    let mut shown = Shown::new();
    for line in text.lines().filter(|line| !line.starts_with('#') && !line.is_empty()) {
        let (series, _) = line.rsplit_once(' ').expect("a value");
        let (name, labels) = series.split_once('{').unwrap_or((series, ""));
        let labels = labels.split(',').filter_map(|label| label.split_once('=')).map(|(name, _)| name.to_owned());
        shown.entry(name.to_owned()).or_default().extend(labels);
    }
    shown
}

fn dashboard() -> Result<Vec<String>, Box<dyn Error>> {
    let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/grafana/lockkit.json"))?;
    let board: serde_json::Value = serde_json::from_str(&text)?;
    let panels = board["panels"].as_array().ok_or("panels")?;
    let targets = panels.iter().filter_map(|panel| panel["targets"].as_array()).flatten();
    Ok(targets.filter_map(|target| target["expr"].as_str()).map(str::to_owned).collect())
}

/// The expressions of the rules in the page, each with the lines that belong to it.
fn alerts() -> Result<Vec<String>, Box<dyn Error>> {
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/running-in-production.md"))?;
    let rules = page.split("- alert:").skip(1).map(|rule| {
        let expr = rule.split("expr:").nth(1).unwrap_or_default();
        expr.split("labels:").next().unwrap_or_default().replace('\n', " ")
    });
    Ok(rules.collect())
}

/// The metrics that an expression names, with the labels that it selects or sums by.
fn named(expr: &str) -> Vec<(String, BTreeSet<String>)> {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let sums = expr.split(" by (").skip(1).filter_map(|rest| rest.split_once(')'));
    let summed: BTreeSet<String> =
        sums.flat_map(|(labels, _)| labels.split(',')).map(|label| label.trim().to_owned()).collect();
    let mut found = Vec::new();
    for (at, _) in expr.match_indices("lockkit_") {
        let rest = &expr[at..];
        let (name, rest) = rest.split_at(rest.find(|c| !is_word(c)).unwrap_or(rest.len()));
        let selected = rest.strip_prefix('{').and_then(|rest| rest.split_once('}')).map_or("", |(labels, _)| labels);
        let selected = selected.split(',').filter_map(|label| label.split(['=', '!']).next());
        let selected = selected.map(str::trim).filter(|label| !label.is_empty()).map(str::to_owned);
        found.push((name.to_owned(), selected.chain(summed.iter().cloned()).collect()));
    }
    found
}
