//! What is said to the servers and what they answer, and nothing else: pure. Names, statements and errors.

pub(crate) mod error;
pub(crate) mod name;
pub(crate) mod row;
pub(crate) mod statements;
