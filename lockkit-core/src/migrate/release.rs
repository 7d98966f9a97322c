//! Releasing. A lease that somebody had is released in the new store first, so that the next client, which asks the old store first, is
//! not refused by the new one.

use super::{claim::Entry, dual::Dual, pair::aside};
use crate::{Claim, Error, ErrorKind, LockStore, LossReason, Release, Result, store::join_all};

impl Dual {
    pub(super) async fn release_in_phase(&self, claim: &Claim) -> Result<Release> {
        if let Some(entry) = self.claims.get(claim) {
            // A renewal may have found it lost, and not have come to say so.
            let lost = entry.end();
            self.shadow.end(claim);
            let answer = self.release_all(&entry, both).await;
            self.claims.settle(&entry);
            return answer.map(|release| lost.map_or(release, |reason| both(Release::NotHeld(reason), release)));
        }
        // Of another client, or released before. How it was held is not known here: perhaps as of the phase before. When the migration is
        // over, the store that is left has the last word: where nothing lapses, a release is repeated until it is answered.
        let phase = match (self.confirmed().await, self.end.get()) {
            (Ok(record), _) => record.phase,
            (Err(_), Some(end)) => end.phase,
            (Err(error), None) => return Err(error),
        };
        self.release_all(&Entry::assumed(claim.clone(), phase), either).await
    }

    /// Releases a claim wherever something of it may be left: first where that says how the lock was held, whatever another store
    /// answers. The others have a short time; what is left there then lapses, unless it is in
    /// the way of others: the caller is to release it again.
    async fn release_all(&self, entry: &Entry, of_two: fn(Release, Release) -> Release) -> Result<Release> {
        entry.end();
        let mut answer = None;
        let mut failed = None;
        // From here on it is asked for nowhere.
        let [deciding, others] = entry.sides_left();
        let tell = async |side| {
            let claim = entry.release_at(side);
            let told = self.pair.at(side).release(&claim).await;
            (side, claim, told)
        };
        let sides = deciding.into_iter().flatten().rev();
        let told = if entry.held().is_some() {
            let mut told = Vec::new();
            for side in sides {
                told.push(tell(side).await);
            }
            told
        } else {
            // Nobody held it. A store that is slow, or away, must not delay the release at the other one.
            join_all(sides.map(tell)).await
        };
        for (side, claim, told) in told {
            match told {
                Ok(release) => {
                    entry.released(side, &claim)?;
                    answer = Some(answer.map_or(release, |answer| of_two(answer, release)));
                }
                Err(error) => failed = Some(error),
            }
        }
        for side in others.into_iter().flatten() {
            let is_told = self.drop_at(entry, side, aside(self.first.max_ttl)).await;
            // Where nothing lapses the core has to repeat it until it is answered, and until no request is under way that may arrive after
            // that answer. Where it lapses it keeps nobody out meanwhile, unless the phase has come there.
            let lapses = self.pair.at(side).info().capability.liveness.session.is_none();
            if !lapses && (!is_told || entry.is_at(side)) || !is_told && self.last_phase().uses(side) {
                let why = format!("the {side} store may not have heard of the release of what was left there");
                failed = failed.or(Some(Error::new(ErrorKind::Unavailable, why)));
            }
        }
        entry.doubt(failed.is_some());
        match failed {
            Some(error) => Err(error.unknown_effect()),
            None => Ok(answer.unwrap_or(Release::NotHeld(LossReason::Gone))),
        }
    }
}

/// The answer of two stores: held, if it was held at both.
fn both(one: Release, other: Release) -> Release {
    match (one, other) {
        (Release::NotHeld(reason), _) | (_, Release::NotHeld(reason)) => Release::NotHeld(reason),
        (Release::Released { waiters: one }, Release::Released { waiters: other }) => {
            Release::Released { waiters: one.max(other) }
        }
    }
}

/// The answer of two stores of which perhaps one had the lock.
fn either(one: Release, other: Release) -> Release {
    match (one, other) {
        (Release::NotHeld(_), answer) | (answer, Release::NotHeld(_)) => answer,
        released => both(released.0, released.1),
    }
}
