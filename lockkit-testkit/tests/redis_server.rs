//! Private Redis servers: started, asked, killed, frozen, and brought back.

use lockkit_testkit::servers::{Keep, Persistence, RedisFlavor, RedisOptions, RedisServer};
use std::{collections::HashSet, error::Error, time::Duration};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};

type Result<T = (), E = Box<dyn Error + Send + Sync>> = std::result::Result<T, E>;

async fn start(options: RedisOptions) -> Result<RedisServer> {
    Ok(RedisServer::start(options).await?)
}

/// A connection that the server has accepted; one that only the kernel knew of would be reset when the server ends.
async fn client(server: &RedisServer) -> Result<TcpStream> {
    let mut client = TcpStream::connect(server.addr()).await?;
    client.write_all(b"PING\r\n").await?;
    client.read_exact(&mut [0; "+PONG\r\n".len()]).await?;
    Ok(client)
}

#[tokio::test]
async fn a_server_answers_as_soon_as_it_is_started() -> Result {
    let server = start(RedisOptions::default()).await?;
    assert!(server.is_running());
    assert_eq!(server.url(), format!("redis://127.0.0.1:{}", server.port()));
    assert_eq!(server.command(&["PING"]).await?, "PONG");
    assert_eq!(server.command(&["SET", "key", "two\r\nlines"]).await?, "OK");
    assert_eq!(server.command(&["GET", "key"]).await?, "two\r\nlines");
    assert_eq!(server.command(&["GET", "nothing"]).await?, "(nil)");
    assert_eq!(server.command(&["DEL", "key"]).await?, "1");
    assert_eq!(server.command(&["EVAL", "return {1, {'a', false}, ''}", "0"]).await?, "1\na\n(nil)\n");
    let error = server.command(&["NONSENSE"]).await.expect_err("no such command").to_string();
    assert!(error.starts_with("NONSENSE: ERR unknown command"), "{error}");
    Ok(())
}

#[tokio::test]
async fn every_flavor_that_is_installed_starts() -> Result {
    let mut versions = HashSet::new();
    for flavor in [RedisFlavor::Installed, RedisFlavor::Newer, RedisFlavor::Valkey] {
        let found = match flavor.program().find() {
            Err(missing) if missing.is_missing() && flavor != RedisFlavor::Installed => {
                println!("skipped: {missing}");
                continue;
            }
            found => found?,
        };
        let server = start(RedisOptions::default().flavor(flavor)).await?;
        let info = server.command(&["INFO", "server"]).await?;
        assert!(info.contains(&format!("_version:{}\r\n", found.version)), "{found:?}, but {info}");
        assert!(info.contains(&format!("process_id:{}\r\n", server.pid().expect("it runs"))), "{info}");
        assert!(versions.insert(found.version));
    }
    Ok(())
}

#[tokio::test]
async fn options_reach_the_server() -> Result {
    let options = RedisOptions::default().password("p@ss word").debug_command().args([
        "--maxmemory",
        "2mb",
        "--maxmemory-policy",
        "allkeys-lru",
    ]);
    let server = start(options).await?;
    assert_eq!(server.url(), format!("redis://:p%40ss%20word@127.0.0.1:{}", server.port()));
    assert_eq!(server.command(&["CONFIG", "GET", "maxmemory-policy"]).await?, "maxmemory-policy\nallkeys-lru");
    assert_eq!(server.command(&["DEBUG", "SLEEP", "0"]).await?, "OK");
    Ok(())
}

#[tokio::test]
async fn a_bad_option_is_an_error_with_the_servers_own_words() {
    let options = RedisOptions::default().args(["--no-such-option", "1"]);
    let error = RedisServer::start(options).await.expect_err("the option is unknown");
    assert!(!error.is_missing());
    let text = error.to_string();
    assert!(text.starts_with("Redis ended before it was ready; the end of its log:\n"), "{text}");
    assert!(text.contains("no-such-option"), "{text}");
}

#[tokio::test]
async fn a_port_that_is_taken_is_said_after_some_attempts() -> Result {
    let server = start(RedisOptions::default()).await?;
    let options = RedisOptions::default().args(["--port".to_owned(), server.port().to_string()]);
    let error = RedisServer::start(options).await.expect_err("the port is taken").to_string();
    assert!(error.contains("Address already in use"), "{error}");
    Ok(())
}

#[tokio::test]
async fn a_password_among_the_arguments_does_not_keep_the_server_from_being_ready() -> Result {
    let server = start(RedisOptions::default().args(["--requirepass", "secret"])).await?;
    let error = server.command(&["PING"]).await.expect_err("no password given").to_string();
    assert_eq!(error, "PING: NOAUTH Authentication required.");
    Ok(())
}

#[tokio::test]
async fn a_missing_program_is_an_error_of_its_own() {
    let options = RedisOptions::default().flavor(RedisFlavor::At("/nowhere/redis-server".into()));
    let error = RedisServer::start(options).await.expect_err("there is no such program");
    assert!(error.is_missing());
    assert_eq!(error.to_string(), "/nowhere/redis-server is not a program");
}

#[tokio::test]
async fn a_killed_server_is_gone_and_a_second_kill_does_nothing() -> Result {
    let server = start(RedisOptions::default()).await?;
    let mut client = client(&server).await?;
    server.kill().await?;
    assert_eq!((server.is_running(), server.pid()), (false, None));
    assert_eq!(client.read(&mut [0; 8]).await?, 0, "its connections are closed");
    assert!(TcpStream::connect(server.addr()).await.is_err(), "nobody listens any more");
    server.kill().await?;
    assert!(server.freeze().await.is_err() && server.thaw().is_err());
    Ok(())
}

#[tokio::test]
async fn a_server_that_ends_by_itself_is_not_running() -> Result {
    let server = start(RedisOptions::default()).await?;
    // It hangs up instead of answering, which is an error of the command.
    server.command(&["SHUTDOWN", "NOSAVE"]).await.expect_err("no reply");
    while server.is_running() {
        tokio::task::yield_now().await;
    }
    server.restart(Keep::Nothing).await?;
    assert_eq!(server.command(&["PING"]).await?, "PONG");
    Ok(())
}

#[tokio::test]
async fn a_restart_keeps_what_it_is_asked_to_keep() -> Result {
    for persistence in [Persistence::Append, Persistence::AppendAlways] {
        restart_and_look(persistence).await?;
    }
    Ok(())
}

async fn restart_and_look(persistence: Persistence) -> Result {
    let server = start(RedisOptions::default().persistence(persistence)).await?;
    let (port, pid) = (server.port(), server.pid());
    server.command(&["SET", "key", "value"]).await?;

    server.restart(Keep::Data).await?;
    assert_eq!(server.command(&["GET", "key"]).await?, "value");
    assert_eq!(server.port(), port);
    assert_ne!(server.pid(), pid);

    // A restart also follows a kill, and a frozen server can be restarted.
    server.kill().await?;
    server.restart(Keep::Data).await?;
    server.freeze().await?;
    server.restart(Keep::Data).await?;
    assert_eq!(server.command(&["GET", "key"]).await?, "value");

    server.restart(Keep::Nothing).await?;
    assert_eq!(server.command(&["GET", "key"]).await?, "(nil)");
    Ok(())
}

#[tokio::test]
async fn a_server_without_persistence_forgets() -> Result {
    let server = start(RedisOptions::default()).await?;
    server.command(&["SET", "key", "value"]).await?;
    server.restart(Keep::Data).await?;
    assert_eq!(server.command(&["GET", "key"]).await?, "(nil)");
    Ok(())
}

#[tokio::test]
async fn a_frozen_server_answers_only_when_it_is_thawed() -> Result {
    let server = start(RedisOptions::default()).await?;
    server.freeze().await?;
    assert!(server.is_running());
    let mut answer = Box::pin(server.command(&["PING"]));
    assert!(timeout(Duration::from_millis(100), &mut answer).await.is_err());
    server.thaw()?;
    assert_eq!(answer.await?, "PONG");
    Ok(())
}

#[tokio::test]
async fn a_kill_that_nobody_waits_for_is_still_carried_out() -> Result {
    let server = start(RedisOptions::default()).await?;
    let mut client = client(&server).await?;
    // One poll starts it; then the future is dropped.
    let _ = timeout(Duration::ZERO, server.kill()).await;
    assert_eq!(client.read(&mut [0; 8]).await?, 0);
    server.restart(Keep::Nothing).await?;
    assert_eq!(server.command(&["PING"]).await?, "PONG");
    Ok(())
}

#[tokio::test]
async fn two_restarts_at_once_come_one_after_the_other() -> Result {
    let server = start(RedisOptions::default().persistence(Persistence::AppendAlways)).await?;
    for _ in 0..5 {
        let both = tokio::join!(server.restart(Keep::Data), server.restart(Keep::Nothing));
        both.0?;
        both.1?;
        assert_eq!(server.command(&["PING"]).await?, "PONG");
    }
    Ok(())
}

#[tokio::test]
async fn many_servers_start_at_once() -> Result {
    let mut starting = tokio::task::JoinSet::new();
    for _ in 0..8 {
        starting.spawn(RedisServer::start(RedisOptions::default()));
    }
    let servers = starting.join_all().await.into_iter().collect::<Result<Vec<_>, _>>()?;
    let ports: HashSet<u16> = servers.iter().map(|server| server.port()).collect();
    assert_eq!(ports.len(), 8);
    Ok(())
}

#[test]
fn a_server_outlives_the_runtime_that_started_it() -> Result {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build();
    let server = runtime()?.block_on(start(RedisOptions::default()))?;
    runtime()?.block_on(async {
        server.freeze().await?;
        server.restart(Keep::Nothing).await?;
        assert_eq!(server.command(&["PING"]).await?, "PONG");
        Ok(())
    })
}
