//! A run: applications, each with its own `Locker`, on one simulated store.

use std::{
    cell::Cell,
    sync::{Arc, Mutex, MutexGuard, Once},
    time::Duration,
};

use lockkit_core::{ErrorKind, Fence, Guard, Holder, KeyState, Locker, Outcome, Owner, Result};
use lockkit_sim::SimStore;
use tokio::{
    task::{JoinHandle, yield_now},
    time::{advance, sleep},
};

use super::{
    model::{Held, LeaseId, Model},
    op::{Ask, CLIENTS, KEYS, LONGEST, OWNERS, Op, Wait},
};

/// Carries out the steps; says what rule was broken.
pub(crate) fn run(store: impl FnOnce() -> SimStore, ops: &[Op]) -> Result<(), String> {
    COUNTING.call_once(count_panics);
    let panics = PANICS.get();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    runtime.expect("a runtime").block_on(async {
        let mut run = Run::new(&store().bound(LONGEST / 4));
        for op in ops {
            run.step(op).await;
            run.check()?;
        }
        run.finish().await
    })?;
    if PANICS.get() > panics { Err("a task in the background panicked".to_owned()) } else { Ok(()) }
}

static COUNTING: Once = Once::new();

thread_local! {
    /// The panics of this thread, also of tasks that nobody waits for: all tasks of a run are on its thread.
    static PANICS: Cell<u32> = const { Cell::new(0) };
}

fn count_panics() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        PANICS.set(PANICS.get() + 1);
        report(info);
    }));
}

/// The longest pause of the poller, with its jitter.
const SLOWEST_POLL: Duration = Duration::from_millis(300);

struct Run {
    clients: Vec<Client>,
    pending: Vec<Pending>,
    releases: Vec<JoinHandle<()>>,
    shared: Arc<Mutex<Shared>>,
    strangers: SimStore,
}

struct Client {
    store: SimStore,
    locker: Locker,
    owners: Vec<Owner>,
}

struct Pending {
    key: usize,
    client: usize,
    task: JoinHandle<()>,
}

/// What tasks report to.
#[derive(Default)]
struct Shared {
    model: Model,
    guards: Vec<Held>,
    /// The clients that something was done to: since things last settled, their errors prove nothing.
    upset: [bool; CLIENTS],
}

impl Run {
    fn new(strangers: &SimStore) -> Self {
        let client = |_| {
            let store = strangers.another_client();
            let locker = Locker::builder(store.clone()).patience(LONGEST / 2).build();
            let owners = (0..OWNERS).map(|_| locker.owner()).collect();
            Client { store, locker, owners }
        };
        Self {
            clients: (0..CLIENTS).map(client).collect(),
            pending: Vec::new(),
            releases: Vec::new(),
            shared: Arc::default(),
            strangers: strangers.clone(),
        }
    }

    fn shared(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().expect("no panic")
    }

    fn check(&mut self) -> Result<(), String> {
        let mut shared = self.shared();
        let shared = &mut *shared;
        shared.model.look(&mut shared.guards);
        shared.model.broken.take().map_or(Ok(()), Err)
    }

    async fn step(&mut self, op: &Op) {
        match op {
            Op::Acquire(ask) => self.acquire(ask).await,
            Op::Cancel { pending } => {
                if let Some(at) = pending.checked_rem(self.pending.len()) {
                    self.pending.swap_remove(at).task.abort();
                }
            }
            Op::Release { guard } => self.release(*guard),
            Op::Drop { guard } => drop(self.take(*guard)),
            Op::Renew { guard } => self.renew(*guard),
            Op::Expire { key } => self.force(async |store| store.expire(KEYS[*key]).await).await,
            Op::Revoke { key } => self.force(async |store| store.revoke(KEYS[*key]).await).await,
            Op::EndSession { client } => {
                let store = self.clients[*client].store.clone();
                self.force(async move |_| store.end_session().await).await;
            }
            Op::TakeOver { key, ttl } => {
                let ttl = (*ttl).max(Duration::from_millis(100));
                let mut fence = None;
                self.force(async |store| {
                    fence = Some(store.take_over(KEYS[*key], ttl).await?.fence);
                    Ok(())
                })
                .await;
                self.shared().model.returned(*key, fence.unwrap_or_default());
            }
            Op::Inject { client, rule } => {
                self.shared().upset[*client] = true;
                self.clients[*client].store.inject(*rule);
            }
            Op::Freeze { client, time } => {
                self.shared().upset[*client] = true;
                self.clients[*client].store.freeze(*time);
            }
            Op::Heal { client } => self.clients[*client].store.heal(),
            Op::Suspend { time } => self.strangers.suspend(*time),
            Op::Leap { time } => advance(*time).await,
            Op::Sleep { time } => sleep(*time).await,
            Op::Yield => yield_now().await,
            Op::Settle => self.settle().await,
        }
    }

    async fn acquire(&mut self, ask: &Ask) {
        let client = &self.clients[ask.client];
        let lock = match ask.owner {
            None => client.locker.lock(KEYS[ask.key]),
            Some(owner) => client.owners[owner].lock(KEYS[ask.key]),
        };
        let lock = if ask.renew { lock.ttl(ask.ttl) } else { lock.ttl(ask.ttl).no_renewal() };
        let must = self.must_get(ask).await;
        let (shared, asked) = (Arc::clone(&self.shared), ask.clone());
        let task = tokio::spawn(async move {
            let before = shared.lock().expect("no panic").model.highest(asked.key);
            let answer = match asked.wait {
                Wait::Try => lock.try_acquire().await,
                Wait::For(time) => lock.acquire_within(time).await,
                Wait::Forever => lock.acquire().await.map(Some),
            };
            shared.lock().expect("no panic").acquired(&asked, answer, before, must);
        });
        self.pending.push(Pending { key: ask.key, client: ask.client, task });
        if must {
            // Before anybody gets in the way after all.
            sleep(Duration::from_millis(5)).await;
        }
    }

    /// Whether nothing and nobody is in the way, and no release is still under way.
    async fn must_get(&mut self, ask: &Ask) -> bool {
        self.is_free(ask).await && {
            sleep(Duration::from_millis(5)).await;
            self.is_free(ask).await
        }
    }

    async fn is_free(&mut self, ask: &Ask) -> bool {
        self.pending.retain(|pending| !pending.task.is_finished());
        let free = self.strangers.state(KEYS[ask.key]).await.is_ok_and(|state| state.holders.is_empty());
        let shared = self.shared();
        free && self.pending.iter().all(|pending| pending.key != ask.key)
            && shared.guards.iter().all(|held| held.key != ask.key)
            && !shared.upset.contains(&true)
    }

    /// Takes a guard away from its application.
    fn take(&mut self, guard: usize) -> Option<Held> {
        let mut shared = self.shared();
        let at = guard.checked_rem(shared.guards.len())?;
        Some(shared.guards.swap_remove(at))
    }

    fn renew(&mut self, guard: usize) {
        let held = {
            let shared = self.shared();
            guard.checked_rem(shared.guards.len()).map(|at| Arc::clone(&shared.guards[at].guard))
        };
        if let Some(held) = held {
            self.releases.push(tokio::spawn(async move { drop(held.renew().await) }));
        }
    }

    fn release(&mut self, guard: usize) {
        let Some(held) = self.take(guard) else { return };
        let (id, client, key) = (held.id(), held.client, held.key);
        // Who waits here may be handed the lease; what this process believes is the answer then.
        self.pending.retain(|pending| !pending.task.is_finished());
        let waited_for = self.pending.iter().any(|pending| pending.client == client && pending.key == key);
        let Some(guard) = Arc::into_inner(held.guard) else { return };
        let is_nested = self.shared().has(id);
        let shared = Arc::clone(&self.shared);
        self.releases.push(tokio::spawn(async move {
            let (believed, forced) = (guard.is_held(), shared.lock().expect("no panic").model.is_forced(id));
            let answer = guard.release().await;
            let mut shared = shared.lock().expect("no panic");
            // If the release of the last hold overtakes that of another one, only the former hears how the lease ended.
            let is_overtaken = is_nested && !shared.has(id);
            shared.released(id, client, answer, believed, forced && !waited_for && !is_overtaken);
        }));
    }

    /// Ends leases by force, and takes note of which.
    async fn force(&mut self, act: impl AsyncFnOnce(SimStore) -> Result<()>) {
        let before = self.holders().await;
        act(self.strangers.clone()).await.expect("it works in memory");
        let after = self.holders().await;
        let mut shared = self.shared();
        for ((token, _), last) in before.into_iter().filter(|(id, _)| !after.iter().any(|(other, _)| id == other)) {
            shared.model.force(token, last);
        }
    }

    /// The leases in the store, each with the last fence of its lock.
    async fn holders(&self) -> Vec<(LeaseId, Fence)> {
        let mut all = Vec::new();
        for key in KEYS {
            let state = self.strangers.state(key).await.expect("it works in memory");
            let last = state.fence.unwrap_or_default();
            let ids = state.holders.iter().filter_map(|holder| Some((holder.token?, holder.fence?)));
            all.extend(ids.map(|id| (id, last)));
        }
        all
    }

    /// Heals everything and compares the store with the model: first when all has been released that is to be, which is
    /// before the longest lease can lapse, then when everything is over that was under way.
    async fn settle(&mut self) {
        self.clients.iter().for_each(|client| client.store.heal());
        sleep(LONGEST * 3).await;
        let states = self.settled_states().await;
        self.shared().compare_leases(&states);
        sleep(LONGEST * 3).await;
        let (mut states, mut waiting) = (self.settled_states().await, self.waiting());
        if waiting.iter().any(|key| states[*key].holders.is_empty()) {
            // A lease may have lapsed just now: where waiters have to ask, they need a moment to notice.
            sleep(SLOWEST_POLL).await;
            (states, waiting) = (self.states().await, self.waiting());
        }
        let mut shared = self.shared();
        shared.compare_leases(&states);
        shared.compare_beliefs(&states, &waiting);
        shared.upset = [false; CLIENTS];
    }

    /// The locks that are waited for.
    fn waiting(&mut self) -> Vec<usize> {
        self.pending.retain(|pending| !pending.task.is_finished());
        self.pending.iter().map(|pending| pending.key).collect()
    }

    /// What the store has, but for a lease that nobody believes in since this very moment: its release is under way.
    async fn settled_states(&self) -> Vec<KeyState> {
        let states = self.states().await;
        let are_believed_in = {
            let shared = self.shared();
            states.iter().flat_map(|state| &state.holders).all(|holder| shared.believe_in(holder).next().is_some())
        };
        if are_believed_in {
            return states;
        }
        sleep(Duration::from_millis(5)).await;
        self.states().await
    }

    async fn states(&self) -> Vec<KeyState> {
        let mut states = Vec::new();
        for key in KEYS {
            states.push(self.strangers.state(key).await.expect("it works in memory"));
        }
        states
    }

    /// Lets everything go: nothing may be left.
    async fn finish(mut self) -> Result<(), String> {
        self.settle().await;
        while let Some(held) = self.take(0) {
            drop(held);
            sleep(LONGEST / 100).await;
            self.check()?;
        }
        for _ in 0..=self.pending.len() {
            self.settle().await;
            self.check()?;
            self.shared().guards.clear();
        }
        for Client { locker, .. } in &self.clients {
            locker.shutdown(LONGEST * 6).await.map_err(|e| format!("shutdown: {e}"))?;
        }
        for task in self.pending.into_iter().map(|pending| pending.task).chain(self.releases) {
            task.await.map_err(|e| format!("a task broke off: {e}"))?;
        }
        for key in KEYS {
            let guard = Locker::new(self.strangers.another_client()).lock(key).try_acquire().await;
            drop(guard.ok().flatten().ok_or_else(|| format!("lock {key} is not free in the end"))?);
        }
        Ok(())
    }
}

impl Shared {
    fn has(&self, id: LeaseId) -> bool {
        self.guards.iter().any(|held| held.id() == id)
    }

    fn believe_in<'a>(&'a self, holder: &'a Holder) -> impl Iterator<Item = &'a Held> {
        let is_its = |held: &&Held| held.guard.is_held() && Some(held.guard.token_to_compare()) == holder.token;
        self.guards.iter().filter(is_its)
    }

    /// Every lease in the store is somebody's, as often as it says.
    fn compare_leases(&mut self, states: &[KeyState]) {
        self.model.look(&mut self.guards);
        for (key, state) in states.iter().enumerate() {
            for holder in &state.holders {
                let live: Vec<_> = self.believe_in(holder).collect();
                let calm = live.first().is_some_and(|held| !self.upset[held.client]);
                if live.is_empty() {
                    self.model.complain(format!("lock {key} is held, but by nobody: {holder:?}"));
                } else if calm && usize::try_from(holder.depth) != Ok(live.len()) {
                    self.model.complain(format!("lock {key} is held {} times, not as in {holder:?}", live.len()));
                }
            }
        }
    }

    /// Everybody who believes to have a lease has it, and nobody waits for a free lock.
    fn compare_beliefs(&mut self, states: &[KeyState], waiting: &[usize]) {
        for held in self.guards.iter().filter(|held| held.guard.is_held()) {
            let (key, token) = (held.key, held.guard.token_to_compare());
            if self.model.is_forced(held.id()) {
                self.model.complain(format!("lock {key}: a lease that somebody ended is still believed in"));
            } else if states[key].holders.iter().all(|holder| holder.token != Some(token)) {
                self.model.complain(format!("lock {key}: a lease is believed in that is not there"));
            }
        }
        for key in waiting.iter().filter(|key| states[**key].holders.is_empty()) {
            self.model.complain(format!("lock {key} is free, but one waits"));
        }
    }

    fn acquired(&mut self, ask: &Ask, answer: Result<Option<Guard>>, before: Fence, must: bool) {
        match answer {
            Ok(Some(guard)) => {
                let held = Held::new(guard, ask.client, ask.key, ask.owner);
                self.model.granted(&held, before);
                self.guards.push(held);
                self.model.look(&mut self.guards);
            }
            Ok(None) if must => self.model.complain(format!("lock {} was free and refused", ask.key)),
            Ok(None) => {}
            // A lease that the owner had may have been lost.
            Err(e) if e.kind() == ErrorKind::Lost && ask.owner.is_some() => {}
            Err(e) if self.upset[ask.client] && e.kind() != ErrorKind::Unexpected => {}
            Err(e) => self.model.complain(format!("client {} got an error for nothing: {e}", ask.client)),
        }
    }

    fn released(&mut self, id: LeaseId, client: usize, answer: Result<Outcome>, believed: bool, forced: bool) {
        let ended = forced || self.model.is_forced(id);
        match answer {
            Ok(Outcome::Released) if !believed || forced => {
                self.model.complain("a lease that was over is said to have been held until its release");
            }
            Ok(Outcome::NotHeld(reason)) if believed && !ended && !self.upset[client] => {
                self.model.complain(format!("a held lease is said to have been lost: {reason}"));
            }
            Ok(_) => {}
            Err(_) if self.upset[client] => {}
            Err(e) => self.model.complain(format!("client {client} got an error for nothing: {e}")),
        }
    }
}
