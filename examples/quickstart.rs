//! Two tasks, one lock, on the store of your choice:
//! `cargo run --example quickstart --features redis -- redis://127.0.0.1`

use std::time::Duration;

use lockkit::{Outcome, Result};

#[tokio::main]
async fn main() -> Result<()> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "memory:".to_owned());
    let locker = lockkit::connect(&url).await?;

    let tasks: Vec<_> = ["first", "second"]
        .into_iter()
        .map(|name| {
            let lock = locker.lock("example/quickstart").ttl(Duration::from_secs(5));
            tokio::spawn(async move {
                let guard = lock.acquire().await?;
                println!("{name}: has the lock with fence {}", guard.fence());
                guard.run(tokio::time::sleep(Duration::from_millis(200))).await?;
                match guard.release().await? {
                    Outcome::Released => println!("{name}: released"),
                    Outcome::NotHeld(reason) => println!("{name}: the work may have overlapped: {reason}"),
                }
                Ok::<_, lockkit::Error>(())
            })
        })
        .collect();
    for task in tasks {
        task.await.expect("the task does not panic")?;
    }
    Ok(())
}
