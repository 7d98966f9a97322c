//! `lockkit race` as a user runs it.

use std::process::Output;

use crate::support::{complaint, lockkit};
use lockkit_testkit::servers::{RedisOptions, RedisServer};
use serde_json::Value;

fn race(args: &[&str], store: Option<&str>) -> Output {
    let mut command = lockkit(&[&["race"], args].concat());
    command.envs(store.map(|url| ("LOCKKIT_STORE", url))).output().expect("lockkit runs")
}

fn schemes(output: &Output) -> Vec<Value> {
    assert!(output.status.success(), "{output:?}");
    let json: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    json["schemes"].as_array().expect("an array").clone()
}

fn one_line(output: &Output) -> String {
    assert!(output.stdout.is_empty(), "{output:?}");
    complaint(output)
}

#[tokio::test(flavor = "multi_thread")]
async fn updates_are_lost_without_a_shared_lock_and_kept_with_one() {
    let server = RedisServer::start(RedisOptions::default()).await.unwrap();
    // Whether updates collide is up to the scheduler, so the unprotected schemes get more than one chance. The shared
    // lock gets none.
    let mut collided = [false; 2];
    for _ in 0..10 {
        let schemes = schemes(&race(&["--total", "1000", "--json"], Some(&server.url())));
        assert_eq!(schemes.len(), 3);
        assert_eq!((&schemes[2]["counted"], &schemes[2]["lost"]), (&1000.into(), &0.into()));
        for (collided, scheme) in collided.iter_mut().zip(&schemes) {
            assert_eq!(scheme["shared_lock"], false);
            *collided |= scheme["lost"].as_i64().unwrap() > 0;
        }
        if collided == [true; 2] {
            return;
        }
    }
    panic!("ten races without a shared lock, and no update lost: {collided:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_table_shows_all_schemes_and_no_password() {
    let server = RedisServer::start(RedisOptions::default().password("s3cret")).await.unwrap();
    let output = race(&["--total", "20", "--workers", "2", "--store", &server.url()], None);
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    for part in ["no lock", "each process's own", "redis", "LOST", "20"] {
        assert!(text.contains(part), "{part} in {text}");
    }
    assert!(!text.contains("s3cret"), "{text}");
}

#[test]
fn memory_alone_is_no_store_for_processes() {
    let output = race(&["--total", "10", "--store", "memory:"], None);
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("--store"), "{text}");
}

#[test]
fn more_workers_than_work_is_fine() {
    let schemes = schemes(&race(&["--total", "2", "--workers", "5", "--store", "memory:", "--json"], None));
    assert!(schemes.iter().all(|scheme| scheme["counted"].as_u64().unwrap() >= 1));
}

#[test]
fn bad_input_is_refused_in_one_line() {
    for args in [&["--store", "nonsense"][..], &["--workers", "0"], &["--total", "x"], &["--store", "ftp://host"]] {
        let output = race(args, None);
        assert_eq!(output.status.code(), Some(64), "{args:?}");
        one_line(&output);
    }
}

#[test]
fn a_store_that_is_down_is_unavailable() {
    let output = race(&["--store", "redis://:s3cret@127.0.0.1:1"], None);
    assert_eq!(output.status.code(), Some(69));
    assert!(!one_line(&output).contains("s3cret"));
}
