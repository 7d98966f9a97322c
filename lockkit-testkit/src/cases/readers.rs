//! Readers that share a lock: each has a lease of its own, and their fences lie between those of the writers.

use std::{collections::HashSet, sync::Arc, time::Duration};

use lockkit_core::{
    Guard, Hold, Lock, LockKey, LockStore, Locker, Mode, Moment, Outcome, Release, Renewal, Renewed, Token,
    fenced::{FencedResource, MemoryResource},
};

use super::{
    CaseResult, Ctx, LONG, SHORT, UNTOLD, cases, grant, grant_again, grant_released, renew, request, request_as,
    resource::Resource, seen, wait_for_waiter,
};
use crate::BoxError;

cases! { "modes":
    all_readers_are_shown [SHARED] "All that hold a shared lock are shown, and that they share it."
    the_same_claim_is_one_reader [SHARED] "A reader that asks again for what it holds counts once, with one fence (R1)."
    a_dead_reader_lapses_alone [SHARED_TTL] "A reader's lease ends by itself; a writer gets in when the last one has ended, and not before."
    a_writer_waits_for_no_reader_that_left [SHARED_TTL] "A writer does not wait for the lease of a reader that was released."
    a_released_reader_ends_no_other [SHARED] "Releasing one reader's lease leaves those of the others; a writer gets in after the last."
    a_renewal_keeps_no_other_reader [SHARED_TTL] "Renewing one reader's lease does not extend that of another, dead reader."
    fences_order_readers_and_writers [SHARED_FENCES] "The fences of readers lie above those of the writers before them, and below those after (R9)."
    a_reader_keeps_the_floor_it_asked_for [SHARED_FENCES] "A reader that joins others is strictly above the floor that was asked for, and so is all after it."
    a_reader_keeps_the_floor_of_a_renewal [SHARED_FENCES] "A floor given with a reader's renewal lifts those that join it later, and all that come after."
    a_resource_admits_all_that_share_the_lock [SHARED_FENCES] "A resource that checks fences lets in all readers that share the lock, whichever comes first, and refuses them after the next writer."
    a_resource_refuses_a_writer_that_readers_came_after [SHARED_FENCES] "A resource that checks fences refuses a writer once a later reader was there."
}

async fn all_readers_are_shown(ctx: Ctx) -> CaseResult {
    let (mine, other, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    let (one, two, three) = (read(&mine, &name).await?, read(&other, &name).await?, read(&mine, &name).await?);
    assert_shown(&other.lock(&name), Mode::Shared, &[one.token(), two.token(), three.token()]).await
}

async fn the_same_claim_is_one_reader(ctx: Ctx) -> CaseResult {
    let (store, key) = (ctx.store().await?, ctx.key()?);
    let mut asked = request_as(&key, Mode::Shared, LONG)?;
    let (once, twice) = (grant(&store, &mut asked).await?, grant_again(&store, &asked).await?);
    assert_eq!(once.fence, twice.fence, "the same claim again has another fence");
    assert!(matches!(store.release(&asked.claim).await?, Release::Released { .. }));
    let writer = ctx.locker().await?.rw_lock(key.as_str()).write().ttl(LONG).try_acquire().await?;
    assert!(writer.is_some(), "a reader that asked again counts twice");
    Ok(())
}

async fn a_dead_reader_lapses_alone(ctx: Ctx) -> CaseResult {
    let (store, other, third, key) = (ctx.store().await?, ctx.store().await?, ctx.store().await?, ctx.key()?);
    let lock = super::locker(Arc::clone(&store)).lock(key.as_str());
    let long = grant(&store, &mut request_as(&key, Mode::Shared, SHORT * 3)?).await?;
    let short = grant(&other, &mut request_as(&key, Mode::Shared, SHORT)?).await?;
    let writer = Writer::waits(third, &key);
    loop {
        // What is shown was there after this moment, and what is not there any more had ended by the next.
        let before = store.info().clock.now();
        let shown = tokens(&lock).await?;
        let now = store.info().clock.now();
        let kept = shown.contains(&long.claim.token) || now >= long.until;
        assert!(kept, "the lease of a reader ended with another's");
        if !shown.contains(&short.claim.token) {
            assert!(now >= short.until, "a reader's lease ended before its time");
            break;
        }
        assert!(before < short.until + UNTOLD, "a dead reader is shown after its end");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(matches!(renew(&other, &short.claim, LONG, 1).await?, Renewed::Lost(_)), "a lapsed reader was renewed");
    writer.gets_in_after(&long).await
}

async fn a_writer_waits_for_no_reader_that_left(ctx: Ctx) -> CaseResult {
    let (store, other, third, key) = (ctx.store().await?, ctx.store().await?, ctx.store().await?, ctx.key()?);
    let left = grant(&store, &mut request_as(&key, Mode::Shared, LONG)?).await?;
    let short = grant(&other, &mut request_as(&key, Mode::Shared, SHORT)?).await?;
    assert!(matches!(store.release(&left.claim).await?, Release::Released { .. }));
    Writer::waits(third, &key).gets_in_after(&short).await
}

async fn a_released_reader_ends_no_other(ctx: Ctx) -> CaseResult {
    let (mine, other, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    let (one, two, three) = (read(&mine, &name).await?, read(&other, &name).await?, read(&mine, &name).await?);
    let lock = other.rw_lock(&name).write().ttl(LONG);
    assert_eq!(one.release().await?, Outcome::Released);
    assert_shown(&lock, Mode::Shared, &[two.token(), three.token()]).await?;
    let writer = tokio::spawn(async move { lock.acquire().await });
    wait_for_waiter(&mine.lock(&name)).await?;
    assert_eq!(two.release().await?, Outcome::Released);
    assert_shown(&mine.lock(&name), Mode::Shared, &[three.token()]).await?;
    three.renew().await?;
    assert!(!writer.is_finished(), "a writer came in beside a reader");
    assert_eq!(three.release().await?, Outcome::Released);
    let guard = tokio::time::timeout(UNTOLD, writer).await.map_err(|_| "a writer is still waiting")???;
    assert_eq!(guard.release().await?, Outcome::Released);
    Ok(())
}

async fn a_renewal_keeps_no_other_reader(ctx: Ctx) -> CaseResult {
    let (store, other, key) = (ctx.store().await?, ctx.store().await?, ctx.key()?);
    let dead = grant(&other, &mut request_as(&key, Mode::Shared, SHORT)?).await?;
    let lives = grant(&store, &mut request_as(&key, Mode::Shared, LONG)?).await?;
    let lock = ctx.locker().await?.lock(key.as_str());
    loop {
        let renewed = renew(&store, &lives.claim, LONG, 1).await?;
        assert!(matches!(renewed, Renewed::Held(_)), "{renewed:?}, while it was renewed all the time");
        let before = other.info().clock.now();
        if !tokens(&lock).await?.contains(&dead.claim.token) {
            break;
        }
        assert!(before < dead.until + UNTOLD, "a dead reader is kept by another's renewals");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_shown(&lock, Mode::Shared, &[lives.claim.token]).await?;
    assert!(matches!(store.release(&lives.claim).await?, Release::Released { .. }));
    Ok(())
}

async fn fences_order_readers_and_writers(ctx: Ctx) -> CaseResult {
    let (mine, other, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    let write = async |locker: &Locker| {
        let guard = locker.rw_lock(&name).write().ttl(LONG).try_acquire().await?.ok_or("free, but refused")?;
        let fence = guard.fence();
        assert_eq!(guard.release().await?, Outcome::Released);
        Ok::<_, BoxError>(fence)
    };
    let mut last = write(&mine).await?;
    for locker in [&other, &mine] {
        let one = read(locker, &name).await?;
        assert!(one.fence() > last, "a reader's fence {} is not above the writer's {last}", one.fence());
        let two = read(&mine, &name).await?;
        assert!(two.fence() >= one.fence(), "{} came after {}", two.fence(), one.fence());
        assert_eq!(one.release().await?, Outcome::Released);
        let three = read(&other, &name).await?;
        assert!(three.fence() >= two.fence(), "{} came after {}", three.fence(), two.fence());
        let highest = three.fence();
        assert_eq!(two.release().await?, Outcome::Released);
        assert_eq!(three.release().await?, Outcome::Released);
        last = write(locker).await?;
        assert!(last > highest, "a writer's fence {last} is not above the readers' {highest}");
    }
    Ok(())
}

async fn a_reader_keeps_the_floor_it_asked_for(ctx: Ctx) -> CaseResult {
    let (mine, other, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    let one = read(&mine, &name).await?;
    let above = |floor| other.rw_lock(&name).read().ttl(LONG).fence_above(floor);
    let mut last = one.fence();
    for more in [0, 1_000_000] {
        let floor = last.offset(more);
        let next = above(floor).try_acquire().await?.ok_or("readers must share")?;
        assert!(next.fence() > floor, "{} is not above the floor {floor}", next.fence());
        last = next.fence();
        assert_eq!(next.release().await?, Outcome::Released);
    }
    let joins = read(&other, &name).await?;
    assert!(joins.fence() >= last, "{} came after {last}", joins.fence());
    assert_eq!(joins.release().await?, Outcome::Released);
    assert_eq!(one.release().await?, Outcome::Released);
    let writer = mine.rw_lock(&name).write().ttl(LONG).try_acquire().await?.ok_or("free, but refused")?;
    assert!(writer.fence() > last, "a writer's fence {} is not above the readers' {last}", writer.fence());
    Ok(())
}

async fn a_reader_keeps_the_floor_of_a_renewal(ctx: Ctx) -> CaseResult {
    let (store, key) = (ctx.store().await?, ctx.key()?);
    let mut mine = request_as(&key, Mode::Shared, LONG)?;
    let hold = grant(&store, &mut mine).await?;
    let mut floor = hold.fence;
    for _ in 0..2 {
        floor = floor.offset(1_000_000_000);
        let renewal = Renewal { fence_floor: Some(floor), ..Renewal::new(mine.claim.clone(), LONG) };
        match store.renew(&[renewal]).await.remove(0)? {
            Renewed::Held(renewed) => assert_eq!(renewed.fence, hold.fence),
            Renewed::Lost(reason) => return Err(format!("lost: {reason}").into()),
        }
        let joins = grant(&store, &mut request_as(&key, Mode::Shared, LONG)?).await?;
        assert!(joins.fence >= floor, "{} is below the floor {floor} of a renewal", joins.fence);
        store.release(&joins.claim).await?;
        floor = joins.fence;
    }
    store.release(&mine.claim).await?;
    let writer = grant_released(&store, &mut request(&key, LONG)?).await?;
    assert!(writer.fence > floor, "a writer's fence {} is not above {floor}", writer.fence);
    Ok(())
}

async fn a_resource_admits_all_that_share_the_lock(ctx: Ctx) -> CaseResult {
    let (mine, other, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    let resource = MemoryResource::new();
    let write = |locker: &Locker| locker.rw_lock(&name).write().ttl(LONG);
    let writer = write(&mine).try_acquire().await?.ok_or("free, but refused")?;
    let before = writer.fence();
    resource.claim(before).await?.ok()?;
    assert_eq!(writer.release().await?, Outcome::Released);
    let one = read(&mine, &name).await?;
    let two = other.rw_lock(&name).read().ttl(LONG).fence_above(one.fence().offset(1000));
    let two = two.try_acquire().await?.ok_or("readers must share")?;
    let readers = [two.fence(), one.fence(), two.fence()];
    for reader in readers {
        assert!(resource.claim_shared(reader).await?.is_admitted(), "a reader was refused that has the lock");
    }
    assert!(!resource.claim(before).await?.is_admitted(), "the writer before them came through");
    assert_eq!((one.release().await?, two.release().await?), (Outcome::Released, Outcome::Released));
    let writer = write(&other).try_acquire().await?.ok_or("free, but refused")?;
    let next = resource.claim(writer.fence()).await?;
    assert!(next.is_admitted(), "the next writer was refused: its fence {} is not above {readers:?}", writer.fence());
    for reader in readers {
        assert!(!resource.claim_shared(reader).await?.is_admitted(), "a stale reader was let in after a writer");
    }
    Ok(())
}

async fn a_resource_refuses_a_writer_that_readers_came_after(ctx: Ctx) -> CaseResult {
    let (first, second, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    let resource = Resource::default();
    let stale = first.rw_lock(&name).write().ttl(LONG).try_acquire().await?.ok_or("free, but refused")?;
    assert!(resource.admit(stale.fence()));
    // The lock is taken from a holder that does not notice: what a freeze or a partition looks like from outside.
    second.break_lock(&name, stale.token()).await?;
    let reader = read(&second, &name).await?;
    let before = reader.fence();
    assert!(resource.admit(before));
    assert!(!resource.admit(stale.fence()), "the stale writer's write came through");
    assert_eq!(reader.release().await?, Outcome::Released);
    let writer = second.rw_lock(&name).write().ttl(LONG).try_acquire().await?.ok_or("free, but refused")?;
    assert!(resource.admit(writer.fence()));
    assert!(!resource.admit(before), "a stale reader was let in after a writer");
    Ok(())
}

/// A writer that waits behind readers.
struct Writer(tokio::task::JoinHandle<Result<(Option<Guard>, Moment), lockkit_core::Error>>);

impl Writer {
    /// On a busy machine it may set out late: then it proves less, but nothing wrong.
    fn waits(store: Arc<dyn LockStore>, key: &LockKey) -> Self {
        let lock = super::locker(Arc::clone(&store)).rw_lock(key.as_str()).write().ttl(LONG);
        Self(tokio::spawn(async move {
            let guard = lock.acquire_within(LONG / 2).await?;
            Ok((guard, store.info().clock.now()))
        }))
    }

    /// It gets the lock when this lease has ended, and not before.
    async fn gets_in_after(self, last: &Hold) -> CaseResult {
        let (guard, at) = self.0.await??;
        let late = at.since(last.until);
        let guard = guard.filter(|_| late < UNTOLD);
        let guard = guard.ok_or_else(|| format!("a writer is still waiting {late:?} after the last reader's end"))?;
        assert!(at >= last.until, "a writer came in beside a reader");
        assert_eq!(guard.release().await?, Outcome::Released);
        Ok(())
    }
}

async fn tokens(lock: &Lock) -> Result<HashSet<Token>, BoxError> {
    Ok(seen(lock).await?.holders.iter().filter_map(|holder| holder.token).collect())
}

/// All that hold the lock are shown, in whatever order.
pub(super) async fn assert_shown(lock: &Lock, mode: Mode, held: &[Token]) -> CaseResult {
    let holders = seen(lock).await?.holders;
    let shown: HashSet<_> = holders.iter().filter_map(|holder| holder.token).collect();
    let right = holders.len() == held.len() && shown == held.iter().copied().collect();
    if right && holders.iter().all(|holder| holder.mode == mode) {
        return Ok(());
    }
    Err(format!("{} that hold the lock as {mode} are shown as {holders:?}", held.len()).into())
}

async fn read(locker: &Locker, name: &str) -> Result<Guard, BoxError> {
    let guard = locker.rw_lock(name).read().ttl(LONG).try_acquire().await?;
    guard.ok_or_else(|| "readers must share".into())
}
