//! What this client has at the two stores, claim by claim: no I/O.

use std::{
    collections::{HashMap, hash_map},
    sync::{Arc, Mutex, MutexGuard},
};

use super::claim::Entry;
use crate::{Claim, Moment, Token, store::unpoisoned};

/// How many claims may come before those are forgotten whose leases have lapsed.
const NEW_CLAIMS: usize = 1024;

/// The claims of one client.
#[derive(Debug, Default)]
pub(super) struct Claims(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    by_token: HashMap<Token, Arc<Entry>>,
    new: usize,
    /// How many there were after those were forgotten whose leases had lapsed.
    kept: usize,
}

impl Claims {
    /// The claim as it is known, or as a new one.
    pub(super) fn enter(&self, claim: &Claim, now: Moment, lapse: Option<Moment>) -> Arc<Entry> {
        let mut known = self.known();
        // With many that are held, so seldom that looking at all of them costs each new one little.
        if known.new > NEW_CLAIMS.max(known.kept) && !known.by_token.contains_key(&claim.token) {
            // One that somebody has in hand may be granted yet, however long that takes.
            known.by_token.retain(|_, entry| Arc::strong_count(entry) > 1 || !entry.has_lapsed(now));
            (known.new, known.kept) = (0, known.by_token.len());
        }
        let Known { by_token, new, .. } = &mut *known;
        let entry = by_token.entry(claim.token).or_insert_with(|| {
            *new += 1;
            Arc::new(Entry::new(claim.clone(), None, lapse))
        });
        Arc::clone(entry)
    }

    pub(super) fn get(&self, claim: &Claim) -> Option<Arc<Entry>> {
        self.known().by_token.get(&claim.token).filter(|entry| entry.claim.key == claim.key).cloned()
    }

    /// Forgets a claim if nothing is left of it, and nothing can come to be.
    pub(super) fn settle(&self, entry: &Entry) {
        if let hash_map::Entry::Occupied(known) = self.known().by_token.entry(entry.claim.token)
            && std::ptr::eq(&**known.get(), entry)
            && entry.is_nowhere()
        {
            known.remove();
        }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        unpoisoned(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{
        super::{
            claim::Held,
            phase::{Phase, Side},
        },
        *,
    };
    use crate::{Fence, LockKey, LossReason, Mode};

    fn claim() -> Claim {
        Claim { key: LockKey::new("x").expect("name"), token: Token::random().expect("random"), mode: Mode::Exclusive }
    }

    fn entry() -> Arc<Entry> {
        Claims::default().enter(&claim(), Moment::from_nanos(0), None)
    }

    #[test]
    fn a_token_whose_release_may_have_been_sent_is_not_asked_for_again() {
        let entry = entry();
        let mut asking = entry.ask_at(Side::New).expect("nothing was released");
        let first = asking.claim.clone();
        asking.granted();
        drop(asking);
        assert_eq!(first, entry.claim);
        let released = entry.release_at(Side::New);
        assert_eq!(released.token, first.token);
        assert!(entry.ask_at(Side::New).is_none() && entry.is_at(Side::New) && entry.is_burnt());
        entry.released(Side::New, &released).expect("random");
        let second = entry.ask_at(Side::New).expect("the release was answered").claim.clone();
        assert_ne!(second.token, first.token);
        assert_eq!(entry.at(Side::Old).token, first.token);
        // A late answer to the first release says nothing of the second request.
        entry.released(Side::New, &released).expect("random");
        assert!(entry.is_at(Side::New));
    }

    #[test]
    fn a_token_that_was_asked_for_without_an_answer_is_released_first() {
        let entry = entry();
        let first = entry.ask_at(Side::New).expect("nothing was asked for").claim.clone();
        assert!(entry.ask_at(Side::New).is_none() && entry.is_left_released(Side::New));
        entry.released(Side::New, &entry.release_at(Side::New)).expect("random");
        let second = entry.ask_at(Side::New).expect("the release was answered");
        assert_ne!(second.claim.token, first.token);
        let token = second.claim.token;
        second.refused(false).expect("random");
        assert_eq!(entry.ask_at(Side::New).expect("nothing is left").claim.token, token);
    }

    #[test]
    fn what_a_store_says_of_a_former_token_forgets_nothing() {
        let entry = entry();
        let former = entry.ask_at(Side::New).expect("nothing was asked for").claim.clone();
        entry.gone_from(Side::New, &former).expect("random");
        assert!(entry.is_nowhere());
        let mut asking = entry.ask_at(Side::New).expect("nothing is left");
        assert_ne!(asking.claim.token, former.token);
        asking.granted();
        drop(asking);
        entry.gone_from(Side::New, &former).expect("random");
        assert!(entry.is_at(Side::New), "a late answer says nothing of the new token");
    }

    /// Two renewals of a claim that is held in the new store ask the old one: the first is refused and gives up its place.
    #[test]
    fn what_one_renewal_has_taken_along_another_does_not_leave() {
        for is_late in [false, true] {
            let entry = entry();
            let ask = |side| {
                entry.ask_at(side).map(|mut asking| {
                    asking.granted();
                    asking
                })
            };
            let held = |phase| Held { phase, fence: Fence::new(1), span: 1 };
            drop(ask(Side::New));
            assert!(entry.hold(held(Phase::New), None, None));
            drop(ask(Side::Old));
            let second = ask(Side::Old).expect("it is asked for again");
            if is_late {
                assert!(entry.hold(held(Phase::Both), Some(Phase::New), None));
                assert!(entry.leave(Side::Old).is_none(), "it is held there");
            } else {
                assert!(entry.leave(Side::Old).is_some(), "a place is left there");
                assert!(!entry.hold(held(Phase::Both), Some(Phase::New), None), "it may be released there");
            }
            drop(second);
        }
    }

    #[test]
    fn a_release_that_overtakes_a_request_leaves_something_to_release() {
        let entry = entry();
        let asking = entry.ask_at(Side::New).expect("first");
        assert!(entry.ask_at(Side::New).is_none(), "one request at a time");
        entry.end();
        let released = entry.release_at(Side::New);
        entry.released(Side::New, &released).expect("random");
        assert!(entry.is_at(Side::New), "the request may arrive after the release");
        assert_eq!(entry.at(Side::New).token, asking.claim.token);
        drop(asking);
        entry.released(Side::New, &released).expect("random");
        assert!(entry.is_nowhere());
    }

    #[test]
    fn what_is_over_is_not_held_again_and_lapsed_claims_are_forgotten() {
        let (claims, start) = (Claims::default(), Moment::from_nanos(1));
        let lapse = start + Duration::from_secs(1);
        let [lapsing, lasting] = [Some(lapse), None].map(|lapse| claims.enter(&claim(), start, lapse).claim.clone());
        let later = start + Duration::from_secs(2);
        for claim in [&lapsing, &lasting] {
            let entry = claims.get(claim).expect("known");
            entry.ask_at(Side::Old).expect("nothing was asked for").granted();
            entry.lose(LossReason::Gone);
            let held = Held { phase: Phase::Old, fence: Fence::new(1), span: 1 };
            assert!(!entry.hold(held, None, None) && entry.held().is_none());
            claims.settle(&entry);
            assert!(claims.get(claim).is_some(), "something is left of it");
        }
        for _ in 0..=NEW_CLAIMS {
            claims.enter(&claim(), later, Some(later));
        }
        assert!(claims.get(&lapsing).is_none() && claims.get(&lasting).is_some());
    }
}
