//! One attempt: all nodes at once, a verdict as soon as it is certain, and whatever is left to do in the background.

use std::{pin::pin, sync::Arc, time::Duration};

use lockkit_core::{
    AcquireRequest, Attempt, Contention, Effect, Error, ErrorKind, Fence, FenceRequest, Hold, LockStore, Moment, Order,
    Release, Renewal, Renewed, Result, drift,
};
use tokio::time::sleep;

use crate::{
    book::{Entry, Grant, NodeGrant},
    calls::{Call, Calls, Next, in_background},
    error::{NodeErrors, no_answer},
    fence::{self, Choice},
    quorum::{Answers, Verdict, Votes, free_after},
    store::Quorum,
};

/// How long to wait before a node that did not answer a release is asked again.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// How an attempt ended, other than by an error.
pub(crate) enum Ended {
    Granted(Hold),
    Refused(Refusal),
}

/// No majority could be had.
#[derive(Default)]
pub(crate) struct Refusal {
    pub(crate) contention: Contention,
    /// The nodes at which another holds the lock.
    pub(crate) held_at: Vec<usize>,
}

/// An attempt under way. Unless it is granted, its end undoes it: also if the future is dropped at any await.
pub(crate) struct Pursuit<'a> {
    quorum: &'a Arc<Quorum>,
    entry: Arc<Entry>,
    calls: Calls<Result<Attempt>>,
    /// The nodes that granted, or may have.
    may_hold: Vec<usize>,
    granted: bool,
    /// Others are in the way: whoever waits for the lock is about to ask again, and must not be late.
    refused: bool,
}

/// What the nodes have said so far.
struct Poll {
    votes: Votes,
    grants: Vec<(usize, Fence)>,
    /// The first moment at which one of the grants may lapse.
    until: Moment,
    refusal: Refusal,
    left: Vec<Duration>,
    errors: NodeErrors,
}

impl<'a> Pursuit<'a> {
    pub(crate) fn new(quorum: &'a Arc<Quorum>, entry: Arc<Entry>) -> Self {
        let nodes = quorum.nodes.len();
        Self { quorum, entry, calls: Calls::with_capacity(nodes), may_hold: Vec::new(), granted: false, refused: false }
    }

    /// Notes that a node holds the claim already, or may.
    pub(crate) fn may_hold(&mut self, node: usize) {
        self.may_hold.push(node);
    }

    pub(crate) fn entry(&self) -> &Arc<Entry> {
        &self.entry
    }

    /// Asks all nodes. With `wait`, a refusal waits for the leader's answer too, for it is where to wait next.
    pub(crate) async fn run(mut self, request: &AcquireRequest, fence: FenceRequest, wait: bool) -> Result<Ended> {
        let quorum = self.quorum;
        let limit = quorum.config.timeout_for(request.ttl);
        let sent = quorum.info.clock.now();
        self.ask_all(request, fence);
        let mut time_up = pin!(sleep(limit));
        let mut poll = Poll::new(quorum.nodes.len(), sent + request.ttl);
        let leader = wait.then(|| quorum.leader(&request.claim.key)).flatten();
        let verdict = loop {
            let slow = self.calls.pending().filter(|node| quorum.nodes[*node].is_slow()).count();
            match poll.votes.verdict_but_for(slow) {
                Verdict::Open => {}
                Verdict::Contended if leader.is_some_and(|leader| self.calls.pending().any(|node| node == leader)) => {}
                verdict => break verdict,
            }
            match self.calls.next(time_up.as_mut()).await {
                Next::Answer(node, answer) => self.take(&mut poll, node, answer),
                Next::TimeUp | Next::End => {
                    for node in self.calls.pending() {
                        quorum.nodes[node].note_slow(true);
                        poll.errors.push(quorum.nodes[node].name(), no_answer(limit));
                    }
                    poll.votes.close();
                    break poll.votes.verdict();
                }
            }
        };
        for (node, answer) in self.calls.at_hand().await {
            self.take(&mut poll, node, answer);
        }
        match verdict {
            Verdict::Granted => {
                let fence = match fence::choose(poll.grants.iter().map(|(_, fence)| *fence), quorum.majority) {
                    Choice::Agreed(fence) => Ok(fence),
                    Choice::Raise(fence) => self.raise(&mut poll, request, fence).await?,
                };
                match fence {
                    Ok(fence) => Ok(Ended::Granted(self.grant(poll, request, fence, sent))),
                    Err(refusal) => Ok(self.refuse(refusal)),
                }
            }
            Verdict::Contended => Ok(self.refuse(poll.into_refusal(quorum))),
            Verdict::Open | Verdict::Unavailable => Err(self.failure(poll)),
        }
    }

    fn ask_all(&mut self, request: &AcquireRequest, fence: FenceRequest) {
        let request = Arc::new(AcquireRequest {
            claim: self.entry.claim.clone(),
            ttl: request.ttl,
            wait: Duration::ZERO,
            order: Order::Any,
            fence,
            holder: request.holder.clone(),
        });
        for node in 0..self.quorum.nodes.len() {
            let (quorum, request) = (Arc::clone(self.quorum), Arc::clone(&request));
            self.calls.add(node, async move { quorum.nodes[node].acquire(&request, &*quorum.info.clock).await });
        }
    }

    fn take(&mut self, poll: &mut Poll, node: usize, answer: Result<Attempt>) {
        let member = &self.quorum.nodes[node];
        match answer {
            Ok(Attempt::Granted(hold)) => {
                member.note_slow(false);
                self.may_hold.push(node);
                poll.votes.granted += 1;
                poll.until = poll.until.min(self.quorum.end_of(node, &hold, poll.until));
                poll.grants.push((node, hold.fence));
            }
            Ok(Attempt::Contended(contention)) => {
                member.note_slow(false);
                poll.votes.held += 1;
                poll.left.push(contention.retry_after.unwrap_or_default());
                poll.refusal.held_at.push(node);
                if poll.refusal.contention.holder.is_none() {
                    poll.refusal.contention.holder = contention.holder;
                }
            }
            Err(error) => {
                if error.effect() == Effect::Unknown {
                    self.may_hold.push(node);
                }
                member.note_slow(true);
                poll.votes.failed += 1;
                poll.errors.push(member.name(), error);
            }
        }
    }

    /// The second round: raises the counters of the nodes that granted to the highest number among them. Only nodes
    /// that still hold the very grant count, see [`fence`].
    async fn raise(
        &mut self,
        poll: &mut Poll,
        request: &AcquireRequest,
        fence: Fence,
    ) -> Result<std::result::Result<Fence, Refusal>> {
        let quorum = self.quorum;
        quorum.stats.note_raise();
        let renewal = Arc::new([Renewal {
            claim: self.entry.claim.clone(),
            ttl: request.ttl,
            depth: 1,
            fence_floor: Some(fence::last_of(fence, request.fence.span)),
        }]);
        let mut calls = Calls::with_capacity(poll.grants.len());
        for (node, _) in &poll.grants {
            let (quorum, renewal, node) = (Arc::clone(quorum), Arc::clone(&renewal), *node);
            calls.add(node, async move { quorum.nodes[node].store().renew(&*renewal).await.pop() });
        }
        let mut answers = Answers::new(poll.grants.len());
        let limit = quorum.config.timeout_for(request.ttl);
        let mut time_up = pin!(sleep(limit));
        while answers.yes < quorum.majority && answers.yes + answers.pending() >= quorum.majority {
            match calls.next(time_up.as_mut()).await {
                Next::Answer(node, Some(Ok(Renewed::Held(hold)))) if poll.grants.contains(&(node, hold.fence)) => {
                    answers.yes += 1;
                }
                Next::Answer(_, Some(Ok(Renewed::Held(_)))) => answers.not_held(lockkit_core::LossReason::Gone),
                Next::Answer(_, Some(Ok(Renewed::Lost(reason)))) => answers.not_held(reason),
                Next::Answer(node, other) => {
                    answers.failed();
                    let odd = || Error::new(ErrorKind::Unexpected, "no answer to the renewal").unknown_effect();
                    let error = other.and_then(Result::err).unwrap_or_else(odd);
                    poll.errors.push(quorum.nodes[node].name(), error);
                }
                Next::TimeUp | Next::End => answers.close(),
            }
        }
        if answers.yes >= quorum.majority {
            Ok(Ok(fence))
        } else if poll.grants.len() - answers.missing() < quorum.majority {
            Ok(Err(std::mem::take(&mut poll.refusal)))
        } else {
            let errors = std::mem::take(&mut poll.errors);
            Err(errors.into_error(answers.yes, quorum.nodes.len(), quorum.majority, Effect::Unknown))
        }
    }

    fn grant(mut self, poll: Poll, request: &AcquireRequest, fence: Fence, sent: Moment) -> Hold {
        let quorum = self.quorum;
        let span = request.fence.span;
        let nodes = vec![NodeGrant::default(); quorum.nodes.len()];
        self.entry.granted(Grant { fence, span, until: poll.until, depth: 1, nodes });
        for (node, fence) in poll.grants {
            self.entry.note(node, fence);
        }
        self.granted = true;
        quorum.stats.note_grant(quorum.info.clock.now().since(sent));
        Hold { claim: request.claim.clone(), fence, span, until: poll.until, depth: 1 }
    }

    fn refuse(mut self, refusal: Refusal) -> Ended {
        self.refused = true;
        Ended::Refused(refusal)
    }

    fn failure(&mut self, poll: Poll) -> Error {
        let nothing_open = self.may_hold.is_empty() && self.calls.is_empty();
        let effect = if nothing_open { Effect::None } else { Effect::Unknown };
        poll.errors.into_error(poll.votes.granted, self.quorum.nodes.len(), self.quorum.majority, effect)
    }
}

impl Drop for Pursuit<'_> {
    fn drop(&mut self) {
        let stragglers = self.calls.take();
        if self.granted {
            if !stragglers.is_empty() {
                follow(self.quorum, &self.entry, stragglers, Vec::new(), false);
            }
            return;
        }
        self.entry.give_up();
        if stragglers.is_empty() && self.may_hold.is_empty() {
            // Every node has said that it granted nothing. (At the door something may still be under way.)
            if self.entry.is_settled() {
                self.quorum.book.forget(&self.entry);
            }
        } else {
            follow(self.quorum, &self.entry, stragglers, std::mem::take(&mut self.may_hold), self.refused);
        }
    }
}

impl Poll {
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

    fn into_refusal(mut self, quorum: &Quorum) -> Refusal {
        if self.votes.granted > 0 {
            quorum.stats.note_split();
        }
        self.refusal.contention.retry_after = free_after(&mut self.left, quorum.nodes.len());
        self.refusal
    }
}

/// Leads what is left of an attempt to its end: calls that have not been answered, and nodes to be released. In `haste`,
/// who repeats the claim need not wait for nodes that do not answer in time.
pub(crate) fn follow(
    quorum: &Arc<Quorum>,
    entry: &Arc<Entry>,
    stragglers: Vec<(usize, Call<Result<Attempt>>)>,
    held: Vec<usize>,
    haste: bool,
) {
    let mut rest = Calls::with_capacity(stragglers.len() + held.len());
    let errand = entry.errand();
    for node in held {
        rest.add(node, undo(Arc::clone(quorum), Arc::clone(entry), node));
    }
    for (node, call) in stragglers {
        let (quorum, entry) = (Arc::clone(quorum), Arc::clone(entry));
        rest.add(node, async move {
            let answer = call.await;
            let answered = answer.is_ok();
            late(quorum, entry, node, answer).await;
            answered
        });
    }
    let (quorum, entry) = (Arc::clone(quorum), Arc::clone(entry));
    in_background(async move {
        let mut time_up = pin!(sleep(quorum.config.timeout_for(entry.ttl)));
        loop {
            if haste && rest.pending().all(|node| quorum.nodes[node].is_slow()) {
                entry.stall();
            }
            match rest.next(time_up.as_mut()).await {
                Next::Answer(node, answered) => quorum.nodes[node].note_slow(!answered),
                Next::TimeUp => {
                    rest.pending().for_each(|node| quorum.nodes[node].note_slow(true));
                    break;
                }
                Next::End => break,
            }
        }
        while rest.next_ever().await.is_some() {}
        errand.done();
        if entry.is_over() && entry.is_settled() {
            quorum.book.forget(&entry);
        }
    });
}

/// A node answered after the verdict: what it granted is kept or released, depending on what became of the claim.
pub(crate) async fn late(quorum: Arc<Quorum>, entry: Arc<Entry>, node: usize, answer: Result<Attempt>) {
    match answer {
        Ok(Attempt::Granted(hold)) if !entry.is_over() => entry.note(node, hold.fence),
        Ok(Attempt::Granted(_)) => {
            quorum.stats.note_straggler();
            undo(quorum, entry, node).await;
        }
        Err(error) if error.effect() == Effect::Unknown && entry.is_over() => {
            undo(quorum, entry, node).await;
        }
        Ok(Attempt::Contended(_)) | Err(_) => {}
    }
}

/// Releases an attempt at one node, until the node has answered or the lease must have lapsed. Whether it has answered.
pub(crate) async fn undo(quorum: Arc<Quorum>, entry: Arc<Entry>, node: usize) -> bool {
    let clock = &quorum.info.clock;
    let lapse = clock.now() + entry.ttl + drift(entry.ttl);
    let mut pause = FIRST_PAUSE;
    loop {
        match quorum.nodes[node].store().release(&entry.claim).await {
            Ok(Release::Released { .. } | Release::NotHeld(_)) => return true,
            Err(error) => {
                if error.effect() == Effect::Unknown {
                    entry.doubt();
                }
                if !error.is_retryable() || clock.now() + pause >= lapse {
                    return false;
                }
            }
        }
        sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}
