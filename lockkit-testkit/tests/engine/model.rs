//! Who may believe what, and what the rules say of it.

use std::collections::{HashMap, HashSet};

use lockkit_core::{Fence, Guard, Token};

/// A lease in the hands of one holder: hand-over keeps the token and counts the fence on.
pub(crate) type LeaseId = (Token, Fence);

/// A guard that an application has.
pub(crate) struct Held {
    pub(crate) guard: std::sync::Arc<Guard>,
    pub(crate) client: usize,
    pub(crate) key: usize,
    pub(crate) owner: Option<usize>,
    /// It was seen to be lost: from then on it must be.
    over: bool,
}

impl Held {
    pub(crate) fn new(guard: Guard, client: usize, key: usize, owner: Option<usize>) -> Self {
        Self { guard: guard.into(), client, key, owner, over: false }
    }

    pub(crate) fn id(&self) -> LeaseId {
        (self.guard.token_to_compare(), self.guard.fence())
    }
}

/// What the rules need to remember.
#[derive(Default)]
pub(crate) struct Model {
    /// The highest fence that came back, for each lock.
    highest: HashMap<usize, Fence>,
    /// Whose each lease is or was.
    leases: HashMap<(usize, Fence), (Token, usize, Option<usize>)>,
    /// The leases that were ended by force: all of this token up to this fence.
    forced: HashMap<Token, Fence>,
    pub(crate) broken: Option<String>,
}

impl Model {
    pub(crate) fn complain(&mut self, what: impl Into<String>) {
        self.broken.get_or_insert(what.into());
    }

    /// No grant that is asked for from now on may have this fence, or a smaller one.
    pub(crate) fn highest(&self, key: usize) -> Fence {
        self.highest.get(&key).copied().unwrap_or_default()
    }

    /// A lease came back whose acquisition began when the highest fence was `before` (rule R9). One that somebody ended by
    /// force may still be handed over by a process that does not know of it: its fence is then an old one.
    pub(crate) fn granted(&mut self, held: &Held, before: Fence) {
        let ((token, fence), who) = (held.id(), (held.client, held.owner));
        match self.leases.insert((held.key, fence), (token, who.0, who.1)) {
            None if fence <= before && !self.is_forced(held.id()) => {
                self.complain(format!("R9: fence {fence} was granted after {before}"));
            }
            None => {}
            Some(known) if known == (token, who.0, who.1) && held.owner.is_some() => {}
            Some(_) => self.complain(format!("fence {fence} belongs to two holders")),
        }
        self.returned(held.key, fence);
    }

    pub(crate) fn returned(&mut self, key: usize, fence: Fence) {
        let highest = self.highest.entry(key).or_default();
        *highest = fence.max(*highest);
    }

    /// Somebody ended the lease of this token; `last` is the last fence that its lock has given out.
    pub(crate) fn force(&mut self, token: Token, last: Fence) {
        self.forced.insert(token, last);
    }

    pub(crate) fn is_forced(&self, (token, fence): LeaseId) -> bool {
        self.forced.get(&token).is_some_and(|last| fence <= *last)
    }

    /// Looks at what all guards believe: lost is final, and nobody believes what another does.
    pub(crate) fn look(&mut self, guards: &mut [Held]) {
        let mut believed: HashMap<usize, HashSet<LeaseId>> = HashMap::new();
        for held in guards {
            let is_held = held.guard.is_held();
            if is_held && held.over {
                self.complain("a lost guard is held again");
            }
            held.over |= !is_held;
            if is_held && !self.is_forced(held.id()) {
                believed.entry(held.key).or_default().insert(held.id());
            }
        }
        for (key, leases) in believed {
            if leases.len() > 1 {
                let fences: Vec<_> = leases.iter().map(|(_, fence)| fence.get()).collect();
                self.complain(format!("lock {key} has {} holders at once, with fences {fences:?}", leases.len()));
            }
        }
    }
}
