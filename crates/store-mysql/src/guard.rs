//! [`Transaction`]: a transaction that is over stays over.

use std::error::Error as StdError;
use std::fmt;
use std::pin::Pin;

use mysql_async::consts::StatusFlags;
use mysql_async::prelude::{AsQuery, Queryable, StatementLike};
use mysql_async::{BinaryProtocol, Error, Params, QueryResult, Row, Statement, TextProtocol};
use onlyonce_core::{StoreError, StoreErrorKind};

use crate::error::Fault;
use crate::session::Changed;

// The driver's traits are written with this, and keep the name to themselves.
type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, Error>> + Send + 'a>>;

/// A transaction on the caller's connection, to be used like the driver's own.
///
/// After a deadlock the server has rolled the whole transaction back, and whatever is sent next would commit by itself,
/// without its record. So would what comes after DDL, which commits. This handle finds out, by the error or by the status that
/// the server tells with each answer, and refuses everything from then on but [`rollback`](Self::rollback).
///
/// Dropped without [`commit`](Self::commit) it is rolled back before the connection is used again.
#[must_use = "commit it or roll it back"]
#[derive(Debug)]
pub struct Transaction<'c> {
    tx: mysql_async::Transaction<'c>,
    over: Option<Over>,
}

/// Why a transaction takes no more statements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Over {
    /// The server rolled it back, and it may be run again.
    Deadlock,
    /// It was committed or rolled back by a statement in it.
    Ended,
    /// The connection is gone, and with it the transaction.
    Broken,
}

impl fmt::Display for Over {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Deadlock => "the transaction met another one in a deadlock and was rolled back: run it again from its start",
            Self::Ended => "the transaction was ended by a statement in it, such as COMMIT or DDL",
            Self::Broken => "the connection of the transaction is gone, and the server rolled it back",
        })
    }
}

impl StdError for Over {}

impl<'c> From<mysql_async::Transaction<'c>> for Transaction<'c> {
    fn from(tx: mysql_async::Transaction<'c>) -> Self {
        Self { tx, over: None }
    }
}

impl Transaction<'_> {
    /// Commits.
    ///
    /// # Errors
    /// [`StoreErrorKind::Conflict`] when it was rolled back before. When `may_have_applied()` the answer was lost: ask
    /// again with the same operation, and its record tells.
    pub async fn commit(mut self) -> Result<(), StoreError> {
        self.check().await.map_err(|fault| fault.into_error("commit"))?;
        self.tx.commit().await.map_err(|error| Fault::from(error).into_error("commit"))
    }

    /// Takes everything back.
    ///
    /// # Errors
    /// [`StoreError`] when the connection is gone: then the server takes it back.
    pub async fn rollback(self) -> Result<(), StoreError> {
        self.tx.rollback().await.map_err(|error| Fault::from(error).before_sending().into_error("rollback"))
    }

    /// Whether the server rolled it back in a deadlock: then it is worth running again.
    pub fn met_a_deadlock(&self) -> bool {
        self.over == Some(Over::Deadlock)
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.over == Some(Over::Broken)
    }

    /// Finds out whether it is still open.
    pub(crate) async fn check(&mut self) -> Result<(), Fault> {
        if self.over.is_none() && !is_open(&self.tx) {
            // After an error there is no status, and that of a statement which was prepared is none: ask.
            if let Err(error) = self.tx.ping().await {
                note(&mut self.over, &error);
            }
            if self.over.is_none() && !is_open(&self.tx) {
                self.over = Some(Over::Ended);
            }
        }
        match self.over {
            None => Ok(()),
            Some(over @ Over::Broken) => Err(Fault::new(StoreErrorKind::Unavailable, over.to_string())),
            Some(over) => Err(Fault::conflict(over.to_string())),
        }
    }

    pub(crate) async fn run(&mut self, sql: &str) -> Result<(), Fault> {
        self.check().await?;
        let done = self.tx.query_drop(sql).await;
        self.noted(done)
    }

    /// Also in a transaction that is over: of the session, not of it.
    pub(crate) async fn run_always(&mut self, sql: &str) -> Result<(), Fault> {
        self.tx.query_drop(sql).await.map_err(Fault::from)
    }

    /// Sends statements at once and answers what the first of them changed.
    pub(crate) async fn change(&mut self, statements: &[&str]) -> Result<Changed, Fault> {
        self.check().await?;
        let tx = &mut self.tx;
        let done = async {
            let result = tx.query_iter(statements.join(";\n")).await?;
            let changed = Changed { rows: result.affected_rows(), told: result.last_insert_id() };
            result.drop_result().await?;
            Ok(changed)
        };
        let done = done.await;
        self.noted(done)
    }

    /// Sends statements at once and answers the rows of each. The first that fails ends it; what came before it stays done.
    pub(crate) async fn script(&mut self, statements: &[String]) -> Result<Vec<Vec<Row>>, Fault> {
        self.check().await?;
        let (text, count) = (statements.join(";\n"), statements.len());
        let tx = &mut self.tx;
        let done = async {
            let mut result = tx.query_iter(text).await?;
            let mut sets = Vec::with_capacity(count);
            for _ in 0..count {
                sets.push(result.collect().await?);
            }
            result.drop_result().await?;
            Ok(sets)
        };
        let done = done.await;
        self.noted(done)
    }

    fn noted<T>(&mut self, done: Result<T, Error>) -> Result<T, Fault> {
        done.map_err(|error| {
            note(&mut self.over, &error);
            Fault::from(error)
        })
    }

    async fn checked(&mut self) -> Result<(), Error> {
        let checked = self.check().await;
        checked.map_err(|_| Error::Other(Box::new(self.over.unwrap_or(Over::Ended))))
    }
}

fn is_open(tx: &mysql_async::Transaction<'_>) -> bool {
    tx.last_ok_packet().is_some_and(|ok| ok.status_flags().contains(StatusFlags::SERVER_STATUS_IN_TRANS))
}

fn note(over: &mut Option<Over>, error: &Error) {
    use crate::error::code::{CHANGED_SINCE_SNAPSHOT, DEADLOCK};
    match error {
        Error::Server(said) if matches!(said.code, DEADLOCK | CHANGED_SINCE_SNAPSHOT) => {
            *over = Some(Over::Deadlock)
        }
        Error::Server(_) => {}
        _ => *over = Some(Over::Broken),
    }
}

/// As the driver's own transaction; each statement is refused once the transaction is over.
impl Queryable for Transaction<'_> {
    fn ping(&mut self) -> BoxFuture<'_, ()> {
        self.tx.ping()
    }

    fn query_iter<'a, Q>(&'a mut self, query: Q) -> BoxFuture<'a, QueryResult<'a, 'static, TextProtocol>>
    where
        Q: AsQuery + 'a,
    {
        Box::pin(async move {
            self.checked().await?;
            let Self { tx, over } = self;
            tx.query_iter(query).await.inspect_err(|error| note(over, error))
        })
    }

    fn prep<'a, Q>(&'a mut self, query: Q) -> BoxFuture<'a, Statement>
    where
        Q: AsQuery + 'a,
    {
        Box::pin(async move {
            self.checked().await?;
            self.tx.prep(query).await
        })
    }

    fn close(&mut self, statement: Statement) -> BoxFuture<'_, ()> {
        self.tx.close(statement)
    }

    fn exec_iter<'a: 's, 's, Q, P>(
        &'a mut self,
        statement: Q,
        params: P,
    ) -> BoxFuture<'s, QueryResult<'a, 'static, BinaryProtocol>>
    where
        Q: StatementLike + 's,
        P: Into<Params>,
    {
        let params = params.into();
        Box::pin(async move {
            self.checked().await?;
            let Self { tx, over } = self;
            tx.exec_iter(statement, params).await.inspect_err(|error| note(over, error))
        })
    }

    fn exec_batch<'a: 'b, 'b, S, P, I>(&'a mut self, statement: S, params: I) -> BoxFuture<'b, ()>
    where
        S: StatementLike + 'b,
        I: IntoIterator<Item = P> + Send + 'b,
        I::IntoIter: Send,
        P: Into<Params> + Send,
    {
        Box::pin(async move {
            self.checked().await?;
            let Self { tx, over } = self;
            tx.exec_batch(statement, params).await.inspect_err(|error| note(over, error))
        })
    }
}
