//! One store while it is measured: which measures are for it, and taking them.

use std::{
    collections::BTreeMap,
    path::Path,
    sync::{Arc, Mutex},
};

use lockkit::{HandOver, Liveness, LockStore, Locker, Resume, Token, store::unpoisoned};

use crate::{
    cost, delay,
    error::Result,
    faults::{inflict_all, lost_updates},
    measure,
    peers::{At, Measured},
    plan::{Plan, Step},
    processes,
    results::{Absence, Counts, Results, Traits},
    takeover,
    targets::Target,
    workers::WorkerProgram,
};

/// A store while it is measured.
#[derive(Debug)]
pub(crate) struct Contestant {
    pub(crate) target: Target,
    client: Client,
    /// What the names of all its locks start with.
    key: String,
    /// In how many rounds each measure was taken.
    taken: BTreeMap<Step, u32>,
    /// The compliance cases that have ended.
    pub(crate) cases: Arc<Mutex<Counts>>,
    pub(crate) results: Results,
}

/// What takes the locks.
#[derive(Debug)]
enum Client {
    Store { store: Arc<dyn LockStore>, locker: Locker },
    Peer(Box<Measured>),
}

impl Contestant {
    /// Connects to the store.
    pub(crate) async fn enter(target: Target) -> Result<Self> {
        let (client, traits) = match target.peer() {
            // It connects by itself, in processes of its own.
            Some(peer) => {
                (Client::Peer(Box::new(Measured::new(peer.clone()))), Traits { is_peer: true, ..Traits::default() })
            }
            None => {
                let store = lockkit::open(target.url()).await?;
                let traits = traits(&*store, &target);
                let locker = Locker::shared_builder(Arc::clone(&store)).build();
                (Client::Store { store, locker }, traits)
            }
        };
        // Names of its own: the store may be in use, by another comparison too.
        let key = format!("lockkit-compare/{}", &Token::random()?.reveal()[..12]);
        let absent = Step::all()
            .filter_map(|step| Some((step, Absence::Inapplicable(inapplicable(step, &target, &traits)?))))
            .collect();
        let results = Results { traits, absent, ..Results::default() };
        Ok(Self { target, client, key, taken: BTreeMap::new(), cases: Arc::default(), results })
    }

    /// What the names of all its locks start with.
    pub(crate) fn under(&self) -> String {
        format!("{}/", self.key)
    }

    /// Whether this measure is one for this store.
    pub(crate) fn takes(&self, step: Step) -> bool {
        !matches!(self.results.absent.get(&step), Some(Absence::Inapplicable(_)))
    }

    /// The measures for this store that have the machine for themselves.
    pub(crate) fn steps(&self) -> impl Iterator<Item = Step> {
        Step::ALONE.into_iter().filter(|step| self.takes(*step))
    }

    /// In how many rounds it was taken, also if it failed.
    pub(crate) fn taken(&self, step: Step) -> u32 {
        self.taken.get(&step).copied().unwrap_or_default()
    }

    /// Counts a round of this measure.
    pub(crate) fn count(&mut self, step: Step) {
        *self.taken.entry(step).or_default() += 1;
    }

    /// Notes that this measure did not get its turn. Compliance cases that have ended are told all the same.
    pub(crate) fn leave_out(&mut self, step: Step) {
        let cases = unpoisoned(&self.cases).clone();
        if step == Step::Compliance && cases != Counts::default() {
            self.results.compliance = Some(Counts { interrupted: true, ..cases });
        } else {
            let why = "the comparison was interrupted before that";
            self.results.absent.insert(step, Absence::Inapplicable(why));
        }
    }

    /// Takes one measure. A failure ends this measure on this store; the others go on.
    pub(crate) async fn go(&mut self, step: Step, plan: &Plan, program: &WorkerProgram, dir: &Path) {
        if !self.results.absent.contains_key(&step)
            && let Err(failure) = self.measure(step, plan, program, dir).await
        {
            self.results.absent.insert(step, Absence::Failed(failure));
        }
        self.count(step);
    }

    async fn measure(&mut self, step: Step, plan: &Plan, program: &WorkerProgram, dir: &Path) -> Result<()> {
        let (url, key, results) = (self.target.url(), &self.key, &mut self.results);
        let (store, locker) = match &mut self.client {
            Client::Peer(peer) => return peer.take(step, &At { url, key, dir }, plan, program, results).await,
            Client::Store { store, locker } => (&*store, &*locker),
        };
        let (slice, process_slice) = (plan.slice, plan.process_slice);
        match step {
            Step::RoundTrip => results.round_trip.add(measure::round_trip(locker, key, slice).await?),
            Step::Pair => {
                let round = measure::pair(locker.lock(format!("{key}/pair")), slice).await?;
                results.pair.add(round.pair);
                results.acquire.add(round.acquire);
                results.release.add(round.release);
            }
            Step::ManyKeys => {
                let (rate, pairs) = measure::many_keys(locker, key, Plan::KEYS, slice).await?;
                results.many_keys.push(rate);
                results.acquire_loaded.add(pairs.acquire);
                results.release_loaded.add(pairs.release);
                results.by_keys.entry(Plan::KEYS).or_default().push(rate);
            }
            Step::ByKeys => {
                for keys in Plan::BY_KEYS {
                    let (rate, _) = measure::many_keys(locker, key, keys, plan.short_slice()).await?;
                    results.by_keys.entry(keys).or_default().push(rate);
                }
            }
            Step::Kinds => {
                let (name, slice) = (|kind| format!("{key}/{kind}"), plan.short_slice());
                let Traits { fifo, shared, permits, .. } = results.traits;
                if fifo {
                    results.fifo.add(measure::pair(locker.lock(name("fifo")).fifo(), slice).await?.pair);
                }
                if shared {
                    results.reader.add(measure::pair(locker.rw_lock(name("reader")).read(), slice).await?.pair);
                    let shared = locker.rw_lock(name("beside")).read().ttl(Plan::TTL);
                    let other = shared.acquire().await?;
                    results.reader_beside.add(measure::pair(shared, slice).await?.pair);
                    let _ = other.release().await?;
                    results.writer.add(measure::pair(locker.rw_lock(name("writer")).write(), slice).await?.pair);
                }
                if permits {
                    let permit = locker.semaphore(name("permit"), Plan::PERMITS);
                    results.permit.add(measure::pair(permit, slice).await?.pair);
                }
            }
            Step::HandedOver => {
                results.handed_over.push(measure::hot_lock(store, key, slice, HandOver::default()).await?);
            }
            Step::NotHandedOver => {
                results.not_handed_over.push(measure::hot_lock(store, key, slice, HandOver::OFF).await?);
            }
            Step::Processes => results.processes.push(processes::contest(program, url, key, process_slice, dir).await?),
            Step::HandOff => {
                let round = processes::hand_off(program, url, locker, (key, false), process_slice).await?;
                results.hand_off.add(round.latencies);
                results.idle_round_trip.add(round.idle_round_trips);
                if results.traits.fifo {
                    let in_order = processes::hand_off(program, url, locker, (key, true), process_slice / 4).await?;
                    results.hand_off_in_order.add(in_order.latencies);
                }
            }
            Step::Takeover => results.takeover = Some(Box::pin(takeover::of(program, url, locker, key)).await?),
            Step::Delay => {
                // In a box: with what connecting is made of, the future would be too deep for the compiler.
                for (delay, round) in Box::pin(delay::pairs_by_delay(&self.target, key, plan)).await? {
                    results.by_delay.entry(delay).or_default().add(round);
                }
            }
            Step::Leases => results.held = Some(processes::leases(program, url, key, plan).await?),
            // In a box, for the same reason.
            Step::Cost => results.cost = Some(Box::pin(cost::of(&self.target, key, plan)).await?),
            Step::Faults => {
                // What succeeds stays, whatever fails beside it.
                let mut failed = None;
                match Box::pin(lost_updates(program, url)).await {
                    Ok(updates) => results.updates = Some(updates),
                    Err(error) => failed = Some(error),
                }
                for (fault, outcome) in Box::pin(inflict_all(program, &self.target, key)).await {
                    match outcome {
                        Ok(timeline) => _ = results.faults.insert(fault, timeline),
                        Err(error) => failed = Some(error),
                    }
                }
                return failed.map_or(Ok(()), Err);
            }
            // All stores at once, after all else.
            Step::Compliance => {}
        }
        Ok(())
    }
}

/// What a store says of itself.
fn traits(store: &dyn LockStore, target: &Target) -> Traits {
    let capability = &store.info().capability;
    Traits {
        is_peer: false,
        in_process: target.is_in_process(),
        scheme: store.info().scheme.to_owned(),
        fencing: format!("{:?}", capability.fencing),
        waiting: format!("{:?}", capability.waiting),
        liveness: liveness(&capability.liveness),
        fifo: capability.fifo,
        shared: capability.shared,
        permits: capability.permits,
        resume: capability.resume == Resume::UntilTtl,
        keeps: capability.keeps,
        downgrades: capability.downgrades,
    }
}

/// What ends the lease of a holder that is gone, in a word or two.
fn liveness(liveness: &Liveness) -> String {
    match (&liveness.ttl, &liveness.session) {
        (Some(_), Some(_)) => "ttl, session".to_owned(),
        (None, Some(_)) => "session".to_owned(),
        _ => "ttl".to_owned(),
    }
}

/// Why this measure is none for this store.
fn inapplicable(step: Step, target: &Target, traits: &Traits) -> Option<&'static str> {
    match step {
        // The cases are all that a store takes beside those.
        step if !target.steps().contains(&step) && (step != Step::Compliance || target.peer().is_some()) => {
            target.in_part()
        }
        Step::Processes | Step::HandOff | Step::Takeover | Step::Faults if target.is_in_process() => {
            Some("it is inside one process, and no other can share it")
        }
        Step::Delay if target.servers().is_empty() => Some("a delay is put before private servers only"),
        Step::Faults if target.servers().is_empty() => {
            Some("faults are inflicted on private servers only, never on a store in use")
        }
        Step::Cost if target.is_in_process() => {
            Some("it is inside one process, and there is no server to cost anything")
        }
        Step::Kinds if !(traits.fifo || traits.shared || traits.permits) => {
            Some("it has exclusive locks only, in no order")
        }
        Step::Leases if !cfg!(target_os = "linux") => {
            Some("the memory of a process is read from /proc, which this system does not have")
        }
        _ => None,
    }
}
