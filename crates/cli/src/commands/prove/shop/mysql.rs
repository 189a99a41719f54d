//! On a database of MySQL or MariaDB, with a pool of its own.

use std::time::Duration;

use onlyonce_core::{OnceOutcome, StoreError, StoreErrorKind};
use onlyonce_http::Keyed;
use onlyonce_prove::Order;
use onlyonce_store_mysql::mysql_async::prelude::Queryable;
use onlyonce_store_mysql::mysql_async::{Conn, Opts, OptsBuilder, Pool, PoolConstraints, PoolOpts};
use onlyonce_store_mysql::{MysqlStore, Transaction, TxFailure};
use tokio::time::timeout;

use super::{Fate, OUT_OF_LUCK, Row, Trouble, page, reply};

const PATIENCE: Duration = Duration::from_secs(5);

pub(super) struct Shop {
    pub(super) store: MysqlStore,
    pool: Pool,
    ledger: String,
}

impl Shop {
    pub(super) async fn open(url: &str, ledger: &str) -> Result<Self, Trouble> {
        let store = MysqlStore::open(url).await?;
        // Its error would repeat parts of the URL.
        let opts = Opts::from_url(&url.replacen("mariadb:", "mysql:", 1))
            .map_err(|_| "its URL has what the shop cannot read")?;
        let constraints = PoolConstraints::new(0, 16).ok_or("sixteen is more than none")?;
        let opts = OptsBuilder::from_opts(opts)
            .prefer_socket(false)
            .pool_opts(PoolOpts::default().with_constraints(constraints));
        let pool = Pool::new(opts);
        // No uniqueness: the number has an index because the server wants one.
        let table = format!(
            "CREATE TABLE IF NOT EXISTS {ledger} (id bigint NOT NULL AUTO_INCREMENT, operation bigint, amount bigint, KEY (id))
             ENGINE=InnoDB"
        );
        pool.get_conn().await?.query_drop(table).await?;
        Ok(Self { store, pool, ledger: ledger.to_owned() })
    }

    async fn conn(&self) -> Result<Conn, StoreError> {
        let unavailable = || StoreError::new(StoreErrorKind::Unavailable, "connect");
        match timeout(PATIENCE, self.pool.get_conn()).await {
            Ok(conn) => conn.map_err(|error| unavailable().with_source(error)),
            Err(silence) => Err(unavailable().with_source(silence)),
        }
    }

    pub(super) async fn once(
        &self,
        request: &Keyed,
        order: Order,
        fate: Fate,
    ) -> Result<OnceOutcome, StoreError> {
        let mut conn = self.conn().await?;
        let insert = format!("INSERT INTO {} (operation, amount) VALUES (?, ?)", self.ledger);
        let work = async move |tx: &mut Transaction<'_>| {
            tokio::time::sleep(fate.before).await;
            tx.exec_drop(&insert, (order.operation as i64, order.amount as i64)).await?;
            let id = tx.query_first("SELECT LAST_INSERT_ID()").await?.unwrap_or_default();
            tokio::time::sleep(fate.after).await;
            if fate.fails { Err(TxFailure::transient(OUT_OF_LUCK)) } else { Ok(reply(order, id)) }
        };
        self.store.once_with(&mut conn, request.operation(), &request.options(), work).await
    }

    pub(super) async fn executions(&self, after: i64) -> Result<Vec<Row>, Trouble> {
        Ok(self.conn().await?.query(page(&self.ledger, after)).await?)
    }

    pub(super) async fn forget(&self) -> Result<(), Trouble> {
        Ok(self.conn().await?.query_drop(format!("DROP TABLE {}", self.ledger)).await?)
    }
}
