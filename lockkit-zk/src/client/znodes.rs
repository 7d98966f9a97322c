//! What a session does to nodes.

use std::time::Duration;

use lockkit_core::{Claim, Error, ErrorKind, LossReason, Moment, Result, Token, store::unpoisoned};
use zookeeper_client::{self as zk, CreateMode, MultiWriter, Stat};

use crate::{
    client::session::Session,
    wire::{
        error::{self, Failure, Sent, doubtful, lasting, unless_gone},
        fence::FenceRecord,
        name,
        queue::{self, FENCE, FIRST},
        value::{self, Value},
        window,
    },
};

/// How often the directory's data are written when others write to them at the same time.
const WORD_TRIES: u32 = 16;

impl Session {
    /// Makes a node and all that is missing above it, as containers, which the servers remove when they are empty.
    pub(crate) async fn make_directory(&self, path: &str, bound: Duration) -> Result<()> {
        let options = self.options(CreateMode::Container);
        let made = self.lead(self.now(), bound, Box::pin(self.client.mkdir(path, &options))).await;
        made.map_err(|failure| error::map(&failure, Sent::ReadOnly))
    }

    /// Makes the directory of a lock, if it is not there. On its way it may be removed again.
    pub(crate) async fn make_lock(&self, lock: &str, bound: Duration) -> Result<()> {
        let make = async || {
            let mut all = self.client.new_multi_writer();
            self.add_lock(&mut all, lock, b"")?;
            self.commit(all, bound).await
        };
        let mut made = make().await;
        if made.as_ref().is_err_and(|failure| failure.is(&zk::Error::NoNode)) {
            self.make_directory(self.names.root(), bound).await?;
            made = make().await;
        }
        match made {
            Err(failure) if failure.is(&zk::Error::NodeExists) => Ok(()),
            other => other.map_err(|failure| error::map(&failure, Sent::ReadOnly)),
        }
    }

    /// Adds to a transaction that a lock gets its directory, with these data.
    ///
    /// A node comes and goes in it in the same step: the servers never remove a container in which nobody ever was, and whoever
    /// has it made may go away before anything else is.
    pub(crate) fn add_lock(&self, all: &mut MultiWriter<'_>, lock: &str, data: &[u8]) -> Result<(), zk::Error> {
        let first = format!("{lock}/{FIRST}");
        all.add_create(lock, data, &self.options(CreateMode::Container))?;
        all.add_create(&first, b"", &self.options(CreateMode::Persistent))?;
        all.add_delete(&first, None)
    }

    /// What a node says; `None` if there is none.
    pub(crate) async fn data(&self, path: &str, bound: Duration) -> Result<Option<(Vec<u8>, Stat)>, Failure> {
        unless_gone(self.read(bound, Box::pin(self.client.get_data(path))).await)
    }

    /// The children of a lock; none if it has no directory.
    pub(crate) async fn list(&self, lock: &str, bound: Duration) -> Result<Vec<String>, Failure> {
        Ok(unless_gone(self.read(bound, Box::pin(self.client.list_children(lock))).await)?.unwrap_or_default())
    }

    /// The children of a lock, after all that was asked of it before, on whatever connection, has been decided.
    ///
    /// After a lost connection the next server may not have heard yet of what the last one was asked to do. The leader,
    /// asked to catch up with, has: since the session moved, it refuses what the last one still sends it.
    pub(crate) async fn list_settled(&self, lock: &str, bound: Duration) -> Result<Vec<String>, Failure> {
        let sent = self.now();
        let caught_up = Box::pin(self.client.sync(lock));
        let listed = self.list(lock, bound);
        let (caught_up, listed) = tokio::join!(self.lead(sent, bound, caught_up), listed);
        caught_up.and(listed)
    }

    /// Deletes a node; tells whether it was there.
    pub(crate) async fn delete(&self, path: &str, bound: Duration) -> Result<bool, Failure> {
        let deleted = self.lead(self.now(), bound, Box::pin(self.client.delete(path, None))).await;
        Ok(unless_gone(deleted)?.is_some())
    }

    /// Deletes the node of a claim of another session, and writes down in the directory of the lock that this was no
    /// accident: both or none. Tells whether the node was there.
    pub(crate) async fn revoke(&self, lock: &str, path: &str, token: &Token, bound: Duration) -> Result<bool, Failure> {
        let stat = self.read(bound, Box::pin(self.client.check_stat(path))).await?;
        if stat.is_none_or(|stat| self.owns(stat.ephemeral_owner)) {
            return self.delete(path, bound).await;
        }
        for _ in 0..WORD_TRIES {
            match self.delete_with_a_word(lock, path, token, bound).await {
                Ok(()) => return Ok(true),
                // Another lease of the lock was revoked meanwhile.
                Err(failure) if failure.is(&zk::Error::BadVersion) => {}
                // A client that may delete nodes in the directory need not be allowed to write to it.
                Err(failure) if failure.is(&zk::Error::NoAuth) => break,
                // The node is gone by itself, and the directory may be, too.
                Err(failure) if failure.is_answer() => break,
                Err(failure) => return Err(failure),
            }
        }
        self.delete(path, bound).await
    }

    /// Deletes the claim's node if the directory can say in the same step that it was revoked.
    async fn delete_with_a_word(&self, lock: &str, path: &str, token: &Token, bound: Duration) -> Result<(), Failure> {
        // Those whose leases were revoked before may not have read their words yet. So theirs stay, and what is
        // written is refused if more have come since.
        let (before, stat) = self.read(bound, Box::pin(self.client.get_data(lock))).await?;
        let mut both = self.client.new_multi_writer();
        both.add_set_data(lock, value::revoked(&before, token).as_bytes(), Some(stat.version))?;
        both.add_delete(path, None)?;
        self.commit(both, bound).await
    }

    /// Carries out all that was put together, or nothing of it.
    pub(crate) async fn commit(&self, mut all: MultiWriter<'_>, bound: Duration) -> Result<(), Failure> {
        let sent = self.now();
        let done = all.commit();
        self.lead(sent, bound, Box::pin(async move { done.await.map_err(zk::Error::from) })).await.map(drop)
    }

    /// Whether the claim with this token is among the last of the lock to be revoked.
    pub(crate) async fn is_revoked(&self, lock: &str, token: &Token, bound: Duration) -> Result<bool, Failure> {
        Ok(self.data(lock, bound).await?.is_some_and(|(data, _)| value::is_revoked(&data, token)))
    }

    /// Why a claim does not hold its lock.
    pub(crate) async fn why_not(&self, claim: &Claim, bound: Duration) -> Result<LossReason, Failure> {
        let lock = self.names.lock(&claim.key);
        let (children, revoked) = tokio::join!(self.list(&lock, bound), self.is_revoked(&lock, &claim.token, bound));
        let (children, mine) = (children?, name::protection(&claim.token));
        Ok(match queue::holders(&children) {
            _ if revoked? => LossReason::Revoked,
            // A node of its own may have come meanwhile, or be about to go.
            (holders, _) if holders.iter().all(|holder| holder.starts_with(&mine)) && !window::is_kept(&children) => {
                LossReason::Gone
            }
            _ => LossReason::Taken,
        })
    }

    /// Reads the fence record of a lock with these children, and what the servers say of its node, if it has one.
    pub(crate) async fn read_fence_record(
        &self,
        lock: &str,
        children: &[String],
        bound: Duration,
    ) -> Result<(FenceRecord, Option<Stat>)> {
        match queue::has_record(children) {
            true => self.find_fence_record(lock, bound).await,
            false => Ok((FenceRecord::NONE, None)),
        }
    }

    /// The same, where the children are not known, or were listed too long ago. No node is no record.
    pub(crate) async fn find_fence_record(&self, lock: &str, bound: Duration) -> Result<(FenceRecord, Option<Stat>)> {
        let path = format!("{lock}/{}", FENCE);
        let read = unless_gone(self.read(bound, Box::pin(self.client.get_data(&path))).await);
        let Some((data, stat)) = read.map_err(|failure| doubtful(&failure))? else {
            return Ok((FenceRecord::NONE, None));
        };
        let odd = || {
            Error::new(
                ErrorKind::Unexpected,
                "the fence record of the lock has another form: others wrote to it, or a newer lockkit",
            )
            .unknown_effect()
        };
        Ok((FenceRecord::parse(&data).ok_or_else(odd)?, Some(stat)))
    }

    /// Writes the fence record of a lock, of which `version` is known, together with the data of the holder's node: both
    /// or none. It is `false` if another holder wrote it: the lock has other holders, or is not ours any more, or will not be for
    /// long.
    pub(crate) async fn write_fence_record(
        &self,
        lock: &str,
        record: FenceRecord,
        version: Option<i32>,
        own: (&str, Value),
        bound: Duration,
    ) -> Result<bool> {
        // A claim whose node is made before the record, and which hears of it later, must not take itself for alone.
        unpoisoned(&self.uncontended).forget(lock);
        let mut both = self.client.new_multi_writer();
        self.add_fence_record(&mut both, lock, record, version)
            .and_then(|()| both.add_set_data(&format!("{lock}/{}", own.0), own.1.text().as_bytes(), None))
            .map_err(|e| lasting(&e.into()))?;
        match self.commit(both, bound).await {
            Ok(()) => Ok(true),
            Err(failure) if failure.is_answer() => Ok(false),
            Err(failure) => Err(lasting(&failure)),
        }
    }

    /// Puts into a transaction what the fence record of a lock is to be, of which `version` is known.
    pub(crate) fn add_fence_record(
        &self,
        all: &mut MultiWriter<'_>,
        lock: &str,
        record: FenceRecord,
        version: Option<i32>,
    ) -> Result<(), zk::Error> {
        let (path, text) = (format!("{lock}/{FENCE}"), record.text());
        match version {
            Some(_) => all.add_set_data(&path, text.as_bytes(), version),
            None => all.add_create(&path, text.as_bytes(), &self.options(CreateMode::Persistent)),
        }
    }

    /// Deletes what this session has left in queues without knowing: a request that was given up on, and whose undoing
    /// was thought to be complete, may have been carried out all the same. In a session that lives on it would block its
    /// lock for ever. It is `false` if the time was over before all were deleted. Each call deletes one at least.
    pub(crate) async fn sweep(&self, until: Moment, bound: Duration) -> Result<bool, Failure> {
        let own = Box::pin(self.client.list_ephemerals(self.names.root()));
        let mut swept = Ok(true);
        for path in self.read(bound, own).await? {
            let token = path.rsplit_once('/').and_then(|(_, node)| name::token(node));
            // A claim is known before its node is asked for, and until its node is gone. It may have a second one, from a
            // creation that got no answer and was carried out after it had been asked for again.
            if token.is_some_and(|token| self.is_stray(&token, &path)) {
                match self.delete(&path, bound).await {
                    Ok(_) if self.now() >= until => return Ok(false),
                    Ok(_) => {}
                    // It may not be deleted, which says nothing of the others.
                    Err(failure) if failure.is(&zk::Error::NoAuth) => swept = swept.and(Err(failure)),
                    Err(failure) => return Err(failure),
                }
            }
        }
        swept
    }
}

/// Another holder wrote the fence record of a lock that one holds alone.
pub(crate) fn overtaken() -> Error {
    Error::new(ErrorKind::Unavailable, "the lock changed hands while its fence was settled").unknown_effect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use lockkit_core::{Alarm, Fence, HolderInfo, LockKey, LockStore as _, Release};
    use lockkit_testkit::servers::ZooKeeperServer;
    use zookeeper_client::{Acl, Acls, AuthId, Permission};

    use super::*;
    use crate::{
        ZkConfig, ZkStore,
        client::{
            claims::{Claimed, Grant, Node, Stage},
            sessions::Sessions,
        },
        testing::{claim, granted, request, server},
    };

    const BOUND: Duration = Duration::from_secs(5);

    async fn session(server: &ZooKeeperServer) -> Arc<Session> {
        let config = ZkConfig::new([server.addr().to_string()]).session(Duration::from_secs(1));
        let names = config.check().expect("fine");
        Sessions::new(config, names, Alarm::new()).session().await.expect("a session")
    }

    async fn store(server: &ZooKeeperServer) -> (ZkStore, Arc<Session>) {
        let config = ZkConfig::new([server.addr().to_string()]).session(Duration::from_secs(6));
        let store = ZkStore::connect(config).await.expect("connect");
        let session = store.sessions().present().expect("a session");
        (store, session)
    }

    async fn swept(session: &Session) -> Result<bool, Failure> {
        session.sweep(session.now() + BOUND, BOUND).await
    }

    /// Makes a node of the claim.
    async fn make_node(session: &Session, claim: &Claim) -> Node {
        let lock = session.names.lock(&claim.key);
        session.make_directory(&lock, BOUND).await.expect("the directory");
        let prefix = format!("{}{}", name::protection(&claim.token), name::LOCK);
        let options = session.options(CreateMode::EphemeralSequential);
        let made = session.client.create(&format!("{lock}/{prefix}"), b"", &options).await;
        let (stat, sequence) = made.expect("create");
        Node { name: format!("{prefix}{sequence}"), czxid: stat.czxid, sequence: sequence.into_i64() }
    }

    fn know(session: &Session, claim: &Claim, stage: Stage) {
        let lock = session.names.lock(&claim.key);
        session.claims().insert(claim.token, Claimed { stage, ..Claimed::asked(lock, 1) });
    }

    fn grant() -> Grant {
        Grant { fence: Fence::new(1), span: 1, depth: 1, explicit: false, holder: HolderInfo::new("test") }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn what_was_left_behind_is_swept_up() {
        let server = server().await;
        let session = session(&server).await;
        let [unknown, asked, queued, held, gone] = [(); 5].map(|()| claim());
        know(&session, &asked, Stage::Asked);
        for claim in [&unknown, &queued, &gone] {
            make_node(&session, claim).await;
        }
        let of_asked = make_node(&session, &asked).await;
        let of_queued = make_node(&session, &queued).await;
        let of_held = make_node(&session, &held).await;
        make_node(&session, &held).await;
        know(&session, &queued, Stage::Queued(of_queued.clone()));
        know(&session, &held, Stage::Held(of_held.clone(), grant()));
        know(&session, &gone, Stage::Gone);
        session.is_in_doubt();
        let left = left_of(&session, &asked, 3).await;
        assert_eq!(left, [of_asked, of_queued, of_held].map(|node| node.name), "these are in use");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_sweep_ends_in_time_and_goes_on_where_it_was() {
        let server = server().await;
        let session = session(&server).await;
        let left = claim();
        for _ in 0..3 {
            make_node(&session, &left).await;
        }
        for before in [3, 2, 1] {
            let nodes = session.list(&session.names.lock(&left.key), BOUND).await.expect("list");
            assert_eq!(nodes.len(), before);
            assert!(!session.sweep(session.now(), BOUND).await.expect("sweep"), "there may be more");
        }
        assert!(session.sweep(session.now(), BOUND).await.expect("sweep"), "there is nothing left");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn what_may_not_be_deleted_keeps_nothing_else_from_being_swept_up() {
        let server = server().await;
        let session = session(&server).await;
        let of =
            |name| [1, 2, 3, 4].map(|n| Claim { key: LockKey::new(format!("{name}-{n}")).expect("name"), ..claim() });
        let (open, closed) = (of("open"), of("closed"));
        session.make_directory(session.names.root(), BOUND).await.expect("the root");
        let acl = [Acl::new(Permission::READ | Permission::CREATE, AuthId::anyone())];
        for claim in &closed {
            let options = CreateMode::Container.with_acls(Acls::new(&acl));
            session.client.create(&session.names.lock(&claim.key), b"", &options).await.expect("the directory");
        }
        for claim in open.iter().chain(&closed) {
            make_node(&session, claim).await;
        }
        let failure = swept(&session).await.expect_err("four may not be deleted");
        assert!(failure.is(&zk::Error::NoAuth), "{failure:?}");
        for claim in &open {
            let left = session.list(&session.names.lock(&claim.key), BOUND).await.expect("list");
            assert!(left.is_empty(), "{left:?}");
        }
    }

    /// A creation without an answer was carried out, in an earlier session or in this one, and so was the next.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn what_a_claim_left_behind_is_not_in_its_own_way() {
        let server = server().await;
        let ((store, session), (_other, earlier)) = (store(&server).await, store(&server).await);
        for first in [&earlier, &session] {
            let again = claim();
            know(&session, &again, Stage::Asked);
            make_node(first, &again).await;
            make_node(&session, &again).await;
            granted(store.acquire(&request(&again, Duration::ZERO)).await);
            let left = session.list(&session.names.lock(&again.key), BOUND).await.expect("list");
            assert_eq!(left.len(), 1, "{left:?}");
            let release = store.release(&again).await.expect("release");
            assert!(matches!(release, Release::Released { .. }), "{release:?}");
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_node_that_comes_after_its_release_is_swept_up() {
        let server = server().await;
        let (store, session) = store(&server).await;
        let released = claim();
        know(&session, &released, Stage::Asked);
        let release = store.release(&released).await.expect("release");
        assert_eq!(release, Release::NotHeld(LossReason::Gone));
        make_node(&session, &released).await;
        assert!(left_of(&session, &released, 0).await.is_empty());
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_node_that_comes_after_another_of_its_claim_is_swept_up() {
        let server = server().await;
        let (store, session) = store(&server).await;
        let again = claim();
        know(&session, &again, Stage::Asked);
        granted(store.acquire(&request(&again, Duration::ZERO)).await);
        let own = session.list(&session.names.lock(&again.key), BOUND).await.expect("list");
        make_node(&session, &again).await;
        assert_eq!(left_of(&session, &again, 1).await, own);
    }

    /// The nodes in the queue, in its order, when only so many are left and nothing else is swept up.
    async fn left_of(session: &Session, claim: &Claim, count: usize) -> Vec<String> {
        for _ in 0..200 {
            tokio::time::sleep(Duration::from_millis(50)).await;
            let left = session.list(&session.names.lock(&claim.key), BOUND).await.expect("list");
            if left.len() <= count {
                swept(session).await.expect("sweep");
                let mut left = session.list(&session.names.lock(&claim.key), BOUND).await.expect("list");
                left.sort_by_key(|node| queue::sequence(node));
                return left;
            }
        }
        panic!("it was not swept up");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn what_a_session_held_is_not_swept_up_when_it_is_over() {
        let server = server().await;
        let (session, held) = (session(&server).await, claim());
        let node = make_node(&session, &held).await;
        know(&session, &held, Stage::Held(node.clone(), grant()));
        session.end();
        swept(&session).await.expect("the connection is as it was");
        let left = session.list(&session.names.lock(&held.key), BOUND).await.expect("list");
        assert_eq!(left, [node.name], "its holder may believe in it still");
    }
}
