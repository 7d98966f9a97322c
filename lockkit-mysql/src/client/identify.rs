//! Another kind of server at the address of a MySQL server.
//!
//! A MySQL server speaks first. Redis waits for the client, so that both ends wait until the time is up. To say more than
//! that, a second connection finds out which kind of server it is.

use std::time::Duration;

use lockkit_core::{Error, ErrorKind};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::{sleep, timeout},
};

use crate::config::MySqlConfig;

/// A server that has sent no greeting for this long may not be a MySQL server.
const LONG: Duration = Duration::from_millis(500);

/// Returns when it is certain that the server is not a MySQL server; otherwise never.
pub(crate) async fn other_server(config: &MySqlConfig) -> Error {
    let pause = (config.timeout / 4).min(LONG);
    sleep(pause).await;
    match look(config, pause).await {
        Some(what) => {
            let message = format!("{what} answers there; check host, port and the scheme of the URL");
            Error::new(ErrorKind::Misconfigured, message)
        }
        None => std::future::pending().await,
    }
}

async fn look(config: &MySqlConfig, pause: Duration) -> Option<&'static str> {
    let mut stream = TcpStream::connect((config.host.as_str(), config.port)).await.ok()?;
    match timeout(pause, read(&mut stream)).await {
        Ok(said) => not_mysql(&said?),
        Err(_) => {
            // Redis answers this; others hang up, or say what they are.
            stream.write_all(b"PING\r\n").await.ok()?;
            not_mysql(&timeout(pause, read(&mut stream)).await.ok()??)
        }
    }
}

/// The first bytes; `None` if the other side hangs up.
async fn read(stream: &mut TcpStream) -> Option<[u8; 5]> {
    let mut said = [0; 5];
    stream.read_exact(&mut said).await.ok()?;
    Some(said)
}

/// The kind of server that sends these bytes, if it is not a MySQL server.
fn not_mysql(said: &[u8; 5]) -> Option<&'static str> {
    match said {
        // The first packet, which has the version of the protocol or an error.
        [_, _, _, 0, 10 | 0xff] => None,
        [b'+' | b'-', ..] => Some("a Redis server"),
        b"HTTP/" => Some("a web server"),
        _ => Some("something that is no MySQL server"),
    }
}
