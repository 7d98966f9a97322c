//! Carries out a program on a store, and judges it.

use std::{
    cell::Cell,
    path::PathBuf,
    sync::{
        Arc, Mutex, Once,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use lockkit::{
    ErrorKind, Locker,
    store::{LockStore, Query, StoreInfo, unpoisoned},
};
use lockkit_testkit::{
    AsyncOpen, BoxError,
    history::{History, Recorder, What, check},
};
use tokio::{
    runtime::{Builder, Runtime},
    time::{Instant, sleep},
};

use crate::{
    hand::Hand,
    program::{KEYS, OWNERS, Program},
    world::{Process, Terms, World},
};

/// How long a short lease lasts at least, in milliseconds.
const SHORTEST: u64 = 300;

/// Programs of this process so far: each has locks of its own.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// What was seen of many programs.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Seen {
    pub(crate) programs: u64,
    pub(crate) grants: u64,
    pub(crate) nested: u64,
    pub(crate) handed_over: u64,
    pub(crate) cancelled: u64,
    pub(crate) lost: u64,
}

/// Runs the program.
///
/// # Errors
/// Which rule was broken, and where the history is.
pub(crate) fn run(open: &(impl AsyncOpen + Clone), program: &Program) -> Result<Seen, String> {
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("programs-{}-{number}", std::process::id()));
    std::fs::create_dir_all(&dir).map_err(|error| error.to_string())?;
    let ran = carry_out(open, program, number, &dir).map_err(|error| error.to_string());
    let files = ["w0", "w1", "last"].map(|name| dir.join(name)).into_iter().filter(|file| file.exists());
    let history = History::read(files).map_err(|error| error.to_string())?;
    let report = check(&history);
    let broken = ran.and_then(|complaint| complaint.map_or(Ok(()), Err));
    let broken = broken.and_then(|()| report.violations.first().map_or(Ok(()), |violation| Err(violation.to_string())));
    match broken {
        Ok(()) => {
            _ = std::fs::remove_dir_all(&dir);
            let (grants, nested, handed_over) = (report.grants, report.nested, report.handed_over);
            Ok(Seen { programs: 1, grants, nested, handed_over, cancelled: report.cancelled, lost: report.lost })
        }
        Err(what) => Err(format!("{what}\nhistory:\n{}", history.to_lines())),
    }
}

/// What was complained of.
fn carry_out(
    open: &(impl AsyncOpen + Clone),
    program: &Program,
    number: u64,
    dir: &std::path::Path,
) -> Result<Option<String>, BoxError> {
    let panics = Panics::new(number);
    let [first, second] = [0, 1].map(|runtime| panics.runtime(runtime));
    let (first, second) = (first?, second?);
    let complaint = first.block_on(async {
        // On a thread of the runtime, as in any service.
        let (open, program, dir) = (open.clone(), program.clone(), dir.to_owned());
        let task = tokio::spawn(async move { stage(&open, program, number, &dir, second).await });
        task.await.map_err(|error| format!("the program panicked: {error}"))?
    })?;
    first.shutdown_background();
    Ok(complaint.or_else(|| panics.seen()))
}

async fn stage(
    open: &impl AsyncOpen,
    program: Program,
    number: u64,
    dir: &std::path::Path,
    second: Runtime,
) -> Result<Option<String>, BoxError> {
    let runtimes = [tokio::runtime::Handle::current(), second.handle().clone()];
    let (mut processes, mut terms) = (Vec::new(), Terms { fifo: false, short: 0 });
    for (index, runtime) in runtimes.iter().enumerate() {
        let store = open.open().await?;
        terms = of(store.info());
        let recorder = Recorder::create(format!("w{index}"), &dir.join(format!("w{index}")))?;
        let locker = Locker::shared_builder(store).runtime(runtime.clone()).build();
        processes.push(Process::new(locker, recorder, OWNERS));
    }
    let prefix = format!("programs/{}/{number}/", std::process::id());
    let world = Arc::new(World::new(program, prefix.clone(), processes, runtimes, terms));
    for (index, task) in world.program.tasks.iter().enumerate() {
        let (hand, steps) = (Hand::new(Arc::clone(&world), task.locker), world.program.tasks[index].steps.clone());
        world.spawn(task.runtime, async move { hand.work(&steps).await });
    }
    let fate = meet_fate(&world, second);
    let (second, ()) = tokio::join!(fate, world.ended());
    shut_down(&world).await;
    let observer = open.open().await?;
    nothing_is_left(&world, observer.as_ref(), &prefix).await;
    all_is_free(&world, observer, dir).await?;
    if let Some(second) = second {
        second.shutdown_background();
    }
    Ok(world.complaint())
}

fn of(info: &StoreInfo) -> Terms {
    let least = info.capability.liveness.ttl.as_ref().map_or(0, |ttl| ttl.start().as_millis());
    Terms { fifo: info.capability.fifo, short: SHORTEST.max(u64::try_from(least).unwrap_or(u64::MAX)) }
}

/// What happens to processes and runtimes in the middle.
async fn meet_fate(world: &Arc<World>, second: Runtime) -> Option<Runtime> {
    let shutdown = async {
        let Some((process, at)) = world.program.shutdown else { return };
        sleep(Duration::from_millis(at)).await;
        close(world, process).await;
    };
    let end = async {
        let Some(at) = world.program.runtime_ends else { return Some(second) };
        sleep(Duration::from_millis(at)).await;
        second.shutdown_background();
        None
    };
    tokio::join!(shutdown, end).1
}

async fn close(world: &Arc<World>, process: usize) {
    if let Err(error) = world.processes[process].shutdown(world.time_left()).await {
        world.complain(format!("a shutdown does not end: {error}"));
    }
}

/// Nobody has anything any more: what is under way comes to its end, and nothing is granted from here on.
async fn shut_down(world: &Arc<World>) {
    for (index, process) in world.processes.iter().enumerate() {
        close(world, index).await;
        match process.locker.lock(world.name(0)).try_acquire().await {
            Err(error) if error.kind() == ErrorKind::Closed => {}
            other => world.complain(format!("after the shutdown: {:?}", other.map(|guard| guard.map(|_| "granted")))),
        }
    }
}

/// After the shutdown no lease is left in the store, nor anybody who waits. What a runtime took with it lapses.
async fn nothing_is_left(world: &Arc<World>, observer: &dyn LockStore, prefix: &str) {
    // A short lease of a runtime that ended is gone by then.
    let (begun, lapsed) = (Instant::now(), Duration::from_millis(world.terms.short * 10));
    // Where leases end with the session, they end with the process.
    let is_session = observer.info().capability.liveness.session.is_some();
    loop {
        let states = match observer.inspect(&Query::Prefix(prefix.to_owned())).await {
            Ok(states) => states,
            Err(error) => return world.complain(format!("the store can't be asked: {error}")),
        };
        let left: Vec<_> = states.iter().filter(|state| !state.holders.is_empty()).collect();
        let may_lapse = world.program.runtime_ends.is_some() && (is_session || begun.elapsed() < lapsed);
        match left.is_empty() {
            true => return,
            false if may_lapse && is_session => return,
            false if may_lapse => sleep(Duration::from_millis(world.terms.short / 4)).await,
            false => return world.complain(format!("after the shutdown there is {left:?}")),
        }
    }
}

/// Somebody else is granted each of the locks at once, with a fence above all others.
async fn all_is_free(world: &Arc<World>, observer: Arc<dyn LockStore>, dir: &std::path::Path) -> Result<(), BoxError> {
    if world.program.runtime_ends.is_some() {
        return Ok(());
    }
    let (locker, recorder) = (Locker::shared_builder(observer).build(), Recorder::create("last", &dir.join("last"))?);
    for key in 0..KEYS {
        let op = recorder.ask(What::acquire(world.name(key)))?;
        match locker.lock(world.name(key)).try_acquire().await {
            Ok(Some(guard)) => {
                recorder.hear(op, What::Granted { fence: guard.fence().get() })?;
                _ = guard.release().await?;
            }
            other => world.complain(format!("lock {key} is not free in the end: {other:?}")),
        }
    }
    Ok(locker.shutdown(world.time_left()).await?)
}

/// The panics on the runtimes of one program, also of tasks that nobody waits for.
struct Panics {
    name: String,
}

static SEEN: Mutex<Vec<(String, String)>> = Mutex::new(Vec::new());
static HOOK: Once = Once::new();

thread_local! {
    static BUSY: Cell<bool> = const { Cell::new(false) };
}

impl Panics {
    fn new(number: u64) -> Self {
        HOOK.call_once(|| {
            let report = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |info| {
                let name = std::thread::current().name().unwrap_or_default().to_owned();
                if !BUSY.replace(true) {
                    unpoisoned(&SEEN).push((name, info.to_string()));
                    BUSY.set(false);
                }
                report(info);
            }));
        });
        Self { name: format!("program {number}.") }
    }

    fn runtime(&self, number: usize) -> std::io::Result<Runtime> {
        Builder::new_multi_thread().worker_threads(1).enable_all().thread_name(format!("{}{number}", self.name)).build()
    }

    fn seen(&self) -> Option<String> {
        let seen = unpoisoned(&SEEN);
        seen.iter().find(|(name, _)| name.starts_with(&self.name)).map(|(_, what)| format!("a panic: {what}"))
    }
}
