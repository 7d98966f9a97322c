//! TLS, with a provider of our own choice: which others are compiled in must not matter.

use std::{fmt, io, path::Path, sync::Arc};

use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::{
    TlsConnector,
    client::TlsStream,
    rustls::{
        ClientConfig, RootCertStore,
        crypto::aws_lc_rs,
        pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
    },
};

use crate::config::RedisConfig;

/// Puts TLS on a stream. The server's certificate must name the host.
pub(crate) async fn handshake<S: AsyncRead + AsyncWrite + Unpin>(
    config: &RedisConfig,
    host: &str,
    stream: S,
) -> io::Result<TlsStream<S>> {
    let name = ServerName::try_from(host.to_owned()).map_err(invalid)?;
    let client = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(invalid)?
        .with_root_certificates(roots(config)?);
    let client = match &*config.identity {
        None => client.with_no_client_auth(),
        Some((certificate, key)) => {
            let chain = certificates("cert", certificate)?;
            let key = PrivateKeyDer::from_pem_file(key).map_err(|e| unreadable("key", &e))?;
            client.with_client_auth_cert(chain, key).map_err(invalid)?
        }
    };
    TlsConnector::from(Arc::new(client)).connect(name, stream).await
}

/// Whom to trust: the authorities in the given file, or else the public ones.
fn roots(config: &RedisConfig) -> io::Result<RootCertStore> {
    let Some(path) = &*config.ca else {
        return Ok(RootCertStore::from_iter(webpki_roots::TLS_SERVER_ROOTS.iter().cloned()));
    };
    let mut roots = RootCertStore::empty();
    for certificate in certificates("ca", path)? {
        roots.add(certificate).map_err(|e| unreadable("ca", &e))?;
    }
    Ok(roots)
}

/// All certificates of a file, of which there must be one.
fn certificates(option: &str, path: &Path) -> io::Result<Vec<CertificateDer<'static>>> {
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    match read {
        Ok(certificates) if certificates.is_empty() => Err(unreadable(option, &"it has no certificate")),
        Ok(certificates) => Ok(certificates),
        Err(e) => Err(unreadable(option, &e)),
    }
}

/// What is wrong with a file, by the option that names it. Never what was given with the option, which may be a key itself, nor
/// what is in the file.
fn unreadable(option: &str, why: &dyn fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, format!("can't use the file that {option} names: {why}"))
}

fn invalid(error: impl std::error::Error + Send + Sync + 'static) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, error)
}
