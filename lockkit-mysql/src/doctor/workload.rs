//! What the server has done, and what memory it uses.

use std::collections::HashMap;

use lockkit_core::{Result, Workload};

use crate::{
    client::{connection::Bound, raw::Replicas},
    config::MySqlConfig,
    store::MySqlStore,
    wire::row::column,
};

const ASK: &str = "SHOW GLOBAL STATUS WHERE Variable_name IN ('Questions', 'Memory_used')";

/// What the server has done since it started: statements, and on MariaDB the memory that its connections and tables have. Neither of
/// the two tells the processor time, nor MySQL the memory in its status.
///
/// # Errors
/// `InvalidInput` for a wrong configuration, or a database that does not exist; `Unavailable`, `TimedOut` or `Denied` if the server
/// can't be asked at all.
pub async fn workload(config: &MySqlConfig) -> Result<Workload> {
    let store = MySqlStore::on(Replicas::Admitted, config.clone())?;
    let told = async {
        let mut connection = store.pool.first_connection(config, Bound::new(store.timeout)).await?;
        let rows = connection.rows(sqlx::query(ASK)).await?;
        let pairs = rows.iter().map(|row| Ok((column::<String>(row, 0)?, column::<String>(row, 1)?)));
        let status = pairs.collect::<Result<HashMap<_, _>>>()?;
        let number = |name| status.get(name).and_then(|value: &String| value.parse().ok());
        Ok(Workload { requests: number("Questions"), processor: None, memory: number("Memory_used") })
    };
    told.await.map_err(|e: lockkit_core::Error| e.at("examine", None, &store.info.name))
}
