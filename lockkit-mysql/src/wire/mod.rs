//! Requests and answers as the servers know them: names, statements, rows and errors. Pure.

pub(crate) mod error;
pub(crate) mod mode;
pub(crate) mod name;
pub(crate) mod order;
pub(crate) mod row;
pub(crate) mod settings;
pub(crate) mod sharing;
pub(crate) mod size;
pub(crate) mod statements;
pub(crate) mod table;
pub(crate) mod terms;
