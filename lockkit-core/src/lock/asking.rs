//! Waiting for a lock whose holder is asked to yield.

use std::{
    convert::Infallible,
    future::pending,
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::time::sleep;

use super::Lock;
use crate::{
    Guard, Mode, Result,
    engine::{Doubts, Limit},
    store::unpoisoned,
    yielding::request_key,
};

/// After an error of the store, a holder is asked again so much later.
const AGAIN: Duration = Duration::from_secs(1);

impl Lock {
    pub(super) async fn get_asking(&self, limit: Limit) -> Result<Option<Guard>> {
        // Dropped last: a shutdown waits until its request is released, also while the lock is waited for behind others of this process.
        let _under_way = self.under_way();
        let key = request_key(self.key.as_ref().map_err(Clone::clone)?, self.engine.store.info())?;
        // Nobody is asked for a lock that is free. Whatever fails is asked for again, with the patience of one that waits.
        let mut doubts = Doubts::default();
        match self.get_unasked(limit.at_once(), &mut doubts).await {
            Ok(None) => {}
            Err(error) if error.is_retryable() && !limit.is_over(self.engine.now()) => {}
            answer => return answer,
        }
        let request = Self::new(Arc::clone(&self.engine), key.as_str(), Mode::Exclusive).ttl(self.terms.ttl);
        let (shown, mut asked) = (Mutex::new(None), Doubts::default());
        let answer = tokio::select! {
            biased;
            answer = self.get_unasked(limit, &mut doubts) => answer?,
            never = request.show(&shown, &mut asked) => match never {},
        };
        // Dropped, and so released in the background: from the grant on this must not depend on being polled. The new holder is not
        // to take the request for one to itself, also if its grant is not heard yet.
        let shown = shown.into_inner().unwrap_or_default();
        if let (Some(guard), Some(request)) = (&answer, shown.map(|guard| guard.token()).or(asked.last_token())) {
            guard.has_asked(request);
        }
        Ok(answer)
    }

    /// Holds this lock whenever nobody else does, for as long as this is polled, and shows its guard. A store that does not allow it is no
    /// reason not to wait.
    async fn show(&self, shown: &Mutex<Option<Guard>>, asked: &mut Doubts) -> Infallible {
        loop {
            match self.get_unasked(Limit::Forever, asked).await {
                Ok(None) => {}
                Ok(Some(guard)) => {
                    let loss = guard.loss_signal();
                    *unpoisoned(shown) = Some(guard);
                    loss.lost().await;
                    // From here on its own request is the last one that was asked for.
                    *unpoisoned(shown) = None;
                }
                Err(error) if error.is_retryable() => sleep(AGAIN).await,
                Err(_) => pending().await,
            }
        }
    }
}
