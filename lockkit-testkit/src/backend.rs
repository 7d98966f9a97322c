//! What the suite needs to know of a store under test.

use std::{fmt, sync::Arc, time::Duration};

use async_trait::async_trait;
use lockkit_core::{Clock, LockStore};

use crate::{
    faults::Proxy,
    servers::{Keep, Process},
};

/// Any error; a backend reports what it likes.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A store under test. All clients that it opens see the same locks.
#[async_trait]
pub trait Backend: fmt::Debug + Send + Sync + 'static {
    /// The name in front of the cases, such as `redis`.
    fn name(&self) -> &str;

    /// Opens a new client that shares nothing in this process with the others.
    ///
    /// # Errors
    /// When the store can't be reached.
    async fn open(&self) -> Result<Arc<dyn LockStore>, BoxError>;

    /// Opens a new client whose leases are measured by `clock`, for cases about suspended processes. `None` if the
    /// store can't be given a clock.
    ///
    /// # Errors
    /// When the store can't be reached.
    async fn open_with_clock(&self, clock: Arc<dyn Clock>) -> Result<Option<Arc<dyn LockStore>>, BoxError>;

    /// Starts a private server for one case that will harm it. `None`, as by default, leaves those cases out.
    ///
    /// # Errors
    /// When the server does not come up.
    async fn private_server(&self) -> Result<Option<Box<dyn Server>>, BoxError> {
        Ok(None)
    }
}

/// A private server that a case may harm. It is stopped when dropped.
///
/// One that runs in processes of its own names them, and so has [`kill`](Self::kill), [`restart`](Self::restart),
/// [`freeze`](Self::freeze) and [`thaw`](Self::thaw).
#[async_trait]
pub trait Server: fmt::Debug + Send + Sync {
    /// Opens a client.
    ///
    /// # Errors
    /// When the store can't be reached.
    async fn open(&self) -> Result<Arc<dyn LockStore>, BoxError>;

    /// Opens a client whose traffic runs through a fault proxy of its own.
    ///
    /// # Errors
    /// When the store can't be reached.
    async fn open_through_proxy(&self) -> Result<(Arc<dyn LockStore>, Proxy), BoxError>;

    /// The same, with a client that waits no longer than this for an answer, if it can be told so. It is for cases in which
    /// many answers are lost, which would take long otherwise.
    ///
    /// # Errors
    /// When the store can't be reached.
    async fn open_impatient(&self, timeout: Duration) -> Result<(Arc<dyn LockStore>, Proxy), BoxError> {
        let _ = timeout;
        self.open_through_proxy().await
    }

    /// The server's processes. What is done to the server is done to each of them in turn.
    ///
    /// # Errors
    /// When the server does not come up. By default always: the server has no processes.
    async fn processes(&self) -> Result<Vec<&Process>, BoxError> {
        Err("the server has no processes".into())
    }

    /// Kills the server at once.
    ///
    /// # Errors
    /// When there is nothing to kill.
    async fn kill(&self) -> Result<(), BoxError> {
        for process in self.processes().await? {
            process.kill().await?;
        }
        Ok(())
    }

    /// Starts the killed server again on the same port, with its data or without.
    ///
    /// # Errors
    /// When it does not come up.
    async fn restart(&self, keep_data: bool) -> Result<(), BoxError> {
        for process in self.processes().await? {
            process.restart(if keep_data { Keep::Data } else { Keep::Nothing }).await?;
        }
        Ok(())
    }

    /// Stops the server from running until it is thawed. Its sockets stay open.
    ///
    /// # Errors
    /// When there is nothing to freeze.
    async fn freeze(&self) -> Result<(), BoxError> {
        for process in self.processes().await? {
            process.freeze().await?;
        }
        Ok(())
    }

    /// Lets the server run again.
    ///
    /// # Errors
    /// When there is nothing to thaw.
    async fn thaw(&self) -> Result<(), BoxError> {
        for process in self.processes().await? {
            process.thaw()?;
        }
        Ok(())
    }

    /// Deletes a lock behind the clients' back, as an administrator would.
    ///
    /// # Errors
    /// When the server refuses.
    async fn delete(&self, name: &str) -> Result<(), BoxError>;

    /// Makes the server forget what it may forget without losing data, such as cached scripts.
    ///
    /// # Errors
    /// When the server refuses.
    async fn forget_caches(&self) -> Result<(), BoxError>;

    /// Cuts the connections of all clients.
    ///
    /// # Errors
    /// When the server refuses.
    async fn cut_clients(&self) -> Result<(), BoxError>;
}
