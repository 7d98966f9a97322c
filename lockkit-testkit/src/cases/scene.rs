//! A client and questions whose right answers are known.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use lockkit_core::{
    AcquireRequest, Attempt, Claim, Error, Fence, Hold, HolderInfo, KeyState, LockKey, LockStore, LossReason, Query,
    Release, Renewal, Renewed, Result as StoreResult, Token,
    store::{Record, Records},
};
use tokio::task::JoinSet;

use super::{CaseResult, Ctx, LONG, SHORT, answered, call::Call, request};
use crate::{BoxError, Server, faults::Proxy};

/// So many of each question are under way at once: more than a client has connections. Mostly they are asked so often.
const AT_ONCE: usize = 3;
pub(super) const ROUNDS: usize = 2;

/// How long the two leases last: many scenes are opened one after the other, and then left alone for a while.
const HELD: Duration = LONG.saturating_mul(3);

/// How long a client may need until it answers again.
const PATIENCE: Duration = Duration::from_secs(10);

/// A client behind a proxy, another one beside it, and a lock that each of them holds.
#[derive(Debug)]
pub(super) struct Scene {
    pub(super) store: Arc<dyn LockStore>,
    pub(super) proxy: Proxy,
    /// The lease of the client behind the proxy.
    pub(super) mine: Claim,
    /// The lease of the other one.
    pub(super) theirs: Claim,
    other: Arc<dyn LockStore>,
    fence: Fence,
    /// A lock that nobody ever had.
    free: LockKey,
    /// A record that the other client made, if records are asked about.
    record: Option<(LockKey, Record)>,
    /// Set once the client behind the proxy has said that its session has ended.
    over: AtomicBool,
}

impl Scene {
    pub(super) async fn open(ctx: &Ctx, server: &dyn Server) -> Result<Self, BoxError> {
        Self::opened(ctx, server, None).await
    }

    /// The same, with a client that waits no longer than this for an answer.
    pub(super) async fn impatient(ctx: &Ctx, server: &dyn Server, timeout: Duration) -> Result<Self, BoxError> {
        Self::opened(ctx, server, Some(timeout)).await
    }

    async fn opened(ctx: &Ctx, server: &dyn Server, timeout: Option<Duration>) -> Result<Self, BoxError> {
        let started = Instant::now();
        loop {
            // On a busy machine it may take longer to connect than a client waits.
            let error = match Self::open_once(ctx, server, timeout).await {
                Ok(scene) => return Ok(scene),
                Err(error) => error,
            };
            let passes = error.downcast_ref::<Error>().is_some_and(Error::is_retryable);
            if !passes || started.elapsed() >= PATIENCE {
                return Err(error);
            }
        }
    }

    async fn open_once(ctx: &Ctx, server: &dyn Server, timeout: Option<Duration>) -> Result<Self, BoxError> {
        let (store, proxy) = match timeout {
            Some(timeout) => server.open_impatient(timeout).await?,
            None => server.open_through_proxy().await?,
        };
        let other = server.open().await?;
        let take = async |store, key| take(store, Call::AcquireNew, &key, HELD).await;
        let (mine, theirs) = (take(&store, ctx.key()?).await?, take(&other, ctx.key()?).await?);
        let free = ctx.key()?;
        Ok(Self {
            store,
            proxy,
            mine: mine.claim,
            theirs: theirs.claim,
            other,
            fence: mine.fence,
            free,
            record: None,
            over: AtomicBool::default(),
        })
    }

    /// The same with a record that is asked about.
    pub(super) async fn with_record(mut self, ctx: &Ctx) -> Result<Self, BoxError> {
        let name = ctx.key()?;
        let text = self.make_record(&name).await?;
        self.record = Some((name, text));
        Ok(self)
    }

    /// Asks all questions so often, several at a time. An error is no wrong answer, as long as an answer comes in the end.
    pub(super) async fn ask(self: &Arc<Self>, ctx: &Ctx, rounds: usize) -> CaseResult {
        if let Renewed::Lost(reason) = answered(|| renewal_of(&self.other, &self.theirs)).await? {
            return Err(lost(reason));
        }
        for _ in 0..rounds {
            let mut asked = JoinSet::new();
            for _ in 0..AT_ONCE {
                let (scene, new) = (Arc::clone(self), ctx.key()?);
                asked.spawn(async move { scene.who_holds().await });
                let scene = Arc::clone(self);
                asked.spawn(async move { scene.read_theirs().await });
                let scene = Arc::clone(self);
                asked.spawn(async move { scene.renew_mine().await });
                let scene = Arc::clone(self);
                asked.spawn(async move { scene.take_theirs().await });
                let scene = Arc::clone(self);
                asked.spawn(async move { scene.end_theirs().await });
                let scene = Arc::clone(self);
                asked.spawn(async move { scene.take_and_end(&new).await });
            }
            while let Some(answer) = asked.join_next().await {
                answer??;
            }
        }
        Ok(())
    }

    /// Whether the session of the client behind the proxy has ended, if it has one, and its lease with it: it may end its
    /// session because of an answer that it did not ask for.
    pub(super) async fn is_over(&self) -> Result<bool, BoxError> {
        // What came twice comes before the answer to this. A renewal may do without a question.
        let theirs = Query::Keys(vec![self.theirs.key.clone()]);
        let states = answered(|| self.store.inspect(&theirs)).await?;
        let right = states.first().is_some_and(|state| may_hold(state, &self.theirs));
        expect(right, || format!("the wrong holder is shown: {states:?}"))?;
        let renewed = self.renew_mine().await;
        let is_over = self.over.load(Ordering::Relaxed);
        if is_over { Ok(true) } else { renewed.map(|()| false) }
    }

    async fn who_holds(&self) -> CaseResult {
        let keys = [&self.mine, &self.theirs].map(|claim| claim.key.clone());
        let query = Query::Keys([keys.as_slice(), std::slice::from_ref(&self.free)].concat());
        let states = answered(|| self.store.inspect(&query)).await?;
        let right = matches!(states.as_slice(), [mine, theirs, free]
            if may_hold(mine, &self.mine) && may_hold(theirs, &self.theirs) && free.holders.is_empty());
        expect(right, || format!("the wrong holders are shown: {states:?}"))
    }

    async fn read_theirs(&self) -> CaseResult {
        let Some((name, text)) = &self.record else { return Ok(()) };
        let keeper = only_keeper(&self.store)?;
        let read = answered(|| keeper.read(name)).await?;
        expect(read.as_ref() == Some(text), || format!("the record {text:?} is read as {read:?}"))
    }

    async fn renew_mine(&self) -> CaseResult {
        let renewed = answered(|| renewal_of(&self.store, &self.mine)).await?;
        let hold = match renewed {
            Renewed::Held(hold) => hold,
            Renewed::Lost(reason) => {
                self.over.fetch_or(reason == LossReason::SessionEnded, Ordering::Relaxed);
                return Err(lost(reason));
            }
        };
        let right = hold.fence == self.fence && hold.claim == self.mine;
        expect(right, || format!("the fence {} became {} in a renewal", self.fence, hold.fence))
    }

    async fn take_theirs(&self) -> CaseResult {
        let mut claim = None;
        let answer = answered(|| {
            let asked = request(&self.theirs.key, SHORT);
            claim = asked.as_ref().ok().map(|asked| asked.claim.clone());
            async { self.store.acquire(&asked.map_err(unexpected)?).await }
        })
        .await?;
        self.give_up(&claim.ok_or("nothing was asked")?).await?;
        expect(matches!(answer, Attempt::Contended(_)), || format!("a lock that another holds was granted: {answer:?}"))
    }

    async fn end_theirs(&self) -> CaseResult {
        let foreign = self.foreign()?;
        let answer = answered(|| self.store.release(&foreign)).await?;
        let right = answer == Release::NotHeld(LossReason::Taken);
        expect(right, || format!("a release of another's lease was answered by {answer:?}"))
    }

    /// Takes a new lock and sees with other eyes that it is held, with the fence that was told, and free afterwards.
    async fn take_and_end(&self, key: &LockKey) -> CaseResult {
        let hold = self.take(key, LONG).await?;
        let key = &hold.claim.key;
        let state = self.seen_by_other(key).await?;
        let fence = state.holders.first().and_then(|holder| holder.fence);
        let right = holder(&state) == Some(hold.claim.token) && fence == Some(hold.fence);
        expect(right, || format!("a grant with the fence {} is on record as {state:?}", hold.fence))?;
        let answer = answered(|| self.store.release(&hold.claim)).await?;
        // A release that was sent twice finds nothing the second time.
        let right = matches!(answer, Release::Released { .. } | Release::NotHeld(LossReason::Gone));
        expect(right, || format!("a held lease's release was answered by {answer:?}"))?;
        let state = self.seen_by_other(key).await?;
        expect(state.holders.is_empty(), || format!("a released lock is on record as {state:?}"))
    }

    /// A request for a free lock, which somebody has had if the call is to be about a known one.
    pub(super) async fn request_for_free(
        &self,
        ctx: &Ctx,
        call: Call,
        ttl: Duration,
    ) -> Result<AcquireRequest, BoxError> {
        let mut key = ctx.key()?;
        if call == Call::AcquireKnown {
            let before = self.take(&key, LONG).await?.claim;
            key = before.key.clone();
            self.end(&AcquireRequest { claim: before, ..request(&key, LONG)? }).await?;
        }
        call.request(&key, ttl)
    }

    /// A request for the lock that the other client holds.
    pub(super) fn request_for_held(&self, call: Call, ttl: Duration) -> Result<AcquireRequest, BoxError> {
        Ok(AcquireRequest { wait: call.wait(), ..call.request(&self.theirs.key, ttl)? })
    }

    /// A lease of the client behind the proxy, and a request in its place.
    pub(super) async fn request_in_place(
        &self,
        ctx: &Ctx,
        call: Call,
        ttl: Duration,
    ) -> Result<(Claim, AcquireRequest), BoxError> {
        let before = self.take(&ctx.key()?, LONG).await?.claim;
        let (from, keeps) = (Some(before.token), call == Call::Keep);
        let asked = AcquireRequest { from, keeps, ..call.request(&before.key, ttl)? };
        Ok((before, asked))
    }

    /// The renewal of the lease of the client behind the proxy. Each change has another name.
    pub(super) fn renewal(&self, call: Call) -> Result<[Renewal; 1], BoxError> {
        let (fence_floor, holder) = match call {
            Call::Change => {
                let name = format!("holder {}", &Token::random()?.reveal()[..6]);
                (Some(self.fence.offset(1000)), Some(HolderInfo::new(&name)))
            }
            _ => (None, None),
        };
        Ok([Renewal { claim: self.mine.clone(), ttl: LONG, depth: 1, fence_floor, holder }])
    }

    /// A claim of another owner to the lock that the other client holds.
    pub(super) fn foreign(&self) -> Result<Claim, BoxError> {
        Ok(Claim { token: Token::random()?, ..self.theirs.clone() })
    }

    /// What an inspection asks.
    pub(super) fn query(&self, call: Call) -> Query {
        match call {
            Call::InspectPrefix => Query::Prefix(self.mine.key.as_str().to_owned()),
            Call::InspectQueue => Query::Queue(self.mine.key.clone()),
            _ => Query::Keys(vec![self.theirs.key.clone(), self.mine.key.clone()]),
        }
    }

    /// Makes a record, by the other client.
    pub(super) async fn make_record(&self, name: &LockKey) -> Result<Record, BoxError> {
        let (keeper, text) = (only_keeper(&self.other)?, new_text()?);
        answered(|| keeper.compare_and_set(name, None, Some(&text))).await?;
        Ok(text)
    }

    /// What a record is, as the other client sees it.
    pub(super) async fn record_seen_by_other(&self, name: &LockKey) -> Result<Option<Record>, BoxError> {
        let keeper = only_keeper(&self.other)?;
        answered(|| keeper.read(name)).await
    }

    /// Takes a free lock. It may get another name, which the lease tells: see [`take`].
    pub(super) async fn take(&self, key: &LockKey, ttl: Duration) -> Result<Hold, BoxError> {
        self.take_for(Call::AcquireNew, key, ttl).await
    }

    /// The same, in the way that the call is about.
    pub(super) async fn take_for(&self, call: Call, key: &LockKey, ttl: Duration) -> Result<Hold, BoxError> {
        take(&self.store, call, key, ttl).await
    }

    /// Ends what was asked for, if it has not ended, and sees that the lock is free.
    pub(super) async fn end(&self, asked: &AcquireRequest) -> CaseResult {
        let answer = answered(|| self.store.release(&asked.claim)).await?;
        // After a cut connection the request may still arrive, and a lease of this short ttl come and go. A session that the
        // client gave up ends a moment later.
        let is_later = asked.ttl == SHORT || answer == Release::NotHeld(LossReason::SessionEnded);
        self.vanishes(&asked.claim.key, if is_later { PATIENCE } else { Duration::ZERO }).await
    }

    /// Sees that a lock is free, or becomes so in this time.
    async fn vanishes(&self, key: &LockKey, patience: Duration) -> CaseResult {
        let started = Instant::now();
        loop {
            let state = self.seen_by_other(key).await?;
            if state.holders.is_empty() {
                return Ok(());
            }
            expect(started.elapsed() < patience, || format!("what has ended is on record as {state:?}"))?;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Gives up a claim that was not granted.
    pub(super) async fn give_up(&self, claim: &Claim) -> CaseResult {
        answered(|| self.store.release(claim)).await?;
        Ok(())
    }

    /// What the other client sees of a lock.
    pub(super) async fn seen_by_other(&self, key: &LockKey) -> Result<KeyState, BoxError> {
        let query = Query::Keys(vec![key.clone()]);
        Ok(answered(|| self.other.inspect(&query)).await?.pop().ok_or("no answer for the key")?)
    }
}

/// The place where a store keeps its records.
pub(super) fn only_keeper(store: &Arc<dyn LockStore>) -> Result<Box<dyn Records + '_>, BoxError> {
    store.records().pop().ok_or_else(|| "the store keeps no records".into())
}

/// The text of a record that no other has.
pub(super) fn new_text() -> Result<Record, BoxError> {
    Ok(Record::new(Token::random()?.reveal())?)
}

/// Takes a free lock. What was asked for in vain is given up, and the next attempt is about another name: over a connection that was
/// given up, the former request may still arrive, and be in the way until it is released there.
async fn take(store: &Arc<dyn LockStore>, call: Call, key: &LockKey, ttl: Duration) -> Result<Hold, BoxError> {
    let (started, mut failed) = (Instant::now(), 0);
    loop {
        let key = if failed == 0 { key.clone() } else { LockKey::new(format!("{key}-{failed}"))? };
        let asked = call.request(&key, ttl)?;
        match store.acquire(&asked).await {
            Ok(Attempt::Granted(hold)) => {
                expect(hold.claim == asked.claim, || "a grant names another claim".to_owned())?;
                return Ok(hold);
            }
            Ok(Attempt::Contended(by)) => return Err(format!("a free lock was refused: {by:?}").into()),
            Err(error) if error.is_retryable() && started.elapsed() < PATIENCE => {
                answered(|| store.release(&asked.claim)).await?;
                failed += 1;
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Whether a call failed. The first one after a cut may only find out that the connection is gone; the next one connects.
pub(super) fn is_failed<T>(answer: Option<&StoreResult<T>>) -> bool {
    answer.is_some_and(Result::is_err)
}

pub(super) fn lost(reason: LossReason) -> BoxError {
    format!("a held lease is said to be lost: {reason}").into()
}

/// Asks once.
async fn renewal_of(store: &Arc<dyn LockStore>, claim: &Claim) -> StoreResult<Renewed> {
    let renewal = [Renewal::new(claim.clone(), HELD)];
    let answer = store.renew(&renewal).await.pop();
    answer.unwrap_or_else(|| Err(unexpected("no answer for the renewal".into())))
}

/// Whether this claim's holder is shown. While a node is silent, a quorum also shows those that only a minority granted.
fn may_hold(state: &KeyState, claim: &Claim) -> bool {
    state.key == claim.key && state.holders.iter().any(|holder| holder.token == Some(claim.token))
}

fn holder(state: &KeyState) -> Option<Token> {
    state.holders.first().and_then(|holder| holder.token)
}

fn unexpected(error: BoxError) -> Error {
    Error::new(lockkit_core::ErrorKind::Unexpected, error.to_string())
}

fn expect(right: bool, wrong: impl FnOnce() -> String) -> CaseResult {
    if right { Ok(()) } else { Err(wrong().into()) }
}
