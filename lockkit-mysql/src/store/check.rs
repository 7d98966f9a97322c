//! Whether the server and the tables can keep locks, asked when the store connects.

use lockkit_core::{Finding, Result};

use crate::{
    client::{connection::Bound, pool::ConnectionClass, settings::of_server},
    config::MySqlConfig,
    store::{MySqlStore, schema},
    wire::settings,
};

/// Checks the server and the table, which is made if it is missing and that is allowed; what the settings put at risk, in words.
pub(super) async fn check(store: &MySqlStore, config: &MySqlConfig) -> Result<Vec<String>> {
    let mut connection = store.pool.first_connection(config, Bound::new(store.timeout)).await?;
    let warnings = Finding::admit(&settings::judge(&of_server(&mut connection).await?))?;
    if config.create {
        schema::create_if_missing(&mut connection, config).await?;
    }
    schema::check_table(&mut connection, config).await?;
    Ok(warnings)
}

/// Why claims can't be kept, if they can't.
pub(super) async fn no_claims(store: &MySqlStore, config: &MySqlConfig) -> Result<Option<String>> {
    // A refusal closes the connection.
    let connection = || store.pool.connection(ConnectionClass::Common, Bound::new(store.timeout));
    let mut why = schema::no_claims(&mut connection().await?, config).await?;
    if why.is_some() && config.create && schema::create_claims(&mut connection().await?, config).await? {
        why = schema::no_claims(&mut connection().await?, config).await?;
    }
    Ok(why.map(|why| why.in_words()))
}
