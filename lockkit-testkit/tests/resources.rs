//! The proofs of fenced resources under test: resources that are wrong must fail, each for what is wrong with it.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use async_trait::async_trait;
use lockkit_core::{
    Fence, LockStore, MemoryStore, Result,
    fenced::{Admission, FencedResource, MemoryResource, SeenFences, admit},
};
use lockkit_testkit::{BoxError, a_frozen_holder_is_refused, a_frozen_writer_is_refused_after_readers};

/// What is wrong with a resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bug {
    /// It takes every write.
    AsksForNoFence,
    /// A reader's claim is remembered by nobody.
    ForgetsReaders,
    /// It keeps one number for readers and writers.
    OneNumber,
    /// A reader that is late is let in.
    TakesLateReaders,
    /// A reader that is let in later than others makes them look like the last ones.
    LastReaderCounts,
    /// A reader shuts out itself and all beside it, for it counts as a writer.
    ReaderCountsAsWriter,
    /// A reader without a fence is let in.
    TakesNoFence,
}

#[derive(Debug)]
struct BadResource {
    bug: Bug,
    state: Mutex<(SeenFences, Option<Vec<u8>>)>,
}

impl BadResource {
    fn change(&self, fence: Fence, value: Option<&[u8]>) -> Admission {
        let mut state = self.state.lock().expect("unpoisoned");
        let admission = match self.bug {
            Bug::AsksForNoFence => Admission::Admitted,
            _ => state.0.admit(fence),
        };
        if let (true, Some(value)) = (admission.is_admitted(), value) {
            state.1 = Some(value.to_vec());
        }
        admission
    }
}

#[async_trait]
impl FencedResource for BadResource {
    async fn claim(&self, fence: Fence) -> Result<Admission> {
        Ok(self.change(fence, None))
    }

    async fn write(&self, fence: Fence, value: &[u8]) -> Result<Admission> {
        Ok(self.change(fence, Some(value)))
    }

    async fn claim_shared(&self, fence: Fence) -> Result<Admission> {
        let seen = &mut self.state.lock().expect("unpoisoned").0;
        let (mut highest, writer) = (seen.highest(), seen.writer());
        Ok(match self.bug {
            Bug::ForgetsReaders => SeenFences::new(highest, writer).admit_shared(fence),
            Bug::OneNumber => {
                let admission = admit(&mut highest, fence);
                *seen = SeenFences::new(highest, writer);
                admission
            }
            Bug::TakesLateReaders if fence != Fence::NONE => {
                *seen = SeenFences::new(highest.max(fence), writer);
                Admission::Admitted
            }
            Bug::LastReaderCounts => {
                let admission = seen.admit_shared(fence);
                if admission.is_admitted() {
                    *seen = SeenFences::new(fence, writer);
                }
                admission
            }
            Bug::ReaderCountsAsWriter => seen.admit(fence),
            Bug::TakesNoFence if fence == Fence::NONE => Admission::Admitted,
            _ => seen.admit_shared(fence),
        })
    }

    async fn read(&self) -> Result<Option<Vec<u8>>> {
        Ok(self.state.lock().expect("unpoisoned").1.clone())
    }
}

const TTL: Duration = Duration::from_millis(150);

/// Both proofs, on a store in memory that both holders use.
async fn prove(resource: Arc<dyn FencedResource>, with_readers: bool) -> Result<(), BoxError> {
    let store = MemoryStore::new();
    let open = move || {
        let store = Arc::new(store.clone()) as Arc<dyn LockStore>;
        async move { Ok::<_, BoxError>(store) }
    };
    if with_readers {
        a_frozen_writer_is_refused_after_readers(open, resource, "a", TTL).await
    } else {
        a_frozen_holder_is_refused(open, resource, "a", TTL).await
    }
}

async fn says(bug: Bug, with_readers: bool) -> String {
    let resource = Arc::new(BadResource { bug, state: Mutex::default() });
    prove(resource, with_readers).await.expect_err("the resource is wrong").to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_resource_in_memory_is_right() -> Result<(), BoxError> {
    prove(Arc::new(MemoryResource::new()), false).await?;
    prove(Arc::new(MemoryResource::new()), true).await
}

#[tokio::test(flavor = "multi_thread")]
async fn each_mistake_is_found() {
    for (bug, with_readers, said) in [
        (Bug::AsksForNoFence, false, "the late write was not refused"),
        (Bug::ForgetsReaders, true, "the late write was not refused"),
        (Bug::OneNumber, true, "because of another that holds the lock"),
        (Bug::TakesLateReaders, true, "a late reader was not refused"),
        (Bug::LastReaderCounts, true, "the late write was not refused"),
        (Bug::ReaderCountsAsWriter, true, "because of another that holds the lock"),
        (Bug::TakesNoFence, true, "a reader without a fence was admitted"),
    ] {
        let told = says(bug, with_readers).await;
        assert!(told.contains(said), "{bug:?}: {told}");
    }
}
