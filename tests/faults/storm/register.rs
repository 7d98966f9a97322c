//! The protected resource: for each lock a fenced value and an unfenced twin, and the record of all that was done to them.

use std::{
    collections::{BTreeMap, VecDeque},
    io,
    net::{Ipv4Addr, SocketAddr},
    sync::{Arc, Mutex},
};

use lockkit::{
    Clock, Fence, SystemClock,
    fenced::{Admission, admit},
    store::unpoisoned,
};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::{TcpListener, TcpStream},
    sync::{oneshot, watch},
    task::JoinHandle,
};

use lockkit_testkit::history::{Event, What};

/// The resource, kept by the test's own process, which no fault touches. Ends when it is dropped.
///
/// Workers speak to it in lines: `claim NAME KEY FENCE`, `pass NAME KEY MODE`, `write NAME KEY FENCE BASE TWIN_BASE`.
#[derive(Debug)]
pub(crate) struct Register {
    addr: SocketAddr,
    shared: Arc<Shared>,
    listening: JoinHandle<()>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    /// Counts what was written, so that it can be awaited.
    writes: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct State {
    values: BTreeMap<String, Value>,
    record: Vec<Event>,
    traps: VecDeque<Trap>,
}

/// Waits for a holder.
#[derive(Debug)]
struct Trap {
    prey: Prey,
    catches: oneshot::Sender<Caught>,
}

/// Which holders are to be caught.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Prey {
    /// One that holds any lock alone, and is about to write.
    Writer,
    /// One that holds the lock of this name alone, and is about to write.
    WriterOf(&'static str),
    /// A reader.
    Reader,
    /// One that has a permit.
    Permit,
}

impl Prey {
    fn is(self, key: &str, mode: &str) -> bool {
        match self {
            Self::Writer => mode == "exclusive",
            Self::WriterOf(name) => mode == "exclusive" && key == name,
            Self::Reader => mode == "shared",
            Self::Permit => mode.starts_with("permit"),
        }
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Value {
    highest: Fence,
    version: u64,
    twin: u64,
}

/// A holder that is past its last check and before its write. It goes on when this is dropped.
#[derive(Debug)]
pub(crate) struct Caught {
    /// Which worker.
    pub(crate) worker: String,
    /// Which lock it holds.
    pub(crate) key: String,
    twin: u64,
    _go: oneshot::Sender<()>,
}

impl Register {
    /// Starts it on a free port of 127.0.0.1.
    ///
    /// # Errors
    /// If there is no free port.
    pub(crate) async fn start() -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let addr = listener.local_addr()?;
        let shared = Arc::new(Shared::default());
        let listening = tokio::spawn(listen(listener, Arc::clone(&shared)));
        Ok(Self { addr, shared, listening })
    }

    /// Where workers reach it.
    #[must_use]
    pub(crate) fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// How many writes the twins have taken.
    #[must_use]
    pub(crate) fn writes(&self) -> u64 {
        *self.shared.writes.borrow()
    }

    /// Waits until the twins have taken that many writes.
    pub(crate) async fn reached(&self, writes: u64) {
        // It can't fail: the sender lives as long as `self`.
        _ = self.shared.writes.subscribe().wait_for(|now| *now >= writes).await;
    }

    /// Catches the next such holder that passes after this call, also one that passes before the future is polled.
    pub(crate) fn catch(&self, prey: Prey) -> impl Future<Output = Caught> {
        let mut trap = self.set_trap(prey);
        async move {
            loop {
                if let Ok(caught) = trap.await {
                    return caught;
                }
                trap = self.set_trap(prey);
            }
        }
    }

    fn set_trap(&self, prey: Prey) -> oneshot::Receiver<Caught> {
        let (catches, caught) = oneshot::channel();
        unpoisoned(&self.shared.state).traps.push_back(Trap { prey, catches });
        caught
    }

    /// Waits until somebody else has written what the caught holder is about to overwrite.
    pub(crate) async fn overtaken(&self, caught: &Caught) {
        let overtaken = |shared: &Shared| {
            unpoisoned(&shared.state).values.get(&caught.key).is_some_and(|value| value.twin > caught.twin)
        };
        _ = self.shared.writes.subscribe().wait_for(|_| overtaken(&self.shared)).await;
    }

    /// All that was done so far, in the order in which it was done.
    #[must_use]
    pub(crate) fn record(&self) -> Vec<Event> {
        unpoisoned(&self.shared.state).record.clone()
    }
}

impl Drop for Register {
    fn drop(&mut self) {
        self.listening.abort();
    }
}

impl Shared {
    async fn answer(&self, line: &str) -> Option<String> {
        let mut words = line.split(' ');
        let (verb, name, key) = (words.next()?, words.next()?, words.next()?);
        let mut number = || words.next()?.parse::<u64>().ok();
        match verb {
            "claim" => Some(self.claim(name, key, number()?)),
            "pass" => {
                let trapped = self.spring(name, key, words.next()?);
                if let Some(go) = trapped {
                    // Either way it may go on: the one who caught it said so, or is gone.
                    _ = go.await;
                }
                Some("go".to_owned())
            }
            "write" => Some(self.write(name, key, number()?, number()?, number()?)),
            _ => None,
        }
    }

    fn claim(&self, by: &str, key: &str, fence: u64) -> String {
        let mut state = unpoisoned(&self.state);
        let value = state.values.entry(key.to_owned()).or_default();
        let admitted = admit(&mut value.highest, Fence::new(fence)).is_admitted();
        let Value { version, twin, .. } = *value;
        state.log(What::Claimed { key: key.to_owned(), by: by.to_owned(), fence, admitted });
        format!("{} {version} {twin}", u8::from(admitted))
    }

    fn write(&self, by: &str, key: &str, fence: u64, base: u64, twin_base: u64) -> String {
        let mut state = unpoisoned(&self.state);
        let value = state.values.entry(key.to_owned()).or_default();
        let before = *value;
        let admitted = admit(&mut value.highest, Fence::new(fence)) == Admission::Admitted;
        value.version += u64::from(admitted);
        value.twin += 1;
        let (key, by) = (key.to_owned(), by.to_owned());
        let update = What::Updated { key: key.clone(), by: by.clone(), fence, admitted, base, version: before.version };
        state.log(update);
        state.log(What::Twin { key, by, base: twin_base, version: before.twin });
        drop(state);
        self.writes.send_modify(|writes| *writes += 1);
        u8::from(admitted).to_string()
    }

    fn spring(&self, worker: &str, key: &str, mode: &str) -> Option<oneshot::Receiver<()>> {
        let mut state = unpoisoned(&self.state);
        let twin = state.values.get(key).map_or(0, |value| value.twin);
        while let Some(place) = state.traps.iter().position(|trap| trap.prey.is(key, mode)) {
            let trap = state.traps.remove(place)?;
            let (go, goes) = oneshot::channel();
            // The process, of which the part behind the slash is a task.
            let worker = worker.split('/').next().unwrap_or(worker).to_owned();
            let caught = Caught { worker, key: key.to_owned(), twin, _go: go };
            if trap.catches.send(caught).is_ok() {
                return Some(goes);
            }
        }
        None
    }
}

impl State {
    fn log(&mut self, what: What) {
        let op = self.record.len() as u64;
        self.record.push(Event { at: SystemClock.now().as_nanos(), process: "resource".to_owned(), op, what });
    }
}

async fn listen(listener: TcpListener, shared: Arc<Shared>) {
    while let Ok((client, _)) = listener.accept().await {
        let shared = Arc::clone(&shared);
        tokio::spawn(async move {
            // A worker that is killed hangs up, and that is all there is to it.
            _ = serve(client, &shared).await;
        });
    }
}

async fn serve(mut client: TcpStream, shared: &Shared) -> io::Result<()> {
    client.set_nodelay(true)?;
    let (from, mut to) = client.split();
    let mut lines = BufReader::new(from).lines();
    while let Some(line) = lines.next_line().await? {
        let answer = shared.answer(&line).await;
        let answer = answer.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, line))?;
        to.write_all(format!("{answer}\n").as_bytes()).await?;
    }
    Ok(())
}
