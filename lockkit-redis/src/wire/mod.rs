//! What is said to the servers and what they answer, and nothing else: pure. Names, values, scripts and errors.

pub(crate) mod error;
pub(crate) mod name;
pub(crate) mod number;
pub(crate) mod request;
pub(crate) mod scripts;
pub(crate) mod server;
pub(crate) mod value;
