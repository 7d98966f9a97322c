//! Records: rows of the same table whose names no lock can have. The text stands where that of a holder does; a row with an
//! empty one, or none, is no record.

use async_trait::async_trait;
use lockkit_core::{
    Error, ErrorKind, LockKey, Result,
    store::{Record, Records, Swap},
};

use crate::{
    client::{
        connection::{Bound, Connection},
        pool::ConnectionClass,
    },
    store::MySqlStore,
    wire::{
        error::{self, Sent},
        name::record_to_column,
        row::{column, only_row},
        terms,
    },
};

/// How often a record is tried to be changed that is another by then.
const TRIES: u32 = 20;

#[async_trait]
impl Records for MySqlStore {
    async fn read(&self, name: &LockKey) -> Result<Option<Record>> {
        let read = async {
            let name = record_to_column(name)?;
            let mut connection = self.pool.connection(ConnectionClass::Common, Bound::new(self.timeout)).await?;
            Ok(self.look_at_record(&mut connection, &name).await?.flatten())
        };
        read.await.map_err(|e: Error| e.at("read record", Some(name), &self.info.name))
    }

    async fn compare_and_set(&self, name: &LockKey, seen: Option<&Record>, new: Option<&Record>) -> Result<Swap> {
        let swap = self.swap_record(name, seen, new).await;
        swap.map_err(|e| e.at("set record", Some(name), &self.info.name))
    }
}

impl MySqlStore {
    async fn swap_record(&self, name: &LockKey, seen: Option<&Record>, new: Option<&Record>) -> Result<Swap> {
        let name = record_to_column(name)?;
        let mut connection = self.pool.connection(ConnectionClass::Common, Bound::new(self.timeout)).await?;
        let text = |record: Option<&Record>| record.map_or(String::new(), |record| record.as_str().to_owned());
        for _ in 0..TRIES {
            if seen != new {
                let statement = |question| {
                    let set = self.statements.set_record().bind(text(new)).bind(u64::from(new.is_some()));
                    set.bind(question).bind(&name).bind(text(seen))
                };
                let (done, question) = connection.execute(statement, None).await?;
                match (done.rows_affected(), terms::is_answer(&done, question)) {
                    (1, true) => return Ok(Swap::Done),
                    (0, true) => {}
                    _ => return Err(connection.out_of_step(Sent::Yes)),
                }
            }
            // Nothing was changed, if that was the answer. The next one tells.
            let row = self.look_at_record(&mut connection, &name).await.map_err(Error::unknown_effect)?;
            if let Some(answer) = Swap::of(row.as_ref().and_then(Option::as_ref), seen, new) {
                return Ok(answer);
            }
            if row.is_none() {
                connection.execute(|_| self.statements.insert().bind(&name), None).await?;
            }
        }
        Err(Error::new(ErrorKind::Unavailable, "the record changes faster than it can be looked at"))
    }

    /// The row of a record, if there is one, and what it says.
    async fn look_at_record(&self, connection: &mut Connection, name: &[u8]) -> Result<Option<Option<Record>>> {
        let rows = connection.numbered_rows(|question| self.statements.record().bind(question).bind(name)).await?;
        let row = only_row(&rows)?.ok_or_else(|| error::odd_reply(Sent::ReadOnly))?;
        match column::<Option<&[u8]>>(row, 2)? {
            None => return Ok(None),
            Some(found) if found != name => return Err(connection.out_of_step(Sent::ReadOnly)),
            Some(_) => {}
        }
        let text: &str = column(row, 1)?;
        Ok(Some(if text.is_empty() { None } else { Some(Record::found(text.as_bytes())?) }))
    }
}
