//! Renewal: one call per node for a whole batch, and a verdict per lease.
//!
//! A node counts only if it still has the very grant that is on record here. A node that lost the lease is *healed* as long as
//! that goes on: it is asked for the lease anew. It counts once a further round has succeeded without it. If it
//! counted at once, a holder that was away while another had the lock would never learn of that.

use std::{sync::Arc, time::Duration};

use crate::{
    client::{
        calls::{Call, Calls},
        claims::{Entry, Grant},
        quorum::Quorum,
    },
    store::{RedlockStore, late::Unheard},
    wire::{
        error::NodeErrors,
        fence,
        votes::{Answers, Decision},
    },
};
use lockkit_core::{
    AcquireRequest, Attempt, Effect, Error, ErrorKind, Fence, Hold, LockStore, LossReason, Moment, Renewal, Renewed,
    Result, store::Sent,
};

/// How many leases are healed at one node side by side.
const HEALED_AT_ONCE: usize = 64;

/// One lease of a batch.
struct Item {
    /// What is on record of it; nothing if another client of these nodes holds it, or nobody.
    known: Option<(Arc<Entry>, Grant)>,
    /// Whether it was lost before, or released.
    is_over: bool,
    answers: Answers,
    /// Nodes that have the lease, but by another grant than the one on record.
    other: Vec<(usize, Fence)>,
    /// Nodes that have it no more.
    gone: Vec<usize>,
    until: Moment,
    errors: NodeErrors,
}

type RenewalAnswers = Vec<Result<Renewed>>;

/// Extends leases; one answer each, in order. No node is asked about a mode that only the node has.
pub(crate) async fn renew(store: &RedlockStore, renewals: &[Renewal]) -> Vec<Result<Renewed>> {
    let refusal = |renewal: &Renewal| store.info.admit_mode(renewal.claim.mode).err();
    let admitted = renewals.iter().filter(|renewal| refusal(renewal).is_none()).cloned().collect();
    let mut answers = renew_admitted(&store.quorum, admitted).await.into_iter();
    let answer = |renewal| refusal(renewal).map(Err).or_else(|| answers.next());
    renewals.iter().map_while(answer).collect()
}

/// The same for modes that a quorum has.
pub(crate) async fn renew_admitted(quorum: &Arc<Quorum>, renewals: Arc<[Renewal]>) -> Vec<Result<Renewed>> {
    let Some(shortest) = renewals.iter().map(|renewal| renewal.ttl).min() else { return Vec::new() };
    let limit = quorum.config.renewal_patience_for(shortest);
    let sent = quorum.config.clock.now();
    let mut items: Vec<Item> = renewals.iter().map(|renewal| Item::new(quorum, renewal, sent)).collect();
    let mut calls = ask_all(quorum, &renewals);
    let mut open = items.len();
    calls.limit(limit);
    while open > 0 {
        match calls.next().await {
            Some((node, batch)) => {
                quorum.nodes[node].note_slow(!batch.iter().any(Result::is_ok));
                take(quorum, &mut items, node, batch);
                open = items.iter().filter(|item| item.answers.outcome() == Decision::Open).count();
            }
            None => {
                for node in calls.pending() {
                    quorum.nodes[node].note_slow(true);
                }
                for item in &mut items {
                    for node in calls.pending() {
                        item.errors.push(quorum.nodes[node].name(), Error::no_answer(limit, Sent::Yes));
                    }
                    item.answers.close();
                }
                open = 0;
            }
        }
    }
    let now = quorum.config.clock.now();
    let answers = items.iter_mut().zip(&*renewals).map(|(item, renewal)| item.conclude(quorum, renewal, now)).collect();
    tend(quorum, &renewals, &items, calls);
    answers
}

fn ask_all(quorum: &Arc<Quorum>, renewals: &Arc<[Renewal]>) -> Calls<RenewalAnswers> {
    let mut calls = Calls::with_capacity(quorum.nodes.len());
    for node in 0..quorum.nodes.len() {
        let (quorum, renewals) = (Arc::clone(quorum), Arc::clone(renewals));
        // A node that has no vote now still has the leases that it granted before.
        calls.add(node, async move { quorum.nodes[node].store().renew(&renewals).await });
    }
    calls
}

fn take(quorum: &Quorum, items: &mut [Item], node: usize, batch: RenewalAnswers) {
    let mut batch = batch.into_iter();
    for item in items {
        let missing = || Err(Error::new(ErrorKind::Unexpected, "no answer to the renewal").unknown_effect());
        item.take(quorum, node, batch.next().unwrap_or_else(missing));
    }
}

impl Item {
    fn new(quorum: &Quorum, renewal: &Renewal, sent: Moment) -> Self {
        let entry = quorum.claims.get(&renewal.claim.token);
        if let Some(entry) = &entry {
            entry.asked(sent, renewal.ttl);
        }
        Self {
            is_over: entry.as_ref().is_some_and(|entry| entry.is_over()),
            known: entry.and_then(|entry| entry.grant().map(|grant| (entry, grant))),
            answers: Answers::new(quorum.nodes.len()),
            other: Vec::new(),
            gone: Vec::new(),
            until: sent + renewal.ttl,
            errors: NodeErrors::default(),
        }
    }

    fn take(&mut self, quorum: &Quorum, node: usize, answer: Result<Renewed>) {
        match answer {
            Ok(Renewed::Held(hold)) => {
                let counts = |grant: &Grant| grant.nodes[node].counts == Some(hold.fence);
                if self.known.as_ref().is_none_or(|(_, grant)| counts(grant)) {
                    self.answers.yes += 1;
                    self.until = self.until.min(quorum.end_of(node, &hold, self.until));
                } else {
                    self.other.push((node, hold.fence));
                    self.answers.not_held(LossReason::Gone);
                }
            }
            Ok(Renewed::Lost(reason)) => {
                self.answers.not_held(reason);
                if reason == LossReason::Gone {
                    self.gone.push(node);
                }
            }
            Err(error) => {
                self.answers.failed();
                self.errors.push(quorum.nodes[node].name(), error);
            }
        }
    }

    /// Judges the votes, and puts on record what follows.
    fn conclude(&mut self, quorum: &Quorum, renewal: &Renewal, now: Moment) -> Result<Renewed> {
        let outcome = self.answers.outcome();
        let held = |fence, span| {
            let hold = Hold { claim: renewal.claim.clone(), fence, span, until: self.until, depth: renewal.depth };
            Ok(Renewed::Held(hold))
        };
        match (outcome, &self.known) {
            (Decision::NotHeld(reason), known) => {
                if known.is_some() {
                    quorum.claims.end(&renewal.claim.token);
                }
                Ok(Renewed::Lost(reason))
            }
            // Its holder may not have heard it the first time. What the nodes still have is on its way out.
            (Decision::Done, _) if self.is_over => Ok(Renewed::Lost(LossReason::Gone)),
            (Decision::Done, Some((entry, grant))) => {
                if !entry.renewed(now, self.until, renewal, grant) {
                    // The nodes may have been another's in between, which no answer of theirs shows.
                    quorum.claims.end(&renewal.claim.token);
                    return Ok(Renewed::Lost(LossReason::Expired));
                }
                for (node, fence) in self.other.drain(..) {
                    entry.note(node, fence);
                }
                held(grant.fence, grant.span)
            }
            // After a raise some nodes show a number below the fence of the grant. Without the record of the grant nothing tells them apart.
            (Decision::Done, None) => {
                let message = "the lease was granted to another client, and the nodes do not show its fence";
                Err(Error::new(ErrorKind::Unexpected, message).unknown_effect())
            }
            (Decision::Open | Decision::Unknown, _) => {
                let errors = std::mem::take(&mut self.errors);
                Err(errors.into_error(self.answers.yes, quorum.nodes.len(), Effect::Unknown))
            }
        }
    }
}

/// What is left to do after the verdicts: nodes that have not answered, and leases to heal. At each node by itself: one that is away
/// holds up no other. A lost lease is left to the caller, who releases it once its holder has heard: until then its remains keep others out.
fn tend(quorum: &Arc<Quorum>, renewals: &[Renewal], items: &[Item], mut calls: Calls<RenewalAnswers>) {
    let mut to_heal: Vec<Vec<MaybeLost>> = vec![Vec::new(); quorum.nodes.len()];
    let mut held = Vec::with_capacity(items.len());
    for (item, renewal) in items.iter().zip(renewals) {
        let kept = item.known.as_ref().map(|(entry, _)| entry).filter(|entry| !entry.is_over());
        let kept = kept.map(|entry| (Arc::clone(entry), renewal.clone()));
        for node in item.gone.iter().filter(|_| kept.is_some()) {
            to_heal[*node].extend(kept.clone());
        }
        held.push(kept);
    }
    let mut at_nodes = Calls::with_capacity(quorum.nodes.len());
    at_nodes.begun_with(&calls);
    for (node, gone) in to_heal.into_iter().enumerate().filter(|(_, gone)| !gone.is_empty()) {
        at_nodes.add(node, heal(Arc::clone(quorum), node, gone));
    }
    if held.iter().any(Option::is_some) {
        let held: Arc<[Option<MaybeLost>]> = held.into();
        for (node, call) in calls.take() {
            at_nodes.add(node, tend_late(Arc::clone(quorum), node, call, Arc::clone(&held)));
        }
    }
    quorum.background.spawn(async move { while at_nodes.next_ever().await.is_some() {} });
}

/// A lease that a node may have lost, and its renewal.
type MaybeLost = (Arc<Entry>, Renewal);

/// A node had not answered the renewals when the others decided them.
async fn tend_late(quorum: Arc<Quorum>, node: usize, call: Call<RenewalAnswers>, held: Arc<[Option<MaybeLost>]>) {
    let mut gone = Vec::new();
    for (held, answer) in held.iter().zip(call.await) {
        match (held, answer) {
            (Some(lease), Ok(Renewed::Lost(LossReason::Gone))) => gone.push(lease.clone()),
            (Some((entry, _)), Ok(Renewed::Held(hold))) => entry.note(node, hold.fence),
            _ => {}
        }
    }
    heal(quorum, node, gone).await;
}

/// Asks a node that lost leases for them again, while a majority has them.
async fn heal(quorum: Arc<Quorum>, node: usize, all: Vec<MaybeLost>) {
    for some in all.chunks(HEALED_AT_ONCE) {
        let mut calls = Calls::with_capacity(some.len());
        for (entry, renewal) in some {
            // Never after the deadline: by then another may have had it.
            let Some(grant) = entry.grant().filter(|_| !entry.burnt.contains(node)) else { continue };
            if quorum.config.clock.now() + quorum.config.timeout_for(renewal.ttl) >= grant.until {
                continue;
            }
            calls.add(node, heal_one(Arc::clone(&quorum), Arc::clone(entry), node, grant, renewal.ttl));
        }
        while calls.next_ever().await.is_some() {}
    }
}

async fn heal_one(quorum: Arc<Quorum>, entry: Arc<Entry>, node: usize, grant: Grant, ttl: Duration) {
    entry.lost_at(node);
    entry.asked(quorum.config.clock.now(), ttl);
    let request = AcquireRequest {
        // Above what the lease owns, so that the node's counter is as far as those of the others.
        fence: fence::exactly(grant.fence.offset(grant.span), 1),
        ..AcquireRequest::new(entry.claim.clone(), ttl, grant.holder)
    };
    let asked = Arc::clone(&quorum);
    let call = Box::pin(async move {
        let answer = asked.nodes[node].acquire(&request, &*asked.config.clock).await;
        if let Ok(Attempt::Granted(_)) = answer {
            asked.stats.heals.add_one();
        }
        answer
    });
    Unheard::new(&quorum, &entry, node).hear(call).await;
}
