//! Passwords that are kept elsewhere.

use lockkit_core::{Effect, ErrorKind};
use lockkit_redis::RedisStore;

use crate::support::*;

#[tokio::test]
async fn a_password_file_is_read_at_each_connect() {
    let server = Server::start_with(&["--requirepass", "first-secret"]).await;
    let file = std::env::temp_dir().join(format!("lockkit-redis-password-{}", std::process::id()));
    std::fs::write(&file, "first-secret\n").expect("write");
    let url = format!("redis://127.0.0.1:{}?password_file={}", server.port(), file.display());
    let store = RedisStore::from_url(&url).await.expect("connect");
    hold(&store, &claim("a")).await;
    // The password changes on the server, then in the file. Connections that are logged in stay.
    let mut connection = redis::Client::open(format!("redis://:first-secret@127.0.0.1:{}", server.port()))
        .and_then(|client| client.get_connection())
        .expect("raw connection");
    raw::<()>(&mut connection, "CONFIG SET requirepass second-secret");
    hold(&store, &claim("b")).await;
    let cut = |connection: &mut redis::Connection| raw::<i32>(connection, "CLIENT KILL TYPE normal SKIPME yes");
    assert_eq!(cut(&mut connection), 1);
    let error = until_error(&store).await;
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Denied, Effect::None), "{error}");
    assert!(!format!("{error} {error:?} {store:?}").contains("secret"));
    std::fs::write(&file, "second-secret").expect("write");
    hold(&store, &claim("c")).await;
    std::fs::remove_file(&file).expect("remove");
    hold(&store, &claim("d")).await;
    assert_eq!(cut(&mut connection), 1);
    let error = until_error(&store).await;
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Misconfigured, Effect::None), "{error}");
    assert!(error.message().contains("password_file") && error.to_string().lines().count() == 1, "{error}");
}

/// The connection was cut; the operation that finds out may have been sent, the next one was not.
async fn until_error(store: &RedisStore) -> lockkit_core::Error {
    loop {
        match attempt(store, &claim("x")).await {
            Err(e) if e.kind() != ErrorKind::Unavailable => return e,
            answer => drop(answer),
        }
        tokio::time::sleep(std::time::Duration::from_millis(2)).await;
    }
}

#[tokio::test]
async fn a_user_may_have_a_password_from_the_environment() {
    // A variable that is there wherever a program is run, and whose value will do as a password.
    let (variable, value) = ("PATH", std::env::var("PATH").expect("PATH"));
    let server = Server::start().await;
    let words = ["SETUSER", "app", "on", &format!(">{value}"), "~*", "&*", "+@all"];
    redis::cmd("ACL").arg(&words).query::<()>(&mut server.raw()).expect("user");
    let url = format!("redis://app@127.0.0.1:{}?password_env={variable}", server.port());
    let store = RedisStore::from_url(&url).await.expect("connect");
    hold(&store, &claim("a")).await;
    assert!(raw::<String>(&mut server.raw(), "CLIENT LIST").contains("user=app"));
    let error = RedisStore::from_url(&url.replace(variable, "LOCKKIT_NO_SUCH_VARIABLE")).await.expect_err("not set");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Misconfigured, Effect::None), "{error}");
    assert!(error.message().contains("password_env"), "{error}");
}
