//! Moving a live service from one store to another, without a gap in mutual exclusion.
//!
//! A service uses a [`Dual`] store over the old store and the new one. In which of them its locks are is said by a
//! [`PhaseRecord`] that both stores keep, and that a [`Migration`] changes step by step, forward or back:
//!
//! ```text
//!   Old  ──▶  Both  ──▶  New          Old and New never exist at the same time
//!   Old  ◀──  Both  ◀──  New          each step to the left or right of Both waits for a drain
//! ```
//!
//! Two leases of the same name always share a store, for phases that can exist at the same time do: that store excludes.
//! A client may act on what it read of the record only for a short time, which is measured **after** the stores' answers; so a drain
//! of that time and the longest ttl leaves nobody who still acts on the phase before. The rules are numbered M1 to M17 in
//! `docs/migration.md`, with the argument why they are safe.

mod acquire;
mod claim;
mod claims;
mod clients;
mod dual;
mod floor;
mod holders;
mod inspect;
mod migration;
mod pair;
mod phase;
mod record;
mod release;
mod renew;
#[doc(hidden)]
pub mod rules;
mod shadow;
mod steps;
mod tally;

pub use self::{
    clients::Client,
    dual::Dual,
    floor::Fences,
    holders::Seen,
    migration::{Migration, Start, State},
    phase::{Phase, Side},
    record::PhaseRecord,
    steps::{Drain, Step},
    tally::Tally,
};
