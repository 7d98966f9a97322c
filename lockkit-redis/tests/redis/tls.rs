//! TLS, with an authority made for the occasion (by the program `openssl`).

use std::{path::Path, process::Command};

use lockkit_core::{Effect, ErrorKind};
use lockkit_redis::RedisStore;

use crate::support::*;

fn openssl(directory: &Path, arguments: &str) {
    let run = Command::new("openssl").args(arguments.split(' ')).current_dir(directory).output().expect("openssl");
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
}

#[tokio::test]
async fn only_a_trusted_server_is_talked_to() {
    let directory = std::env::temp_dir().join(format!("lockkit-redis-tls-{}", std::process::id()));
    std::fs::create_dir_all(&directory).expect("directory");
    openssl(&directory, "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=authority -keyout ca.key -out ca.crt");
    openssl(&directory, "req -newkey rsa:2048 -nodes -subj /CN=server -keyout server.key -out server.csr");
    std::fs::write(directory.join("names"), "subjectAltName=IP:127.0.0.1,DNS:localhost\n").expect("names");
    openssl(
        &directory,
        "x509 -req -days 2 -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -extfile names -out server.crt",
    );
    let file = |name: &str| directory.join(name).to_str().expect("path").to_owned();
    let (key, certificate, ca) = (file("server.key"), file("server.crt"), file("ca.crt"));
    let files = ["--tls-key-file", &key, "--tls-cert-file", &certificate, "--tls-ca-cert-file", &ca];
    let server = Server::start_with(&[&files[..], &["--tls-auth-clients", "no"]].concat()).await;
    // The server tells which port it can have; to ask the system for a free one would be out of date when it is used.
    let serves = |&port: &u16| {
        let set = redis::cmd("CONFIG").arg(&["SET", "tls-port", &port.to_string()]).query::<()>(&mut server.raw());
        set.is_ok()
    };
    let port = (server.port() + 1..).take(100).find(serves).expect("a port for TLS");
    for host in ["127.0.0.1", "localhost"] {
        let store = RedisStore::from_url(&format!("rediss://{host}:{port}?ca={ca}")).await.expect("connect");
        hold(&store, &claim(host)).await;
    }
    let refused = async |url: String| RedisStore::from_url(&url).await.expect_err("not trusted");
    let error = refused(format!("rediss://127.0.0.1:{port}")).await;
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Denied, Effect::None), "{error}");
    let error = refused(format!("rediss://127.0.0.1:{port}?ca={ca}.no")).await;
    assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
    std::fs::remove_dir_all(&directory).expect("clean up");
}
