//! The five questions, as the simulated store answers them: what the store beneath says, if it is asked and if it is
//! heard.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use lockkit_core::{
    AcquireRequest, Attempt, Claim, Clock, Contention, Error, Hold, KeyState, LockKey, LockStore, LossReason, Moment,
    Order, Query, Release, Renewal, Renewed, Result, StoreInfo, Token, Waiting,
    store::{Records, unpoisoned},
};

use crate::{
    fault::{Fault, Operation},
    log::Logged,
    store::{SimStore, World},
};

#[async_trait]
impl LockStore for SimStore {
    fn info(&self) -> &StoreInfo {
        &self.info
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        let (fault, calls) = self.asked(Operation::Acquire, &[Some(&request.claim.key)]);
        let answer = self.acquire_within(request, fault).await;
        self.answered(&calls, std::slice::from_ref(&answer));
        answer.map_err(|e| self.at("acquire", Some(&request.claim.key), e))
    }

    async fn renew(&self, renewals: &[Renewal]) -> Vec<Result<Renewed>> {
        let keys: Vec<_> = renewals.iter().map(|renewal| Some(&renewal.claim.key)).collect();
        let (fault, calls) = self.asked(Operation::Renew, &keys);
        let (sent, world, asked) = (self.now(), Arc::clone(&self.world), renewals.to_vec());
        let answer = self.ask(fault, async move { world.inner.renew(&asked).await }).await;
        let answers: Vec<_> = match answer {
            Ok(answers) => answers.into_iter().zip(renewals).map(|(answer, r)| self.renewed(answer, r, sent)).collect(),
            Err(e) => renewals.iter().map(|r| Err(self.at("renew", Some(&r.claim.key), e.clone()))).collect(),
        };
        self.answered(&calls, &answers);
        answers
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        let (fault, calls) = self.asked(Operation::Release, &[Some(&claim.key)]);
        let (world, client, asked) = (Arc::clone(&self.world), Arc::clone(&self.client), claim.clone());
        let answer = self.ask(fault, async move {
            unpoisoned(&client.session).remove(&asked.token);
            world.inner.release(&asked).await
        });
        let answer = match answer.await {
            Ok(Ok(Release::NotHeld(reason))) => Ok(Release::NotHeld(self.world.reason(claim.token, reason))),
            Ok(answer) => answer,
            Err(e) => Err(self.at("release", Some(&claim.key), e)),
        };
        self.answered(&calls, std::slice::from_ref(&answer));
        answer
    }

    async fn inspect(&self, query: &Query) -> Result<Vec<KeyState>> {
        let key = match query {
            Query::Keys(keys) => keys.first().filter(|_| keys.len() == 1),
            Query::Prefix(_) => None,
            Query::Queue(key) => Some(key),
        };
        let (fault, calls) = self.asked(Operation::Inspect, &[key]);
        let (world, asked) = (Arc::clone(&self.world), query.clone());
        let answer = self.ask(fault, async move { world.inner.inspect(&asked).await }).await;
        // Reading has no effect, whatever became of it.
        let answer = answer.unwrap_or_else(|e| Err(self.at("inspect", None, Error::new(e.kind(), e.message()))));
        self.answered(&calls, std::slice::from_ref(&answer));
        answer
    }

    /// None: what an application does to its locks is simulated.
    fn records(&self) -> Vec<Box<dyn Records + '_>> {
        Vec::new()
    }
}

impl SimStore {
    /// Asks until the lease is granted or the wait is over. Each time is a request of its own, so that a store which
    /// froze meanwhile grants nothing.
    async fn acquire_within(&self, request: &AcquireRequest, mut fault: Option<Fault>) -> Result<Attempt> {
        let give_up = self.now() + request.wait;
        loop {
            let disturbed = self.client.disturbed.notified();
            let answer = self.attempt(request, fault.take()).await?;
            let left = give_up.since(self.now());
            if self.info.capability.waiting == Waiting::Poll {
                return Ok(polled(request, answer));
            }
            if matches!(answer, Attempt::Granted(_)) || left.is_zero() {
                return Ok(answer);
            }
            let waiting = AcquireRequest { wait: left, ..request.clone() };
            tokio::select! {
                biased;
                () = disturbed => fault = self.client.script.next(Operation::Acquire),
                answer = self.world.inner.acquire(&waiting) => {
                    return answer.inspect(|answer| self.note_granted(answer));
                }
            }
        }
    }

    /// Asks once.
    async fn attempt(&self, request: &AcquireRequest, fault: Option<Fault>) -> Result<Attempt> {
        let sent = self.now();
        let (world, client) = (Arc::clone(&self.world), self.clone());
        // With no time at all it would be a try, which gets no place in a queue.
        let least =
            if request.order == Order::Fifo { request.wait.min(Duration::from_nanos(1)) } else { Duration::ZERO };
        let asked = AcquireRequest { wait: least, ..request.clone() };
        let work = async move {
            let answer = world.inner.acquire(&asked).await;
            answer.inspect(|answer| client.note_granted(answer))
        };
        Ok(match self.ask(fault, work).await?? {
            Attempt::Granted(hold) => Attempt::Granted(counted_from(sent, request.ttl, hold)),
            contended @ Attempt::Contended(_) => contended,
        })
    }

    fn note_granted(&self, answer: &Attempt) {
        if let Attempt::Granted(hold) = answer {
            unpoisoned(&self.client.session).insert(hold.claim.token, hold.claim.clone());
        }
    }

    fn renewed(&self, answer: Result<Renewed>, renewal: &Renewal, sent: Moment) -> Result<Renewed> {
        Ok(match answer? {
            Renewed::Held(hold) => Renewed::Held(counted_from(sent, renewal.ttl, hold)),
            Renewed::Lost(reason) => Renewed::Lost(self.world.reason(renewal.claim.token, reason)),
        })
    }

    async fn ask<T: Send + 'static>(
        &self,
        fault: Option<Fault>,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<T> {
        self.client.link.ask(fault, self.client.bound, work).await
    }

    fn answered<T: Logged>(&self, calls: &[usize], answers: &[T]) {
        for (call, answer) in calls.iter().zip(answers) {
            self.client.log.answered(*call, answer.logged());
        }
    }

    fn at(&self, operation: &'static str, key: Option<&LockKey>, error: Error) -> Error {
        error.at(operation, key, &self.info.name)
    }

    fn now(&self) -> Moment {
        self.world.clock.now()
    }
}

impl World {
    /// Why a lease ended: as was said when it was ended, or else as the store beneath sees it.
    fn reason(&self, token: Token, seen: LossReason) -> LossReason {
        unpoisoned(&self.reasons).get(&token).copied().unwrap_or(seen)
    }
}

/// A waiter that is not woken, and has a place in a queue, is to ask again before that place ends.
fn polled(request: &AcquireRequest, answer: Attempt) -> Attempt {
    match answer {
        Attempt::Contended(contention) if request.order == Order::Fifo => {
            Attempt::Contended(Contention { retry_after: Some(Duration::from_secs(2)), ..contention })
        }
        answer => answer,
    }
}

/// Validity counts from the moment before the request was sent (rule R4), however long it took to arrive.
fn counted_from(sent: Moment, ttl: Duration, hold: Hold) -> Hold {
    Hold { until: hold.until.min(sent + ttl), ..hold }
}
