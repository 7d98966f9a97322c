//! Records: strings under keys of their own, read and changed by one script on the server in charge.

use async_trait::async_trait;
use lockkit_core::{
    Error, ErrorKind, LockKey, Result,
    store::{Record, Records, Swap},
};
use redis::Value;

use crate::{
    client::node::Route,
    store::RedisStore,
    wire::{
        error::{self, Sent},
        redirect,
        scripts::{RECORD, RECORD_GUARDED},
    },
};

#[async_trait]
impl Records for RedisStore {
    async fn read(&self, name: &LockKey) -> Result<Option<Record>> {
        let answer = self.ask_record(name, None).await.map(|(_, found)| found);
        answer.map_err(|e| e.at("read record", Some(name), &self.info.name))
    }

    async fn compare_and_set(&self, name: &LockKey, seen: Option<&Record>, new: Option<&Record>) -> Result<Swap> {
        let answer = self.ask_record(name, Some([seen, new])).await;
        let swap = answer.and_then(|(is_changed, found)| match Swap::of(found.as_ref(), seen, new) {
            None if is_changed => Ok(Swap::Done),
            Some(swap) if !is_changed => Ok(swap),
            _ => Err(error::odd_reply(Sent::Yes)),
        });
        swap.map_err(|e| e.at("set record", Some(name), &self.info.name))
    }
}

impl RedisStore {
    /// Whether the record was changed, and what it was. A change is what has to be there, and what takes its place; without one
    /// the record is read.
    async fn ask_record(&self, name: &LockKey, change: Option<[Option<&Record>; 2]>) -> Result<(bool, Option<Record>)> {
        let key = self.names.record(name);
        let mut route = self.nodes.route(&key).await?;
        loop {
            match self.ask_record_at(&route, &key, change).await {
                Ok(answer) => return Ok(answer),
                Err(e) => route = self.nodes.follow(route, e).await?,
            }
        }
    }

    async fn ask_record_at(
        &self,
        Route { node, asking, .. }: &Route,
        key: &str,
        change: Option<[Option<&Record>; 2]>,
    ) -> Result<(bool, Option<Record>)> {
        let connection = node.dialer.connection().await?;
        let epoch = connection.epoch();
        if *asking && epoch.is_none() {
            return Err(redirect::undecided());
        }
        let (script, keys) = if epoch.is_some() { (&*RECORD_GUARDED, 1) } else { (&*RECORD, 2) };
        let mut request = script.by_hash(keys, 4, 2 * key.len() + 2 * Record::MAX_BYTES + 64);
        request.arg(key);
        if epoch.is_none() {
            request.arg(self.names.unused());
        }
        let sent = if change.is_some() { Sent::Yes } else { Sent::ReadOnly };
        for record in change.into_iter().flatten() {
            request.arg(record.map_or("", Record::as_str));
        }
        if let Some(epoch) = epoch {
            request.arg(&epoch.id);
        }
        let reply = connection.run(request, *asking, self.timeout, sent).await?;
        let odd = || error::odd_reply(sent);
        let (is_changed, found) = redis::from_redis_value::<(Value, Vec<u8>)>(reply).map_err(|_| odd())?;
        let found = if found.is_empty() { None } else { Some(Record::found(&found)?) };
        if let Some(replicas) = &node.replicas
            && let Err(shortfall) = replicas.confirm(&connection).await
        {
            // Another server could take over that has an older record, and what was read would not be the last.
            let message = format!("the record is not safe: {}", shortfall.message());
            let error = Error::new(ErrorKind::Unavailable, message).with_source(shortfall);
            return Err(if sent == Sent::Yes { error.unknown_effect() } else { error });
        }
        match is_changed {
            Value::Int(changed @ 0..=1) => Ok((changed == 1, found)),
            _ => Err(odd()),
        }
    }
}
