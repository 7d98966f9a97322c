//! Establishing a session.

use lockkit_core::Result;
#[cfg(feature = "tls")]
use lockkit_core::{Error, ErrorKind};
use zookeeper_client::Client;

use crate::{
    config::ZkConfig,
    error::{self, Failure, Sent},
};

/// How many addresses the driver is given at least. It tries them one after the other, all of them at once in the beginning,
/// and doubles its pause after each round: with few addresses it soon sleeps as long as the servers have been away, which
/// may be longer than leases last. So each address is given to it several times.
const ADDRESSES: usize = 20;

/// Connects as the configuration says.
pub(crate) async fn connect(config: &ZkConfig) -> Result<Client> {
    let mut connector = Client::connector()
        .with_session_timeout(config.session)
        .with_connection_timeout(config.timeout * 2)
        // The core tries again, and knows for how long.
        .with_fail_eagerly();
    if let Some((scheme, credentials)) = &config.auth {
        connector = connector.with_auth(scheme, credentials);
    }
    let servers = config.addresses();
    let times = ADDRESSES.div_ceil(servers.len().max(1));
    let servers = vec![servers.join(","); times].join(",");
    #[cfg(feature = "tls")]
    if let Some(tls) = &config.tls {
        let connector = connector.with_tls(tls_options(tls)?);
        let client = connector.secure_connect(&servers).await;
        return client.map_err(|e| match e {
            zookeeper_client::Error::NoHosts => {
                let message = "no server takes a connection over TLS with these certificates";
                Error::new(ErrorKind::Unavailable, message).with_source(e)
            }
            e => error::map(&Failure::Driver(e), Sent::ReadOnly),
        });
    }
    connector.connect(&servers).await.map_err(|e| error::map(&Failure::Driver(e), Sent::ReadOnly))
}

#[cfg(feature = "tls")]
fn tls_options(tls: &crate::config::Tls) -> Result<zookeeper_client::TlsOptions> {
    use zookeeper_client as zk;

    let read = |path: &std::path::Path| {
        let wrong = |e| Error::new(ErrorKind::InvalidInput, format!("can't read {}", path.display())).with_source(e);
        std::fs::read_to_string(path).map_err(wrong)
    };
    let wrong = |e: zk::Error| Error::new(ErrorKind::InvalidInput, "the PEM files are not usable").with_source(e);
    let mut options = zk::TlsOptions::new().with_pem_ca(&read(&tls.ca)?).map_err(wrong)?;
    if let Some((cert, key)) = &tls.identity {
        options = options.with_pem_identity(&read(cert)?, &read(key)?).map_err(wrong)?;
    }
    Ok(options)
}
