//! Calls that are dropped at each of their awaits, while replies are held back or connections are cut.
//!
//! What such a call leaves behind must serve nobody: a connection on which its reply is still to come would answer each
//! later question with the answer to the one before. So after each call that was dropped, the same client is asked
//! questions whose answers are known ([`Scene`]), so many at once that all its connections are used.

use std::{
    future::Future,
    pin::pin,
    slice,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use lockkit_core::{AcquireRequest, Attempt, LockStore as _, Release, Renewal, Renewed, store::Swap};
use tokio::{sync::Semaphore, task::JoinSet, time::timeout};

use super::{
    CaseResult, Ctx, LONG, SHORT,
    call::Call,
    cases, request,
    scene::{ROUNDS, Scene, is_failed, lost, new_text, only_keeper},
};
use crate::{
    BoxError,
    faults::{Direction, Proxy, poll_until},
};

cases! { "abandoned":
    a_dropped_call_answers_no_other [SERVER] "A call dropped at any await, with replies held back or connections cut, spoils the answer to no other call."
    a_dropped_probe_answers_no_other [SERVER] "The same on connections idle for so long that a store probes them first."
}

/// For longer than this no store believes in a connection without probing it.
const IDLE: Duration = Duration::from_secs(6);

/// A call that waits for a reply makes no step for so long.
const STALL: Duration = Duration::from_millis(15);

/// How many sweeps go on at a time.
const AT_ONCE: usize = 3;

/// No call takes more polls than this; those on idle connections are dropped at each of the first few.
const MOST_POLLS: u32 = 60;
const IDLE_POLLS: u32 = 5;

/// Likewise for those about other kinds of locks than exclusive ones: they are probed for by the same steps.
const IDLE_POLLS_OF_KINDS: u32 = 3;

/// What happens just before the last poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// Replies are held back from now on, until the call was dropped.
    Held,
    /// The same, and the call is polled on until it makes no step any more.
    Stalled,
    /// The connections are cut.
    Cut,
}

async fn a_dropped_call_answers_no_other(ctx: Ctx) -> CaseResult {
    let (server, ctx, next) = (ctx.server().await?, Arc::new(ctx), Arc::new(AtomicUsize::new(0)));
    let mut sweeps = JoinSet::new();
    // Several at a time: most of the time is for waiting, at a quorum above all. Each is a task of its own, for what wakes one may
    // not count as a poll of another.
    for _ in 0..AT_ONCE {
        let scene = Arc::new(Scene::open(&ctx, &*server).await?);
        let (ctx, next) = (Arc::clone(&ctx), Arc::clone(&next));
        sweeps.spawn(async move {
            while let Some(call) = Call::LOCKS.get(next.fetch_add(1, Ordering::Relaxed)) {
                drop_each(&ctx, &scene, slice::from_ref(call)).await?;
            }
            Ok::<_, BoxError>(())
        });
    }
    while let Some(ended) = sweeps.join_next().await {
        ended??;
    }
    Ok(())
}

/// Drops these calls at each of their polls; those about [other kinds of locks](Call::is_of_kinds) at fewer of them.
pub(super) async fn drop_each(ctx: &Ctx, scene: &Arc<Scene>, calls: &[Call]) -> CaseResult {
    for call in calls.iter().copied().filter(|call| !call.is_lacking(&*scene.store)) {
        for fate in [Fate::Held, Fate::Stalled, Fate::Cut] {
            let mut polls = 1;
            loop {
                let at = |error| format!("{call:?} dropped at poll {polls}, {fate:?}: {error}");
                let dropped = drop_at(ctx, scene, call, polls, fate).await.map_err(at)?;
                scene.ask(ctx, if call.is_of_kinds() { 1 } else { ROUNDS }).await.map_err(at)?;
                if !dropped {
                    break;
                }
                assert!(polls < MOST_POLLS, "{call:?} does not end");
                // The answer to one question may come in many parts: of these, each is left open like the one before.
                polls += if call.is_of_kinds() { 1 + polls / 3 } else { 1 };
            }
        }
    }
    Ok(())
}

async fn a_dropped_probe_answers_no_other(ctx: Ctx) -> CaseResult {
    let server = ctx.server().await?;
    // They are idle side by side, but not at work: that would be for this machine to bear, and not for the store.
    let (ctx, turns, mut scenes) = (Arc::new(ctx), Arc::new(Semaphore::new(1)), JoinSet::new());
    // What a grant in the place of another asks is what any grant asks.
    for call in Call::LOCKS.into_iter().filter(|call| !matches!(call, Call::Replace | Call::Keep | Call::Downgrade)) {
        for polls in 1..=if call.is_of_kinds() { IDLE_POLLS_OF_KINDS } else { IDLE_POLLS } {
            let turn = Arc::clone(&turns).acquire_owned().await?;
            let scene = Arc::new(Scene::open(&ctx, &*server).await?);
            if call.is_lacking(&*scene.store) {
                break;
            }
            // Once, so that it has all its connections.
            scene.ask(&ctx, 1).await?;
            drop(turn);
            // Each on its own from here on: none is idle until all the others have been opened, and have had their turns.
            let (ctx, turns) = (Arc::clone(&ctx), Arc::clone(&turns));
            scenes.spawn(async move {
                let dropped = drop_idle(&ctx, &turns, &scene, call, polls).await;
                dropped.map_err(|error| format!("{call:?} dropped at poll {polls} on idle connections: {error}"))
            });
        }
    }
    while let Some(ended) = scenes.join_next().await {
        ended??;
    }
    Ok(())
}

/// Drops a call on connections that were idle for a while.
async fn drop_idle(ctx: &Ctx, turns: &Semaphore, scene: &Arc<Scene>, call: Call, polls: u32) -> CaseResult {
    tokio::time::sleep(IDLE).await;
    let _turn = turns.acquire().await?;
    drop_at(ctx, scene, call, polls, Fate::Held).await?;
    scene.ask(ctx, ROUNDS).await
}

/// Drops a call at its `polls`th poll, and ends what it was about. Whether it got that far.
async fn drop_at(ctx: &Ctx, scene: &Scene, call: Call, polls: u32, fate: Fate) -> Result<bool, BoxError> {
    let ttl = if fate == Fate::Cut { SHORT } else { LONG };
    let leaving = Leaving { ctx, scene, call, polls, fate, ttl };
    match call {
        Call::AcquireNew | Call::AcquireKnown | Call::InOrder | Call::Share => leaving.acquire_free().await,
        Call::AcquireHeld | Call::Wait | Call::WaitInOrder => leaving.acquire_held().await,
        Call::Replace | Call::Keep | Call::Downgrade => leaving.replace().await,
        Call::Renew | Call::Change | Call::Connect => leaving.renew().await,
        Call::RenewShared => leaving.renew_shared().await,
        Call::Release | Call::ReleaseShared | Call::ReleaseInOrder => leaving.release().await,
        Call::ReleaseForeign => leaving.release_foreign().await,
        Call::Inspect | Call::InspectPrefix | Call::InspectQueue => {
            Ok(leaving.leave(scene.store.inspect(&scene.query(call))).await.is_none())
        }
        Call::ReadRecord => leaving.read_record().await,
        Call::MakeRecord | Call::ChangeRecord => leaving.set_record().await,
    }
}

/// A call that is to be dropped, and when. What it does says whether it was.
struct Leaving<'a> {
    ctx: &'a Ctx,
    scene: &'a Scene,
    call: Call,
    polls: u32,
    fate: Fate,
    ttl: Duration,
}

impl Leaving<'_> {
    async fn leave<F: Future>(&self, call: F) -> Option<F::Output> {
        leave(call, self.polls, self.fate, &self.scene.proxy).await
    }

    async fn acquire_free(&self) -> Result<bool, BoxError> {
        let asked = self.scene.request_for_free(self.ctx, self.call, self.ttl).await?;
        let answer = self.leave(self.scene.store.acquire(&asked)).await;
        self.scene.end(&asked).await?;
        match answer {
            Some(Ok(Attempt::Contended(_))) => Err("a free lock was refused".into()),
            answer => Ok(answer.is_none()),
        }
    }

    async fn acquire_held(&self) -> Result<bool, BoxError> {
        let asked = self.scene.request_for_held(self.call, self.ttl)?;
        let answer = self.leave(self.scene.store.acquire(&asked)).await;
        self.scene.give_up(&asked.claim).await?;
        match answer {
            Some(Ok(Attempt::Granted(_))) => Err("a held lock was granted".into()),
            answer => Ok(answer.is_none()),
        }
    }

    async fn replace(&self) -> Result<bool, BoxError> {
        let (before, asked) = self.scene.request_in_place(self.ctx, self.call, self.ttl).await?;
        let answer = self.leave(self.scene.store.acquire(&asked)).await;
        self.scene.give_up(&before).await?;
        self.scene.end(&asked).await?;
        match answer {
            Some(Ok(Attempt::Contended(_))) => Err("a lease's place was refused".into()),
            answer => Ok(answer.is_none()),
        }
    }

    async fn renew(&self) -> Result<bool, BoxError> {
        let connects = self.call == Call::Connect;
        if connects {
            self.scene.proxy.cut().await;
        }
        let renewal = self.scene.renewal(self.call)?;
        let renewed = async || self.leave(self.scene.store.renew(&renewal)).await;
        let mut answer = renewed().await;
        if connects && is_failed(answer.iter().flatten().next()) {
            answer = renewed().await;
        }
        Ok(answer.is_none())
    }

    async fn renew_shared(&self) -> Result<bool, BoxError> {
        let key = self.ctx.key()?;
        let claim = self.scene.take_for(self.call, &key, LONG).await?.claim;
        let [renewal] = self.scene.renewal(self.call)?;
        let renewal = [Renewal { claim: claim.clone(), ..renewal }];
        let answer = self.leave(self.scene.store.renew(&renewal)).await;
        self.scene.end(&AcquireRequest { claim, ..request(&key, LONG)? }).await?;
        match answer.as_deref() {
            Some([Ok(Renewed::Lost(reason))]) => Err(lost(*reason)),
            answer => Ok(answer.is_none()),
        }
    }

    async fn release(&self) -> Result<bool, BoxError> {
        let key = self.ctx.key()?;
        let claim = self.scene.take_for(self.call, &key, self.ttl).await?.claim;
        let answer = self.leave(self.scene.store.release(&claim)).await;
        self.scene.end(&AcquireRequest { claim, ..request(&key, self.ttl)? }).await?;
        match answer {
            Some(Ok(Release::NotHeld(reason))) => Err(format!("a held lease was not: {reason}").into()),
            answer => Ok(answer.is_none()),
        }
    }

    async fn release_foreign(&self) -> Result<bool, BoxError> {
        match self.leave(self.scene.store.release(&self.scene.foreign()?)).await {
            Some(Ok(Release::Released { .. })) => Err("another's lease is said to be released".into()),
            answer => Ok(answer.is_none()),
        }
    }

    async fn read_record(&self) -> Result<bool, BoxError> {
        let (name, keeper) = (self.ctx.key()?, only_keeper(&self.scene.store)?);
        let text = self.scene.make_record(&name).await?;
        match self.leave(keeper.read(&name)).await {
            Some(Ok(read)) if read != Some(text) => Err(format!("another record was read: {read:?}").into()),
            answer => Ok(answer.is_none()),
        }
    }

    async fn set_record(&self) -> Result<bool, BoxError> {
        let (name, new, keeper) = (self.ctx.key()?, new_text()?, only_keeper(&self.scene.store)?);
        let changes = self.call == Call::ChangeRecord;
        let before = if changes { Some(self.scene.make_record(&name).await?) } else { None };
        let answer = self.leave(keeper.compare_and_set(&name, before.as_ref(), Some(&new))).await;
        let seen = self.scene.record_seen_by_other(&name).await?;
        let is_done = seen.as_ref() == Some(&new);
        match answer {
            Some(Ok(Swap::Done)) if is_done => Ok(false),
            Some(Ok(swap)) => Err(format!("{swap:?}, and the record is {seen:?}").into()),
            answer if is_done || seen == before => Ok(answer.is_none()),
            _ => Err(format!("the record has become {seen:?}").into()),
        }
    }
}

/// Polls a call until just before its `polls`th poll, lets its fate come, and drops it after that poll or when it makes no
/// step any more. What was held back is delivered then. `None` if it was dropped.
async fn leave<F: Future>(call: F, polls: u32, fate: Fate, proxy: &Proxy) -> Option<F::Output> {
    let answer = {
        let mut call = pin!(call);
        let meet = || match fate {
            Fate::Held | Fate::Stalled => proxy.hold(Direction::ToClient),
            Fate::Cut => {}
        };
        match poll_until(call.as_mut(), polls, meet).await {
            None if fate == Fate::Stalled => timeout(STALL, call).await.ok(),
            answer => answer,
        }
    };
    if fate == Fate::Cut {
        proxy.cut().await;
    }
    proxy.release(Direction::ToClient);
    answer
}
