//! What a transaction of the caller's is asked, whichever driver it is of.

use std::future::{Future, poll_fn};
use std::mem::ManuallyDrop;
use std::task::Poll;

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

/// A transaction that is ended here, and not by its caller.
pub(crate) trait Ending: Link + Sized {
    /// Runs a statement and commits, at once where the driver can. When the statement fails nothing is committed; a fault is
    /// ambiguous where the answer to the COMMIT was lost.
    fn ask_and_commit(
        self,
        statement: &str,
        values: &[Value<'_>],
    ) -> impl Future<Output = Result<Vec<Self::Row>, Fault>> + Send;

    /// Takes everything back. Where even that fails the connection is gone, and the server takes it back.
    fn take_back(self) -> impl Future<Output = ()> + Send;
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

impl Ending for Transaction<'_> {
    async fn ask_and_commit(
        self,
        statement: &str,
        values: &[Value<'_>],
    ) -> Result<Vec<tokio_postgres::Row>, Fault> {
        let values: Vec<_> = values.iter().map(typed).collect();
        // Once both are sent it is over, however it ends: nothing is to be sent after them.
        let tx = ManuallyDrop::new(self);
        let mut asks: Exchange<'_> = Box::pin(tx.query_typed(statement, &values));
        // Sent by the first look at it, and no COMMIT before that: it would be of the rest alone.
        match poll_fn(|context| Poll::Ready(asks.as_mut().poll(context))).await {
            Poll::Pending => {
                let commits = Box::pin(async {
                    tx.batch_execute("COMMIT").await?;
                    Ok(Vec::new())
                });
                let mut answers = in_order(vec![asks, commits]).await.into_iter();
                let (rows, committed) = (answers.next().transpose(), answers.next().transpose());
                let rows = rows.and_then(|rows| committed.map(|_| rows.unwrap_or_default()));
                rows.map_err(|error| Fault::from(error).in_commit())
            }
            // Sent and answered while this thread was held up.
            Poll::Ready(Ok(rows)) => {
                drop(asks);
                let committed = ManuallyDrop::into_inner(tx).commit().await;
                committed.map(|()| rows).map_err(|error| Fault::from(error).in_commit())
            }
            // Refused, or not even sent.
            Poll::Ready(Err(error)) => {
                drop(asks);
                ManuallyDrop::into_inner(tx).take_back().await;
                Err(Fault::from(error).before_sending())
            }
        }
    }

    async fn take_back(self) {
        let _ = self.rollback().await;
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
