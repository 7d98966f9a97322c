//! What happens in the life of a lock, for logs, metrics and tests.

use std::{fmt, time::Duration};

use crate::{Error, Fence, LockKey, LossReason};

/// Is told what happens to the locks of a [`Locker`](crate::Locker).
///
/// Called in the middle of things: it must return at once and must not take locks of its own `Locker`. If it panics, that
/// changes nothing for the lock; only the panic hook tells of it.
pub trait Observer: fmt::Debug + Send + Sync + 'static {
    /// Something happened.
    fn event(&self, event: &Event<'_>);
}

/// Something that happened.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// Connecting to the store showed that something puts locks at risk. Told once, when the locker is built.
    Warned {
        /// What: one line, without secrets.
        warning: &'a str,
    },
    /// A lease was given out, with its first guard. Nothing is told of guards that an [`Owner`](crate::Owner) nests in it.
    Acquired {
        /// The lock.
        key: &'a LockKey,
        /// Its fence.
        fence: Fence,
        /// The time from asking to having.
        waited: Duration,
        /// Whether it came from another task of this process, without asking the store.
        handed_over: bool,
    },
    /// A caller's time was up while another had the lock.
    Contended {
        /// The lock.
        key: &'a LockKey,
        /// The time spent.
        waited: Duration,
    },
    /// A lease was renewed.
    Renewed {
        /// The lock.
        key: &'a LockKey,
        /// What had been left of the old lease when the answer came. Near zero means trouble ahead.
        margin: Duration,
    },
    /// A renewal failed; the deadline stands.
    RenewalFailed {
        /// The lock.
        key: &'a LockKey,
        /// What went wrong.
        error: &'a Error,
        /// What is left of the lease.
        left: Duration,
    },
    /// A lease was lost.
    Lost {
        /// The lock.
        key: &'a LockKey,
        /// Why.
        reason: LossReason,
        /// How long it had been held.
        held: Duration,
    },
    /// The last guard of a lease was released or dropped.
    Released {
        /// The lock.
        key: &'a LockKey,
        /// How long it had been held.
        held: Duration,
    },
}

/// Counts and times the life of locks with the `metrics` facade.
///
/// | name | kind | labels |
/// |---|---|---|
/// | `lockkit_acquire_wait_seconds` | histogram | `outcome` = `acquired`, `handed_over`, `contended` |
/// | `lockkit_hold_seconds` | histogram | |
/// | `lockkit_renew_margin_seconds` | histogram | |
/// | `lockkit_renew_failures_total` | counter | `kind` |
/// | `lockkit_lost_total` | counter | `reason` |
///
/// The label `class` is what the function given to [`Metrics::classified`] makes of the lock's name; without one it is
/// absent. Names themselves are never labels: there may be millions.
#[cfg(feature = "metrics")]
#[derive(Clone, Copy, Debug, Default)]
pub struct Metrics {
    class: Option<fn(&LockKey) -> &'static str>,
}

#[cfg(feature = "metrics")]
impl Metrics {
    /// Metrics with a label `class` on everything.
    #[must_use]
    pub fn classified(class: fn(&LockKey) -> &'static str) -> Self {
        Self { class: Some(class) }
    }

    fn labels(&self, key: &LockKey, more: Option<(&'static str, String)>) -> Vec<metrics::Label> {
        let class = self.class.map(|class| metrics::Label::from_static_parts("class", class(key)));
        class.into_iter().chain(more.map(|(name, value)| metrics::Label::new(name, value))).collect()
    }
}

#[cfg(feature = "metrics")]
impl Observer for Metrics {
    fn event(&self, event: &Event<'_>) {
        let waited = |key, waited: &Duration, outcome: &str| {
            let labels = self.labels(key, Some(("outcome", outcome.to_owned())));
            metrics::histogram!("lockkit_acquire_wait_seconds", labels).record(waited.as_secs_f64());
        };
        match event {
            // Not a number, and nothing that changes.
            Event::Warned { .. } => {}
            Event::Acquired { key, waited: time, handed_over, .. } => {
                waited(key, time, if *handed_over { "handed_over" } else { "acquired" });
            }
            Event::Contended { key, waited: time } => waited(key, time, "contended"),
            Event::Renewed { key, margin } => {
                metrics::histogram!("lockkit_renew_margin_seconds", self.labels(key, None))
                    .record(margin.as_secs_f64());
            }
            Event::RenewalFailed { key, error, .. } => {
                let labels = self.labels(key, Some(("kind", error.kind().to_string())));
                metrics::counter!("lockkit_renew_failures_total", labels).increment(1);
            }
            Event::Lost { key, reason, held } => {
                let labels = self.labels(key, Some(("reason", format!("{reason:?}"))));
                metrics::counter!("lockkit_lost_total", labels).increment(1);
                metrics::histogram!("lockkit_hold_seconds", self.labels(key, None)).record(held.as_secs_f64());
            }
            Event::Released { key, held } => {
                metrics::histogram!("lockkit_hold_seconds", self.labels(key, None)).record(held.as_secs_f64());
            }
        }
    }
}
