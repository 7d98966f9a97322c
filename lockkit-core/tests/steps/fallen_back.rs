//! A store that falls back to an older record in the middle of a step.

use std::{
    future::Future,
    pin::pin,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use lockkit_core::{
    ErrorKind, MemoryStore, Result,
    migrate::{Migration, Phase, Side},
};
use lockkit_testkit::Altered;

use crate::world::{Away, World, poll_times, write};

#[tokio::test(start_paused = true)]
async fn a_store_that_fell_back_is_lifted_and_the_drain_begins_anew() -> Result<()> {
    let world = World::started().await?;
    let first = world.migration.state().await?.record;
    let both = world.step(Phase::Both).await?;
    let mut told = 0;
    // In the middle of the drain the new store falls back by one change.
    let mut is_fallen = false;
    let step = world.migration.step(Phase::New, |drain| {
        told += u32::from(drain.left > drain.whole / 2);
        if !std::mem::replace(&mut is_fallen, true) {
            let written =
                pin!(write(&world.new, Side::New, Some(&first))).poll(&mut Context::from_waker(Waker::noop()));
            assert!(matches!(written, Poll::Ready(Ok(()))));
        }
        world.clock.advance(drain.left);
    });
    let step = step.await?;
    assert_eq!((step.record.phase, step.record.epoch), (Phase::New, both.epoch + 2), "Both was written anew");
    assert_eq!(told, 2, "one drain for each time at which both stores were seen to have the record");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_store_that_fell_back_is_noticed_though_another_migrator_has_lifted_it() -> Result<()> {
    let world = World::started().await?;
    let first = world.migration.state().await?.record;
    world.step(Phase::Both).await?;
    let another = Migration::new(Arc::new(world.old.clone()), Arc::new(world.new.clone()));
    let (mut told, mut is_fallen) = (0, false);
    let step = world.migration.step(Phase::New, |drain| {
        told += u32::from(drain.left > drain.whole / 2);
        if !std::mem::replace(&mut is_fallen, true) {
            let fall_back = async {
                write(&world.new, Side::New, Some(&first)).await?;
                another.settle().await
            };
            let lifted = pin!(fall_back).poll(&mut Context::from_waker(Waker::noop()));
            assert!(matches!(lifted, Poll::Ready(Ok(record)) if record.phase == Phase::Both));
        }
        world.clock.advance(drain.left);
    });
    assert_eq!(step.await?.record.phase, Phase::New);
    assert_eq!(told, 2, "clients may have read the old phase again, so that the drain begins anew");
    Ok(())
}

/// The other one stands still at any place of its look, and the store falls back meanwhile.
#[tokio::test(start_paused = true)]
async fn a_store_that_falls_back_while_another_migrator_looks_is_noticed() -> Result<()> {
    for polls in 0.. {
        let world = World::started().await?;
        let first = world.migration.state().await?.record;
        world.step(Phase::Both).await?;
        let slow = |inner: &MemoryStore| {
            let (is_cut_off, why) = (Arc::default(), ErrorKind::Denied);
            Arc::new(Altered(Away { inner: inner.clone(), is_cut_off, why }))
        };
        let another = Migration::new(slow(&world.old), slow(&world.new));
        let (mut told, mut is_fallen, mut is_over) = (0, false, false);
        let step = world.migration.step(Phase::New, |drain| {
            told += u32::from(drain.left > drain.whole / 2);
            if !std::mem::replace(&mut is_fallen, true) {
                let mut settling = pin!(another.settle());
                is_over = poll_times(settling.as_mut(), polls);
                assert!(poll_times(pin!(write(&world.new, Side::New, Some(&first))), 1));
                assert!(is_over || poll_times(settling.as_mut(), 1000));
            }
            world.clock.advance(drain.left);
        });
        assert_eq!(step.await?.record.phase, Phase::New);
        assert_eq!(told, 2, "clients may have read the old phase again, so that the drain begins anew: {polls} polls");
        if is_over {
            assert!(polls > 4, "it was never in the middle");
            return Ok(());
        }
    }
    Ok(())
}
