//! The clients of a migration, as they sign on for people to see: no rule rests on it.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use tokio::{sync::oneshot, time::timeout};

use super::{
    dual::Dual,
    floor::OWN,
    migration::Migration,
    phase::Phase,
    record::{mark, unmark},
    tally::Tally,
};
use crate::{
    AcquireRequest, Attempt, Claim, Effect, ErrorKind, HolderInfo, LockKey, LockStore, Mode, Query, Renewal, Renewed,
    Result, Token,
};

/// For how long a client is shown that was not heard of.
const TTL: Duration = Duration::from_secs(60);
/// How often a client is heard of, at least; where the phase is read more often, every second time that it may be.
const EVERY: Duration = Duration::from_secs(20);
/// One that lives for less than that does not sign on: a command that only looks.
const AT_FIRST: Duration = Duration::from_secs(1);
/// How many names there are to sign on under. Some stores keep a trace of each name that was ever used, so that clients share a few
/// thousand.
const PLACES: u16 = 4096;
/// How many places are tried before the next time comes.
const TRIES: usize = 8;

/// A client of a migration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Client {
    /// Its description.
    pub name: HolderInfo,
    /// The phase as it read it last.
    pub phase: Phase,
    /// When it was last heard of; `None` if the store does not tell.
    pub seen: Option<Duration>,
    /// What the new store has answered to it that was asked beside the old one.
    pub tally: Tally,
}

/// A client that signs on: it holds a lock at the home, the description of which says how it is doing.
struct Registration {
    dual: Weak<Dual>,
    name: HolderInfo,
    held: Option<(Arc<dyn LockStore>, Claim)>,
}

impl Dual {
    /// Signs this client on, so that [`Migration::clients`] shows it under this name for as long as it lives, and for a minute after it was
    /// killed. It is for people to see, and a failure is not told. Only the first call counts.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn sign_on(self: &Arc<Self>, name: HolderInfo) {
        let (alive, gone) = oneshot::channel();
        if self.signed_on.set(alive).is_ok() {
            let registration = Registration { dual: Arc::downgrade(self), name, held: None };
            tokio::spawn(registration.run(gone, self.first.fresh));
        }
    }
}

impl Registration {
    async fn run(mut self, mut gone: oneshot::Receiver<()>, fresh: Duration) {
        let every = (2 * fresh).clamp(Duration::from_secs(1), EVERY);
        // Nothing is ever sent: it ends with the store.
        let mut pause = AT_FIRST;
        while timeout(pause, &mut gone).await.is_err() {
            pause = every;
            let Some(dual) = self.dual.upgrade() else { break };
            // One that has nothing to do follows the phase, too.
            match dual.confirmed().await {
                // The migration is over.
                Err(error) if error.kind() == ErrorKind::Misconfigured => self.sign_off().await,
                Ok(_) | Err(_) => {
                    if !self.renew(&dual).await {
                        self.enter(&dual).await;
                    }
                }
            }
        }
        self.sign_off().await;
    }

    async fn sign_off(&mut self) {
        if let Some((home, claim)) = self.held.take() {
            drop(home.release(&claim).await);
        }
    }

    /// Whether it is signed on still.
    async fn renew(&mut self, dual: &Dual) -> bool {
        let Some((home, claim)) = &self.held else { return false };
        let holder = Some(self.describe(dual));
        let renewal = Renewal { holder, ..Renewal::new(claim.clone(), ttl(&**home)) };
        match home.renew(&[renewal]).await.pop() {
            Some(Ok(Renewed::Lost(_))) => {
                // Where leases end with the session, what is left of one that was never known to be granted would stay.
                drop(home.release(claim).await);
                self.held = None;
                false
            }
            Some(Ok(Renewed::Held(_)) | Err(_)) | None => true,
        }
    }

    async fn enter(&mut self, dual: &Dual) {
        // Until it has shown the record, it may be another store (rule M6).
        if dual.check(dual.first.home).await.is_err() {
            return;
        }
        let home = dual.pair.at(dual.first.home);
        for _ in 0..TRIES {
            let Ok(claim) = place() else { return };
            let request = AcquireRequest::new(claim.clone(), ttl(&**home), self.describe(dual));
            match home.acquire(&request).await {
                Ok(Attempt::Contended(_)) => {}
                Err(error) if error.effect() == Effect::None => return,
                // It may be granted: the next renewal tells.
                Ok(Attempt::Granted(_)) | Err(_) => {
                    self.held = Some((Arc::clone(home), claim));
                    return;
                }
            }
        }
    }

    fn describe(&self, dual: &Dual) -> HolderInfo {
        let text = format!("{} {}", dual.tally().to_words(), self.name);
        mark(&HolderInfo::new(&text), &dual.first.id, dual.phase())
    }
}

fn place() -> Result<Claim> {
    let token = Token::random()?;
    let [first, second, ..] = *token.as_bytes();
    let place = u16::from_be_bytes([first, second]) % PLACES;
    Ok(Claim { key: LockKey::new(format!("{OWN}client/{place}"))?, token, mode: Mode::Exclusive })
}

fn ttl(store: &dyn LockStore) -> Duration {
    store.info().capability.liveness.ttl.as_ref().map_or(TTL, |range| TTL.clamp(*range.start(), *range.end()))
}

impl Migration {
    /// The clients of the migration that have signed on, as far as the home shows them. Of others nothing is known.
    ///
    /// # Errors
    /// As [`state`](Self::state); as those of [`LockStore::inspect`], for the home.
    pub async fn clients(&self) -> Result<Vec<Client>> {
        let record = self.state().await?.record;
        let home = self.pair.at(record.home);
        let places = home.inspect(&Query::Prefix(format!("{OWN}client/"))).await?;
        let client = |holder: crate::Holder| {
            let (info, phase) = unmark(&holder.info, &record.id);
            let (tally, name) = Tally::from_words(info.as_str())?;
            let seen = holder.remaining.map(|remaining| ttl(&**home).saturating_sub(remaining));
            Some(Client { name: HolderInfo::new(name), phase: phase?, seen, tally })
        };
        let mut clients: Vec<_> = places.into_iter().flat_map(|place| place.holders).filter_map(client).collect();
        clients.sort_by(|one, other| one.name.as_str().cmp(other.name.as_str()));
        Ok(clients)
    }
}
