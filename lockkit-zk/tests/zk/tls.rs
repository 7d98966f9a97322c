//! TLS, with an authority made for the occasion.

use std::fs;

use lockkit_core::{Effect, ErrorKind, Fence, LockStore, Severity, fenced::FencedResource};
use lockkit_testkit::servers::Authority;
use lockkit_zk::{ZkConfig, ZkStore, diagnose, fenced::ZkResource};
use zookeeper_client::{self as zk, Client, TlsOptions};

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

/// The URL for a client that waits until a busy server has refused it.
fn patient(server: &Server, authority: &Authority) -> String {
    url(server, authority, "&timeout=60s")
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
    let error = ZkStore::from_url(&patient(&server, &others)).await.expect_err("another's certificate");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, Effect::None), "{error}");
    assert!(error.to_string().contains("certificates"), "{error}");
    let error = ZkStore::from_url(&format!("zks://{}?ca=/no.crt", server.0.addr())).await.expect_err("no such file");
    assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error}");
}

fn identity(authority: &Authority, name: &str) -> String {
    authority.sign(name).expect("sign");
    let file = |kind: &str| authority.file(&format!("{name}.{kind}")).display().to_string();
    format!("&cert={}&key={}", file("crt"), file("key"))
}

/// A client that is not lockkit's, with a certificate of this name.
async fn raw(server: &Server, authority: &Authority, name: &str) -> Client {
    let read = |name: String| fs::read_to_string(authority.file(&name)).expect("a PEM file");
    let options = TlsOptions::new().with_pem_ca(&read("ca.crt".to_owned())).expect("authority");
    let options = options.with_pem_identity(&read(format!("{name}.crt")), &read(format!("{name}.key")));
    let connector = Client::connector().with_tls(options.expect("identity"));
    connector.secure_connect(&server.0.addr().to_string()).await.expect("raw client")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_certificate_is_an_identity_and_its_nodes_are_for_nobody_else() {
    let authority = Authority::new().expect("authority");
    let server = server(&authority, "need").await;
    let (shop, stranger) = (identity(&authority, "shop"), identity(&authority, "stranger"));
    let connect = async |more: &str| ZkStore::from_url(&url(&server, &authority, more)).await.expect("connect");
    let (mine, same, theirs) = (connect(&shop).await, connect(&shop).await, connect(&stranger).await);
    let held = claim("a");
    hold(&mine, &held).await;
    assert!(is_contended(&attempt(&same, &claim("a")).await.expect("ask")));
    let nodes = children(&raw(&server, &authority, "shop").await, "a").await;
    let node = format!("/lockkit/a/{}", nodes[0]);
    let other = raw(&server, &authority, "stranger").await;
    assert_eq!(other.delete(&node, None).await, Err(zk::Error::NoAuth), "the holder's node");
    assert_eq!(other.set_data(&node, b"", None).await.map(drop), Err(zk::Error::NoAuth), "the holder's node");
    assert_eq!(other.set_data("/lockkit/a", b"", None).await.map(drop), Err(zk::Error::NoAuth), "the lock's directory");
    let error = attempt(&theirs, &claim("a")).await.expect_err("denied");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Denied, Effect::None), "{error}");
    let error = theirs.release(&held).await.expect_err("denied");
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    free(&mine, &held).await;

    let fenced = async |more: &str| {
        let config = ZkConfig::from_url(&url(&server, &authority, more)).expect("url");
        ZkResource::connect(config, "/fenced").await.expect("connect")
    };
    fenced(&shop).await.write(Fence::new(1), b"value").await.expect("write").ok().expect("admitted");
    let error = fenced(&stranger).await.write(Fence::new(2), b"other").await.expect_err("denied");
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");

    // Who also logs in alike may have another certificate.
    let auth = "&auth=digest:fleet:secret&base=/fleet";
    let (one, two) = (connect(&format!("{shop}{auth}")).await, connect(&format!("{stranger}{auth}")).await);
    let held = claim("a");
    hold(&one, &held).await;
    assert!(is_contended(&attempt(&two, &claim("a")).await.expect("ask")));
    free(&one, &held).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_certificate_that_nobody_verifies_is_no_identity() {
    let authority = Authority::new().expect("authority");
    let server = server(&authority, "none").await;
    let shop = identity(&authority, "shop");
    let store = ZkStore::from_url(&url(&server, &authority, &shop)).await.expect("connect");
    let error = attempt(&store, &claim("a")).await.expect_err("whose would the nodes be?");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Denied, Effect::None), "{error}");
    assert!(error.to_string().contains("cert="), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_may_ask_for_the_clients_certificate() {
    let authority = Authority::new().expect("authority");
    let server = server(&authority, "need").await;
    let client = identity(&authority, "client");
    let store = ZkStore::from_url(&url(&server, &authority, &client)).await.expect("connect");
    let mine = claim("a");
    hold(&store, &mine).await;
    free(&store, &mine).await;
    let error = ZkStore::from_url(&patient(&server, &authority)).await.expect_err("without a certificate");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, Effect::None), "{error}");
}
