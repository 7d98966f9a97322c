//! How it is measured, in words: for the files that people read. No I/O.

use super::Setting;
use crate::group::Group;

/// What holds for all measures.
pub(super) const ALL: &str = "All stores are measured through the same `Locker`, in turns: each round visits every store, so that whatever else the \
machine does hits all of them alike. Rates and fairness are medians over the rounds, latencies are quantiles over all samples. The range beside \
a figure is the least and the most that one round showed. Every measure begins with a warm-up that is not counted. Compare columns of one report, \
not numbers of different reports: machines differ by more than stores do.";

/// What a comparison measured: the name of each measure, and what it is.
pub(super) fn of(setting: &Setting) -> impl Iterator<Item = (&'static str, &'static str)> {
    MEASURES.iter().filter(|(_, groups, _)| setting.has(groups)).map(|(name, _, how)| (*name, *how))
}

/// Each measure: its name, the groups that it is told with (none: always), and what it is.
const MEASURES: [(&str, &[Group], &str); 19] = [
    (
        "Bare round trip",
        &[Group::Alone, Group::HandOff],
        "`inspect` of one free lock. It is the cost of one question to the store, to measure the rest by.",
    ),
    (
        "Acquire + release",
        &[Group::Alone, Group::Keys],
        "one task, one lock, nobody else; together, and each by itself. The task makes its next call when the last one was answered, so that \
         a pause of the server is met by one call alone (coordinated omission). p99, p99.9 and the charts make up for that, as HdrHistogram does: for \
         a call that took more than two medians of the pair, they add the calls that would have been made meanwhile, one in each median, each with \
         its rest of the pause. Medians and rates are not corrected, nor are 64 tasks at once, which ask as fast as they can.",
    ),
    (
        "A store named after two others",
        &[],
        "(`redis to mariadb`): a migration between private servers of both, in the phase both: each lock is taken in the one, then in the \
         other. Only what takes and releases single locks is measured there.",
    ),
    (
        "A name that ends with (peer)",
        &[],
        "(`--peers`): another lock library on the private server of a store, with the settings that it comes with. It does the same work in processes of \
         its own, without a `Locker`, and times itself, with a clock of its own language; a task is a thread in Java and Python, and a virtual machine has a \
         second to warm up. It hands nothing over within a process, so that each acquisition asks the server. Without fences, an overlap is an \
         update of the counter that got lost.",
    ),
    (
        "Other kinds",
        &[Group::Kinds],
        "the same with a lock that is taken in order of arrival, as a reader and as a writer of a `rw_lock`, and with a permit of a semaphore, where the store has \
         them: what the kind costs where nobody is in the way. One reader is measured beside another, which keeps its lease.",
    ),
    (
        "Keys",
        &[Group::Keys],
        "one task for each key, all with one store, which has as many connections as it thinks right. Acquire and release are timed \
         there as well, each by itself: what they take while the store has as much to do as these tasks can ask for.",
    ),
    (
        "Hot lock",
        &[Group::Hot, Group::Processes],
        "tasks that take the same lock as often as they can. In one process, a release hands the lease to the next task without asking the \
         store, up to 64 times or 50 ms in a row; the second rate is without that. Over processes, each hands over within itself, and has a runtime of one \
         thread; each holder reads, changes and writes back a number in a file.",
    ),
    (
        "Compliance",
        &[Group::Compliance],
        "the cases of `lockkit-testkit`. Those that harm a server are ignored here; `./run test` runs them.",
    ),
    (
        "Overlaps",
        &[Group::Hot, Group::Processes],
        "holders whose fence was not above that of the one before, and updates of the counter that got lost. Anything but 0 is a fault. That there \
         was none is said of processes alone: the tasks of one process ask the store one at a time.",
    ),
    (
        "Fairness",
        &[Group::Hot, Group::Processes],
        "Jain's index of the acquisitions: 1 if all got the same, 1/n if one got everything.",
    ),
    (
        "Hand-off",
        &[Group::HandOff],
        "from the call of `release` in one process to the moment when a waiter in another has the lock, on the clock that both share \
         (`CLOCK_BOOTTIME`). The waiter is known to wait before the lock is released, so that all who take part have been idle for some \
         milliseconds and must be woken by their systems; a bare round trip after the same pause tells how much of the time that is. In order of \
         arrival: both ask for the lock in that order, for a fourth of the time.",
    ),
    (
        "The holder is gone",
        &[Group::Takeover],
        "three processes that hold a lock each are killed (SIGKILL), and three are frozen (SIGSTOP), at different moments between two renewals, while a \
         task of another process waits for each lock. The time is that until it has the lock; the figure is the median of three, with the least and the \
         most. Where leases have a ttl it is what is left of it after the last renewal, two thirds at least. A frozen process goes on after that, and is asked \
         at once whether it holds the lock: anything but 0 is a fault.",
    ),
    (
        "Delay of the network",
        &[Group::Delay],
        "acquire + release through a proxy before each private server, which delivers every answer that much later; the time of the proxy \
         itself is in it. The round trips are what a release and an acquisition take longer from 5 to 20 ms, divided by 15 ms. p99 is corrected as above. At 20 ms there are \
         some two dozen samples in a round, and p99 is about the worst of them.",
    ),
    (
        "Leases",
        &[Group::Leases],
        "growth of the resident memory of a process of its own per held lease. The processor's share is what the renewals of one cycle took, \
         for a cycle of 10 s (a third of the ttl). For `memory`, the store is in that process too.",
    ),
    (
        "Cost at the server",
        &[Group::Cost],
        "what the servers themselves say (`INFO`, `SHOW GLOBAL STATUS`, `srvr` and `mntr`; all servers of a store together), and of private servers \
         that do not tell it the processor time from `/proc`, in steps of 10 ms. They are watched while clients are connected that do nothing, \
         then while one of them holds the locks, then while each of the others waits for one lock that stays held and is not renewed \
         meanwhile. A figure is what there was more than without, divided by the number of locks or waiters; what is less counts as 0. The \
         cost of the reading and of connections is left out; the work of other clients of a store in use is in it. A request is what the \
         server counts as one: on Redis also each command within a script, on MySQL a statement, on ZooKeeper a packet. The memory of a \
         lock is with what stays of it for a while (fences). A waiter is a process that waits: further tasks of it cost the server nothing.",
    ),
    (
        "Faults",
        &[Group::Faults],
        "four processes fight for one lock: each holds it for a quarter of a second, writes to a resource that checks fences, asks every \
         50 ms whether it still has the lock, and tells what it did and heard, on the clock that all share. One is told to keep the lock; \
         half a second later it is killed (SIGKILL), frozen (SIGSTOP) or cut off by a proxy before each server, until another has had the \
         lock for 0.6 s; or a server is killed and started again with what it has on disk. It believes to hold the lock from when it \
         heard of its grant until it last asked and was told so, and no longer. Each write but the first follows a rest, so that a \
         process that was frozen writes before it looks. Each fault is inflicted once: `takeover` has more samples of the time until \
         another has the lock. Two at once are a fault, but where a single server came back without its locks, as the store says of it.",
    ),
    (
        "Lost updates",
        &[Group::Faults],
        "four processes read a number in a file, work for a millisecond, and write back one more: with no lock between them, and under a lock of the store.",
    ),
    (
        "Private servers",
        &[],
        "with none given by URL: each runs on this machine, alone, and over the loopback interface. A network between client and server adds its \
         delay to every round trip. Redis keeps nothing on disk there, ZooKeeper does not wait for the disk, MariaDB and MySQL do at each commit; \
         it is the other way in those whose name says `fsync` or `no fsync` (`--durability usual` leaves these out).",
    ),
    (
        "Guarantees",
        &[],
        "what the store says of itself (`Capability`), and what the compliance cases saw. Only the faults try what a lock survives when a \
         server loses data; see lockkit's documentation (`docs/guarantees.md`), with the fault runs behind it.",
    ),
];
