//! Getting a place in the queue, waiting in it, and being granted the lock.

use std::{sync::Arc, time::Duration};

use lockkit_core::{AcquireRequest, Attempt, Contention, Error, ErrorKind, Hold, HolderInfo, Moment, Result, Token};
use tokio::time::{Instant, timeout_at};
use zookeeper_client::{self as zk, CreateMode, OneshotWatcher, Stat};

use crate::{
    alone::{Ask, Watch},
    error::{self, Failure, Sent},
    fence::{self, Record},
    name::{self, LOCK},
    queue::{self, Place},
    session::{self, Claimed, Grant, Node, Session, Stage},
    value::{self, Value},
};

/// How often a directory is made again that vanished under our hands: the servers remove empty ones now and then.
const DIRECTORY_TRIES: u32 = 3;

/// When to ask again for a lock whose directory has to become empty first.
const WRAP_PAUSE: Duration = Duration::from_millis(20);

/// One call of `acquire`.
pub(crate) struct Acquisition<'a> {
    session: &'a Arc<Session>,
    request: &'a AcquireRequest,
    token: &'a Token,
    /// The path of the lock.
    lock: String,
    /// What the names of the claim's nodes begin with.
    protection: String,
    /// The bound on one operation.
    bound: Duration,
    /// The moment before the last request that could tell that the lock is ours.
    asked: Moment,
}

/// The claim's node and all children of the lock, as seen together.
struct Queue {
    node: Node,
    children: Vec<String>,
}

/// How a wait for the node before ended.
enum Woken {
    /// Something changed.
    Changed,
    /// The node before was the holder's, it is gone, and nothing has changed since the queue was read but that.
    Next,
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
    pub(crate) async fn run(mut self) -> Result<Attempt> {
        let deadline = Instant::now() + self.request.wait;
        let mut queue = self.enter().await?;
        while !queue::is_safe(queue.node.sequence) {
            // Its sequence numbers are about to wrap, so the lock's directory is made anew. That takes a moment in which
            // nobody is in the queue; until it comes nobody of ours enters.
            if !self.leave_and_renew_directory(&queue).await? {
                return Ok(again(None, WRAP_PAUSE));
            }
            queue = self.line_up().await?;
        }
        loop {
            match queue::place(&queue.children, &queue.node.name) {
                Place::First => return self.grant(queue, None).await.map(Attempt::Granted),
                Place::Absent => return Err(self.vanished()),
                Place::Behind { holder, .. } if self.request.wait.is_zero() => return self.leave(&queue, holder).await,
                Place::Behind { before, holder } => {
                    match self.wait(&queue, before, before == holder, deadline).await? {
                        Woken::Changed => {}
                        Woken::Next => {
                            self.asked = self.session.now();
                            return self.grant(queue, Some(Record::NONE)).await.map(Attempt::Granted);
                        }
                        Woken::Over => return Ok(again(None, Duration::ZERO)),
                    }
                }
            }
            self.asked = self.session.now();
            queue.children = self.list().await.map_err(|failure| self.doubtful(&failure))?;
        }
    }

    /// Finds the claim's place in the queue, or takes one.
    async fn enter(&mut self) -> Result<Queue> {
        match self.session.claimed(self.token).map(|claimed| claimed.stage) {
            Some(Stage::Queued(node) | Stage::Held(node, _)) => {
                let children = self.list().await.map_err(|failure| self.doubtful(&failure))?;
                if children.contains(&node.name) {
                    return Ok(Queue { node, children });
                }
            }
            Some(Stage::Asked) => {
                if let Some(queue) = self.find().await.map_err(|failure| self.doubtful(&failure))? {
                    return Ok(queue);
                }
            }
            Some(Stage::Gone) | None => {}
        }
        self.line_up().await
    }

    /// Makes the claim's node and reads the queue, in one round trip.
    async fn line_up(&mut self) -> Result<Queue> {
        let lock = self.lock.clone();
        let asked = Claimed { lock, stage: Stage::Asked, watched: false, releasing: false };
        self.session.claims().insert(*self.token, asked);
        for _ in 0..DIRECTORY_TRIES {
            match self.create_and_list().await {
                Err(failure) if failure.is(&zk::Error::NoNode) => self.session.make_directory(&self.lock).await?,
                Err(failure) => {
                    if failure.is_answer() {
                        self.session.claims().remove(self.token);
                    }
                    return Err(self.doubtful(&failure));
                }
                Ok(queue) => return self.without_strays(queue).await,
            }
        }
        self.session.claims().remove(self.token);
        Err(Error::new(ErrorKind::Unavailable, "the directory of the lock vanishes as soon as it is made"))
    }

    /// Makes the claim's node and finds out what else is in the queue.
    async fn create_and_list(&mut self) -> Result<Queue, Failure> {
        let prefix = format!("{}/{}{LOCK}", self.lock, self.protection);
        let session = self.session;
        let data = Value { depth: 1, span: self.request.fence.span, fence: None, holder: self.request.holder.clone() };
        let options = session.options(CreateMode::EphemeralSequential);
        let ask = session::lock(&session.alone).ask(&self.lock);
        self.asked = session.now();
        // All are on their way before any is awaited; the servers answer what is read as of after what is written.
        let created = Box::pin(session.client.create(&prefix, data.text().as_bytes(), &options));
        let listed = (ask != Ask::Nothing).then(|| Box::pin(session.client.list_children(&self.lock)));
        let watched = (ask == Ask::ListAndWatch).then(|| Box::pin(session.client.check_and_watch_stat(&self.lock)));
        let (stat, sequence) = session.write(self.asked, self.bound, created).await?;
        if !session.owns(stat.ephemeral_owner) {
            // A reconnect ended in another session: what we know belongs to the old one.
            session.end();
            return Err(Failure::Driver(zk::Error::SessionExpired));
        }
        let name = format!("{}{LOCK}{sequence}", self.protection);
        let node = Node { name, czxid: stat.czxid, sequence: sequence.into_i64() };
        session.update(self.token, |claimed| claimed.stage = Stage::Queued(node.clone()));
        let children = match listed {
            Some(listed) => session.read(self.asked, self.bound, listed).await?,
            None if session::lock(&session.alone).confirm(&self.lock, node.sequence) => {
                let children = vec![node.name.clone()];
                return Ok(Queue { node, children });
            }
            None => self.list().await?,
        };
        let watch = match watched {
            Some(watched) => session.read(self.asked, self.bound, watched).await?.into(),
            None => None,
        };
        self.learn(&node, &children, watch);
        Ok(Queue { node, children })
    }

    /// Takes note of whether the new node was alone in the directory, and of the watch on that, if it is the directory
    /// in which the node was made: it must be the older of the two.
    fn learn(&self, node: &Node, children: &[String], watch: Option<(Option<Stat>, OneshotWatcher)>) {
        let mut alone = session::lock(&self.session.alone);
        if children.len() != 1 || children[0] != node.name {
            return alone.forget(&self.lock);
        }
        let watch = watch.filter(|(stat, _)| stat.is_some_and(|stat| stat.czxid < node.czxid));
        let watch = watch.map(|(_, watcher)| Box::pin(async move { drop(watcher.changed().await) }) as Watch);
        alone.seen(&self.lock, node.sequence, watch);
    }

    /// Deletes what an earlier attempt of this claim left behind, in another session or in this one: its request may
    /// have been carried out long after we gave up on it.
    async fn without_strays(&mut self, mut queue: Queue) -> Result<Queue> {
        let own = &queue.node.name;
        let strays: Vec<_> =
            queue::of_claim(&queue.children, &self.protection).filter(|node| node != own).map(str::to_owned).collect();
        for stray in &strays {
            self.delete(stray).await.map_err(|failure| self.doubtful(&failure))?;
        }
        queue.children.retain(|child| !strays.contains(child));
        Ok(queue)
    }

    /// Looks for the node of a claim whose creation was not answered. A node with the claim's name that another session
    /// made is none of ours: it ends with that session, whatever we believe (CURATOR-498).
    async fn find(&mut self) -> Result<Option<Queue>, Failure> {
        self.asked = self.session.now();
        let children = self.session.list_settled(&self.lock, self.bound).await?;
        let named: Vec<_> = queue::of_claim(&children, &self.protection).map(str::to_owned).collect();
        for name in named {
            let path = format!("{}/{name}", self.lock);
            let stat = self.session.client.check_stat(&path);
            let Some(stat) = self.session.read(self.session.now(), self.bound, Box::pin(stat)).await? else { continue };
            if !self.session.owns(stat.ephemeral_owner) {
                self.delete(&name).await?;
                continue;
            }
            let Some(sequence) = queue::sequence(&name) else { continue };
            let node = Node { name, czxid: stat.czxid, sequence };
            self.session.update(self.token, |claimed| claimed.stage = Stage::Queued(node.clone()));
            return Ok(Some(Queue { node, children }));
        }
        Ok(None)
    }

    /// Waits for the node before ours to change or go.
    ///
    /// When the holder goes and we are the next, the lock is ours without another look, if nothing else can have
    /// changed. There are two such things, and both would be told of before the end of the holder's node, because
    /// the servers and the driver keep the order of events:
    /// - our own node was deleted; there is a watch on it too;
    /// - the holder raised the fences of the lock; it says so in its own node.
    async fn wait(&self, queue: &Queue, before: &str, is_holder: bool, deadline: Instant) -> Result<Woken> {
        let (client, sent) = (&self.session.client, self.session.now());
        let (path, own_path) = (format!("{}/{before}", self.lock), format!("{}/{}", self.lock, queue.node.name));
        let may_be_next = is_holder && !queue::has_record(&queue.children);
        let own = may_be_next.then(|| Box::pin(client.get_and_watch_data(&own_path)));
        let watched = Box::pin(client.get_and_watch_data(&path));
        let own = match own {
            Some(own) => Some(self.session.read(sent, self.bound, own).await),
            None => None,
        };
        let own = match own {
            None => None,
            Some(Ok((_, _, watcher))) => Some(watcher),
            Some(Err(failure)) if failure.is(&zk::Error::NoNode) => return Ok(Woken::Changed),
            Some(Err(failure)) => return Err(self.doubtful(&failure)),
        };
        let (data, _, watcher) = match self.session.read(sent, self.bound, watched).await {
            Ok(watched) => watched,
            Err(failure) if failure.is(&zk::Error::NoNode) => return Ok(Woken::Changed),
            Err(failure) => return Err(self.doubtful(&failure)),
        };
        let is_next = own.is_some() && Value::parse(&data).is_none_or(|value| value.fence.is_none());
        let own_changed = async {
            match own {
                Some(own) => own.changed().await,
                None => std::future::pending().await,
            }
        };
        let event = tokio::select! {
            biased;
            _ = own_changed => return Ok(Woken::Changed),
            event = timeout_at(deadline, watcher.changed()) => event,
            () = self.session.ended() => return Ok(Woken::Over),
        };
        match event {
            Ok(event) if event.event_type == zk::EventType::NodeDeleted && is_next => Ok(Woken::Next),
            Ok(event) if event.event_type == zk::EventType::Session => Ok(Woken::Over),
            Ok(_) => Ok(Woken::Changed),
            Err(_) => Ok(Woken::Over),
        }
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
        let sent = self.session.now();
        let asked = Box::pin(self.session.client.get_data(&path));
        self.delete(&queue.node.name).await.map_err(|failure| self.doubtful(&failure))?;
        self.session.claims().remove(self.token);
        let data = self.session.read(sent, self.bound, asked).await;
        Ok(again(data.ok().map(|(data, _)| value::holder(&data)), Duration::ZERO))
    }

    async fn leave_and_renew_directory(&self, queue: &Queue) -> Result<bool> {
        self.delete(&queue.node.name).await.map_err(|failure| self.doubtful(&failure))?;
        self.session.claims().remove(self.token);
        self.session.renew_directory(&self.lock, self.bound).await
    }

    /// Deletes a node of the lock; that it is not there is as good.
    async fn delete(&self, node: &str) -> Result<(), Failure> {
        self.session.delete(&format!("{}/{node}", self.lock), self.bound).await.map(drop)
    }

    async fn list(&self) -> Result<Vec<String>, Failure> {
        self.session.list(&self.lock, self.bound).await
    }

    /// The error of a request after which the claim may have a node.
    fn doubtful(&self, failure: &Failure) -> Error {
        error::map(failure, Sent::Yes)
    }

    /// The node of the claim was deleted by somebody else. Asking again makes a new one.
    fn vanished(&self) -> Error {
        self.session.claims().remove(self.token);
        Error::new(ErrorKind::Unavailable, "the node of the claim was deleted while it waited")
    }
}

/// The lock is another's; when to ask again.
fn again(holder: Option<HolderInfo>, retry_after: Duration) -> Attempt {
    Attempt::Contended(Contention { retry_after: Some(retry_after), holder })
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
