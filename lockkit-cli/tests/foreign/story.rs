//! A migration from beginning to end, and back, while another client takes its locks in the old store.

use lockkit::{ErrorKind, Outcome, migrate::Phase};
use lockkit_testkit::BoxError;
use tokio::{sync::Notify, time::timeout};

use crate::{
    setting::{PATIENCE, Setting},
    support::{code, complaint},
};

pub(crate) async fn tell(mut setting: Setting) -> Result<(), BoxError> {
    let setting = &mut setting;
    excludes(setting).await.map_err(|error| format!("in the phase old: {error}"))?;
    assert!(setting.done(&["advance", "--to-phase", "shadow", "--yes"]).await?.starts_with("the phase is shadow"));
    excludes(setting).await.map_err(|error| format!("in the shadow: {error}"))?;
    stops_a_step(setting, Phase::Both).await?;
    assert!(setting.migration.step(Phase::Both, |_| ()).await?.copied.is_ok());
    excludes(setting).await.map_err(|error| format!("in the phase both: {error}"))?;
    stops_a_step(setting, Phase::New).await?;
    stops_a_step_in_its_drain(setting).await?;
    is_left_alone_in_the_phase_new(setting).await?;
    takes_what_goes_back(setting).await?;
    stops_a_step(setting, Phase::Old).await?;
    assert!(setting.done(&["rollback", "--yes"]).await?.starts_with("the phase is old"));
    excludes(setting).await.map_err(|error| format!("back in the phase old: {error}").into())
}

/// Either is kept out while the other holds the lock, and no update is lost under load.
async fn excludes(setting: &mut Setting) -> Result<(), BoxError> {
    for _ in 0..3 {
        // What follows a lease in the shadow is given back in the background. A client acts on a phase that it read for a while, so that
        // for a moment after the step to both, a try may be refused at the new store.
        let guard = setting.take_within(PATIENCE).await?.ok_or("it is free")?;
        assert_eq!(setting.other.ask("acquire 200").await?, "refused");
        assert_eq!(guard.release().await?, Outcome::Released);
        assert_eq!(setting.other.ask("acquire 2000").await?, "acquired");
        assert!(setting.take().await?.is_none(), "granted twice");
        assert_eq!(setting.other.ask("release").await?, "released");
    }
    setting.count(40).await
}

/// While the other client holds a lock in the old store, no step is taken from a phase that uses that.
async fn stops_a_step(setting: &mut Setting, goal: Phase) -> Result<(), BoxError> {
    let phase = setting.phase().await?;
    assert_eq!(setting.other.ask("acquire 2000").await?, "acquired");
    let named = setting.named().await?;
    let refused = setting.migration.step(goal, |_| ()).await.err().ok_or("the step was taken")?;
    assert_eq!(refused.kind(), ErrorKind::Misconfigured, "{refused}");
    assert!(refused.to_string().contains(&named), "{refused}");
    let verb = if goal == Phase::Old { "rollback" } else { "advance" };
    let output = setting.command(&[verb, "--yes"]).await?;
    assert_eq!(code(&output), 78, "{output:?}");
    assert!(complaint(&output).contains(&named), "{output:?}");
    assert_eq!(setting.phase().await?, phase);
    warns(setting).await?;
    assert_eq!(setting.other.ask("release").await?, "released");
    Ok(())
}

/// So it is if the other client comes while the step waits.
async fn stops_a_step_in_its_drain(setting: &mut Setting) -> Result<(), BoxError> {
    let waits = Notify::new();
    let Setting { migration, other, .. } = setting;
    let (step, acquired) = tokio::join!(migration.step(Phase::New, |_| waits.notify_one()), async {
        waits.notified().await;
        other.ask("acquire 2000").await
    });
    assert_eq!(acquired?, "acquired");
    let refused = step.err().ok_or("the step was taken")?;
    assert!(refused.to_string().contains(&setting.named().await?), "{refused}");
    assert_eq!(setting.phase().await?, Phase::Both);
    assert_eq!(setting.other.ask("release").await?, "released");
    Ok(())
}

/// `status` tells of the other client, which holds a lock in the old store, in every phase.
async fn warns(setting: &Setting) -> Result<(), BoxError> {
    let status = setting.done(&["status"]).await?;
    let warning = "warning: locks held by clients that know nothing of the migration: 1, such as by";
    assert!(status.contains(warning), "{status}");
    Ok(())
}

/// The danger: a client that was forgotten takes locks in the store that was left, and clients of the migration take the same
/// ones in the new store. Both have the lock at once, in whichever order they come.
async fn is_left_alone_in_the_phase_new(setting: &mut Setting) -> Result<(), BoxError> {
    let guard = setting.take().await?.ok_or("it is free")?;
    assert!(setting.done(&["advance", "--yes"]).await?.starts_with("the phase is new"));
    // As soon as our lease has left the old store, with its next renewal.
    assert_eq!(setting.other.ask("acquire 20000").await?, "acquired");
    assert!(guard.is_held(), "our lease did not go along");
    warns(setting).await?;
    assert_eq!(guard.release().await?, Outcome::Released);
    let guard = setting.take().await?.ok_or("nobody has it in the new store")?;
    assert_eq!(setting.other.ask("release").await?, "released");
    assert_eq!(setting.other.ask("acquire 2000").await?, "acquired");
    assert!(guard.is_held());
    assert_eq!(guard.release().await?, Outcome::Released);
    Ok(())
}

/// On the way back, the lock of the forgotten client counts again: it keeps ours out, and what we hold in the new store is
/// lost in time, for it can't be had in the old one.
async fn takes_what_goes_back(setting: &mut Setting) -> Result<(), BoxError> {
    let guard = setting.take().await?.ok_or("nobody has it in the new store")?;
    assert!(setting.done(&["rollback", "--yes"]).await?.starts_with("the phase is both"));
    let reason = timeout(PATIENCE, guard.lost()).await?;
    assert!(!guard.is_held(), "{reason}");
    drop(guard);
    assert!(setting.take().await?.is_none(), "granted twice");
    assert_eq!(setting.other.ask("release").await?, "released");
    let guard = setting.take_within(PATIENCE).await?.ok_or("nobody has it")?;
    assert_eq!(guard.release().await?, Outcome::Released);
    Ok(())
}
