//! How a store makes itself heard before it is asked.

use tokio::sync::broadcast::{
    self, Receiver, Sender,
    error::{RecvError, TryRecvError},
};

use crate::Token;

/// How many alarms may wait to be heard. If there are more, all leases are asked about.
const KEPT: usize = 256;

/// A store's voice: something seems to have happened to a lease, and its holder should not have to wait for the next
/// renewal to learn of it.
///
/// An alarm decides nothing. The engine renews the lease as soon as it hears one, and the answer to that decides (rule R5). An
/// alarm that nobody hears, or that was raised for nothing, does no harm. Clones are one voice.
#[derive(Clone, Debug)]
pub struct Alarm {
    voice: Sender<Option<Token>>,
    /// That of another store, which is heard as well.
    other: Option<Sender<Option<Token>>>,
}

impl Alarm {
    /// A voice that nobody listens to yet.
    #[must_use]
    pub fn new() -> Self {
        Self { voice: broadcast::channel(KEPT).0, other: None }
    }

    /// What hears both of these, each of one store.
    pub(crate) fn of_both(one: Option<&Self>, other: Option<&Self>) -> Option<Self> {
        match (one, other) {
            (Some(one), Some(other)) => Some(Self { voice: one.voice.clone(), other: Some(other.voice.clone()) }),
            (one, other) => one.or(other).cloned(),
        }
    }

    /// Something may have happened to the lease of the claim with this token.
    pub fn raise(&self, token: Token) {
        self.send(Some(token));
    }

    /// Something may have happened to all leases of the store.
    pub fn raise_all(&self) {
        self.send(None);
    }

    pub(crate) fn listen(&self) -> Alarms {
        Alarms { of: self.voice.subscribe(), other: self.other.as_ref().map(Sender::subscribe) }
    }

    fn send(&self, alarm: Option<Token>) {
        // An error says that nobody listens.
        drop(self.voice.send(alarm));
    }
}

impl Default for Alarm {
    fn default() -> Self {
        Self::new()
    }
}

/// The ear of one locker.
#[derive(Debug)]
pub(crate) struct Alarms {
    of: Receiver<Option<Token>>,
    other: Option<Receiver<Option<Token>>>,
}

/// Which leases to ask about.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Alarmed {
    All,
    These(Vec<Token>),
}

impl Alarms {
    /// The alarms raised since the last time, at least one.
    ///
    /// # Cancellation
    /// Nothing is missed.
    pub(crate) async fn next(&mut self) -> Alarmed {
        let Self { of, other } = self;
        let heard = async |voice: &mut Receiver<Option<Token>>| match voice.recv().await {
            Err(RecvError::Closed) => std::future::pending().await,
            Err(RecvError::Lagged(_)) => None,
            Ok(heard) => heard,
        };
        let from_other = async {
            match other {
                Some(other) => heard(other).await,
                None => std::future::pending().await,
            }
        };
        let first = tokio::select! {
            first = heard(of) => first,
            first = from_other => first,
        };
        let Some(first) = first else { return Alarmed::All };
        let mut tokens = vec![first];
        for voice in std::iter::once(&mut self.of).chain(&mut self.other) {
            loop {
                match voice.try_recv() {
                    Ok(Some(token)) => tokens.push(token),
                    Ok(None) | Err(TryRecvError::Lagged(_)) => return Alarmed::All,
                    Err(TryRecvError::Empty | TryRecvError::Closed) => break,
                }
            }
        }
        Alarmed::These(tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn alarms_come_together_and_too_many_are_one_for_all() {
        let alarm = Alarm::new();
        let mut alarms = alarm.listen();
        let tokens: Vec<_> = (0..3).map(|_| Token::random().expect("random")).collect();
        tokens.iter().for_each(|token| alarm.raise(*token));
        assert_eq!(alarms.next().await, Alarmed::These(tokens.clone()));
        alarm.raise(tokens[0]);
        alarm.raise_all();
        assert_eq!(alarms.next().await, Alarmed::All);
        (0..=KEPT).for_each(|_| alarm.raise(tokens[1]));
        assert_eq!(alarms.next().await, Alarmed::All);
    }
}
