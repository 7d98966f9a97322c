//! Establishing a session.

use std::time::Duration;

use lockkit_core::Result;
#[cfg(feature = "tls")]
use lockkit_core::{Error, ErrorKind};
use tokio::{
    task::JoinSet,
    time::{Instant, timeout_at},
};
use zookeeper_client::{self as zk, Client};

use crate::{
    client::driver::understood,
    config::ZkConfig,
    wire::error::{self, Failure, Sent},
};

/// How many addresses the driver is given at least. It tries them one after the other, all of them at once in the beginning,
/// and doubles its pause after each round: with few addresses it soon sleeps as long as the servers have been away, which
/// may be longer than leases last. So each address is given to it several times.
const ADDRESSES: usize = 20;

/// Which part of a session may be spent on a server that does not answer. Leases last for little more than half of a session then,
/// and the driver tries addresses at random: of three servers it takes a silent one four times in a row for one client in 170.
const PATIENCE: u32 = 10;

/// A connection is not given up sooner, however short the session is: a busy server takes a moment now and then.
const LEAST_SILENCE: Duration = Duration::from_secs(1);

/// Connects as the configuration says.
pub(crate) async fn connect(config: &ZkConfig) -> Result<Client> {
    let servers = config.addresses();
    let times = ADDRESSES.div_ceil(servers.len().max(1));
    connect_to(config, config.session, &vec![servers.join(","); times].join(",")).await
}

/// The shortest timeout that a server of the ensemble gives to a session that asks for `asked`. It takes a session on each
/// server, which is closed at once. One that can't be reached gives none. Nor does one that is slow, when another has answered:
/// until this is known nothing proves that the session lives, and its leases lapse.
pub(crate) async fn shortest_timeout(config: &ZkConfig, asked: Duration) -> Result<Duration, Failure> {
    let mut tries = JoinSet::new();
    for server in config.addresses() {
        let config = config.clone();
        tries.spawn(async move { Some(connect_to(&config, asked, &server).await.ok()?.session_timeout()) });
    }
    let (start, bound) = (Instant::now(), config.timeout);
    let mut shortest = None;
    loop {
        // What is known by then counts.
        let patience = if shortest.is_some() { bound.min(asked / PATIENCE) } else { bound };
        match timeout_at(start + patience, tries.join_next()).await {
            Ok(Some(given)) => shortest = shortest.into_iter().chain(given.ok().flatten()).min(),
            Ok(None) => return shortest.ok_or(Failure::Driver(zk::Error::NoHosts)),
            Err(_) => return shortest.ok_or(Failure::TimedOut(bound)),
        }
    }
}

/// For how long a connection may bring nothing. A server that is silent for longer than requests are waited for serves nobody.
fn silence(config: &ZkConfig, session: Duration) -> Duration {
    // Those who wait for less than that for their requests may have slow servers all the same.
    let least = LEAST_SILENCE.min(config.timeout * 2);
    config.timeout.min(session / PATIENCE).max(least)
}

async fn connect_to(config: &ZkConfig, session: Duration, servers: &str) -> Result<Client> {
    let mut connector = Client::connector()
        .with_session_timeout(session)
        .with_connection_timeout(silence(config, session))
        // The core tries again, and knows for how long.
        .with_fail_eagerly();
    if let Some((scheme, credentials)) = &*config.auth {
        connector = connector.with_auth(scheme, credentials);
    }
    #[cfg(feature = "tls")]
    if let Some(tls) = &*config.tls {
        let connector = connector.with_tls(tls_options(tls)?);
        let client = understood(connector.secure_connect(servers)).await;
        return client.map_err(|e| match e {
            zk::Error::NoHosts => {
                let message = "no server takes a connection over TLS with these certificates";
                Error::new(ErrorKind::Unavailable, message).with_source(e)
            }
            e => error::map(&Failure::Driver(e), Sent::ReadOnly),
        });
    }
    understood(connector.connect(servers)).await.map_err(|e| error::map(&Failure::Driver(e), Sent::ReadOnly))
}

#[cfg(feature = "tls")]
fn tls_options(tls: &crate::config::Tls) -> Result<zookeeper_client::TlsOptions> {
    // What was given is not repeated: it may be a key itself.
    let read = |option: &str, path: &std::path::Path| {
        let message = |e: &std::io::Error| format!("can't read the file that {option} names: {e}");
        std::fs::read_to_string(path).map_err(|e| Error::new(ErrorKind::Misconfigured, message(&e)).with_source(e))
    };
    let wrong = |e: zk::Error| Error::new(ErrorKind::Misconfigured, "the PEM files are not usable").with_source(e);
    let mut options = zk::TlsOptions::new().with_pem_ca(&read("ca", &tls.ca)?).map_err(wrong)?;
    if let Some((cert, key)) = &tls.identity {
        options = options.with_pem_identity(&read("cert", cert)?, &read("key", key)?).map_err(wrong)?;
    }
    Ok(options)
}

#[cfg(test)]
mod tests {
    use lockkit_testkit::faults::Proxy;

    use super::*;
    use crate::testing::server;

    const SESSION: Duration = Duration::from_secs(10);

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn one_server_that_does_not_answer_holds_up_the_others_for_a_tenth_of_the_session() {
        let server = server().await;
        let silent = Proxy::start(server.addr()).await.expect("proxy");
        silent.blackhole();
        let config = ZkConfig::new([server.addr().to_string(), silent.addr().to_string()]);
        let asked = Instant::now();
        let given = shortest_timeout(&config, SESSION).await.expect("one answers");
        assert_eq!(given, SESSION);
        assert!(asked.elapsed() < SESSION / 10 + Duration::from_millis(500), "it took {:?}", asked.elapsed());
        let config = ZkConfig::new([silent.addr().to_string()]);
        shortest_timeout(&config, SESSION).await.expect_err("none answers");
    }

    #[test]
    fn a_connection_is_given_up_when_requests_are_or_long_before_the_session_ends() {
        let limit = |timeout: f64, session: u64| {
            let config = ZkConfig::new(["a"]).timeout(Duration::from_secs_f64(timeout));
            silence(&config, Duration::from_secs(session)).as_secs_f64()
        };
        assert_eq!((limit(2.0, 20), limit(2.0, 60), limit(5.0, 20)), (2.0, 2.0, 2.0));
        assert_eq!((limit(2.0, 15), limit(2.0, 4), limit(0.5, 20)), (1.5, 1.0, 1.0));
        assert_eq!(limit(0.25, 20), 0.5);
    }
}
