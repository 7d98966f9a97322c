//! One leader among many candidates.

use std::{sync::Arc, time::Duration};

use lockkit_core::{Election, ErrorKind, HolderInfo, Leader, Leaders, Locker, Outcome, Release, Resume};
use tokio::{sync::mpsc, time::timeout};

use super::{
    CaseResult, Ctx, LONG, SHORT, assert_taken, cases, fencing_claimed, locker, seen, take_in_the_end, wait_for_waiter,
};
use crate::BoxError;

cases! { "election":
    one_leads_and_all_see_which [NOTHING] "Of several candidates one leads, and the others see its name and its term."
    the_next_leads_in_a_later_term [NOTHING] "When a leader resigns, a candidate that waits leads next, in a term with a higher number; observers are told."
    the_work_of_a_leader_ends_with_its_lease [NOTHING] "lead() drops the work of a leader that was deposed, and begins it again in a later term."
    a_frozen_leader_works_no_more [SERVER_TTL] "A leader frozen past its lease has its work dropped when it wakes, and leads again only in a term after that of the one that led meanwhile."
    a_leader_may_hand_over [RESUME] "A leader may hand over to one candidate: nobody gets in between, the term is a later one, and it is handed over once."
    what_can_not_be_handed_over_is_refused [NOTHING] "A leader whose lease ends with its client hands over to nobody, and leads no more (R12)."
    each_leader_of_a_process_is_seen [NOTHING] "Candidates of one process lead one after the other, each with a lease of its own, so that others see each."
}

const OFTEN: Duration = Duration::from_millis(20);
/// How long anything awaited may take. Not how long it does take.
const PATIENCE: Duration = Duration::from_secs(30);

/// A candidate of that name.
async fn candidate(ctx: &Ctx, election: &str, name: &str) -> Result<Election, BoxError> {
    let locker = Locker::shared_builder(ctx.store().await?).holder(HolderInfo::new(name)).build();
    Ok(locker.election(election).ttl(LONG))
}

/// Waits for another leader to be told of, or nobody; the store is asked again when it had no time to answer.
async fn told(leaders: &mut Leaders) -> Result<Option<Leader>, BoxError> {
    let told = async {
        loop {
            match leaders.next().await {
                Err(error) if error.is_retryable() => {}
                told => return Ok::<_, BoxError>(told?),
            }
        }
    };
    timeout(PATIENCE, told).await?
}

async fn one_leads_and_all_see_which(ctx: Ctx) -> CaseResult {
    let name = ctx.name();
    let (one, two) = (candidate(&ctx, &name, "one").await?, candidate(&ctx, &name, "two").await?);
    let mut seen = two.observe(OFTEN);
    assert_eq!(told(&mut seen).await?, None, "nobody leads yet");
    let term = one.campaign().await?;
    assert!(two.try_campaign().await?.is_none(), "two lead at once");
    let leader = told(&mut seen).await?.ok_or("a leader is not seen")?;
    assert_eq!(leader.info.as_str(), "one");
    if fencing_claimed(&ctx.locker().await?) {
        assert_eq!(leader.term, Some(term.fence()));
    }
    assert!(term.is_held() && term.resign().await? == Outcome::Released);
    Ok(())
}

async fn the_next_leads_in_a_later_term(ctx: Ctx) -> CaseResult {
    let name = ctx.name();
    let (one, two) = (candidate(&ctx, &name, "one").await?, candidate(&ctx, &name, "two").await?);
    let term = one.campaign().await?;
    let mut seen = one.observe(OFTEN);
    assert_eq!(told(&mut seen).await?.ok_or("a leader is not seen")?.info.as_str(), "one");
    let next = tokio::spawn(async move { two.campaign().await });
    wait_for_waiter(&ctx.locker().await?.lock(&name)).await?;
    let before = term.fence();
    assert_eq!(term.resign().await?, Outcome::Released);
    let term = timeout(PATIENCE, next).await???;
    assert!(term.fence() > before || !fencing_claimed(&ctx.locker().await?), "{} after {before}", term.fence());
    // That nobody leads for a moment may be seen.
    let leader = match told(&mut seen).await? {
        None => told(&mut seen).await?,
        leader => leader,
    };
    assert_eq!(leader.ok_or("a leader is not seen")?.info.as_str(), "two");
    Ok(())
}

async fn the_work_of_a_leader_ends_with_its_lease(ctx: Ctx) -> CaseResult {
    let (name, locker) = (ctx.name(), ctx.locker().await?);
    let election = candidate(&ctx, &name, "one").await?.ttl(Duration::from_secs(12));
    let (begun, mut terms) = mpsc::unbounded_channel();
    let led = tokio::spawn(async move {
        // One count for this task, and one for each piece of work that is not dropped.
        let (works, mut round) = (Arc::new(()), 0);
        let work = |term| {
            round += 1;
            let (is_last, at_work) = (round == 2, Arc::clone(&works));
            begun.send((term, Arc::strong_count(&works) - 1)).unwrap_or_default();
            async move {
                if !is_last {
                    std::future::pending::<()>().await;
                }
                drop(at_work);
                term
            }
        };
        election.lead(work).await
    });
    let (first, _) = timeout(PATIENCE, terms.recv()).await?.ok_or("nobody works")?;
    depose(&locker, &name).await?;
    let (second, at_work) = timeout(PATIENCE, terms.recv()).await?.ok_or("nobody works any more")?;
    assert_eq!(at_work, 1, "the work of two terms goes on at once");
    assert!(second > first || !fencing_claimed(&locker), "the term {second} after {first}");
    assert_eq!(timeout(PATIENCE, led).await???, second);
    // A release that was not answered goes on in the background.
    drop(take_in_the_end(&locker, &name, LONG).await?);
    Ok(())
}

async fn depose(locker: &Locker, name: &str) -> CaseResult {
    let state = seen(&locker.lock(name)).await?;
    let token = state.holders.first().and_then(|leader| leader.token).ok_or("a leader is not shown")?;
    let answer = locker.break_lock(name, token).await?;
    assert!(matches!(answer, Release::Released { .. }), "{answer:?}");
    Ok(())
}

async fn a_frozen_leader_works_no_more(ctx: Ctx) -> CaseResult {
    let (server, name) = (ctx.server().await?, ctx.name());
    let (store, other, frozen_name) = (server.open().await?, locker(server.open().await?), name.clone());
    let (begun, mut terms) = mpsc::unbounded_channel();
    let (thaw, is_thawed) = std::sync::mpsc::channel::<()>();
    // A runtime of one thread that is blocked stands still as a whole process: no renewal, no timer, no wake-up.
    let frozen = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let work = |term| {
            let (begun, is_thawed) = (&begun, &is_thawed);
            async move {
                begun.send(term).expect("the case goes on");
                // Once it was thawed it freezes no more.
                is_thawed.recv().unwrap_or_default();
                tokio::task::yield_now().await;
                term
            }
        };
        runtime.block_on(async { locker(store).election(&frozen_name).ttl(SHORT).lead(work).await })
    });
    let first = timeout(PATIENCE, terms.recv()).await?.ok_or("nobody works")?;
    let between = timeout(PATIENCE, other.election(&name).ttl(LONG).campaign()).await??;
    drop(thaw);
    wait_for_waiter(&other.lock(&name)).await?;
    assert!(terms.try_recv().is_err() && between.is_held(), "two lead at once");
    let fence = between.fence();
    assert_eq!(between.resign().await?, Outcome::Released);
    let led = tokio::task::spawn_blocking(move || frozen.join()).await?.map_err(|_| "it panicked")??;
    let mut last = first;
    while let Ok(term) = terms.try_recv() {
        last = term;
    }
    assert_eq!(led, last, "the work of a term that was over went on");
    assert!(!fencing_claimed(&other) || first < fence && fence < led, "terms {first}, {fence}, {led}");
    Ok(())
}

async fn a_leader_may_hand_over(ctx: Ctx) -> CaseResult {
    let name = ctx.name();
    let (one, two) = (candidate(&ctx, &name, "one").await?, candidate(&ctx, &name, "two").await?);
    let three = candidate(&ctx, &name, "three").await?;
    let term = one.campaign().await?;
    let mut waiting = tokio::spawn(async move { three.campaign().await });
    wait_for_waiter(&ctx.locker().await?.lock(&name)).await?;
    let before = term.fence();
    let token = term.hand_over()?;
    let term = two.take_over(token).await?.ok_or("it was not handed over")?;
    assert!(term.fence() > before || !fencing_claimed(&ctx.locker().await?), "{} after {before}", term.fence());
    assert_eq!(told(&mut one.observe(OFTEN)).await?.ok_or("a leader is not seen")?.info.as_str(), "two");
    assert!(one.take_over(token).await?.is_none(), "it was handed over twice");
    assert!(!matches!(timeout(OFTEN, &mut waiting).await, Ok(Ok(Ok(_)))), "two lead at once");
    assert!(term.is_held() && term.resign().await? == Outcome::Released);
    drop(timeout(PATIENCE, waiting).await???);
    Ok(())
}

async fn what_can_not_be_handed_over_is_refused(ctx: Ctx) -> CaseResult {
    let (name, locker) = (ctx.name(), ctx.locker().await?);
    let election = candidate(&ctx, &name, "one").await?;
    let can = locker.info().capability.resume > Resume::None;
    match election.campaign().await?.hand_over() {
        Ok(_) => {
            assert!(can, "handed over without a claim to it");
            assert_taken(&locker, &name).await
        }
        Err(refusal) => {
            assert_eq!((refusal.kind(), can), (ErrorKind::Unsupported, false), "{refusal}");
            drop(take_in_the_end(&locker, &name, LONG).await?);
            Ok(())
        }
    }
}

async fn each_leader_of_a_process_is_seen(ctx: Ctx) -> CaseResult {
    let (name, locker) = (ctx.name(), ctx.locker().await?);
    let election = locker.election(&name).ttl(LONG);
    let first = election.campaign().await?;
    let mut leases = vec![first.guard().token()];
    let candidate = || {
        let (election, lock) = (election.clone(), locker.lock(&name));
        tokio::spawn(async move {
            let term = election.campaign().await?;
            let shown = seen(&lock).await?.holders.first().and_then(|leader| leader.token);
            assert_eq!(shown, Some(term.guard().token()), "another is shown than the one that leads");
            let lease = term.guard().token();
            assert_eq!(term.resign().await?, Outcome::Released);
            Ok::<_, BoxError>(lease)
        })
    };
    // They line up behind the first, for so long that the next could hand its lease on.
    let others = [candidate(), candidate()];
    tokio::time::sleep(OFTEN).await;
    assert_eq!(first.resign().await?, Outcome::Released);
    for other in others {
        let lease = timeout(PATIENCE, other).await???;
        assert!(!leases.contains(&lease), "two terms are one lease");
        leases.push(lease);
    }
    Ok(())
}
