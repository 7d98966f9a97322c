//! The measuring measured: stores of which it is known what has to come out.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use async_trait::async_trait;
use lockkit::{
    Clock, HolderInfo, KeyState, LockKey, LockStore, Locker, MemoryStore, Moment, SystemClock,
    store::{AcquireRequest, Attempt, Claim, Contention, Hold, Query, Release},
};
use lockkit_testkit::{Alter, Altered};
use tokio::task::JoinSet;

use crate::{
    contention::{Window, contend},
    faults::without_a_fault,
    ledger::{FileLedger, Ledger},
    measure,
    plan::{Options, Plan},
    processes::sum_up,
    report::{Cell, Report, Verdict},
    results::{Contest, LostUpdates, Results},
    stats::Latencies,
    timeline::{Fault, Timeline},
    worker::add_one,
};

/// What is known of a store.
#[derive(Clone, Debug)]
enum Known {
    Sound,
    /// How long an acquisition, a release and a question take at least.
    Takes([Duration; 3]),
    /// This holder is refused until then, however often it asks.
    Starves(HolderInfo, Moment),
    /// Half of the claims do not see the other half.
    LetsTwoIn,
}

/// A store in memory of which something is known.
#[derive(Debug)]
struct KnownStore {
    known: Known,
    inner: MemoryStore,
    /// How long they did take. A timer goes off late on a machine that does something else, too.
    took: Mutex<[Latencies; 3]>,
}

impl KnownStore {
    fn shared(known: Known) -> Arc<Altered<Self>> {
        let took = Mutex::new([Latencies::new(), Latencies::new(), Latencies::new()]);
        Arc::new(Altered(Self { known, inner: MemoryStore::new(), took }))
    }

    async fn take(&self, which: usize) {
        if let Known::Takes(times) = self.known {
            let began = SystemClock.now();
            tokio::time::sleep(times[which]).await;
            self.took.lock().expect("no panic")[which].record(SystemClock.now().since(began));
        }
    }

    /// The claim as the store in memory has it.
    fn inside(&self, claim: &Claim) -> lockkit::Result<Claim> {
        if !matches!(self.known, Known::LetsTwoIn) {
            return Ok(claim.clone());
        }
        let half = claim.token.reveal().as_bytes()[0] % 2;
        Ok(Claim { key: LockKey::new(format!("{}/{half}", claim.key))?, ..claim.clone() })
    }
}

/// No lease is measured for so long that it is renewed.
#[async_trait]
impl Alter for KnownStore {
    fn inner(&self) -> &dyn LockStore {
        &self.inner
    }

    async fn acquire(&self, request: &AcquireRequest) -> lockkit::Result<Attempt> {
        self.take(0).await;
        if let Known::Starves(holder, until) = &self.known
            && request.holder == *holder
            && SystemClock.now() < *until
        {
            let retry_after = Some(Duration::from_millis(1));
            return Ok(Attempt::Contended(Contention { retry_after, ..Contention::default() }));
        }
        let inside = AcquireRequest { claim: self.inside(&request.claim)?, ..request.clone() };
        Ok(match self.inner.acquire(&inside).await? {
            Attempt::Granted(hold) => Attempt::Granted(Hold { claim: request.claim.clone(), ..hold }),
            contended @ Attempt::Contended(_) => contended,
        })
    }

    async fn release(&self, claim: &Claim) -> lockkit::Result<Release> {
        self.take(1).await;
        self.inner.release(&self.inside(claim)?).await
    }

    async fn inspect(&self, query: &Query) -> lockkit::Result<Vec<KeyState>> {
        self.take(2).await;
        self.inner.inspect(query).await
    }
}

/// The name of a contender.
fn contender(number: usize) -> HolderInfo {
    HolderInfo::new(&format!("contender {number}"))
}

/// A contest as that of several processes, in this one: each contender has a locker of its own. (One locker queues its tasks itself,
/// and shows little of what the store does.)
async fn contest(known: Known, window: Window) -> Contest {
    let store: Arc<dyn LockStore> = KnownStore::shared(known);
    let dir = tempfile::tempdir().expect("a directory");
    let ledger = Arc::new(FileLedger::create(&dir.path().join("ledger")).expect("a ledger"));
    let mut running = JoinSet::new();
    for number in 0..Plan::PROCESSES {
        let locker = Locker::shared_builder(Arc::clone(&store)).holder(contender(number)).build();
        let (lock, ledger) = (locker.lock("hot").ttl(Plan::TTL), Arc::clone(&ledger));
        running.spawn(async move { contend(&lock, 1, window, ledger).await });
    }
    let tallies: Vec<_> = running.join_all().await.into_iter().map(|tally| tally.expect("acquisitions")).collect();
    sum_up(&tallies, window.length(), ledger.read().expect("a count").count)
}

fn window() -> Window {
    Window::after(SystemClock.now(), Duration::from_millis(50), Duration::from_millis(400))
}

fn report(results: Results) -> Report {
    let plan = Plan::new(Options::default().groups(crate::Group::ALL));
    Report::new(vec![("known".into(), results)], &plan, Vec::new(), Duration::ZERO)
}

/// The number in this row.
fn figure(report: &Report, id: &str) -> f64 {
    let row = report.rows.iter().find(|row| row.id == id).expect("a row");
    match &row.cells[0] {
        Cell::Number(figure) => figure.value,
        cell => panic!("{id}: {cell:?}"),
    }
}

#[tokio::test]
async fn a_known_delay_comes_out() {
    let least = [40, 10, 20].map(Duration::from_millis);
    let store = KnownStore::shared(Known::Takes(least));
    let locker = Locker::shared_builder(Arc::<Altered<KnownStore>>::clone(&store)).build();
    let (mut results, slice) = (Results::default(), Duration::from_secs(1));
    let pairs = measure::pair(locker.lock("known/pair"), slice).await.expect("grants");
    results.pair.add(pairs.pair);
    results.acquire.add(pairs.acquire);
    results.release.add(pairs.release);
    results.round_trip.add(measure::round_trip(&locker, "known", 3 * slice).await.expect("answers"));
    let report = report(results);
    let took = store.0.took.lock().expect("no panic").clone().map(|took| took.micros(0.5).expect("samples"));
    let close = |measured: f64, known: f64| (measured - known).abs() <= known * 0.15;
    for (which, id) in ["acquire_p50", "release_p50", "round_trip_p50"].into_iter().enumerate() {
        let (measured, known) = (figure(&report, id), took[which]);
        assert!(measured >= least[which].as_micros() as f64, "{id}: {measured} µs");
        // The store knows of some calls more, those of the warm-up.
        assert!(close(measured, known), "{id}: {measured} µs instead of {known}");
    }
    let (pair, trips) = (figure(&report, "pair_p50"), figure(&report, "pair_round_trips"));
    assert!(close(pair, took[0] + took[1]), "{pair} µs for both, {took:?}");
    assert!(close(trips, (took[0] + took[1]) / took[2]), "{trips} round trips, {took:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_that_is_starved_shows_in_the_index_of_fairness() {
    let fairness = async |known, window| {
        let contest = contest(known, window).await;
        figure(&report(Results { processes: vec![contest], ..Results::default() }), "processes_fairness")
    };
    let sound = fairness(Known::Sound, window()).await;
    assert!((0.9..=1.0).contains(&sound), "{sound}");
    let window = window();
    let starved = fairness(Known::Starves(contender(1), window.until), window).await;
    // One of four gets nothing: no more than 3/4, and that if the others get the same.
    assert!((0.65..=0.75).contains(&starved), "{starved}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_that_lets_two_in_shows_as_overlaps() {
    let report = async |known| {
        let contest = contest(known, window()).await;
        report(Results { processes: vec![contest], ..Results::default() })
    };
    let sound = report(Known::Sound).await;
    assert_eq!((figure(&sound, "violations"), &sound.verdict), (0.0, &Verdict::Sound));
    assert!(figure(&sound, "processes") > 0.0);
    let unsound = report(Known::LetsTwoIn).await;
    assert!(figure(&unsound, "violations") > 0.0, "{unsound:?}");
    assert!(matches!(unsound.verdict, Verdict::Overlapped { .. }), "{}", unsound.verdict);
}

/// A timeline of several that fight for this lock, each with a locker of its own.
async fn timeline(known: Known) -> Timeline {
    let store: Arc<dyn LockStore> = KnownStore::shared(known);
    let lock = |number| {
        Locker::shared_builder(Arc::clone(&store)).holder(contender(number)).build().lock("fight").ttl(Plan::TTL)
    };
    without_a_fault((0..Plan::PROCESSES).map(lock).collect(), "fight").await.expect("a record")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_that_lets_two_in_shows_on_the_timeline() {
    let sound = timeline(Known::Sound).await;
    assert_eq!((sound.overlaps.len(), sound.refused.len(), sound.broken), (0, 0, 0), "{sound:?}");
    assert!(sound.written > 10 && sound.beliefs.iter().any(|one| one.process != 0), "{sound:?}");
    let unsound = timeline(Known::LetsTwoIn).await;
    assert!(!unsound.overlaps.is_empty() && unsound.longest_overlap() > 10.0 && unsound.broken > 0, "{unsound:?}");
    let shown = |timeline| report(Results { faults: [(Fault::Killed, timeline)].into(), ..Results::default() });
    let (sound, unsound) = (shown(sound), shown(unsound));
    assert_eq!((figure(&sound, "killed_overlaps"), &sound.verdict), (0.0, &Verdict::Sound));
    assert!(figure(&unsound, "killed_overlaps") > 0.0 && figure(&unsound, "killed_longest") > 10.0);
    assert!(matches!(unsound.verdict, Verdict::Overlapped { .. }), "{}", unsound.verdict);
    // In the page, they are drawn in the colour of what is bad.
    let red = |report: &Report| {
        let page = report.as_html();
        page.split("<svg").skip(1).map(|chart| chart.matches("fill=\"#000500\"").count()).sum::<usize>()
    };
    assert!(red(&sound) == 0 && red(&unsound) >= 2, "{} and {}", red(&sound), red(&unsound));
}

/// How many updates of a number are lost that several change at once, under the lock of this store or under none.
async fn lost(known: Option<Known>) -> u64 {
    const EACH: u64 = 20;
    let store = known.map(|known| KnownStore::shared(known) as Arc<dyn LockStore>);
    let dir = tempfile::tempdir().expect("a directory");
    let ledger = Arc::new(FileLedger::create(&dir.path().join("ledger")).expect("a ledger"));
    let mut running = JoinSet::new();
    for number in 0..Plan::PROCESSES {
        let locker = store.clone().map(|store| Locker::shared_builder(store).holder(contender(number)).build());
        let (lock, ledger) = (locker.map(|locker| locker.lock("number").ttl(Plan::TTL)), Arc::clone(&ledger));
        running.spawn(async move {
            for _ in 0..EACH {
                add_one(lock.as_ref(), &*ledger, Plan::UPDATE_TAKES).await.expect("added");
            }
        });
    }
    running.join_all().await;
    EACH * Plan::PROCESSES as u64 - ledger.read().expect("a count").count
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn updates_are_lost_without_a_lock_and_under_one_that_lets_two_in() {
    let without = lost(None).await;
    assert!(without > 0);
    let row = async |known| {
        let updates = Some(LostUpdates { without, under: lost(Some(known)).await });
        report(Results { updates, ..Results::default() })
    };
    let (sound, unsound) = (row(Known::Sound).await, row(Known::LetsTwoIn).await);
    assert!(figure(&sound, "lost_without_lock") > 0.0);
    assert_eq!((figure(&sound, "lost_under_lock"), &sound.verdict), (0.0, &Verdict::Sound));
    assert!(figure(&unsound, "lost_under_lock") > 0.0);
    assert!(matches!(unsound.verdict, Verdict::Overlapped { .. }), "{}", unsound.verdict);
}
