//! Requests and answers as the servers know them: names, values, scripts and errors. Pure.

pub(crate) mod access;
pub(crate) mod address;
pub(crate) mod error;
pub(crate) mod name;
pub(crate) mod number;
pub(crate) mod order;
pub(crate) mod redirect;
pub(crate) mod request;
pub(crate) mod scripts;
pub(crate) mod server;
pub(crate) mod value;
