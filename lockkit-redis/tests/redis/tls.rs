//! TLS, with an authority made for the occasion (by the program `openssl`).

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use lockkit_core::{Effect, ErrorKind};
use lockkit_redis::RedisStore;

use crate::support::*;

fn openssl(directory: &Path, arguments: &str) {
    let run = Command::new("openssl").args(arguments.split(' ')).current_dir(directory).output().expect("openssl");
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
}

/// An authority, and what it signed, in a directory of its own.
struct Authority(PathBuf);

impl Authority {
    fn new(name: &str) -> Self {
        let directory = std::env::temp_dir().join(format!("lockkit-redis-tls-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&directory).expect("directory");
        openssl(&directory, "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=authority -keyout ca.key -out ca.crt");
        Self(directory)
    }

    /// Makes `<name>.key` and `<name>.crt` for somebody who is reached at this machine.
    fn sign(&self, name: &str) {
        let directory = &self.0;
        openssl(directory, &format!("req -newkey rsa:2048 -nodes -subj /CN={name} -keyout {name}.key -out {name}.csr"));
        std::fs::write(directory.join("names"), "subjectAltName=IP:127.0.0.1,DNS:localhost\n").expect("names");
        openssl(
            directory,
            &format!(
                "x509 -req -days 2 -in {name}.csr -CA ca.crt -CAkey ca.key -CAcreateserial -extfile names -out {name}.crt"
            ),
        );
    }

    fn file(&self, name: &str) -> String {
        self.0.join(name).to_str().expect("path").to_owned()
    }

    /// A server with its port for TLS.
    async fn server(&self, ask_clients: &str) -> (Server, u16) {
        self.sign("server");
        let (key, certificate, ca) = (self.file("server.key"), self.file("server.crt"), self.file("ca.crt"));
        let files = ["--tls-key-file", &key, "--tls-cert-file", &certificate, "--tls-ca-cert-file", &ca];
        let server = Server::start_with(&[&files[..], &["--tls-auth-clients", ask_clients]].concat()).await;
        // The server tells which port it can have; to ask the system for a free one would be out of date when it is
        // used.
        let serves = |&port: &u16| {
            let set = redis::cmd("CONFIG").arg(&["SET", "tls-port", &port.to_string()]).query::<()>(&mut server.raw());
            set.is_ok()
        };
        let port = (server.port() + 1..).take(100).find(serves).expect("a port for TLS");
        (server, port)
    }
}

impl Drop for Authority {
    fn drop(&mut self) {
        _ = std::fs::remove_dir_all(&self.0);
    }
}

#[tokio::test]
async fn only_a_trusted_server_is_talked_to() {
    let authority = Authority::new("server");
    let (_server, port) = authority.server("no").await;
    let ca = authority.file("ca.crt");
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
    let authority = Authority::new("client");
    let (_server, port) = authority.server("yes").await;
    authority.sign("client");
    let url = format!("rediss://127.0.0.1:{port}?ca={}", authority.file("ca.crt"));
    let (certificate, key) = (authority.file("client.crt"), authority.file("client.key"));
    let store = RedisStore::from_url(&format!("{url}&cert={certificate}&key={key}")).await.expect("connect");
    hold(&store, &claim("a")).await;
    let error = refused(url.clone()).await;
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Denied, Effect::None), "no certificate: {error}");
    assert_eq!(error.to_string().lines().count(), 1);
    let stranger = Authority::new("stranger");
    stranger.sign("client");
    let (theirs, their_key) = (stranger.file("client.crt"), stranger.file("client.key"));
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
