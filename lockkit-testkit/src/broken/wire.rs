//! The machine that the simple store runs on, and the connection of a client to it.
//!
//! What goes over the wire is a ticket: the step itself, a closure, waits in the machine until the ticket arrives, and
//! its answer until the ticket is back. So the protocol is nothing to read, and yet a proxy can delay, lose and cut
//! it. The lock's name travels along for the proxy to recognize.
//!
//! This is TCP in real time, not a simulated network: the cases make things go wrong by the same [`Proxy`] as for every
//! other store, and some of the bugs are about which answer on a connection belongs to which question. The simulated store
//! of `lockkit-sim` has no sockets, for time that is paused would leap whenever one is awaited.
//!
//! [`Proxy`]: crate::faults::Proxy

use std::{
    any::Any,
    collections::{HashMap, VecDeque},
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering},
    },
};

use lockkit_core::{Error, ErrorKind, Result, store::unpoisoned};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::{TcpListener, TcpStream},
    sync::{Notify, mpsc, oneshot, watch},
    task::JoinHandle,
};

use super::{Bug, table::Table};
use crate::BoxError;

type Step = Box<dyn FnOnce(&mut Table) + Send>;

/// A server of the simple store. It ends when it is dropped.
#[derive(Debug)]
pub(super) struct Machine {
    pub(super) addr: SocketAddr,
    pub(super) inside: Arc<Inside>,
    listening: JoinHandle<()>,
}

/// What the machine shares with its clients.
pub(super) struct Inside {
    table: Mutex<Table>,
    steps: Mutex<HashMap<u64, Step>>,
    next_ticket: AtomicU64,
    power: watch::Sender<Power>,
    /// Changes when all connections are to end.
    cut: watch::Sender<()>,
    /// How many wait for a name. They are told of releases beside the wire, which no case has to know.
    waiting: Mutex<HashMap<String, u32>>,
    pub(super) freed: Notify,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Power {
    On,
    /// It stands still; what comes in is kept for later.
    Frozen,
    Off,
}

impl Machine {
    pub(super) async fn start(bug: Option<Bug>) -> Result<Self, BoxError> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let addr = listener.local_addr()?;
        let inside = Arc::new(Inside {
            table: Mutex::new(Table::new(bug)),
            steps: Mutex::default(),
            next_ticket: AtomicU64::new(0),
            power: watch::Sender::new(Power::On),
            cut: watch::Sender::new(()),
            waiting: Mutex::default(),
            freed: Notify::new(),
        });
        let listening = tokio::spawn(listen(listener, Arc::clone(&inside)));
        Ok(Self { addr, inside, listening })
    }

    pub(super) fn power(&self, power: Power) {
        // With the table locked, so that no step is done any more once it is off.
        let table = self.inside.table();
        self.inside.power.send_replace(power);
        drop(table);
        if power == Power::Off {
            self.cut();
        }
    }

    /// Ends all connections.
    pub(super) fn cut(&self) {
        self.inside.cut.send_replace(());
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.listening.abort();
        self.cut();
    }
}

impl Inside {
    pub(super) fn table(&self) -> MutexGuard<'_, Table> {
        unpoisoned(&self.table)
    }

    pub(super) fn waiting(&self) -> MutexGuard<'_, HashMap<String, u32>> {
        unpoisoned(&self.waiting)
    }

    fn deposit(&self, step: Step) -> u64 {
        let ticket = self.next_ticket.fetch_add(1, Ordering::Relaxed);
        unpoisoned(&self.steps).insert(ticket, step);
        ticket
    }
}

impl std::fmt::Debug for Inside {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inside").finish_non_exhaustive()
    }
}

async fn listen(listener: TcpListener, inside: Arc<Inside>) {
    while let Ok((stream, _)) = listener.accept().await {
        // Subscribed before the look at the power: who comes in while it goes off is cut.
        let cut = inside.cut.subscribe();
        if *inside.power.borrow() != Power::Off {
            tokio::spawn(serve(Arc::clone(&inside), stream, cut));
        }
    }
}

async fn serve(inside: Arc<Inside>, mut stream: TcpStream, mut cut: watch::Receiver<()>) {
    tokio::select! {
        biased;
        _ = cut.changed() => {}
        _ = answer(&inside, &mut stream) => {}
    }
}

/// Does the steps whose tickets come in, one after the other.
async fn answer(inside: &Inside, stream: &mut TcpStream) -> Result<(), BoxError> {
    stream.set_nodelay(true)?;
    let (read, mut write) = stream.split();
    let mut lines = BufReader::new(read).lines();
    let mut power = inside.power.subscribe();
    while let Some(line) = lines.next_line().await? {
        power.wait_for(|power| *power != Power::Frozen).await?;
        let ticket = line.split(' ').next().unwrap_or_default();
        let step = unpoisoned(&inside.steps).remove(&ticket.parse()?);
        if let Some(step) = step {
            let mut table = inside.table();
            if *inside.power.borrow() == Power::Off {
                return Ok(());
            }
            step(&mut table);
            if std::mem::take(&mut table.freed) {
                inside.freed.notify_waiters();
            }
        }
        write.write_all(format!("{ticket}\n").as_bytes()).await?;
    }
    Ok(())
}

/// A client's way to the machine: one connection, which is replaced when it broke or was given up.
#[derive(Debug)]
pub(super) struct Dialer {
    pub(super) inside: Arc<Inside>,
    addr: SocketAddr,
    /// Held while connecting, so that what is asked later never overtakes what was asked before.
    connection: tokio::sync::Mutex<Option<Requests>>,
    /// The [slot](Slot) for the answer to a question that nobody waits for any more.
    left_over: Mutex<Option<Box<dyn Any + Send>>>,
    bug: Option<Bug>,
    /// Only with a bug: the answers until now, by their tickets.
    answers: Mutex<HashMap<u64, Box<dyn Any + Send>>>,
}

/// Where an answer is put.
type Slot<T> = Arc<Mutex<Option<T>>>;

/// A question that was sent. Dropped before it is answered, it leaves its slot behind.
struct Unread<'a, T: Send + 'static> {
    answer: Option<Slot<T>>,
    left_over: &'a Mutex<Option<Box<dyn Any + Send>>>,
}

impl<T: Send + 'static> Drop for Unread<'_, T> {
    fn drop(&mut self) {
        if let Some(answer) = self.answer.take() {
            *unpoisoned(self.left_over) = Some(Box::new(answer));
        }
    }
}

type Requests = mpsc::UnboundedSender<Request>;

struct Request {
    ticket: u64,
    line: String,
    /// Is told the ticket that came back.
    done: oneshot::Sender<u64>,
}

impl Dialer {
    pub(super) async fn connect(inside: Arc<Inside>, addr: SocketAddr, bug: Option<Bug>) -> Result<Self> {
        let (connection, left_over, answers) = Default::default();
        let dialer = Self { inside, addr, connection, left_over, bug, answers };
        dialer.connection().await?;
        Ok(dialer)
    }

    /// Has a step done; `name` is for the proxy on the way.
    pub(super) async fn ask<T: Clone + Send + 'static>(
        &self,
        name: &str,
        step: impl FnOnce(&mut Table) -> T + Send + 'static,
    ) -> Result<T> {
        let connection = self.connection().await?;
        let answer = Slot::default();
        let into = Arc::clone(&answer);
        let ticket = self.inside.deposit(Box::new(move |table| *unpoisoned(&into) = Some(step(table))));
        let (done, is_done) = oneshot::channel();
        let broken = || Error::new(ErrorKind::Unavailable, "the connection broke").unknown_effect();
        connection.send(Request { ticket, line: format!("{ticket} {name:?}\n"), done }).map_err(|_| broken())?;
        let mut unread = Unread { answer: Some(answer), left_over: &self.left_over };
        let came = is_done.await.map_err(|_| broken())?;
        let answer = unread.answer.take().and_then(|answer| unpoisoned(&answer).take()).ok_or_else(broken)?;
        if self.bug != Some(Bug::AnswersInOrder) {
            return Ok(answer);
        }
        // BUG: what came may be the answer to another question.
        let mut answers = unpoisoned(&self.answers);
        answers.insert(ticket, Box::new(answer));
        answers.get(&came).and_then(|answer| answer.downcast_ref().cloned()).ok_or_else(broken)
    }

    /// Only with a bug: takes the answer to an earlier question, which came first, for this one's.
    pub(super) fn one_behind<T: Send + 'static>(&self, answer: T) -> T {
        let mut left_over = unpoisoned(&self.left_over);
        let Some(before) = left_over.take() else { return answer };
        match before.downcast::<Slot<T>>().map(|before| unpoisoned(&before).take()) {
            Ok(Some(before)) => {
                *left_over = Some(Box::new(Slot::new(Mutex::new(Some(answer)))));
                before
            }
            Ok(None) => answer,
            // It can't be read as an answer to this question; the next of its kind gets it.
            Err(before) => {
                *left_over = Some(before);
                answer
            }
        }
    }

    /// Gives the connection up: it gave no answer in time.
    pub(super) async fn give_up(&self) {
        *self.connection.lock().await = None;
    }

    async fn connection(&self) -> Result<Requests> {
        let mut connection = self.connection.lock().await;
        if let Some(open) = connection.as_ref().filter(|open| !open.is_closed()) {
            return Ok(open.clone());
        }
        let refused = |error| Error::new(ErrorKind::Unavailable, "no connection").with_source(error);
        let stream = TcpStream::connect(self.addr).await.map_err(refused)?;
        let (requests, asked) = mpsc::unbounded_channel();
        tokio::spawn(relay(stream, asked, self.bug));
        Ok(connection.insert(requests).clone())
    }
}

/// Sends what is asked and tells who waits for the answer, until either side hangs up.
async fn relay(
    mut stream: TcpStream,
    mut asked: mpsc::UnboundedReceiver<Request>,
    bug: Option<Bug>,
) -> Result<(), BoxError> {
    stream.set_nodelay(true)?;
    let (read, mut write) = stream.split();
    let mut replies = BufReader::new(read).lines();
    let mut pending: VecDeque<(u64, oneshot::Sender<u64>)> = VecDeque::new();
    loop {
        tokio::select! {
            request = asked.recv() => {
                let Some(Request { ticket, line, done }) = request else { return Ok(()) };
                pending.push_back((ticket, done));
                write.write_all(line.as_bytes()).await?;
            }
            reply = replies.next_line() => {
                let Some(line) = reply? else { return Ok(()) };
                let came = line.parse()?;
                // BUG: the first one waits for the first that comes.
                let is_asked = |(ticket, _): &(u64, _)| bug == Some(Bug::AnswersInOrder) || *ticket == came;
                let at = pending.iter().position(is_asked);
                if let Some((_, done)) = at.and_then(|at| pending.remove(at)) {
                    // Nobody waits for the answer to what was cancelled.
                    let _ = done.send(came);
                }
            }
        }
    }
}
