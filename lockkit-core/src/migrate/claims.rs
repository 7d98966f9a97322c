//! What this client has at the two stores, claim by claim: no I/O.

use std::{
    collections::{HashMap, HashSet, hash_map},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use super::record::{Phase, Side};
use crate::{Claim, Fence, Hold, HolderInfo, LossReason, Moment, Result, Token};

/// How many claims may come before those are forgotten whose leases have lapsed.
const NEW_CLAIMS: usize = 1024;

/// The claims of one client.
#[derive(Debug, Default)]
pub(super) struct Claims(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    by_token: HashMap<Token, Arc<Entry>>,
    /// Those that are over, and of which something may be left.
    over: HashSet<Token>,
    new: usize,
    /// How many there were after those were forgotten whose leases had lapsed.
    kept: usize,
    marked: Option<Marked>,
}

/// A holder's description, and the one with the mark behind it.
#[derive(Debug)]
struct Marked {
    holder: HolderInfo,
    phase: Phase,
    mark: HolderInfo,
}

/// A claim.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) claim: Claim,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    parts: [Part; 2],
    held: Option<Held>,
    /// The holder's description, and the phase that the stores show behind it.
    shown: Option<(HolderInfo, Phase)>,
    /// When time has ended it; `None` if it may be at a store where time does not.
    lapse: Option<Moment>,
    over: Option<Over>,
    /// Whether a store was asked for its release, and did not answer that.
    is_in_doubt: bool,
}

/// Why a claim will not be held again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Over {
    Released,
    Lost(LossReason),
}

/// What a claim has at one store. Its token there is that of the claim, unless that was released there before.
#[derive(Clone, Copy, Debug)]
struct Part {
    token: Token,
    left: Left,
    /// Whether a request for it is under way, which may be granted after its release was answered.
    is_asked: bool,
    /// Whether its release was answered.
    is_burnt: bool,
}

/// What may be left of a claim at a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Left {
    Nothing,
    /// It was asked for, or granted.
    Asked,
    /// It was asked for without an answer, or its release may have been sent, and nothing says yet that it was the last to arrive: the
    /// token is burnt (rule R2).
    Released,
}

/// A request for a claim at a store. If it ends without an answer, something may be left there, and has to be released before the store
/// is asked again (rule R2).
#[derive(Debug)]
pub(super) struct Asking<'a> {
    entry: &'a Entry,
    side: Side,
    is_answered: bool,
    /// What is asked for.
    pub(super) claim: Claim,
}

/// A grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Held {
    /// As what it is held: in which of the stores.
    pub(super) phase: Phase,
    pub(super) fence: Fence,
    pub(super) span: u32,
}

impl Over {
    /// What to say of it to a renewal.
    pub(super) fn reason(self) -> LossReason {
        match self {
            Self::Released => LossReason::Gone,
            Self::Lost(reason) => reason,
        }
    }
}

impl Claims {
    /// The claim as it is known, or as a new one.
    pub(super) fn enter(&self, claim: &Claim, now: Moment, lapse: Option<Moment>) -> Arc<Entry> {
        let mut known = self.known();
        // With many that are held, so seldom that looking at all of them costs each new one little.
        if known.new > NEW_CLAIMS.max(known.kept) && !known.by_token.contains_key(&claim.token) {
            // One that somebody has in hand may be granted yet, however long that takes.
            let Known { by_token, over, .. } = &mut *known;
            by_token.retain(|_, entry| Arc::strong_count(entry) > 1 || !entry.has_lapsed(now));
            over.retain(|token| by_token.contains_key(token));
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

    /// Forgets a claim if nothing is left of it, and nothing can come to be; one that is over, and of which something is left, is
    /// kept for [`over`](Self::over).
    pub(super) fn settle(&self, entry: &Entry) {
        let (mut known, token) = (self.known(), entry.claim.token);
        let Known { by_token, over, .. } = &mut *known;
        let hash_map::Entry::Occupied(known) = by_token.entry(token) else { return };
        if !std::ptr::eq(&**known.get(), entry) {
            return;
        }
        if entry.is_nowhere() {
            known.remove();
            over.remove(&token);
        } else if entry.over().is_some() {
            over.insert(token);
        }
    }

    /// Whether there is nothing to be found by [`over`](Self::over).
    pub(super) fn none_over(&self) -> bool {
        self.known().over.is_empty()
    }

    /// Claims that are over, and of which something may be left; but for those that somebody has in hand: a holder that has not heard yet
    /// that its lease is lost.
    pub(super) fn over(&self, now: Moment, is_meant: impl Fn(&Claim) -> bool) -> Vec<Arc<Entry>> {
        let known = self.known();
        let over = known.over.iter().filter_map(|token| known.by_token.get(token));
        let over = over.filter(|entry| Arc::strong_count(entry) == 1);
        over.filter(|entry| !entry.has_lapsed(now) && is_meant(&entry.claim)).cloned().collect()
    }

    /// A holder's description with the mark behind it. Most requests of a client are for the same holder.
    pub(super) fn marked(&self, holder: &HolderInfo, phase: Phase, mark: impl FnOnce() -> HolderInfo) -> HolderInfo {
        if let Some(last) = self.known().marked.as_ref().filter(|last| last.phase == phase && last.holder == *holder) {
            return last.mark.clone();
        }
        let mark = mark();
        self.known().marked = Some(Marked { holder: holder.clone(), phase, mark: mark.clone() });
        mark
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entry {
    fn new(claim: Claim, held: Option<Held>, lapse: Option<Moment>) -> Self {
        let part = Part { token: claim.token, left: Left::Nothing, is_asked: false, is_burnt: false };
        Self {
            claim,
            state: Mutex::new(State { parts: [part; 2], held, shown: None, lapse, over: None, is_in_doubt: false }),
        }
    }

    /// A claim that this process did not make, as one that is held in this phase.
    pub(super) fn assumed(claim: Claim, phase: Phase) -> Self {
        let entry = Self::new(claim, Some(Held { phase, fence: Fence::NONE, span: 1 }), None);
        for side in phase.sides() {
            entry.part(*side, |part| part.left = Left::Asked);
        }
        entry
    }

    /// The claim as it is at a store.
    pub(super) fn at(&self, side: Side) -> Claim {
        self.part(side, |part| Claim { token: part.token, ..self.claim.clone() })
    }

    /// Notes that it is about to be asked for at a store; `None` if it is over, is being asked for there by another call, or its
    /// release there was not answered yet.
    pub(super) fn ask_at(&self, side: Side) -> Option<Asking<'_>> {
        let mut state = self.state();
        let is_over = state.over.is_some();
        let part = &mut state.parts[side.index()];
        if is_over || part.is_asked || part.left == Left::Released {
            return None;
        }
        (part.left, part.is_asked) = (Left::Asked, true);
        Some(Asking { entry: self, side, is_answered: false, claim: Claim { token: part.token, ..self.claim.clone() } })
    }

    /// Notes that its release is about to be sent to a store.
    pub(super) fn release_at(&self, side: Side) -> Claim {
        self.part(side, |part| {
            part.left = Left::Released;
            Claim { token: part.token, ..self.claim.clone() }
        })
    }

    /// Notes that the release of `claim` was answered by a store. Its token there is not used again. While a request for it is under
    /// way, that may arrive after the release, and so is to be released once more.
    pub(super) fn released(&self, side: Side, claim: &Claim) -> Result<()> {
        // What is over is not asked for again, and needs no other token.
        let fresh = if self.over().is_some() { claim.token } else { Token::random()? };
        self.part(side, |part| {
            if part.token == claim.token && part.left == Left::Released && !part.is_asked {
                *part = Part { token: fresh, left: Left::Nothing, is_asked: false, is_burnt: true };
            }
        });
        Ok(())
    }

    /// Notes that a store has said that it has nothing of it any more.
    pub(super) fn gone_from(&self, side: Side) -> Result<()> {
        let claim = self.release_at(side);
        self.released(side, &claim)
    }

    /// Whether something of it may be left at a store.
    pub(super) fn is_at(&self, side: Side) -> bool {
        self.part(side, |part| part.left != Left::Nothing || part.is_asked)
    }

    /// Whether its release at a store was not answered yet.
    pub(super) fn is_left_released(&self, side: Side) -> bool {
        self.part(side, |part| part.left == Left::Released)
    }

    /// Whether nothing of it is left.
    pub(super) fn is_nowhere(&self) -> bool {
        Side::ALL.into_iter().all(|side| !self.is_at(side))
    }

    /// Whether its own token may have been released at a store (rule R2).
    pub(super) fn is_burnt(&self) -> bool {
        let parts = self.state().parts;
        parts.iter().any(|part| part.is_burnt || part.token != self.claim.token || part.left == Left::Released)
    }

    pub(super) fn held(&self) -> Option<Held> {
        self.state().held
    }

    /// Notes a grant, unless it is over by now.
    pub(super) fn hold(&self, held: Held, lapse: Option<Moment>) -> bool {
        let mut state = self.state();
        if state.over.is_none() {
            (state.held, state.lapse) = (Some(held), lapse);
        }
        state.over.is_none()
    }

    /// Notes as what its holder was shown to the stores.
    pub(super) fn show(&self, holder: &HolderInfo, phase: Phase) {
        self.state().shown = Some((holder.clone(), phase));
    }

    /// The holder's description, and the phase that was shown with it.
    pub(super) fn shown(&self) -> Option<(HolderInfo, Phase)> {
        self.state().shown.clone()
    }

    /// Notes that it will not be held again.
    pub(super) fn end(&self, why: Over) {
        self.state().over.get_or_insert(why);
    }

    /// Notes whether a store did not answer its release.
    pub(super) fn doubt(&self, is_in_doubt: bool) {
        self.state().is_in_doubt = is_in_doubt;
    }

    /// Whether nobody has said yet that it is not held any more, though its release was asked for.
    pub(super) fn is_in_doubt(&self) -> bool {
        self.state().is_in_doubt
    }

    pub(super) fn over(&self) -> Option<Over> {
        self.state().over
    }

    fn has_lapsed(&self, now: Moment) -> bool {
        self.state().lapse.is_some_and(|lapse| lapse <= now)
    }

    fn part<T>(&self, side: Side, change: impl FnOnce(&mut Part) -> T) -> T {
        change(&mut self.state().parts[side.index()])
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Asking<'_> {
    /// The store granted it.
    pub(super) fn granted(mut self) {
        self.is_answered = true;
    }

    /// The store granted nothing, and has nothing of it. A token that the store has burnt is not used again.
    pub(super) fn refused(mut self, burnt: bool) -> Result<()> {
        let fresh = if burnt { Some(Token::random()?) } else { None };
        self.is_answered = true;
        self.entry.part(self.side, |part| {
            if part.left == Left::Asked {
                (part.token, part.left) = (fresh.unwrap_or(part.token), Left::Nothing);
            }
        });
        Ok(())
    }
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.entry.part(self.side, |part| {
            part.is_asked = false;
            if !self.is_answered && part.left == Left::Asked {
                part.left = Left::Released;
            }
        });
    }
}

impl Held {
    /// The answer to a question about the claim.
    pub(super) fn as_hold(self, claim: &Claim, until: Moment, depth: u32) -> Hold {
        Hold { claim: claim.clone(), fence: self.fence, span: self.span, until, depth }
    }

    /// The last fence of the grant.
    pub(super) fn last_fence(self) -> Fence {
        self.fence.offset(self.span.saturating_sub(1))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{LockKey, Mode};

    fn claim() -> Claim {
        Claim { key: LockKey::new("x").expect("name"), token: Token::random().expect("random"), mode: Mode::Exclusive }
    }

    fn entry() -> Arc<Entry> {
        Claims::default().enter(&claim(), Moment::from_nanos(0), None)
    }

    #[test]
    fn a_token_whose_release_may_have_been_sent_is_not_asked_for_again() {
        let entry = entry();
        let asking = entry.ask_at(Side::New).expect("nothing was released");
        let first = asking.claim.clone();
        asking.granted();
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
    fn a_release_that_overtakes_a_request_leaves_something_to_release() {
        let entry = entry();
        let asking = entry.ask_at(Side::New).expect("first");
        assert!(entry.ask_at(Side::New).is_none(), "one request at a time");
        entry.end(Over::Released);
        let released = entry.release_at(Side::New);
        entry.released(Side::New, &released).expect("random");
        assert!(entry.is_at(Side::New), "the request may arrive after the release");
        assert_eq!(entry.at(Side::New).token, asking.claim.token);
        drop(asking);
        entry.released(Side::New, &released).expect("random");
        assert!(entry.is_nowhere());
    }

    #[test]
    fn a_mark_is_that_of_its_holder_and_phase() {
        let claims = Claims::default();
        let [one, other] = ["one", "other"].map(HolderInfo::new);
        for (holder, phase) in [(&one, Phase::Old), (&other, Phase::Old), (&other, Phase::Both), (&one, Phase::Old)] {
            let mark = HolderInfo::new(&format!("{holder} {phase}"));
            assert_eq!(claims.marked(holder, phase, || mark.clone()), mark);
            assert_eq!(claims.marked(holder, phase, || panic!("it is known")), mark);
        }
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
            entry.end(Over::Lost(LossReason::Gone));
            let held = Held { phase: Phase::Old, fence: Fence::new(1), span: 1 };
            assert!(!entry.hold(held, None) && entry.held().is_none());
            claims.settle(&entry);
            assert!(claims.over(start, |of| of == claim).is_empty(), "somebody has it in hand");
        }
        assert_eq!(claims.over(start, |_| true).len(), 2);
        assert_eq!(claims.over(later, |_| true).len(), 1);
        for _ in 0..=NEW_CLAIMS {
            claims.enter(&claim(), later, Some(later));
        }
        assert!(claims.get(&lapsing).is_none() && claims.get(&lasting).is_some());
    }
}
