//! The transactional mode on connections of sqlx.

use onlyonce_batch::Tries;
use onlyonce_core::{OnceOutcome, Operation, Reply, StoreError, TxFailure, TxOptions, TxStep};
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, Connection, PgConnection, Postgres, Row};

use crate::error::Fault;
use crate::link::{Cells, Ending, Link, Value};
use crate::store::PostgresStore;
use crate::transaction::{InTransaction, not_begun, without_work};

/// A transaction of sqlx.
type Transaction<'c> = sqlx::Transaction<'c, Postgres>;

impl PostgresStore {
    /// [`PostgresStore::once`] on a connection of sqlx.
    ///
    /// # Errors
    /// Those of [`PostgresStore::once`].
    ///
    /// # Cost
    /// Three round trips beside those of the transaction itself and of the work: sqlx sends one statement at a time.
    pub fn once_sqlx<'a, W>(
        &'a self,
        connection: &'a mut PgConnection,
        operation: &Operation,
        work: W,
    ) -> impl Future<Output = Result<OnceOutcome, StoreError>> + use<'a, W>
    where
        W: AsyncFnMut(&mut Transaction<'_>) -> Result<Reply, TxFailure> + 'a,
    {
        self.once_sqlx_with(connection, operation, &TxOptions::default(), work)
    }

    /// [`PostgresStore::once_sqlx`] with options.
    ///
    /// # Errors
    /// Those of [`PostgresStore::once`].
    pub fn once_sqlx_with<'a, W>(
        &'a self,
        connection: &'a mut PgConnection,
        operation: &Operation,
        options: &TxOptions,
        mut work: W,
    ) -> impl Future<Output = Result<OnceOutcome, StoreError>> + use<'a, W>
    where
        W: AsyncFnMut(&mut Transaction<'_>) -> Result<Reply, TxFailure> + 'a,
    {
        let (operation, options) = (operation.clone(), *options);
        async move {
            let mut tries = Tries::default();
            while tries.next().await {
                let begun = connection.begin().await;
                let mut tx = begun.map_err(|error| not_begun(Fault::from(error)))?;
                let ended = match self.step(&mut tx, &operation, &options).await {
                    Ok(TxStep::Work(claim)) => {
                        let done = work(&mut tx).await;
                        claim.end(tx, done).await
                    }
                    step => without_work(tx, step).await,
                };
                if let Some(outcome) = ended? {
                    return Ok(outcome);
                }
            }
            Err(Tries::used_up("once"))
        }
    }
}

impl InTransaction for Transaction<'_> {}

/// A connection on which a transaction is open.
impl InTransaction for PgConnection {}

impl Link for Transaction<'_> {
    type Row = PgRow;

    async fn script(&mut self, sql: &str) -> Result<(), Fault> {
        script(self, sql).await
    }

    async fn ask(
        &mut self,
        before: &str,
        statement: &str,
        values: &[Value<'_>],
        after: &str,
    ) -> Result<Vec<PgRow>, Fault> {
        ask(self, before, statement, values, after).await
    }
}

impl Ending for Transaction<'_> {
    async fn ask_and_commit(mut self, statement: &str, values: &[Value<'_>]) -> Result<Vec<PgRow>, Fault> {
        match ask(&mut self, "", statement, values, "").await {
            Ok(rows) => match self.commit().await {
                Ok(()) => Ok(rows),
                Err(error) => Err(Fault::from(error).in_commit()),
            },
            Err(fault) => {
                self.take_back().await;
                Err(fault)
            }
        }
    }

    async fn take_back(self) {
        let _ = self.rollback().await;
    }
}

impl Link for PgConnection {
    type Row = PgRow;

    async fn script(&mut self, sql: &str) -> Result<(), Fault> {
        script(self, sql).await
    }

    async fn ask(
        &mut self,
        before: &str,
        statement: &str,
        values: &[Value<'_>],
        after: &str,
    ) -> Result<Vec<PgRow>, Fault> {
        ask(self, before, statement, values, after).await
    }
}

async fn script(connection: &mut PgConnection, sql: &str) -> Result<(), Fault> {
    // Ours, without anything of a caller's in it.
    let done = sqlx::raw_sql(AssertSqlSafe(sql)).execute(connection).await;
    done.map(drop).map_err(|error| Fault::from(error).before_sending())
}

async fn ask(
    connection: &mut PgConnection,
    before: &str,
    statement: &str,
    values: &[Value<'_>],
    after: &str,
) -> Result<Vec<PgRow>, Fault> {
    if !before.is_empty() {
        script(connection, before).await?;
    }
    // Named, it would stay on the connection, and behind a pooler on the next one's.
    let mut query = sqlx::query::<Postgres>(AssertSqlSafe(statement)).persistent(false);
    for value in values {
        query = match *value {
            Value::Text(text) => query.bind(text),
            Value::MaybeText(text) => query.bind(text),
            Value::Int(number) => query.bind(number),
            Value::MaybeInt(number) => query.bind(number),
            Value::Bytes(bytes) => query.bind(bytes),
        };
    }
    let rows = query.fetch_all(&mut *connection).await;
    let rows = rows.map_err(|error| Fault::from(error).before_sending())?;
    if !after.is_empty() {
        script(connection, after).await?;
    }
    Ok(rows)
}

impl Cells for PgRow {
    fn text(&self, column: usize) -> Option<Option<&str>> {
        self.try_get(column).ok()
    }

    fn int(&self, column: usize) -> Option<Option<i64>> {
        self.try_get(column).ok()
    }

    fn bytes(&self, column: usize) -> Option<Option<&[u8]>> {
        self.try_get(column).ok()
    }
}
