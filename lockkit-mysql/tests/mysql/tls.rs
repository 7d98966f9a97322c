//! TLS, with an authority made for the occasion.

use std::sync::Arc;

use lockkit_core::{Effect, ErrorKind};
use lockkit_mysql::{MySqlStore, Tls};
use lockkit_testkit::servers::Authority;

use sqlx::Executor as _;

use crate::support::*;

tests! {
    only_a_trusted_server_is_talked_to
}

async fn only_a_trusted_server_is_talked_to(ctx: Arc<Ctx>) {
    let (ours, others) = (Authority::new().expect("authority"), Authority::new().expect("authority"));
    ours.sign("server").expect("sign");
    let option = |name: &str, file: &str| format!("--{name}={}", ours.file(file).display());
    let files = [option("ssl-ca", "ca.crt"), option("ssl-cert", "server.crt"), option("ssl-key", "server.key")];
    let server = ctx.private(&[&files[0], &files[1], &files[2]]).await;
    // Not from the start: the test kit's probe speaks plain text.
    let mut administrator = raw(&server).await;
    administrator.execute("SET GLOBAL require_secure_transport = ON").await.expect("set");
    let config = |tls, authority: &Authority| config(&server).tls(tls).ca(authority.file("ca.crt"));
    for config in [config(Tls::Verify, &ours), crate::support::config(&server).tls(Tls::Encrypt)] {
        let store = MySqlStore::connect(config).await.expect("connect");
        let mine = claim();
        hold(&store, &mine).await;
        free(&store, &mine).await;
    }
    for (config, what) in [
        (config(Tls::Verify, &others), "another's certificate"),
        (crate::support::config(&server).tls(Tls::Verify), "none of the web's"),
        (crate::support::config(&server), "the server demands it"),
    ] {
        let error = MySqlStore::connect(config).await.expect_err(what);
        assert_eq!((error.kind(), error.effect()), (ErrorKind::Denied, Effect::None), "{what}: {error}");
    }
    let missing = config(Tls::Verify, &ours).ca(ours.file("no.crt"));
    let error = MySqlStore::connect(missing).await.expect_err("no such file");
    assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error}");
    let error = error.to_string();
    assert!(error.contains("that ca names") && !error.contains('\n'), "{error}");
}
