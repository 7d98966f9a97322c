//! Calls that are dropped, or that a store does not answer.

use std::{pin::pin, sync::Arc, sync::atomic::Ordering};

use lockkit_core::{
    Attempt, LockStore, Query, Release, Renewed, Result,
    migrate::{Dual, Phase},
};
use lockkit_testkit::{Altered, Slow, faults::poll_until};

use crate::world::{START, World, poll_once, renewal, request};

/// No call is polled more often.
const MOST_POLLS: u32 = 60;

#[derive(Clone, Copy, Debug)]
enum Call {
    Acquire,
    Renew,
    Release,
    Inspect,
}

/// The record is too old for each of them. With a step that needs no drain, the lease is of the phase before.
#[tokio::test(start_paused = true)]
async fn every_call_can_be_dropped_at_each_await() -> Result<()> {
    use Phase::{Both, New, Old};
    for (from, to) in [(Old, Both), (Both, Both), (New, New), (New, Both)] {
        for call in [Call::Acquire, Call::Renew, Call::Release, Call::Inspect] {
            let dropped = async |polls| dropped_at(call, polls, from, to).await;
            let mut polls = 1;
            while dropped(polls).await? {
                polls += 1;
                assert!(polls < MOST_POLLS, "{call:?} never ends");
            }
            assert!(polls > 2, "{call:?} was dropped nowhere");
        }
    }
    Ok(())
}

/// Drops a call when it was polled so many times. Whether it had not ended by then.
async fn dropped_at(call: Call, polls: u32, from: Phase, to: Phase) -> Result<bool> {
    let world = World::started().await?;
    for phase in [Phase::Both, Phase::New].into_iter().take(from as usize) {
        world.step(phase).await?;
    }
    let [old, new] = [&world.old, &world.new].map(|store| Arc::new(Altered(Slow(store.clone()))));
    let dual = Dual::connect(old, new).await?;
    let (mine, asked) = (request("mine"), request("asked"));
    assert!(matches!(dual.acquire(&mine).await?, Attempt::Granted(_)));
    let step = world.migration.step(to, |drain| assert!(drain.left.is_zero(), "the lease would lapse")).await?;
    step.copied?;
    world.clock.advance(START.fresh);
    let renewals = [renewal(&mine.claim)];
    let names = Query::Keys(vec![mine.claim.key.clone()]);
    let ended = match call {
        Call::Acquire => poll_until(pin!(dual.acquire(&asked)), polls, || ()).await.is_some(),
        Call::Renew => poll_until(pin!(dual.renew(&renewals)), polls, || ()).await.is_some(),
        Call::Release => poll_until(pin!(dual.release(&mine.claim)), polls, || ()).await.is_some(),
        Call::Inspect => poll_until(pin!(dual.inspect(&names)), polls, || ()).await.is_some(),
    };
    if !matches!(call, Call::Release) {
        let mut answer = dual.renew(&renewals).await.remove(0);
        // What a dropped call left at a store is released first, and the core asks again.
        for _ in 0..2 {
            if answer.is_err() {
                answer = dual.renew(&renewals).await.remove(0);
            }
        }
        let answer = answer?;
        assert!(matches!(answer, Renewed::Held(_)), "{call:?}, dropped at {polls}: {answer:?}");
    }
    for claim in [&mine.claim, &asked.claim] {
        dual.release(claim).await?;
    }
    for (name, store) in [("mine", &world.old), ("mine", &world.new), ("asked", &world.old), ("asked", &world.new)] {
        assert!(!world.is_held_at(store, name).await?, "{call:?}, dropped at {polls}: {name} is left");
    }
    Ok(!ended)
}

/// The new store has not answered when the caller gives up, nor does it answer the release.
#[tokio::test]
async fn a_silent_store_keeps_no_lock_that_nobody_had_in_the_other_one() -> Result<()> {
    let world = World::started().await?;
    world.step(Phase::Both).await?;
    let (dual, _, new) = world.held_up().await?;
    let asked = request("x");
    new.is_held_up.send_replace(true);
    tokio::select! {
        answer = dual.acquire(&asked) => panic!("the new store answers: {answer:?}"),
        () = new.came.notified() => {}
    }
    assert!(world.is_held_at(&world.old, "x").await?);
    let mut release = pin!(dual.release(&asked.claim));
    assert!(poll_once(release.as_mut()).is_pending());
    assert!(!world.is_held_at(&world.old, "x").await?, "others can have it");
    new.is_held_up.send_replace(false);
    assert!(matches!(release.await?, Release::Released { .. }));
    assert!(!world.is_held_at(&world.new, "x").await? && !new.is_cut_off.load(Ordering::SeqCst));
    Ok(())
}
