//! `lockkit init` and `lockkit gc`.

use std::process::Output;

use crate::support::{self, code, complaint, stdout};
use lockkit_testkit::servers::{MySqlOptions, MySqlServer};

fn lockkit(store: &str, arguments: &[&str]) -> Output {
    support::lockkit(arguments).env("LOCKKIT_STORE", store).output().expect("lockkit runs")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_table_is_made_and_tidied() {
    let server = MySqlServer::start(MySqlOptions::default()).await.unwrap();
    let url = server.url();
    // Without the table nothing works, and the one line says how to make it.
    let output = lockkit(&url, &["ls"]);
    let complaint = complaint(&output);
    assert_eq!(code(&output), 78, "{complaint}");
    assert!(complaint.contains("lockkit init") && complaint.contains("CREATE TABLE"), "{complaint}");

    let output = lockkit(&url, &["init"]);
    assert_eq!((code(&output), stdout(&output)), (0, "the table is there\n".to_owned()));
    assert_eq!(code(&lockkit(&url, &["init"])), 0, "twice does no harm");
    assert_eq!(code(&lockkit(&format!("{url}?keep_rows=true"), &["run", "--key", "k", "--", "true"])), 0);

    let output = lockkit(&url, &["gc"]);
    assert_eq!((code(&output), stdout(&output)), (0, "removed 0 rows\n".to_owned()), "it was used just now");
    server.admin("UPDATE resource_lock SET update_time = update_time - INTERVAL 8 DAY").await.unwrap();
    let output = lockkit(&url, &["gc"]);
    assert_eq!((code(&output), stdout(&output)), (0, "removed 1 rows\n".to_owned()));
}

#[test]
fn other_stores_need_neither() {
    assert_eq!(stdout(&lockkit("redis://127.0.0.1:1", &["init"])), "redis needs no preparation\n");
    assert_eq!(stdout(&lockkit("memory:", &["gc"])), "memory keeps nothing that would have to be removed\n");
    assert_eq!(code(&lockkit("nonsense", &["init"])), 64);
    assert_eq!(code(&lockkit("mysql://root@127.0.0.1:1/db", &["init"])), 69);
}
