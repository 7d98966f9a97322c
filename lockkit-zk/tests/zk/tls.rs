//! TLS, with an authority made for the occasion.

use lockkit_core::{Effect, ErrorKind, Severity};
use lockkit_testkit::servers::Authority;
use lockkit_zk::{ZkConfig, ZkStore, diagnose};

use crate::support::*;

/// One port for both: the probe of the test kit speaks plain text.
async fn server(authority: &Authority, clients: &str) -> Server {
    authority.sign("server").expect("sign");
    let file = |name: &str| authority.file(name).display().to_string();
    let properties = [
        "-Dzookeeper.serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory".to_owned(),
        "-Dzookeeper.client.portUnification=true".to_owned(),
        "-Dzookeeper.ssl.keyStore.type=PEM".to_owned(),
        format!("-Dzookeeper.ssl.keyStore.location={}", file("server.pem")),
        "-Dzookeeper.ssl.trustStore.type=PEM".to_owned(),
        format!("-Dzookeeper.ssl.trustStore.location={}", file("ca.crt")),
        format!("-Dzookeeper.ssl.clientAuth={clients}"),
        "-Dzookeeper.authProvider.x509=org.apache.zookeeper.server.auth.X509AuthenticationProvider".to_owned(),
    ];
    Server::start_with(&properties.each_ref().map(String::as_str)).await
}

fn url(server: &Server, authority: &Authority, more: &str) -> String {
    format!("zks://{}?ca={}{more}", server.0.addr(), authority.file("ca.crt").display())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_a_trusted_server_is_talked_to() {
    let (ours, others) = (Authority::new().expect("authority"), Authority::new().expect("authority"));
    let server = server(&ours, "none").await;
    let store = ZkStore::from_url(&url(&server, &ours, "")).await.expect("connect");
    let mine = claim("a");
    hold(&store, &mine).await;
    free(&store, &mine).await;
    // The word that servers are asked by is plain text; all else the doctor can do.
    let config = ZkConfig::from_url(&url(&server, &ours, "")).expect("url");
    let found = diagnose(&config).await.expect("it can be asked");
    let code = |severity, code| found.iter().any(|finding| (finding.severity, finding.code) == (severity, code));
    assert!(
        code(Severity::Note, "server") && code(Severity::Ok, "access") && code(Severity::Ok, "clock"),
        "{found:#?}"
    );
    // The driver does not say why no server would do.
    let error = ZkStore::from_url(&url(&server, &others, "")).await.expect_err("another's certificate");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, Effect::None), "{error}");
    assert!(error.to_string().contains("certificates"), "{error}");
    let error = ZkStore::from_url(&format!("zks://{}?ca=/no.crt", server.0.addr())).await.expect_err("no such file");
    assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_may_ask_for_the_clients_certificate() {
    let authority = Authority::new().expect("authority");
    let server = server(&authority, "need").await;
    authority.sign("client").expect("sign");
    let file = |name: &str| authority.file(name).display().to_string();
    let identity = format!("&cert={}&key={}", file("client.crt"), file("client.key"));
    let store = ZkStore::from_url(&url(&server, &authority, &identity)).await.expect("connect");
    let mine = claim("a");
    hold(&store, &mine).await;
    free(&store, &mine).await;
    let error = ZkStore::from_url(&url(&server, &authority, "")).await.expect_err("without a certificate");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, Effect::None), "{error}");
}
