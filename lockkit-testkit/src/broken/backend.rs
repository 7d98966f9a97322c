//! The simple store, with or without a bug, as a store under test.

use std::sync::Arc;

use async_trait::async_trait;
use lockkit_core::{Clock, LockStore, SystemClock};

use super::{
    Bug,
    store::{SimpleStore, name_of},
    table::Table,
    wire::{Dialer, Machine, Power},
};
use crate::{
    Backend, BoxError, Server,
    faults::{Framing, Proxy},
};

/// The simple store under test: correct without a bug, and known to be bad with one.
#[derive(Debug)]
pub struct SimpleBackend {
    bug: Option<Bug>,
    shared: Private,
}

/// One machine of it.
#[derive(Debug)]
struct Private {
    bug: Option<Bug>,
    machine: Machine,
}

impl SimpleBackend {
    /// Starts it on the present runtime.
    ///
    /// # Errors
    /// When there is no free port.
    pub async fn start(bug: Option<Bug>) -> Result<Self, BoxError> {
        Ok(Self { bug, shared: Private::start(bug).await? })
    }
}

#[async_trait]
impl Backend for SimpleBackend {
    fn name(&self) -> &str {
        "simple"
    }

    async fn open(&self) -> Result<Arc<dyn LockStore>, BoxError> {
        self.shared.open().await
    }

    async fn open_with_clock(&self, clock: Arc<dyn Clock>) -> Result<Option<Arc<dyn LockStore>>, BoxError> {
        Ok(Some(self.shared.client(self.shared.machine.addr, clock).await?))
    }

    async fn private_server(&self) -> Result<Option<Box<dyn Server>>, BoxError> {
        Ok(Some(Box::new(Private::start(self.bug).await?)))
    }
}

impl Private {
    async fn start(bug: Option<Bug>) -> Result<Self, BoxError> {
        Ok(Self { bug, machine: Machine::start(bug).await? })
    }

    async fn client(&self, addr: std::net::SocketAddr, clock: Arc<dyn Clock>) -> Result<Arc<dyn LockStore>, BoxError> {
        let dialer = Dialer::connect(Arc::clone(&self.machine.inside), addr, self.bug).await?;
        Ok(Arc::new(SimpleStore::new(dialer, self.bug, clock)?))
    }
}

#[async_trait]
impl Server for Private {
    async fn open(&self) -> Result<Arc<dyn LockStore>, BoxError> {
        self.client(self.machine.addr, Arc::new(SystemClock)).await
    }

    async fn open_through_proxy(&self) -> Result<(Arc<dyn LockStore>, Proxy), BoxError> {
        let proxy = Proxy::start(self.machine.addr).await?.framing(Framing::Lines);
        Ok((self.client(proxy.addr(), Arc::new(SystemClock)).await?, proxy))
    }

    async fn kill(&self) -> Result<(), BoxError> {
        self.machine.power(Power::Off);
        Ok(())
    }

    async fn restart(&self, keep_data: bool) -> Result<(), BoxError> {
        if !keep_data {
            *self.machine.inside.table() = Table::new(self.bug);
        }
        self.machine.power(Power::On);
        Ok(())
    }

    async fn freeze(&self) -> Result<(), BoxError> {
        self.machine.power(Power::Frozen);
        Ok(())
    }

    async fn thaw(&self) -> Result<(), BoxError> {
        self.machine.power(Power::On);
        Ok(())
    }

    async fn delete(&self, name: &str) -> Result<(), BoxError> {
        match self.machine.inside.table().delete(&name_of(name, self.bug)) {
            true => Ok(()),
            false => Err("there is no such lock".into()),
        }
    }

    async fn forget_caches(&self) -> Result<(), BoxError> {
        Ok(())
    }

    async fn cut_clients(&self) -> Result<(), BoxError> {
        self.machine.cut();
        Ok(())
    }
}
