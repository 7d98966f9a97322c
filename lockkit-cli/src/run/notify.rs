//! What is heard of the renewals of a lease.

use std::sync::{Arc, Mutex};

use lockkit::{Event, Observer, store::unpoisoned};
use tokio::sync::Notify;

/// Tells when a lease was renewed, and remembers why the last renewal failed.
#[derive(Clone, Debug, Default)]
pub(super) struct RenewalNotify(Arc<NotifyState>);

#[derive(Debug, Default)]
struct NotifyState {
    renewed: Notify,
    error: Mutex<Option<String>>,
}

impl RenewalNotify {
    pub(super) fn notify(&self) {
        self.0.renewed.notify_one();
    }

    pub(super) async fn notified(&self) {
        self.0.renewed.notified().await;
    }

    pub(super) fn set_error(&self, error: Option<String>) {
        *unpoisoned(&self.0.error) = error;
    }

    pub(super) fn error(&self) -> Option<String> {
        unpoisoned(&self.0.error).clone()
    }
}

impl Observer for RenewalNotify {
    fn event(&self, event: &Event<'_>) {
        match event {
            Event::Renewed { .. } => {
                self.set_error(None);
                self.notify();
            }
            Event::RenewalFailed { error, .. } => self.set_error(Some(error.to_string())),
            _ => {}
        }
    }
}
