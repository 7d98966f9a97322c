//! Where runs inside a run come to borrow its lease.
//!
//! That the store still names the token is not enough to borrow: the outer run may be about to release it, and what was
//! left running in the background would go on without a lease. So a borrower first connects to the outer run's lender, a
//! socket named after the run, and the outer run keeps the lease until every borrower has hung up. A borrower that
//! finds no lender acquires the lock as anyone else. One that finds a lender waits for its answer, however long the outer run
//! stands still: if it asked for the lock itself, it would wait for the outer run, and that for it.

use std::{
    future::Future,
    io,
    os::{
        fd::{AsFd, OwnedFd},
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener as StdListener, UnixStream as StdStream},
    },
    pin::pin,
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixListener, UnixStream},
    task::JoinSet,
    time::sleep,
};

/// What the lender says to a borrower.
const WELCOME: u8 = b'k';
/// What it says to another user's process.
const REFUSED: u8 = b'n';

/// The lending side.
#[derive(Debug)]
pub(super) struct Lender {
    listener: UnixListener,
    borrowers: JoinSet<()>,
}

/// The borrowing side: as long as it lives, the lease is not released.
#[derive(Debug)]
pub(super) struct LeaseLoan {
    stream: UnixStream,
}

/// What the lender of a run says.
#[derive(Debug)]
pub(super) enum Asked {
    /// It lends.
    Lent(LeaseLoan),
    /// It is there, and does not lend to this user.
    Refused,
    /// There is none, or it closed before it lent.
    Nobody,
}

impl Lender {
    /// Opens the socket of a run.
    pub(super) fn open(run: &str) -> io::Result<Self> {
        let listener = StdListener::bind_addr(&address(run)?)?;
        listener.set_nonblocking(true)?;
        Ok(Self { listener: UnixListener::from_std(listener)?, borrowers: JoinSet::new() })
    }

    /// Lends until `over` is done and every borrower has hung up, and then closes. A run that came too late to be welcomed
    /// does not borrow.
    pub(super) async fn serve_until(mut self, over: impl Future<Output = ()>) {
        let mut over = pin!(over);
        let mut is_over = false;
        while !(is_over && self.borrowers.is_empty()) {
            tokio::select! {
                () = &mut over, if !is_over => is_over = true,
                _ = self.borrowers.join_next(), if !self.borrowers.is_empty() => {}
                arrival = self.listener.accept() => match arrival {
                    Ok((stream, _)) if is_trusted(&stream) => drop(self.borrowers.spawn(attend(stream))),
                    Ok((mut stream, _)) => {
                        self.borrowers.spawn(async move { drop(stream.write_u8(REFUSED).await) });
                    }
                    // Out of descriptors, perhaps; it would be the same again at once.
                    Err(_) => sleep(Duration::from_millis(20)).await,
                },
            }
        }
    }
}

impl LeaseLoan {
    /// Connects to the lender of a run.
    pub(super) async fn ask(run: &str) -> Asked {
        let Ok(mut stream) = connect(run) else { return Asked::Nobody };
        if !is_trusted(&stream) {
            return Asked::Refused;
        }
        // Without a limit: the system closes it when the outer run ends. If that stands still until its lease is over, its watchdog
        // kills this process as a part of CMD.
        match stream.read_u8().await {
            Ok(WELCOME) => Asked::Lent(Self { stream }),
            Ok(_) => Asked::Refused,
            Err(_) => Asked::Nobody,
        }
    }

    /// Another handle of this loan. The lender takes all of them for one borrower.
    pub(super) fn handle(&self) -> io::Result<OwnedFd> {
        self.stream.as_fd().try_clone_to_owned()
    }

    /// Returns when the outer run is gone.
    pub(super) async fn ended(&self) {
        loop {
            let ready = self.stream.readable().await;
            match self.stream.try_read(&mut [0; 16]) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && ready.is_ok() => {}
                Ok(1..) => {}
                _ => return,
            }
        }
    }
}

fn connect(run: &str) -> io::Result<UnixStream> {
    let stream = StdStream::connect_addr(&address(run)?)?;
    stream.set_nonblocking(true)?;
    UnixStream::from_std(stream)
}

/// Welcomes a borrower and waits until it hangs up.
async fn attend(mut stream: UnixStream) {
    if stream.write_u8(WELCOME).await.is_ok() {
        // It never says anything.
        while stream.read_u8().await.is_ok() {}
    }
}

/// Everyone on the machine can see the names of such sockets, but only the same user's processes are let in, or root's.
fn is_trusted(stream: &UnixStream) -> bool {
    stream.peer_cred().is_ok_and(|peer| peer.uid() == 0 || peer.uid() == rustix::process::geteuid().as_raw())
}

/// A name without a file, that goes with its process.
fn address(run: &str) -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(format!("lockkit-run-{run}"))
}

#[cfg(test)]
mod tests {
    use tokio::{sync::oneshot, time::timeout};

    use super::*;

    async fn lent(run: &str) -> LeaseLoan {
        match LeaseLoan::ask(run).await {
            Asked::Lent(loan) => loan,
            other => panic!("not lent: {other:?}"),
        }
    }

    #[tokio::test]
    async fn the_desk_closes_when_the_last_borrower_has_gone() {
        let run = lockkit::Token::random().expect("random").reveal();
        let lender = Lender::open(&run).expect("lender");
        let (end, over) = oneshot::channel::<()>();
        let lender = tokio::spawn(lender.serve_until(async { drop(over.await) }));
        let first = lent(&run).await;
        drop(end);
        // It is still open, for the first one is here.
        let second = lent(&run).await;
        drop(first);
        assert!(timeout(Duration::from_millis(50), second.ended()).await.is_err());
        assert!(!lender.is_finished());
        drop(second);
        lender.await.expect("closed");
        assert!(matches!(LeaseLoan::ask(&run).await, Asked::Nobody));
    }

    #[tokio::test]
    async fn a_borrower_learns_that_the_outer_run_is_gone() {
        let run = lockkit::Token::random().expect("random").reveal();
        let lender = tokio::spawn(Lender::open(&run).expect("lender").serve_until(std::future::pending()));
        let loan = lent(&run).await;
        lender.abort();
        loan.ended().await;
    }
}
