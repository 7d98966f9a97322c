//! No server outlives its test, however the test ends.

use lockkit_testkit::{
    faults::process,
    servers::{RedisOptions, RedisServer},
};
use std::{
    env,
    error::Error,
    io::{BufRead, BufReader},
    net::{Ipv4Addr, TcpListener},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

type Result<T = (), E = Box<dyn Error + Send + Sync>> = std::result::Result<T, E>;

/// In the environment of the child: what to do with its server before it waits to be killed.
const ROLE: &str = "LOCKKIT_TEST_GUARDIAN_ROLE";

#[tokio::test]
async fn a_dropped_server_is_gone_with_its_directory() -> Result {
    let server = RedisServer::start(RedisOptions::default()).await?;
    let (pid, port) = (server.pid().expect("it runs"), server.port());
    let dir = dir_of(&server).await?;
    assert!(process::is_alive(pid) && dir.exists());
    server.freeze().await?;
    drop(server);
    assert!(!process::is_alive(pid) && !dir.exists());
    TcpListener::bind((Ipv4Addr::LOCALHOST, port))?;
    Ok(())
}

#[test]
fn a_server_is_gone_when_its_test_panics() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let (send, receive) = std::sync::mpsc::channel();
    let test = std::thread::spawn(move || {
        runtime.block_on(async {
            let server = RedisServer::start(RedisOptions::default()).await.expect("a server");
            send.send(server.pid().expect("it runs")).expect("the receiver waits");
            panic!("as a failing test does");
        });
    });
    test.join().expect_err("it panics");
    assert!(!process::is_alive(receive.recv().expect("the process number")));
}

#[test]
fn a_server_is_gone_when_its_test_is_killed() -> Result {
    killed_test_leaves_nothing("running")
}

#[test]
fn a_frozen_server_is_gone_when_its_test_is_killed() -> Result {
    killed_test_leaves_nothing("frozen")
}

#[test]
fn a_server_that_was_killed_before_leaves_no_directory_either() -> Result {
    killed_test_leaves_nothing("killed")
}

/// Not a test by itself: the process that the tests above start, and kill. Without its role it does nothing.
#[tokio::test]
async fn child_that_is_killed() -> Result {
    let Ok(role) = env::var(ROLE) else { return Ok(()) };
    let server = RedisServer::start(RedisOptions::default()).await?;
    let dir = dir_of(&server).await?;
    println!("server {} {}", server.pid().expect("it runs"), dir.display());
    match role.as_str() {
        "frozen" => server.freeze().await?,
        "killed" => server.kill().await?,
        _ => {}
    }
    println!("ready");
    std::future::pending().await
}

fn killed_test_leaves_nothing(role: &str) -> Result {
    let mut child = Command::new(env::current_exe()?)
        .args(["--exact", "child_that_is_killed", "--nocapture"])
        .env(ROLE, role)
        .stdout(Stdio::piped())
        .spawn()?;
    let (mut pid, mut dir) = (0, PathBuf::new());
    for line in BufReader::new(child.stdout.take().expect("piped")).lines() {
        let line = line?;
        // The test harness may print the name of the test on the same line.
        if let Some((_, server)) = line.split_once("server ") {
            let (number, path) = server.split_once(' ').ok_or("no directory")?;
            (pid, dir) = (number.parse()?, path.into());
        } else if line == "ready" {
            break;
        }
    }
    assert!(dir.exists(), "the child did not start a server");
    assert_eq!(process::is_alive(pid), role != "killed");
    child.kill()?; // It is SIGKILL: nothing in the child runs any more, no Drop and no panic handler.
    child.wait()?;
    let deadline = Instant::now() + Duration::from_secs(10);
    while process::is_alive(pid) || dir.exists() {
        assert!(Instant::now() < deadline, "server {pid} or {} is still there", dir.display());
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// The server's own directory, which holds its data directory.
async fn dir_of(server: &RedisServer) -> Result<PathBuf> {
    let data = server.command(&["CONFIG", "GET", "dir"]).await?;
    let data = Path::new(data.lines().nth(1).ok_or("no directory")?);
    Ok(data.parent().ok_or("no parent")?.to_owned())
}
