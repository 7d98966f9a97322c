//! The worker processes of `race` and `compare`: this program again, with a verb that is not in the help.

use lockkit_compare::{WorkerProgram, worker};

use crate::{
    exit::{Exit, Failure},
    store::URL_VARIABLE,
};

/// The verb, which is for this program alone.
pub(crate) const VERB: &str = "__worker";

/// How a worker process is started.
pub(crate) fn program() -> Result<WorkerProgram, Failure> {
    // Workers are told the URL on stdin, which is for nobody else to read.
    Ok(WorkerProgram::this([VERB])?.without_variable(URL_VARIABLE))
}

/// Does one job and reports.
pub(crate) fn run() -> Exit {
    worker::run()?;
    Ok(0)
}
