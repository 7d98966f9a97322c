//! Holding a lock in the place of another without a gap: a writer becomes a reader, or one client takes up the lease that another has
//! let go of.
//!
//! The new node is made with the number of the old one, in the transaction that deletes that. So it stands where the old one stood, before
//! all that wait; if it is a reader's, the readers that come first among these hold beside it from then on. Its transaction has a higher number
//! than those of the nodes that wait, so its fence does not follow from that: it is the next one after the old lease's, and the node says it.
//!
//! The old node may be another session's, which need not hear of this: nothing that it still sends about its own node, which has another
//! name, concerns the new one. The new one is the session's that asks, and ends with it.

use lockkit_core::{AcquireRequest, Attempt, Effect, Result, Token, store::unpoisoned};
use zookeeper_client::CreateMode;

use crate::{
    client::{
        claims::{Claimed, Grant, Node, Stage},
        znodes::overtaken,
    },
    store::{
        ZkStore,
        attempt::{Acquisition, QueueView, prepare},
        in_place::{Giver, LOOKS, Replacement},
    },
    wire::{
        error::{Failure, lasting},
        fence::{self, FenceRecord},
        name::{self, LOCK},
        queue,
        value::Value,
    },
};

/// Grants a lease in the place of the exclusive one with the token `from`.
///
/// # Errors
/// Their effect is unknown as long as there is or may be a node of the claim, or that of the other lease may be gone.
///
/// # Cancellation
/// The claim may have the place by then, or come to have it: it is to be released, and so is the other one.
pub(crate) async fn replace(store: &ZkStore, request: &AcquireRequest, from: Token) -> Result<Attempt> {
    let (session, request, bound) = prepare(store, request).await?;
    let (place, token) = (Replacement::begin(store, &session, &request, from, bound), &request.claim.token);
    let is_new = session.claimed(token).is_none();
    if is_new {
        session.claims().insert(*token, Claimed::asked(place.lock.clone(), place.request.fence.span));
    }
    let answer = Replacing { place: &place, claim: Acquisition::new(&session, &request, bound) }.run().await;
    let answer = answer.map_err(|error| match session.claimed(token).map(|claimed| claimed.stage) {
        Some(Stage::Asked) if is_new && error.effect() == Effect::None => {
            session.claims().remove(token);
            error
        }
        Some(_) => error.unknown_effect(),
        // Its node may outlive a session that was given up.
        None if session.is_over() => error.unknown_effect(),
        None => error,
    });
    place.end(&answer);
    answer
}

/// One request for the place of a lease.
struct Replacing<'a> {
    place: &'a Replacement<'a>,
    /// The claim that is to have it.
    claim: Acquisition<'a>,
}

impl Replacing<'_> {
    async fn run(&mut self) -> Result<Attempt> {
        for _ in 0..LOOKS {
            self.claim.asked = self.claim.session.now();
            let children = self.place.list().await?;
            if let Some(answer) = self.again(&children).await? {
                return Ok(answer);
            }
            let Some(giver) = self.place.giver(&children).await? else { return Ok(self.refuse(&children)) };
            if let Some(answer) = self.replace(&giver).await? {
                return Ok(answer);
            }
        }
        Err(overtaken())
    }

    /// Puts the claim's node in the place of the other one; `None` if something is not as it was thought to be.
    async fn replace(&mut self, giver: &Giver) -> Result<Option<Attempt>> {
        let (session, request) = (self.claim.session, self.claim.request);
        let (fence, write) = self.place.fence(giver)?;
        let Some((_, number)) = giver.node.rsplit_once(LOCK) else { return Ok(None) };
        let name = format!("{}{}{number}", self.claim.protection, name::mark(request.claim.mode));
        let Some(sequence) = queue::sequence(&name) else { return Ok(None) };
        let (span, holder) = (request.fence.span, request.holder.clone());
        let grant = Grant { fence, span, depth: 1, explicit: true, holder };
        let node = Node { name, czxid: giver.czxid, sequence };
        match self.commit(giver, &node, &grant, write).await {
            Ok(true) => self.granted(node, grant).await.map(Some),
            // Somebody has ended it already.
            Ok(false) => Ok(None),
            Err(failure) if failure.is_answer() => Ok(None),
            Err(failure) => {
                session.is_in_doubt();
                Err(lasting(&failure))
            }
        }
    }

    /// Carries out the transaction; tells whether the claim's node is there after it.
    async fn commit(
        &mut self,
        giver: &Giver,
        node: &Node,
        grant: &Grant,
        write: Option<FenceRecord>,
    ) -> Result<bool, Failure> {
        let (session, bound) = (self.claim.session, self.claim.bound);
        let path = format!("{}/{}", self.claim.lock, node.name);
        let mut all = session.client.new_multi_writer();
        all.add_create(&path, grant.value().text().as_bytes(), &session.options(CreateMode::Ephemeral))?;
        self.place.add_end(&mut all, giver, grant.fence, write)?;
        self.claim.asked = session.now();
        // Servers need not tell whose a node is that a transaction made (ZOOKEEPER-4026): so that is asked for behind it.
        let done = session.commit(all, bound);
        let stat = async { session.read(bound, Box::pin(session.client.check_stat(&path))).await };
        let (done, stat) = tokio::join!(done, stat);
        done?;
        // Whatever becomes of the question behind it, the other lease is over, and the claim has a node.
        session.update(self.claim.token, |claimed| claimed.stage = Stage::Queued(node.clone()));
        let Some(stat) = stat? else { return Ok(false) };
        if !session.owns(stat.ephemeral_owner) {
            return Err(session.replaced());
        }
        session.wrote(self.claim.asked);
        Ok(true)
    }

    /// The claim has its node already.
    async fn again(&self, children: &[String]) -> Result<Option<Attempt>> {
        let (session, claim) = (self.claim.session, &self.claim);
        let Some(name) = queue::of_claim(children, &claim.protection).next() else { return Ok(None) };
        if let Some(Stage::Held(node, grant)) = session.claimed(claim.token).map(|claimed| claimed.stage)
            && node.name == name
        {
            return self.granted(node, grant).await.map(Some);
        }
        let path = format!("{}/{name}", claim.lock);
        let read = session.data(&path, claim.bound).await;
        let Some((data, stat)) = read.map_err(|failure| lasting(&failure))? else { return Ok(None) };
        let value = Value::parse(&data);
        let (Some(value), Some(sequence)) = (value, queue::sequence(name)) else { return Ok(None) };
        let Some(fence) = value.fence.filter(|_| session.owns(stat.ephemeral_owner)) else { return Ok(None) };
        let (record, _) = session.find_fence_record(&claim.lock, claim.bound).await?;
        let czxid = fence::place_of(record, fence, value.span);
        let grant = Grant { fence, span: value.span, depth: value.depth, explicit: true, holder: value.holder };
        self.granted(Node { name: name.to_owned(), czxid, sequence }, grant).await.map(Some)
    }

    /// Takes note that the claim holds the lock, and makes sure that the session lives.
    async fn granted(&self, node: Node, grant: Grant) -> Result<Attempt> {
        let (session, claim) = (self.claim.session, &self.claim);
        // Its node is one that nobody counted on, and its number was counted before.
        unpoisoned(&session.uncontended).forget(&claim.lock);
        session.update(claim.token, |claimed| claimed.stage = Stage::Held(node.clone(), grant));
        let queue = QueueView { node, children: Vec::new() };
        claim.grant(&queue, None).await?.ok_or_else(overtaken)
    }

    /// The other lease does not have the lock, and the claim no node.
    fn refuse(&self, children: &[String]) -> Attempt {
        self.claim.session.claims().remove(self.claim.token);
        self.place.refuse(children)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use lockkit_core::{Claim, Mode};

    use super::*;
    use crate::testing::{claim, is_given_up_while_it_asks, request};

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn whoever_takes_a_place_and_whose_session_is_declared_over_may_have_a_node() {
        for mode in [Mode::Shared, Mode::Exclusive] {
            let holder = claim();
            let next = Claim { token: Token::random().expect("token"), mode, ..holder.clone() };
            let asked = AcquireRequest { claim: next, from: Some(holder.token), ..request(&holder, Duration::ZERO) };
            is_given_up_while_it_asks(&[holder], asked).await;
        }
    }
}
