//! The web service, as a process, on a private server.

use std::{net::SocketAddr, process::Stdio};

use lockkit_testkit::servers::{MySqlOptions, MySqlServer};
use rustix::process::{Pid, Signal, kill_process};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, Lines},
    net::TcpStream,
    process::{Child, ChildStdout, Command},
};

use super::program;

/// A running service.
struct Service {
    child: Child,
    printed: Lines<BufReader<ChildStdout>>,
    address: SocketAddr,
}

impl Service {
    async fn start(database: &MySqlServer) -> Self {
        let mut command = Command::new(program("web_service"));
        command.args([&format!("{}?create=true", database.url()), "127.0.0.1:0"]);
        let mut child = command.stdout(Stdio::piped()).kill_on_drop(true).spawn().expect("it starts");
        let mut printed = BufReader::new(child.stdout.take().expect("piped")).lines();
        let line = printed.next_line().await.expect("text").expect("a line");
        let address = line.strip_prefix("listening on ").and_then(|address| address.parse().ok());
        Self { child, printed, address: address.unwrap_or_else(|| panic!("{line}")) }
    }

    /// Ends it as Ctrl-C does, and returns what it printed.
    async fn end(mut self) -> Vec<String> {
        let pid = self.child.id().and_then(|id| Pid::from_raw(id.cast_signed())).expect("it runs");
        kill_process(pid, Signal::INT).expect("it runs");
        let mut lines = Vec::new();
        while let Some(line) = self.printed.next_line().await.expect("text") {
            lines.push(line);
        }
        assert!(self.child.wait().await.expect("a status").success());
        lines
    }
}

/// Asks to pay an order: the status, and the text.
async fn pay(service: SocketAddr, order: u32) -> (String, String) {
    let mut stream = TcpStream::connect(service).await.expect("it listens");
    let request = format!("POST /orders/{order}/pay HTTP/1.1\r\nHost: shop\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.expect("an answer");
    let (head, text) = answer.split_once("\r\n\r\n").expect("a head and a text");
    let status = head.lines().next().and_then(|line| line.strip_prefix("HTTP/1.1 ")).expect("a status");
    (status.to_owned(), text.to_owned())
}

#[tokio::test]
async fn an_order_is_paid_once_and_not_by_a_former_holder() {
    let database = MySqlServer::start(MySqlOptions::default()).await.expect("a database");
    let service = Service::start(&database).await;

    let requests: Vec<_> = (0..5).map(|_| tokio::spawn(pay(service.address, 7))).collect();
    let mut texts = Vec::new();
    for request in requests {
        let (status, text) = request.await.expect("no panic");
        assert_eq!(status, "200 OK", "{text}");
        texts.push(text);
    }
    texts.sort();
    let (paid, before) = ("order 7 is paid\n", "order 7 was paid before\n");
    assert_eq!(texts, [paid, before, before, before, before]);

    // A newer holder was there.
    let newer = "INSERT INTO fenced_resource (resource_name, fence) VALUES ('order/8', 18000000000000000000)";
    database.admin(newer).await.expect("the table is there");
    let (status, text) = pay(service.address, 8).await;
    assert_eq!((status.as_str(), text.as_str()), ("409 Conflict", "another host has taken over; ask again\n"));
    let rows = database.admin("SELECT id FROM paid_order").await.expect("the table is there");
    assert_eq!(rows, [[Some("7".to_owned())]]);

    assert_eq!(service.end().await, ["charging for order 7"]);
}
