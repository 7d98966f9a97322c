//! `lockkit run` in the foreground of a terminal, which util-linux's `script` provides.

use std::process::Command;

use crate::support::{Line, Redis, Terminal, code, lock};

#[test]
fn cmd_reads_from_the_terminal() {
    let (redis, line) = (Redis::start(), Line::new());
    let mut terminal =
        Terminal::start(&redis, &line, "$LOCKKIT run --key k -- sh -c 'echo ready; read x; echo got $x; exit 6'");
    terminal.await_text("ready");
    terminal.typed("abc\n");
    terminal.await_text("got abc");
    assert_eq!(terminal.end().0, 6);
}

#[test]
fn ctrl_c_reaches_cmd_once() {
    let (redis, line) = (Redis::start(), Line::new());
    // No `read`: a signal that comes in the moment before the shell blocks in it is trapped only when it returns.
    let script = "exec 3>$LINE; trap 'echo int >&3; sleep 0.1' INT; trap 'exit 9' USR1; echo up >&3; echo $$ >&3; while :; do sleep 0.02; done";
    let mut terminal = Terminal::start(
        &redis,
        &line,
        &format!("exec $LOCKKIT run --key k -- sh -c \"{}\"", script.replace('$', "\\$")),
    );
    assert_eq!(line.hear(), "up");
    let pid = line.hear();
    for _ in 0..3 {
        terminal.typed("\x03");
        assert_eq!(line.hear(), "int");
    }
    assert!(redis.is_held("k"));
    // Had there been more of them, they would be said before the end.
    assert!(Command::new("kill").args(["-USR1", &pid]).status().unwrap().success());
    assert_eq!(line.end().0, "");
    assert_eq!(terminal.end().0, 9);
    assert!(!redis.is_held("k"));
}

#[test]
fn ctrl_c_ends_a_loop_around_lockkit() {
    let (redis, line) = (Redis::start(), Line::new());
    let script = "bash -c 'for i in 1 2; do $LOCKKIT run --key k -- sh -c \"echo up >$LINE; exec sleep 60\"; done'";
    let mut terminal = Terminal::start(&redis, &line, script);
    assert_eq!(line.hear(), "up");
    // The shell has said so in the instant before it becomes `sleep`; either dies of it.
    terminal.typed("\x03");
    assert_eq!(terminal.end().0, 130);
    assert!(!redis.is_held("k"));
}

#[test]
fn a_loss_reaches_all_of_cmd_but_not_the_neighbours_in_the_group() {
    let (redis, line) = (Redis::start(), Line::new());
    let stubborn = "exec 3>$LINE; trap '' TERM; sh -c 'trap \\\"\\\" TERM; echo up >&3; while :; do sleep 0.01; done' & echo up >&3; while :; do sleep 0.01; done";
    let script = format!("$LOCKKIT run --key k --ttl 1s -- sh -c \"{}\"; echo code $?", stubborn.replace('$', "\\$"));
    let terminal = Terminal::start(&redis, &line, &script);
    assert_eq!((line.hear(), line.hear()), ("up".into(), "up".into()));
    redis.command(&["DEL", &lock("k")]);
    assert_eq!(line.end().0, "");
    let (code, screen) = terminal.end();
    // The shell that started lockkit lives on and says so.
    assert_eq!(code, 0);
    assert!(screen.contains("code 74"), "{screen}");
}

#[test]
fn a_pipe_to_what_reads_the_terminal_works() {
    let (redis, line) = (Redis::start(), Line::new());
    // As `less` does: what stands behind the pipe reads from the terminal, which it may only in the foreground.
    let script = "$LOCKKIT run --key k -- echo data | { read data; echo ready; read x </dev/tty; echo $data and $x; }";
    let mut terminal = Terminal::start(&redis, &line, script);
    terminal.await_text("ready");
    terminal.typed("keys\n");
    terminal.await_text("data and keys");
    assert_eq!(terminal.end().0, 0);
}

#[test]
fn the_token_is_asked_for() {
    let (redis, line) = (Redis::start(), Line::new());
    let running = line.start(redis.run("k", &["--ttl", "60s"], "exec 3>$LINE; echo up >&3; read x <$GO"));
    let token = redis.who("k")["holders"][0]["token"].as_str().unwrap().to_owned();

    let mut terminal = Terminal::start(&redis, &line, "$LOCKKIT break k");
    terminal.await_text("token to break: ");
    assert!(terminal.screen().contains(&token), "{}", terminal.screen());
    terminal.typed(&format!("{token}\n"));
    terminal.await_text("broke k");
    assert_eq!(terminal.end().0, 0);
    assert!(!redis.is_held("k"));

    let mut terminal = Terminal::start(&redis, &line, "$LOCKKIT break k");
    terminal.await_text("free");
    assert_eq!(terminal.end().0, 75);
    line.go();
    assert_eq!(code(&running.end()), 74);
}
