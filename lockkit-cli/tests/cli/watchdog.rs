//! `lockkit __watch` by itself: when it kills, and what.

use std::{
    io::Write,
    os::unix::process::CommandExt,
    process::{ChildStdin, Command, Stdio},
    time::Duration,
};

use crate::support::{Line, Running, lockkit};
use lockkit::{Clock, Moment, SystemClock};

/// A watchdog without a run, and something that carries its mark.
struct Watched {
    orders: ChildStdin,
    watchdog: Running,
    line: Line,
    work: Running,
}

fn watched(mark: &str) -> Watched {
    let line = Line::new();
    let mut work = Command::new("sh");
    work.args(["-c", "exec 3>$LINE; echo up >&3; exec sleep 600"]).env("LOCKKIT_RUNS", mark);
    let work = line.start(work);
    let much_later = (SystemClock.now() + Duration::from_secs(600)).as_nanos().to_string();
    let mut watchdog = lockkit(&["__watch", mark, &much_later]);
    watchdog.stdin(Stdio::piped());
    let mut watchdog = Running::start(watchdog);
    let orders = watchdog.stdin();
    Watched { orders, watchdog, line, work }
}

impl Watched {
    fn allow(&mut self, until: Moment) {
        writeln!(self.orders, "until {}", until.as_nanos()).expect("the watchdog listens");
    }
}

#[test]
fn the_watchdog_believes_a_deadline_that_is_sooner_than_the_one_before() {
    let mut watched = watched("sooner-than-before");
    let start = SystemClock.now();
    watched.allow(start + Duration::from_secs(600));
    watched.allow(start + Duration::from_millis(300));
    watched.line.end();
    assert!(SystemClock.now().since(start) >= Duration::from_millis(300));
    assert_eq!(watched.watchdog.end().status.code(), Some(1));
    watched.work.end();
}

#[test]
fn a_watchdog_that_stood_still_hears_all_that_it_was_told_before_it_kills() {
    let mut watched = watched("stood-still");
    watched.allow(SystemClock.now() + Duration::from_secs(2));
    // It may still have to start. Should it take longer than that, this proves less.
    std::thread::sleep(Duration::from_millis(500));
    watched.watchdog.signal("STOP");
    // Past the deadline that it knows. That nothing happens can't be awaited.
    std::thread::sleep(Duration::from_millis(1600));
    watched.allow(SystemClock.now() + Duration::from_secs(600));
    watched.watchdog.signal("CONT");
    std::thread::sleep(Duration::from_millis(500));
    assert!(watched.work.is_running() && watched.watchdog.is_running());
    watched.watchdog.signal("STOP");
    watched.allow(SystemClock.now() + Duration::from_secs(601));
    watched.allow(SystemClock.now());
    watched.watchdog.signal("CONT");
    watched.line.end();
    assert_eq!(watched.watchdog.end().status.code(), Some(1));
    watched.work.end();
}

#[test]
fn the_watchdog_lets_a_stranger_live_that_has_got_the_number_of_cmd() {
    for is_stranger in [true, false] {
        let mut watched = watched(if is_stranger { "its-number" } else { "cmd-itself" });
        // It carries no mark: only its number can make it a target.
        let mut sleeper = Command::new("sleep");
        sleeper.arg("600").process_group(0);
        let mut other = Running::start(sleeper);
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", other.id())).unwrap();
        let started: u64 = stat.rsplit_once(") ").unwrap().1.split(' ').nth(19).unwrap().parse().unwrap();
        let then = started - u64::from(is_stranger);
        writeln!(watched.orders, "work {} true {then}", other.id()).unwrap();
        watched.allow(SystemClock.now());
        assert_eq!(watched.watchdog.end().status.code(), Some(1));
        watched.line.end();
        assert_eq!(other.is_running(), is_stranger);
        watched.work.end();
    }
}
