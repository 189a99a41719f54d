//! The transactional mode: record and business writes in one transaction of the caller's connection, or neither.
//!
//! A crash is a rollback, so there is nothing to take over.

use std::sync::Arc;
use std::time::Duration;

use mysql_async::{Conn, TxOpts};
use onlyonce_batch::Tries;
use onlyonce_core::{
    ClaimOutcome, Clock, CrashPoint, Decision, LeaseToken, OnceOutcome, Operation, Pending, Reply,
    StoreError, StoreErrorKind, StoredReply, SystemClock, TxFailure, TxOptions, TxStep, crash_point, decide,
};

use crate::backend::fits;
use crate::claims::{NOT_COMPLETED, find, push_ids};
use crate::error::Fault;
use crate::guard::Transaction;
use crate::inside::{SAVE_WORK, Then, UNDO_WORK, insert_new, new_token, put, take};
use crate::row::{AT_US, Done, NOW_ANYWHERE, cells, us, us_of};
use crate::schema::Tables;
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
    packet_max: usize,
}

/// How a completion tells its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tells {
    /// By the session's `LAST_INSERT_ID()`, where no statement of the transaction's comes after it.
    LastInsertId,
    /// By a statement more: the caller may yet ask for the last id of its own rows.
    Select,
}

/// How often a call gives up a claim that it waited for, to claim it without the lock that waiting leaves.
const ANEW_MAX: u32 = 3;
/// What a claim may take beside its round trips before it counts as one that waited.
const SLACK: Duration = Duration::from_millis(10);

// Its answer is still to come, and would be taken for that of the next statement.
const GIVEN_UP: &str =
    "a call on this connection was given up in the middle, or it broke; close it and take a new one";

impl MysqlStore {
    /// Begins a transaction on the caller's own connection, under the isolation that its session has. The handle guards it:
    /// see [`Transaction`].
    ///
    /// # Errors
    /// [`StoreError`]; nothing was changed. [`StoreErrorKind::Unavailable`], and nothing is sent, on a connection on which a
    /// call was given up in the middle.
    pub async fn begin<'c>(&self, conn: &'c mut Conn) -> Result<Transaction<'c>, StoreError> {
        if conn.is_disconnected() {
            let fault = Fault::new(StoreErrorKind::Unavailable, GIVEN_UP);
            return Err(fault.into_error("begin"));
        }
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
    /// Dropped in the middle, nothing more is sent on the connection: close it, and the server rolls back.
    ///
    /// # Other keys
    /// A claim that waited for a transaction which was then rolled back has a lock on the gap beside its row, to the end of its
    /// own: new keys that are next to it wait. Where the work is long, roll back a claim that took long and begin again.
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
    /// [`StoreError`]; unless `may_have_applied()`, nothing happened. [`StoreErrorKind::Unavailable`] when the work gave up a
    /// statement before its answer came, whatever it returned: nothing was sent after it, and the connection is to be closed.
    /// [`StoreErrorKind::Unfit`] when the reply is larger than a packet. [`StoreErrorKind::Conflict`] when each try met a
    /// deadlock; [`StoreErrorKind::Internal`] when the work ended the transaction by its own hand, which commits what it had
    /// done so far: the outcome is then unknown on record, and nothing runs twice.
    ///
    /// # Cancellation
    /// Close the connection after a call that was given up: the server then rolls back, unless the COMMIT was sent. An answer
    /// may still be on its way, and would be taken for that of the next statement; [`MysqlStore::begin`] refuses such a
    /// connection, and a pool of the driver closes it.
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
        let (mut options, mut anew) = (*options, ANEW_MAX);
        while tries.next().await {
            let began = SystemClock.boot();
            let mut tx = self.begin(conn).await?;
            let then = match anew {
                0 => Then::Work,
                _ => Then::WorkWithin(4 * SystemClock.boot().saturating_sub(began) + SLACK),
            };
            anew = anew.saturating_sub(1);
            let done = self.try_once(&mut tx, operation, &options, then, work).await;
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
                // The patience is for all claims of the call.
                Ok(Tried::Again { waited }) => options.wait = options.wait.saturating_sub(waited),
                Ok(Tried::Ran(_)) | Err(_) => {}
            }
        }
        Err(Tries::used_up("once"))
    }

    async fn try_once(
        &self,
        tx: &mut Transaction<'_>,
        operation: &Operation,
        options: &TxOptions,
        then: Then,
        work: &mut impl AsyncFnMut(&mut Transaction<'_>) -> Result<Reply, TxFailure>,
    ) -> Result<Tried, Fault> {
        let began = SystemClock.boot();
        let claim = match self.claim_inside(tx, operation, options, then).await?.into() {
            TxStep::Work(claim) => claim,
            TxStep::Answer(outcome) => return Ok(Tried::Answered(outcome)),
            TxStep::Retry => {
                return Ok(Tried::Again { waited: SystemClock.boot().saturating_sub(began) });
            }
        };
        crash_point(CrashPoint::TxClaimed);
        let done = work(tx).await;
        crash_point(CrashPoint::TxWorked);
        if let Err(TxFailure::Transient(cause)) = &done {
            tx.note_cause(&**cause);
        }
        if tx.met_a_deadlock() {
            return Ok(Tried::AGAIN);
        }
        // Also where everything is taken back: it tells whether there is something to be taken back, or the work committed it.
        let undone = match done.is_err() && !tx.is_broken() {
            true => Box::pin(tx.undo(UNDO_WORK)).await,
            false => Ok(()),
        };
        if tx.met_a_deadlock() {
            return Ok(Tried::AGAIN);
        }
        let reply = match done {
            Ok(reply) => reply,
            Err(TxFailure::Definitive(reply)) => undone.map(|()| reply)?,
            Err(TxFailure::Transient(cause)) => {
                return match undone {
                    Err(fault)
                        if !tx.is_broken() && !Box::pin(tx.was_undone_by_a_lock_wait(&*cause)).await =>
                    {
                        Err(fault)
                    }
                    _ => Ok(Tried::Answered(OnceOutcome::Transient(cause))),
                };
            }
        };
        match claim.complete_inside(tx, &reply, Tells::LastInsertId).await {
            Ok(pending) => Ok(Tried::Ran(pending)),
            Err(_) if tx.met_a_deadlock() => Ok(Tried::AGAIN),
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
            return Box::pin(self.look(operation, options)).await;
        };
        let wait = options.wait.saturating_sub(SystemClock.boot().saturating_sub(began));
        let token = new_token()?;
        let sent = SystemClock.boot();
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
            Err(fault) if fault.is_lock_wait() => return Box::pin(self.look(operation, options)).await,
            Err(fault) => return Err(fault),
        };
        let right = |attempt| TransactionClaim {
            tables: Arc::clone(&backend.tables),
            operation: operation.clone(),
            token,
            attempt,
            retention: options.retention,
            packet_max: backend.packet_max,
        };
        let row = match row {
            Some(row) if *row.record.state.token() != token => row,
            new => {
                let took = SystemClock.boot().saturating_sub(sent);
                return Ok(match then {
                    Then::WorkWithin(usual) if took > usual => TxClaim::RetryTransaction,
                    _ => TxClaim::Acquired(right(new.map_or(1, |row| row.record.attempt))),
                });
            }
        };
        match decide(Some(&row.record), operation.fingerprint(), &options.request(token)) {
            Decision::Acquire { attempt, how } => {
                let mut statements = vec![put(&backend.tables, operation, &row, token, attempt, how)];
                if then != Then::Nothing {
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
    Again {
        /// What the claim took of the patience.
        waited: Duration,
    },
}

impl Tried {
    // The server took the work back.
    const AGAIN: Self = Self::Again { waited: Duration::ZERO };
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
        fits(reply.body().len() + head.len(), self.packet_max)?;
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
