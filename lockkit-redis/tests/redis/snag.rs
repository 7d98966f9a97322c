//! A proxy that holds up one request until the test lets it go on, when its client has long given it up.

use std::net::SocketAddr;

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::watch,
};

/// Forwards connections. The first request with the pattern stays behind, and its connection breaks for the client.
pub(crate) struct Snag {
    pub(crate) addr: SocketAddr,
    progress: watch::Sender<Progress>,
}

/// How far the request has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd)]
enum Progress {
    Expected,
    Caught,
    LetGo,
    Answered,
}

impl Snag {
    pub(crate) async fn start(upstream: SocketAddr, pattern: &'static str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
        let (addr, progress) = (listener.local_addr().expect("address"), watch::Sender::new(Progress::Expected));
        let shared = progress.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let server = TcpStream::connect(upstream).await.expect("server");
                tokio::spawn(forward(client, server, pattern, shared.clone()));
            }
        });
        Self { addr, progress }
    }

    /// Waits until the request has come.
    pub(crate) async fn caught(&self) {
        self.until(Progress::Caught).await;
    }

    /// Hands the request to the server, and waits for the answer.
    pub(crate) async fn let_go(&self) {
        self.progress.send_replace(Progress::LetGo);
        self.until(Progress::Answered).await;
    }

    async fn until(&self, progress: Progress) {
        self.progress.subscribe().wait_for(|now| *now >= progress).await.expect("the sender is here");
    }
}

async fn forward(mut client: TcpStream, mut server: TcpStream, pattern: &str, progress: watch::Sender<Progress>) {
    let (mut requests, mut replies) = (vec![0; 64 * 1024], vec![0; 64 * 1024]);
    loop {
        tokio::select! {
            Ok(length @ 1..) = client.read(&mut requests) => {
                let portion = &requests[..length];
                let is_it = portion.windows(pattern.len()).any(|part| part == pattern.as_bytes());
                if is_it && progress.send_if_modified(|now| *now == Progress::Expected && { *now = Progress::Caught; true }) {
                    drop(client);
                    progress.subscribe().wait_for(|now| *now == Progress::LetGo).await.expect("the sender is here");
                    server.write_all(portion).await.expect("write");
                    assert!(server.read(&mut replies).await.expect("read") > 0);
                    progress.send_replace(Progress::Answered);
                    return;
                }
                server.write_all(portion).await.expect("write");
            }
            Ok(length @ 1..) = server.read(&mut replies) => {
                if client.write_all(&replies[..length]).await.is_err() {
                    return;
                }
            }
            else => return,
        }
    }
}
