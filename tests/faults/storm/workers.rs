//! Worker processes, seen from the test that torments them.

use std::{io, path::PathBuf, process::Stdio, sync::Mutex, time::Duration};

use lockkit::store::unpoisoned;
use tokio::{
    io::AsyncWriteExt,
    process::{Child, Command},
    time::timeout,
};

use super::Orders;
use lockkit_testkit::{BoxError, faults::process};

/// How long a worker may take to end when it was told to.
const ENDS_WITHIN: Duration = Duration::from_secs(20);

/// The worker processes of a test. They are killed when this is dropped.
#[derive(Debug)]
pub(crate) struct Workers {
    variable: &'static str,
    members: Mutex<Vec<Member>>,
    histories: Mutex<Vec<PathBuf>>,
}

/// One worker process.
#[derive(Debug)]
pub(crate) struct Member {
    /// What it was told to do.
    pub(crate) orders: Orders,
    child: Child,
}

impl Workers {
    /// No workers yet. A worker is this very program, started with its [`Orders`], as JSON, in the environment `variable`.
    #[must_use]
    pub(crate) fn new(variable: &'static str) -> Self {
        Self { variable, members: Mutex::default(), histories: Mutex::default() }
    }

    /// Starts a worker.
    ///
    /// # Errors
    /// If no process can be started.
    pub(crate) fn start(&self, orders: Orders) -> io::Result<()> {
        let mut command = Command::new(std::env::current_exe()?);
        command.env(self.variable, serde_json::to_string(&orders)?);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::inherit()).kill_on_drop(true);
        // Of its own, so that a frozen one does not outlive a test that is killed: the kernel ends a group of stopped
        // processes that nobody is left to continue.
        command.process_group(0);
        let child = command.spawn()?;
        unpoisoned(&self.histories).push(orders.history.clone());
        unpoisoned(&self.members).push(Member { orders, child });
        Ok(())
    }

    /// The names of those who work.
    #[must_use]
    pub(crate) fn names(&self) -> Vec<String> {
        unpoisoned(&self.members).iter().map(|member| member.orders.name.clone()).collect()
    }

    /// Kills a worker as `kill -9` does, and returns what it had been told to do.
    ///
    /// # Errors
    /// If there is no such worker.
    pub(crate) async fn kill(&self, name: &str) -> io::Result<Orders> {
        let place = |members: &Vec<Member>| members.iter().position(|member| member.orders.name == name);
        let member = {
            let mut members = unpoisoned(&self.members);
            place(&members).map(|place| members.remove(place))
        };
        let mut member = member.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, name.to_owned()))?;
        member.child.kill().await?;
        Ok(member.orders)
    }

    /// Freezes a worker, and returns when it stands still.
    ///
    /// # Errors
    /// If there is no such worker.
    pub(crate) async fn freeze(&self, name: &str) -> io::Result<()> {
        process::freeze(self.pid(name)?).await
    }

    /// Lets a frozen worker go on.
    ///
    /// # Errors
    /// If there is no such worker.
    pub(crate) fn thaw(&self, name: &str) -> io::Result<()> {
        process::thaw(self.pid(name)?)
    }

    /// Tells all to stop, and waits until they have. Returns the files of all histories, also of those who were killed.
    ///
    /// # Errors
    /// If one of them fails, or does not stop.
    pub(crate) async fn stop(&self) -> Result<Vec<PathBuf>, BoxError> {
        let mut members = std::mem::take(&mut *unpoisoned(&self.members));
        for member in &mut members {
            if let Some(mut input) = member.child.stdin.take() {
                // One that has ended already is asked below how.
                _ = input.write_all(b"stop\n").await;
                // Kept open: its end would end the process at once.
                member.child.stdin = Some(input);
            }
        }
        for member in &mut members {
            // Not `wait`, which closes the input first.
            let input = member.child.stdin.take();
            let ended = timeout(ENDS_WITHIN, member.child.wait()).await;
            drop(input);
            let name = &member.orders.name;
            let status = ended.map_err(|_| format!("{name} does not stop"))??;
            if !status.success() {
                return Err(format!("{name} failed: {status}").into());
            }
        }
        Ok(unpoisoned(&self.histories).iter().filter(|path| path.exists()).cloned().collect())
    }

    fn pid(&self, name: &str) -> io::Result<u32> {
        let pid = unpoisoned(&self.members).iter().find(|member| member.orders.name == name).and_then(|m| m.child.id());
        pid.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, name.to_owned()))
    }
}
