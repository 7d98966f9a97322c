//! A sentinel that says what the test wants: which server is the primary, and that another has become it.

use std::net::SocketAddr;

use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::{TcpListener, TcpStream, tcp::OwnedWriteHalf},
    sync::watch,
};

/// Answers what a store asks of sentinels, on any number of connections.
pub(crate) struct Herald {
    pub(crate) addr: SocketAddr,
    primary: watch::Sender<SocketAddr>,
}

impl Herald {
    /// What the primary is called.
    pub(crate) const PRIMARY: &str = "stock";

    pub(crate) async fn start(primary: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
        let (addr, primary) = (listener.local_addr().expect("address"), watch::Sender::new(primary));
        let shared = primary.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(serve(client, shared.subscribe()));
            }
        });
        Self { addr, primary }
    }

    /// Tells all clients that another server has become the primary, and names that one from now on.
    pub(crate) fn announce(&self, primary: SocketAddr) {
        self.primary.send_replace(primary);
    }
}

/// No word of a question is also one of its arguments, so a look at each line is enough.
async fn serve(client: TcpStream, mut primary: watch::Receiver<SocketAddr>) {
    let (reader, mut writer) = client.into_split();
    let mut lines = BufReader::new(reader).lines();
    let mut used = *primary.borrow_and_update();
    loop {
        tokio::select! {
            line = lines.next_line() => match line {
                Ok(Some(line)) => say(&mut writer, &answer(&line, used)).await,
                Ok(None) | Err(_) => return,
            },
            Ok(()) = primary.changed() => {
                let former = std::mem::replace(&mut used, *primary.borrow_and_update());
                let news = [Herald::PRIMARY.to_owned(), words(former), words(used)].join(" ");
                say(&mut writer, &format!(">3\r\n{}{}{}", bulk("message"), bulk("+switch-master"), bulk(&news))).await;
            }
        }
    }
}

fn answer(line: &str, primary: SocketAddr) -> String {
    match line {
        "HELLO" => format!("%1\r\n{}:3\r\n", bulk("proto")),
        "CLIENT" => "+OK\r\n".to_owned(),
        "SUBSCRIBE" => format!(">3\r\n{}{}:1\r\n", bulk("subscribe"), bulk("+switch-master")),
        "MASTER" => format!("%1\r\n{}{}", bulk("config-epoch"), bulk("1")),
        "GET-MASTER-ADDR-BY-NAME" => {
            format!("*2\r\n{}{}", bulk(&primary.ip().to_string()), bulk(&primary.port().to_string()))
        }
        _ => String::new(),
    }
}

fn words(address: SocketAddr) -> String {
    format!("{} {}", address.ip(), address.port())
}

fn bulk(text: &str) -> String {
    format!("${}\r\n{text}\r\n", text.len())
}

/// A client that is gone is seen by the next read.
async fn say(writer: &mut OwnedWriteHalf, text: &str) {
    _ = writer.write_all(text.as_bytes()).await;
}
