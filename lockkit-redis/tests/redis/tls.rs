//! TLS, with an authority made for the occasion (by the program `openssl`).

use lockkit_core::{Effect, ErrorKind};
use lockkit_redis::RedisStore;
use lockkit_testkit::servers::Authority;

use crate::support::*;

fn authority() -> Authority {
    let authority = Authority::new().expect("an authority");
    ["server", "client"].iter().for_each(|name| authority.sign(name).expect("sign"));
    authority
}

fn file(authority: &Authority, name: &str) -> String {
    authority.file(name).to_str().expect("path").to_owned()
}

/// A server with its port for TLS.
async fn server(authority: &Authority, ask_clients: &str) -> (Server, u16) {
    let [key, certificate, ca] = ["server.key", "server.crt", "ca.crt"].map(|name| file(authority, name));
    let files = ["--tls-key-file", &key, "--tls-cert-file", &certificate, "--tls-ca-cert-file", &ca];
    let server = Server::start_with(&[&files[..], &["--tls-auth-clients", ask_clients]].concat()).await;
    // The server tells which port it can have; to ask the system for a free one would be out of date when it is used.
    let serves = |&port: &u16| {
        let set = redis::cmd("CONFIG").arg(&["SET", "tls-port", &port.to_string()]).query::<()>(&mut server.raw());
        set.is_ok()
    };
    let port = (server.port() + 1..).take(100).find(serves).expect("a port for TLS");
    (server, port)
}

#[tokio::test]
async fn only_a_trusted_server_is_talked_to() {
    let authority = authority();
    let (_server, port) = server(&authority, "no").await;
    let ca = file(&authority, "ca.crt");
    for host in ["127.0.0.1", "localhost"] {
        let store = RedisStore::from_url(&format!("rediss://{host}:{port}?ca={ca}")).await.expect("connect");
        hold(&store, &claim(host)).await;
    }
    let error = refused(format!("rediss://127.0.0.1:{port}")).await;
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Denied, Effect::None), "{error}");
    let error = refused(format!("rediss://127.0.0.1:{port}?ca={ca}.no")).await;
    assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
    assert!(error.message().contains("ca.crt.no"), "{error}");
}

#[tokio::test]
async fn a_client_proves_who_it_is() {
    let (authority, stranger) = (authority(), authority());
    let (_server, port) = server(&authority, "yes").await;
    let url = format!("rediss://127.0.0.1:{port}?ca={}", file(&authority, "ca.crt"));
    let (certificate, key) = (file(&authority, "client.crt"), file(&authority, "client.key"));
    let store = RedisStore::from_url(&format!("{url}&cert={certificate}&key={key}")).await.expect("connect");
    hold(&store, &claim("a")).await;
    let error = refused(url.clone()).await;
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Denied, Effect::None), "no certificate: {error}");
    assert_eq!(error.to_string().lines().count(), 1);
    let (theirs, their_key) = (file(&stranger, "client.crt"), file(&stranger, "client.key"));
    let error = refused(format!("{url}&cert={theirs}&key={their_key}")).await;
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Denied, Effect::None), "of another authority: {error}");
    // Mistakes in the files are named by the file.
    for (cert, key, hint) in
        [(&certificate, &certificate, "client.crt"), (&key, &key, "client.key"), (&certificate, &their_key, "key")]
    {
        let error = refused(format!("{url}&cert={cert}&key={key}")).await;
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
        assert!(error.message().to_lowercase().contains(hint), "{error}");
        assert!(!format!("{error:?}").contains("PRIVATE KEY"));
    }
}

async fn refused(url: String) -> lockkit_core::Error {
    RedisStore::from_url(&url).await.expect_err("refused")
}
