//! The hunt for leaks itself under test: what is kept of a lease on purpose must be found, each kind by its name.
//!
//! One after the other, for the descriptors that are counted are those of the whole process.

use std::{
    fs::File,
    process::ExitCode,
    sync::{Arc, Mutex},
};

use async_trait::async_trait;
use libtest_mimic::{Arguments, Trial};
use lockkit_core::{AcquireRequest, Attempt, Claim, LockStore, MemoryStore, Result};
use lockkit_testkit::{Alter, Altered, BoxError, cycles_leave_nothing};

const CYCLES: u32 = 2_000;

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    let trials = [
        ("nothing", None, None),
        ("a_task", Some(Leak::Task), Some(" tasks")),
        ("a_descriptor", Some(Leak::Descriptor), Some(" descriptors")),
        ("a_key", Some(Leak::Key), Some(" entries in the store")),
        ("a_lock", Some(Leak::Lock), Some(" locks are still held")),
        ("a_client", Some(Leak::Client), Some("without clients there are")),
    ];
    let trials = trials.map(|(name, leak, says)| Trial::test(name, move || Ok(look_for(leak, says)?)));
    libtest_mimic::run(&arguments, trials.into()).exit_code()
}

/// What is kept of one acquisition in fifty, or of the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Leak {
    Task,
    Descriptor,
    Key,
    Lock,
    Client,
}

fn look_for(leak: Option<Leak>, says: Option<&str>) -> std::result::Result<(), BoxError> {
    let runtime = tokio::runtime::Runtime::new()?;
    let kept = Arc::new(Mutex::new(Kept::default()));
    let (store, shared) = (MemoryStore::new(), Arc::clone(&kept));
    let found = runtime.block_on(cycles_leave_nothing(
        move || {
            let leaky: Arc<dyn LockStore> =
                Arc::new(Altered(Leaky { store: store.clone(), leak, kept: Arc::clone(&shared) }));
            async move {
                if leak == Some(Leak::Client) {
                    tokio::spawn(std::future::pending::<()>());
                }
                Ok(leaky)
            }
        },
        || async { Ok(u64::try_from(kept.lock().expect("unpoisoned").keys)?) },
        CYCLES,
    ));
    match (found, says) {
        (Ok(()), None) => Ok(()),
        (Err(error), None) => Err(error),
        (Ok(()), Some(_)) => Err(format!("{leak:?} was not found").into()),
        (Err(error), Some(says)) if error.to_string().contains(says) => {
            println!("{error}");
            Ok(())
        }
        (Err(error), Some(says)) => Err(format!("{leak:?} was found, but not{says}: {error}").into()),
    }
}

/// What was kept, and of how many acquisitions.
#[derive(Debug, Default)]
struct Kept {
    acquisitions: u32,
    descriptors: Vec<File>,
    keys: usize,
}

#[derive(Debug)]
struct Leaky {
    store: MemoryStore,
    leak: Option<Leak>,
    kept: Arc<Mutex<Kept>>,
}

impl Leaky {
    /// Keeps something of every fiftieth. Returns whether this is one.
    fn keep(&self) -> bool {
        let mut kept = self.kept.lock().expect("unpoisoned");
        kept.acquisitions += 1;
        let is_one = kept.acquisitions.is_multiple_of(50);
        match self.leak.filter(|_| is_one) {
            Some(Leak::Task) => drop(tokio::spawn(std::future::pending::<()>())),
            Some(Leak::Descriptor) => kept.descriptors.push(File::open("/dev/null").expect("Linux")),
            Some(Leak::Key) => kept.keys += 1,
            Some(Leak::Lock | Leak::Client) | None => {}
        }
        is_one
    }
}

#[async_trait]
impl Alter for Leaky {
    fn inner(&self) -> &dyn LockStore {
        &self.store
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        if self.keep() && self.leak == Some(Leak::Lock) {
            let name = format!("{}/{}", request.claim.key, request.claim.token.reveal());
            let claim = Claim { key: lockkit_core::LockKey::new(name)?, ..request.claim.clone() };
            self.store.acquire(&AcquireRequest { claim, ..request.clone() }).await?;
        }
        self.store.acquire(request).await
    }
}
