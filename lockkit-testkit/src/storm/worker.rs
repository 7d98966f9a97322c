//! What a worker process does all day.

use std::{
    io,
    net::SocketAddr,
    path::PathBuf,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use lockkit_core::{Guard, HolderInfo, LockStore, Locker, Outcome, Status};
use serde::{Deserialize, Serialize};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines},
    net::{
        TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    time::sleep,
};

use super::Random;
use crate::{
    BoxError,
    history::{Recorder, What},
};

/// What a worker is to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Orders {
    /// Its name in the history.
    pub name: String,
    /// The store, through whatever stands between it and this worker.
    pub url: String,
    /// Where the [`Register`](super::Register) listens.
    pub register: SocketAddr,
    /// The locks to fight for.
    pub keys: Vec<String>,
    /// How long a lease lasts, in milliseconds.
    pub ttl_ms: u64,
    /// What its choices come from.
    pub seed: u64,
    /// The file of its history.
    pub history: PathBuf,
}

/// How long a worker waits for a lock, at most, in milliseconds.
const PATIENCE: u64 = 1500;
/// How often a holder that is caught asks its guard.
const ASK_EVERY: Duration = Duration::from_millis(15);

/// Takes locks and uses what they protect, until told to stop (a line on the standard input). Ends the process when
/// whoever started it is gone.
///
/// # Errors
/// When the register or the history's file is out of reach. That the store is, is what is being tested.
pub async fn work(orders: Orders, store: Arc<dyn LockStore>) -> Result<(), BoxError> {
    let stop = Arc::new(AtomicBool::new(false));
    listen(Arc::clone(&stop));
    let locker = Locker::shared_builder(store).holder(HolderInfo::new(&orders.name)).build();
    let mut worker = Worker {
        random: Random::new(orders.seed, &orders.name),
        recorder: Recorder::create(orders.name.clone(), &orders.history)?,
        register: Client::connect(&orders).await?,
        orders,
    };
    while !stop.load(Ordering::Relaxed) {
        worker.round(&locker).await?;
    }
    // What is still to be released is released, if there is anybody to tell.
    _ = locker.shutdown(Duration::from_secs(2)).await;
    Ok(())
}

struct Worker {
    orders: Orders,
    random: Random,
    recorder: Recorder,
    register: Client,
}

impl Worker {
    async fn round(&mut self, locker: &Locker) -> Result<(), BoxError> {
        let key = self.random.pick(&self.orders.keys).ok_or("no keys")?.clone();
        let lock = locker.lock(&key).ttl(Duration::from_millis(self.orders.ttl_ms));
        let wait = self.random.millis(50, PATIENCE);
        let op = self.recorder.ask(What::Acquire { key: key.clone(), within: None, owner: None })?;
        match lock.acquire_within(wait).await {
            Ok(Some(guard)) => {
                self.recorder.hear(op, What::Granted { fence: guard.fence().get() })?;
                self.use_it(&key, &guard, op).await?;
                self.release(guard, op).await?;
            }
            Ok(None) => self.recorder.hear(op, What::Contended)?,
            Err(error) => {
                self.recorder.hear(op, What::Failed { error: error.to_string() })?;
                sleep(self.random.millis(5, 50)).await;
            }
        }
        sleep(self.random.millis(0, 8)).await;
        Ok(())
    }

    /// Works under the lock as a service without fences would: it asks its guard before it writes, and not again. The
    /// fence is shown on the side, so that both kinds of service can be compared.
    async fn use_it(&mut self, key: &str, guard: &Guard, grant: u64) -> Result<(), BoxError> {
        let fence = guard.fence().get();
        let (version, twin) = self.register.claim(key, fence).await?;
        for _ in 0..=self.random.below(3) {
            sleep(self.random.millis(1, 12)).await;
            if !ask(&self.recorder, guard, grant)? {
                return Ok(());
            }
        }
        self.pass(key, guard, grant).await?;
        let op = self.recorder.ask(What::Write { key: key.to_owned(), fence })?;
        let admitted = self.register.write(key, fence, version, twin).await?;
        self.recorder.hear(op, if admitted { What::Written } else { What::Refused })?;
        Ok(())
    }

    /// Waits for as long as the register likes. What the guard says meanwhile is for the history only: the holder is past
    /// its check.
    async fn pass(&mut self, key: &str, guard: &Guard, grant: u64) -> Result<(), BoxError> {
        let mut passed = pin!(self.register.pass(key));
        loop {
            tokio::select! {
                passed = &mut passed => {
                    ask(&self.recorder, guard, grant)?;
                    return passed;
                }
                () = sleep(ASK_EVERY) => drop(ask(&self.recorder, guard, grant)?),
            }
        }
    }

    async fn release(&self, guard: Guard, grant: u64) -> io::Result<()> {
        let op = self.recorder.ask(What::Release { grant })?;
        let heard = match guard.release().await {
            Ok(Outcome::Released) => What::Released { held: true, reason: None },
            Ok(Outcome::NotHeld(reason)) => What::Released { held: false, reason: Some(reason.to_string()) },
            Err(error) => What::Failed { error: error.to_string() },
        };
        self.recorder.hear(op, heard)
    }
}

/// Asks the guard whether the lock is still held.
fn ask(recorder: &Recorder, guard: &Guard, grant: u64) -> io::Result<bool> {
    let op = recorder.ask(What::Ask { grant })?;
    let status = guard.status();
    match status {
        Status::Held | Status::Suspect => recorder.hear(op, What::Held)?,
        Status::Lost(reason) => recorder.hear(op, What::Lost { reason: reason.to_string() })?,
    }
    Ok(!matches!(status, Status::Lost(_)))
}

/// The way to the register.
struct Client {
    name: String,
    answers: Lines<BufReader<OwnedReadHalf>>,
    questions: OwnedWriteHalf,
}

impl Client {
    async fn connect(orders: &Orders) -> io::Result<Self> {
        let stream = TcpStream::connect(orders.register).await?;
        stream.set_nodelay(true)?;
        let (from, questions) = stream.into_split();
        Ok(Self { name: orders.name.clone(), answers: BufReader::new(from).lines(), questions })
    }

    /// The version of the fenced value and of its twin, whether or not the claim was admitted.
    async fn claim(&mut self, key: &str, fence: u64) -> Result<(u64, u64), BoxError> {
        let answer = self.ask(format!("claim {} {key} {fence}\n", self.name)).await?;
        let mut numbers = answer.split(' ').skip(1).map(str::parse);
        match (numbers.next(), numbers.next()) {
            (Some(version), Some(twin)) => Ok((version?, twin?)),
            _ => Err(format!("the register answered {answer:?}").into()),
        }
    }

    async fn pass(&mut self, key: &str) -> Result<(), BoxError> {
        self.ask(format!("pass {} {key}\n", self.name)).await.map(drop)
    }

    async fn write(&mut self, key: &str, fence: u64, base: u64, twin: u64) -> Result<bool, BoxError> {
        Ok(self.ask(format!("write {} {key} {fence} {base} {twin}\n", self.name)).await? == "1")
    }

    async fn ask(&mut self, question: String) -> Result<String, BoxError> {
        self.questions.write_all(question.as_bytes()).await?;
        Ok(self.answers.next_line().await?.ok_or("the register hung up")?)
    }
}

/// A thread of its own, for it has to notice the end of the input whatever the runtime is busy with.
fn listen(stop: Arc<AtomicBool>) {
    std::thread::spawn(move || {
        let mut line = String::new();
        match io::stdin().read_line(&mut line) {
            Ok(0) | Err(_) => std::process::exit(0),
            Ok(_) => stop.store(true, Ordering::Relaxed),
        }
    });
}
