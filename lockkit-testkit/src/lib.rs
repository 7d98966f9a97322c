//! The proof: a compliance suite for lock stores, private throw-away servers to run it on, and faults to inject.
