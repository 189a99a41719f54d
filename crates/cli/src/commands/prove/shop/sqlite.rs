//! On a file of SQLite.

use std::path::PathBuf;
use std::time::Duration;

use onlyonce_core::{OnceOutcome, StoreError};
use onlyonce_http::Keyed;
use onlyonce_prove::Order;
use onlyonce_store_sqlite::rusqlite::{Connection, params};
use onlyonce_store_sqlite::{SqliteStore, TxFailure};

use super::{Fate, OUT_OF_LUCK, Row, Trouble, page, reply};

const BUSY_TIMEOUT: Duration = Duration::from_secs(10);

/// There is one writer for all: what takes long elsewhere must be short here.
const SHORTER: u32 = 10;

pub(super) struct Shop {
    pub(super) store: SqliteStore,
    path: PathBuf,
    ledger: String,
}

impl Shop {
    pub(super) async fn open(path: PathBuf, ledger: &str) -> Result<Self, Trouble> {
        let store = SqliteStore::open(&path).await?;
        let shop = Self { store, path, ledger: ledger.to_owned() };
        // No uniqueness but that of the number, which the file gives.
        shop.connect()?.execute_batch(&format!(
            "CREATE TABLE IF NOT EXISTS {ledger} (id INTEGER PRIMARY KEY AUTOINCREMENT, operation INTEGER, amount INTEGER)"
        ))?;
        Ok(shop)
    }

    fn connect(&self) -> Result<Connection, Trouble> {
        let connection = Connection::open(&self.path)?;
        connection.busy_timeout(BUSY_TIMEOUT)?;
        Ok(connection)
    }

    pub(super) async fn once(
        &self,
        request: &Keyed,
        order: Order,
        fate: Fate,
    ) -> Result<OnceOutcome, StoreError> {
        let insert = format!("INSERT INTO {} (operation, amount) VALUES (?1, ?2) RETURNING id", self.ledger);
        let work = move |tx: &onlyonce_store_sqlite::rusqlite::Transaction<'_>| {
            std::thread::sleep(fate.before / SHORTER);
            let (operation, amount) = (order.operation as i64, order.amount as i64);
            let id = tx.query_row(&insert, params![operation, amount], |row| row.get(0))?;
            std::thread::sleep(fate.after / SHORTER);
            if fate.fails { Err(TxFailure::transient(OUT_OF_LUCK)) } else { Ok(reply(order, id)) }
        };
        self.store.once_with(request.operation(), request.options(), work).await
    }

    pub(super) fn executions(&self, after: i64) -> Result<Vec<Row>, Trouble> {
        let connection = self.connect()?;
        let mut query = connection.prepare(&page(&self.ledger, after))?;
        let rows = query.query_map([], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))?;
        Ok(rows.collect::<Result<_, _>>()?)
    }

    pub(super) fn forget(&self) -> Result<(), Trouble> {
        Ok(self.connect()?.execute_batch(&format!("DROP TABLE {}", self.ledger))?)
    }
}
