//! One hot lock in the hands of several processes: this library beside what else is used on the same server.
//! `lockkit_compare::hot` says what is measured.
//!
//! `cargo bench -p lockkit-compare --bench hot -- [rounds] [redis] [redlock] [mysql] [zk] [durable]`
//!
//! MySQL leaves writing to the disk to the operating system, unless `durable` has it write each commit. Curator's
//! archives are looked for in `$LOCKKIT_CURATOR`, or else in `/usr/share/java`; without them it does not take part.

mod servers;

use lockkit_compare::hot::{BoxError, Turn, compete};
use sqlx::{Connection as _, MySqlConnection};

use crate::servers::Field;

fn main() -> Result<(), BoxError> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    match &arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["worker", "lockkit", url, hold, time] => return runtime.block_on(Turn::begin(hold, time)?.take(url)),
        ["worker", "get_lock", url, hold, time] => return runtime.block_on(get_lock(url, Turn::begin(hold, time)?)),
        _ => {}
    }
    let is_said = |word: &str| arguments.iter().any(|argument| argument == word);
    let rounds = arguments.iter().find_map(|argument| argument.parse().ok()).unwrap_or(5);
    let all = !Field::ALL.iter().any(|field| is_said(field.name()));
    for field in Field::ALL.into_iter().filter(|field| all || is_said(field.name())) {
        let (_servers, contestants) = runtime.block_on(field.start(is_said("durable")))?;
        let scores = compete(&contestants, rounds)?;
        print!("{} {scores}", field.name());
    }
    Ok(())
}

async fn get_lock(url: &str, mut turn: Turn) -> Result<(), BoxError> {
    let mut connection = MySqlConnection::connect(url).await?;
    while turn.goes_on() {
        let got: i32 = sqlx::query_scalar("SELECT GET_LOCK('hot', 30)").fetch_one(&mut connection).await?;
        assert_eq!(got, 1, "timed out");
        turn.hold().await?;
        sqlx::query("DO RELEASE_LOCK('hot')").execute(&mut connection).await?;
    }
    turn.end()
}
