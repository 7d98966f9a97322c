//! The records of the simple store.

use async_trait::async_trait;
use lockkit_core::{
    LockKey, Result,
    store::{Record, Records, Swap},
};

use super::{Bug, store::SimpleStore};

#[async_trait]
impl Records for SimpleStore {
    async fn read(&self, name: &LockKey) -> Result<Option<Record>> {
        // BUG: what was read once is taken for what it is now.
        if self.has(Bug::RecordsRemembered)
            && let Some(text) = self.remembered.lock().await.get(name)
        {
            return Ok(Some(text.clone()));
        }
        let found = self.ask_machine(name, |table, name| table.text(name)).await?;
        if let Some(text) = &found {
            self.remembered.lock().await.insert(name.clone(), text.clone());
        }
        Ok(found)
    }

    async fn compare_and_set(&self, name: &LockKey, seen: Option<&Record>, new: Option<&Record>) -> Result<Swap> {
        let (seen, new) = (seen.cloned(), new.cloned());
        if self.has(Bug::RecordsReadThenWritten) {
            // BUG: by the time of the second step it may have changed.
            let found = self.ask_machine(name, |table, name| table.text(name)).await?;
            if let Some(answer) = Swap::of(found.as_ref(), seen.as_ref(), new.as_ref()) {
                return Ok(answer);
            }
            self.ask_machine(name, move |table, name| table.write(name, new.as_ref())).await?;
            return Ok(Swap::Done);
        }
        self.ask_machine(name, move |table, name| table.swap(name, seen.as_ref(), new.as_ref())).await
    }
}
