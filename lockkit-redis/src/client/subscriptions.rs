//! Who waits for which lock, and what wakes them: subscriptions of the store's one connection.
//!
//! The channel of a lock has the name of its key, and every release publishes to it. A message says no more than that
//! asking again makes sense; nothing is decided here. Messages get lost with the connection, so its end wakes everyone,
//! and nobody waits longer than a few seconds without asking.
//!
//! A channel is given up as soon as nobody waits for it and the connection has room for the request. (To keep it for a while did
//! not make a busy lock any faster: 0.73 to 0.96 of the grants, among two and four processes.)

use std::{
    collections::{BTreeSet, HashMap},
    fmt,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicUsize, Ordering},
    },
};

use lockkit_core::store::unpoisoned;
use redis::{PushInfo, PushKind, Value};
use tokio::sync::watch;

use crate::client::batch::Batches;

/// How many channels are given up late in one go: whoever does it came for something else. More than one, so that the
/// confirmation of each leads to more of them, until none is left.
const A_FEW: usize = 4;

/// The subscriptions of a store.
#[derive(Default)]
pub(crate) struct Subscriptions {
    table: Mutex<ChannelTable>,
    /// How many channels are subscribed: the common case, none, is known without the table.
    subscribed: AtomicUsize,
}

#[derive(Default)]
struct ChannelTable {
    /// Which connection the subscriptions belong to.
    generation: u64,
    connection: Weak<Batches>,
    channels: HashMap<Arc<str>, Channel>,
    /// Those that nobody waited for when the connection had no room for the request to give them up. On some no message ever
    /// comes that would tell of that.
    kept: BTreeSet<Arc<str>>,
}

/// A channel that is subscribed, or waited for, or both.
struct Channel {
    notify: watch::Sender<()>,
    waiters: usize,
    /// As the server has confirmed it on the present connection.
    subscribed: bool,
}

/// One waiter's interest in a channel; dropping it ends the interest.
pub(crate) struct Interest {
    subscriptions: Arc<Subscriptions>,
    channel: Arc<str>,
    notify: watch::Receiver<()>,
}

impl Subscriptions {
    /// Registers a waiter. Whatever happens on the channel from now on will be noticed, **if** it is subscribed.
    pub(crate) fn listen(self: &Arc<Self>, channel: &str) -> Interest {
        let mut table = unpoisoned(&self.table);
        let (channel, notify) = table.add_waiter(channel);
        self.give_up_kept(&mut table);
        drop(table);
        Interest { subscriptions: Arc::clone(self), channel, notify }
    }

    /// Whether the channel is subscribed on the present connection.
    pub(crate) fn is_subscribed(&self, channel: &str) -> bool {
        self.subscribed.load(Ordering::Acquire) > 0
            && unpoisoned(&self.table).channels.get(channel).is_some_and(|channel| channel.subscribed)
    }

    /// Gives up channels that nobody waits for, if some are left for which the connection had no room.
    pub(crate) fn tidy(&self) {
        if self.subscribed.load(Ordering::Acquire) > 0 {
            self.give_up_kept(&mut unpoisoned(&self.table));
        }
    }

    /// A new connection takes the place of an older one; nothing is subscribed on it. Wakes everyone. One that was made before
    /// that which is there has come too late, and takes no place.
    pub(crate) fn attach(&self, generation: u64, connection: Weak<Batches>) {
        let mut table = unpoisoned(&self.table);
        if generation < table.generation {
            return;
        }
        table.generation = generation;
        table.connection = connection;
        self.forget(&mut table);
    }

    /// The connection is gone. Wakes everyone.
    pub(crate) fn detach(&self, generation: u64) {
        let mut table = unpoisoned(&self.table);
        if table.generation == generation {
            table.connection = Weak::new();
            self.forget(&mut table);
        }
    }

    /// Takes what the server pushed on a connection.
    pub(crate) fn push(&self, generation: u64, push: &PushInfo) {
        let Some(Value::BulkString(channel)) = push.data.first() else { return };
        let Ok(channel) = str::from_utf8(channel) else { return };
        match push.kind {
            PushKind::Message => self.message(channel),
            PushKind::Subscribe => self.confirmed(generation, channel, true),
            PushKind::Unsubscribe => self.confirmed(generation, channel, false),
            _ => {}
        }
    }

    fn message(&self, name: &str) {
        let mut table = unpoisoned(&self.table);
        let Some(channel) = table.channels.get(name) else { return };
        if channel.waiters > 0 {
            channel.notify.send_replace(());
        } else {
            self.unsubscribe(&mut table, name);
        }
    }

    fn confirmed(&self, generation: u64, name: &str, subscribed: bool) {
        let mut table = unpoisoned(&self.table);
        if table.generation != generation {
            return;
        }
        self.give_up_kept(&mut table);
        if subscribed && !table.channels.contains_key(name) {
            // The waiter that asked for it has gone in the meantime.
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
            channel.notify.send_replace(());
        }
        self.settle(&mut table, name);
    }

    /// Nothing is subscribed any more: drops what nobody waits for, and wakes the others.
    fn forget(&self, table: &mut ChannelTable) {
        self.subscribed.store(0, Ordering::Release);
        table.kept.clear();
        table.channels.retain(|_, channel| channel.waiters > 0);
        for channel in table.channels.values_mut() {
            channel.subscribed = false;
            channel.notify.send_replace(());
        }
    }

    /// After a change of its waiters or its subscription: drops a channel that nobody waits for.
    fn settle(&self, table: &mut ChannelTable, name: &str) {
        if table.channels.get(name).is_some_and(|channel| channel.waiters == 0) {
            self.unsubscribe(table, name);
        }
    }

    /// Gives up a few of the channels that were kept, as far as nobody waits for them and there is room now.
    fn give_up_kept(&self, table: &mut ChannelTable) {
        for _ in 0..A_FEW {
            let Some(name) = table.kept.pop_first() else { return };
            self.settle(table, &name);
            if table.kept.contains(&name) {
                return;
            }
        }
    }

    /// Gives up a channel that nobody waits for, unless the connection has no room for the request right now; then it
    /// is kept until there is.
    ///
    /// The request takes its place in the connection's queue here and now, so that a later subscription can't overtake
    /// it.
    fn unsubscribe(&self, table: &mut ChannelTable, name: &str) {
        let Some((name, channel)) = table.channels.get_key_value(name) else { return };
        let name = Arc::clone(name);
        if channel.subscribed {
            if let Some(connection) = table.connection.upgrade() {
                let mut request = redis::cmd("UNSUBSCRIBE");
                request.arg(&*name).set_no_response(true);
                if !connection.send_now(&request) {
                    table.kept.insert(name);
                    return;
                }
            }
            self.subscribed.fetch_sub(1, Ordering::Release);
        }
        table.channels.remove(&name);
    }
}

impl ChannelTable {
    fn add_waiter(&mut self, name: &str) -> (Arc<str>, watch::Receiver<()>) {
        let name = self.channels.get_key_value(name).map(|(name, _)| Arc::clone(name)).unwrap_or_else(|| name.into());
        let channel = self.channels.entry(Arc::clone(&name)).or_insert_with(Channel::new);
        channel.waiters += 1;
        (name, channel.notify.subscribe())
    }
}

impl Channel {
    fn new() -> Self {
        Self { notify: watch::Sender::new(()), waiters: 0, subscribed: false }
    }
}

impl Interest {
    /// Whether the channel is subscribed on the present connection.
    pub(crate) fn is_subscribed(&self) -> bool {
        self.subscriptions.is_subscribed(&self.channel)
    }

    /// From now on only what is new counts.
    pub(crate) fn arm(&mut self) {
        self.notify.mark_unchanged();
    }

    /// Waits until something happened since [`arm`](Self::arm) after which asking again makes sense.
    pub(crate) async fn notified(&mut self) {
        // The sender lives in the table for as long as somebody listens; were it gone, asking again is right too.
        _ = self.notify.changed().await;
    }
}

impl Drop for Interest {
    fn drop(&mut self) {
        let mut table = unpoisoned(&self.subscriptions.table);
        if let Some(channel) = table.channels.get_mut(&self.channel) {
            channel.waiters -= 1;
            if channel.waiters == 0 {
                self.subscriptions.settle(&mut table, &self.channel);
                self.subscriptions.give_up_kept(&mut table);
            }
        }
    }
}

impl fmt::Debug for Subscriptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Subscriptions").field("subscribed", &self.subscribed).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::{
        pin::pin,
        task::{Context, Poll, Waker},
    };

    use super::*;

    fn push(kind: PushKind, channel: &str) -> PushInfo {
        PushInfo { kind, data: vec![Value::BulkString(channel.into()), Value::Int(1)] }
    }

    fn notified(interest: &mut Interest) -> bool {
        let notify = pin!(interest.notified());
        matches!(notify.poll(&mut Context::from_waker(Waker::noop())), Poll::Ready(()))
    }

    fn attached() -> Arc<Subscriptions> {
        let subscriptions = Arc::new(Subscriptions::default());
        subscriptions.attach(1, Weak::new());
        subscriptions
    }

    fn channels(subscriptions: &Subscriptions) -> (usize, usize) {
        let table = unpoisoned(&subscriptions.table);
        (table.channels.len(), subscriptions.subscribed.load(Ordering::Relaxed))
    }

    #[test]
    fn a_connection_that_comes_late_takes_no_place() {
        let subscriptions = attached();
        subscriptions.attach(3, Weak::new());
        subscriptions.attach(2, Weak::new());
        let one = subscriptions.listen("a");
        subscriptions.push(3, &push(PushKind::Subscribe, "a"));
        assert!(one.is_subscribed());
    }

    #[test]
    fn a_message_wakes_all_who_listen() {
        let subscriptions = attached();
        let (mut one, mut two, mut other) =
            (subscriptions.listen("a"), subscriptions.listen("a"), subscriptions.listen("b"));
        assert!(!subscriptions.is_subscribed("a"));
        subscriptions.push(1, &push(PushKind::Subscribe, "a"));
        assert!(one.is_subscribed() && !other.is_subscribed());
        subscriptions.push(1, &push(PushKind::Message, "a"));
        assert!(notified(&mut one) && notified(&mut two) && !notified(&mut other));
        assert!(!notified(&mut one), "once");
        subscriptions.push(1, &push(PushKind::Message, "a"));
        one.arm();
        assert!(!notified(&mut one), "armed after the message");
    }

    #[test]
    fn a_channel_is_given_up_with_its_last_waiter() {
        let subscriptions = attached();
        let (one, two) = (subscriptions.listen("a"), subscriptions.listen("a"));
        subscriptions.push(1, &push(PushKind::Subscribe, "a"));
        drop(one);
        assert_eq!(channels(&subscriptions), (1, 1));
        drop(two);
        assert_eq!(channels(&subscriptions), (0, 0));
        let three = subscriptions.listen("a");
        assert!(!three.is_subscribed(), "it has to be subscribed anew");
    }

    #[test]
    fn interest_that_was_never_confirmed_leaves_nothing_behind() {
        let subscriptions = attached();
        drop(subscriptions.listen("a"));
        assert_eq!(channels(&subscriptions), (0, 0));
        subscriptions.push(1, &push(PushKind::Subscribe, "a"));
        assert_eq!(channels(&subscriptions), (0, 0), "the late confirmation is known, and undone");
        subscriptions.push(1, &push(PushKind::Unsubscribe, "a"));
        assert_eq!(channels(&subscriptions), (0, 0));
    }

    #[test]
    fn losing_the_connection_or_the_subscription_wakes() {
        let subscriptions = attached();
        let mut interest = subscriptions.listen("a");
        subscriptions.push(1, &push(PushKind::Subscribe, "a"));
        subscriptions.detach(1);
        assert!(notified(&mut interest) && !interest.is_subscribed());
        subscriptions.attach(2, Weak::new());
        assert!(notified(&mut interest));
        subscriptions.push(1, &push(PushKind::Subscribe, "a"));
        assert!(!interest.is_subscribed(), "that was the old connection");
        subscriptions.push(2, &push(PushKind::Subscribe, "a"));
        subscriptions.detach(1);
        assert!(interest.is_subscribed(), "the old connection is gone twice");
        subscriptions.push(2, &push(PushKind::Unsubscribe, "a"));
        assert!(notified(&mut interest) && !interest.is_subscribed());
        drop(interest);
        assert_eq!(channels(&subscriptions), (0, 0));
    }
}
