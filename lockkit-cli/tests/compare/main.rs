//! `lockkit compare`. One program, for each part alone leaves the machine idle most of the time.

mod command;
mod faults;
mod page;
mod peers;
#[path = "../support/mod.rs"]
mod support;

use serde_json::Value;

/// A row of `comparison.json`.
fn row<'a>(json: &'a Value, id: &str) -> &'a Value {
    json["rows"].as_array().expect("an array").iter().find(|row| row["id"] == id).expect("a row")
}
