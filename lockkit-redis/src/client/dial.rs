//! Connecting and logging in.

use lockkit_core::Result;
use redis::{AsyncConnectionConfig, RedisConnectionInfo, aio::MultiplexedConnection};
use tokio::task::AbortHandle;

use crate::{
    client::stream,
    config::RedisConfig,
    wire::{address::Address, error},
};

/// A connection to a server, with the task that moves its bytes. The bounds are those of the caller.
///
/// # Errors
/// `Misconfigured` if a server of another kind answers; `Denied` for a wrong login or certificate; `Unavailable`.
pub(crate) async fn connect(
    config: &RedisConfig,
    address: &Address,
    login: &RedisConnectionInfo,
    settings: AsyncConnectionConfig,
) -> Result<(MultiplexedConnection, AbortHandle)> {
    let (stream, first) = stream::open(config, &address.0, address.1).await?;
    let settings = settings.set_connection_timeout(None).set_response_timeout(None);
    let connected = MultiplexedConnection::new_with_config(login, stream, settings).await;
    let (connection, driver) = connected.map_err(|e| first.explain(error::map_login(&e)))?;
    Ok((connection, tokio::spawn(driver).abort_handle()))
}
