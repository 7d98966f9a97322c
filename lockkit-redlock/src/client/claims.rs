//! What this client knows of its claims: what each was granted, and which are over.
//!
//! A claim that is over is burnt (rule R2): releases with its token may be under way, and one that arrives late, over a
//! connection given up long ago, would take a node away from a new attempt with the same token. It is remembered until all
//! nodes have answered its release, or until its lease must have lapsed, so that nobody asks with it again.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use lockkit_core::{
    AcquireRequest, Claim, Effect, Fence, HolderInfo, Moment, Release, Renewal, Result, Token, drift, store::unpoisoned,
};

/// How many claims are added before those are dropped that nobody can want any more.
const SWEEP: usize = 4096;

/// All claims of one client.
#[derive(Debug, Default)]
pub(crate) struct Claims(Mutex<Remembered>);

#[derive(Debug, Default)]
struct Remembered {
    entries: HashMap<Token, Arc<Entry>>,
    added: usize,
}

/// One attempt to get a lease, and the lease if it succeeded.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) claim: Claim,
    pub(crate) ttl: Duration,
    /// Failed, released or lost: whatever a node still grants is to be released.
    over: AtomicBool,
    grant: Mutex<Option<Grant>>,
    /// The nodes at which a release may arrive yet, see [`Burn`]: each as often as there are reasons.
    burnt_at: Mutex<Vec<usize>>,
    /// Nothing is left of it anywhere, but for what it is burnt by.
    is_done: AtomicBool,
    /// When the last of all leases that nodes were asked for must have lapsed, in nanoseconds.
    lapse: AtomicU64,
}

/// What a majority granted.
#[derive(Clone, Debug)]
pub(crate) struct Grant {
    pub(crate) fence: Fence,
    pub(crate) span: u32,
    pub(crate) until: Moment,
    pub(crate) depth: u32,
    /// The name that the last renewal gave, or the grant: a node that is healed shows it.
    pub(crate) holder: HolderInfo,
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

/// What [`Claims::begin`] finds.
pub(crate) enum Begun {
    /// The claim is held, as far as is known here.
    Held,
    /// It is over, or is being asked for.
    Burnt,
    /// A new attempt.
    Attempt(Arc<Entry>),
}

/// A claim that is being undone at one node, from before the first release is sent there.
///
/// If it is dropped without an end, or a release got no answer, then one may be under way for as long as it likes, and the claim
/// stays burnt at that node.
#[derive(Debug)]
pub(crate) struct Burn {
    entry: Arc<Entry>,
    node: usize,
    /// A release was sent that nobody has heard the answer of.
    in_doubt: bool,
}

impl Claims {
    /// Opens an attempt for a claim.
    pub(crate) fn begin(&self, request: &AcquireRequest, now: Moment) -> Begun {
        let mut remembered = unpoisoned(&self.0);
        match remembered.entries.get(&request.claim.token).filter(|before| !before.is_forgotten()) {
            Some(before) if before.grant().is_some() => Begun::Held,
            Some(_) => Begun::Burnt,
            None => Begun::Attempt(remembered.add(request, now)),
        }
    }

    pub(crate) fn get(&self, token: &Token) -> Option<Arc<Entry>> {
        unpoisoned(&self.0).entries.get(token).map(Arc::clone)
    }

    /// Ends a claim: whatever is granted for it from now on is released.
    pub(crate) fn end(&self, token: &Token) -> Option<Arc<Entry>> {
        let entry = self.get(token)?;
        entry.give_up();
        Some(entry)
    }

    /// Drops a claim of which nothing is left anywhere. If a release of it may arrive yet, it may be begun anew after that.
    pub(crate) fn forget(&self, entry: &Arc<Entry>) {
        entry.is_done.store(true, Ordering::Release);
        if entry.is_burnt() {
            return;
        }
        let mut remembered = unpoisoned(&self.0);
        if remembered.entries.get(&entry.claim.token).is_some_and(|present| Arc::ptr_eq(present, entry)) {
            remembered.entries.remove(&entry.claim.token);
        }
    }
}

impl Remembered {
    fn add(&mut self, request: &AcquireRequest, now: Moment) -> Arc<Entry> {
        self.added += 1;
        if self.added >= SWEEP.max(self.entries.len()) {
            self.added = 0;
            self.entries.retain(|_, entry| now < entry.lapse());
        }
        let entry = Arc::new(Entry {
            claim: request.claim.clone(),
            ttl: request.ttl,
            over: AtomicBool::new(false),
            grant: Mutex::default(),
            burnt_at: Mutex::default(),
            is_done: AtomicBool::new(false),
            lapse: AtomicU64::new(0),
        });
        entry.asked(now, request.ttl);
        self.entries.insert(request.claim.token, Arc::clone(&entry));
        entry
    }
}

impl Burn {
    pub(crate) fn new(entry: &Arc<Entry>, node: usize) -> Self {
        unpoisoned(&entry.burnt_at).push(node);
        Self { entry: Arc::clone(entry), node, in_doubt: false }
    }

    pub(crate) fn entry(&self) -> &Arc<Entry> {
        &self.entry
    }

    pub(crate) fn node(&self) -> usize {
        self.node
    }

    /// Nobody will hear the answer to a release that was sent.
    pub(crate) fn doubt(&mut self) {
        self.in_doubt = true;
    }

    /// A release ended so.
    pub(crate) fn hear(&mut self, answer: &Result<Release>) {
        self.in_doubt |= answer.as_ref().is_err_and(|error| error.effect() == Effect::Unknown);
    }

    /// The lease that was asked for must have lapsed, and no release will be sent any more.
    pub(crate) fn lapse(self) {
        // A request for it that arrives yet is welcome to a lease. To an attempt it is something that is left.
        if self.entry.grant().is_some() {
            self.end();
        }
    }

    /// A release was answered for good, so that none will be sent any more.
    pub(crate) fn end(self) {
        if !self.in_doubt {
            let mut burnt_at = unpoisoned(&self.entry.burnt_at);
            if let Some(at) = burnt_at.iter().position(|node| *node == self.node) {
                burnt_at.swap_remove(at);
            }
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
        if self.is_over() { None } else { unpoisoned(&self.grant).clone() }
    }

    /// Whether it never was a lease: no majority was seen to grant it, so nobody ever worked under it.
    pub(crate) fn is_unused(&self) -> bool {
        unpoisoned(&self.grant).is_none()
    }

    pub(crate) fn granted(&self, grant: Grant) {
        *unpoisoned(&self.grant) = Some(grant);
    }

    /// Records a renewal by a majority; `false` if the lease has ended before. What was on probation when it was sent counts
    /// from now on. Its answers may be heard late, and others have renewed the lease meanwhile.
    pub(crate) fn renewed(&self, now: Moment, until: Moment, renewal: &Renewal, when_sent: &Grant) -> bool {
        let mut grant = unpoisoned(&self.grant);
        let Some(grant) = grant.as_mut().filter(|grant| now < grant.until && !self.is_over()) else { return false };
        grant.until = grant.until.max(until);
        grant.depth = renewal.depth;
        if let Some(holder) = &renewal.holder {
            grant.holder = holder.clone();
        }
        for (now, then) in grant.nodes.iter_mut().zip(&when_sent.nodes) {
            // Not what came while the renewal was under way: the answers may be older than that.
            if then.on_probation.is_some() {
                now.counts = then.on_probation;
                now.on_probation = now.on_probation.filter(|grant| Some(*grant) != then.on_probation);
            }
        }
        true
    }

    /// Records what a node granted, unless a release may take it from there at any time.
    pub(crate) fn note(&self, node: usize, fence: Fence) {
        if self.is_burnt_at(node) {
            return;
        }
        if let Some(grant) = &mut *unpoisoned(&self.grant) {
            let here = &mut grant.nodes[node];
            if fence <= grant.fence {
                // Whoever had the lock in between would have left a higher number there.
                here.counts = Some(fence);
            } else if here.counts != Some(fence) {
                here.on_probation = Some(fence);
            }
        }
    }

    /// Records that a node does not have the lease any more, and is about to be asked for it again.
    pub(crate) fn lost_at(&self, node: usize) {
        if let Some(grant) = &mut *unpoisoned(&self.grant) {
            grant.nodes[node] = NodeGrant::default();
        }
    }

    /// Whether a release may arrive at a node, which is not to be asked with the claim then, and does not count for its lease.
    pub(crate) fn is_burnt_at(&self, node: usize) -> bool {
        unpoisoned(&self.burnt_at).contains(&node)
    }

    /// Whether that is so at any node.
    pub(crate) fn is_burnt(&self) -> bool {
        !unpoisoned(&self.burnt_at).is_empty()
    }

    /// Whether nothing stands against asking for it anew.
    fn is_forgotten(&self) -> bool {
        self.is_done.load(Ordering::Acquire) && !self.is_burnt()
    }

    /// Nodes are about to be asked for leases that last this long from this moment.
    pub(crate) fn asked(&self, at: Moment, ttl: Duration) {
        self.lapse.fetch_max((at + ttl + drift(ttl)).as_nanos(), Ordering::AcqRel);
    }

    pub(crate) fn lapse(&self) -> Moment {
        Moment::from_nanos(self.lapse.load(Ordering::Acquire))
    }

    /// Whether it is known that a node granted it.
    pub(crate) fn is_granted_at(&self, node: usize) -> bool {
        let granted = |grant: &Grant| grant.nodes[node].counts.or(grant.nodes[node].on_probation).is_some();
        unpoisoned(&self.grant).as_ref().is_some_and(granted)
    }
}
