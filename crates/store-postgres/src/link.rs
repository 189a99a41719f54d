//! What a transaction of the caller's is asked, whichever driver it is of.

use std::future::Future;

use tokio_postgres::Transaction;
use tokio_postgres::types::{ToSql, Type};

use crate::error::Fault;
use crate::session::{Exchange, in_order};

/// An open transaction of a driver.
///
/// No fault of it is ambiguous: what was not committed is taken back.
pub(crate) trait Link: Send {
    type Row: Cells + Send + Sync;

    /// Runs SQL without parameters.
    fn script(&mut self, sql: &str) -> impl Future<Output = Result<(), Fault>> + Send;

    /// Runs a script, a statement and a script, at once where the driver can. The first fault counts.
    fn ask(
        &mut self,
        before: &str,
        statement: &str,
        values: &[Value<'_>],
        after: &str,
    ) -> impl Future<Output = Result<Vec<Self::Row>, Fault>> + Send;
}

/// A parameter, of the few types that every driver has.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Value<'a> {
    Text(&'a str),
    MaybeText(Option<&'a str>),
    Int(i64),
    MaybeInt(Option<i64>),
    Bytes(&'a [u8]),
}

/// The columns of a row: `text`, `int8` and `bytea`, each perhaps NULL.
pub(crate) trait Cells {
    fn text(&self, column: usize) -> Option<Option<&str>>;
    fn int(&self, column: usize) -> Option<Option<i64>>;
    fn bytes(&self, column: usize) -> Option<Option<&[u8]>>;
}

impl Link for Transaction<'_> {
    type Row = tokio_postgres::Row;

    async fn script(&mut self, sql: &str) -> Result<(), Fault> {
        self.batch_execute(sql).await.map_err(|error| Fault::from(error).before_sending())
    }

    async fn ask(
        &mut self,
        before: &str,
        statement: &str,
        values: &[Value<'_>],
        after: &str,
    ) -> Result<Vec<tokio_postgres::Row>, Fault> {
        let tx = &*self;
        let values: Vec<_> = values.iter().map(typed).collect();
        // Not prepared: it would cost a round trip and, behind a pooler, outlive the transaction.
        let mut exchanges: Vec<Exchange<'_>> = vec![Box::pin(tx.query_typed(statement, &values))];
        let script = |sql| async move {
            tx.batch_execute(sql).await?;
            Ok(Vec::new())
        };
        if !before.is_empty() {
            exchanges.insert(0, Box::pin(script(before)));
        }
        if !after.is_empty() {
            exchanges.push(Box::pin(script(after)));
        }
        let place = usize::from(!before.is_empty());
        let mut rows = Vec::new();
        for (n, answer) in in_order(exchanges).await.into_iter().enumerate() {
            let answer = answer.map_err(|error| Fault::from(error).before_sending())?;
            if n == place {
                rows = answer;
            }
        }
        Ok(rows)
    }
}

fn typed<'v>(value: &'v Value<'_>) -> (&'v (dyn ToSql + Sync), Type) {
    match value {
        Value::Text(text) => (text, Type::TEXT),
        Value::MaybeText(text) => (text, Type::TEXT),
        Value::Int(number) => (number, Type::INT8),
        Value::MaybeInt(number) => (number, Type::INT8),
        Value::Bytes(bytes) => (bytes, Type::BYTEA),
    }
}

impl Cells for tokio_postgres::Row {
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
