//! Calls that are dropped at each of their awaits, while replies are held back or connections are cut.
//!
//! What such a call leaves behind must serve nobody: a connection on which its reply is still to come would answer each
//! later question with the answer to the one before. So after each call that was dropped, the same client is asked
//! questions whose answers are known ([`Scene`]), so many at once that all its connections are used.

use std::{
    future::{Future, poll_fn},
    pin::{Pin, pin},
    sync::Arc,
    task::Poll,
    time::Duration,
};

use lockkit_core::{AcquireRequest, Attempt, LockStore as _, Query, Release, Renewal};
use tokio::time::timeout;

use super::{Ctx, LONG, Outcome, SHORT, cases, request, scene::Scene};
use crate::{
    BoxError,
    faults::{Direction, Proxy},
};

cases! { "abandoned":
    a_dropped_call_answers_no_other [SERVER] "A call dropped at any await, with replies held back or connections cut, spoils the answer to no other call."
    a_dropped_probe_answers_no_other [SERVER] "The same on connections idle for so long that a store probes them first."
}

/// For longer than this no store believes in a connection without probing it.
const IDLE: Duration = Duration::from_secs(6);

/// How long a call waits for a lock that stays held.
const WAIT: Duration = Duration::from_millis(100);

/// A call that waits for a reply makes no step for so long.
const STALL: Duration = Duration::from_millis(15);

/// No call takes more polls than this; those on idle connections are dropped at each of the first few.
const MOST_POLLS: u32 = 60;
const IDLE_POLLS: u32 = 5;

/// The calls that are dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    AcquireNew,
    AcquireKnown,
    AcquireHeld,
    Wait,
    Renew,
    Release,
    Inspect,
    InspectPrefix,
}

impl Call {
    const ALL: [Self; 8] = [
        Self::AcquireNew,
        Self::AcquireKnown,
        Self::AcquireHeld,
        Self::Wait,
        Self::Renew,
        Self::Release,
        Self::Inspect,
        Self::InspectPrefix,
    ];
}

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

async fn a_dropped_call_answers_no_other(ctx: Ctx) -> Outcome {
    let server = ctx.server().await?;
    let scene = Arc::new(Scene::open(&ctx, &*server).await?);
    for call in Call::ALL {
        for fate in [Fate::Held, Fate::Stalled, Fate::Cut] {
            for polls in 1.. {
                let at = |error| format!("{call:?} dropped at poll {polls}, {fate:?}: {error}");
                let dropped = drop_at(&ctx, &scene, call, polls, fate).await.map_err(at)?;
                scene.ask_everything(&ctx).await.map_err(at)?;
                if !dropped {
                    break;
                }
                assert!(polls < MOST_POLLS, "{call:?} does not end");
            }
        }
    }
    Ok(())
}

async fn a_dropped_probe_answers_no_other(ctx: Ctx) -> Outcome {
    let server = ctx.server().await?;
    let mut scenes = Vec::new();
    for call in Call::ALL {
        for polls in 1..=IDLE_POLLS {
            let scene = Arc::new(Scene::open(&ctx, &*server).await?);
            scene.ask_everything(&ctx).await?;
            scenes.push((call, polls, scene));
        }
    }
    tokio::time::sleep(IDLE).await;
    for (call, polls, scene) in scenes {
        let at = |error| format!("{call:?} dropped at poll {polls} on idle connections: {error}");
        drop_at(&ctx, &scene, call, polls, Fate::Held).await.map_err(at)?;
        scene.ask_everything(&ctx).await.map_err(at)?;
    }
    Ok(())
}

/// Drops a call at its `polls`th poll, and ends what it was about. Whether it got that far.
async fn drop_at(ctx: &Ctx, scene: &Scene, call: Call, polls: u32, fate: Fate) -> Result<bool, BoxError> {
    let (store, proxy) = (&scene.store, &scene.proxy);
    let ttl = if fate == Fate::Cut { SHORT } else { LONG };
    match call {
        Call::AcquireNew | Call::AcquireKnown => {
            let asked = request(&ctx.key()?, ttl)?;
            if call == Call::AcquireKnown {
                let before = scene.take(&asked.claim.key, LONG).await?;
                scene.end(&AcquireRequest { claim: before.claim, ..request(&asked.claim.key, LONG)? }).await?;
            }
            let answer = leave(store.acquire(&asked), polls, fate, proxy).await;
            scene.end(&asked).await?;
            match answer {
                Some(Ok(Attempt::Contended(_))) => Err("a free lock was refused".into()),
                answer => Ok(answer.is_none()),
            }
        }
        Call::AcquireHeld | Call::Wait => {
            let wait = if call == Call::Wait { WAIT } else { Duration::ZERO };
            let asked = AcquireRequest { wait, ..request(&scene.theirs.key, LONG)? };
            let answer = leave(store.acquire(&asked), polls, fate, proxy).await;
            scene.give_up(&asked.claim).await?;
            match answer {
                Some(Ok(Attempt::Granted(_))) => Err("a held lock was granted".into()),
                answer => Ok(answer.is_none()),
            }
        }
        Call::Renew => {
            let renewal = [Renewal { claim: scene.mine.clone(), ttl: LONG, depth: 1, fence_floor: None }];
            Ok(leave(store.renew(&renewal), polls, fate, proxy).await.is_none())
        }
        Call::Release => {
            let key = ctx.key()?;
            let claim = scene.take(&key, ttl).await?.claim;
            let answer = leave(store.release(&claim), polls, fate, proxy).await;
            scene.end(&AcquireRequest { claim, ..request(&key, ttl)? }).await?;
            match answer {
                Some(Ok(Release::NotHeld(reason))) => Err(format!("a held lease was not: {reason}").into()),
                answer => Ok(answer.is_none()),
            }
        }
        Call::Inspect | Call::InspectPrefix => {
            let query = match call {
                Call::Inspect => Query::Keys(vec![scene.mine.key.clone(), scene.theirs.key.clone()]),
                _ => Query::Prefix(scene.mine.key.as_str().to_owned()),
            };
            Ok(leave(store.inspect(&query), polls, fate, proxy).await.is_none())
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

/// Polls a future so many times, each time that it asks to be polled; `before_last` comes before the last time.
async fn poll_until<F: Future>(mut future: Pin<&mut F>, polls: u32, before_last: impl Fn()) -> Option<F::Output> {
    let mut polled = 0;
    poll_fn(move |cx| {
        polled += 1;
        if polled == polls {
            before_last();
        }
        match future.as_mut().poll(cx) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending if polled >= polls => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}
