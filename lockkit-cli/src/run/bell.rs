//! What is heard of the renewals of a lease.

use std::sync::{Arc, Mutex, PoisonError};

use lockkit::{Event, Observer};
use tokio::sync::Notify;

/// Rings when a lease was renewed, and remembers why the last renewal failed.
#[derive(Clone, Debug, Default)]
pub(super) struct Bell(Arc<BellState>);

#[derive(Debug, Default)]
struct BellState {
    rung: Notify,
    error: Mutex<Option<String>>,
}

impl Bell {
    pub(super) fn ring(&self) {
        self.0.rung.notify_one();
    }

    pub(super) async fn rung(&self) {
        self.0.rung.notified().await;
    }

    pub(super) fn set_error(&self, error: Option<String>) {
        *self.0.error.lock().unwrap_or_else(PoisonError::into_inner) = error;
    }

    pub(super) fn error(&self) -> Option<String> {
        self.0.error.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Observer for Bell {
    fn event(&self, event: &Event<'_>) {
        match event {
            Event::Renewed { .. } => {
                self.set_error(None);
                self.ring();
            }
            Event::RenewalFailed { error, .. } => self.set_error(Some(error.to_string())),
            _ => {}
        }
    }
}
