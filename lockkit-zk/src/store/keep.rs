//! Keeping a lock from all for a while when its holder is done: a grant in the place of another that nobody holds.
//!
//! The holder's node ends with its session. What takes its place is no node of the queue, which nobody but lockkit would remove, but the record
//! of a [window](crate::wire::window). One transaction makes the record and deletes the node.

use std::time::Duration;

use lockkit_core::{
    AcquireRequest, Attempt, Error, Fence, Hold, LossReason, Moment, Release, Result, StoreInfo, Token,
};
use tokio::time::timeout;
use zookeeper_client as zk;

use crate::{
    client::{
        session::Session,
        windows::{self, Record},
        znodes::overtaken,
    },
    store::{
        ZkStore,
        in_place::{Giver, LOOKS, Replacement},
    },
    wire::{
        error::{Failure, lasting},
        fence::FenceRecord,
        window::{self, Window},
    },
};

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
    let keeping = Keeping { asked: session.now(), place: Replacement::begin(store, &session, request, from, bound) };
    let answer = keeping.run().await;
    keeping.place.end(&answer);
    if matches!(answer, Ok(Attempt::Granted(_))) {
        // That others leave something behind is no reason to say that this failed, nor for it to take long.
        drop(timeout(bound, session.sweep_windows(bound)).await);
    }
    answer
}

/// One request to keep a lock.
struct Keeping<'a> {
    place: Replacement<'a>,
    asked: Moment,
}

impl Keeping<'_> {
    async fn run(&self) -> Result<Attempt> {
        let place = &self.place;
        for _ in 0..LOOKS {
            let children = place.list().await?;
            if let Some(hold) = self.again(&children).await? {
                return Ok(Attempt::Granted(hold));
            }
            let Some(giver) = place.giver(&children).await? else { return Ok(place.refuse(&children)) };
            if let Some(hold) = self.replace(&giver).await? {
                return Ok(Attempt::Granted(hold));
            }
        }
        Err(overtaken())
    }

    /// Puts the record in the place of the node; `None` if something is not as it was thought to be.
    async fn replace(&self, giver: &Giver) -> Result<Option<Hold>> {
        let (place, request) = (&self.place, self.place.request);
        let (fence, write) = place.fence(giver)?;
        let millis = Window::millis(request.ttl);
        let window = Window { millis, due: windows::due(millis), fence, holder: request.holder.clone() };
        let mut done = self.commit(giver, &window, write, true).await;
        if done.as_ref().is_err_and(|failure| failure.is(&zk::Error::NoNode)) {
            // The list is missing, or the node that was to go: another look tells. Making the list each time would cost each window a write.
            let list = place.session.names.windows();
            place.session.make_directory(&list, place.bound).await.map_err(Error::unknown_effect)?;
            return Ok(None);
        }
        if done.as_ref().is_err_and(|failure| failure.is(&zk::Error::NoAuth)) {
            // The list may be another user's, who has other locks in the same root.
            done = self.commit(giver, &window, write, false).await;
        }
        match done {
            Ok(()) => Ok(Some(self.hold(fence, self.asked))),
            Err(failure) if failure.is_answer() => Ok(None),
            Err(failure) => Err(lasting(&failure)),
        }
    }

    async fn commit(
        &self,
        giver: &Giver,
        window: &Window,
        write: Option<FenceRecord>,
        listed: bool,
    ) -> Result<(), Failure> {
        let (place, session) = (&self.place, self.place.session);
        let mut all = session.client.new_multi_writer();
        session.add_record(&mut all, &place.lock, &place.request.claim.token, window, listed)?;
        place.add_end(&mut all, giver, window.fence, write)?;
        session.commit(all, place.bound).await
    }

    /// The claim keeps the lock already, and goes on to from now; `None` if it does not, or its window was ended meanwhile.
    async fn again(&self, children: &[String]) -> Result<Option<Hold>> {
        let (place, token) = (&self.place, &self.place.request.claim.token);
        if !children.contains(&window::node(token)) {
            return Ok(None);
        }
        let (session, millis) = (place.session, Window::millis(place.request.ttl));
        for _ in 0..LOOKS {
            let asked = session.now();
            let Some(record) = session.record(&place.lock, token, place.bound).await? else { return Ok(None) };
            let extended = session.extend(&place.lock, &record, millis, place.bound).await;
            if extended.map_err(|failure| lasting(&failure))? {
                return Ok(Some(self.hold(record.window.fence, asked)));
            }
        }
        Err(overtaken())
    }

    fn hold(&self, fence: Fence, asked: Moment) -> Hold {
        let request = self.place.request;
        Hold { claim: request.claim.clone(), fence, span: request.fence.span, until: asked + request.ttl, depth: 1 }
    }
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
        let Some((data, stat)) = session.record_data(lock, token, bound).await? else { return Ok(None) };
        let (removed, is_over) = match Window::parse(&data) {
            Some(window) => {
                let now = session.leader_time().await.map_err(|failure| lasting(&failure))?;
                let record = Record { token: *token, window, written: stat.mtime, version: stat.version };
                (session.remove(lock, &record, bound).await, record.left(now).is_zero())
            }
            // It has another form. What the list has of it is removed when it is due.
            None => (session.remove_record(lock, token, stat.version, bound).await, false),
        };
        if removed.map_err(|failure| lasting(&failure))? {
            let released = Release::Released { waiters: u32::try_from(waiters).ok() };
            return Ok(Some(if is_over { Release::NotHeld(LossReason::Gone) } else { released }));
        }
    }
    Err(overtaken())
}
