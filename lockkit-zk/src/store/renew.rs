//! Renewal: one proof of life for all leases of the session, and a look at the node of each where there is reason to.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use lockkit_core::{Claim, Error, ErrorKind, Fence, Hold, LossReason, Mode, Moment, Renewal, Renewed, Result, Token};
use tokio::time::{Instant, timeout_at};
use zookeeper_client::{self as zk, Stat};

use crate::{
    client::{
        claims::{Claimed, Grant, Node, Stage},
        driver::Answer,
        session::Session,
        unwatched::Unwatched,
        watched::{Use, Watched, changed},
        znodes::overtaken,
    },
    store::ZkStore,
    wire::{
        error::{self, Failure, Sent, doubtful, read_only},
        fence,
    },
};

/// Renews leases; one answer for each.
///
/// What has to be asked about single leases is asked for all of them before the first answer is awaited. As long
/// as the watches on their nodes are silent nothing has to be: then a thousand leases cost one small write.
pub(crate) async fn renew(store: &ZkStore, renewals: &[Renewal]) -> Vec<Result<Renewed>> {
    let (sessions, bound) = (&store.sessions, store.timeout());
    // What ended with its session is said at once, whether or not there is a new one.
    let ended = |renewal: &Renewal| sessions.present().is_none() && sessions.was_held(&renewal.claim.token);
    let session = if renewals.iter().all(ended) { Err(error::session_over()) } else { sessions.session().await };
    let session = match session {
        Ok(session) => session,
        Err(e) => return renewals.iter().map(|renewal| without_session(store, &renewal.claim, &e)).collect(),
    };
    let asked = session.now();
    let plans: Vec<_> = renewals.iter().map(|renewal| PendingRenewal::new(&session, renewal)).collect();
    let mut unwatched = Unwatched::new(&session);
    let checks: Vec<_> = plans.iter().map(|plan| plan.send(&session, &mut unwatched)).collect();
    unwatched.send();
    // For all together: one bound for the sign of life, and another for what is asked besides. No lease outlasts the session.
    let deadline = Instant::now() + bound.saturating_mul(2).min(session.timeout());
    let alive = if plans.iter().any(|plan| plan.held().is_some()) { session.sign_of_life(bound).await } else { Ok(()) };
    let mut seen = unwatched.answers(deadline, bound).await.into_iter();
    let mut answers = Vec::with_capacity(renewals.len());
    for (plan, mut check) in plans.iter().zip(checks) {
        if let Some(Look::Unwatched(answer)) = &mut check.look {
            *answer = seen.next();
        }
        // What is there by then counts, however late this is asked.
        let answer = timeout_at(deadline, plan.finish(&session, store, check, &alive, asked, bound)).await;
        answers.push(answer.unwrap_or_else(|_| Err(Error::no_answer(bound, Sent::Yes))));
    }
    answers
}

fn without_session(store: &ZkStore, claim: &Claim, error: &Error) -> Result<Renewed> {
    store.info.admit_mode(claim.mode)?;
    if store.sessions.was_held(&claim.token) {
        store.sessions.was_not_held(&claim.token);
        return Ok(Renewed::Lost(LossReason::SessionEnded));
    }
    Err(error.clone().unknown_effect())
}

/// What is known of a lease before anything is asked.
struct PendingRenewal<'a> {
    renewal: &'a Renewal,
    claimed: Option<Claimed>,
    /// The path of its node, if it has one.
    path: String,
}

/// What was asked about a lease.
struct Check<'a> {
    look: Option<Look<'a>>,
    /// The write of what the node is to show.
    shown: Option<Answer<'a, Stat>>,
}

/// How a node is looked at.
enum Look<'a> {
    /// Once: the watch tells of what comes.
    Watched(Answer<'a, (Stat, Watched)>),
    /// Again at each renewal, for there is no room for a watch. It is asked together with others, and put here.
    Unwatched(Option<Result<Stat, Failure>>),
}

impl<'a> PendingRenewal<'a> {
    fn new(session: &Session, renewal: &'a Renewal) -> Self {
        let claimed = session.claimed(&renewal.claim.token);
        let path = claimed.as_ref().and_then(|claimed| Some(format!("{}/{}", claimed.lock, claimed.node()?.name)));
        Self { renewal, claimed, path: path.unwrap_or_default() }
    }

    /// The lease, if it is held and its promise can be kept.
    fn held(&self) -> Option<(&Claimed, &Node, &Grant)> {
        let claimed = self.claimed.as_ref().filter(|claimed| !claimed.cut)?;
        let Stage::Held(node, grant) = &claimed.stage else { return None };
        Some((claimed, node, grant))
    }

    /// Sends what has to be asked, without awaiting it.
    fn send<'s>(&'s self, session: &'s Session, unwatched: &mut Unwatched<'s>) -> Check<'s> {
        let Some((claimed, _, grant)) = self.held() else { return Check { look: None, shown: None } };
        let is_shown =
            grant.depth == self.renewal.depth && self.renewal.holder.as_ref().is_none_or(|name| *name == grant.holder);
        let shown: Option<Answer<'s, Stat>> = (!is_shown || !claimed.written).then(|| {
            session.update(&self.renewal.claim.token, |claimed| claimed.written = false);
            let value = self.renewed(grant).value();
            Box::pin(session.client.set_data(&self.path, value.text().as_bytes(), None)) as Answer<'s, Stat>
        });
        // After the write, so that the watch is not spent on it.
        let look = (!claimed.watched || shown.is_some()).then(|| look(session, &self.path, unwatched));
        Check { look, shown }
    }

    /// The grant as this renewal shows it.
    fn renewed(&self, grant: &Grant) -> Grant {
        let holder = self.renewal.holder.as_ref().unwrap_or(&grant.holder).clone();
        Grant { depth: self.renewal.depth, holder, ..grant.clone() }
    }

    async fn finish(
        &self,
        session: &Arc<Session>,
        store: &ZkStore,
        check: Check<'_>,
        alive: &Result<(), Failure>,
        asked: Moment,
        bound: Duration,
    ) -> Result<Renewed> {
        let (claim, sessions) = (&self.renewal.claim, &store.sessions);
        store.info.admit_mode(claim.mode)?;
        let Some((Claimed { lock, .. }, node, _)) = self.held() else {
            return match &self.claimed {
                // Its node stays until the core releases it, which it does when it has told the holder.
                Some(Claimed { stage: Stage::Held(..), .. }) => Ok(Renewed::Lost(LossReason::Expired)),
                None if sessions.was_held(&claim.token) => {
                    // Its release is to know that it is of this store: nobody revokes it.
                    sessions.was_not_held(&claim.token);
                    Ok(Renewed::Lost(LossReason::SessionEnded))
                }
                _ => lose(session, claim, bound).await,
            };
        };
        let wrote = check.shown.is_some();
        let outcome = self.check(session, node, check, asked, bound).await;
        if session.is_over() {
            sessions.was_not_held(&claim.token);
            return Ok(Renewed::Lost(LossReason::SessionEnded));
        }
        if outcome.as_ref().is_err_and(|failure| failure.is(&zk::Error::NoNode)) {
            // Its release may be repeated, and has to find it as it was.
            session.update(&claim.token, |claimed| {
                if !claimed.releasing {
                    claimed.stage = Stage::Gone;
                }
            });
            return lose(session, claim, bound).await;
        }
        outcome.and_then(|()| alive.clone()).map_err(|failure| doubtful(&failure))?;
        let renewed = change_grant(session, claim, node, |grant, written| {
            *grant = self.renewed(grant);
            *written |= wrote;
        });
        let Some(grant) = renewed else { return lose(session, claim, bound).await };
        if let Some(floor) = self.renewal.fence_floor {
            self.raise(session, lock, node, floor, bound).await?;
        }
        let until = session.proven().min(asked + self.renewal.ttl);
        let (fence, span, depth) = (grant.fence, grant.span, grant.depth);
        Ok(Renewed::Held(Hold { claim: claim.clone(), fence, span, until, depth }))
    }

    /// Awaits what was asked about the node.
    async fn check(
        &self,
        session: &Arc<Session>,
        node: &Node,
        check: Check<'_>,
        sent: Moment,
        bound: Duration,
    ) -> Result<(), Failure> {
        if let Some(shown) = check.shown {
            session.lead(sent, bound, shown).await?;
        }
        let (stat, watch) = match check.look {
            Some(Look::Watched(answer)) => {
                let (stat, watch) = session.read(bound, answer).await?;
                (stat, Some(watch))
            }
            Some(Look::Unwatched(seen)) => (seen.ok_or(Failure::TimedOut(bound))??, None),
            None => return Ok(()),
        };
        if !session.owns(stat.ephemeral_owner) {
            return Err(session.replaced());
        }
        if let Some(watch) = watch {
            let minded = Minded::new(session, self.renewal.claim.token, node.clone());
            // The runtime of whoever asks for this renewal may end long before the lease.
            session.spawn(mind(minded, watch));
        }
        Ok(())
    }

    /// Raises the lock's fences above `floor`, in one transaction with a write to the holder's node, so that nobody
    /// raises them who has lost the lock. If another of those that hold it together does so at the same time, it fails, and the
    /// renewal is asked for again.
    async fn raise(&self, session: &Session, lock: &str, node: &Node, floor: Fence, bound: Duration) -> Result<()> {
        let children = session.list(lock, bound).await.map_err(|failure| doubtful(&failure))?;
        let (record, stat) = session.read_fence_record(lock, &children, bound).await?;
        let own_end = match session.claimed(&self.renewal.claim.token).map(|claimed| claimed.stage) {
            Some(Stage::Held(_, grant)) if self.renewal.claim.mode == Mode::Exclusive => {
                Some(grant.fence.offset(grant.span))
            }
            Some(Stage::Held(..)) => None,
            _ => return Err(overtaken()),
        };
        let Some(raised) = fence::raise(record, node.czxid, floor, own_end)? else { return Ok(()) };
        // From now on the node may say it, and must go on to.
        let explicit = change_grant(session, &self.renewal.claim, node, |grant, written| {
            (grant.explicit, *written) = (true, false);
        });
        let Some(grant) = explicit else { return Err(overtaken()) };
        let (own, version) = ((&*node.name, grant.value()), stat.map(|stat| stat.version));
        if !session.write_fence_record(lock, raised, version, own, bound).await? {
            return Err(overtaken());
        }
        session.update(&self.renewal.claim.token, |claimed| claimed.written = true);
        Ok(())
    }
}

/// Asks for a node that is held, with a watch on it if there is room for one.
fn look<'s>(session: &'s Session, path: &'s str, unwatched: &mut Unwatched<'s>) -> Look<'s> {
    let watched = session.watches.ask(path, Use::Hearing, || {
        let answer = session.client.get_and_watch_data(path);
        async { answer.await.map(|(_, stat, watcher)| (stat, watcher)) }
    });
    match watched {
        Some(answer) => Look::Watched(answer),
        None => {
            unwatched.add(path);
            Look::Unwatched(None)
        }
    }
}

/// Says that a claim does not hold its lock, and why. If its node is known to be gone it is forgotten.
async fn lose(session: &Session, claim: &Claim, bound: Duration) -> Result<Renewed> {
    let lock = session.names.lock(&claim.key);
    if session.claimed(&claim.token).is_none() && session.record(&lock, &claim.token, bound).await?.is_some() {
        let message = "a lease that keeps a lock when its holder is done is not renewed: it ends by time";
        return Err(Error::new(ErrorKind::Unsupported, message));
    }
    let reason = session.why_not(claim, bound).await.map_err(|failure| read_only(&failure))?;
    if session.claimed(&claim.token).is_some_and(|claimed| matches!(claimed.stage, Stage::Gone)) {
        session.claims().remove(&claim.token);
    }
    Ok(Renewed::Lost(reason))
}

/// The word that a watch tells of the end of a node that is held, so that renewals don't ask for it. It is taken back when nobody
/// minds that watch any more, whatever the reason.
struct Minded {
    /// It does not keep the session alive.
    session: Weak<Session>,
    token: Token,
    node: Node,
}

impl Minded {
    fn new(session: &Arc<Session>, token: Token, node: Node) -> Self {
        let minded = Self { session: Arc::downgrade(session), token, node };
        minded.set(session, true);
        minded
    }

    fn set(&self, session: &Session, watched: bool) {
        session.update(&self.token, |claimed| {
            if claimed.node() == Some(&self.node) {
                claimed.watched = watched;
            }
        });
    }
}

impl Drop for Minded {
    fn drop(&mut self) {
        if let Some(session) = self.session.upgrade() {
            self.set(&session, false);
        }
    }
}

/// Waits for news of a node that is held.
async fn mind(minded: Minded, watch: Watched) {
    let Some(event) = changed(watch).await else { return };
    let Some(session) = minded.session.upgrade() else { return };
    let (token, node) = (minded.token, minded.node.clone());
    // Before the alarm: the renewal that it brings has to ask.
    drop(minded);
    let (mut deleted, mut touched) = (false, false);
    session.update(&token, |claimed| {
        let is_held = matches!(&claimed.stage, Stage::Held(held, _) if *held == node);
        deleted = is_held && event == zk::EventType::NodeDeleted;
        // A lease that takes the place writes to the node before it deletes it, and a watch tells of one thing only. While a write of the
        // holder is not answered, `written` is false: such an event is its own.
        touched = is_held && event == zk::EventType::NodeDataChanged && claimed.written;
        // Its release may be repeated, and has to find it as it was.
        if deleted && !claimed.releasing {
            claimed.stage = Stage::Gone;
        }
    });
    // Also if its end was asked for here: not its holder need have done so.
    if deleted || touched {
        session.alarm.raise(token);
    }
}

/// Changes a grant, and whether the node says it, unless the claim has lost its node meanwhile. What it is then.
fn change_grant(
    session: &Session,
    claim: &Claim,
    node: &Node,
    change: impl FnOnce(&mut Grant, &mut bool),
) -> Option<Grant> {
    let mut changed = None;
    session.update(&claim.token, |claimed| {
        if let Stage::Held(own, grant) = &mut claimed.stage
            && own == node
        {
            change(grant, &mut claimed.written);
            changed = Some(grant.clone());
        }
    });
    changed
}
