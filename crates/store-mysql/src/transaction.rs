//! The transactional mode: record and business writes in one transaction of the caller's connection, or neither.
//!
//! A crash is a rollback, so there is nothing to take over.

use std::sync::Arc;
use std::time::Duration;

use mysql_async::{Conn, TxOpts};
use onlyonce_core::{
    Acquire, Clock, Decision, LeaseToken, OnLeaseEnd, OnceOutcome, Operation, Origin, Pending, Reply,
    StoreError, StoreErrorKind, StoredReply, SystemClock, TxFailure, TxOptions, TxStep, decide,
};

use crate::claims::{NOT_COMPLETED, push_ids};
use crate::error::Fault;
use crate::guard::Transaction;
use crate::row::{AT_US, Done, NOW_ANYWHERE, Row, cells, columns, policy_text, us, us_of};
use crate::schema::Tables;
use crate::session::wait_for_locks;
use crate::sql::Sql;
use crate::store::MysqlStore;

/// What a claim inside a transaction of MySQL is answered.
pub type TxClaim = onlyonce_core::TxClaim<TransactionClaim>;

/// The right to do the work in the transaction that it was claimed in.
///
/// Rolling back gives it up. Committing without [`TransactionClaim::complete`] leaves the outcome unknown: business
/// writes may be in the database, and no reply is.
#[must_use = "complete it, or roll the transaction back"]
#[derive(Debug)]
pub struct TransactionClaim {
    tables: Arc<Tables>,
    operation: Operation,
    token: LeaseToken,
    attempt: u32,
    retention: Duration,
}

/// How often a transaction that met others in deadlocks is run.
const TRIES: u32 = 10;

impl MysqlStore {
    /// Begins a transaction on the caller's own connection, under the isolation that its session has. The handle guards it:
    /// see [`Transaction`].
    ///
    /// # Errors
    /// [`StoreError`]; nothing was changed.
    pub async fn begin<'c>(&self, conn: &'c mut Conn) -> Result<Transaction<'c>, StoreError> {
        let begun = conn.start_transaction(TxOpts::default()).await;
        begun.map(Transaction::from).map_err(|error| Fault::from(error).before_sending().into_error("begin"))
    }

    /// Claims `operation` inside a transaction of the caller's own connection to the store's server.
    ///
    /// # Guarantees
    /// Record and business writes become visible together, at the commit. A duplicate waits for the transaction, up to
    /// [`TxOptions::wait`]; of each process at most one waits at the server for each operation. The session's own
    /// `innodb_lock_wait_timeout` is set back before this returns. Correct under READ COMMITTED, REPEATABLE READ and
    /// SERIALIZABLE.
    ///
    /// # Errors
    /// [`StoreErrorKind::Unfit`] when the connection is to another server than the store's. [`StoreErrorKind::Conflict`]
    /// when the transaction is over already. After any error, roll back.
    ///
    /// # Cancellation
    /// Dropped in the middle, the driver closes the connection and the server rolls back.
    ///
    /// # Cost
    /// Four or five round trips.
    pub async fn claim_in(
        &self,
        tx: &mut Transaction<'_>,
        operation: &Operation,
        options: &TxOptions,
    ) -> Result<TxClaim, StoreError> {
        let claimed = self.claim_inside(tx, operation, options).await;
        claimed.map_err(|fault| fault.into_error("claim"))
    }

    /// Runs `work` once, in one transaction with its record, on the caller's own connection.
    ///
    /// `work` gets the open transaction and must not end it. After a deadlock everything is rolled back and `work` runs
    /// again, a few times. Where the future must be [`Send`], as in a spawned task or a handler of a web framework, `work` is
    /// an `async move` closure that owns what it uses.
    ///
    /// # Errors
    /// [`StoreError`]; unless `may_have_applied()`, nothing happened. [`StoreErrorKind::Conflict`] when each try met a
    /// deadlock; [`StoreErrorKind::Internal`] when the work ended the transaction by its own hand, which commits what it had
    /// done so far: the outcome is then unknown on record, and nothing runs twice.
    ///
    /// # Cancellation
    /// The transaction is rolled back before the connection is used again, unless its COMMIT was sent.
    ///
    /// # Cost
    /// Eight round trips beside the work's own, one synced commit.
    pub fn once<'a, W>(
        &'a self,
        conn: &'a mut Conn,
        operation: &Operation,
        work: W,
    ) -> impl Future<Output = Result<OnceOutcome, StoreError>> + use<'a, W>
    where
        W: AsyncFnMut(&mut Transaction<'_>) -> Result<Reply, TxFailure> + 'a,
    {
        self.once_with(conn, operation, &TxOptions::default(), work)
    }

    /// [`MysqlStore::once`] with options.
    ///
    /// # Errors
    /// Those of [`MysqlStore::once`].
    pub fn once_with<'a, W>(
        &'a self,
        conn: &'a mut Conn,
        operation: &Operation,
        options: &TxOptions,
        mut work: W,
    ) -> impl Future<Output = Result<OnceOutcome, StoreError>> + use<'a, W>
    where
        W: AsyncFnMut(&mut Transaction<'_>) -> Result<Reply, TxFailure> + 'a,
    {
        // A future that borrowed them would not be known to be Send next to a closure that lends.
        let (operation, options) = (operation.clone(), *options);
        async move { self.run_once(conn, &operation, &options, &mut work).await }
    }

    async fn run_once(
        &self,
        conn: &mut Conn,
        operation: &Operation,
        options: &TxOptions,
        work: &mut impl AsyncFnMut(&mut Transaction<'_>) -> Result<Reply, TxFailure>,
    ) -> Result<OnceOutcome, StoreError> {
        let mut pause = Duration::from_millis(2);
        for _ in 0..TRIES {
            let mut tx = self.begin(conn).await?;
            let done = self.try_once(&mut tx, operation, options, work).await;
            let finished = match done {
                Ok(Tried::Ran(pending)) => match tx.commit().await {
                    Ok(()) => return Ok(OnceOutcome::Ran(pending.after_commit())),
                    Err(error) => Err(error),
                },
                other => {
                    // Where even that fails the connection is closed, and the server takes it back.
                    let _ = tx.rollback().await;
                    other.map_err(|fault| fault.into_error("once"))
                }
            };
            match finished {
                Ok(Tried::Answered(outcome)) => return Ok(outcome),
                Err(error) if error.kind() != StoreErrorKind::Conflict || error.may_have_applied() => {
                    return Err(error);
                }
                Ok(Tried::Ran(_) | Tried::Again) | Err(_) => {}
            }
            // Those that met once do not meet again at the same moment.
            let mut part = [0];
            let _ = getrandom::fill(&mut part);
            tokio::time::sleep(pause.mul_f64(f64::from(part[0]) / 255.0 + 0.5)).await;
            pause = (pause * 2).min(Duration::from_millis(200));
        }
        Err(StoreError::new(StoreErrorKind::Conflict, "once")
            .with_detail(format!("the transaction met others in a deadlock {TRIES} times")))
    }

    async fn try_once(
        &self,
        tx: &mut Transaction<'_>,
        operation: &Operation,
        options: &TxOptions,
        work: &mut impl AsyncFnMut(&mut Transaction<'_>) -> Result<Reply, TxFailure>,
    ) -> Result<Tried, Fault> {
        let claim = match self.claim_inside(tx, operation, options).await?.into() {
            TxStep::Work(claim) => claim,
            TxStep::Answer(outcome) => return Ok(Tried::Answered(outcome)),
            TxStep::Retry => return Ok(Tried::Again),
        };
        tx.run("SAVEPOINT onlyonce_work").await?;
        let done = work(tx).await;
        if tx.met_a_deadlock() {
            return Ok(Tried::Again);
        }
        let reply = match done {
            Ok(reply) => reply,
            Err(TxFailure::Transient(cause)) => return Ok(Tried::Answered(OnceOutcome::Transient(cause))),
            Err(TxFailure::Definitive(reply)) => {
                tx.run("ROLLBACK TO SAVEPOINT onlyonce_work").await?;
                reply
            }
        };
        match claim.complete_inside(tx, &reply).await {
            Ok(pending) => Ok(Tried::Ran(pending)),
            Err(_) if tx.met_a_deadlock() => Ok(Tried::Again),
            // The work ended the transaction: to run it again would do what it committed twice.
            Err(fault) if fault.is_conflict() => Err(fault.for_good()),
            Err(fault) => Err(fault),
        }
    }

    async fn claim_inside(
        &self,
        tx: &mut Transaction<'_>,
        operation: &Operation,
        options: &TxOptions,
    ) -> Result<TxClaim, Fault> {
        let backend = self.backend();
        let began = SystemClock.boot();
        // Whoever waits at the server for this process waits for all of it.
        let Some(_turn) = self.turns().take(operation.id().clone(), options.wait).await else {
            return Ok(TxClaim::busy());
        };
        let patience = self.check_server(tx).await?;
        let wait = options.wait.saturating_sub(SystemClock.boot().saturating_sub(began));
        let seconds = wait.as_secs() + u64::from(wait.subsec_nanos() > 0);
        let seconds = u32::try_from(seconds).unwrap_or(u32::MAX).min(3600);
        tx.run(&wait_for_locks(seconds)).await?;
        let taken = take(tx, &backend.tables, operation).await;
        if !tx.is_broken() {
            tx.run_always(&wait_for_locks(patience)).await?;
        }
        let (token, row) = match taken {
            Ok(taken) => taken,
            Err(_) if tx.met_a_deadlock() => return Ok(TxClaim::RetryTransaction),
            // The statement alone was taken back, unless `innodb_rollback_on_timeout` says more: then the next one is refused.
            Err(fault) if fault.is_lock_wait() => {
                return Ok(TxClaim::busy());
            }
            Err(fault) => return Err(fault),
        };
        let right = |attempt| TransactionClaim {
            tables: Arc::new(backend.tables.clone()),
            operation: operation.clone(),
            token,
            attempt,
            retention: options.retention,
        };
        let acquired = |attempt| TxClaim::Acquired(right(attempt));
        if *row.record.state.token() == token {
            return Ok(acquired(row.record.attempt));
        }
        match decide(Some(&row.record), operation.fingerprint(), &options.request(token)) {
            Decision::Acquire { attempt, how } => {
                match put(tx, &backend.tables, operation, &row, token, attempt, how).await {
                    Ok(()) => Ok(acquired(attempt)),
                    Err(_) if tx.met_a_deadlock() => Ok(TxClaim::RetryTransaction),
                    Err(fault) => Err(fault),
                }
            }
            Decision::Answer(answer) => Ok(TxClaim::of(answer, |lease| right(lease.attempt))),
        }
    }

    // Answers the session's own patience for locks.
    async fn check_server(&self, tx: &mut Transaction<'_>) -> Result<u32, Fault> {
        let backend = self.backend();
        let sql = format!(
            "SELECT @@session.innodb_lock_wait_timeout, (SELECT store_id FROM {} WHERE id = 1)",
            backend.tables.meta
        );
        let another = || Fault::unfit("the connection is to another server than the store's");
        let rows = match tx.rows(sql).await {
            Ok(rows) => rows,
            Err(fault) if matches!(fault.code(), crate::error::code::NO_TABLE | 1049 | 1044 | 1142) => {
                return Err(another().with_source(fault.into_error("claim")));
            }
            Err(fault) => return Err(fault),
        };
        let mut row = cells(rows.into_iter().next().ok_or_else(another)?);
        let patience = u32::try_from(row.int("innodb_lock_wait_timeout")?).unwrap_or(50);
        match row.maybe_bytes("store_id")? {
            Some(id) if id == backend.store_id => Ok(patience),
            _ => Err(another()),
        }
    }
}

/// How far one try came.
enum Tried {
    Ran(Pending<StoredReply>),
    Answered(OnceOutcome),
    Again,
}

// Inserts the record, or locks the one that is there. Never a locking read of a row that may be missing: under REPEATABLE
// READ that would lock the gap, and with it other keys.
async fn take(
    tx: &mut Transaction<'_>,
    tables: &Tables,
    operation: &Operation,
) -> Result<(LeaseToken, Row), Fault> {
    let mut token = [0; 16];
    getrandom::fill(&mut token).map_err(|error| Fault::internal("no random bytes").with_source(error))?;
    let token = LeaseToken::from_bytes(token);
    let mut insert = Sql::new(format!(
        "INSERT INTO {} (scope, `key`, request_hash, status, locked_until, created_at, claimed_at, token, attempt, \
         on_lease_end, origin) VALUES (",
        tables.keys
    ));
    insert.value(operation.scope().as_str()).push(", ").value(operation.key().as_str()).push(", ");
    insert.value(operation.fingerprint().to_string());
    insert.push(&format!(", 'in_progress', {NOW_ANYWHERE}, {NOW_ANYWHERE}, {NOW_ANYWHERE}, "));
    insert.value(&token.as_bytes()[..]).push(", 1, ").value(policy_text(OnLeaseEnd::Hold)).push(", ");
    insert.value(operation.origin().map(Origin::as_str)).push(") ON DUPLICATE KEY UPDATE attempt = attempt");
    tx.run(&insert.inlined()).await?;
    let mut select = Sql::new(format!(
        "SELECT {} FROM {} FORCE INDEX (PRIMARY) WHERE ",
        columns(NOW_ANYWHERE, true),
        tables.keys
    ));
    push_ids(&mut select, std::iter::once(operation.id()));
    select.push(" FOR UPDATE");
    let found = tx.rows(select.inlined()).await?.into_iter().next();
    let row = found.ok_or_else(|| Fault::internal("a record that was just locked is not there"))?;
    Ok((token, Row::read(row)?))
}

async fn put(
    tx: &mut Transaction<'_>,
    tables: &Tables,
    operation: &Operation,
    row: &Row,
    token: LeaseToken,
    attempt: u32,
    how: Acquire,
) -> Result<(), Fault> {
    // Not REPLACE: under REPEATABLE READ it locks the gap before the row too, and with it other keys.
    let mut sql = Sql::new(format!("UPDATE {} SET request_hash = ", tables.keys));
    sql.value(operation.fingerprint().to_string());
    sql.push(", status = 'in_progress', response_code = NULL, response_headers = NULL, response_body = NULL, origin = ");
    sql.value(operation.origin().map(Origin::as_str));
    sql.push(", token = ").value(&token.as_bytes()[..]).push(", attempt = ").value(attempt);
    sql.push(", on_lease_end = ").value(policy_text(OnLeaseEnd::Hold));
    let created_us = if how == Acquire::Fresh { row.now_us } else { row.created_us };
    for (column, at) in [("locked_until", row.now_us), ("created_at", created_us), ("claimed_at", row.now_us)]
    {
        sql.push(", ").push(column).push(" = ").push(AT_US).bind(at);
    }
    sql.push(", completed_at = NULL, expires_at = NULL WHERE ");
    push_ids(&mut sql, std::iter::once(operation.id()));
    tx.run(&sql.inlined()).await
}

impl TransactionClaim {
    /// 1 for the first run; more when a dead owner's record was taken over.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// Stores the reply in the same transaction.
    ///
    /// # Errors
    /// [`StoreErrorKind::Conflict`] when `tx` is not the transaction of the claim any more: it was rolled back, as the
    /// server itself does in a deadlock. Run it again from its start. After any error, roll back.
    ///
    /// # Cost
    /// Two round trips.
    pub async fn complete(
        self,
        tx: &mut Transaction<'_>,
        reply: Reply,
    ) -> Result<Pending<StoredReply>, StoreError> {
        self.complete_inside(tx, &reply).await.map_err(|fault| fault.into_error("complete"))
    }

    async fn complete_inside(
        &self,
        tx: &mut Transaction<'_>,
        reply: &Reply,
    ) -> Result<Pending<StoredReply>, Fault> {
        // Its answer tells whether the transaction is still open.
        let now = tx.rows(format!("SELECT {}", us_of(NOW_ANYWHERE))).await?.into_iter().next();
        tx.check().await?;
        let now = now.ok_or_else(|| Fault::internal("a clock that shows nothing"))?;
        let now_us = cells(now).int("the clock")?;
        let head = reply.encode_head();
        let expires_us = now_us.saturating_add_unsigned(us(self.retention));
        let done = Done { reply, head: &head, completed_us: now_us, expires_us };
        let mut sql =
            Sql::new(format!("UPDATE {} SET status = 'completed', response_code = ", self.tables.keys));
        sql.value(reply.status()).push(", response_headers = ").value(head.as_slice());
        sql.push(", response_body = ").value(&reply.body()[..]);
        sql.push(", completed_at = ").push(AT_US).bind(done.completed_us);
        sql.push(", expires_at = ").push(AT_US).bind(done.expires_us).push(" WHERE ");
        push_ids(&mut sql, std::iter::once(self.operation.id()));
        sql.push(" AND token = ").value(&self.token.as_bytes()[..]).push(" AND ").push(NOT_COMPLETED);
        if tx.change(&sql.inlined()).await? != 1 {
            return Err(Fault::conflict("the transaction of the claim was rolled back"));
        }
        Ok(Pending::new(done.stored(self.retention, self.operation.origin())))
    }
}
