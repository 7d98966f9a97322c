//! Establishing a session.

use std::time::Duration;

use lockkit_core::Result;
#[cfg(feature = "tls")]
use lockkit_core::{Error, ErrorKind};
use tokio::{task::JoinSet, time::timeout};
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

/// Connects as the configuration says.
pub(crate) async fn connect(config: &ZkConfig) -> Result<Client> {
    let servers = config.addresses();
    let times = ADDRESSES.div_ceil(servers.len().max(1));
    connect_to(config, config.session, &vec![servers.join(","); times].join(",")).await
}

/// The shortest timeout that a server of the ensemble gives to a session that asks for `asked`. It takes a session on each
/// server, which is closed at once. One that can't be reached gives none.
pub(crate) async fn shortest_timeout(config: &ZkConfig, asked: Duration) -> Result<Duration, Failure> {
    let mut tries = JoinSet::new();
    for server in config.addresses() {
        let config = config.clone();
        tries.spawn(async move { Some(connect_to(&config, asked, &server).await.ok()?.session_timeout()) });
    }
    let (mut shortest, bound) = (None, config.timeout);
    let asking = async {
        while let Some(given) = tries.join_next().await {
            shortest = shortest.into_iter().chain(given.ok().flatten()).min();
        }
    };
    // What is known by then counts.
    let all_answered = timeout(bound, asking).await.is_ok();
    let none = || if all_answered { Failure::Driver(zk::Error::NoHosts) } else { Failure::TimedOut(bound) };
    shortest.ok_or_else(none)
}

async fn connect_to(config: &ZkConfig, session: Duration, servers: &str) -> Result<Client> {
    let mut connector = Client::connector()
        .with_session_timeout(session)
        .with_connection_timeout(config.timeout * 2)
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
