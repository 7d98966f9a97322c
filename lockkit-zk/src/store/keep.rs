//! Keeping a lock from all for a while when its holder is done: what a grant in the place of another comes to here.
//!
//! The holder's node ends with its session. What takes its place is no node of the queue, which nobody but lockkit would remove, but the record
//! of a [window](crate::wire::window). One transaction makes the record and deletes the node. Before that it writes to the
//! node, for who waits behind it may take its mere end for the news that the lock is free.

use std::{sync::Arc, time::Duration};

use lockkit_core::{
    AcquireRequest, Attempt, Contention, Effect, Error, Fence, Hold, HolderInfo, LossReason, Mode, Moment, Release,
    Result, StoreInfo, Token,
};
use zookeeper_client::{self as zk, MultiWriter};

use crate::{
    client::{
        claims::{Claimed, Stage},
        session::Session,
        windows::{self, Record},
        znodes::overtaken,
    },
    store::ZkStore,
    wire::{
        error::{self, Failure, Sent, unless_gone},
        fence::{self, FenceRecord},
        name,
        queue::{self, Position},
        value::{self, Value},
        window::{self, Window},
    },
};

/// How often a lock is looked at whose nodes change meanwhile.
const LOOKS: u32 = 5;

/// Has a lock kept in the place of the lease with the token `from`, or goes on with that if the claim did so before.
///
/// # Errors
/// Their effect is unknown once the transaction may have been sent, whatever becomes of the session: the record is not the session's.
///
/// # Cancellation
/// The lock may be kept, or still be held: the same request again settles it.
pub(crate) async fn keep(store: &ZkStore, request: &AcquireRequest, from: Token) -> Result<Attempt> {
    if request.ttl > StoreInfo::LONGEST_KEPT {
        let days = StoreInfo::LONGEST_KEPT.as_secs() / 86_400;
        return Err(Error::invalid(format!("a lock can be kept for at most {days} days")));
    }
    let (session, bound) = (store.session().await?, store.timeout());
    // Its node may go at any time from here on.
    let known = session.begin_release(&from);
    let lock = session.names.lock(&request.claim.key);
    let answer = Keeping { session: &session, request, from, lock, bound, asked: session.now() }.run(&known).await;
    if let Err(error) = &answer {
        let before = known.as_ref().is_some_and(|claimed| claimed.releasing);
        if error.effect() == Effect::None {
            session.update(&from, |claimed| claimed.releasing = before);
        }
        return answer;
    }
    let left = session.claims().remove(&from);
    if left.is_some_and(|left| left.node() != known.as_ref().and_then(Claimed::node)) {
        session.is_in_doubt();
    }
    store.sessions.forget(&from);
    if matches!(answer, Ok(Attempt::Granted(_))) {
        // That others leave something behind is no reason to say that this failed.
        drop(session.sweep_windows(bound).await);
    }
    answer
}

/// One request to keep a lock.
struct Keeping<'a> {
    session: &'a Arc<Session>,
    request: &'a AcquireRequest,
    from: Token,
    lock: String,
    bound: Duration,
    asked: Moment,
}

/// The lease whose place is taken.
struct Giver {
    node: String,
    czxid: i64,
    /// The first fence that is not its own.
    after: Fence,
    record: FenceRecord,
    /// The version of the fence record's node, if there is one.
    version: Option<i32>,
}

impl Keeping<'_> {
    async fn run(&self, known: &Option<Claimed>) -> Result<Attempt> {
        if let Some(giver) = known.as_ref().and_then(|claimed| self.known_giver(claimed))
            && let Some(hold) = self.replace(&giver, true).await?
        {
            return Ok(Attempt::Granted(hold));
        }
        for _ in 0..LOOKS {
            let children =
                self.session.list_settled(&self.lock, self.bound).await.map_err(|failure| lasting(&failure))?;
            if let Some(hold) = self.again(&children).await? {
                return Ok(Attempt::Granted(hold));
            }
            let Some(giver) = self.giver(&children).await? else { return self.refuse(&children).await };
            let list = self.session.names.windows();
            self.session.make_directory(&list, self.bound).await.map_err(Error::unknown_effect)?;
            if let Some(hold) = self.replace(&giver, false).await? {
                return Ok(Attempt::Granted(hold));
            }
        }
        Err(overtaken())
    }

    /// The lease as this session knows it, which is no more than a guess: the transaction fails if its node is gone. `None` if its
    /// fences have to be looked up.
    fn known_giver(&self, claimed: &Claimed) -> Option<Giver> {
        let Stage::Held(node, grant) = &claimed.stage else { return None };
        let after = grant.fence.offset(grant.span);
        let record = fence::offset_at(node.czxid, grant.fence).ok().filter(|_| !grant.explicit)?;
        Some(Giver { node: node.name.clone(), czxid: node.czxid, after, record, version: None })
    }

    /// The lease as the servers know it; `None` if it does not have the lock.
    async fn giver(&self, children: &[String]) -> Result<Option<Giver>> {
        let holds =
            |node: &&str| name::mode(node) == Mode::Exclusive && queue::place(children, node) == Position::Holds;
        let Some(node) = queue::of_claim(children, &name::protection(&self.from)).find(holds) else { return Ok(None) };
        if window::is_kept(children) {
            // It is the first in the queue, and waits.
            return Ok(None);
        }
        let path = format!("{}/{node}", self.lock);
        let read = unless_gone(self.session.read(self.bound, Box::pin(self.session.client.get_data(&path))).await);
        let Some((data, stat)) = read.map_err(|failure| lasting(&failure))? else { return Ok(None) };
        let (record, version) = match queue::has_record(children) {
            true => self.session.read_fence_record(&self.lock, self.bound).await?,
            false => (FenceRecord::NONE, None),
        };
        let own = Value::parse(&data).and_then(|value| {
            let fence = value.fence.or_else(|| record.natural(stat.czxid))?;
            Some(fence.offset(value.span))
        });
        // What others wrote into it says nothing of its fences, which end before those of the next node begin.
        let after = own.unwrap_or_else(|| record.natural(stat.czxid.saturating_add(1)).unwrap_or(Fence::NONE));
        Ok(Some(Giver { node: node.to_owned(), czxid: stat.czxid, after, record, version }))
    }

    /// Puts the record in the place of the node; `None` if something is not as it was thought to be. What is only `guessed` of the lock's
    /// fences is not written down.
    async fn replace(&self, giver: &Giver, guessed: bool) -> Result<Option<Hold>> {
        let (fence, write) = fence::in_place(giver.record, giver.czxid, giver.after, &self.request.fence)?;
        if guessed && write.is_some() {
            return Ok(None);
        }
        let millis = Window::millis(self.request.ttl);
        let window = Window { millis, due: windows::due(millis), fence, holder: self.request.holder.clone() };
        let all = self.transaction(giver, &window, write, true).map_err(|e| error::map(&e.into(), Sent::No))?;
        match self.session.commit(all, self.bound).await {
            // The list may be another user's, who has other locks in the same root.
            Err(failure) if failure.is(&zk::Error::NoAuth) => {
                let all =
                    self.transaction(giver, &window, write, false).map_err(|e| error::map(&e.into(), Sent::No))?;
                self.answer(fence, self.session.commit(all, self.bound).await)
            }
            done => self.answer(fence, done),
        }
    }

    fn answer(&self, fence: Fence, done: Result<(), Failure>) -> Result<Option<Hold>> {
        match done {
            Ok(()) => Ok(Some(self.hold(fence, self.asked))),
            Err(failure) if failure.is_answer() => Ok(None),
            Err(failure) => Err(lasting(&failure)),
        }
    }

    fn transaction(
        &self,
        giver: &Giver,
        window: &Window,
        write: Option<FenceRecord>,
        listed: bool,
    ) -> Result<MultiWriter<'_>, zk::Error> {
        let (session, node) = (self.session, format!("{}/{}", self.lock, giver.node));
        let mut all = session.client.new_multi_writer();
        // Servers show transactions step by step. The record comes first, so that none of them shows a free lock.
        session.add_record(&mut all, &self.lock, &self.request.claim.token, window, listed)?;
        if let Some(record) = write {
            session.add_fence_record(&mut all, &self.lock, record, giver.version)?;
        }
        // One that says its fence is not taken for one that merely went, however late it is read.
        let value = Value { depth: 1, span: 1, fence: Some(window.fence), holder: window.holder.clone() };
        all.add_set_data(&node, value.text().as_bytes(), None)?;
        all.add_delete(&node, None)?;
        Ok(all)
    }

    /// The claim keeps the lock already, and goes on to from now.
    async fn again(&self, children: &[String]) -> Result<Option<Hold>> {
        if !children.contains(&window::node(&self.request.claim.token)) {
            return Ok(None);
        }
        let (token, asked) = (&self.request.claim.token, self.session.now());
        let extended = extend(self.session, &self.lock, token, self.request.ttl, self.bound).await?;
        Ok(extended.map(|record| self.hold(record.window.fence, asked)))
    }

    fn hold(&self, fence: Fence, asked: Moment) -> Hold {
        let until = asked + self.request.ttl;
        Hold { claim: self.request.claim.clone(), fence, span: self.request.fence.span, until, depth: 1 }
    }

    /// Another has the lock, or nobody.
    async fn refuse(&self, children: &[String]) -> Result<Attempt> {
        let holder = match queue::contenders(children).first() {
            None => self.session.records(&self.lock, children, self.bound).await?.pop().map(|r| r.window.holder),
            Some(first) => {
                let path = format!("{}/{first}", self.lock);
                let read = self.session.read(self.bound, Box::pin(self.session.client.get_data(&path))).await;
                let unread = || HolderInfo::new("");
                Some(
                    unless_gone(read)
                        .map_err(|failure| lasting(&failure))?
                        .map_or_else(unread, |(data, _)| value::holder(&data)),
                )
            }
        };
        Ok(Attempt::Contended(Contention { retry_after: None, holder, burnt: false }))
    }
}

/// Lets the window of a claim end so late after now; `None` if there is none, or it was ended meanwhile.
async fn extend(
    session: &Session,
    lock: &str,
    token: &Token,
    ttl: Duration,
    bound: Duration,
) -> Result<Option<Record>> {
    for _ in 0..LOOKS {
        let Some(record) = session.record(lock, token, bound).await? else { return Ok(None) };
        let written =
            session.extend(lock, &record, Window::millis(ttl), bound).await.map_err(|failure| lasting(&failure))?;
        if written.is_some() {
            return Ok(Some(record));
        }
    }
    Err(overtaken())
}

/// Ends the window of a claim, if there is one, and says whether it was over by then. `waiters` are waiting.
///
/// # Errors
/// As those of [`keep`].
pub(crate) async fn end(
    session: &Session,
    lock: &str,
    token: &Token,
    waiters: usize,
    bound: Duration,
) -> Result<Option<Release>> {
    for _ in 0..LOOKS {
        let Some(record) = session.record(lock, token, bound).await? else { return Ok(None) };
        let now = session.leader_time().await.map_err(|failure| lasting(&failure))?;
        let is_over = record.window.left(record.written, now).is_zero();
        if session.remove(lock, &record, bound).await.map_err(|failure| lasting(&failure))? {
            let released = Release::Released { waiters: u32::try_from(waiters).ok() };
            return Ok(Some(if is_over { Release::NotHeld(LossReason::Gone) } else { released }));
        }
    }
    Err(overtaken())
}

fn lasting(failure: &Failure) -> Error {
    error::map_lasting(failure, Sent::Yes)
}
