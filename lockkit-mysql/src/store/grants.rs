//! The fences of claims that this store was granted a row, so that a renewal need not read them again.

use std::{collections::HashMap, sync::Mutex};

use lockkit_core::{Claim, Fence, Hold, Token, store::unpoisoned};

/// How many are remembered; then all are forgotten. A renewal of a claim that is not known reads its row.
const MOST: usize = 1 << 16;

/// The fence and the span of each claim's grant. They stay the same for as long as a row has the claim's token; a claim is
/// forgotten before anything is sent that may change that.
#[derive(Default)]
pub(crate) struct Grants(Mutex<HashMap<Token, (Fence, u32)>>);

impl Grants {
    pub(crate) fn add(&self, hold: &Hold) {
        let mut known = unpoisoned(&self.0);
        if known.len() >= MOST {
            known.clear();
        }
        known.insert(hold.claim.token, (hold.fence, hold.span.max(1)));
    }

    pub(crate) fn forget(&self, token: &Token) {
        unpoisoned(&self.0).remove(token);
    }

    /// Whether a claim is known. One that may share its lock is only as long as it has the lock alone, as far as this store knows.
    pub(crate) fn knows(&self, token: &Token) -> bool {
        unpoisoned(&self.0).contains_key(token)
    }

    /// The fence and the span of each of these claims, if all are known.
    pub(crate) fn of(&self, claims: &[&Claim]) -> Option<Vec<(Fence, u32)>> {
        let known = unpoisoned(&self.0);
        claims.iter().map(|claim| known.get(&claim.token).copied()).collect()
    }
}
