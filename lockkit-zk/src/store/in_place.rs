//! Taking the place of a lease: what is known of the one that is to go, and that it goes in the same step.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use lockkit_core::{
    AcquireRequest, Attempt, Contention, Effect, Fence, HolderInfo, Mode, Result, Token, store::unpoisoned,
};
use zookeeper_client::{self as zk, MultiWriter};

use crate::{
    client::{claims::Claimed, session::Session},
    store::ZkStore,
    wire::{
        error::lasting,
        fence::{self, FenceRecord},
        name,
        queue::{self, Position},
        value::Value,
        window,
    },
};

/// How often a lock is looked at whose nodes change meanwhile.
pub(super) const LOOKS: u32 = 5;

/// A request for the place of the lease with the token `from`.
pub(super) struct Replacement<'a> {
    store: &'a ZkStore,
    pub(super) session: &'a Arc<Session>,
    pub(super) request: &'a AcquireRequest,
    pub(super) from: Token,
    pub(super) lock: String,
    /// The bound on one operation.
    pub(super) bound: Duration,
    /// What this session knows of the lease.
    known: Option<Claimed>,
    /// Whether anything was sent that may end it.
    is_sent: AtomicBool,
}

/// The lease whose place is taken.
pub(super) struct Giver {
    pub(super) node: String,
    /// The number of the transaction that made its node, or if it took the place of another itself, one no later than that of the first
    /// that had the place: those that wait have the next numbers.
    pub(super) czxid: i64,
    /// The first fence that is not its own.
    after: Fence,
    record: FenceRecord,
    /// The version of the fence record's node, if there is one.
    version: Option<i32>,
    /// The version of its own node: whoever raises the fences of the lock writes to that, too.
    seen: i32,
}

impl<'a> Replacement<'a> {
    /// Begins: the node of the lease may go at any time from here on.
    pub(super) fn begin(
        store: &'a ZkStore,
        session: &'a Arc<Session>,
        request: &'a AcquireRequest,
        from: Token,
        bound: Duration,
    ) -> Self {
        let (lock, known) = (session.names.lock(&request.claim.key), session.begin_release(&from));
        Self { store, session, request, from, lock, bound, known, is_sent: AtomicBool::new(false) }
    }

    /// Takes note of what became of the lease, unless that was [refused](Self::refuse), which has done so.
    pub(super) fn end(&self, answer: &Result<Attempt>) {
        match answer {
            Ok(Attempt::Granted(_)) => self.is_over(),
            Err(error) if error.effect() == Effect::None => self.goes_on(),
            Ok(Attempt::Contended(_)) | Err(_) => {}
        }
    }

    fn is_over(&self) {
        let session = self.session;
        let left = session.claims().remove(&self.from);
        if left.is_some() {
            // Its holder may be another task of this process, which does not know.
            session.alarm.raise(self.from);
        }
        if left.is_some_and(|left| left.node() != self.known.as_ref().and_then(Claimed::node)) {
            session.is_in_doubt();
        }
        self.store.sessions.forget(&self.from);
        // Its node was not deleted as one that nobody stood behind.
        unpoisoned(&session.uncontended).forget(&self.lock);
    }

    /// It is as it was before.
    fn goes_on(&self) {
        let before = self.known.as_ref().is_some_and(|claimed| claimed.releasing);
        self.session.update(&self.from, |claimed| claimed.releasing = before);
    }

    pub(super) async fn list(&self) -> Result<Vec<String>> {
        self.session.list_settled(&self.lock, self.bound).await.map_err(|failure| lasting(&failure))
    }

    /// The fence of the grant, and the record that is to be written with it, if it changes.
    pub(super) fn fence(&self, giver: &Giver) -> Result<(Fence, Option<FenceRecord>)> {
        fence::in_place(giver.record, giver.czxid, giver.after, &self.request.fence)
    }

    /// Puts into a transaction that the lease ends, behind what takes its place. Servers show transactions step by step: so none of them
    /// shows a free lock.
    pub(super) fn add_end(
        &self,
        all: &mut MultiWriter<'_>,
        giver: &Giver,
        fence: Fence,
        write: Option<FenceRecord>,
    ) -> Result<(), zk::Error> {
        self.is_sent.store(true, Ordering::Relaxed);
        if let Some(record) = write {
            self.session.add_fence_record(all, &self.lock, record, giver.version)?;
        }
        // Who waits behind it may take its mere end for the news that the lock is free. One that says its fence is not taken for such a
        // node, however late it is read.
        let node = format!("{}/{}", self.lock, giver.node);
        let value = Value { depth: 1, span: 1, fence: Some(fence), holder: self.request.holder.clone() };
        all.add_set_data(&node, value.text().as_bytes(), Some(giver.seen))?;
        all.add_delete(&node, None)
    }

    /// The lease as the servers know it; `None` if it does not have the lock.
    pub(super) async fn giver(&self, children: &[String]) -> Result<Option<Giver>> {
        let holds =
            |node: &&str| name::mode(node) == Mode::Exclusive && queue::place(children, node) == Position::Holds;
        let Some(node) = queue::of_claim(children, &name::protection(&self.from)).find(holds) else { return Ok(None) };
        if window::is_kept(children) {
            // It is the first in the queue, and waits.
            return Ok(None);
        }
        let path = format!("{}/{node}", self.lock);
        let read = self.session.data(&path, self.bound).await;
        let Some((data, stat)) = read.map_err(|failure| lasting(&failure))? else { return Ok(None) };
        let value = Value::parse(&data);
        // Whoever writes the record writes the node in the same transaction. So the record is read after the node, and a later raise fails the
        // take-over by the version of the node. The list of children may be older than a raise, and of two writes of a holder at once the one that
        // knows of no raise may come last: so neither of them tells that there is no record.
        let (record, of_record) = self.session.find_fence_record(&self.lock, self.bound).await?;
        // Where those of the next node begin, its own have ended.
        let next = record.natural(stat.czxid.saturating_add(1)).unwrap_or(Fence::NONE);
        let is_raised = of_record.is_some_and(|of_record| of_record.mzxid > stat.czxid);
        let (czxid, after) = match value {
            // If its holder has raised the fences of the lock, the record is newer than its node, and the raise ends below the fences of the next
            // node. If not, the fences behind its own are free. Those of the next node would be, too, but each hand-over would skip 128 for
            // each transaction in between.
            Some(Value { fence: Some(fence), span, .. }) => {
                (fence::place_of(record, fence, span).min(stat.czxid), fence.offset(span))
            }
            Some(Value { span, .. }) => {
                (stat.czxid, record.natural(stat.czxid).map_or(next, |fence| fence.offset(span)))
            }
            // What others wrote into it says nothing of its fences, nor whether it took the place of another, behind which others wait.
            None => (0, next),
        };
        let after = if is_raised { after.max(next) } else { after };
        let version = of_record.map(|of_record| of_record.version);
        Ok(Some(Giver { node: node.to_owned(), czxid, after, record, version, seen: stat.version }))
    }

    /// Another has the lock, or nobody. The lease is over if it has no node. With one it may be a reader's, or a claim that waits.
    ///
    /// A holder is told of without a name: nobody asks for that.
    pub(super) fn refuse(&self, children: &[String]) -> Attempt {
        match queue::of_claim(children, &name::protection(&self.from)).next() {
            None => self.is_over(),
            Some(_) => self.goes_on(),
        }
        let is_held = window::is_kept(children) || !queue::contenders(children).is_empty();
        let holder = is_held.then(|| HolderInfo::new(""));
        Attempt::Contended(Contention { holder, ..Contention::default() })
    }
}

impl Drop for Replacement<'_> {
    fn drop(&mut self) {
        // The lease goes on. Its holder may be another task of this process.
        if !self.is_sent.load(Ordering::Relaxed) {
            self.goes_on();
        }
    }
}
