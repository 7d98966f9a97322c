//! What this client knows of its claims: which attempt is the present one, what it was granted, and what is still under
//! way for it.
//!
//! # Tokens
//! The core may repeat a claim after `Contended` or an error (rule R1), but by then the attempt was undone: releases with
//! its token are under way. One that arrives late, over a connection given up long ago, would take a node away from the
//! next attempt if that had the same token (rule R2). So a repeated claim keeps its token only if every release of the
//! attempts before was answered. Otherwise the nodes get to see a new token, the attempt's own, and what the nodes show
//! is translated back.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use lockkit_core::{Claim, Fence, HolderInfo, Moment, Result, Token};
use tokio::{sync::Notify, time::timeout};

/// How many claims are added before those are dropped that nobody can want any more.
const SWEEP: usize = 4096;
/// How long a claim is remembered that was given up with a release unanswered.
const REMEMBER: Duration = Duration::from_secs(600);

/// All claims of one client.
#[derive(Debug, Default)]
pub(crate) struct Book(Mutex<Pages>);

#[derive(Debug, Default)]
struct Pages {
    /// By the token of the claim as the core knows it.
    entries: HashMap<Token, Arc<Entry>>,
    /// From the token that the nodes know to the claim's own, where they differ.
    aliases: HashMap<Token, Token>,
    added: usize,
}

/// One attempt to get a lease, and the lease if it succeeded.
#[derive(Debug)]
pub(crate) struct Entry {
    /// The claim as the nodes know it.
    pub(crate) claim: Claim,
    pub(crate) holder: HolderInfo,
    pub(crate) ttl: Duration,
    known_as: Token,
    begun: Moment,
    /// Failed, released or lost: whatever a node still grants is to be released.
    over: AtomicBool,
    grant: Mutex<Option<Grant>>,
    errands: AtomicUsize,
    in_doubt: AtomicBool,
    /// It was refused, and what is still under way for it is so only at nodes that do not answer in time.
    stalled: AtomicBool,
    settled: Notify,
}

/// What a majority granted.
#[derive(Clone, Debug)]
pub(crate) struct Grant {
    pub(crate) fence: Fence,
    pub(crate) span: u32,
    pub(crate) until: Moment,
    pub(crate) depth: u32,
    /// What each node granted.
    pub(crate) nodes: Vec<NodeGrant>,
}

/// What a node granted for a lease.
///
/// A grant beyond the lease's fence may have come after another client had the lock, if nodes lost leases in between.
/// It is on probation until a renewal that was sent after it succeeds without it: then nobody can have had the lock.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct NodeGrant {
    /// The grant that counts.
    pub(crate) counts: Option<Fence>,
    pub(crate) on_probation: Option<Fence>,
}

/// What [`Book::begin`] finds.
pub(crate) enum Begun {
    /// The claim is held, as far as is known here.
    Held,
    /// A new attempt.
    Attempt(Arc<Entry>),
}

impl Book {
    /// Opens an attempt for a claim, waiting up to `patience` for the releases of the one before, unless it stalled.
    pub(crate) async fn begin(
        &self,
        claim: &Claim,
        holder: &HolderInfo,
        ttl: Duration,
        now: Moment,
        patience: Duration,
    ) -> Result<Begun> {
        let mut claim_at_nodes = claim.clone();
        if let Some(before) = self.get(&claim.token) {
            if before.grant().is_some() {
                return Ok(Begun::Held);
            }
            claim_at_nodes.token = before.claim.token;
            if !before.is_over() || !before.is_clean(patience).await {
                claim_at_nodes.token = Token::random()?;
            }
        }
        let entry = Arc::new(Entry {
            claim: claim_at_nodes,
            holder: holder.clone(),
            ttl,
            known_as: claim.token,
            begun: now,
            over: AtomicBool::new(false),
            grant: Mutex::default(),
            errands: AtomicUsize::new(0),
            in_doubt: AtomicBool::new(false),
            stalled: AtomicBool::new(false),
            settled: Notify::new(),
        });
        self.pages().add(&entry, now);
        Ok(Begun::Attempt(entry))
    }

    /// The present attempt of a claim.
    pub(crate) fn get(&self, token: &Token) -> Option<Arc<Entry>> {
        self.pages().entries.get(token).map(Arc::clone)
    }

    /// Ends a claim: whatever is granted for it from now on is released. It is remembered until it is
    /// [forgotten](Self::forget), for whoever has to release it again.
    pub(crate) fn end(&self, token: &Token) -> Option<Arc<Entry>> {
        let entry = self.get(token)?;
        entry.give_up();
        Some(entry)
    }

    /// Drops an attempt that left nothing behind, unless it is not the present one any more.
    pub(crate) fn forget(&self, entry: &Arc<Entry>) {
        let mut pages = self.pages();
        if pages.entries.get(&entry.known_as).is_some_and(|present| Arc::ptr_eq(present, entry)) {
            pages.entries.remove(&entry.known_as);
            pages.aliases.remove(&entry.claim.token);
        }
    }

    /// The token that this client's user knows, for one that nodes show.
    pub(crate) fn translate(&self, token: Token) -> Token {
        self.pages().aliases.get(&token).copied().unwrap_or(token)
    }

    fn pages(&self) -> MutexGuard<'_, Pages> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pages {
    fn add(&mut self, entry: &Arc<Entry>, now: Moment) {
        self.added += 1;
        if self.added >= SWEEP.max(self.entries.len()) {
            self.added = 0;
            self.entries.retain(|_, entry| !entry.is_stale(now));
            let entries = &self.entries;
            self.aliases.retain(|_, known_as| entries.contains_key(known_as));
        }
        if let Some(before) = self.entries.insert(entry.known_as, Arc::clone(entry)) {
            self.aliases.remove(&before.claim.token);
        }
        if entry.claim.token != entry.known_as {
            self.aliases.insert(entry.claim.token, entry.known_as);
        }
    }
}

impl Entry {
    pub(crate) fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    /// The attempt failed, or what it was granted is over.
    pub(crate) fn give_up(&self) {
        self.over.store(true, Ordering::Release);
    }

    pub(crate) fn grant(&self) -> Option<Grant> {
        if self.is_over() { None } else { self.grants().clone() }
    }

    /// Whether it never was a lease: no majority was seen to grant it, so nobody ever worked under it.
    pub(crate) fn is_unused(&self) -> bool {
        self.grants().is_none()
    }

    pub(crate) fn granted(&self, grant: Grant) {
        *self.grants() = Some(grant);
    }

    /// Records a renewal by a majority. What was on probation when it was sent counts from now on.
    pub(crate) fn renewed(&self, until: Moment, depth: u32, when_sent: &Grant) {
        if let Some(grant) = &mut *self.grants() {
            grant.until = grant.until.max(until);
            grant.depth = depth;
            for (now, then) in grant.nodes.iter_mut().zip(&when_sent.nodes) {
                // Not what came while the renewal was under way: the answers may be older than that.
                if then.on_probation.is_some() {
                    now.counts = then.on_probation;
                    now.on_probation = now.on_probation.filter(|grant| Some(*grant) != then.on_probation);
                }
            }
        }
    }

    /// Records what a node granted.
    pub(crate) fn note(&self, node: usize, fence: Fence) {
        if let Some(grant) = &mut *self.grants() {
            let here = &mut grant.nodes[node];
            if fence <= grant.fence {
                // Whoever had the lock in between would have left a higher number there.
                here.counts = Some(fence);
            } else if here.counts != Some(fence) {
                here.on_probation = Some(fence);
            }
        }
    }

    /// Something is under way for this attempt until the value is dropped.
    pub(crate) fn errand(self: &Arc<Self>) -> Errand {
        self.errands.fetch_add(1, Ordering::AcqRel);
        Errand { entry: Arc::clone(self), done: false }
    }

    /// A release was sent that may not have arrived yet: the token must not be used again.
    pub(crate) fn doubt(&self) {
        self.in_doubt.store(true, Ordering::Release);
    }

    /// What is still under way will not end soon: nobody need wait for it.
    pub(crate) fn stall(&self) {
        self.stalled.store(true, Ordering::Release);
        self.settled.notify_waiters();
    }

    pub(crate) fn is_settled(&self) -> bool {
        self.errands.load(Ordering::Acquire) == 0 && !self.in_doubt.load(Ordering::Acquire)
    }

    /// Whether all that was sent for this attempt has been answered, or is within `patience`.
    async fn is_clean(&self, patience: Duration) -> bool {
        let all_answered = async {
            loop {
                let settled = self.settled.notified();
                let hopeless = self.in_doubt.load(Ordering::Acquire) || self.stalled.load(Ordering::Acquire);
                if hopeless || self.errands.load(Ordering::Acquire) == 0 {
                    return;
                }
                settled.await;
            }
        };
        timeout(patience, all_answered).await.is_ok() && self.is_settled()
    }

    fn is_stale(&self, now: Moment) -> bool {
        match &*self.grants() {
            Some(grant) => now > grant.until + self.ttl,
            None => self.is_over() && now.since(self.begun) > REMEMBER + self.ttl,
        }
    }

    fn grants(&self) -> MutexGuard<'_, Option<Grant>> {
        self.grant.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Something that is under way for an attempt. Dropped before it is done, it leaves the attempt in doubt.
pub(crate) struct Errand {
    entry: Arc<Entry>,
    done: bool,
}

impl Errand {
    /// All that was sent has been answered.
    pub(crate) fn done(mut self) {
        self.done = true;
    }
}

impl Drop for Errand {
    fn drop(&mut self) {
        if !self.done {
            self.entry.doubt();
        }
        self.entry.errands.fetch_sub(1, Ordering::AcqRel);
        self.entry.settled.notify_waiters();
    }
}
