//! `lockkit top`: without a terminal, as lines of JSON, and live in a terminal, which util-linux's `script` provides.

use std::{
    io::{BufRead, BufReader},
    path::Path,
    process::{Child, Command},
};

use crate::support::{Line, Redis, Running, Terminal, code, eventually, lock, lockkit, stdout};
use lockkit_testkit::servers::{MySqlOptions, MySqlServer, ZooKeeperFlavor, ZooKeeperServer};
use serde_json::{Value, json};

/// A run that holds a lock until the line says go.
fn hold(url: &str, key: &str, line: &Line) -> Running {
    let script = "exec 3>$LINE; echo up >&3; read x <$GO";
    let mut command =
        lockkit(&["run", "--key", key, "--ttl", "60s", "--holder", "the holder", "--", "sh", "-c", script]);
    command.env("LOCKKIT_STORE", url);
    line.start(command)
}

/// One table, and one line of JSON, of a store on which somebody holds the lock `a/1`.
fn shows_what_is_held(url: &str) {
    let line = Line::new();
    let running = hold(url, "a/1", &line);
    // Without a terminal it is the same.
    for args in [&["top", "--once"][..], &["top"], &["top", "a/"], &["top", "a/", "--sort", "left"]] {
        let output = lockkit(args).env("LOCKKIT_STORE", url).output().unwrap();
        assert_eq!(code(&output), 0, "{url} {output:?}");
        let text = stdout(&output);
        let row = text.lines().nth(1).unwrap_or_default();
        assert!(text.lines().count() == 2 && row.starts_with("a/1  the holder  exclusive  1 "), "{url} {text}");
    }
    let output = lockkit(&["top", "--json", "--once"]).env("LOCKKIT_STORE", url).output().unwrap();
    assert_eq!((code(&output), stdout(&output).lines().count()), (0, 1));
    let look: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!((&look["held"], &look["changes"], &look["changes_per_s"]), (&json!(1), &json!(0), &json!(null)));
    let lock = &look["locks"][0];
    assert_eq!((&lock["key"], &lock["held"], &lock["lapses"]), (&json!("a/1"), &json!(true), &json!(0)));
    assert!(lock["holders"][0]["fence"].as_u64().unwrap() > 0 && lock["holders"][0].get("token").is_none(), "{lock}");

    let output = lockkit(&["top", "b/"]).env("LOCKKIT_STORE", url).output().unwrap();
    assert_eq!((code(&output), stdout(&output).lines().count()), (0, 1));
    line.go();
    assert_eq!(code(&running.end()), 0);
}

#[test]
fn one_table_of_redis() {
    shows_what_is_held(&Redis::start().url());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_table_of_mysql() {
    let server = MySqlServer::start(MySqlOptions::default()).await.unwrap();
    let url = server.url();
    assert!(lockkit(&["init"]).env("LOCKKIT_STORE", &url).status().unwrap().success());
    tokio::task::spawn_blocking(move || shows_what_is_held(&url)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_table_of_zookeeper() {
    let server = ZooKeeperServer::start(ZooKeeperFlavor::Installed).await.unwrap();
    let url = server.url();
    tokio::task::spawn_blocking(move || shows_what_is_held(&url)).await.unwrap();
}

/// The looks of a running `lockkit top --json`.
struct Looks {
    child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Looks {
    fn start(redis: &Redis) -> Self {
        let mut child = redis.lockkit(&["top", "--json", "--every", "100ms"]).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines }
    }

    /// The first look from now on that is so.
    #[track_caller]
    fn until(&mut self, is_so: impl Fn(&Value) -> bool) -> Value {
        let looks = self.lines.by_ref().map(|line| serde_json::from_str::<Value>(&line.unwrap()).unwrap());
        looks.take(300).find(is_so).expect("a look that is so")
    }

    fn signal(&mut self, signal: &str) -> Option<i32> {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args([&format!("-{signal}"), &pid]).status().unwrap().success());
        self.child.wait().unwrap().code()
    }
}

impl Drop for Looks {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn each_look_is_a_line() {
    let redis = Redis::start();
    let mut looks = Looks::start(&redis);
    looks.until(|look| look["held"] == json!(0));
    for changes in 1..=2 {
        let line = Line::new();
        let running = hold(&redis.url(), "k", &line);
        let look = looks.until(|look| look["held"] == json!(1));
        let lock = &look["locks"][0];
        assert_eq!((&look["changes"], &lock["changes"]), (&json!(changes), &json!(changes)));
        assert!(lock["changes_per_s"].as_f64().unwrap() > 0.0, "{look}");
        line.go();
        assert_eq!(code(&running.end()), 0);
        let look = looks.until(|look| look["held"] == json!(0));
        // It is shown a while longer.
        assert_eq!((&look["locks"][0]["key"], &look["locks"][0]["held"]), (&json!("k"), &json!(false)));
    }
    assert_eq!(looks.until(|_| true)["lapses"], json!(0));
    assert_eq!(looks.signal("TERM"), Some(143));
}

#[test]
fn a_lease_that_runs_out_is_seen() {
    let redis = Redis::start();
    let mut looks = Looks::start(&redis);
    // A client takes a lock, and does not renew it. What is left is late at once, so that any look before the end sees it late.
    redis.command(&["SET", &lock("k"), "plain", "PX", "60000"]);
    looks.until(|look| look["held"] == json!(1));
    redis.command(&["PEXPIRE", &lock("k"), "3000"]);
    let look = looks.until(|look| look["lapses"] == json!(1));
    assert_eq!((&look["locks"][0]["lapses"], &look["held"]), (&json!(1), &json!(0)));
}

#[test]
fn a_store_that_is_away_ends_no_lines() {
    let redis = Redis::start();
    let line = Line::new();
    let running = hold(&redis.url(), "k", &line);
    let mut looks = Looks::start(&redis);
    looks.until(|look| look["held"] == json!(1));
    redis.freeze();
    let look = looks.until(|look| !look["error"].is_null());
    assert!(look["error"].as_str().unwrap().contains("timed out") && look.get("held").is_none(), "{look}");
    redis.thaw();
    looks.until(|look| look["held"] == json!(1));
    line.go();
    assert_eq!(code(&running.end()), 0);
}

/// A shell's command line that runs it in a terminal of this size, says what it ended with, and whether the terminal is as it was.
fn in_terminal(columns: u16) -> String {
    let before = format!("stty rows 24 cols {columns}; was=$(stty -g)");
    let after = "echo ended with $?; test \"$was\" = \"$(stty -g)\" && echo same modes";
    format!("{before}; sh -c 'echo $$ >$LINE; exec $LOCKKIT top --every 200ms'; {after}")
}

/// The terminal is as it was: its modes, its screen, its cursor.
#[track_caller]
fn is_given_back(terminal: Terminal, code: u8) {
    let (_, screen) = terminal.end();
    assert!(screen.contains(&format!("ended with {code}")) && screen.contains("same modes"), "{screen:?}");
    let last = |what: &str| screen.rfind(what).unwrap_or_else(|| panic!("no {what:?} in {screen:?}"));
    assert!(last("\x1b[?1049l") > last("\x1b[?1049h") && last("\x1b[?25h") > last("\x1b[?25l"), "{screen:?}");
}

#[test]
fn a_live_view_follows_keys_and_sizes() {
    let (redis, line, tty) = (Redis::start(), Line::new(), Line::new());
    let running = hold(&redis.url(), "order/1", &line);
    // Beside it, something that changes the size when it is told to.
    let script = "tty=$(tty); (read x <$GO; stty -F $tty cols 120) & ".to_owned() + &in_terminal(80);
    let mut terminal = Terminal::start(&redis, &tty, &script);
    tty.hear();
    terminal.await_text("order/1");
    terminal.await_text("holder");
    // Only the cells that change are written, so that a word is whole on empty ground alone.
    terminal.typed("sss/nosuch\r");
    terminal.await_text("nothing");
    assert!(!terminal.screen().contains("FENCE"), "{:?}", terminal.screen());
    // There is room for more now, and all is drawn anew.
    tty.go();
    terminal.await_text("FENCE");
    terminal.await_text("nothing");
    for word in ["nosuch,", "lapses"] {
        assert!(terminal.screen().contains(word), "{word}: {:?}", terminal.screen());
    }
    terminal.typed("q");
    is_given_back(terminal, 0);
    line.go();
    assert_eq!(code(&running.end()), 0);
}

#[test]
fn every_way_out_gives_the_terminal_back() {
    let redis = Redis::start();
    for (key, signal, code) in [("\x03", "", 0), ("\x1b", "", 0), ("", "TERM", 143), ("", "HUP", 129), ("", "INT", 130)]
    {
        let line = Line::new();
        let mut terminal = Terminal::start(&redis, &line, &in_terminal(80));
        let pid = line.hear();
        terminal.await_text("quit");
        terminal.await_text("held");
        match signal {
            "" => terminal.typed(key),
            signal => {
                assert!(Command::new("kill").args([&format!("-{signal}"), &pid]).status().unwrap().success());
            }
        }
        is_given_back(terminal, code);
    }
}

/// Also where the signal that says so is ignored.
#[test]
fn a_terminal_that_is_gone_ends_the_view() {
    let (redis, line) = (Redis::start(), Line::new());
    let mut terminal = Terminal::start(&redis, &line, &("trap '' HUP; ".to_owned() + &in_terminal(80)));
    let pid = line.hear();
    terminal.await_text("held");
    drop(terminal);
    eventually("the end", || !Path::new("/proc").join(&pid).exists());
}

#[test]
fn a_store_that_is_away_freezes_no_key() {
    let (redis, line) = (Redis::start(), Line::new());
    let mut terminal = Terminal::start(&redis, &line, &in_terminal(120));
    line.hear();
    terminal.await_text("held");
    redis.freeze();
    terminal.await_text("AWAY");
    // In the middle of a question.
    terminal.typed("ss");
    terminal.await_text("left");
    redis.kill();
    terminal.await_text("unavailable");
    terminal.typed("q");
    is_given_back(terminal, 0);
}

#[test]
fn a_store_that_can_not_be_used_takes_no_terminal() {
    let (redis, line) = (Redis::start(), Line::new());
    let script = "echo up >$LINE; LOCKKIT_STORE=redis://127.0.0.1:1 $LOCKKIT top; echo ended with $?";
    let terminal = Terminal::start(&redis, &line, script);
    line.hear();
    let (_, screen) = terminal.end();
    assert!(screen.contains("unavailable") && screen.contains("ended with 69"), "{screen:?}");
    assert!(!screen.contains('\u{1b}'), "{screen:?}");
}

/// Keys can't be asked for there, and nobody looks at a screen.
#[test]
fn a_terminal_on_one_side_alone_is_none() {
    let (redis, line) = (Redis::start(), Line::new());
    for script in ["$LOCKKIT top </dev/null", "$LOCKKIT top | cat"] {
        let terminal = Terminal::start(&redis, &line, script);
        let (code, screen) = terminal.end();
        assert_eq!(code, 0);
        assert!(screen.contains("KEY") && !screen.contains('\u{1b}'), "{script}: {screen:?}");
    }
}
