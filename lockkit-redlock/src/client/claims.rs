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

use lockkit_core::{AcquireRequest, Claim, Fence, HolderInfo, Moment, Renewal, Token, drift, store::unpoisoned};

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
    /// When the last of all leases that nodes were asked for must have lapsed, in nanoseconds.
    lapse: AtomicU64,
    /// The nodes that may grant it after they have answered its release: a request to them ended without an answer.
    pub(crate) in_doubt: NodeSet,
    /// The nodes that have burnt the token (rule R2): what they undo may arrive after the next request.
    pub(crate) burnt: NodeSet,
}

/// Nodes, by their place in the quorum.
#[derive(Debug, Default)]
pub(crate) struct NodeSet(Mutex<Vec<usize>>);

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

impl Claims {
    /// Opens an attempt for a claim.
    pub(crate) fn begin(&self, request: &AcquireRequest, now: Moment) -> Begun {
        let mut remembered = unpoisoned(&self.0);
        match remembered.entries.get(&request.claim.token) {
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

    /// Drops a claim of which nothing is left anywhere: it may be begun anew.
    pub(crate) fn forget(&self, entry: &Arc<Entry>) {
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
            // A call that stood still for long may still ask for it, and has to be found by what comes after.
            self.entries.retain(|_, entry| now < entry.lapse() || Arc::strong_count(entry) > 1);
        }
        let entry = Arc::new(Entry {
            claim: request.claim.clone(),
            ttl: request.ttl,
            over: AtomicBool::new(false),
            grant: Mutex::default(),
            lapse: AtomicU64::new(0),
            in_doubt: NodeSet::default(),
            burnt: NodeSet::default(),
        });
        entry.asked(now, request.ttl);
        self.entries.insert(request.claim.token, Arc::clone(&entry));
        entry
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

    /// Records what a node granted.
    pub(crate) fn note(&self, node: usize, fence: Fence) {
        if let Some(grant) = &mut *unpoisoned(&self.grant) {
            let here = &mut grant.nodes[node];
            if fence <= grant.fence {
                // Another holder in between would have left a higher number there.
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

impl NodeSet {
    pub(crate) fn add(&self, node: usize) {
        let mut nodes = unpoisoned(&self.0);
        if !nodes.contains(&node) {
            nodes.push(node);
        }
    }

    pub(crate) fn contains(&self, node: usize) -> bool {
        unpoisoned(&self.0).contains(&node)
    }

    pub(crate) fn is_empty(&self) -> bool {
        unpoisoned(&self.0).is_empty()
    }
}

#[cfg(test)]
mod tests {
    use lockkit_core::{LockKey, Mode};

    use super::*;

    fn begun(claims: &Claims, now: Moment) -> Arc<Entry> {
        let (token, ttl) = (Token::random().expect("token"), Duration::from_secs(1));
        let claim = Claim { key: LockKey::new("a").expect("name"), token, mode: Mode::Exclusive };
        let asked = AcquireRequest::new(claim, ttl, HolderInfo::new("h"));
        let Begun::Attempt(entry) = claims.begin(&asked, now) else { panic!("it is new") };
        entry
    }

    /// Its call stands still, and may be granted a lease when it goes on.
    #[test]
    fn a_claim_that_is_being_asked_for_is_not_forgotten() {
        let (claims, begin) = (Claims::default(), Moment::from_nanos(1));
        let (asked, dropped) = (begun(&claims, begin), begun(&claims, begin).claim.token);
        let later = begin + Duration::from_secs(3600);
        (0..SWEEP).for_each(|_| drop(begun(&claims, later)));
        assert!(claims.get(&asked.claim.token).is_some() && claims.get(&dropped).is_none());
    }
}
