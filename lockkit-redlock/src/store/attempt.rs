//! One attempt: all nodes at once, and a verdict as soon as it is certain. [What comes after it](crate::store::late) goes on in
//! the background.

use std::{
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use crate::{
    client::{
        calls::Calls,
        claims::{Entry, Grant, NodeGrant},
        quorum::Quorum,
    },
    store::late::{hear_out, see_to, undo},
    wire::{
        error::NodeErrors,
        fence::{self, Choice},
        votes::{Answers, Verdict, Votes, free_after},
    },
};
use lockkit_core::{
    AcquireRequest, Attempt, Contention, Effect, Error, ErrorKind, Fence, FenceRequest, Hold, LockStore, Moment, Order,
    Renewal, Renewed, Result, store::Sent,
};

/// How a round ended, other than by an error.
pub(crate) enum Ended {
    Granted(Hold),
    Refused(Refusal),
}

/// No majority could be had. What was granted is to be undone.
#[derive(Default)]
pub(crate) struct Refusal {
    pub(crate) contention: Contention,
    /// The nodes at which another holds the lock.
    pub(crate) held_at: Vec<usize>,
}

/// An attempt under way: one round, after a wait at the rendezvous or without.
///
/// Dropped after an error, or at any await, it leaves what was granted to the caller, which releases the claim (rules R2 and R8),
/// and undoes only what is granted from then on: a request that waits for a connection may be sent behind that release.
pub(crate) struct OpenAttempt<'a> {
    pub(crate) quorum: &'a Arc<Quorum>,
    pub(crate) entry: Arc<Entry>,
    calls: Calls<Result<Attempt>>,
    /// The nodes that granted, or may have; true of those that have said so.
    may_hold: Vec<(usize, bool)>,
}

/// What the nodes have said so far.
struct Ballot {
    votes: Votes,
    grants: Vec<(usize, Fence)>,
    /// The first moment at which one of the grants may lapse.
    until: Moment,
    refusal: Refusal,
    left: Vec<Duration>,
    errors: NodeErrors,
}

impl<'a> OpenAttempt<'a> {
    pub(crate) fn new(quorum: &'a Arc<Quorum>, entry: Arc<Entry>) -> Self {
        Self { quorum, entry, calls: Calls::with_capacity(quorum.nodes.len()), may_hold: Vec::new() }
    }

    /// Notes that a node holds the claim, or, unless that is settled, that it may come to.
    pub(crate) fn holds(&mut self, node: usize, settled: bool) {
        if !settled {
            self.entry.in_doubt.add(node);
        }
        match self.may_hold.iter_mut().find(|(known, _)| *known == node) {
            Some((_, before)) => *before &= settled,
            None => self.may_hold.push((node, settled)),
        }
    }

    /// Asks all nodes. With `wait`, a refusal waits for the preferred node's answer too, for it is where to wait next.
    pub(crate) async fn round(&mut self, request: &AcquireRequest, fence: FenceRequest, wait: bool) -> Result<Ended> {
        let quorum = self.quorum;
        let limit = quorum.config.timeout_for(request.ttl);
        let sent = quorum.config.clock.now();
        let mut ballot = Ballot::new(quorum.nodes.len(), sent + request.ttl);
        self.ask(&mut ballot, request, fence, sent);
        self.calls.limit(limit);
        let preferred = wait.then(|| quorum.preferred(&request.claim.key)).flatten();
        let verdict = loop {
            let slow = self.calls.pending().filter(|node| quorum.nodes[*node].is_slow()).count();
            let verdict = match request.from {
                None => ballot.votes.verdict_but_for(slow),
                // A node that is slow may still have the lease whose place is to be taken.
                Some(_) => ballot.votes.verdict(),
            };
            match verdict {
                Verdict::Open => {}
                Verdict::Contended
                    if preferred.is_some_and(|preferred| self.calls.pending().any(|node| node == preferred)) => {}
                verdict => break verdict,
            }
            match self.calls.next().await {
                Some((node, answer)) => self.take(&mut ballot, node, answer),
                None => {
                    for node in self.calls.pending() {
                        quorum.nodes[node].note_slow(true);
                        ballot.errors.push(quorum.nodes[node].name(), Error::no_answer(limit, Sent::Yes));
                    }
                    ballot.votes.close();
                    break ballot.votes.verdict();
                }
            }
        };
        for (node, answer) in self.calls.at_hand().await {
            self.take(&mut ballot, node, answer);
        }
        match verdict {
            Verdict::Granted => {
                let fence = match fence::choose(ballot.grants.iter().map(|(_, fence)| *fence), quorum.majority) {
                    Choice::Agreed(fence) => Ok(fence),
                    Choice::Raise(fence) => self.raise(&mut ballot, request, fence).await?,
                };
                match fence {
                    Ok(fence) => Ok(Ended::Granted(self.grant(ballot, request, fence, sent))),
                    Err(_) if request.from.is_some() => Err(in_parts()),
                    Err(refusal) => Ok(Ended::Refused(refusal)),
                }
            }
            Verdict::Contended
                if request.from.is_some() && quorum.nodes.len() - ballot.votes.held >= quorum.majority =>
            {
                Err(in_parts())
            }
            Verdict::Contended => Ok(Ended::Refused(ballot.into_refusal(quorum))),
            Verdict::Open | Verdict::Unavailable => Err(self.failure(ballot)),
        }
    }

    fn ask(&mut self, ballot: &mut Ballot, request: &AcquireRequest, fence: FenceRequest, sent: Moment) {
        self.entry.asked(sent, request.ttl);
        let request = Arc::new(AcquireRequest { wait: Duration::ZERO, order: Order::Any, fence, ..request.clone() });
        for node in 0..self.quorum.nodes.len() {
            if self.entry.burnt.contains(node) {
                // The claim has waited at this node, which refused it and burnt its token.
                ballot.refused(node, Contention::default());
                continue;
            }
            let (quorum, request) = (Arc::clone(self.quorum), Arc::clone(&request));
            self.calls.add(node, async move { quorum.nodes[node].acquire(&request, &*quorum.config.clock).await });
        }
    }

    fn take(&mut self, ballot: &mut Ballot, node: usize, answer: Result<Attempt>) {
        let member = &self.quorum.nodes[node];
        match answer {
            Ok(Attempt::Granted(hold)) => {
                member.note_slow(false);
                self.holds(node, true);
                ballot.votes.granted += 1;
                ballot.until = ballot.until.min(self.quorum.end_of(node, &hold, ballot.until));
                ballot.grants.push((node, hold.fence));
            }
            Ok(Attempt::Contended(contention)) => {
                member.note_slow(false);
                if contention.burnt {
                    self.entry.burnt.add(node);
                }
                ballot.refused(node, contention);
            }
            Err(error) => {
                if error.effect() == Effect::Unknown {
                    self.holds(node, false);
                }
                member.note_slow(true);
                ballot.votes.failed += 1;
                ballot.errors.push(member.name(), error);
            }
        }
    }

    /// The second round: raises the counters of the nodes that granted to the highest number among them. Only nodes
    /// that still hold the very grant count, see [`fence`].
    async fn raise(
        &mut self,
        ballot: &mut Ballot,
        request: &AcquireRequest,
        fence: Fence,
    ) -> Result<std::result::Result<Fence, Refusal>> {
        let quorum = self.quorum;
        quorum.stats.raise_rounds.add_one();
        self.entry.asked(quorum.config.clock.now(), request.ttl);
        let renewal = Arc::new([Renewal {
            claim: self.entry.claim.clone(),
            ttl: request.ttl,
            depth: 1,
            fence_floor: Some(fence::last_of(fence, request.fence.span)),
            holder: None,
        }]);
        let mut calls = Calls::with_capacity(ballot.grants.len());
        for (node, _) in &ballot.grants {
            let (quorum, renewal, node) = (Arc::clone(quorum), Arc::clone(&renewal), *node);
            calls.add(node, async move { quorum.nodes[node].store().renew(&*renewal).await.pop() });
        }
        let mut answers = Answers::new(ballot.grants.len());
        let limit = quorum.config.timeout_for(request.ttl);
        calls.limit(limit);
        while answers.yes < quorum.majority && answers.yes + answers.pending() >= quorum.majority {
            match calls.next().await {
                Some((node, Some(Ok(Renewed::Held(hold))))) if ballot.grants.contains(&(node, hold.fence)) => {
                    answers.yes += 1;
                }
                Some((_, Some(Ok(Renewed::Held(_))))) => answers.not_held(lockkit_core::LossReason::Gone),
                Some((_, Some(Ok(Renewed::Lost(reason))))) => answers.not_held(reason),
                Some((node, other)) => {
                    answers.failed();
                    let odd = || Error::new(ErrorKind::Unexpected, "no answer to the renewal").unknown_effect();
                    let error = other.and_then(Result::err).unwrap_or_else(odd);
                    ballot.errors.push(quorum.nodes[node].name(), error);
                }
                None => answers.close(),
            }
        }
        if answers.yes >= quorum.majority {
            Ok(Ok(fence))
        } else if ballot.grants.len() - answers.missing() < quorum.majority {
            Ok(Err(std::mem::take(&mut ballot.refusal)))
        } else {
            let errors = std::mem::take(&mut ballot.errors);
            Err(errors.into_error(answers.yes, quorum.nodes.len(), Effect::Unknown))
        }
    }

    fn grant(&mut self, ballot: Ballot, request: &AcquireRequest, fence: Fence, sent: Moment) -> Hold {
        let quorum = self.quorum;
        let span = request.fence.span;
        let nodes = vec![NodeGrant::default(); quorum.nodes.len()];
        let holder = request.holder.clone();
        self.entry.granted(Grant { fence, span, until: ballot.until, depth: 1, holder, nodes });
        for (node, fence) in ballot.grants {
            self.entry.note(node, fence);
        }
        quorum.stats.note_grant(quorum.config.clock.now().since(sent));
        Hold { claim: request.claim.clone(), fence, span, until: ballot.until, depth: 1 }
    }

    /// Ends the attempt after a refusal: everything is undone in the background, and then forgotten. What is asked for that is sent
    /// from here, for the caller's runtime may stand still from then on.
    pub(crate) async fn withdraw(mut self) {
        self.entry.give_up();
        let (quorum, entry) = (Arc::clone(self.quorum), Arc::clone(&self.entry));
        let mut undoing = hear_out(&quorum, &entry, std::mem::take(&mut self.calls));
        for (node, settled) in std::mem::take(&mut self.may_hold) {
            undoing.add(node, undo(Arc::clone(&quorum), Arc::clone(&entry), node, settled));
        }
        undoing.send().await;
        see_to(&quorum, Some(entry), undoing, |done| *done);
    }

    fn failure(&mut self, ballot: Ballot) -> Error {
        // Another request with a burnt token could be undone by what is under way for this one.
        let effect = if self.may_hold.is_empty() && self.calls.is_empty() && self.entry.burnt.is_empty() {
            self.quorum.claims.forget(&self.entry);
            Effect::None
        } else {
            Effect::Unknown
        };
        ballot.errors.into_error(ballot.votes.granted, self.quorum.nodes.len(), effect)
    }
}

/// Nodes that granted the new lease have ended the former one, which a majority may have had.
fn in_parts() -> Error {
    let message = "a majority may still hold the former lease, but too few nodes granted the takeover";
    Error::new(ErrorKind::Unavailable, message).unknown_effect()
}

impl Drop for OpenAttempt<'_> {
    fn drop(&mut self) {
        if self.entry.is_unused() {
            self.entry.give_up();
        }
        let late = hear_out(self.quorum, &self.entry, std::mem::take(&mut self.calls));
        see_to(self.quorum, None, late, |_| true);
    }
}

/// The fence that all nodes are asked for at first. The wall clock only makes it likely that all of them grant it, see [`fence`].
pub(crate) fn proposal(request: &AcquireRequest) -> FenceRequest {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    fence::proposal(request.fence, u64::try_from(since.as_micros()).unwrap_or(u64::MAX))
}

impl Ballot {
    fn new(nodes: usize, until: Moment) -> Self {
        Self {
            votes: Votes::new(nodes),
            grants: Vec::with_capacity(nodes),
            until,
            refusal: Refusal::default(),
            left: Vec::new(),
            errors: NodeErrors::default(),
        }
    }

    fn refused(&mut self, node: usize, contention: Contention) {
        self.votes.held += 1;
        self.left.push(contention.retry_after.unwrap_or_default());
        self.refusal.held_at.push(node);
        if self.refusal.contention.holder.is_none() {
            self.refusal.contention.holder = contention.holder;
        }
    }

    fn into_refusal(mut self, quorum: &Quorum) -> Refusal {
        if self.votes.granted > 0 {
            quorum.stats.split_votes.add_one();
        }
        self.refusal.contention.retry_after = free_after(&mut self.left, quorum.nodes.len());
        self.refusal
    }
}
