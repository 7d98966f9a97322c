//! One process of a contestant.

use std::{fmt::Write as _, io::Write as _, time::Duration};

use rustix::time::{ClockId, clock_gettime};
use sqlx::{Connection as _, MySqlConnection};

use crate::Error;

/// Longer than any turn: none of them is to end by itself.
const TTL: Duration = Duration::from_secs(30);

/// The arguments: who, the URL, how long to hold the lock in microseconds, for how long in milliseconds.
pub(crate) async fn work(arguments: &[String]) -> Result<(), Error> {
    let [who, url, hold, time] = arguments else { return Err("four arguments".into()) };
    let (hold, time) = (Duration::from_micros(hold.parse()?), Duration::from_millis(time.parse()?));
    let grants = match who.as_str() {
        "lockkit" => lockkit(url, hold, time).await?,
        "get_lock" => get_lock(url, hold, time).await?,
        other => return Err(format!("who is {other}?").into()),
    };
    std::io::stdout().write_all(grants.as_bytes())?;
    Ok(())
}

async fn lockkit(url: &str, hold: Duration, time: Duration) -> Result<String, Error> {
    let lock = lockkit::connect(url).await?.lock("hot").ttl(TTL);
    let (mut grants, end) = (String::new(), now() + time.as_nanos());
    while now() < end {
        let guard = lock.acquire().await?;
        let had = now();
        stay(hold).await;
        writeln!(grants, "{had} {}", now())?;
        assert_eq!(guard.release().await?, lockkit::Outcome::Released);
    }
    Ok(grants)
}

async fn get_lock(url: &str, hold: Duration, time: Duration) -> Result<String, Error> {
    let mut connection = MySqlConnection::connect(url).await?;
    let (mut grants, end) = (String::new(), now() + time.as_nanos());
    while now() < end {
        let got: i32 = sqlx::query_scalar("SELECT GET_LOCK('hot', 30)").fetch_one(&mut connection).await?;
        assert_eq!(got, 1, "timed out");
        let had = now();
        stay(hold).await;
        writeln!(grants, "{had} {}", now())?;
        sqlx::query("DO RELEASE_LOCK('hot')").execute(&mut connection).await?;
    }
    Ok(grants)
}

async fn stay(hold: Duration) {
    if !hold.is_zero() {
        tokio::time::sleep(hold).await;
    }
}

/// Nanoseconds of the clock that all processes share.
fn now() -> u128 {
    let now = clock_gettime(ClockId::Monotonic);
    Duration::new(now.tv_sec.cast_unsigned(), u32::try_from(now.tv_nsec).unwrap_or_default()).as_nanos()
}
