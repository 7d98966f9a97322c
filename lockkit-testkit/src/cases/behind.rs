//! Answers that do not belong to the questions: one is lost on the way, or comes twice, and from then on each answer of that
//! connection is the one to the question after, or before.
//!
//! So it is with each answer that a call is given, one after the other; then the same client is asked questions whose answers
//! are known ([`Scene`]), so many at once that all its connections are used. An error is right, and so is any answer that is
//! true. The client itself has to notice: that is what a token or a number is for that comes back with the answer.

use std::{sync::Arc, time::Duration};

use lockkit_core::{
    AcquireRequest, Attempt, Claim, Effect, Hold, KeyState, LockKey, LockStore as _, LossReason, Release, Renewal,
    Renewed, Result as StoreResult, store::Swap,
};
use tokio::{sync::Mutex, task::JoinSet};

use super::{
    CaseResult, Ctx, LONG,
    call::Call,
    cases, request,
    scene::{Scene, is_failed, lost, new_text, only_keeper},
};
use crate::{BoxError, Server, faults::Slip};

cases! { "behind":
    an_answer_that_is_lost_shifts_no_others [SERVER] "If an answer is lost on the way, no other answer is taken for it."
    an_answer_that_comes_twice_shifts_no_others [SERVER] "If an answer comes twice, it is not taken for the one to the next question."
}

/// The ttl of what is asked for meanwhile: a call that is given no answer ends within a part of it.
const MEANWHILE: Duration = Duration::from_secs(4);

/// How long the client waits for an answer: each that is lost takes so long.
const TIMEOUT: Duration = Duration::from_millis(300);

/// No call is given more answers than this.
const MOST_ANSWERS: usize = 40;

async fn an_answer_that_is_lost_shifts_no_others(ctx: Ctx) -> CaseResult {
    every_answer(ctx, Slip::Lost, &Call::LOCKS).await
}

async fn an_answer_that_comes_twice_shifts_no_others(ctx: Ctx) -> CaseResult {
    every_answer(ctx, Slip::Twice, &Call::LOCKS).await
}

/// Each call has a client of its own, side by side: a lost answer takes as long as the client has patience.
pub(super) async fn every_answer(ctx: Ctx, slip: Slip, of: &'static [Call]) -> CaseResult {
    let server: Arc<dyn Server> = ctx.server().await?.into();
    let ctx = Arc::new(ctx);
    let (mut calls, turn) = (JoinSet::new(), Arc::new(Mutex::new(())));
    for call in of {
        calls.spawn(each_answer(Arc::clone(&ctx), Arc::clone(&server), Arc::clone(&turn), *call, slip));
    }
    while let Some(ended) = calls.join_next().await {
        ended??;
    }
    Ok(())
}

/// What is done to an answer of a call.
#[derive(Clone, Copy, Debug)]
struct AnswerFault {
    slip: Slip,
    nth: usize,
    /// Whether the server forgets its scripts first: then one answer more is about what the call may have done.
    forgets: bool,
}

impl AnswerFault {
    /// From now on the answers to the client of the scene are counted.
    async fn begin(self, scene: &Scene, server: &dyn Server) -> CaseResult {
        if self.forgets {
            server.forget_caches().await?;
        }
        scene.proxy.slip(self.slip, self.nth);
        Ok(())
    }
}

/// Those that ask everything do so in turn: one is enough for a server.
async fn each_answer(
    ctx: Arc<Ctx>,
    server: Arc<dyn Server>,
    turn: Arc<Mutex<()>>,
    call: Call,
    slip: Slip,
) -> CaseResult {
    let open = || async {
        let scene = Scene::impatient(&ctx, &*server, TIMEOUT).await?;
        let with_record = Call::RECORDS.contains(&call);
        Ok::<_, BoxError>(Arc::new(if with_record { scene.with_record(&ctx).await? } else { scene }))
    };
    let mut scene = open().await?;
    if call.is_lacking(&*scene.store) {
        return Ok(());
    }
    // An answer that is lost is waited for, which takes long.
    let variants: &[bool] = if slip == Slip::Twice { &[false, true] } else { &[false] };
    for forgets in variants.iter().copied() {
        for nth in 1.. {
            let fault = AnswerFault { slip, nth, forgets };
            let at = |error: BoxError| format!("{call:?}, {fault:?}: {error}");
            let is_over = make(&ctx, &scene, &*server, call, fault).await.map_err(at)?;
            let slipped = scene.proxy.slipped();
            if call == Call::Connect && slip == Slip::Lost && nth == 1 && !slipped {
                return Err(at("no answer came".into()).into());
            }
            if is_over || scene.is_over().await.map_err(at)? {
                scene = open().await?;
            } else {
                let _turn = turn.lock().await;
                if let Err(wrong) = scene.ask(&ctx, 1).await {
                    // What is true changes when the session ends meanwhile.
                    if !scene.is_over().await.unwrap_or(false) {
                        return Err(at(wrong).into());
                    }
                    scene = open().await?;
                }
            }
            if !slipped {
                scene.proxy.heal();
                break;
            }
            assert!(nth < MOST_ANSWERS, "{call:?} does not end");
        }
    }
    Ok(())
}

/// Makes a call with this fault in one of its answers, judges what it says, and ends what it was about. Tells whether it said that the
/// session has ended.
async fn make(ctx: &Ctx, scene: &Scene, server: &dyn Server, call: Call, fault: AnswerFault) -> Result<bool, BoxError> {
    let begin = async || fault.begin(scene, server).await;
    match call {
        Call::AcquireNew | Call::AcquireKnown | Call::InOrder | Call::Share => {
            take_free(ctx, scene, call, begin).await?;
        }
        Call::AcquireHeld | Call::Wait | Call::WaitInOrder => take_held(scene, call, begin).await?,
        Call::Replace | Call::Keep | Call::Downgrade => take_over(ctx, scene, call, begin).await?,
        Call::Renew | Call::Change | Call::Connect => return renew(scene, call, begin).await,
        Call::RenewShared => return renew_shared(ctx, scene, begin).await,
        Call::Release | Call::ReleaseShared | Call::ReleaseInOrder => release(ctx, scene, call, begin).await?,
        Call::ReleaseForeign => {
            begin().await?;
            match scene.store.release(&scene.foreign()?).await {
                Ok(Release::Released { .. }) => return Err("another's lease is said to be released".into()),
                answer => passing(answer)?,
            }
        }
        Call::Inspect | Call::InspectPrefix | Call::InspectQueue => inspect(scene, call, begin).await?,
        Call::ReadRecord => read_record(ctx, scene, begin).await?,
        Call::MakeRecord | Call::ChangeRecord => set_record(ctx, scene, call, begin).await?,
    }
    Ok(false)
}

async fn take_free(ctx: &Ctx, scene: &Scene, call: Call, begin: impl AsyncFnOnce() -> CaseResult) -> CaseResult {
    let asked = scene.request_for_free(ctx, call, MEANWHILE).await?;
    begin().await?;
    let answer = scene.store.acquire(&asked).await;
    let state = scene.seen_by_other(&asked.claim.key).await?;
    match answer {
        Ok(Attempt::Granted(hold)) => on_record(&hold, &asked.claim, &state)?,
        Ok(Attempt::Contended(by)) => return Err(format!("a free lock was refused: {by:?}").into()),
        answer => without_effect(answer, || state.holders.is_empty())?,
    }
    scene.end(&asked).await
}

async fn take_held(scene: &Scene, call: Call, begin: impl AsyncFnOnce() -> CaseResult) -> CaseResult {
    let asked = scene.request_for_held(call, MEANWHILE)?;
    begin().await?;
    let answer = scene.store.acquire(&asked).await;
    scene.give_up(&asked.claim).await?;
    match answer {
        Ok(Attempt::Granted(hold)) => Err(format!("a held lock was granted: {hold:?}").into()),
        answer => passing(answer),
    }
}

async fn take_over(ctx: &Ctx, scene: &Scene, call: Call, begin: impl AsyncFnOnce() -> CaseResult) -> CaseResult {
    let (before, asked) = scene.request_in_place(ctx, call, MEANWHILE).await?;
    begin().await?;
    let answer = scene.store.acquire(&asked).await;
    let state = scene.seen_by_other(&asked.claim.key).await?;
    let is_as_before = state.holders.first().is_some_and(|holder| holder.token == Some(before.token));
    match answer {
        Ok(Attempt::Granted(hold)) => on_record(&hold, &asked.claim, &state)?,
        Ok(Attempt::Contended(by)) => return Err(format!("a lease's place was refused: {by:?}").into()),
        answer => without_effect(answer, || is_as_before)?,
    }
    scene.give_up(&before).await?;
    scene.end(&asked).await
}

async fn renew(scene: &Scene, call: Call, begin: impl AsyncFnOnce() -> CaseResult) -> Result<bool, BoxError> {
    if call == Call::Connect {
        scene.proxy.cut().await;
    }
    begin().await?;
    let renewal = scene.renewal(call)?;
    let mut renewed = scene.store.renew(&renewal).await.pop();
    if call == Call::Connect && !scene.proxy.slipped() && is_failed(renewed.as_ref()) {
        renewed = scene.store.renew(&renewal).await.pop();
    }
    judge_renewal(scene, &scene.mine, renewed).await
}

async fn renew_shared(ctx: &Ctx, scene: &Scene, begin: impl AsyncFnOnce() -> CaseResult) -> Result<bool, BoxError> {
    let key = ctx.key()?;
    let claim = scene.take_for(Call::RenewShared, &key, LONG).await?.claim;
    let [renewal] = scene.renewal(Call::RenewShared)?;
    begin().await?;
    let renewed = scene.store.renew(&[Renewal { claim: claim.clone(), ..renewal }]).await.pop();
    if judge_renewal(scene, &claim, renewed).await? {
        return Ok(true);
    }
    scene.end(&AcquireRequest { claim, ..request(&key, LONG)? }).await?;
    Ok(false)
}

/// Tells whether the answer is that the session has ended.
async fn judge_renewal(scene: &Scene, claim: &Claim, renewed: Option<StoreResult<Renewed>>) -> Result<bool, BoxError> {
    match renewed {
        Some(Ok(Renewed::Held(hold))) => on_record(&hold, claim, &scene.seen_by_other(&claim.key).await?)?,
        Some(Ok(Renewed::Lost(LossReason::SessionEnded))) => return Ok(true),
        Some(Ok(Renewed::Lost(reason))) => return Err(lost(reason)),
        Some(Err(error)) => passing::<()>(Err(error))?,
        None => return Err("no answer for the renewal".into()),
    }
    Ok(false)
}

async fn release(ctx: &Ctx, scene: &Scene, call: Call, begin: impl AsyncFnOnce() -> CaseResult) -> CaseResult {
    let key = ctx.key()?;
    let claim = scene.take_for(call, &key, LONG).await?.claim;
    begin().await?;
    let answer = scene.store.release(&claim).await;
    let is_free = scene.seen_by_other(&claim.key).await?.holders.is_empty();
    match answer {
        Ok(Release::Released { .. }) if is_free => {}
        Ok(Release::NotHeld(LossReason::SessionEnded)) => {}
        Ok(answer) => return Err(format!("a held lease's release was answered by {answer:?}").into()),
        answer => without_effect(answer, || !is_free)?,
    }
    scene.end(&AcquireRequest { claim, ..request(&key, LONG)? }).await
}

async fn inspect(scene: &Scene, call: Call, begin: impl AsyncFnOnce() -> CaseResult) -> CaseResult {
    let mut keys = vec![scene.theirs.key.clone(), scene.mine.key.clone()];
    if call != Call::Inspect {
        keys.remove(0);
    }
    begin().await?;
    match scene.store.inspect(&scene.query(call)).await {
        Ok(states) => shows(scene, &states, &keys),
        answer => passing(answer),
    }
}

async fn read_record(ctx: &Ctx, scene: &Scene, begin: impl AsyncFnOnce() -> CaseResult) -> CaseResult {
    let (name, keeper) = (ctx.key()?, only_keeper(&scene.store)?);
    let text = scene.make_record(&name).await?;
    begin().await?;
    match keeper.read(&name).await {
        Ok(read) if read != Some(text) => Err(format!("another record was read: {read:?}").into()),
        answer => passing(answer),
    }
}

async fn set_record(ctx: &Ctx, scene: &Scene, call: Call, begin: impl AsyncFnOnce() -> CaseResult) -> CaseResult {
    let (name, new, keeper) = (ctx.key()?, new_text()?, only_keeper(&scene.store)?);
    let before = if call == Call::ChangeRecord { Some(scene.make_record(&name).await?) } else { None };
    begin().await?;
    let answer = keeper.compare_and_set(&name, before.as_ref(), Some(&new)).await;
    let seen = scene.record_seen_by_other(&name).await?;
    match answer {
        Ok(Swap::Done) if seen.as_ref() == Some(&new) => Ok(()),
        Ok(swap) => Err(format!("{swap:?}, and the record is {seen:?}").into()),
        answer => without_effect(answer, || seen == before),
    }
}

/// Whether others see a lease as its holder was told that it is.
fn on_record(hold: &Hold, claim: &Claim, state: &KeyState) -> CaseResult {
    let is_held = state.holders.first().is_some_and(|holder| {
        holder.token == Some(claim.token) && holder.fence == Some(hold.fence) && hold.claim == *claim
    });
    if is_held { Ok(()) } else { Err(format!("{hold:?} is on record as {state:?}").into()) }
}

/// An error that says that nothing happened must be right.
fn without_effect<T>(answer: StoreResult<T>, nothing_happened: impl FnOnce() -> bool) -> CaseResult {
    match answer {
        Err(error) if error.effect() == Effect::None && !nothing_happened() => {
            Err(format!("it had an effect, although: {error}").into())
        }
        answer => passing(answer),
    }
}

/// An error must be one that passes: the next answer is right again.
fn passing<T>(answer: StoreResult<T>) -> CaseResult {
    match answer {
        Err(error) if !error.is_retryable() => {
            Err(format!("an error that asks for no further attempt: {error}").into())
        }
        _ => Ok(()),
    }
}

/// Whether these are the keys, each with its holder.
fn shows(scene: &Scene, states: &[KeyState], keys: &[LockKey]) -> CaseResult {
    let tokens: Vec<_> = states.iter().map(|state| state.holders.first().and_then(|holder| holder.token)).collect();
    let is_mine = |key: &LockKey| *key == scene.mine.key;
    let expected: Vec<_> =
        keys.iter().map(|key| Some(if is_mine(key) { scene.mine.token } else { scene.theirs.token })).collect();
    let right = states.iter().map(|state| &state.key).eq(keys) && tokens == expected;
    if right { Ok(()) } else { Err(format!("the wrong holders are shown: {states:?}").into()) }
}
