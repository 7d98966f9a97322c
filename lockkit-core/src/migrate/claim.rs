//! What this client has of one claim at the two stores: no I/O.

use std::sync::{Mutex, MutexGuard};

use super::phase::{Phase, Side};
use crate::{Claim, Fence, Hold, HolderInfo, LossReason, Moment, Result, Token, store::unpoisoned};

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
    /// Why it is lost, by what a store has said.
    lost: Option<LossReason>,
    /// Whether its release was asked for.
    is_released: bool,
    /// Whether a store was asked for its release, and did not answer that.
    is_in_doubt: bool,
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
    /// The last token that was asked for without an answer. That request may be carried out after its release, which finds nothing then.
    unanswered: Option<Token>,
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

impl State {
    fn over(&self) -> Option<LossReason> {
        self.lost.or(self.is_released.then_some(LossReason::Gone))
    }

    fn released(&mut self, side: Side, claim: &Claim) -> Result<()> {
        // What is over is not asked for again, and needs no other token.
        let fresh = if self.over().is_some() { claim.token } else { Token::random()? };
        let part = &mut self.parts[side.index()];
        if part.token == claim.token && part.left == Left::Released && !part.is_asked {
            *part = Part { token: fresh, left: Left::Nothing, is_burnt: true, ..*part };
        }
        Ok(())
    }
}

impl Part {
    fn is_there(&self) -> bool {
        self.left != Left::Nothing || self.is_asked
    }
}

impl Entry {
    pub(super) fn new(claim: Claim, held: Option<Held>, lapse: Option<Moment>) -> Self {
        let token = claim.token;
        let part = Part { token, left: Left::Nothing, is_asked: false, is_burnt: false, unanswered: None };
        Self {
            claim,
            state: Mutex::new(State {
                parts: [part; 2],
                held,
                shown: None,
                lapse,
                lost: None,
                is_released: false,
                is_in_doubt: false,
            }),
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

    /// The claim as it was asked for at a store without an answer.
    pub(super) fn unanswered_at(&self, side: Side) -> Option<Claim> {
        self.part(side, |part| part.unanswered).map(|token| Claim { token, ..self.claim.clone() })
    }

    /// Notes that it is about to be asked for at a store; `None` if it is over or is held there, is being asked for there by another
    /// call, or its release there was not answered yet.
    pub(super) fn ask_at(&self, side: Side) -> Option<Asking<'_>> {
        let mut state = self.state();
        let is_closed = state.over().is_some() || state.held.is_some_and(|held| held.phase.uses(side));
        let part = &mut state.parts[side.index()];
        if is_closed || part.is_asked || part.left == Left::Released {
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

    /// The same of a store that it is not held in; `None` if nothing is left there, or by now it is held there.
    pub(super) fn leave(&self, side: Side) -> Option<Claim> {
        let mut state = self.state();
        let is_held = state.held.is_some_and(|held| held.phase.uses(side));
        let part = state.parts.get_mut(side.index()).filter(|part| part.is_there() && !is_held)?;
        part.left = Left::Released;
        Some(Claim { token: part.token, ..self.claim.clone() })
    }

    /// Notes that the release of `claim` was answered by a store. Its token there is not used again. While a request for it is under
    /// way, that may arrive after the release, and so is to be released once more.
    pub(super) fn released(&self, side: Side, claim: &Claim) -> Result<()> {
        self.state().released(side, claim)
    }

    /// Notes that a store has said that it has nothing of `claim` any more, unless it is another token by now that may be there.
    pub(super) fn gone_from(&self, side: Side, claim: &Claim) -> Result<()> {
        // In one step: in between, another call could have asked with a new token, and been granted.
        let mut state = self.state();
        let part = &mut state.parts[side.index()];
        if part.token == claim.token {
            part.left = Left::Released;
        }
        state.released(side, claim)
    }

    /// Whether something of it may be left at a store.
    pub(super) fn is_at(&self, side: Side) -> bool {
        self.part(side, |part| part.is_there())
    }

    /// Where something of it may be left: in the stores whose answers say how it was held, and in the others.
    pub(super) fn sides_left(&self) -> [[Option<Side>; 2]; 2] {
        let state = self.state();
        let decides = |side: Side| state.held.is_none_or(|held| held.phase.uses(side));
        let there = |side: Side| state.parts[side.index()].is_there();
        [true, false].map(|wanted| Side::ALL.map(|side| Some(side).filter(|_| there(side) && decides(side) == wanted)))
    }

    /// Whether its release at a store was not answered yet.
    pub(super) fn is_left_released(&self, side: Side) -> bool {
        self.part(side, |part| part.left == Left::Released)
    }

    /// Whether nothing of it is left.
    pub(super) fn is_nowhere(&self) -> bool {
        self.state().parts.iter().all(|part| !part.is_there())
    }

    /// Whether its own token may have been released at a store (rule R2).
    pub(super) fn is_burnt(&self) -> bool {
        let parts = self.state().parts;
        parts.iter().any(|part| part.is_burnt || part.token != self.claim.token || part.left == Left::Released)
    }

    pub(super) fn held(&self) -> Option<Held> {
        self.state().held
    }

    /// Notes a grant, or that it goes on, unless it is over by now, or another call has taken it to a third phase or released a part of it
    /// since the stores were asked: then one of them may not have it any more.
    pub(super) fn hold(&self, held: Held, since: Option<Phase>, lapse: Option<Moment>) -> bool {
        let mut state = self.state();
        let now = state.held.map(|held| held.phase);
        let is_whole = held.phase.sides().iter().all(|side| state.parts[side.index()].left == Left::Asked);
        let stands = state.over().is_none() && is_whole && (now == since || now == Some(held.phase));
        if stands {
            (state.held, state.lapse) = (Some(held), lapse);
        }
        stands
    }

    /// Notes as what its holder was shown to the stores.
    pub(super) fn show(&self, holder: &HolderInfo, phase: Phase) {
        self.state().shown = Some((holder.clone(), phase));
    }

    /// Notes what a renewal has shown to the stores: another holder, if it named one, and this phase.
    pub(super) fn show_anew(&self, holder: Option<&HolderInfo>, phase: Phase) {
        let mut state = self.state();
        match (&mut state.shown, holder) {
            (shown, Some(holder)) => *shown = Some((holder.clone(), phase)),
            (Some(shown), None) => shown.1 = phase,
            (None, None) => {}
        }
    }

    /// The holder's description, and the phase that was shown with it.
    pub(super) fn shown(&self) -> Option<(HolderInfo, Phase)> {
        self.state().shown.clone()
    }

    /// Notes that a store has said that it is lost. It will not be held again.
    pub(super) fn lose(&self, why: LossReason) {
        self.state().lost.get_or_insert(why);
    }

    /// Notes that its release was asked for. It will not be held again. Returns why it was lost before that, if it was.
    pub(super) fn end(&self) -> Option<LossReason> {
        let mut state = self.state();
        state.is_released = true;
        state.lost
    }

    /// Notes whether a store did not answer its release.
    pub(super) fn doubt(&self, is_in_doubt: bool) {
        self.state().is_in_doubt = is_in_doubt;
    }

    /// Whether nobody has said yet that it is not held any more, though its release was asked for.
    pub(super) fn is_in_doubt(&self) -> bool {
        self.state().is_in_doubt
    }

    /// Why it will not be held again, as its renewals hear it.
    pub(super) fn over(&self) -> Option<LossReason> {
        self.state().over()
    }

    pub(super) fn has_lapsed(&self, now: Moment) -> bool {
        self.state().lapse.is_some_and(|lapse| lapse <= now)
    }

    fn part<T>(&self, side: Side, change: impl FnOnce(&mut Part) -> T) -> T {
        change(&mut self.state().parts[side.index()])
    }

    fn state(&self) -> MutexGuard<'_, State> {
        unpoisoned(&self.state)
    }
}

impl Asking<'_> {
    /// The store granted it, or keeps a place in a queue for it. No other call asks for it there before this is dropped.
    pub(super) fn granted(&mut self) {
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
            if !self.is_answered {
                (part.left, part.unanswered) = (Left::Released, Some(part.token));
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
