//! The line in which readers, writers and permits wait: one for all kinds, where a store has them.

use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use lockkit_core::{Attempt, Guard, HolderInfo, KeyState, Lock, Locker, Mode, Outcome, Release, Waiter, store::PLACE};
use tokio::{sync::Barrier, task::JoinHandle, time::timeout};

use super::{CaseResult, Ctx, LONG, SLACK, UNTOLD, cases, modes::TWO, request_as, seen, take, wait_for_waiters};
use crate::BoxError;

cases! { "fairness":
    all_kinds_are_served_as_they_came [SHARED] "Readers and writers get the lock in the order in which they came, whichever of the two they are."
    permits_are_served_as_they_came [PERMITS] "Those that wait for a permit get one in the order in which they came."
    a_waiting_writer_is_not_passed [SHARED] "A reader that comes behind a waiting writer waits, too, so that the writer does not starve."
    readers_in_front_enter_together [SHARED] "Readers that stand in front hold the lock together, and a writer behind them waits for all."
    a_try_passes_no_waiting_writer [SHARED] "A reader's try gets nothing while a writer waits, although other readers have the lock."
    a_try_takes_no_permit_from_those_that_wait [PERMITS] "A try gets no permit while somebody waits, although one is left."
    a_cancelled_waiter_leaves_the_line [FIFO] "A waiter that gave up holds up nobody behind it."
    the_queue_is_shown_in_order [SHARED] "Those that wait are shown in the order in which they will get in, each by its name and mode."
    a_long_queue_is_shown_in_part [FIFO] "Of a long queue the first 32 are shown; all are counted."
    a_waiter_that_gave_up_is_not_shown [FIFO] "A waiter that gave up is not shown in the queue; those behind it are."
    readers_go_on_when_a_writer_gives_up [SHARED] "When a waiting writer gives up, the readers behind it get in beside those that hold the lock."
    a_place_that_nobody_asks_for_ends [FIFO_TTL] "The place of a claim that does not ask again ends after 6 s."
    a_waiter_that_asks_again_keeps_its_place [FIFO_TTL] "A waiter keeps its place for as long as it waits."
}

/// How long one may take that has to wait for nobody.
const SOON: Duration = Duration::from_secs(3);

/// Those that wait for a lock, and the order in which they got it.
pub(super) struct Waiters {
    lock: Lock,
    served: Arc<Mutex<Vec<&'static str>>>,
    waiting: Vec<JoinHandle<CaseResult>>,
}

impl Waiters {
    pub(super) fn before(lock: Lock) -> Self {
        Self { lock, served: Arc::default(), waiting: Vec::new() }
    }

    /// Has somebody wait who notes when it is served. Returns when it has its place.
    pub(super) async fn join(&mut self, who: &'static str, lock: Lock) -> CaseResult {
        self.join_and(who, lock, async { Ok(()) }).await
    }

    /// The same with something to do while it holds the lock.
    async fn join_and(
        &mut self,
        who: &'static str,
        lock: Lock,
        work: impl Future<Output = CaseResult> + Send + 'static,
    ) -> CaseResult {
        let served = Arc::clone(&self.served);
        self.waiting.push(tokio::spawn(async move {
            let guard = lock.ttl(LONG).acquire_within(LONG).await?.ok_or_else(|| format!("{who} was left behind"))?;
            // Noted while it holds the lock, so that the notes have the order of the grants.
            served.lock().expect("unpoisoned").push(who);
            work.await?;
            assert_eq!(guard.release().await?, Outcome::Released);
            Ok(())
        }));
        let count = u32::try_from(self.waiting.len())?;
        for _ in 0..1000 {
            let waiters = seen(&self.lock).await?.waiters;
            if waiters.is_none() {
                tokio::time::sleep(SLACK).await;
            }
            if self.served().contains(&who) {
                return Err(format!("{who} passed those that wait").into());
            }
            if waiters.is_none_or(|waiters| waiters >= count) {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        Err(format!("{who} is not shown to wait").into())
    }

    fn served(&self) -> Vec<&'static str> {
        self.served.lock().expect("unpoisoned").clone()
    }

    /// Who was served, in order, once all were.
    pub(super) async fn finish(self) -> Result<Vec<&'static str>, BoxError> {
        for waiter in self.waiting {
            waiter.await??;
        }
        Ok(self.served.lock().expect("unpoisoned").clone())
    }
}

async fn all_kinds_are_served_as_they_came(ctx: Ctx) -> CaseResult {
    let (mine, name) = (ctx.locker().await?, ctx.name());
    let guard = mine.rw_lock(&name).write().ttl(LONG).try_acquire().await?.ok_or("free, but refused")?;
    let mut line = Waiters::before(mine.lock(&name));
    line.join("reader 1", ctx.locker().await?.rw_lock(&name).read()).await?;
    line.join("writer 1", ctx.locker().await?.rw_lock(&name).write()).await?;
    line.join("reader 2", ctx.locker().await?.rw_lock(&name).read()).await?;
    line.join("in order", ctx.locker().await?.lock(&name).fifo()).await?;
    line.join("reader 3", mine.rw_lock(&name).read()).await?;
    line.join("writer 2", mine.rw_lock(&name).write()).await?;
    assert_eq!(guard.release().await?, Outcome::Released);
    let served = line.finish().await?;
    let came = ["reader 1", "writer 1", "reader 2", "in order", "reader 3", "writer 2"];
    assert_eq!(served, came, "they were served in another order than they came");
    Ok(())
}

async fn permits_are_served_as_they_came(ctx: Ctx) -> CaseResult {
    let (mine, name) = (ctx.locker().await?, ctx.name());
    let permits = mine.semaphore(&name, TWO).ttl(LONG);
    let _kept = permits.try_acquire().await?.ok_or("free, but refused")?;
    let guard = permits.try_acquire().await?.ok_or("a permit is left, but refused")?;
    let mut line = Waiters::before(mine.lock(&name));
    for who in ["first", "second", "third"] {
        line.join(who, ctx.locker().await?.semaphore(&name, TWO)).await?;
    }
    assert_eq!(guard.release().await?, Outcome::Released);
    assert_eq!(line.finish().await?, ["first", "second", "third"], "they were served in another order than they came");
    Ok(())
}

async fn a_waiting_writer_is_not_passed(ctx: Ctx) -> CaseResult {
    let (mine, other, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    let reader = read(&mine.rw_lock(&name).read()).await?;
    let mut line = Waiters::before(mine.lock(&name));
    line.join("a writer", other.rw_lock(&name).write()).await?;
    line.join("a reader", mine.rw_lock(&name).read()).await?;
    assert_eq!(reader.release().await?, Outcome::Released);
    assert_eq!(line.finish().await?, ["a writer", "a reader"], "a reader passed a waiting writer");
    Ok(())
}

async fn readers_in_front_enter_together(ctx: Ctx) -> CaseResult {
    let (mine, other, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    let guard = mine.rw_lock(&name).write().ttl(LONG).try_acquire().await?.ok_or("free, but refused")?;
    let mut line = Waiters::before(mine.lock(&name));
    let meeting = Arc::new(Barrier::new(3));
    for (who, locker) in [("one", &mine), ("two", &other), ("three", &other)] {
        let meeting = Arc::clone(&meeting);
        let together = async move {
            // Each holds the lock for as long as it waits for the others.
            let met = timeout(LONG / 2, meeting.wait()).await;
            met.map(|_| ()).map_err(|_| "readers get the lock one after the other".into())
        };
        line.join_and(who, locker.rw_lock(&name).read(), together).await?;
    }
    line.join("a writer", mine.rw_lock(&name).write()).await?;
    assert_eq!(guard.release().await?, Outcome::Released);
    let served = line.finish().await?;
    assert_eq!(served.last(), Some(&"a writer"), "a writer passed a waiting reader");
    Ok(())
}

async fn a_try_passes_no_waiting_writer(ctx: Ctx) -> CaseResult {
    let (mine, other, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    let reader = read(&mine.rw_lock(&name).read()).await?;
    let mut line = Waiters::before(mine.lock(&name));
    line.join("a writer", other.rw_lock(&name).write()).await?;
    for locker in [&mine, &other] {
        let got = locker.rw_lock(&name).read().try_acquire().await?;
        assert!(got.is_none(), "a reader's try passed a waiting writer");
    }
    assert_eq!(reader.release().await?, Outcome::Released);
    line.finish().await?;
    assert!(other.rw_lock(&name).read().try_acquire().await?.is_some(), "nobody waits any more");
    Ok(())
}

async fn a_try_takes_no_permit_from_those_that_wait(ctx: Ctx) -> CaseResult {
    let (mine, other, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    let one = mine.semaphore(&name, TWO).ttl(LONG).try_acquire().await?.ok_or("free, but refused")?;
    let mut line = Waiters::before(mine.lock(&name));
    line.join("a writer", other.lock(&name).fifo()).await?;
    for locker in [&mine, &other] {
        assert!(locker.semaphore(&name, TWO).try_acquire().await?.is_none(), "a try passed one that waits");
    }
    assert_eq!(one.release().await?, Outcome::Released);
    line.finish().await?;
    assert!(other.semaphore(&name, TWO).try_acquire().await?.is_some(), "nobody waits any more");
    Ok(())
}

async fn a_cancelled_waiter_leaves_the_line(ctx: Ctx) -> CaseResult {
    let (mine, other, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    let guard = take(&mine, &name, LONG).await?;
    let (first, second) = (other.lock(&name).ttl(LONG).fifo(), mine.lock(&name).ttl(LONG).fifo());
    let gives_up = tokio::spawn(async move { first.acquire().await.map(drop) });
    wait_for_waiters(&mine.lock(&name), 1).await?;
    let next = tokio::spawn(async move { second.acquire().await });
    wait_for_waiters(&mine.lock(&name), 2).await?;
    gives_up.abort();
    assert_eq!(guard.release().await?, Outcome::Released);
    assert_goes_on(next).await
}

async fn the_queue_is_shown_in_order(ctx: Ctx) -> CaseResult {
    let (mine, name) = (ctx.locker().await?, ctx.name());
    let guard = mine.rw_lock(&name).write().ttl(LONG).try_acquire().await?.ok_or("free, but refused")?;
    let mut line = Waiters::before(mine.lock(&name));
    let mut came = Vec::new();
    for (who, mode) in [
        ("a reader: 1|2", Mode::Shared),
        ("a writer", Mode::Exclusive),
        ("", Mode::Exclusive),
        ("another reader ü", Mode::Shared),
    ] {
        let locker = named(&ctx, who).await?;
        let lock = if mode == Mode::Shared { locker.rw_lock(&name).read() } else { locker.lock(&name).fifo() };
        line.join(who, lock).await?;
        came.push(Waiter { info: HolderInfo::new(who), mode });
        let shown = queue(&mine.lock(&name)).await?;
        assert_eq!(shown, came, "the queue is shown in another order than they came");
    }
    assert_eq!(guard.release().await?, Outcome::Released);
    line.finish().await?;
    assert_eq!(queue(&mine.lock(&name)).await?, [], "nobody waits any more");
    Ok(())
}

async fn a_long_queue_is_shown_in_part(ctx: Ctx) -> CaseResult {
    let (store, mine, key) = (ctx.store().await?, ctx.locker().await?, ctx.key()?);
    let guard = take(&mine, key.as_str(), LONG).await?;
    let mut waiting = Vec::new();
    for number in 0..KeyState::LONGEST_QUEUE + 3 {
        let mut asked = request_as(&key, Mode::Exclusive, LONG)?;
        (asked.wait, asked.holder) = (LONG, HolderInfo::new(&format!("number {number}")));
        let store = Arc::clone(&store);
        waiting.push(tokio::spawn(async move {
            // As the core does: it keeps the place, also after an error that passes, and gives it up when it got the lock.
            loop {
                match store.acquire(&asked).await {
                    Ok(Attempt::Granted(_)) => return store.release(&asked.claim).await,
                    Ok(Attempt::Contended(_)) => {}
                    Err(error) if error.is_retryable() => {}
                    Err(error) => return Err(error),
                }
            }
        }));
    }
    let all = u32::try_from(waiting.len())?;
    wait_for_waiters(&mine.lock(key.as_str()), all).await?;
    // On a busy machine a place may lapse before its claim asks again, and come anew.
    loop {
        let state = mine.lock(key.as_str()).inspect_queue().await?;
        let shown = state.queue.ok_or("its queue is not shown")?.len();
        assert!(shown <= KeyState::LONGEST_QUEUE, "{shown} are shown of {all}");
        if shown == KeyState::LONGEST_QUEUE && state.waiters.is_none_or(|waiters| waiters >= all) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(guard.release().await?, Outcome::Released);
    for waiter in waiting {
        assert!(matches!(waiter.await??, Release::Released { .. }));
    }
    Ok(())
}

async fn a_waiter_that_gave_up_is_not_shown(ctx: Ctx) -> CaseResult {
    let (mine, name) = (ctx.locker().await?, ctx.name());
    let _guard = take(&mine, &name, LONG).await?;
    let mut waiting = Vec::new();
    for (who, count) in [("first", 1), ("second", 2), ("third", 3)] {
        let lock = named(&ctx, who).await?.lock(&name).ttl(LONG).fifo();
        waiting.push(tokio::spawn(async move { lock.acquire().await.map(drop) }));
        wait_for_waiters(&mine.lock(&name), count).await?;
    }
    waiting[1].abort();
    let gave_up = Instant::now();
    let shown = loop {
        let shown: Vec<_> = queue(&mine.lock(&name)).await?.into_iter().map(|waiter| waiter.info).collect();
        if !shown.contains(&HolderInfo::new("second")) {
            break shown;
        }
        // A place that nobody gives up lasts longer.
        assert!(gave_up.elapsed() < SOON, "one that gave up is still shown to wait");
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    assert_eq!(shown, ["first", "third"].map(HolderInfo::new), "the others wait as before");
    waiting.iter().for_each(JoinHandle::abort);
    Ok(())
}

/// A client with this name.
async fn named(ctx: &Ctx, name: &str) -> Result<Locker, BoxError> {
    Ok(Locker::shared_builder(ctx.store().await?).holder(HolderInfo::new(name)).build())
}

async fn queue(lock: &Lock) -> Result<Vec<Waiter>, BoxError> {
    Ok(lock.inspect_queue().await?.queue.ok_or("its queue is not shown")?)
}

async fn readers_go_on_when_a_writer_gives_up(ctx: Ctx) -> CaseResult {
    let (mine, other, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    let reader = read(&mine.rw_lock(&name).read()).await?;
    let (writer, behind) = (other.rw_lock(&name).write(), mine.rw_lock(&name).read().ttl(LONG));
    let gives_up = tokio::spawn(async move { writer.acquire().await.map(drop) });
    wait_for_waiters(&mine.lock(&name), 1).await?;
    let next = tokio::spawn(async move { behind.acquire().await });
    wait_for_waiters(&mine.lock(&name), 2).await?;
    gives_up.abort();
    assert_goes_on(next).await?;
    assert_eq!(reader.release().await?, Outcome::Released);
    Ok(())
}

/// A place lasts longer than this takes: it has to be given up.
async fn assert_goes_on(next: JoinHandle<lockkit_core::Result<Guard>>) -> CaseResult {
    let guard = timeout(SOON, next).await.map_err(|_| "the next one still waits behind one that gave up")???;
    assert_eq!(guard.release().await?, Outcome::Released);
    Ok(())
}

async fn a_place_that_nobody_asks_for_ends(ctx: Ctx) -> CaseResult {
    let (store, mine, key) = (ctx.store().await?, ctx.locker().await?, ctx.key()?);
    let guard = take(&mine, key.as_str(), LONG).await?;
    let mut asked = request_as(&key, lockkit_core::Mode::Exclusive, LONG)?;
    asked.wait = Duration::from_millis(100);
    assert!(matches!(store.acquire(&asked).await?, Attempt::Contended(_)), "granted twice");
    let died = Instant::now();
    assert_eq!(guard.release().await?, Outcome::Released);
    let next = ctx.locker().await?.lock(key.as_str()).ttl(LONG).fifo().acquire_within(PLACE + UNTOLD + SLACK).await?;
    let guard = next.ok_or_else(|| format!("{:?} later the next one still waits behind the dead", died.elapsed()))?;
    assert_eq!(guard.release().await?, Outcome::Released);
    Ok(())
}

async fn a_waiter_that_asks_again_keeps_its_place(ctx: Ctx) -> CaseResult {
    let (mine, other, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    let guard = take(&mine, &name, LONG).await?;
    let mut line = Waiters::before(mine.lock(&name));
    line.join("first", other.lock(&name).fifo()).await?;
    // The place of the first would end while the second has one.
    tokio::time::sleep(PLACE / 2).await;
    line.join("second", mine.lock(&name).fifo()).await?;
    tokio::time::sleep(PLACE / 2 + Duration::from_secs(1)).await;
    assert_eq!(guard.release().await?, Outcome::Released);
    assert_eq!(line.finish().await?, ["first", "second"], "the first one lost its place");
    Ok(())
}

async fn read(lock: &Lock) -> Result<Guard, BoxError> {
    lock.clone().ttl(LONG).try_acquire().await?.ok_or_else(|| "only readers have it, but refused".into())
}
