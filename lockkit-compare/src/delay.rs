//! Acquisition and release over a network that takes longer and longer.

use std::{net::SocketAddr, time::Duration};

use lockkit_testkit::faults::{Direction, Proxy};

use crate::{
    error::{Error, Result},
    measure,
    plan::Plan,
    stats::Latencies,
    targets::Target,
};

/// Measures a store through proxies before its private servers, which add so much to each round trip. The time of the proxies themselves
/// is in it.
pub(crate) async fn pairs_by_delay(target: &Target, key: &str, plan: &Plan) -> Result<Vec<(Duration, Latencies)>> {
    let (url, proxies) = through_proxies(target).await?;
    let locker = lockkit::connect(&url).await?;
    let mut rounds = Vec::new();
    for delay in Plan::DELAYS {
        proxies.iter().for_each(|proxy| proxy.delay(Direction::ToClient, delay));
        let round = measure::pair(locker.lock(format!("{key}/delay")), plan.delay_slice(delay)).await?;
        rounds.push((delay, round.pair));
    }
    Ok(rounds)
}

/// A proxy before each private server of a store, and the store's URL with their addresses.
pub(crate) async fn through_proxies(target: &Target) -> Result<(String, Vec<Proxy>)> {
    let (mut url, mut proxies) = (target.url().to_owned(), Vec::new());
    for server in target.servers() {
        let proxy = Proxy::start(server.addr()).await.map_err(|error| Error::system("start a proxy", &error))?;
        url = readdressed(&url, server.addr(), proxy.addr())?;
        proxies.push(proxy);
    }
    Ok((url, proxies))
}

/// The URL with one address in place of another.
fn readdressed(url: &str, from: SocketAddr, to: SocketAddr) -> Result<String> {
    let from = from.to_string();
    // A port may begin as another does.
    let ends = |at: usize| !url[at + from.len()..].starts_with(|next: char| next.is_ascii_digit());
    let found = url.match_indices(&from).find(|(at, _)| ends(*at));
    let (at, _) = found.ok_or_else(|| Error::internal("the URL of a private server does not have its address"))?;
    Ok(format!("{}{to}{}", &url[..at], &url[at + from.len()..]))
}

#[cfg(test)]
mod tests {
    use lockkit_testkit::servers::{RedisOptions, RedisServer};

    use super::*;
    use crate::{
        plan::{Effort, Options},
        results::{Rounds, round_trips},
        targets::{PrivateServer, Targets},
    };

    #[tokio::test(flavor = "multi_thread")]
    async fn each_round_trip_takes_the_delay_longer() {
        let redis = RedisServer::start(RedisOptions::default()).await.expect("redis");
        let mut targets = Targets::default();
        targets.start("redis".to_owned(), redis.url(), vec![PrivateServer::forgetful(redis)]);
        let plan = Plan::new(Options::default().effort(Effort::Quick));
        let measured = pairs_by_delay(&targets.list()[0], "delayed", &plan).await.expect("grants");
        assert_eq!(measured.iter().map(|(delay, _)| *delay).collect::<Vec<_>>(), Plan::DELAYS);
        let mut by_delay = std::collections::BTreeMap::<_, Rounds>::new();
        for (delay, round) in measured {
            // One round trip to acquire, and one to release.
            assert!(round.micros(0.01) >= Some(2e6 * delay.as_secs_f64()), "{delay:?}: {:?}", round.micros(0.01));
            by_delay.entry(delay).or_default().add(round);
        }
        let [.., from, to] = Plan::DELAYS;
        // By the fastest: half of them may be slower on a machine that is busy with other tests.
        let least = |delay| by_delay[&delay].micros(0.01).expect("a round").value;
        let trips = (least(to) - least(from)) / (to - from).as_secs_f64() / 1e6;
        assert!((1.8..2.5).contains(&trips), "{trips}");
        assert!(round_trips(&by_delay, from, to).is_some());
    }

    #[test]
    fn an_address_is_found_whole() {
        let [short, long, new] = [412, 4123, 99].map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
        let url = "redlock://127.0.0.1:4123,127.0.0.1:412?delayed_restart=no";
        let changed = readdressed(url, short, new).expect("an address");
        assert_eq!(changed, "redlock://127.0.0.1:4123,127.0.0.1:99?delayed_restart=no");
        assert_eq!(readdressed("zk://127.0.0.1:4123", long, new).expect("an address"), "zk://127.0.0.1:99");
        assert!(readdressed("zk://elsewhere:4123", long, new).is_err());
    }
}
