//! From grants to leases: what one owner holds at once of a lock is one lease.

use lockkit_core::Mode;

use super::ops::Grant;

/// What excludes others: a grant, or several that are nested.
#[derive(Clone, Debug)]
pub(super) struct Lease<'a> {
    /// In the order in which they were asked for.
    pub(super) grants: Vec<&'a Grant>,
    pub(super) mode: Mode,
    pub(super) fence: u64,
    /// When the first was asked for.
    pub(super) asked: u64,
    /// When the first was heard of.
    pub(super) heard: u64,
    /// When its holder last asked and was told yes, if it ever was: it surely believed from `heard` until then.
    pub(super) believed: Option<u64>,
    /// When its holder was first told that it is lost.
    pub(super) lost: Option<u64>,
    /// When the last guard was surely gone; `None` if that is not known.
    ended: Option<u64>,
}

impl<'a> Lease<'a> {
    fn new(grant: &'a Grant) -> Self {
        Self {
            grants: vec![grant],
            mode: grant.mode,
            fence: grant.fence,
            asked: grant.asked,
            heard: grant.heard,
            believed: grant.believed,
            lost: grant.lost,
            ended: grant.ended,
        }
    }

    pub(super) fn first(&self) -> &'a Grant {
        self.grants[0]
    }

    /// Whether a grant is nested in this lease: the same owner asked for it while it may still have had a guard.
    fn nests(&self, grant: &Grant) -> bool {
        let first = self.first();
        let same = first.owner.is_some() && (&first.process, first.owner) == (&grant.process, grant.owner);
        same && (first.fence, first.mode) == (grant.fence, grant.mode)
            && self.ended.is_none_or(|ended| grant.asked <= ended)
    }

    fn add(&mut self, grant: &'a Grant) {
        self.grants.push(grant);
        self.heard = self.heard.min(grant.heard);
        self.believed = self.believed.max(grant.believed);
        self.lost = [self.lost, grant.lost].into_iter().flatten().min();
        self.ended = self.ended.zip(grant.ended).map(|(one, other)| one.max(other));
    }
}

/// The leases of a lock, in the order in which they were asked for.
pub(super) fn leases(grants: &[Grant]) -> Vec<Lease<'_>> {
    let mut sorted: Vec<_> = grants.iter().collect();
    // Next to each other what may be nested.
    sorted.sort_by_key(|grant| (&grant.process, grant.owner, grant.fence, grant.asked));
    let mut leases: Vec<Lease<'_>> = Vec::new();
    for grant in sorted {
        match leases.last_mut() {
            Some(lease) if lease.nests(grant) => lease.add(grant),
            _ => leases.push(Lease::new(grant)),
        }
    }
    leases.sort_by_key(|lease| lease.asked);
    leases
}
