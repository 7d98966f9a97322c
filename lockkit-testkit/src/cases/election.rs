//! One leader among many candidates.

use std::{sync::Arc, time::Duration};

use lockkit_core::{Election, ErrorKind, HolderInfo, Locker, Outcome, Release};
use tokio::{sync::mpsc, time::timeout};

use super::{CaseResult, Ctx, LONG, cases, fencing_claimed};
use crate::BoxError;

cases! { "election":
    one_leads_and_all_see_which [NOTHING] "Of several candidates one leads, and the others see its name and its term."
    the_next_leads_in_a_later_term [NOTHING] "When a leader resigns, a candidate that waits leads next, in a term with a higher number; observers are told."
    the_work_of_a_leader_ends_with_its_lease [NOTHING] "lead() drops the work of a leader that was deposed, and begins it again in a later term."
    a_leader_may_hand_over [RESUME] "A leader may hand over to one candidate: nobody gets in between, the term is a later one, and it is handed over once."
    what_can_not_be_handed_over_is_refused [NOTHING] "A leader whose lease ends with its client hands over to nobody (R12)."
}

const OFTEN: Duration = Duration::from_millis(20);
/// How long anything awaited may take. Not how long it does take.
const PATIENCE: Duration = Duration::from_secs(30);

/// A candidate of that name.
async fn candidate(ctx: &Ctx, election: &str, name: &str) -> Result<Election, BoxError> {
    let locker = Locker::shared_builder(ctx.store().await?).holder(HolderInfo::new(name)).build();
    Ok(locker.election(election).ttl(LONG))
}

async fn one_leads_and_all_see_which(ctx: Ctx) -> CaseResult {
    let name = ctx.name();
    let (one, two) = (candidate(&ctx, &name, "one").await?, candidate(&ctx, &name, "two").await?);
    let mut seen = two.observe(OFTEN);
    assert_eq!(timeout(PATIENCE, seen.next()).await??, None, "nobody leads yet");
    let term = one.campaign().await?;
    assert!(two.try_campaign().await?.is_none(), "two lead at once");
    let leader = timeout(PATIENCE, seen.next()).await??.ok_or("a leader is not seen")?;
    assert_eq!(leader.info.as_str(), "one");
    assert_eq!(two.leader().await?.ok_or("a leader is not shown")?.term, leader.term);
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
    assert_eq!(seen.next().await?.ok_or("a leader is not seen")?.info.as_str(), "one");
    let next = tokio::spawn(async move { two.campaign().await });
    let before = term.fence();
    assert_eq!(term.resign().await?, Outcome::Released);
    let term = timeout(PATIENCE, next).await???;
    assert!(term.fence() > before || !fencing_claimed(&ctx.locker().await?), "{} after {before}", term.fence());
    let told = async {
        // That nobody leads for a moment may be seen.
        loop {
            if let Some(leader) = seen.next().await? {
                return Ok::<_, BoxError>(leader);
            }
        }
    };
    assert_eq!(timeout(PATIENCE, told).await??.info.as_str(), "two");
    Ok(())
}

async fn the_work_of_a_leader_ends_with_its_lease(ctx: Ctx) -> CaseResult {
    let (name, locker) = (ctx.name(), ctx.locker().await?);
    let election = candidate(&ctx, &name, "one").await?.ttl(Duration::from_secs(6));
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
    assert!(locker.lock(&name).inspect().await?.holders.is_empty(), "one that is done still leads");
    Ok(())
}

async fn depose(locker: &Locker, name: &str) -> CaseResult {
    let state = locker.lock(name).inspect().await?;
    let token = state.holders.first().and_then(|leader| leader.token).ok_or("a leader is not shown")?;
    let answer = locker.break_lock(name, token).await?;
    assert!(matches!(answer, Release::Released { .. }), "{answer:?}");
    Ok(())
}

async fn a_leader_may_hand_over(ctx: Ctx) -> CaseResult {
    let name = ctx.name();
    let (one, two) = (candidate(&ctx, &name, "one").await?, candidate(&ctx, &name, "two").await?);
    let three = candidate(&ctx, &name, "three").await?;
    let term = one.campaign().await?;
    let mut waiting = tokio::spawn(async move { three.campaign().await });
    let before = term.fence();
    let token = term.hand_over()?;
    let term = two.take_over(token).await?.ok_or("it was not handed over")?;
    assert!(term.fence() > before || !fencing_claimed(&ctx.locker().await?), "{} after {before}", term.fence());
    assert_eq!(one.leader().await?.ok_or("a leader is not shown")?.info.as_str(), "two");
    assert!(one.take_over(token).await?.is_none(), "it was handed over twice");
    assert!(timeout(OFTEN, &mut waiting).await.is_err(), "two lead at once");
    assert!(term.is_held() && term.resign().await? == Outcome::Released);
    drop(timeout(PATIENCE, waiting).await???);
    Ok(())
}

async fn what_can_not_be_handed_over_is_refused(ctx: Ctx) -> CaseResult {
    let election = candidate(&ctx, &ctx.name(), "one").await?;
    let term = election.campaign().await?;
    match term.hand_over() {
        Ok(_) => assert!(ctx.locker().await?.info().capability.resume, "handed over without a claim to it"),
        Err(refusal) => assert_eq!(refusal.kind(), ErrorKind::Unsupported, "{refusal}"),
    }
    Ok(())
}
