//! The claims that were asked for in an order: as long as this store knows of them, it can tell how they are to be released.

use std::{
    collections::HashMap,
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use lockkit_core::{
    Claim, Mode, Renewal, StoreInfo, Token,
    store::{PLACE, unpoisoned},
};
use tokio::time::Instant;

/// How many claims are remembered that asked in an order.
const REMEMBERED: usize = 1 << 16;

/// The claims that may wait in a queue, and the exclusive ones that were asked for in an order.
#[derive(Default)]
pub(crate) struct Ordered {
    /// With the moment at which the lease or place of each has ended, unless a renewal moves it. Some are never released here: those that are
    /// left for another process.
    claims: Mutex<HashMap<Token, Instant>>,
    /// Whether there were too many at once. Then one that is not known may be one all the same.
    forgot: AtomicBool,
}

impl Ordered {
    /// Remembers a claim, which may have a lease of this ttl or a place; says whether it was unknown.
    pub(crate) fn add(&self, token: Token, ttl: Duration) -> bool {
        let (mut claims, now) = (unpoisoned(&self.claims), Instant::now());
        if claims.len() >= REMEMBERED && !claims.contains_key(&token) {
            // A release finds the place of one that is over all the same, if a place is still to come.
            claims.retain(|_, ends| *ends > now);
            // Or most would be looked at again and again, to forget a few.
            if claims.len() > REMEMBERED / 2 {
                self.forgot.store(true, Ordering::Relaxed);
                claims.clear();
            }
        }
        claims.insert(token, now + ttl.clamp(PLACE, StoreInfo::LONGEST_TTL)).is_none()
    }

    /// Takes note that these leases go on.
    pub(crate) fn extended<'a>(&self, renewals: impl Iterator<Item = &'a Renewal>) {
        let (mut claims, now) = (unpoisoned(&self.claims), Instant::now());
        for Renewal { claim, ttl, .. } in renewals {
            claims.entry(claim.token).and_modify(|ends| *ends = now + (*ttl).min(StoreInfo::LONGEST_TTL));
        }
    }

    /// Forgets a claim; says whether it was known.
    pub(crate) fn forget(&self, token: &Token) -> bool {
        unpoisoned(&self.claims).remove(token).is_some()
    }

    /// Whether a claim may have asked before, so that it may have a place.
    pub(crate) fn may_know(&self, token: &Token) -> bool {
        self.has_forgotten() || unpoisoned(&self.claims).contains_key(token)
    }

    /// Whether a claim that is not known may have been forgotten.
    pub(crate) fn has_forgotten(&self) -> bool {
        self.forgot.load(Ordering::Relaxed)
    }

    /// Another claim may be about to take the place of one: where that was asked for in an order, it remembers this one, too.
    pub(crate) fn add_like(&self, from: &Token, claim: Token, ttl: Duration) {
        let is_known = unpoisoned(&self.claims).contains_key(from);
        if is_known {
            self.add(claim, ttl);
        }
    }

    /// Whether the end of a claim concerns a queue.
    pub(crate) fn has(&self, claim: &Claim) -> bool {
        claim.mode != Mode::Exclusive || unpoisoned(&self.claims).contains_key(&claim.token)
    }
}

#[cfg(test)]
mod tests {
    use lockkit_core::LockKey;

    use super::*;

    /// Nobody is taken for known, or for surely unknown, who is not.
    #[test]
    fn that_claims_were_forgotten_is_known() {
        let (ordered, first) = (Ordered::default(), Token::random().expect("token"));
        assert!(!ordered.may_know(&first) && ordered.add(first, PLACE) && !ordered.add(first, PLACE));
        assert!(!ordered.has_forgotten());
        for _ in 0..REMEMBERED {
            ordered.add(Token::random().expect("token"), PLACE);
        }
        assert!(ordered.has_forgotten() && ordered.may_know(&first) && !ordered.forget(&first));
        assert!(unpoisoned(&ordered.claims).len() <= REMEMBERED);
    }

    /// Leases that were left for other processes, and never released here.
    #[test]
    fn claims_that_are_over_make_room_for_others() {
        let (ordered, held) = (Ordered::default(), Token::random().expect("token"));
        let fill = || {
            for _ in 1..REMEMBERED {
                ordered.add(Token::random().expect("token"), PLACE);
            }
        };
        ordered.add(held, PLACE);
        fill();
        unpoisoned(&ordered.claims).values_mut().for_each(|ends| *ends = Instant::now());
        let claim = Claim { key: LockKey::new("a").expect("name"), token: held, mode: Mode::Exclusive };
        ordered.extended([Renewal::new(claim, PLACE)].iter());
        fill();
        assert!(!ordered.has_forgotten() && ordered.forget(&held), "it is held");
    }
}
