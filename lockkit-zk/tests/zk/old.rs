//! Servers that are older than lockkit needs them.

use std::net::SocketAddr;

use lockkit_core::{Effect, ErrorKind};
use lockkit_zk::{ZkConfig, ZkStore};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream, tcp},
};

use crate::support::*;

/// `getEphemerals`, which came with 3.6.
const GET_EPHEMERALS: [u8; 4] = 103_u32.to_be_bytes();
const UNIMPLEMENTED: i32 = -6;

/// Passes everything on but `getEphemerals`, which it answers as 3.5 answers what it does not know
/// (`UnimplementedRequestProcessor`): it says so, and hangs up.
async fn older(server: SocketAddr) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let Ok(server) = TcpStream::connect(server).await else { continue };
            tokio::spawn(relay(client, server));
        }
    });
    address
}

async fn relay(client: TcpStream, server: TcpStream) {
    let ((mut requests, mut to_client), (mut answers, to_server)) = (client.into_split(), server.into_split());
    let unknown = tokio::select! {
        _ = tokio::io::copy(&mut answers, &mut to_client) => None,
        unknown = pass_on(&mut requests, to_server) => unknown,
    };
    let Some(xid) = unknown else { return };
    let mut answer = 16_u32.to_be_bytes().to_vec();
    answer.extend(xid);
    answer.extend(0_i64.to_be_bytes());
    answer.extend(UNIMPLEMENTED.to_be_bytes());
    drop(to_client.write_all(&answer).await);
}

/// Passes requests on until there is one that is not known, or the client hangs up.
async fn pass_on(requests: &mut tcp::OwnedReadHalf, mut server: tcp::OwnedWriteHalf) -> Option<[u8; 4]> {
    for count in 0.. {
        let length = requests.read_u32().await.ok()?;
        let mut request = vec![0; usize::try_from(length).ok()?];
        requests.read_exact(&mut request).await.ok()?;
        // The first one is the client's greeting.
        if count > 0 && request.get(4..8)? == GET_EPHEMERALS {
            return request[..4].try_into().ok();
        }
        server.write_all(&[&length.to_be_bytes()[..], &request].concat()).await.ok()?;
    }
    None
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_older_server_is_refused_at_once_and_by_its_version() {
    let server = Server::start().await;
    let address = older(server.0.addr()).await;
    let error = ZkStore::connect(ZkConfig::new([address.to_string()])).await.expect_err("3.5 will not do");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Unsupported, Effect::None), "{error}");
    assert!(!error.is_retryable() && error.to_string().contains("3.6"), "{error}");
}
