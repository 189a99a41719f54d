//! On a database of PostgreSQL, with a pool of its own.

use std::time::Duration;

use onlyonce_core::{OnceOutcome, StoreError, StoreErrorKind};
use onlyonce_http::Keyed;
use onlyonce_prove::Order;
use onlyonce_store_postgres::deadpool_postgres::{Manager, Object, Pool, Runtime};
use onlyonce_store_postgres::tokio_postgres::{Config, NoTls, Transaction};
use onlyonce_store_postgres::{PostgresStore, TxFailure};

use super::{Fate, OUT_OF_LUCK, Row, Trouble, page, reply};

const CONNECTIONS: usize = 16;
const PATIENCE: Duration = Duration::from_secs(5);

pub(super) struct Shop {
    pub(super) store: PostgresStore,
    pool: Pool,
    ledger: String,
}

impl Shop {
    pub(super) async fn open(url: &str, ledger: &str) -> Result<Self, Trouble> {
        let store = PostgresStore::open(url).await?;
        // Its error would repeat parts of the URL.
        let config: Config = url.parse().map_err(|_| "its URL has what the shop cannot read")?;
        let pool = Pool::builder(Manager::new(config, NoTls))
            .max_size(CONNECTIONS)
            .runtime(Runtime::Tokio1)
            .wait_timeout(Some(PATIENCE))
            .create_timeout(Some(PATIENCE))
            .recycle_timeout(Some(PATIENCE))
            .build()?;
        // No uniqueness at all; one at a time, as shops start together.
        let table = format!(
            "SELECT pg_advisory_xact_lock(8140);
             CREATE TABLE IF NOT EXISTS {ledger} (id bigserial NOT NULL, operation bigint, amount bigint)"
        );
        pool.get().await?.batch_execute(&table).await?;
        Ok(Self { store, pool, ledger: ledger.to_owned() })
    }

    async fn client(&self) -> Result<Object, StoreError> {
        let client = self.pool.get().await;
        client.map_err(|error| StoreError::new(StoreErrorKind::Unavailable, "connect").with_source(error))
    }

    pub(super) async fn once(
        &self,
        request: &Keyed,
        order: Order,
        fate: Fate,
    ) -> Result<OnceOutcome, StoreError> {
        let mut client = self.client().await?;
        let insert = format!("INSERT INTO {} (operation, amount) VALUES ($1, $2) RETURNING id", self.ledger);
        let work = async move |tx: &mut Transaction<'_>| {
            tokio::time::sleep(fate.before).await;
            let (operation, amount) = (order.operation as i64, order.amount as i64);
            let id = tx.query_one(&insert, &[&operation, &amount]).await?.get(0);
            tokio::time::sleep(fate.after).await;
            if fate.fails { Err(TxFailure::transient(OUT_OF_LUCK)) } else { Ok(reply(order, id)) }
        };
        self.store.once_with(&mut client, request.operation(), &request.options(), work).await
    }

    pub(super) async fn executions(&self, after: i64) -> Result<Vec<Row>, Trouble> {
        let rows = self.client().await?.query(&page(&self.ledger, after), &[]).await?;
        Ok(rows.iter().map(|row| (row.get(0), row.get(1), row.get(2))).collect())
    }

    pub(super) async fn forget(&self) -> Result<(), Trouble> {
        Ok(self.client().await?.batch_execute(&format!("DROP TABLE {}", self.ledger)).await?)
    }
}
