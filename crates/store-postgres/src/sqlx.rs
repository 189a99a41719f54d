//! The transactional mode on connections of sqlx.

use onlyonce_core::{OnceOutcome, Operation, Reply, StoreError, TxFailure, TxOptions, TxStep};
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, Connection, PgConnection, Postgres, Row};

use crate::error::Fault;
use crate::inside::Then;
use crate::link::{Cells, Link, Value};
use crate::store::PostgresStore;
use crate::transaction::{InTransaction, Pause, TRIES, Tried, went_first};

/// A transaction of sqlx.
type Transaction<'c> = sqlx::Transaction<'c, Postgres>;

impl PostgresStore {
    /// [`PostgresStore::once`] on a connection of sqlx.
    ///
    /// # Errors
    /// Those of [`PostgresStore::once`].
    ///
    /// # Cost
    /// Four round trips beside those of the transaction itself and of the work: sqlx sends one statement at a time.
    pub async fn once_sqlx(
        &self,
        connection: &mut PgConnection,
        operation: &Operation,
        work: impl AsyncFnMut(&mut Transaction<'_>) -> Result<Reply, TxFailure>,
    ) -> Result<OnceOutcome, StoreError> {
        self.once_sqlx_with(connection, operation, &TxOptions::default(), work).await
    }

    /// [`PostgresStore::once_sqlx`] with options.
    ///
    /// # Errors
    /// Those of [`PostgresStore::once`].
    pub async fn once_sqlx_with(
        &self,
        connection: &mut PgConnection,
        operation: &Operation,
        options: &TxOptions,
        mut work: impl AsyncFnMut(&mut Transaction<'_>) -> Result<Reply, TxFailure>,
    ) -> Result<OnceOutcome, StoreError> {
        let mut pause = Pause::default();
        for _ in 0..TRIES {
            let begun = connection.begin().await;
            let mut tx = begun.map_err(|error| Fault::from(error).before_sending().into_error("once"))?;
            let tried =
                match self.claim_inside(&mut tx, operation, options, Then::Work).await.map(TxStep::from) {
                    Ok(TxStep::Work(claim)) => {
                        let done = work(&mut tx).await;
                        claim.end(&mut tx, done).await
                    }
                    Ok(TxStep::Answer(outcome)) => Ok(Tried::Answered(outcome)),
                    Ok(TxStep::Retry) => Ok(Tried::Again),
                    Err(fault) => Err(fault),
                };
            let finished = match tried {
                Ok(Tried::Ran(pending)) => match tx.commit().await {
                    Ok(()) => return Ok(OnceOutcome::Ran(pending.after_commit())),
                    Err(error) => Err(Fault::from(error).in_commit()),
                },
                other => {
                    // Where even that fails the connection is gone, and the server takes it back.
                    let _ = tx.rollback().await;
                    other
                }
            };
            match finished {
                Ok(Tried::Answered(outcome)) => return Ok(outcome),
                Err(fault) if !fault.is_conflict() => return Err(fault.into_error("once")),
                Ok(Tried::Ran(_) | Tried::Again) | Err(_) => pause.wait().await,
            }
        }
        Err(went_first())
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
    let mut query = sqlx::query::<Postgres>(AssertSqlSafe(statement));
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
