//! Connections: lent from the pool, spoken to in batches of statements, given back only in a known state.

use std::borrow::Cow;
use std::fmt::Write;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use deadpool_postgres::{Object, Pool, PoolError, TimeoutType};
use onlyonce_core::StoreErrorKind;
use tokio::time::timeout;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Row, Statement};

use crate::error::Fault;

/// How long a statement of a batch waits for a lock of somebody who is not of ours; ours are never waited for.
pub(crate) const LOCK_PATIENCE: Duration = Duration::from_millis(100);

/// A statement with the types of its parameters.
#[derive(Debug)]
pub(crate) struct Sql {
    pub(crate) text: Cow<'static, str>,
    pub(crate) types: &'static [Type],
}

/// A statement with its parameters.
#[derive(Clone)]
pub(crate) struct Call<'a> {
    sql: &'a Sql,
    params: Vec<&'a (dyn ToSql + Sync)>,
}

impl<'a> Call<'a> {
    pub(crate) fn new(sql: &'a Sql, params: Vec<&'a (dyn ToSql + Sync)>) -> Self {
        debug_assert_eq!(sql.types.len(), params.len());
        Self { sql, params }
    }
}

/// Which part of a transaction a run of statements is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// All of it.
    Whole,
    /// Its beginning: the transaction stays open.
    Begin,
    /// Neither its beginning nor its end.
    Middle,
    /// Its end.
    End,
}

/// The connections of a store.
#[derive(Debug)]
pub(crate) struct Connections {
    pub(crate) pool: Pool,
    /// False behind a pooler that lends by transaction: then nothing is kept on a connection between transactions.
    pub(crate) prepare: bool,
    /// How long one exchange may take.
    pub(crate) patience: Duration,
}

impl Connections {
    pub(crate) async fn lend(&self) -> Result<Session<'_>, Fault> {
        let object = self.pool.get().await.map_err(|error| match error {
            PoolError::Backend(error) => {
                let fault = Fault::from(error).before_sending();
                match fault.kind() {
                    StoreErrorKind::Unavailable => {
                        Fault::new(StoreErrorKind::Unavailable, "PostgreSQL cannot be reached")
                            .with_source(Fault::into_error(fault, "connect"))
                    }
                    _ => fault,
                }
            }
            PoolError::Timeout(TimeoutType::Create) => {
                Fault::new(StoreErrorKind::Unavailable, "PostgreSQL does not answer a new connection")
            }
            PoolError::Timeout(_) => {
                Fault::new(StoreErrorKind::Overloaded, "all connections were busy all the time")
            }
            error => {
                Fault::new(StoreErrorKind::Unavailable, "no connection to PostgreSQL").with_source(error)
            }
        })?;
        Ok(Session { connections: self, object: Some(object), sound: true, patience: self.patience })
    }
}

/// Whether `synchronous_commit` is weaker than it must be. It is raised to `on` then, and never lowered.
pub(crate) const SYNCHRONOUS_WEAK: &str =
    "current_setting('synchronous_commit') IN ('off', 'local', 'remote_write')";

/// The settings as one statement: for a transaction when `local`, else for the life of the connection.
pub(crate) fn settings(local: bool, patience: Duration) -> String {
    let mut sql = format!(
        "SELECT set_config('synchronous_commit', CASE WHEN {SYNCHRONOUS_WEAK} THEN 'on'
            ELSE current_setting('synchronous_commit') END, {local})"
    );
    let milliseconds = |time: Duration| format!("{}ms", time.as_millis().max(1));
    for (name, value) in [
        ("lock_timeout", milliseconds(LOCK_PATIENCE).as_str()),
        ("statement_timeout", milliseconds(patience).as_str()),
        ("idle_in_transaction_session_timeout", milliseconds(patience * 2).as_str()),
        // Rows that a policy hides would be taken for absent.
        ("row_security", "off"),
        // A plan that was made while the table was small must not read all of it when it is large.
        ("enable_seqscan", "off"),
        ("enable_hashjoin", "off"),
        ("enable_mergejoin", "off"),
        ("plan_cache_mode", "force_generic_plan"),
        ("jit", "off"),
    ] {
        let _ = write!(sql, ", set_config('{name}', '{value}', {local})");
    }
    if !local {
        for (name, value) in [
            ("default_transaction_isolation", "read committed"),
            ("default_transaction_read_only", "off"),
            ("default_transaction_deferrable", "off"),
        ] {
            let _ = write!(sql, ", set_config('{name}', '{value}', false)");
        }
    }
    sql
}

/// One connection, lent. Dropped in the middle of something, it is closed and not given back.
#[derive(Debug)]
pub(crate) struct Session<'c> {
    connections: &'c Connections,
    object: Option<Object>,
    sound: bool,
    patience: Duration,
}

impl Session<'_> {
    /// Begins a transaction whose statements may take longer than others.
    ///
    /// # Errors
    /// The fault.
    pub(crate) async fn begin_long(&mut self, patience: Duration) -> Result<(), Fault> {
        self.patience = patience.max(self.patience);
        self.run(&[], Part::Begin).await?;
        let ms = patience.as_millis();
        self.execute(&format!("SET LOCAL lock_timeout = '{ms}ms'; SET LOCAL statement_timeout = '{ms}ms'"))
            .await
    }

    /// Begins a transaction that waits for locks.
    ///
    /// # Errors
    /// The fault.
    pub(crate) async fn begin_waiting(&mut self, patience: Duration) -> Result<(), Fault> {
        self.run(&[], Part::Begin).await?;
        self.execute(&format!("SET LOCAL lock_timeout = '{}ms'", patience.as_millis())).await
    }

    /// Ends a transaction and takes back what it did.
    ///
    /// # Errors
    /// The fault.
    pub(crate) async fn roll_back(mut self) -> Result<(), Fault> {
        self.execute("ROLLBACK").await?;
        self.sound = true;
        Ok(())
    }

    /// Sends the statements at once and answers the rows of each.
    ///
    /// # Errors
    /// The first fault of any: then none of a whole transaction was done, unless it may have been all the same.
    pub(crate) async fn run(&mut self, calls: &[Call<'_>], part: Part) -> Result<Vec<Vec<Row>>, Fault> {
        self.sound = false;
        let patience = self.patience;
        let statements = match timeout(patience, self.prepare(calls)).await {
            Ok(Ok(statements)) => statements,
            Ok(Err(fault)) => {
                // Nothing was begun, or what was is left open and has failed now: the COMMIT was not sent.
                self.sound = part == Part::Whole && !fault.breaks_connection();
                return Err(fault);
            }
            Err(_) => return Err(Fault::silence(patience).before_sending()),
        };
        let done = match timeout(patience, self.exchange(calls, &statements, part)).await {
            Ok(done) => done,
            Err(_) => Err(Fault::silence(patience)),
        };
        let ended = matches!(part, Part::Whole | Part::End);
        match &done {
            Ok(_) => self.sound = ended,
            // A failed transaction that was sent with its COMMIT is over.
            Err(fault) => self.sound = ended && !fault.breaks_connection(),
        }
        done
    }

    /// Runs SQL without parameters, as it is.
    pub(crate) async fn execute(&mut self, sql: &str) -> Result<(), Fault> {
        let was_sound = std::mem::replace(&mut self.sound, false);
        let patience = self.patience;
        let Some(client) = &self.object else { return Err(closed()) };
        let done = match timeout(patience, client.batch_execute(sql)).await {
            Ok(done) => done.map_err(Fault::from),
            Err(_) => Err(Fault::silence(patience)),
        };
        self.sound = was_sound && done.is_ok();
        done
    }

    async fn prepare(&self, calls: &[Call<'_>]) -> Result<Vec<Option<Statement>>, Fault> {
        let Some(client) = &self.object else { return Err(closed()) };
        let mut statements = Vec::with_capacity(calls.len());
        for call in calls {
            statements.push(match self.connections.prepare {
                true => Some(
                    client
                        .prepare_typed_cached(&call.sql.text, call.sql.types)
                        .await
                        .map_err(|error| Fault::from(error).before_sending())?,
                ),
                false => None,
            });
        }
        Ok(statements)
    }

    async fn exchange(
        &self,
        calls: &[Call<'_>],
        statements: &[Option<Statement>],
        part: Part,
    ) -> Result<Vec<Vec<Row>>, Fault> {
        let Some(client) = &self.object else { return Err(closed()) };
        let prepare = self.connections.prepare;
        // One statement alone is a transaction by itself.
        let framed = part != Part::Whole || calls.len() != 1 || !prepare;
        let begins = framed && matches!(part, Part::Whole | Part::Begin);
        let ends = framed && matches!(part, Part::Whole | Part::End);
        let begin = match prepare {
            true => "BEGIN".into(),
            false => format!(
                "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; {}",
                settings(true, self.connections.patience)
            ),
        };
        let mut exchanges: Vec<Exchange<'_>> = Vec::with_capacity(calls.len() + 2);
        if begins {
            exchanges.push(Box::pin(async {
                client.batch_execute(&begin).await?;
                Ok(Vec::new())
            }));
        }
        for (call, statement) in calls.iter().zip(statements) {
            exchanges.push(match statement {
                Some(statement) => Box::pin(client.query(statement, &call.params)),
                None => {
                    let typed: Vec<_> =
                        call.params.iter().copied().zip(call.sql.types.iter().cloned()).collect();
                    Box::pin(async move { client.query_typed(&call.sql.text, &typed).await })
                }
            });
        }
        if ends {
            exchanges.push(Box::pin(async {
                client.batch_execute("COMMIT").await?;
                Ok(Vec::new())
            }));
        }
        let mut answers = in_order(exchanges).await.into_iter();
        if begins {
            answers.next().transpose()?;
        }
        let mut rows = Vec::with_capacity(calls.len());
        for _ in calls {
            match answers.next().transpose() {
                Ok(answer) => rows.push(answer.unwrap_or_default()),
                Err(error) => {
                    if !framed && error.as_db_error().is_some() {
                        // The server tells of the error before it gives up what it had locked.
                        client.batch_execute("").await?;
                    }
                    return Err(error.into());
                }
            }
        }
        if let Some(Err(error)) = answers.next() {
            return Err(Fault::from(error).in_commit());
        }
        Ok(rows)
    }
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        if !self.sound
            && let Some(object) = self.object.take()
        {
            drop(Object::take(object));
        }
    }
}

/// A statement on its way.
pub(crate) type Exchange<'a> =
    Pin<Box<dyn Future<Output = Result<Vec<Row>, tokio_postgres::Error>> + Send + 'a>>;

/// Drives all of them. A statement is sent when it is first polled, so they arrive in this order.
pub(crate) async fn in_order(
    mut exchanges: Vec<Exchange<'_>>,
) -> Vec<Result<Vec<Row>, tokio_postgres::Error>> {
    let mut answers: Vec<_> = exchanges.iter().map(|_| None).collect();
    poll_fn(|context| {
        let mut all = true;
        for (exchange, answer) in exchanges.iter_mut().zip(&mut answers) {
            if answer.is_none() {
                match exchange.as_mut().poll(context) {
                    Poll::Ready(done) => *answer = Some(done),
                    Poll::Pending => all = false,
                }
            }
        }
        if all { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    answers.into_iter().flatten().collect()
}

fn closed() -> Fault {
    Fault::new(StoreErrorKind::Unavailable, "the connection is closed")
}
