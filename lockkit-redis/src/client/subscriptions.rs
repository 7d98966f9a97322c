//! Who waits for which lock, and what wakes them: subscriptions of the store's one connection.
//!
//! The channel of a lock has the name of its key, and every release publishes to it. A message says no more than that
//! asking again makes sense; nothing is decided here. Messages get lost with the connection, so its end wakes everyone,
//! and nobody waits longer than a few seconds without asking.
//!
//! A channel stays subscribed when nobody waits for it any more, so that a busy lock does not pay for it each time. It
//! is given up when a message arrives that nobody has waited for during a second, or when there are too many such.

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
    pin::pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Waker},
    time::{Duration, Instant},
};

use redis::{PushInfo, PushKind, Value, aio::MultiplexedConnection};
use tokio::sync::watch;

/// How many channels may stay subscribed that nobody waits for.
const MAX_IDLE: usize = 64;
/// How long nobody must have waited before a message makes a channel be given up.
const LINGER: Duration = Duration::from_secs(1);

/// The subscriptions of a store.
#[derive(Default)]
pub(crate) struct Subscriptions {
    table: Mutex<Table>,
    /// How many channels are subscribed: the common case, none, is known without the table.
    subscribed: AtomicUsize,
}

#[derive(Default)]
struct Table {
    /// Which connection the subscriptions belong to.
    epoch: u64,
    connection: Weak<MultiplexedConnection>,
    channels: HashMap<Arc<str>, Channel>,
    /// The channels that are subscribed but not waited for, the longest idle first.
    idle: BTreeMap<u64, Arc<str>>,
    ticket: u64,
}

/// A channel that is subscribed, or waited for, or both.
struct Channel {
    bell: watch::Sender<()>,
    waiters: usize,
    /// As the server has confirmed it on the present connection.
    subscribed: bool,
    /// The key in [`Table::idle`], and since when, if it is there.
    idle: Option<(u64, Instant)>,
}

/// One waiter's interest in a channel; dropping it ends the interest.
pub(crate) struct Interest {
    subscriptions: Arc<Subscriptions>,
    channel: Arc<str>,
    bell: watch::Receiver<()>,
}

impl Subscriptions {
    /// Registers a waiter. Whatever happens on the channel from now on will be noticed, **if** it is subscribed.
    pub(crate) fn listen(self: &Arc<Self>, channel: &str) -> Interest {
        let mut table = self.table();
        let (channel, bell) = table.add_waiter(channel);
        drop(table);
        Interest { subscriptions: Arc::clone(self), channel, bell }
    }

    /// Registers a waiter if the channel is subscribed.
    pub(crate) fn listen_if_subscribed(self: &Arc<Self>, channel: &str) -> Option<Interest> {
        self.is_subscribed(channel).then(|| self.listen(channel))
    }

    /// Whether the channel is subscribed on the present connection.
    pub(crate) fn is_subscribed(&self, channel: &str) -> bool {
        self.subscribed.load(Ordering::Acquire) > 0
            && self.table().channels.get(channel).is_some_and(|channel| channel.subscribed)
    }

    /// How many local waiters a channel has.
    pub(crate) fn waiters(&self, channel: &str) -> usize {
        self.table().channels.get(channel).map_or(0, |channel| channel.waiters)
    }

    /// A new connection takes the place of the old one; nothing is subscribed on it. Wakes everyone.
    pub(crate) fn attach(&self, epoch: u64, connection: Weak<MultiplexedConnection>) {
        let mut table = self.table();
        table.epoch = epoch;
        table.connection = connection;
        self.forget(&mut table);
    }

    /// The connection is gone. Wakes everyone.
    pub(crate) fn detach(&self, epoch: u64) {
        let mut table = self.table();
        if table.epoch == epoch {
            table.connection = Weak::new();
            self.forget(&mut table);
        }
    }

    /// Takes what the server pushed on a connection.
    pub(crate) fn push(&self, epoch: u64, push: &PushInfo) {
        let Some(Value::BulkString(channel)) = push.data.first() else { return };
        let Ok(channel) = str::from_utf8(channel) else { return };
        match push.kind {
            PushKind::Message => self.message(channel),
            PushKind::Subscribe => self.confirmed(epoch, channel, true),
            PushKind::Unsubscribe => self.confirmed(epoch, channel, false),
            _ => {}
        }
    }

    fn message(&self, name: &str) {
        let mut table = self.table();
        let Some(channel) = table.channels.get(name) else { return };
        if channel.waiters > 0 {
            channel.bell.send_replace(());
        } else if channel.idle.is_some_and(|(_, since)| since.elapsed() > LINGER) {
            self.unsubscribe(&mut table, name);
        }
    }

    fn confirmed(&self, epoch: u64, name: &str, subscribed: bool) {
        let mut table = self.table();
        if table.epoch != epoch {
            return;
        }
        if !table.channels.contains_key(name) {
            if !subscribed {
                return;
            }
            // Whoever asked for it has gone in the meantime.
            table.channels.insert(name.into(), Channel::new());
        }
        let Some(channel) = table.channels.get_mut(name) else { return };
        if channel.subscribed == subscribed {
            return;
        }
        channel.subscribed = subscribed;
        if subscribed {
            self.subscribed.fetch_add(1, Ordering::Release);
        } else {
            self.subscribed.fetch_sub(1, Ordering::Release);
            // It was given up while somebody came to rely on it: they ask again, and subscribe.
            channel.bell.send_replace(());
        }
        self.settle(&mut table, name);
    }

    /// Nothing is subscribed any more: drops what nobody waits for, and wakes the others.
    fn forget(&self, table: &mut Table) {
        self.subscribed.store(0, Ordering::Release);
        table.idle.clear();
        table.channels.retain(|_, channel| channel.waiters > 0);
        for channel in table.channels.values_mut() {
            channel.subscribed = false;
            channel.idle = None;
            channel.bell.send_replace(());
        }
    }

    /// After a change of its waiters or its subscription: keeps, shelves or drops a channel.
    fn settle(&self, table: &mut Table, name: &str) {
        let Some((name, channel)) = table.channels.get_key_value(name) else { return };
        let name = Arc::clone(name);
        match (channel.waiters, channel.subscribed) {
            (0, true) => {
                table.shelve(&name);
                if table.idle.len() > MAX_IDLE
                    && let Some((_, oldest)) = table.idle.first_key_value()
                {
                    let oldest = Arc::clone(oldest);
                    self.unsubscribe(table, &oldest);
                }
            }
            (0, false) => {
                table.unshelve(&name);
                table.channels.remove(&name);
            }
            _ => table.unshelve(&name),
        }
    }

    /// Gives up a channel that nobody waits for, unless the connection has no room for the request right now; then it
    /// stays as it is until the next occasion.
    ///
    /// The request takes its place in the connection's queue here and now, so that a later subscription can't overtake
    /// it.
    fn unsubscribe(&self, table: &mut Table, name: &str) {
        if let Some(connection) = table.connection.upgrade() {
            let mut connection = MultiplexedConnection::clone(&connection);
            let mut request = redis::cmd("UNSUBSCRIBE");
            request.arg(name).set_no_response(true);
            let sending = pin!(connection.send_packed_command(&request));
            if sending.poll(&mut Context::from_waker(Waker::noop())).is_pending() {
                return;
            }
        }
        if let Some(channel) = table.channels.remove(name) {
            if let Some((ticket, _)) = channel.idle {
                table.idle.remove(&ticket);
            }
            if channel.subscribed {
                self.subscribed.fetch_sub(1, Ordering::Release);
            }
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    fn add_waiter(&mut self, name: &str) -> (Arc<str>, watch::Receiver<()>) {
        if !self.channels.contains_key(name) {
            self.channels.insert(name.into(), Channel::new());
        }
        self.unshelve(name);
        let name = self.channels.get_key_value(name).map(|(name, _)| Arc::clone(name)).unwrap_or_else(|| name.into());
        let channel = self.channels.entry(Arc::clone(&name)).or_insert_with(Channel::new);
        channel.waiters += 1;
        (name, channel.bell.subscribe())
    }

    fn shelve(&mut self, name: &Arc<str>) {
        if let Some(channel) = self.channels.get_mut(name)
            && channel.idle.is_none()
        {
            self.ticket += 1;
            channel.idle = Some((self.ticket, Instant::now()));
            self.idle.insert(self.ticket, Arc::clone(name));
        }
    }

    fn unshelve(&mut self, name: &str) {
        if let Some((ticket, _)) = self.channels.get_mut(name).and_then(|channel| channel.idle.take()) {
            self.idle.remove(&ticket);
        }
    }
}

impl Channel {
    fn new() -> Self {
        Self { bell: watch::Sender::new(()), waiters: 0, subscribed: false, idle: None }
    }
}

impl Interest {
    /// Whether the channel is subscribed on the present connection.
    pub(crate) fn is_subscribed(&self) -> bool {
        self.subscriptions.is_subscribed(&self.channel)
    }

    /// From now on only what is new counts.
    pub(crate) fn arm(&mut self) {
        self.bell.mark_unchanged();
    }

    /// Waits until something happened since [`arm`](Self::arm) after which asking again makes sense.
    pub(crate) async fn rung(&mut self) {
        // The sender lives in the table for as long as somebody listens; were it gone, asking again is right too.
        _ = self.bell.changed().await;
    }
}

impl Drop for Interest {
    fn drop(&mut self) {
        let mut table = self.subscriptions.table();
        if let Some(channel) = table.channels.get_mut(&self.channel) {
            channel.waiters -= 1;
            if channel.waiters == 0 {
                self.subscriptions.settle(&mut table, &self.channel);
            }
        }
    }
}

impl fmt::Debug for Subscriptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wake").field("subscribed", &self.subscribed).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::task::Poll;

    use super::*;

    fn push(kind: PushKind, channel: &str) -> PushInfo {
        PushInfo { kind, data: vec![Value::BulkString(channel.into()), Value::Int(1)] }
    }

    fn rung(interest: &mut Interest) -> bool {
        let bell = pin!(interest.rung());
        matches!(bell.poll(&mut Context::from_waker(Waker::noop())), Poll::Ready(()))
    }

    fn attached() -> Arc<Subscriptions> {
        let subscriptions = Arc::new(Subscriptions::default());
        subscriptions.attach(1, Weak::new());
        subscriptions
    }

    fn channels(subscriptions: &Subscriptions) -> (usize, usize, usize) {
        let table = subscriptions.table();
        (table.channels.len(), table.idle.len(), subscriptions.subscribed.load(Ordering::Relaxed))
    }

    #[test]
    fn a_message_wakes_all_who_listen() {
        let subscriptions = attached();
        let (mut one, mut two, mut other) =
            (subscriptions.listen("a"), subscriptions.listen("a"), subscriptions.listen("b"));
        assert!(subscriptions.listen_if_subscribed("a").is_none());
        subscriptions.push(1, &push(PushKind::Subscribe, "a"));
        assert!(one.is_subscribed() && !other.is_subscribed());
        subscriptions.push(1, &push(PushKind::Message, "a"));
        assert!(rung(&mut one) && rung(&mut two) && !rung(&mut other));
        assert!(!rung(&mut one), "once");
        subscriptions.push(1, &push(PushKind::Message, "a"));
        one.arm();
        assert!(!rung(&mut one), "armed after the message");
    }

    #[test]
    fn a_channel_lingers_until_it_is_not_worth_it() {
        let subscriptions = attached();
        let interest = subscriptions.listen("a");
        subscriptions.push(1, &push(PushKind::Subscribe, "a"));
        drop(interest);
        assert_eq!(channels(&subscriptions), (1, 1, 1));
        subscriptions.push(1, &push(PushKind::Message, "a"));
        assert_eq!(channels(&subscriptions), (1, 1, 1), "idle for less than the linger time");
        let long_ago = Instant::now().checked_sub(2 * LINGER);
        subscriptions.table().channels.get_mut("a").expect("channel").idle = long_ago.map(|then| (1, then));
        subscriptions.push(1, &push(PushKind::Message, "a"));
        assert_eq!(channels(&subscriptions), (0, 0, 0));
    }

    #[test]
    fn only_so_many_channels_linger() {
        let subscriptions = attached();
        for i in 0..3 * MAX_IDLE {
            let interest = subscriptions.listen(&i.to_string());
            subscriptions.push(1, &push(PushKind::Subscribe, &i.to_string()));
            drop(interest);
        }
        assert_eq!(channels(&subscriptions), (MAX_IDLE, MAX_IDLE, MAX_IDLE));
        assert!(!subscriptions.is_subscribed("0") && subscriptions.is_subscribed(&(3 * MAX_IDLE - 1).to_string()));
    }

    #[test]
    fn interest_that_was_never_confirmed_leaves_nothing_behind() {
        let subscriptions = attached();
        drop(subscriptions.listen("a"));
        assert_eq!(channels(&subscriptions), (0, 0, 0));
        subscriptions.push(1, &push(PushKind::Subscribe, "a"));
        assert_eq!(channels(&subscriptions), (1, 1, 1), "the late confirmation is known, and lingers");
        subscriptions.push(1, &push(PushKind::Unsubscribe, "a"));
        assert_eq!(channels(&subscriptions), (0, 0, 0));
    }

    #[test]
    fn losing_the_connection_or_the_subscription_wakes() {
        let subscriptions = attached();
        let mut interest = subscriptions.listen("a");
        subscriptions.push(1, &push(PushKind::Subscribe, "a"));
        subscriptions.detach(1);
        assert!(rung(&mut interest) && !interest.is_subscribed());
        subscriptions.attach(2, Weak::new());
        assert!(rung(&mut interest));
        subscriptions.push(1, &push(PushKind::Subscribe, "a"));
        assert!(!interest.is_subscribed(), "that was the old connection");
        subscriptions.push(2, &push(PushKind::Subscribe, "a"));
        subscriptions.detach(1);
        assert!(interest.is_subscribed(), "the old connection is gone twice");
        subscriptions.push(2, &push(PushKind::Unsubscribe, "a"));
        assert!(rung(&mut interest) && !interest.is_subscribed());
        drop(interest);
        assert_eq!(channels(&subscriptions), (0, 0, 0));
    }
}
