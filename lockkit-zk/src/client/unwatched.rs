//! Looks at nodes without a watch: many in one request. One request for each would take longer than the leases last, when a
//! session has a hundred thousand.

use std::{mem, time::Duration};

use tokio::time::{Instant, timeout_at};
use zookeeper_client::{self as zk, MultiReadResult, MultiReader, Stat};

use crate::{
    client::{driver::Answer, session::Session},
    wire::error::Failure,
};

/// How many nodes one request asks for. The answer brings their data, and must stay far below the megabyte that a server
/// takes and gives (`jute.maxbuffer`).
const MOST: usize = 64;

/// Nodes to look at, and the requests that have been sent for them.
pub(crate) struct Unwatched<'s> {
    session: &'s Session,
    next: MultiReader<'s>,
    /// How many nodes the next request asks for.
    waiting: usize,
    /// With the number of nodes of each.
    sent: Vec<(usize, Answer<'s, Vec<MultiReadResult>>)>,
}

impl<'s> Unwatched<'s> {
    pub(crate) fn new(session: &'s Session) -> Self {
        Self { session, next: session.client.new_multi_reader(), waiting: 0, sent: Vec::new() }
    }

    /// Asks for one more node.
    pub(crate) fn add(&mut self, path: &str) {
        match self.next.add_get_data(path) {
            Ok(()) => self.waiting += 1,
            // In a place of its own, so that the others keep theirs.
            Err(error) => {
                self.send();
                self.sent.push((1, Box::pin(async { Err(error) })));
            }
        }
        if self.waiting == MOST {
            self.send();
        }
    }

    /// Sends what has not been sent yet, without awaiting the answer.
    pub(crate) fn send(&mut self) {
        if self.waiting > 0 {
            self.sent.push((mem::take(&mut self.waiting), Box::pin(self.next.commit())));
        }
    }

    /// What became of each node, in the order in which they were added, as far as it is known by `deadline`.
    pub(crate) async fn answers(self, deadline: Instant, bound: Duration) -> Vec<Result<Stat, Failure>> {
        let mut all = Vec::new();
        for (nodes, answer) in self.sent {
            let answer = timeout_at(deadline, self.session.read(bound, answer)).await;
            match answer.unwrap_or(Err(Failure::TimedOut(bound))) {
                Ok(results) if results.len() == nodes => all.extend(results.into_iter().map(stat)),
                Ok(_) => all.extend((0..nodes).map(|_| Err(odd()))),
                Err(failure) => all.extend((0..nodes).map(|_| Err(failure.clone()))),
            }
        }
        all
    }
}

fn stat(result: MultiReadResult) -> Result<Stat, Failure> {
    match result {
        MultiReadResult::Data { stat, .. } => Ok(stat),
        MultiReadResult::Error { err } => Err(err.into()),
        _ => Err(odd()),
    }
}

fn odd() -> Failure {
    zk::Error::UnexpectedError("the answer is to another question".to_owned()).into()
}
