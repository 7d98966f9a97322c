//! Getting a place in the queue, waiting in it, and being granted the lock.

use std::{sync::Arc, time::Duration};

use lockkit_core::{AcquireRequest, Attempt, Contention, Error, ErrorKind, Hold, HolderInfo, Moment, Result, Token};
use tokio::time::{Instant, sleep_until};
use zookeeper_client as zk;

use crate::{
    client::{
        driver::Answer,
        session::{Grant, Node, Session, Stage},
        watched::{Use, Watched, changed, is_ready},
    },
    store::ZkStore,
    wire::{
        error::{self, Failure, Sent},
        fence::{self, Record},
        name,
        queue::{self, Position},
        value::{self, Value},
    },
};

/// When to ask again for a lock whose directory has to become empty first.
const WRAP_PAUSE: Duration = Duration::from_millis(20);

/// When to look again at a queue that can't be watched.
const LOOK_PAUSE: Duration = Duration::from_millis(250);

/// Shorter leases would be over before anything could be done under them.
const MIN_TTL: Duration = Duration::from_millis(100);

/// Asks for a lease, and waits for it in the queue.
pub(crate) async fn acquire(store: &ZkStore, request: &AcquireRequest) -> Result<Attempt> {
    store.info.admit(request)?;
    if request.ttl < MIN_TTL {
        let message = format!("the ttl must be at least {MIN_TTL:?}, not {:?}", request.ttl);
        return Err(Error::new(ErrorKind::InvalidInput, message));
    }
    let session = store.session().await?;
    // A lease lasts as long as its session at most, whatever was asked for.
    let ttl = request.ttl.min(store.connection.session_timeout());
    let request = AcquireRequest { ttl, ..request.clone() };
    Acquisition::new(&session, &request, store.timeout().min(ttl / 4)).run().await
}

/// One call of `acquire`.
pub(crate) struct Acquisition<'a> {
    pub(crate) session: &'a Arc<Session>,
    pub(crate) request: &'a AcquireRequest,
    pub(crate) token: &'a Token,
    /// The path of the lock.
    pub(crate) lock: String,
    /// What the names of the claim's nodes begin with.
    pub(crate) protection: String,
    /// The bound on one operation.
    pub(crate) bound: Duration,
    /// The moment before the last request that could tell that the lock is ours.
    pub(crate) asked: Moment,
}

/// The claim's node and all children of the lock, as seen together.
pub(crate) struct Queue {
    pub(crate) node: Node,
    pub(crate) children: Vec<String>,
}

/// How a wait for the node before ended.
enum Woken {
    /// Something changed.
    Changed,
    /// The node before was the holder's, it is gone, and nothing has changed since the queue was read but that.
    Next,
    /// There is no room for a watch on the node before.
    Unwatched,
    /// The caller's time is up, or the session's.
    Over,
}

impl<'a> Acquisition<'a> {
    pub(crate) fn new(session: &'a Arc<Session>, request: &'a AcquireRequest, bound: Duration) -> Self {
        let token = &request.claim.token;
        let lock = session.names.lock(&request.claim.key);
        Self { session, request, token, lock, protection: name::protection(token), bound, asked: session.now() }
    }

    /// Asks, and waits for as long as the request says.
    ///
    /// # Errors
    /// Their effect is unknown as long as there is or may be a node of the claim, whatever was answered: it has to be
    /// released.
    pub(crate) async fn run(mut self) -> Result<Attempt> {
        let outcome = self.ask_and_wait().await;
        outcome.map_err(|e| if self.session.claimed(self.token).is_some() { e.unknown_effect() } else { e })
    }

    async fn ask_and_wait(&mut self) -> Result<Attempt> {
        let deadline = Instant::now().checked_add(self.request.wait);
        let Some(mut queue) = self.enter().await? else { return self.vanished() };
        while !queue::is_safe(queue.node.sequence) {
            // Its sequence numbers are about to wrap, so the lock's directory is made anew. That takes a moment in which
            // nobody is in the queue; until it comes nobody of ours enters.
            if !self.leave_and_renew_directory(&queue).await? {
                return Ok(undone(None, WRAP_PAUSE));
            }
            queue = self.line_up().await?;
        }
        loop {
            match queue::place(&queue.children, &queue.node.name) {
                Position::First => return self.grant(queue, None).await.map(Attempt::Granted),
                Position::Absent => return self.vanished(),
                Position::Behind { holder, .. } if self.request.wait.is_zero() => {
                    return self.leave(&queue, holder).await;
                }
                Position::Behind { before, holder } => {
                    match self.wait(&queue, before, before == holder, deadline).await? {
                        Woken::Changed => {}
                        Woken::Next => {
                            self.asked = self.session.now();
                            return self.grant(queue, Some(Record::NONE)).await.map(Attempt::Granted);
                        }
                        // The claim keeps its place, or has none to keep.
                        Woken::Unwatched => return Ok(Attempt::Contended(contention(None, LOOK_PAUSE))),
                        Woken::Over => return Ok(Attempt::Contended(contention(None, Duration::ZERO))),
                    }
                }
            }
            self.asked = self.session.now();
            queue.children = self.list().await.map_err(|failure| self.doubtful(&failure))?;
        }
    }

    /// Waits for the node before ours to change or go.
    ///
    /// When the holder goes and we are the next, the lock is ours without another look, if nothing else can have
    /// changed. There are two such things, and both would be told of before the end of the holder's node, because
    /// the servers and the driver keep the order of events:
    /// - our own node was deleted; there is a watch on it too;
    /// - the holder raised the fences of the lock; it says so in its own node.
    ///
    /// What happened while the connection was lost is told in any order, so then we look.
    async fn wait(&self, queue: &Queue, before: &str, is_holder: bool, deadline: Option<Instant>) -> Result<Woken> {
        let client = &self.session.client;
        let mut states = client.state_watcher();
        let (path, own_path) = (format!("{}/{before}", self.lock), format!("{}/{}", self.lock, queue.node.name));
        let may_be_next = is_holder && !queue::has_record(&queue.children);
        let own = may_be_next.then(|| self.look(&own_path, Use::Hearing)).flatten();
        let Some(watched) = self.look(&path, Use::Waiting) else { return Ok(Woken::Unwatched) };
        let own = match own {
            Some(own) => Some(self.session.read(self.bound, own).await),
            None => None,
        };
        let own = match own {
            None => None,
            Some(Ok((_, watch))) => Some(watch),
            Some(Err(failure)) if failure.is(&zk::Error::NoNode) => return Ok(Woken::Changed),
            Some(Err(failure)) => return Err(self.doubtful(&failure)),
        };
        let (data, watch) = match self.session.read(self.bound, watched).await {
            Ok(watched) => watched,
            Err(failure) if failure.is(&zk::Error::NoNode) => return Ok(Woken::Changed),
            Err(failure) => return Err(self.doubtful(&failure)),
        };
        let is_next = own.is_some() && Value::parse(&data).is_none_or(|value| value.fence.is_none());
        let own_changed = async {
            match own {
                Some(own) => changed(own).await,
                None => std::future::pending().await,
            }
        };
        let event = tokio::select! {
            biased;
            _ = own_changed => return Ok(Woken::Changed),
            event = changed(watch) => event,
            () = until(deadline) => return Ok(Woken::Over),
            () = self.session.ended() => return Ok(Woken::Over),
        };
        let Some(event) = event else { return Ok(Woken::Over) };
        match event.event_type {
            zk::EventType::NodeDeleted if is_next => {
                let reconnected = is_ready(states.changed());
                Ok(if reconnected { Woken::Changed } else { Woken::Next })
            }
            zk::EventType::Session => Ok(Woken::Over),
            _ => Ok(Woken::Changed),
        }
    }

    /// Asks for the data of a node of the queue and for a watch on it, if there is room for one.
    fn look(&self, path: &str, purpose: Use) -> Option<Answer<'a, (Vec<u8>, Watched)>> {
        let client = &self.session.client;
        self.session.watches.ask(path, purpose, || {
            let answer = client.get_and_watch_data(path);
            async { answer.await.map(|(data, _, watcher)| (data, watcher)) }
        })
    }

    /// The lock is ours. `record` is the lock's fence record, if that is known.
    async fn grant(&self, queue: Queue, record: Option<Record>) -> Result<Hold> {
        let granted = match self.session.claimed(self.token).map(|claimed| claimed.stage) {
            Some(Stage::Held(node, grant)) if node == queue.node => grant,
            _ => self.settle_fence(&queue, record).await?,
        };
        let (fence, span, depth) = (granted.fence, granted.span, granted.depth);
        if self.session.proven() < self.session.now() + self.request.ttl / 3 {
            // It was a long wait. Whoever is to rely on the lease should have something of it.
            let sign = self.session.sign_of_life().await;
            sign.map_err(|failure| self.doubtful(&failure))?;
        }
        self.session.update(self.token, |claimed| claimed.stage = Stage::Held(queue.node, granted));
        if self.session.is_over() {
            return Err(error::session_over());
        }
        let until = self.session.proven().min(self.asked + self.request.ttl);
        Ok(Hold { claim: self.request.claim.clone(), fence, span, until, depth })
    }

    /// Decides on the fences of the grant, and writes down what they take from the grants to come.
    async fn settle_fence(&self, queue: &Queue, record: Option<Record>) -> Result<Grant> {
        let request = &self.request.fence;
        let (record, version) = match record {
            Some(record) => (record, None),
            None if !queue::has_record(&queue.children) => (Record::NONE, None),
            None => self.session.read_record(&self.lock, self.bound).await?,
        };
        let (fence, write) = fence::grant(record, queue.node.czxid, request)?;
        let holder = self.request.holder.clone();
        let grant = Grant { fence, span: request.span, depth: 1, explicit: write.is_some(), holder };
        if let Some(record) = write {
            let own = (queue.node.name.as_str(), grant.value());
            self.session.write_record(&self.lock, record, version, own, self.bound).await?;
        }
        Ok(grant)
    }

    /// Gives up the place in the queue again: a try leaves nothing behind.
    async fn leave(&self, queue: &Queue, holder: &str) -> Result<Attempt> {
        let path = format!("{}/{holder}", self.lock);
        let asked = Box::pin(self.session.client.get_data(&path));
        self.undo(&queue.node).await?;
        let data = self.session.read(self.bound, asked).await;
        Ok(undone(data.ok().map(|(data, _)| value::holder(&data)), Duration::ZERO))
    }

    async fn leave_and_renew_directory(&self, queue: &Queue) -> Result<bool> {
        self.undo(&queue.node).await?;
        self.session.renew_directory(&self.lock, self.bound).await
    }

    /// Deletes the node of the claim, and forgets the claim when that is done. Until then it is known that the node may go
    /// at any time: whoever asks again with the same claim must not take it for a place in the queue.
    pub(crate) async fn undo(&self, node: &Node) -> Result<()> {
        self.session.update(self.token, |claimed| claimed.releasing = true);
        self.delete(&node.name).await.map_err(|failure| self.doubtful(&failure))?;
        self.session.claims().remove(self.token);
        Ok(())
    }

    /// Deletes a node of the lock; that it is not there is as good.
    pub(crate) async fn delete(&self, node: &str) -> Result<(), Failure> {
        self.session.delete(&format!("{}/{node}", self.lock), self.bound).await.map(drop)
    }

    pub(crate) async fn list(&self) -> Result<Vec<String>, Failure> {
        self.session.list(&self.lock, self.bound).await
    }

    /// The error of a request after which the claim may have a node.
    pub(crate) fn doubtful(&self, failure: &Failure) -> Error {
        error::map(failure, Sent::Yes)
    }

    /// The node of the claim was deleted by somebody else, who may delete again what has this token.
    fn vanished(&self) -> Result<Attempt> {
        self.session.claims().remove(self.token);
        if self.request.wait.is_zero() {
            // Who only tries would take another answer for a no.
            return Err(Error::new(ErrorKind::Unavailable, "the node of the claim was deleted"));
        }
        Ok(undone(None, Duration::ZERO))
    }
}

/// Waits for a moment; for ever, if it is beyond the clock's range.
async fn until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

/// The lock is another's; when to ask again.
fn contention(holder: Option<HolderInfo>, retry_after: Duration) -> Contention {
    Contention { retry_after: Some(retry_after), holder, burnt: false }
}

/// The same when the node of the claim was deleted: its token is burnt.
fn undone(holder: Option<HolderInfo>, retry_after: Duration) -> Attempt {
    Attempt::Contended(Contention { burnt: true, ..contention(holder, retry_after) })
}

#[cfg(test)]
mod tests {
    use lockkit_core::{Claim, Fence, FenceRequest, LockKey, LockStore, Locker, Mode, Order};
    use lockkit_testkit::servers::{ZooKeeperFlavor, ZooKeeperServer};

    use super::*;
    use crate::{ZkConfig, ZkStore};

    fn request(floor: u64) -> AcquireRequest {
        AcquireRequest {
            claim: Claim {
                key: LockKey::new("a").expect("name"),
                token: Token::random().expect("random"),
                mode: Mode::Exclusive,
            },
            ttl: Duration::from_secs(10),
            wait: Duration::ZERO,
            order: Order::Any,
            fence: FenceRequest { floor: Fence::new(floor), ..FenceRequest::default() },
            holder: HolderInfo::new("test"),
            from: None,
        }
    }

    /// In this build the numbers end at 40, so the directory is made anew again and again, once with a fence record.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_directory_whose_numbers_run_out_is_made_anew() {
        let server = ZooKeeperServer::start(ZooKeeperFlavor::Installed).await.expect("ZooKeeper is required");
        let config = ZkConfig::new([server.addr().to_string()]);
        let store = ZkStore::connect(config.clone()).await.expect("connect");
        let mut last = Fence::NONE;
        for round in 0..130 {
            let request = request(if round == 70 { 1 << 52 } else { 0 });
            let Attempt::Granted(hold) = store.acquire(&request).await.expect("acquire") else { panic!("it is free") };
            assert!(hold.fence > last, "{} came after {last}", hold.fence);
            last = hold.fence;
            store.release(&request.claim).await.expect("release");
        }
        let (mut crowd, highest) = (Vec::new(), Arc::new(std::sync::Mutex::new(last)));
        for _ in 0..3 {
            let locker = Locker::builder(ZkStore::connect(config.clone()).await.expect("connect")).build();
            let highest = Arc::clone(&highest);
            crowd.push(tokio::spawn(async move {
                for _ in 0..60 {
                    let guard = locker.lock("a").acquire().await.expect("acquire");
                    let before = std::mem::replace(&mut *highest.lock().expect("unpoisoned"), guard.fence());
                    assert!(guard.fence() > before, "{} came after {before}", guard.fence());
                    _ = guard.release().await.expect("release");
                }
            }));
        }
        for member in crowd {
            member.await.expect("no panic");
        }
    }
}
