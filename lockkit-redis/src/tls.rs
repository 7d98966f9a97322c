//! TLS, with a provider of our own choice: which others are compiled in must not matter.

use std::{io, sync::Arc};

use tokio::net::TcpStream;
use tokio_rustls::{
    TlsConnector,
    client::TlsStream,
    rustls::{
        ClientConfig, RootCertStore,
        crypto::aws_lc_rs,
        pki_types::{CertificateDer, ServerName, pem::PemObject},
    },
};

use crate::config::RedisConfig;

/// Puts TLS on a stream. The server's certificate must name the host of the configuration.
pub(crate) async fn handshake(config: &RedisConfig, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
    let name = ServerName::try_from(config.host.clone()).map_err(invalid)?;
    let client = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(invalid)?
        .with_root_certificates(roots(config)?)
        .with_no_client_auth();
    TlsConnector::from(Arc::new(client)).connect(name, stream).await
}

/// Whom to trust: the authorities in the given file, or else the public ones.
fn roots(config: &RedisConfig) -> io::Result<RootCertStore> {
    let Some(path) = &config.ca else {
        return Ok(RootCertStore::from_iter(webpki_roots::TLS_SERVER_ROOTS.iter().cloned()));
    };
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(path).map_err(invalid)? {
        roots.add(certificate.map_err(invalid)?).map_err(invalid)?;
    }
    Ok(roots)
}

fn invalid(error: impl std::error::Error + Send + Sync + 'static) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, error)
}
