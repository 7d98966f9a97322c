//! Reading the settings of a server or of a session.

use lockkit_core::Result;

use crate::{
    client::connection::Connection,
    wire::{
        row::column,
        settings::{NAMES, Settings},
    },
};

/// The settings that new sessions start with.
pub(crate) async fn of_server(connection: &mut Connection) -> Result<Settings> {
    read(connection, "GLOBAL").await
}

/// The settings of this connection's session.
#[cfg(feature = "doctor")]
pub(crate) async fn of_session(connection: &mut Connection) -> Result<Settings> {
    read(connection, "SESSION").await
}

async fn read(connection: &mut Connection, scope: &str) -> Result<Settings> {
    let show = format!("SHOW {scope} VARIABLES WHERE Variable_name IN ({NAMES})");
    let rows = connection.rows(sqlx::query(sqlx::AssertSqlSafe(show))).await?;
    rows.iter().map(|row| Ok((column::<String>(row, 0)?.to_lowercase(), column::<String>(row, 1)?))).collect()
}
