//! Replacing the directory of a lock by a new one before its sequence numbers run out.

use std::time::Duration;

use lockkit_core::{Attempt, Result};
use zookeeper_client::{self as zk, CreateMode};

use crate::{
    client::claims::{Node, Stage},
    store::attempt::{Acquisition, undone},
    wire::{
        error::{Failure, doubtful, unless_gone},
        queue::FENCE,
    },
};

/// When to ask again for a lock whose directory has to become empty first.
const PAUSE: Duration = Duration::from_millis(20);

/// What a directory has that has to last, and the versions of the nodes that have it.
struct Kept {
    /// What it says of leases that were revoked.
    words: Vec<u8>,
    version: i32,
    /// The fence record of the lock.
    record: Option<(Vec<u8>, i32)>,
}

impl Acquisition<'_> {
    /// Replaces the directory of the lock by a new one, whose sequence numbers start over, if nobody is in it but `own`, a
    /// node of the claim. What it says of revoked leases and its fence record move along. The node is gone then, or given up;
    /// the answer is that to the caller, if the directory is not a new one.
    ///
    /// The node goes in the same transaction. Until then nobody else can make the directory anew. In a new one the versions of
    /// nodes start over, and what was read before would be taken for what was written since: fences would go back.
    pub(crate) async fn replace_directory(&self, own: &Node) -> Result<Option<Attempt>> {
        let replaced = match self.kept().await {
            Ok(kept) => self.replace(own, &kept).await,
            Err(failure) => Err(failure),
        };
        match replaced {
            Ok(()) if self.session.claimed(self.token).is_some() => Ok(None),
            // It was released while nobody polled this, and is not asked for again.
            Ok(()) => self.vanished().map(Some),
            Err(failure) if failure.is_answer() => {
                self.undo(own).await?;
                // Somebody deleted the node; or else is in the directory, or was and has left something.
                if failure.is(&zk::Error::NoNode) { self.vanished() } else { Ok(undone(None, PAUSE)) }.map(Some)
            }
            Err(failure) => Err(doubtful(&failure)),
        }
    }

    async fn kept(&self) -> Result<Kept, Failure> {
        let (client, record_path) = (&self.session.client, format!("{}/{FENCE}", self.lock));
        // Both are on their way before any is awaited.
        let (words, record) = (Box::pin(client.get_data(&self.lock)), Box::pin(client.get_data(&record_path)));
        let (words, record) = tokio::join!(self.session.read(self.bound, words), self.session.read(self.bound, record));
        let (words, stat) = words?;
        let record = unless_gone(record)?.map(|(data, stat)| (data, stat.version));
        Ok(Kept { words, version: stat.version, record })
    }

    async fn replace(&self, own: &Node, kept: &Kept) -> Result<(), Failure> {
        let (session, record_path) = (self.session, format!("{}/{FENCE}", self.lock));
        // From here on it may have a node or not.
        session.update(self.token, |claimed| claimed.stage = Stage::Asked);
        let mut all = session.client.new_multi_writer();
        all.add_delete(&format!("{}/{}", self.lock, own.name), None)?;
        if let Some((_, version)) = &kept.record {
            all.add_delete(&record_path, Some(*version))?;
        }
        all.add_delete(&self.lock, Some(kept.version))?;
        session.add_lock(&mut all, &self.lock, &kept.words)?;
        if let Some((data, _)) = &kept.record {
            all.add_create(&record_path, data, &session.options(CreateMode::Persistent))?;
        }
        session.commit(all, self.bound).await
    }
}

#[cfg(test)]
mod tests {
    use std::{
        net::SocketAddr,
        pin::pin,
        sync::{
            Arc,
            atomic::{AtomicBool, Ordering},
        },
        time::{Duration, Instant},
    };

    use lockkit_core::{
        AcquireRequest, Attempt, Fence, FenceRequest, Hold, LockStore, Locker, LossReason, Release, Renewal, Renewed,
    };
    use lockkit_testkit::faults::{Direction, Proxy, poll_until};
    use tokio::{runtime::Handle, task::block_in_place};

    use crate::{
        ZkConfig, ZkStore,
        testing::{claim, granted, request, server},
        wire::queue::{FENCE, LAST_SEQUENCE, sequence},
    };

    /// A request for a new claim whose fence is to lie above this.
    fn above(floor: u64) -> AcquireRequest {
        let fence = FenceRequest { floor: Fence::new(floor), ..FenceRequest::default() };
        AcquireRequest { fence, ..request(&claim(), Duration::ZERO) }
    }

    /// In this build the numbers end at 40, so the directory is made anew again and again, once with a fence record.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_directory_whose_numbers_run_out_is_made_anew() {
        let server = server().await;
        let config = ZkConfig::new([server.addr().to_string()]);
        let store = ZkStore::connect(config.clone()).await.expect("connect");
        let mut last = Fence::NONE;
        for round in 0..130 {
            let request = above(if round == 70 { 1 << 52 } else { 0 });
            let hold = granted(store.acquire(&request).await);
            assert!(hold.fence > last, "{} came after {last}", hold.fence);
            last = hold.fence;
            store.release(&request.claim).await.expect("release");
        }
        let (mut crowd, highest) = (Vec::new(), Arc::new(std::sync::Mutex::new(last)));
        for _ in 0..3 {
            let locker = Locker::builder(ZkStore::connect(config.clone()).await.expect("connect")).build();
            let highest = Arc::clone(&highest);
            crowd.push(tokio::spawn(async move {
                for _ in 0..60 {
                    let guard = locker.lock("a").acquire().await.expect("acquire");
                    let before = std::mem::replace(&mut *highest.lock().expect("unpoisoned"), guard.fence());
                    assert!(guard.fence() > before, "{} came after {before}", guard.fence());
                    _ = guard.release().await.expect("release");
                }
            }));
        }
        for member in crowd {
            member.await.expect("no panic");
        }
    }

    /// The holder looks late, in whatever directory the lock has by then.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_new_directory_says_who_was_revoked_in_the_former_one() {
        let server = server().await;
        let config = ZkConfig::new([server.addr().to_string()]);
        let store = ZkStore::connect(config.clone()).await.expect("connect");
        let other = ZkStore::connect(config).await.expect("connect");
        for floor in [0, 1 << 52] {
            let broken = above(floor);
            granted(store.acquire(&broken).await);
            assert!(matches!(other.release(&broken.claim).await, Ok(Release::Released { .. })), "it is held");
            for _ in 0..=LAST_SEQUENCE {
                let request = above(0);
                granted(other.acquire(&request).await);
                other.release(&request.claim).await.expect("release");
            }
            let renewed = store.renew(&renewal(&broken, None)).await.remove(0).expect("renew");
            assert!(matches!(renewed, Renewed::Lost(LossReason::Revoked)), "{floor}: {renewed:?}");
        }
    }

    async fn take(store: &ZkStore, request: &AcquireRequest) -> Hold {
        loop {
            match store.acquire(request).await.expect("ask") {
                Attempt::Granted(hold) => return hold,
                Attempt::Contended(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
    }

    async fn connect(address: SocketAddr) -> Arc<ZkStore> {
        Arc::new(ZkStore::connect(ZkConfig::new([address.to_string()])).await.expect("connect"))
    }

    /// Takes the lock again and again, until a node has the last number that is safe. The lock has a fence record by then.
    async fn take_the_last_number(store: &ZkStore) -> AcquireRequest {
        let (session, mut floor) = (store.sessions().present().expect("a session"), 1 << 50);
        loop {
            let request = above(std::mem::take(&mut floor));
            take(store, &request).await;
            let lock = session.names.lock(&request.claim.key);
            let nodes = session.list(&lock, Duration::from_secs(2)).await.expect("list");
            if nodes.iter().filter_map(|node| sequence(node)).any(|number| number == LAST_SEQUENCE - 1) {
                return request;
            }
            store.release(&request.claim).await.expect("release");
        }
    }

    /// Lets something happen when the client behind the proxy has read what the directory has, and does not know it yet.
    fn meanwhile(proxy: &Proxy, happens: impl Future<Output = ()> + Send + 'static) -> Arc<AtomicBool> {
        let (happened, mut happens) = (Arc::new(AtomicBool::new(false)), Some(Box::pin(happens)));
        let has_happened = Arc::clone(&happened);
        proxy.rewrite_replies(move |replies| {
            // The fence record is read last.
            if replies.windows(7).any(|text| text == b"offset:")
                && let Some(happens) = happens.take()
            {
                block_in_place(|| Handle::current().block_on(happens));
                has_happened.store(true, Ordering::SeqCst);
            }
            replies
        });
        happened
    }

    fn renewal(request: &AcquireRequest, fence_floor: Option<Fence>) -> [Renewal; 1] {
        [Renewal { claim: request.claim.clone(), ttl: request.ttl, depth: 1, fence_floor, holder: None }]
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_fence_that_the_last_holder_raised_is_known_in_the_new_directory() {
        const RAISED: Fence = Fence::new(1 << 55);
        let server = server().await;
        let proxy = Proxy::start(server.addr()).await.expect("proxy");
        let (slow, last, next) =
            (connect(proxy.addr()).await, connect(server.addr()).await, connect(server.addr()).await);
        let (holder, other) = (take_the_last_number(&last).await, Arc::clone(&next));
        let happened = meanwhile(&proxy, async move {
            let renewed = last.renew(&renewal(&holder, Some(RAISED))).await.remove(0);
            assert!(matches!(renewed, Ok(Renewed::Held(_))), "{renewed:?}");
            last.release(&holder.claim).await.expect("release");
            // It makes the directory anew, if it can.
            let request = above(0);
            if let Attempt::Granted(hold) = other.acquire(&request).await.expect("ask") {
                assert!(hold.fence > RAISED, "{}", hold.fence);
            }
            other.release(&request.claim).await.expect("release");
        });
        let first = above(0);
        if let Attempt::Granted(hold) = slow.acquire(&first).await.expect("ask") {
            assert!(hold.fence > RAISED, "{} was granted after {RAISED}", hold.fence);
        }
        assert!(happened.load(Ordering::SeqCst), "it did not read the record");
        slow.release(&first.claim).await.expect("release");
        assert!(take(&next, &above(0)).await.fence > RAISED, "the fence went back");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn that_the_last_holder_was_revoked_is_known_in_the_new_directory() {
        let server = server().await;
        let proxy = Proxy::start(server.addr()).await.expect("proxy");
        let (slow, last, next) =
            (connect(proxy.addr()).await, connect(server.addr()).await, connect(server.addr()).await);
        let holder = take_the_last_number(&last).await;
        let (broken, other) = (holder.claim.clone(), Arc::clone(&next));
        let happened = meanwhile(&proxy, async move {
            let ended = other.release(&broken).await;
            assert!(matches!(ended, Ok(Release::Released { .. })), "{ended:?}");
        });
        take(&slow, &above(0)).await;
        assert!(happened.load(Ordering::SeqCst), "it did not read the record");
        let renewed = last.renew(&renewal(&holder, None)).await.remove(0);
        assert!(matches!(renewed, Ok(Renewed::Lost(LossReason::Revoked))), "{renewed:?}");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_claim_that_is_released_meanwhile_gets_no_place_in_the_new_directory() {
        let server = server().await;
        let store = connect(server.addr()).await;
        let session = store.sessions().present().expect("a session");
        for polls in 1..=8 {
            let last = take_the_last_number(&store).await;
            store.release(&last.claim).await.expect("release");
            let request = above(0);
            let mut asking = pin!(store.acquire(&request));
            let answer = poll_until(asking.as_mut(), polls, || {}).await;
            store.release(&request.claim).await.expect("release");
            if answer.is_none() {
                let answer = asking.await;
                assert!(!matches!(answer, Ok(Attempt::Granted(_))), "released after {polls} polls: {answer:?}");
            }
            let left =
                session.list(&session.names.lock(&request.claim.key), Duration::from_secs(2)).await.expect("list");
            assert!(left.iter().all(|node| node == FENCE), "released after {polls} polls, {left:?} is left");
        }
    }

    /// The release has seen the node of the former directory when the claim gets one in the new one. Whoever asked for that may go
    /// away, too.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_claim_whose_release_is_under_way_keeps_no_place_in_the_new_directory() {
        let server = server().await;
        let proxy = Proxy::start(server.addr()).await.expect("proxy");
        // A request may take a quarter of it, and the server of a busy machine does.
        let config = ZkConfig::new([proxy.addr().to_string()]).session(Duration::from_secs(6));
        let store = ZkStore::connect(config).await.expect("connect");
        let session = store.sessions().present().expect("a session");
        for (polls, more, dropped) in (2..=7).flat_map(|p| (1..=5).flat_map(move |m| [(p, m, false), (p, m, true)])) {
            let place = format!("released after {polls} polls, which ends {more} polls later, dropped then: {dropped}");
            let last = take_the_last_number(&store).await;
            store.release(&last.claim).await.expect("release");
            let request = AcquireRequest { wait: Duration::from_secs(5), ..above(0) };
            let mut asking = Box::pin(store.acquire(&request));
            if poll_until(asking.as_mut(), polls, || {}).await.is_some() {
                store.release(&request.claim).await.expect("release");
                continue;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
            // The driver has a thread of its own, and could have the answer while this one stands still.
            proxy.hold(Direction::ToClient);
            let mut releasing = pin!(store.release(&request.claim));
            assert!(poll_until(releasing.as_mut(), 1, || {}).await.is_none(), "{place}: it asks the server");
            proxy.release(Direction::ToClient);
            let mut answer = poll_until(asking.as_mut(), more, || {}).await;
            releasing.await.expect("release");
            if answer.is_none() && !dropped {
                answer = Some(asking.await);
            } else {
                drop(asking);
            }
            assert!(!matches!(answer, Some(Ok(Attempt::Granted(_)))), "{place}: {answer:?}");
            let (lock, start) = (session.names.lock(&request.claim.key), Instant::now());
            while session.list(&lock, Duration::from_secs(2)).await.expect("list").iter().any(|node| node != FENCE) {
                assert!(start.elapsed() < Duration::from_secs(10), "{place}: its node is left");
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
    }
}
