//! Finding or taking a claim's place in the queue.

use lockkit_core::{Effect, Error, ErrorKind, Result, store::unpoisoned};
use zookeeper_client::{self as zk, CreateMode, Stat};

use crate::{
    client::{
        claims::{Claimed, Node, Stage},
        uncontended::{QueueRequest, Watch},
        watched::{Use, Watched, changed},
    },
    store::attempt::{Acquisition, QueueView},
    wire::{
        error::{Failure, doubtful},
        name, queue,
        value::Value,
    },
};

/// How often a directory is made again that vanished under our hands: the servers remove empty ones now and then.
const DIRECTORY_TRIES: u32 = 3;

impl Acquisition<'_> {
    /// Finds the claim's place in the queue, or takes one. `None` if its node was deleted, or is about to be, or if the claim was
    /// released meanwhile.
    pub(crate) async fn enter(&mut self) -> Result<Option<QueueView>> {
        match self.session.claimed(self.token) {
            Some(Claimed { stage: Stage::Queued(node) | Stage::Held(node, _), releasing: true, .. }) => {
                // The answer to an earlier deletion was not heard. The server may show the node still.
                self.undo(&node).await?;
                return Ok(None);
            }
            Some(Claimed { stage: Stage::Queued(node) | Stage::Held(node, _), .. }) => {
                let children = self.list().await.map_err(|failure| doubtful(&failure))?;
                return Ok(children.contains(&node.name).then_some(QueueView { node, children }));
            }
            Some(Claimed { stage: Stage::Gone, .. }) => return Ok(None),
            Some(Claimed { stage: Stage::Asked, .. }) => {
                if let Some(queue) = self.find().await.map_err(|failure| doubtful(&failure))? {
                    return self.without_strays(queue).await.map(Some);
                }
                if self.session.claimed(self.token).is_none() {
                    return Ok(None);
                }
                // It may still be carried out, beside the one that is asked for now.
                self.session.is_in_doubt();
            }
            None => {
                let asked = Claimed::asked(self.lock.clone(), self.request.fence.span);
                self.session.claims().insert(*self.token, asked);
            }
        }
        self.line_up().await
    }

    /// Makes the node of a claim that is known, and reads the queue, in one round trip. `None` if the claim was released before all was answered.
    pub(crate) async fn line_up(&mut self) -> Result<Option<QueueView>> {
        for _ in 0..DIRECTORY_TRIES {
            // So that no node is made after the answer to a release, which came while the directory was made.
            if self.session.claimed(self.token).is_none() {
                return Ok(None);
            }
            match self.create_and_list().await {
                Ok(Some(queue)) => return self.without_strays(queue).await.map(Some),
                Ok(None) => return Ok(None),
                Err(failure) if failure.is(&zk::Error::NoNode) => {
                    self.session.make_lock(&self.lock, self.bound).await.map_err(|e| self.nothing_made(e))?;
                }
                Err(failure) => return Err(self.nothing_made(doubtful(&failure))),
            }
        }
        let vanishes = "the directory of the lock vanishes as soon as it is made";
        Err(self.nothing_made(Error::new(ErrorKind::Unavailable, vanishes)))
    }

    /// Forgets the claim if the error says that no node was made; else takes note that one may have been.
    fn nothing_made(&self, error: Error) -> Error {
        let is_made = self.session.claimed(self.token).is_some_and(|claimed| !matches!(claimed.stage, Stage::Asked));
        match error.effect() {
            // Something behind the creation was refused.
            Effect::None if is_made => {}
            Effect::None => _ = self.session.claims().remove(self.token),
            Effect::Unknown => self.session.is_in_doubt(),
        }
        error
    }

    /// Makes the claim's node and finds out what else is in the queue. `None` if the claim was released while nobody polled this.
    async fn create_and_list(&mut self) -> Result<Option<QueueView>, Failure> {
        let mark = name::mark(self.request.claim.mode);
        let prefix = format!("{}/{}{mark}", self.lock, self.protection);
        let session = self.session;
        let data = Value { depth: 1, span: self.request.fence.span, fence: None, holder: self.request.holder.clone() };
        let options = session.options(CreateMode::EphemeralSequential);
        let ask = unpoisoned(&session.uncontended).ask(&self.lock);
        self.asked = session.now();
        // All are on their way before any is awaited; the servers answer what is read as of after what is written.
        let created = Box::pin(session.client.create(&prefix, data.text().as_bytes(), &options));
        let listed = (ask != QueueRequest::Nothing).then(|| Box::pin(session.client.list_children(&self.lock)));
        let watch = || session.client.check_and_watch_stat(&self.lock);
        let watched =
            (ask == QueueRequest::ListAndWatch).then(|| session.watches.ask(&self.lock, Use::Sparing, watch)).flatten();
        let (stat, sequence) = session.lead(self.asked, self.bound, created).await?;
        if !session.owns(stat.ephemeral_owner) {
            return Err(session.replaced());
        }
        session.wrote(self.asked);
        let name = format!("{}{mark}{sequence}", self.protection);
        let node = Node { name, czxid: stat.czxid, sequence: sequence.into_i64() };
        self.leader = Some(stat.ctime);
        if !self.takes_place(&node) {
            self.delete(&node.name).await?;
            return Ok(None);
        }
        let children = match listed {
            Some(listed) => session.read(self.bound, listed).await?,
            None if unpoisoned(&session.uncontended).confirm(&self.lock, node.sequence) => {
                let children = vec![node.name.clone()];
                return Ok(Some(QueueView { node, children }));
            }
            None => self.list().await?,
        };
        let watch = match watched {
            Some(watched) => session.read(self.bound, watched).await?.into(),
            None => None,
        };
        self.learn(&node, &children, watch);
        Ok(Some(QueueView { node, children }))
    }

    /// Takes note of the claim's node, unless the claim was released while nobody polled this; tells whether it was not. That a
    /// session which is over knows no claim is no sign of a release, and it has to be asked for nothing more: nobody need answer.
    fn takes_place(&self, node: &Node) -> bool {
        self.session.update(self.token, |claimed| claimed.stage = Stage::Queued(node.clone())) || self.session.is_over()
    }

    /// Takes note of whether the new node was alone in the directory, and of the watch on that, if it is the directory
    /// in which the node was made: it must be the older of the two.
    fn learn(&self, node: &Node, children: &[String], watch: Option<(Option<Stat>, Watched)>) {
        let mut alone = unpoisoned(&self.session.uncontended);
        if children.len() != 1 || children[0] != node.name {
            return alone.forget(&self.lock);
        }
        let watch = watch.filter(|(stat, _)| stat.is_some_and(|stat| stat.czxid < node.czxid));
        let watch = watch.map(|(_, watch)| Box::pin(async move { _ = changed(watch).await }) as Watch);
        alone.seen(&self.lock, node.sequence, watch);
    }

    /// Deletes what an earlier attempt of this claim left behind, in another session or in this one: its request may
    /// have been carried out long after we gave up on it.
    async fn without_strays(&mut self, mut queue: QueueView) -> Result<QueueView> {
        let own = &queue.node.name;
        let strays: Vec<_> =
            queue::of_claim(&queue.children, &self.protection).filter(|node| node != own).map(str::to_owned).collect();
        for stray in &strays {
            self.delete(stray).await.map_err(|failure| doubtful(&failure))?;
        }
        queue.children.retain(|child| !strays.contains(child));
        Ok(queue)
    }

    /// Looks for the node of a claim whose creation was not answered. A node with the claim's name that another session
    /// made is none of ours: it ends with that session, whatever we believe (CURATOR-498).
    async fn find(&mut self) -> Result<Option<QueueView>, Failure> {
        self.asked = self.session.now();
        let children = self.session.list_settled(&self.lock, self.bound).await?;
        let named: Vec<_> = queue::of_claim(&children, &self.protection).map(str::to_owned).collect();
        for name in named {
            let path = format!("{}/{name}", self.lock);
            let stat = self.session.client.check_stat(&path);
            let Some(stat) = self.session.read(self.bound, Box::pin(stat)).await? else { continue };
            if !self.session.owns(stat.ephemeral_owner) {
                continue;
            }
            let Some(sequence) = queue::sequence(&name) else { continue };
            let node = Node { name, czxid: stat.czxid, sequence };
            if !self.takes_place(&node) {
                self.delete(&node.name).await?;
                continue;
            }
            return Ok(Some(QueueView { node, children }));
        }
        Ok(None)
    }
}
