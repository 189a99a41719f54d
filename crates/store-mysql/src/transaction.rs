//! The transactional mode: record and business writes in one transaction of the caller's connection, or neither.
//!
//! A crash is a rollback, so there is nothing to take over.

use std::sync::Arc;
use std::time::Duration;

use mysql_async::{Conn, TxOpts};
use onlyonce_batch::Tries;
use onlyonce_core::{
    Acquire, ClaimOutcome, Clock, CrashPoint, Decision, LeaseToken, OnLeaseEnd, OnceOutcome, Operation,
    Origin, Pending, Reply, StoreError, StoreErrorKind, StoredReply, SystemClock, TxFailure, TxOptions,
    TxStep, crash_point, decide,
};

use crate::backend::Backend;
use crate::claims::{NOT_COMPLETED, find, push_ids};
use crate::error::Fault;
use crate::guard::Transaction;
use crate::row::{AT_US, Done, NOW_ANYWHERE, Row, cells, columns, policy_text, us, us_of};
use crate::schema::Tables;
use crate::session::Changed;
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

/// What to do once the claim is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Then {
    Nothing,
    /// Begin what a definitive failure takes back.
    Work,
}

/// How a completion tells its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tells {
    /// By the session's `LAST_INSERT_ID()`, where no statement of the transaction's comes after it.
    LastInsertId,
    /// By a statement more: the caller may yet ask for the last id of its own rows.
    Select,
}

const SAVE_WORK: &str = "SAVEPOINT onlyonce_work";
const UNDO_WORK: &str = "ROLLBACK TO SAVEPOINT onlyonce_work";

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
    /// `innodb_lock_wait_timeout` is set back before this returns, and its `LAST_INSERT_ID()` stays where the key is new. Correct
    /// under READ COMMITTED, REPEATABLE READ and SERIALIZABLE.
    ///
    /// # Errors
    /// [`StoreErrorKind::Unfit`] when the connection is to another server than the store's. [`StoreErrorKind::Conflict`]
    /// when the transaction is over already. After any error, roll back.
    ///
    /// # Cancellation
    /// Dropped in the middle, the driver closes the connection and the server rolls back.
    ///
    /// # Cost
    /// One round trip for a new key. Where a record is there one more (not on MySQL), and one more where it is taken. A reply
    /// that is younger than a minute costs a commit of the store's own, on another connection, without which a crash of the
    /// server could take it back.
    pub async fn claim_in(
        &self,
        tx: &mut Transaction<'_>,
        operation: &Operation,
        options: &TxOptions,
    ) -> Result<TxClaim, StoreError> {
        let claimed = self.claim_inside(tx, operation, options, Then::Nothing).await;
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
    /// Two round trips beside those of the transaction itself and of the work, one synced commit. The session's
    /// `LAST_INSERT_ID()` is another one afterwards: take the ids of your rows in the work.
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
        let mut tries = Tries::default();
        while tries.next().await {
            let mut tx = self.begin(conn).await?;
            let done = self.try_once(&mut tx, operation, options, work).await;
            let finished = match done {
                Ok(Tried::Ran(pending)) => {
                    crash_point(CrashPoint::TxCommitBefore);
                    match tx.commit().await {
                        Ok(()) => {
                            crash_point(CrashPoint::TxCommitAfter);
                            return Ok(OnceOutcome::Ran(pending.after_commit()));
                        }
                        Err(error) => Err(error),
                    }
                }
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
        }
        Err(Tries::used_up("once"))
    }

    async fn try_once(
        &self,
        tx: &mut Transaction<'_>,
        operation: &Operation,
        options: &TxOptions,
        work: &mut impl AsyncFnMut(&mut Transaction<'_>) -> Result<Reply, TxFailure>,
    ) -> Result<Tried, Fault> {
        let claim = match self.claim_inside(tx, operation, options, Then::Work).await?.into() {
            TxStep::Work(claim) => claim,
            TxStep::Answer(outcome) => return Ok(Tried::Answered(outcome)),
            TxStep::Retry => return Ok(Tried::Again),
        };
        crash_point(CrashPoint::TxClaimed);
        let done = work(tx).await;
        crash_point(CrashPoint::TxWorked);
        if tx.met_a_deadlock() {
            return Ok(Tried::Again);
        }
        let reply = match done {
            Ok(reply) => reply,
            Err(TxFailure::Transient(cause)) => return Ok(Tried::Answered(OnceOutcome::Transient(cause))),
            Err(TxFailure::Definitive(reply)) => {
                tx.run(UNDO_WORK).await?;
                reply
            }
        };
        match claim.complete_inside(tx, &reply, Tells::LastInsertId).await {
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
        then: Then,
    ) -> Result<TxClaim, Fault> {
        let backend = self.backend();
        let began = SystemClock.boot();
        // Whoever waits at the server for this process waits for all of it.
        let Some(_turn) = self.turns().take(operation.id().clone(), options.wait).await else {
            return self.look(operation, options).await;
        };
        let wait = options.wait.saturating_sub(SystemClock.boot().saturating_sub(began));
        let token = new_token()?;
        let taken = match insert_new(tx, backend, operation, token, wait, then).await {
            Ok(false) => {
                // It may have waited for the row; what holds it now is this transaction.
                let wait = options.wait.saturating_sub(SystemClock.boot().saturating_sub(began));
                take(tx, backend, operation, token, wait, then).await.map(Some)
            }
            inserted => inserted.map(|_| None),
        };
        let row = match taken {
            Ok(row) => row,
            Err(_) if tx.met_a_deadlock() => return Ok(TxClaim::RetryTransaction),
            // The statement alone was taken back, unless `innodb_rollback_on_timeout` says more: then the next one is refused.
            Err(fault) if fault.is_lock_wait() => return self.look(operation, options).await,
            Err(fault) => return Err(fault),
        };
        let right = |attempt| TransactionClaim {
            tables: Arc::clone(&backend.tables),
            operation: operation.clone(),
            token,
            attempt,
            retention: options.retention,
        };
        let row = match row {
            None => return Ok(TxClaim::Acquired(right(1))),
            Some(row) if *row.record.state.token() == token => {
                return Ok(TxClaim::Acquired(right(row.record.attempt)));
            }
            Some(row) => row,
        };
        match decide(Some(&row.record), operation.fingerprint(), &options.request(token)) {
            Decision::Acquire { attempt, how } => {
                let mut statements = vec![put(&backend.tables, operation, &row, token, attempt, how)];
                if then == Then::Work {
                    // Anew: the work's does not hold the claim.
                    statements.push(SAVE_WORK.into());
                }
                match tx.script(&statements).await {
                    Ok(_) => Ok(TxClaim::Acquired(right(attempt))),
                    Err(_) if tx.met_a_deadlock() => Ok(TxClaim::RetryTransaction),
                    Err(fault) => Err(fault),
                }
            }
            Decision::Answer(answer) => {
                if let ClaimOutcome::Completed(stored) = &answer {
                    self.settle(stored).await?;
                }
                Ok(TxClaim::of(answer, |lease| right(lease.attempt)))
            }
        }
    }

    /// The answer to whoever did not get the row: who has it may be a duplicate too, and a stored reply is given whoever
    /// holds its lock. Read on a connection of the store's, which sees what was committed last.
    async fn look(&self, operation: &Operation, options: &TxOptions) -> Result<TxClaim, Fault> {
        let backend = self.backend();
        let found = {
            let mut session = backend.pool.lend().await?;
            find(&mut session, &backend.tables, std::iter::once(operation.id())).await?
        };
        let Some(row) = found.into_values().next().transpose()? else { return Ok(TxClaim::busy()) };
        // A request of nobody's: this only looks.
        let request = options.request(LeaseToken::from_bytes([0; 16]));
        Ok(match decide(Some(&row.record), operation.fingerprint(), &request) {
            Decision::Answer(ClaimOutcome::Completed(stored)) => {
                self.settle(&stored).await?;
                TxClaim::Completed(stored)
            }
            Decision::Answer(ClaimOutcome::Mismatch { stored, origin }) => {
                TxClaim::Mismatch { stored, origin }
            }
            _ => TxClaim::busy(),
        })
    }

    /// A crash of the server must not take back what is told.
    async fn settle(&self, stored: &StoredReply) -> Result<(), Fault> {
        match self.backend().is_unsettled(stored) {
            true => self.backend().settle_seen().await,
            false => Ok(()),
        }
    }
}

/// How far one try came.
enum Tried {
    Ran(Pending<StoredReply>),
    Answered(OnceOutcome),
    Again,
}

// The session's own patience for locks, while the claim's holds.
const PATIENT: &str =
    "SET @onlyonce_patience = @@session.innodb_lock_wait_timeout, SESSION innodb_lock_wait_timeout = ";
const AS_BEFORE: &str = "SET SESSION innodb_lock_wait_timeout = \
    IFNULL(@onlyonce_patience, @@session.innodb_lock_wait_timeout), @onlyonce_patience = NULL";

fn new_token() -> Result<LeaseToken, Fault> {
    let mut token = [0; 16];
    getrandom::fill(&mut token).map_err(|error| Fault::internal("no random bytes").with_source(error))?;
    Ok(LeaseToken::from_bytes(token))
}

// What the server waits for a lock, in its unit.
fn whole_seconds(wait: Duration) -> u64 {
    (wait.as_secs() + u64::from(wait.subsec_nanos() > 0)).min(3600)
}

// The record, up to its values.
fn insert(tables: &Tables) -> Sql {
    Sql::new(format!(
        "INSERT INTO {} (scope, `key`, request_hash, status, locked_until, created_at, claimed_at, token, attempt, \
         on_lease_end, origin) ",
        tables.keys
    ))
}

fn push_values(sql: &mut Sql, operation: &Operation, token: LeaseToken) {
    sql.value(operation.scope().as_str()).push(", ").value(operation.key().as_str()).push(", ");
    sql.value(operation.fingerprint().to_string());
    sql.push(&format!(", 'in_progress', {NOW_ANYWHERE}, {NOW_ANYWHERE}, {NOW_ANYWHERE}, "));
    sql.value(&token.as_bytes()[..]).push(", 1, '").push(policy_text(OnLeaseEnd::Hold)).push("', ");
    sql.value(operation.origin().map(Origin::as_str));
}

// The usual case by one statement: a new key, on a connection to the store's server. False where that is not the case, or the
// server cannot say so by one: then nothing is known yet, but a record that is there is locked.
async fn insert_new(
    tx: &mut Transaction<'_>,
    backend: &Backend,
    operation: &Operation,
    token: LeaseToken,
    wait: Duration,
    then: Then,
) -> Result<bool, Fault> {
    if !backend.set_statement {
        return Ok(false);
    }
    let mut sql = insert(&backend.tables);
    sql.push("SELECT ");
    push_values(&mut sql, operation, token);
    sql.push(" FROM ").push(&backend.tables.meta).push(" WHERE id = 1 AND store_id = ");
    sql.value(&backend.store_id[..]);
    // It changes nothing, and tells a 1 where there was a record: the number of rows would not, on a connection of the
    // caller's that counts the rows that were found (CLIENT_FOUND_ROWS).
    sql.push(" ON DUPLICATE KEY UPDATE attempt = attempt + 0 * LAST_INSERT_ID(1)");
    let wait = format!("SET STATEMENT innodb_lock_wait_timeout = {} FOR ", whole_seconds(wait));
    let sql = wait + &sql.inlined();
    let changed = match then {
        Then::Nothing => tx.change(&[&sql]).await,
        Then::Work => tx.change(&[&sql, SAVE_WORK]).await,
    };
    let changed = changed.map_err(unless_another)?;
    Ok(changed == Changed { rows: 1, told: None })
}

fn another() -> Fault {
    Fault::unfit("the connection is to another server than the store's")
}

// Where the tables are not there, or not for this user.
fn unless_another(fault: Fault) -> Fault {
    match fault.code() {
        crate::error::code::NO_TABLE | 1049 | 1044 | 1142 => another().with_source(fault.into_error("claim")),
        _ => fault,
    }
}

// Inserts the record, or locks the one that is there: all statements at once. Never a locking read of a row that may be
// missing: under REPEATABLE READ that would lock the gap, and with it other keys.
async fn take(
    tx: &mut Transaction<'_>,
    backend: &Backend,
    operation: &Operation,
    token: LeaseToken,
    wait: Duration,
    then: Then,
) -> Result<Row, Fault> {
    let Tables { keys, meta, .. } = &*backend.tables;
    let mut insert = insert(&backend.tables);
    insert.push("VALUES (");
    push_values(&mut insert, operation, token);
    insert.push(") ON DUPLICATE KEY UPDATE attempt = attempt");
    let mut select =
        Sql::new(format!("SELECT {} FROM {keys} FORCE INDEX (PRIMARY) WHERE ", columns(NOW_ANYWHERE, true)));
    push_ids(&mut select, std::iter::once(operation.id()));
    select.push(" FOR UPDATE");
    let mut statements = vec![
        format!("SELECT store_id FROM {meta} WHERE id = 1"),
        format!("{PATIENT}{}", whole_seconds(wait)),
        insert.inlined(),
        select.inlined(),
        AS_BEFORE.to_owned(),
    ];
    if then == Then::Work {
        statements.push(SAVE_WORK.to_owned());
    }
    let mut sets = match tx.script(&statements).await.map_err(unless_another) {
        Ok(sets) => sets.into_iter(),
        Err(fault) => {
            if !tx.is_broken() {
                tx.run_always(AS_BEFORE).await?;
            }
            return Err(fault);
        }
    };
    let named = sets.next().into_iter().flatten().next().ok_or_else(another)?;
    if cells(named).maybe_bytes("store_id")?.as_deref() != Some(&backend.store_id[..]) {
        return Err(another());
    }
    let found = sets.nth(2).into_iter().flatten().next();
    let row = found.ok_or_else(|| Fault::internal("a record that was just locked is not there"))?;
    Row::read(row)
}

// What makes a record that was there this claim's.
fn put(
    tables: &Tables,
    operation: &Operation,
    row: &Row,
    token: LeaseToken,
    attempt: u32,
    how: Acquire,
) -> String {
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
    sql.inlined()
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
    /// One round trip, and one more after a statement that failed or was prepared: whether the transaction is still open.
    pub async fn complete(
        self,
        tx: &mut Transaction<'_>,
        reply: Reply,
    ) -> Result<Pending<StoredReply>, StoreError> {
        self.complete_inside(tx, &reply, Tells::Select).await.map_err(|fault| fault.into_error("complete"))
    }

    async fn complete_inside(
        &self,
        tx: &mut Transaction<'_>,
        reply: &Reply,
        tells: Tells,
    ) -> Result<Pending<StoredReply>, Fault> {
        let head = reply.encode_head();
        let retention_us = us(self.retention);
        let times = match tells {
            Tells::LastInsertId => {
                // One statement that tells the time it wrote.
                let now_us = us_of(NOW_ANYWHERE);
                let told = AT_US.replace('?', &format!("LAST_INSERT_ID({now_us})"));
                let changed = tx.change(&[&self.completing(reply, &head, &told)]).await?;
                let completed_us = changed.told.filter(|_| changed.rows > 0);
                completed_us
                    .and_then(|us| i64::try_from(us).ok())
                    .map(|us| (us, us.saturating_add_unsigned(retention_us)))
            }
            Tells::Select => {
                let mut select = Sql::new(format!(
                    "SELECT {}, {} FROM {} FORCE INDEX (PRIMARY) WHERE ",
                    us_of("completed_at"),
                    us_of("expires_at"),
                    self.tables.keys
                ));
                push_ids(&mut select, std::iter::once(self.operation.id()));
                select
                    .push(" AND token = ")
                    .value(&self.token.as_bytes()[..])
                    .push(" AND status = 'completed'");
                let sets =
                    tx.script(&[self.completing(reply, &head, NOW_ANYWHERE), select.inlined()]).await?;
                let written = sets.into_iter().nth(1).into_iter().flatten().next();
                match written.map(cells) {
                    Some(mut row) => Some((row.int("completed_at")?, row.int("expires_at")?)),
                    None => None,
                }
            }
        };
        let Some((completed_us, expires_us)) = times else {
            return Err(Fault::conflict("the transaction of the claim was rolled back"));
        };
        let done = Done { reply, head: &head, completed_us, expires_us };
        Ok(Pending::new(done.stored(self.retention, self.operation.origin())))
    }

    // The record is completed, if it is this claim's.
    fn completing(&self, reply: &Reply, head: &[u8], now: &str) -> String {
        let mut update =
            Sql::new(format!("UPDATE {} SET status = 'completed', response_code = ", self.tables.keys));
        update.value(reply.status()).push(", response_headers = ").value(head);
        update.push(", response_body = ").value(&reply.body()[..]).push(", completed_at = ").push(now);
        // The same instant, but in a session whose `sql_mode` has SIMULTANEOUS_ASSIGNMENT: there it is NULL yet.
        update.push(&format!(", expires_at = COALESCE(completed_at, {NOW_ANYWHERE}) + INTERVAL "));
        update.value(us(self.retention)).push(" MICROSECOND WHERE ");
        push_ids(&mut update, std::iter::once(self.operation.id()));
        update.push(" AND token = ").value(&self.token.as_bytes()[..]).push(" AND ").push(NOT_COMPLETED);
        update.inlined()
    }
}
