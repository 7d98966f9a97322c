//! Records beside the locks, and the identity that is kept in one.

use std::{collections::HashSet, sync::Arc};

use lockkit_core::{
    LockKey, LockStore, Prefix, Query,
    store::{Record, Records, Swap, identity},
};
use tokio::task::JoinSet;

use super::{
    CaseResult, Ctx, LONG,
    abandoned::drop_each,
    behind::every_answer,
    call::Call,
    cases, grant, request,
    scene::{Scene, new_text, only_keeper},
};
use crate::{BoxError, faults::Slip};

cases! { "records":
    a_record_changes_from_what_was_seen [RECORDS] "A record is made, changed and removed if it is what was seen, and else says what it is."
    each_change_builds_on_the_one_before [RECORDS] "Of many clients that change one record at the same time, each builds on what another wrote."
    what_was_written_is_read [RECORDS] "A record is read as it was last written, by whichever client."
    they_are_no_locks [RECORDS] "Records and locks of one name have nothing to do with each other, and every name is a record of its own."
    they_survive_a_restart_with_data [SERVER_RECORDS] "After a restart with its data the store has its records, and is known by its identity."
    a_dropped_call_answers_no_other [SERVER_RECORDS] "A question about a record dropped at any await spoils the answer to no other."
    an_answer_that_is_lost_shifts_no_others [SERVER_RECORDS] "If an answer about a record is lost on the way, no other is taken for it."
    an_answer_that_comes_twice_shifts_no_others [SERVER_RECORDS] "If an answer about a record comes twice, it is not taken for the one to the next question."
    a_store_has_one_identity [RECORDS] "All clients know a store by one identity, and two stores by two."
}

/// How many clients change a record, and how often each.
const CLIENTS: u32 = 4;
const CHANGES: u32 = 20;

async fn a_record_changes_from_what_was_seen(ctx: Ctx) -> CaseResult {
    let (store, other, name) = (ctx.store().await?, ctx.store().await?, ctx.key()?);
    let (mine, theirs) = (only_keeper(&store)?, only_keeper(&other)?);
    let [first, second, third] = [new_text()?, new_text()?, Record::new("~".repeat(Record::MAX_BYTES))?];
    assert_eq!(mine.read(&name).await?, None);
    assert_eq!(mine.compare_and_set(&name, Some(&second), Some(&first)).await?, Swap::Differs(None));
    assert_eq!(mine.compare_and_set(&name, None, Some(&first)).await?, Swap::Done);
    assert_eq!(theirs.read(&name).await?, Some(first.clone()));
    let there = Swap::Differs(Some(first.clone()));
    assert_eq!(theirs.compare_and_set(&name, None, Some(&second)).await?, there, "made where one was");
    assert_eq!(theirs.compare_and_set(&name, Some(&second), None).await?, there, "removed, although it was another");
    assert_eq!(mine.compare_and_set(&name, None, Some(&first)).await?, Swap::Done, "the same again");
    assert_eq!(theirs.compare_and_set(&name, Some(&first), Some(&third)).await?, Swap::Done);
    assert_eq!(theirs.compare_and_set(&name, Some(&first), Some(&third)).await?, Swap::Done, "the same again");
    assert_eq!(mine.read(&name).await?, Some(third.clone()));
    assert_eq!(mine.compare_and_set(&name, Some(&third), None).await?, Swap::Done);
    assert_eq!(mine.compare_and_set(&name, Some(&third), None).await?, Swap::Done, "the same again");
    assert_eq!(theirs.read(&name).await?, None);
    assert_eq!(theirs.compare_and_set(&name, Some(&third), Some(&first)).await?, Swap::Differs(None));
    assert_eq!(theirs.compare_and_set(&name, None, Some(&second)).await?, Swap::Done, "made anew");
    assert_eq!(mine.read(&name).await?, Some(second));
    remove(&*mine, &name).await
}

async fn each_change_builds_on_the_one_before(ctx: Ctx) -> CaseResult {
    let (name, mut clients) = (ctx.key()?, JoinSet::new());
    for _ in 0..CLIENTS {
        let (store, name) = (ctx.store().await?, name.clone());
        clients.spawn(async move {
            let (keeper, mut built_on) = (only_keeper(&store)?, Vec::new());
            let mut seen = keeper.read(&name).await?;
            while built_on.len() < CHANGES as usize {
                let new = new_text()?;
                match keeper.compare_and_set(&name, seen.as_ref(), Some(&new)).await? {
                    Swap::Done => built_on.push(seen.replace(new)),
                    Swap::Differs(found) => seen = found,
                }
            }
            Ok::<_, BoxError>(built_on)
        });
    }
    let mut all = HashSet::new();
    while let Some(built_on) = clients.join_next().await {
        for seen in built_on?? {
            if let Some(again) = all.replace(seen) {
                return Err(format!("a second change builds on {again:?}").into());
            }
        }
    }
    remove(&*only_keeper(&ctx.store().await?)?, &name).await
}

async fn what_was_written_is_read(ctx: Ctx) -> CaseResult {
    let (stores, name) = ([ctx.store().await?, ctx.store().await?], ctx.key()?);
    let [mine, theirs] = [only_keeper(&stores[0])?, only_keeper(&stores[1])?];
    let mut seen = None;
    for round in 0..40 {
        let (writer, reader) = if round % 3 == 0 { (&theirs, &mine) } else { (&mine, &theirs) };
        let new = if round % 10 == 9 { None } else { Some(new_text()?) };
        assert_eq!(writer.compare_and_set(&name, seen.as_ref(), new.as_ref()).await?, Swap::Done, "round {round}");
        let read = reader.read(&name).await?;
        if read != new {
            return Err(format!("in round {round} the record {new:?} is read as {read:?}").into());
        }
        seen = new;
    }
    remove(&*mine, &name).await
}

async fn they_are_no_locks(ctx: Ctx) -> CaseResult {
    let (store, other, base) = (ctx.store().await?, ctx.store().await?, ctx.name());
    let names = ["a", "A", "a ", "a/b", "a%2Fb", "a{b}", "{a}:fence", "ä", "%record-a", ":"];
    let names: Result<Vec<_>, _> = names.iter().map(|name| LockKey::new(format!("{base}{name}"))).collect();
    let (names, keeper) = (names?, only_keeper(&store)?);
    let mut texts = Vec::new();
    for name in &names {
        let text = new_text()?;
        assert_eq!(keeper.compare_and_set(name, None, Some(&text)).await?, Swap::Done, "{name:?} is another's");
        texts.push(text);
    }
    let held = store.inspect(&Query::Prefix(base.clone())).await?;
    assert!(held.is_empty(), "records are shown as locks: {held:?}");
    for name in &names {
        let mut asked = request(name, LONG)?;
        grant(&other, &mut asked).await?;
        other.release(&asked.claim).await?;
    }
    for (name, text) in names.iter().zip(&texts) {
        assert_eq!(keeper.read(name).await?.as_ref(), Some(text), "{name:?}");
        remove(&*keeper, name).await?;
    }
    Ok(())
}

async fn they_survive_a_restart_with_data(ctx: Ctx) -> CaseResult {
    let (server, name, text) = (ctx.server().await?, ctx.key()?, new_text()?);
    let store = server.open().await?;
    assert_eq!(only_keeper(&store)?.compare_and_set(&name, None, Some(&text)).await?, Swap::Done);
    let known = identity(&*store).await?;
    server.kill().await?;
    server.restart(true).await?;
    let store = server.open().await?;
    assert_eq!(only_keeper(&store)?.read(&name).await?, Some(text));
    assert_eq!(identity(&*store).await?, known);
    Ok(())
}

async fn a_dropped_call_answers_no_other(ctx: Ctx) -> CaseResult {
    let server = ctx.server().await?;
    let scene = Scene::open(&ctx, &*server).await?.with_record(&ctx).await?;
    drop_each(&ctx, &Arc::new(scene), &Call::RECORDS).await
}

async fn an_answer_that_is_lost_shifts_no_others(ctx: Ctx) -> CaseResult {
    every_answer(ctx, Slip::Lost, &Call::RECORDS).await
}

async fn an_answer_that_comes_twice_shifts_no_others(ctx: Ctx) -> CaseResult {
    every_answer(ctx, Slip::Twice, &Call::RECORDS).await
}

async fn a_store_has_one_identity(ctx: Ctx) -> CaseResult {
    let mut known = Vec::new();
    for part in [ctx.name(), ctx.name()] {
        let part = async || Ok::<_, BoxError>(Prefix::new(part.as_str(), ctx.store().await?)?);
        // Nobody has asked for it yet: all who do at the same time agree.
        let (mut asked, mut told) = (JoinSet::new(), HashSet::new());
        for _ in 0..CLIENTS * 2 {
            let part = part().await?;
            asked.spawn(async move { identity(&part).await });
        }
        while let Some(answer) = asked.join_next().await {
            told.insert(answer??);
        }
        let part: Arc<dyn LockStore> = Arc::new(part().await?);
        told.insert(identity(&*part).await?);
        assert_eq!(told.len(), 1, "all know it by one: {told:?}");
        remove(&*only_keeper(&part)?, &LockKey::new("lockkit/identity")?).await?;
        known.extend(told);
    }
    assert_ne!(known[0], known[1], "two parts of a store are two stores");
    Ok(())
}

/// Records do not lapse, and a case leaves nothing behind.
async fn remove(keeper: &dyn Records, name: &LockKey) -> CaseResult {
    let last = keeper.read(name).await?;
    assert_eq!(keeper.compare_and_set(name, last.as_ref(), None).await?, Swap::Done);
    assert_eq!(keeper.read(name).await?, None);
    Ok(())
}
