//! Every mode of the fault proxy, before a real Redis server.

use lockkit_testkit::{
    faults::{Direction::*, Framing, Proxy, Slip},
    servers::{RedisOptions, RedisServer},
};
use std::{
    error::Error,
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{TcpListener, TcpStream},
    time::timeout,
};

type Result<T = (), E = Box<dyn Error + Send + Sync>> = std::result::Result<T, E>;

/// Long enough to notice what must not happen; what must happen is awaited without a limit of its own.
const SHORT: Duration = Duration::from_millis(100);

/// A client that speaks the line-by-line form of the Redis protocol.
struct Client(BufReader<TcpStream>);

impl Client {
    async fn connect(proxy: &Proxy) -> Result<Self> {
        Ok(Self(BufReader::new(TcpStream::connect(proxy.addr()).await?)))
    }

    async fn send(&mut self, line: &str) -> Result {
        Ok(self.0.write_all(format!("{line}\r\n").as_bytes()).await?)
    }

    /// The next line of a reply; an error if the connection was reset, `None` if it was closed politely.
    async fn reply(&mut self) -> Result<Option<String>, std::io::Error> {
        let mut line = String::new();
        Ok((self.0.read_line(&mut line).await? > 0).then(|| line.trim_end().to_owned()))
    }

    async fn ask(&mut self, line: &str) -> Result<String> {
        self.send(line).await?;
        Ok(self.reply().await?.ok_or("the connection was closed")?)
    }

    /// Whether the client gets to see anything soon: a reply, or the end of the connection.
    async fn sees_something(&mut self) -> bool {
        timeout(SHORT, self.0.fill_buf()).await.is_ok()
    }

    async fn is_reset(&mut self) -> bool {
        self.reply().await.is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionReset)
    }
}

async fn redis() -> Result<(RedisServer, Proxy)> {
    let server = RedisServer::start(RedisOptions::default()).await?;
    let proxy = Proxy::start(server.addr()).await?;
    Ok((server, proxy))
}

/// Waits until the proxy has that many connections.
async fn connections(proxy: &Proxy, count: usize) {
    while proxy.connections() != count {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn everything_passes_at_first() -> Result {
    let (server, proxy) = redis().await?;
    let mut client = Client::connect(&proxy).await?;
    assert_eq!(client.ask("SET key value").await?, "+OK");
    assert_eq!(server.command(&["GET", "key"]).await?, "value");
    // More than fits into any buffer on the way.
    let large = "x".repeat(8 << 20);
    server.command(&["SET", "large", &large]).await?;
    assert_eq!(client.ask("GET large").await?, format!("${}", large.len()));
    assert_eq!(client.reply().await?.as_deref(), Some(&*large));
    assert_eq!(proxy.connections(), 1);
    // A polite end on one side is a polite end on the other.
    assert_eq!(client.ask("QUIT").await?, "+OK");
    assert_eq!(client.reply().await?, None);
    drop(client);
    connections(&proxy, 0).await;
    Ok(())
}

#[tokio::test]
async fn requests_and_replies_flow_at_the_same_time() -> Result {
    let (_server, proxy) = redis().await?;
    let mut client = TcpStream::connect(proxy.addr()).await?;
    let (mut read, mut write) = client.split();
    // Each request is as large as its reply, so neither side may have to wait until the other has taken everything.
    let value = "x".repeat(1 << 20);
    let echo = format!("${}\r\n{value}\r\n", value.len());
    let requests = format!("*2\r\n$4\r\nECHO\r\n{echo}").repeat(20);
    let mut replies = vec![0; 20 * echo.len()];
    let (sent, received) = tokio::join!(write.write_all(requests.as_bytes()), read.read_exact(&mut replies));
    sent?;
    received?;
    assert!(replies == echo.repeat(20).as_bytes());
    Ok(())
}

#[tokio::test]
async fn cut_resets_open_connections_and_welcomes_new_ones() -> Result {
    let (server, proxy) = redis().await?;
    let (mut one, mut other) = (Client::connect(&proxy).await?, Client::connect(&proxy).await?);
    one.ask("PING").await?;
    other.ask("PING").await?;
    assert_eq!(proxy.connections(), 2);
    proxy.cut().await;
    assert_eq!(proxy.connections(), 0);
    assert!(one.is_reset().await && other.is_reset().await);
    assert_eq!(Client::connect(&proxy).await?.ask("PING").await?, "+PONG");
    // Also on the server's side: what is left are the connection just dropped, perhaps, and the asking one.
    let clients = server.command(&["CLIENT", "LIST"]).await?;
    assert!(clients.lines().count() <= 2, "{clients}");
    Ok(())
}

#[tokio::test]
async fn cut_reaches_connections_that_are_held() -> Result {
    let (_server, proxy) = redis().await?;
    let mut client = Client::connect(&proxy).await?;
    client.ask("PING").await?;
    proxy.blackhole();
    client.send("PING").await?;
    proxy.cut().await;
    assert!(client.is_reset().await);
    Ok(())
}

#[tokio::test]
async fn refuse_turns_away_new_connections_only() -> Result {
    let (_server, proxy) = redis().await?;
    let mut old = Client::connect(&proxy).await?;
    assert_eq!(old.ask("PING").await?, "+PONG");
    proxy.refuse(true);
    let mut new = Client::connect(&proxy).await?;
    assert!(new.is_reset().await);
    assert_eq!(old.ask("PING").await?, "+PONG");
    proxy.refuse(false);
    assert_eq!(Client::connect(&proxy).await?.ask("PING").await?, "+PONG");
    Ok(())
}

#[tokio::test]
async fn held_requests_have_no_effect_until_they_are_released() -> Result {
    let (server, proxy) = redis().await?;
    let mut client = Client::connect(&proxy).await?;
    client.ask("PING").await?;
    proxy.hold(ToServer);
    client.send("SET key value").await?;
    assert!(!client.sees_something().await);
    assert_eq!(server.command(&["GET", "key"]).await?, "(nil)");
    proxy.release(ToServer);
    assert_eq!(client.reply().await?.as_deref(), Some("+OK"));
    assert_eq!(server.command(&["GET", "key"]).await?, "value");
    Ok(())
}

#[tokio::test]
async fn held_replies_come_late_though_the_effect_happened() -> Result {
    let (server, proxy) = redis().await?;
    let mut client = Client::connect(&proxy).await?;
    client.ask("PING").await?;
    proxy.hold(ToClient);
    client.send("SET key value").await?;
    while server.command(&["GET", "key"]).await? != "value" {}
    assert!(!client.sees_something().await);
    proxy.release(ToClient);
    assert_eq!(client.reply().await?.as_deref(), Some("+OK"));
    Ok(())
}

#[tokio::test]
async fn through_a_black_hole_nobody_hears_the_other_hang_up() -> Result {
    let (server, proxy) = redis().await?;
    let mut client = Client::connect(&proxy).await?;
    client.ask("PING").await?;
    proxy.blackhole();
    client.send("PING").await?;
    server.kill().await?;
    let mut new = Client::connect(&proxy).await?;
    new.send("PING").await?;
    assert!(!client.sees_something().await && !new.sees_something().await);
    assert_eq!(proxy.connections(), 2);
    proxy.heal();
    assert!(!matches!(client.reply().await, Ok(Some(_))));
    assert!(new.is_reset().await);
    Ok(())
}

#[tokio::test]
async fn a_reply_can_be_held_in_its_middle() -> Result {
    let (server, proxy) = redis().await?;
    let mut client = Client::connect(&proxy).await?;
    server.command(&["SET", "key", "value"]).await?;
    proxy.hold_replies_after("$5\r\nval".len());
    client.send("GET key").await?;
    proxy.held().await;
    assert_eq!(client.reply().await?.as_deref(), Some("$5"));
    let mut part = [0; 3];
    client.0.read_exact(&mut part).await?;
    assert!(&part == b"val" && !client.sees_something().await);
    proxy.release(ToClient);
    assert_eq!(client.reply().await?.as_deref(), Some("ue"));
    assert_eq!(client.ask("GET key").await?, "$5");
    Ok(())
}

#[tokio::test]
async fn a_black_hole_that_heals_delivers_what_it_held() -> Result {
    let (_server, proxy) = redis().await?;
    proxy.blackhole();
    let mut client = Client::connect(&proxy).await?;
    client.send("PING").await?;
    client.send("ECHO second").await?;
    assert!(!client.sees_something().await);
    proxy.heal();
    assert_eq!(client.reply().await?.as_deref(), Some("+PONG"));
    assert_eq!(client.reply().await?.as_deref(), Some("$6"));
    Ok(())
}

#[tokio::test]
async fn a_delay_applies_to_each_piece_once() -> Result {
    let (_server, proxy) = redis().await?;
    let mut client = Client::connect(&proxy).await?;
    client.ask("PING").await?;
    for direction in [ToServer, ToClient] {
        proxy.delay(direction, SHORT);
        let start = Instant::now();
        for _ in 0..20 {
            client.send("PING").await?;
            // So that each is a piece of its own.
            tokio::task::yield_now().await;
        }
        for _ in 0..20 {
            assert_eq!(client.reply().await?.as_deref(), Some("+PONG"));
            assert!(start.elapsed() >= SHORT);
        }
        assert!(start.elapsed() < 10 * SHORT, "the delays have added up");
        proxy.heal();
    }
    Ok(())
}

#[tokio::test]
async fn a_delay_below_a_millisecond_is_kept() -> Result {
    let (_server, proxy) = redis().await?;
    let mut client = Client::connect(&proxy).await?;
    for micros in [200, 1200] {
        let delay = Duration::from_micros(micros);
        proxy.delay(ToClient, delay);
        let mut trips = Vec::new();
        for _ in 0..100 {
            let start = Instant::now();
            client.ask("PING").await?;
            trips.push(start.elapsed());
        }
        trips.sort();
        assert!(trips[0] >= delay, "{:?} at {delay:?}", trips[0]);
        // The best of them, whatever else the machine does.
        assert!(trips[0] < delay + Duration::from_micros(600), "{:?} at {delay:?}", trips[0]);
    }
    Ok(())
}

#[tokio::test]
async fn a_delay_ends_when_it_is_taken_back() -> Result {
    let (_server, proxy) = redis().await?;
    let mut client = Client::connect(&proxy).await?;
    proxy.delay(ToServer, Duration::from_secs(3600));
    client.send("PING").await?;
    assert!(!client.sees_something().await);
    proxy.heal();
    assert_eq!(client.reply().await?.as_deref(), Some("+PONG"));
    Ok(())
}

#[tokio::test]
async fn the_reply_is_lost_and_the_effect_is_there() -> Result {
    let (server, proxy) = redis().await?;
    let (mut client, mut bystander) = (Client::connect(&proxy).await?, Client::connect(&proxy).await?);
    proxy.drop_reply_after("token-1", 2);
    assert_eq!(client.ask("SET one token-1").await?, "+OK");
    client.send("SET two token-1").await?;
    assert!(client.is_reset().await);
    proxy.dropped().await;
    assert_eq!(server.command(&["GET", "two"]).await?, "token-1");
    // It happens once, and to one connection.
    assert_eq!(bystander.ask("SET three token-1").await?, "+OK");
    assert_eq!(Client::connect(&proxy).await?.ask("GET two").await?, "$7");
    Ok(())
}

#[tokio::test]
async fn the_reply_is_lost_in_the_midst_of_others() -> Result {
    let (server, proxy) = redis().await?;
    for round in 0..50 {
        let mut client = Client::connect(&proxy).await?;
        proxy.drop_reply_after(format!("token-{round}"), 1);
        for _ in 0..20 {
            client.send("INCR counter").await?;
        }
        client.send(&format!("SET key token-{round}")).await?;
        while let Ok(Some(reply)) = client.reply().await {
            assert_ne!(reply, "+OK");
        }
        proxy.dropped().await;
        assert_eq!(server.command(&["GET", "key"]).await?, format!("token-{round}"));
    }
    Ok(())
}

#[tokio::test]
async fn a_server_reads_the_request_even_if_the_reply_before_comes_first() -> Result {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let proxy = Proxy::start(listener.local_addr()?).await?;
    proxy.drop_reply_after("second", 1);
    let mut client = Client::connect(&proxy).await?;
    client.send("first").await?;
    let mut server = listener.accept().await?.0;
    server.read_exact(&mut [0; "first\r\n".len()]).await?;
    client.send("second").await?;
    server.peek(&mut [0]).await?;
    server.write_all(b"reply to the first\r\n").await?;
    // Time for a proxy that takes this for the reply to the second to break the connection, and the request with it.
    tokio::time::sleep(SHORT).await;
    let mut request = String::new();
    server.read_to_string(&mut request).await?;
    assert_eq!(request, "second\r\n");
    drop(server);
    assert!(client.is_reset().await);
    proxy.dropped().await;
    Ok(())
}

#[tokio::test]
async fn a_request_that_is_never_answered_does_not_count_as_a_lost_reply() -> Result {
    // A server that hangs up on its first client, and answers the second.
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let proxy = Proxy::start(listener.local_addr()?).await?;
    proxy.drop_reply_after("", 1);
    for answers in [false, true] {
        let mut client = Client::connect(&proxy).await?;
        client.send("hello").await?;
        let mut server = BufReader::new(listener.accept().await?.0);
        server.read_line(&mut String::new()).await?;
        assert!(timeout(SHORT, proxy.dropped()).await.is_err());
        if answers {
            server.write_all(b"hello\r\n").await?;
        }
        drop(server);
        assert!(client.is_reset().await);
    }
    proxy.dropped().await;
    Ok(())
}

#[tokio::test]
async fn a_healed_proxy_drops_no_reply() -> Result {
    let (_server, proxy) = redis().await?;
    let mut client = Client::connect(&proxy).await?;
    proxy.drop_reply_after("PING", 1);
    proxy.heal();
    assert_eq!(client.ask("PING").await?, "+PONG");
    assert!(timeout(SHORT, proxy.dropped()).await.is_err());
    Ok(())
}

#[tokio::test]
async fn a_server_that_is_down_resets_clients() -> Result {
    let (server, proxy) = redis().await?;
    server.kill().await?;
    assert!(Client::connect(&proxy).await?.is_reset().await);
    Ok(())
}

#[tokio::test]
async fn a_dropped_proxy_leaves_nothing_behind() -> Result {
    let (_server, proxy) = redis().await?;
    let addr = proxy.addr();
    let mut client = Client::connect(&proxy).await?;
    client.ask("PING").await?;
    proxy.blackhole();
    drop(proxy);
    assert!(client.is_reset().await);
    // The listening task ends when the runtime gets to it.
    while TcpStream::connect(addr).await.is_ok() {}
    Ok(())
}

#[tokio::test]
async fn one_whole_answer_is_lost_or_comes_twice() -> Result {
    let server = RedisServer::start(RedisOptions::default()).await?;
    let proxy = Proxy::start(server.addr()).await?.framing(Framing::Redis);
    let mut client = Client::connect(&proxy).await?;
    assert_eq!(client.ask("SET key value").await?, "+OK");

    proxy.slip(Slip::Lost, 2);
    assert_eq!(client.ask("PING 1").await?, "$1");
    assert_eq!(client.reply().await?.as_deref(), Some("1"));
    assert!(!proxy.slipped());
    client.send("MGET key nothing").await?;
    assert!(!client.sees_something().await);
    assert!(proxy.slipped());
    assert_eq!(client.ask("SET key other").await?, "+OK");

    proxy.slip(Slip::Twice, 1);
    assert_eq!(client.ask("DEL key").await?, ":1");
    assert!(!client.sees_something().await);
    assert_eq!(client.ask("SET key third").await?, ":1");
    assert_eq!(client.reply().await?.as_deref(), Some("+OK"));

    proxy.slip(Slip::Lost, 1);
    proxy.heal();
    assert_eq!(client.ask("DEL key").await?, ":1");
    Ok(())
}
