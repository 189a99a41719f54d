//! [`Transaction`]: a transaction that is over stays over.

use std::error::Error as StdError;
use std::fmt;
use std::pin::Pin;
use std::task::{Context, Waker};

use mysql_async::consts::StatusFlags;
use mysql_async::prelude::{AsQuery, Queryable, StatementLike};
use mysql_async::{BinaryProtocol, DriverError, Error, Params, QueryResult, Row, Statement, TextProtocol};
use onlyonce_core::{StoreError, StoreErrorKind};

use crate::error::{Fault, code};
use crate::session::Changed;

// The driver's traits are written with this, and keep the name to themselves.
type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, Error>> + Send + 'a>>;

/// A transaction on the caller's connection, to be used like the driver's own.
///
/// After a deadlock the server has rolled the whole transaction back, and whatever is sent next would commit by itself,
/// without its record. So would what comes after DDL, which commits. This handle finds out, by the error or by the status that
/// the server tells with each answer, and refuses everything from then on but [`rollback`](Self::rollback).
///
/// So is everything after a statement that was given up before its answer came, as by a `timeout` around it: the next
/// statement would read that answer as its own.
///
/// Dropped without [`commit`](Self::commit) it is rolled back before the connection is used again. Dropped while a statement
/// is under way, it leaves the connection to be closed: [`MysqlStore::begin`](crate::MysqlStore::begin) refuses it, and a pool
/// of the driver closes it.
#[must_use = "commit it or roll it back"]
#[derive(Debug)]
pub struct Transaction<'c> {
    // Taken out by what ends it.
    tx: Option<mysql_async::Transaction<'c>>,
    over: Option<Over>,
    // A statement was sent, and its answer has not come. The driver has such a mark too, but clears it too early where it
    // reads the rest of an earlier answer first.
    asked: bool,
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
    /// An answer was never read, so the next one would be misread.
    GivenUp,
}

impl fmt::Display for Over {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Deadlock => "the transaction met another one in a deadlock and was rolled back: run it again from its start",
            Self::Ended => "the transaction was ended by a statement in it, such as COMMIT or DDL",
            Self::Broken => "the connection of the transaction is gone, and the server rolled it back",
            Self::GivenUp => "a statement of the transaction was given up before its answer came: close the connection, and the server rolls back what is open",
        })
    }
}

impl StdError for Over {}

impl<'c> From<mysql_async::Transaction<'c>> for Transaction<'c> {
    fn from(tx: mysql_async::Transaction<'c>) -> Self {
        Self { tx: Some(tx), over: None, asked: false }
    }
}

impl Drop for Transaction<'_> {
    fn drop(&mut self) {
        if let Some(tx) = self.tx.as_mut().filter(|_| self.asked) {
            mark_given_up(tx);
        }
    }
}

// The driver's mark is set by whatever is begun on the connection and not finished. An answer that was not read may finish it
// at once, so it takes one more for each of those.
fn mark_given_up(tx: &mut mysql_async::Transaction<'_>) {
    let mut context = Context::from_waker(Waker::noop());
    for _ in 0..8 {
        if tx.is_disconnected() {
            return;
        }
        let _ = tx.ping().as_mut().poll(&mut context);
    }
}

// Whatever takes it out takes the handle too.
fn taken<'t, 'c>(
    tx: &'t mut Option<mysql_async::Transaction<'c>>,
) -> Result<&'t mut mysql_async::Transaction<'c>, Error> {
    tx.as_mut().ok_or_else(|| DriverError::ConnectionClosed.into())
}

impl Transaction<'_> {
    /// Commits.
    ///
    /// # Errors
    /// [`StoreErrorKind::Conflict`] when it was rolled back before. When `may_have_applied()` the answer was lost: ask
    /// again with the same operation, and its record tells.
    pub async fn commit(mut self) -> Result<(), StoreError> {
        let told = |fault: Fault| fault.into_error("commit");
        self.check().await.map_err(told)?;
        if self.is_half_read() {
            // Before the COMMIT and not with it: dropped in the middle of that, the driver's own mark must be right.
            self.ask_whether_open().await.map_err(told)?;
            self.check().await.map_err(told)?;
        }
        let Some(tx) = self.tx.take() else { return Err(told(DriverError::ConnectionClosed.into())) };
        tx.commit().await.map_err(|error| told(Fault::from(error)))
    }

    /// Takes everything back.
    ///
    /// # Errors
    /// [`StoreError`] when the connection is gone: then the server takes it back.
    pub async fn rollback(mut self) -> Result<(), StoreError> {
        let told = |fault: Fault| fault.before_sending().into_error("rollback");
        if self.is_given_up() {
            self.over.get_or_insert(Over::GivenUp);
            return Err(told(
                self.check().await.err().unwrap_or_else(|| DriverError::ConnectionClosed.into()),
            ));
        }
        let Some(tx) = self.tx.take() else { return Err(told(DriverError::ConnectionClosed.into())) };
        tx.rollback().await.map_err(|error| told(Fault::from(error)))
    }

    /// Whether the server rolled it back in a deadlock: then it is worth running again.
    pub fn met_a_deadlock(&self) -> bool {
        self.over == Some(Over::Deadlock)
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.over == Some(Over::Broken)
    }

    /// What the work met may be in the cause of its failure alone: errors that come among the rows pass this handle by.
    pub(crate) fn note_cause(&mut self, cause: &(dyn StdError + 'static)) {
        let mut next = Some(cause);
        while let (Some(error), None) = (next, self.over) {
            match error.downcast_ref::<Error>() {
                Some(error @ Error::Server(_)) => note(&mut self.over, error),
                Some(error @ (Error::Io(_) | Error::Driver(_))) if self.is_given_up() => {
                    note(&mut self.over, error);
                }
                _ => {}
            }
            next = error.source();
        }
    }

    /// An answer is outstanding: whatever is sent next would read it as its own.
    fn is_given_up(&self) -> bool {
        self.asked || self.tx.as_ref().is_none_or(|tx| tx.is_disconnected())
    }

    // Whether the rest of an answer is read before the next statement is sent.
    fn is_half_read(&mut self) -> bool {
        self.tx.as_mut().is_some_and(|tx| !QueryResult::<'_, '_, TextProtocol>::new(tx).is_empty())
    }

    fn is_open(&self) -> bool {
        let said = self.tx.as_ref().and_then(|tx| tx.last_ok_packet());
        said.is_some_and(|ok| ok.status_flags().contains(StatusFlags::SERVER_STATUS_IN_TRANS))
    }

    /// Finds out whether it is still open, and the connection fit to say so.
    pub(crate) async fn check(&mut self) -> Result<(), Fault> {
        self.refuse_given_up();
        if self.over.is_none() && !self.is_open() {
            // After an error there is no status, and that of a statement which was prepared is none: ask.
            let _ = self.ask_whether_open().await;
            if self.over.is_none() && !self.is_open() {
                self.over = Some(Over::Ended);
            }
        }
        match self.over {
            None => Ok(()),
            Some(over @ Over::Broken) => Err(Fault::new(StoreErrorKind::Unavailable, over.to_string())),
            // Nobody knows what that statement did: it may have been one that commits.
            Some(over @ Over::GivenUp) => Err(Fault::unanswered(over.to_string())),
            Some(over) => Err(Fault::conflict(over.to_string())),
        }
    }

    fn refuse_given_up(&mut self) {
        if self.is_given_up() && self.over != Some(Over::Broken) {
            self.over = Some(Over::GivenUp);
        }
    }

    async fn ask_whether_open(&mut self) -> Result<(), Fault> {
        let done = self.sending(async |tx| tx.ping().await).await;
        self.noted(done)
    }

    // From here to its answer the connection is of no use for anything else.
    async fn sending<T>(
        &mut self,
        send: impl AsyncFnOnce(&mut mysql_async::Transaction<'_>) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let tx = taken(&mut self.tx)?;
        self.asked = true;
        let done = send(tx).await;
        self.asked = false;
        done
    }

    pub(crate) async fn run(&mut self, sql: &str) -> Result<(), Fault> {
        self.check().await?;
        let done = self.sending(async |tx| tx.query_drop(sql).await).await;
        self.noted(done)
    }

    /// Takes back what came after a savepoint.
    ///
    /// # Errors
    /// [`StoreErrorKind::Internal`] where the work ended the transaction, and the savepoint with it: never to be run again.
    pub(crate) async fn undo(&mut self, to_savepoint: &str) -> Result<(), Fault> {
        let Err(fault) = self.run(to_savepoint).await else { return Ok(()) };
        if fault.code() == code::NO_SAVEPOINT {
            self.over = Some(Over::Ended);
        }
        match self.over {
            Some(over @ Over::Ended) => Err(Fault::conflict(over.to_string()).for_good()),
            _ => Err(fault),
        }
    }

    /// Whether it is over because a wait for a lock took the whole of it back, as `innodb_rollback_on_timeout` asks.
    pub(crate) async fn was_undone_by_a_lock_wait(
        &mut self,
        cause: &(dyn StdError + Send + Sync + 'static),
    ) -> bool {
        if !met_a_lock_wait(cause) || self.over != Some(Over::Ended) || self.is_given_up() {
            return false;
        }
        let asked = "SELECT @@innodb_rollback_on_timeout";
        matches!(self.sending(async |tx| tx.query_first::<bool, _>(asked).await).await, Ok(Some(true)))
    }

    /// Also in a transaction that is over: of the session, not of it.
    pub(crate) async fn run_always(&mut self, sql: &str) -> Result<(), Fault> {
        self.refuse_given_up();
        if self.is_given_up() {
            return self.check().await;
        }
        self.sending(async |tx| tx.query_drop(sql).await).await.map_err(Fault::from)
    }

    /// Sends statements at once and answers what the first of them changed.
    pub(crate) async fn change(&mut self, statements: &[&str]) -> Result<Changed, Fault> {
        self.check().await?;
        let text = statements.join(";\n");
        let done = self.sending(async |tx| {
            let result = tx.query_iter(text).await?;
            let changed = Changed { rows: result.affected_rows(), told: result.last_insert_id() };
            result.drop_result().await?;
            Ok(changed)
        });
        let done = done.await;
        self.noted(done)
    }

    /// Sends statements at once and answers the rows of each. The first that fails ends it; what came before it stays done.
    pub(crate) async fn script(&mut self, statements: &[String]) -> Result<Vec<Vec<Row>>, Fault> {
        self.check().await?;
        let (text, count) = (statements.join(";\n"), statements.len());
        let done = self.sending(async |tx| {
            let mut result = tx.query_iter(text).await?;
            let mut sets = Vec::with_capacity(count);
            for _ in 0..count {
                sets.push(result.collect().await?);
            }
            result.drop_result().await?;
            Ok(sets)
        });
        let done = done.await;
        self.noted(done)
    }

    fn noted<T>(&mut self, done: Result<T, Error>) -> Result<T, Fault> {
        done.map_err(|error| {
            note(&mut self.over, &error);
            Fault::from(error)
        })
    }

    fn answered(&mut self) -> Result<(), Error> {
        self.refuse_given_up();
        match self.over {
            Some(over @ Over::GivenUp) => Err(Error::Other(Box::new(over))),
            _ => Ok(()),
        }
    }

    async fn checked(&mut self) -> Result<(), Error> {
        let checked = self.check().await;
        checked.map_err(|_| Error::Other(Box::new(self.over.unwrap_or(Over::Ended))))
    }
}

fn met_a_lock_wait(cause: &(dyn StdError + 'static)) -> bool {
    std::iter::successors(Some(cause), |&error| error.source()).any(|error| {
        matches!(error.downcast_ref::<Error>(), Some(Error::Server(said)) if said.code == code::LOCK_WAIT)
    })
}

fn note(over: &mut Option<Over>, error: &Error) {
    match error {
        Error::Server(said) if matches!(said.code, code::DEADLOCK | code::CHANGED_SINCE_SNAPSHOT) => {
            *over = Some(Over::Deadlock)
        }
        Error::Server(_) => {}
        _ => *over = Some(Over::Broken),
    }
}

/// As the driver's own transaction; each statement is refused once the transaction is over.
impl Queryable for Transaction<'_> {
    fn ping(&mut self) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            self.answered()?;
            self.sending(async |tx| tx.ping().await).await
        })
    }

    fn query_iter<'a, Q>(&'a mut self, query: Q) -> BoxFuture<'a, QueryResult<'a, 'static, TextProtocol>>
    where
        Q: AsQuery + 'a,
    {
        Box::pin(async move {
            self.checked().await?;
            let Self { tx, over, asked } = self;
            let tx = taken(tx)?;
            *asked = true;
            let result = tx.query_iter(query).await;
            *asked = false;
            result.inspect_err(|error| note(over, error))
        })
    }

    fn prep<'a, Q>(&'a mut self, query: Q) -> BoxFuture<'a, Statement>
    where
        Q: AsQuery + 'a,
    {
        Box::pin(async move {
            self.checked().await?;
            self.sending(async |tx| tx.prep(query).await).await
        })
    }

    fn close(&mut self, statement: Statement) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            self.answered()?;
            self.sending(async |tx| tx.close(statement).await).await
        })
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
            let Self { tx, over, asked } = self;
            let tx = taken(tx)?;
            *asked = true;
            let result = tx.exec_iter(statement, params).await;
            *asked = false;
            result.inspect_err(|error| note(over, error))
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
            let Self { tx, over, asked } = self;
            let tx = taken(tx)?;
            *asked = true;
            let done = tx.exec_batch(statement, params).await;
            *asked = false;
            done.inspect_err(|error| note(over, error))
        })
    }
}
