//! The local queue, in every order: who asks, gets up, leaves, releases or is cancelled, step by step.
//!
//! A scheduler of its own polls the futures of a few tasks, and only those that were woken. All orders of a bounded
//! number of steps are tried, and longer ones at random. What is between two awaits is one step: races of threads within
//! it are not seen here, but in `storm.rs`.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
    time::Duration,
};

use lockkit_core::{Clock, Event, Fence, Guard, HandOver, Locker, MemoryStore, Moment, Observer, Outcome, Result};
use tokio::time::Instant;

/// Which process each task belongs to.
type Tasks = [usize; 3];

/// Three tasks of one process; and two that wait behind another process, or it behind them.
const CASTS: [Tasks; 2] = [[0, 0, 0], [0, 0, 1]];

#[test]
fn every_order_of_the_first_steps() {
    let runtime = runtime();
    for (rule, pauses) in [(HandOver::default(), false), (HandOver::OFF, false), (HandOver::default(), true)] {
        for tasks in CASTS {
            if pauses && tasks != CASTS[0] {
                continue;
            }
            let mut orders = AllOrders { depth: if pauses { 6 } else { 7 }, pauses, path: Vec::new(), at: 0 };
            let mut runs = 0;
            loop {
                orders.at = 0;
                runtime.block_on(play(tasks, rule, &mut orders));
                runs += 1;
                if !orders.advance() {
                    break;
                }
            }
            assert!(runs > 1000, "only {runs} orders");
            println!("{runs} orders of {tasks:?}, {} leases handed over so far", HANDED_OVER.load(Ordering::SeqCst));
        }
    }
    let handed_over = HANDED_OVER.load(Ordering::SeqCst);
    assert!(handed_over > 1000, "only {handed_over} leases were handed over");
}

#[test]
fn many_long_orders() {
    let runtime = runtime();
    for seed in 1..=10_000_u64 {
        let tasks = CASTS[usize::try_from(seed % 2).expect("small")];
        let rule = match seed % 3 {
            0 => HandOver::OFF,
            _ => HandOver { times: 2, within: Duration::from_secs(60) },
        };
        let (seed, pauses) = (seed.wrapping_mul(0x9E37_79B9_7F4A_7C15), seed % 4 < 2);
        runtime.block_on(play(tasks, rule, &mut AnyOrder { seed, pauses, left: 25 }));
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().expect("a runtime")
}

/// A clock that goes on by 10 µs a step, and when somebody sleeps: the same steps must always lead to the same place.
#[derive(Debug)]
struct Steps {
    start: Instant,
    steps: Arc<AtomicU32>,
}

impl Clock for Steps {
    fn now(&self) -> Moment {
        let steps = Duration::from_micros(10) * self.steps.load(Ordering::SeqCst);
        Moment::from_nanos(0) + Duration::from_secs(1) + steps + self.start.elapsed()
    }
}

/// Says what is next.
trait Order: std::fmt::Debug + Send {
    /// One of so many; `None` if it has nothing more to say.
    fn choose(&mut self, options: usize) -> Option<usize>;

    /// Whether there are times at which nothing is polled.
    fn has_pauses(&self) -> bool;
}

/// One after the other: what was chosen, of how many.
#[derive(Debug)]
struct AllOrders {
    depth: usize,
    pauses: bool,
    path: Vec<(usize, usize)>,
    at: usize,
}

impl Order for AllOrders {
    fn choose(&mut self, options: usize) -> Option<usize> {
        if self.at == self.depth {
            return None;
        }
        if self.at == self.path.len() {
            self.path.push((0, options));
        }
        let (choice, known) = self.path[self.at];
        assert_eq!(known, options, "the same steps must lead to the same place");
        self.at += 1;
        Some(choice)
    }

    fn has_pauses(&self) -> bool {
        self.pauses
    }
}

impl AllOrders {
    /// On to the next order, if there is one.
    fn advance(&mut self) -> bool {
        while let Some((choice, options)) = self.path.pop() {
            if choice + 1 < options {
                self.path.push((choice + 1, options));
                return true;
            }
        }
        false
    }
}

#[derive(Debug)]
struct AnyOrder {
    seed: u64,
    pauses: bool,
    left: usize,
}

impl Order for AnyOrder {
    fn choose(&mut self, options: usize) -> Option<usize> {
        self.left = self.left.checked_sub(1)?;
        self.seed ^= self.seed >> 12;
        self.seed ^= self.seed << 25;
        self.seed ^= self.seed >> 27;
        usize::try_from(self.seed.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33).ok().map(|number| number % options)
    }

    fn has_pauses(&self) -> bool {
        self.pauses
    }
}

enum Task {
    Asks(Pin<Box<dyn Future<Output = Result<Guard>> + Send>>, Arc<Woken>),
    Holds(Guard),
    Done,
}

struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Poll(usize),
    Cancel(usize),
    Release(usize),
    Drop(usize),
    /// The engine's own tasks run.
    Background,
    /// Nothing is polled for so long that those who are not polled can be overtaken.
    Pause,
}

/// Counts the leases that were handed over: in most orders there has to be one, or they would show little.
#[derive(Debug)]
struct Counts;

static HANDED_OVER: AtomicUsize = AtomicUsize::new(0);

impl Observer for Counts {
    fn event(&self, event: &Event<'_>) {
        if let Event::Acquired { handed_over: true, .. } = event {
            HANDED_OVER.fetch_add(1, Ordering::SeqCst);
        }
    }
}

/// Plays one order, then lets everything come to its end.
async fn play(tasks: Tasks, rule: HandOver, order: &mut impl Order) {
    let count = Arc::new(AtomicU32::new(0));
    let store = MemoryStore::with_clock(Arc::new(Steps { start: Instant::now(), steps: Arc::clone(&count) }));
    let lockers = [0, 1].map(|_| Locker::builder(store.clone()).hand_over(rule).observer(Counts).build());
    let mut stage = Stage { last: Fence::NONE, count, steps: Vec::new(), tasks: Vec::new() };
    for process in tasks {
        let lock = lockers[process].lock("x");
        stage.tasks.push(Task::Asks(Box::pin(async move { lock.acquire().await }), Arc::new(Woken(true.into()))));
    }
    loop {
        let options = stage.options(order.has_pauses());
        let Some(choice) = order.choose(options.len()) else { break };
        stage.act(options[choice]).await;
    }
    for _ in 0..200 {
        let next = stage.options(false).into_iter().find(|step| matches!(step, Step::Poll(_) | Step::Release(_)));
        match next {
            Some(step) => stage.act(step).await,
            None if stage.tasks.iter().all(|task| matches!(task, Task::Done)) => break,
            // Who lets others go first does so for a millisecond.
            None => tokio::time::sleep(Duration::from_millis(1)).await,
        }
    }
    let left = stage.tasks.iter().filter(|task| !matches!(task, Task::Done)).count();
    assert_eq!(left, 0, "so many never got their turn, after {:?}", stage.steps);
    for locker in lockers {
        locker.shutdown(Duration::from_secs(5)).await.expect("nothing is under way for ever");
    }
    let free = Locker::new(store).lock("x").try_acquire().await.expect("memory answers");
    assert!(free.is_some(), "the lock was left behind after {:?}", stage.steps);
}

struct Stage {
    tasks: Vec<Task>,
    last: Fence,
    count: Arc<AtomicU32>,
    steps: Vec<Step>,
}

impl Stage {
    fn options(&self, has_pauses: bool) -> Vec<Step> {
        let mut options = Vec::new();
        for (number, task) in self.tasks.iter().enumerate() {
            match task {
                Task::Asks(_, woken) => {
                    if woken.0.load(Ordering::SeqCst) {
                        options.push(Step::Poll(number));
                    }
                    options.push(Step::Cancel(number));
                }
                Task::Holds(_) => options.extend([Step::Release(number), Step::Drop(number)]),
                Task::Done => {}
            }
        }
        if options.is_empty() || !matches!(self.steps.last(), Some(Step::Background)) {
            options.push(Step::Background);
        }
        if has_pauses && !matches!(self.steps.last(), Some(Step::Pause)) {
            options.push(Step::Pause);
        }
        options
    }

    async fn act(&mut self, step: Step) {
        self.steps.push(step);
        self.count.fetch_add(1, Ordering::SeqCst);
        match step {
            Step::Poll(number) => self.poll(number),
            Step::Cancel(number) | Step::Drop(number) => self.tasks[number] = Task::Done,
            Step::Release(number) => {
                let Task::Holds(guard) = std::mem::replace(&mut self.tasks[number], Task::Done) else { return };
                let outcome = tokio::task::unconstrained(guard.release()).await.expect("memory answers");
                assert_eq!(outcome, Outcome::Released, "after {:?}", self.steps);
            }
            Step::Background => tokio::task::yield_now().await,
            Step::Pause => tokio::time::sleep(Duration::from_millis(1100)).await,
        }
        let holders = self.tasks.iter().filter(|task| matches!(task, Task::Holds(guard) if guard.is_held())).count();
        assert!(holders <= 1, "{holders} holders after {:?}", self.steps);
    }

    fn poll(&mut self, number: usize) {
        let Task::Asks(future, woken) = &mut self.tasks[number] else { return };
        woken.0.store(false, Ordering::SeqCst);
        let waker = Waker::from(Arc::clone(woken));
        let polled = Pin::new(&mut tokio::task::unconstrained(future.as_mut())).poll(&mut Context::from_waker(&waker));
        if let Poll::Ready(guard) = polled {
            let guard = guard.expect("memory answers");
            assert!(guard.fence() > self.last, "fence {} after {:?}", guard.fence(), self.steps);
            self.last = guard.fence();
            self.tasks[number] = Task::Holds(guard);
        }
    }
}
