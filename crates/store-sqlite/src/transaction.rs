//! The transactional mode: record and business writes in one transaction, or neither.
//!
//! A crash is a rollback, so there is nothing to take over. SQLite has one writer at a time: while such a transaction
//! is open, everything else that is to be written to the file waits.

use std::panic::resume_unwind;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use onlyonce_core::{
    Clock, CompleteOutcome, Completion, CrashPoint, LeaseToken, Mutant, OnLeaseEnd, OnceOutcome, Operation,
    Pending, Reply, StoreError, StoreErrorKind, StoredReply, SystemClock, TxFailure, TxOptions, TxStep,
    crash_point, mutant,
};
use parking_lot::Mutex;
use rusqlite::{Connection, Transaction, TransactionBehavior};
use tokio::sync::Semaphore;

use crate::claims;
use crate::error::Fault;
use crate::open::{self, Durability, Identity};
use crate::row::HashText;
use crate::store::SqliteStore;
use crate::writer::Shared;

/// What a claim inside a transaction of SQLite is answered.
pub type TxClaim = onlyonce_core::TxClaim<TransactionClaim>;

/// The right to do the work in the transaction that it was claimed in.
///
/// Rolling back gives it up. Committing without [`TransactionClaim::complete`] leaves the outcome unknown: business
/// writes may be in the file, and no reply is.
#[must_use = "complete it, or roll the transaction back"]
#[derive(Debug)]
pub struct TransactionClaim {
    shared: Arc<Shared>,
    operation: Operation,
    token: LeaseToken,
    attempt: u32,
    retention: Duration,
}

impl SqliteStore {
    /// Claims `operation` inside a transaction of the caller's own connection to the store's file.
    ///
    /// # Guarantees
    /// Record and business writes become visible together, at the caller's commit. A duplicate waits for the
    /// database meanwhile. [`RetryTransaction`](onlyonce_core::TxClaim::RetryTransaction) when another writer went first; a
    /// transaction begun with [`TransactionBehavior::Immediate`] never meets that.
    ///
    /// # Errors
    /// [`StoreErrorKind::Unfit`] when the connection is to another file, or when its `synchronous` is weaker than FULL,
    /// for its commit could then be lost. [`StoreErrorKind::Conflict`] when the transaction is over already.
    /// [`StoreErrorKind::Timeout`] when the database was held all the time. After any error, roll back.
    ///
    /// # Cost
    /// One or two statements; blocks the thread.
    pub fn claim_in(
        &self,
        tx: &Transaction<'_>,
        operation: &Operation,
        options: &TxOptions,
    ) -> Result<TxClaim, StoreError> {
        let shared = self.shared();
        let claimed =
            check_connection(shared, tx).and_then(|()| match claim(shared, tx, operation, options) {
                Err(fault) if fault.kind() == StoreErrorKind::Conflict => Ok(TxClaim::RetryTransaction),
                claimed => claimed,
            });
        claimed.map_err(|fault| fault.into_error("claim", &shared.path))
    }

    /// Runs `work` once, in one transaction with its record, on a connection of the store's own.
    ///
    /// `work` gets the open transaction. It must not end it, and holds back everything that is to be written to the file,
    /// so it should be short. When it panics, everything is rolled back and the panic goes on here.
    ///
    /// # Errors
    /// [`StoreError`]; unless `may_have_applied()`, nothing happened. [`StoreErrorKind::Timeout`] when the database was
    /// not free in time, or when the work took longer than
    /// [`transaction_timeout`](crate::Options::transaction_timeout): its statements are then interrupted and
    /// everything is rolled back. [`StoreErrorKind::Overloaded`] when too many are waiting.
    ///
    /// # Cancellation
    /// Dropped while it waits for its turn: nothing happens. Dropped later: the work goes on to its end.
    ///
    /// # Cost
    /// One synced transaction. Needs a tokio runtime with its timer.
    pub async fn once<F>(&self, operation: &Operation, work: F) -> Result<OnceOutcome, StoreError>
    where
        F: FnOnce(&Transaction<'_>) -> Result<Reply, TxFailure> + Send + 'static,
    {
        self.once_with(operation, TxOptions::default(), work).await
    }

    /// [`SqliteStore::once`] with options.
    ///
    /// # Errors
    /// Those of [`SqliteStore::once`].
    pub async fn once_with<F>(
        &self,
        operation: &Operation,
        options: TxOptions,
        work: F,
    ) -> Result<OnceOutcome, StoreError>
    where
        F: FnOnce(&Transaction<'_>) -> Result<Reply, TxFailure> + Send + 'static,
    {
        let (shared, transactions) = (Arc::clone(self.shared()), Arc::clone(self.transactions()));
        let fail = |kind, why: &str| {
            StoreError::new(kind, "once").with_detail(format!("{}: {why}", self.path().display()))
        };
        let _place = transactions
            .places
            .try_acquire()
            .map_err(|_| fail(StoreErrorKind::Overloaded, "too many transactions are waiting"))?;
        let patience = shared.options.busy_timeout;
        let turn = tokio::time::timeout(patience, Arc::clone(&transactions.turn).acquire_owned()).await;
        let Ok(Ok(turn)) = turn else {
            return Err(fail(StoreErrorKind::Timeout, "other transactions held the database all the time"));
        };
        let operation = operation.clone();
        let its = Arc::clone(&transactions);
        let limit = shared.options.transaction_timeout.saturating_add(patience.saturating_mul(2));
        let run = tokio::task::spawn_blocking(move || {
            let done = its.run(&shared, &operation, &options, work);
            drop(turn);
            done.map_err(|fault| fault.into_error("once", &shared.path))
        });
        match tokio::time::timeout(limit, run).await {
            Ok(Ok(done)) => done,
            Ok(Err(ended)) => match ended.try_into_panic() {
                Ok(panic) => resume_unwind(panic),
                Err(cancelled) => Err(fail(StoreErrorKind::Unavailable, "the runtime ended")
                    .with_source(cancelled)
                    .ambiguous()),
            },
            Err(_) => Err(fail(StoreErrorKind::Timeout, "the work does not return, though its time is over")
                .ambiguous()),
        }
    }
}

impl TransactionClaim {
    /// 1 for the first run; more when a dead owner's record was taken over.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// Stores the reply in the same transaction.
    ///
    /// # Errors
    /// [`StoreErrorKind::Conflict`] when `tx` is not the transaction of the claim any more: it was rolled back, as
    /// SQLite itself does after some errors. After any error, roll back.
    pub fn complete(self, tx: &Transaction<'_>, reply: Reply) -> Result<Pending<StoredReply>, StoreError> {
        let path = self.shared.path.clone();
        self.complete_in(tx, reply).map_err(|fault| fault.into_error("complete", &path))
    }

    fn complete_in(self, tx: &Transaction<'_>, reply: Reply) -> Result<Pending<StoredReply>, Fault> {
        let rolled_back =
            || Fault::new(StoreErrorKind::Conflict, "the transaction of the claim was rolled back");
        if tx.is_autocommit() {
            return Err(rolled_back());
        }
        let head = reply.encode_head();
        let completion =
            Completion { token: self.token, attempt: self.attempt, reply, retention: self.retention };
        let now = self.shared.timeline.now();
        match claims::complete(tx, &now, &self.operation, &head, &completion)? {
            CompleteOutcome::Stored(stored) => Ok(Pending::new(stored)),
            _ => Err(rolled_back()),
        }
    }
}

/// The connection of [`SqliteStore::once`], and the line before it.
#[derive(Debug)]
pub(crate) struct Transactions {
    idle: Mutex<Option<Guarded>>,
    turn: Arc<Semaphore>,
    places: Semaphore,
}

/// How many callers may wait for their transaction.
const PLACES_MAX: usize = 1024;

impl Default for Transactions {
    fn default() -> Self {
        Self { idle: Mutex::default(), turn: Arc::new(Semaphore::new(1)), places: Semaphore::new(PLACES_MAX) }
    }
}

#[derive(Debug)]
struct Guarded {
    conn: Connection,
    guard: Arc<Guard>,
}

/// What foreign code on our connection may not do: commit, and run for ever.
#[derive(Debug)]
struct Guard {
    may_commit: AtomicBool,
    // On the boot clock.
    deadline_ms: AtomicU64,
}

impl Transactions {
    fn run<F>(
        &self,
        shared: &Arc<Shared>,
        operation: &Operation,
        options: &TxOptions,
        work: F,
    ) -> Result<OnceOutcome, Fault>
    where
        F: FnOnce(&Transaction<'_>) -> Result<Reply, TxFailure>,
    {
        shared.identity.check(&shared.path)?;
        let _gate = shared
            .gate
            .try_lock_for(shared.options.busy_timeout)
            .ok_or_else(|| Fault::new(StoreErrorKind::Timeout, "the database was held all the time"))?;
        let idle = self.idle.lock().take();
        let mut guarded = idle.map_or_else(|| Guarded::connect(shared), Ok)?;
        // A panic of the work drops the connection, which rolls back.
        let done = guarded.run(shared, operation, options, work);
        if guarded.conn.is_autocommit() && !done.as_ref().is_err_and(Fault::breaks_connection) {
            *self.idle.lock() = Some(guarded);
        }
        done
    }
}

impl Guarded {
    fn connect(shared: &Shared) -> Result<Self, Fault> {
        let mut conn = open::connect(&shared.options)?;
        let guard =
            Arc::new(Guard { may_commit: AtomicBool::new(false), deadline_ms: AtomicU64::new(u64::MAX) });
        // SQLite rolls a whole transaction back after some errors. Whatever the work writes after that would commit by
        // itself, without a record; and the work may say COMMIT. Both become a rollback here.
        let its = Arc::clone(&guard);
        conn.commit_hook(Some(move || !its.may_commit.load(Ordering::SeqCst)))?;
        let its = Arc::clone(&guard);
        conn.progress_handler(1000, Some(move || boot_ms() >= its.deadline_ms.load(Ordering::SeqCst)))?;
        Ok(Self { conn, guard })
    }

    fn run<F>(
        &mut self,
        shared: &Arc<Shared>,
        operation: &Operation,
        options: &TxOptions,
        work: F,
    ) -> Result<OnceOutcome, Fault>
    where
        F: FnOnce(&Transaction<'_>) -> Result<Reply, TxFailure>,
    {
        let guard = &self.guard;
        let mut tx = self.conn.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let claim = match claim(shared, &tx, operation, options)?.into() {
            TxStep::Work(claim) => claim,
            TxStep::Answer(outcome) => return Ok(outcome),
            TxStep::Retry => return Err(Fault::new(StoreErrorKind::Conflict, "another writer went first")),
        };
        if mutant(Mutant::ClaimBeforeTransaction) {
            guard.commit(tx)?;
            tx = self.conn.transaction_with_behavior(TransactionBehavior::Immediate)?;
        }
        tx.execute_batch("SAVEPOINT onlyonce_work")?;
        crash_point(CrashPoint::TxClaimed);
        let limit_ms = u64::try_from(shared.options.transaction_timeout.as_millis()).unwrap_or(u64::MAX);
        let deadline_ms = boot_ms().saturating_add(limit_ms);
        guard.deadline_ms.store(deadline_ms, Ordering::SeqCst);
        let done = work(&tx);
        crash_point(CrashPoint::TxWorked);
        guard.deadline_ms.store(u64::MAX, Ordering::SeqCst);
        if boot_ms() >= deadline_ms {
            return Err(Fault::new(StoreErrorKind::Timeout, "the work took too long, and was rolled back"));
        }
        if let Err(TxFailure::Transient(cause)) = done {
            return Ok(OnceOutcome::Transient(cause));
        }
        if tx.is_autocommit() {
            let why =
                "the transaction ended under the work, by its own hand or by an error, and was rolled back";
            return Err(Fault::new(StoreErrorKind::Conflict, why));
        }
        let reply = match done {
            Ok(reply) => reply,
            Err(TxFailure::Definitive(reply)) => {
                tx.execute_batch("ROLLBACK TO onlyonce_work")?;
                reply
            }
            Err(TxFailure::Transient(cause)) => return Ok(OnceOutcome::Transient(cause)),
        };
        if mutant(Mutant::RecordAfterCommit) {
            guard.commit(tx)?;
            tx = self.conn.transaction_with_behavior(TransactionBehavior::Immediate)?;
        }
        let pending = claim.complete_in(&tx, reply)?;
        crash_point(CrashPoint::TxCommitBefore);
        guard.commit(tx)?;
        crash_point(CrashPoint::TxCommitAfter);
        Ok(OnceOutcome::Ran(pending.after_commit()))
    }
}

impl Guard {
    fn commit(&self, tx: Transaction<'_>) -> Result<(), Fault> {
        self.may_commit.store(true, Ordering::SeqCst);
        let committed = tx.commit();
        self.may_commit.store(false, Ordering::SeqCst);
        committed.map_err(|error| Fault::from(error).in_commit())
    }
}

fn claim(
    shared: &Arc<Shared>,
    tx: &Transaction<'_>,
    operation: &Operation,
    options: &TxOptions,
) -> Result<TxClaim, Fault> {
    let mut token = [0; 16];
    getrandom::fill(&mut token)
        .map_err(|error| Fault::new(StoreErrorKind::Internal, format!("no random bytes: {error}")))?;
    let request = options.request(LeaseToken::from_bytes(token));
    let hash = HashText::of(operation.fingerprint());
    let now = shared.timeline.now();
    let outcome = claims::claim(tx, &now, operation, hash, &request, OnLeaseEnd::Hold)?;
    Ok(TxClaim::of(outcome, |lease| TransactionClaim {
        shared: Arc::clone(shared),
        operation: operation.clone(),
        token: lease.token,
        attempt: lease.attempt,
        retention: options.retention,
    }))
}

fn check_connection(shared: &Shared, tx: &Transaction<'_>) -> Result<(), Fault> {
    if tx.is_autocommit() {
        return Err(Fault::new(StoreErrorKind::Conflict, "the transaction was rolled back"));
    }
    shared.identity.check(&shared.path)?;
    if !tx.path().is_some_and(|path| Identity::of(Path::new(path)) == shared.identity) {
        let why = "the transaction is on another file than the store's";
        return Err(Fault::new(StoreErrorKind::Unfit, why));
    }
    let synchronous: i64 = tx.query_row("PRAGMA main.synchronous", [], |row| row.get(0))?;
    if synchronous < 2 && shared.options.durability == Durability::Full {
        let why = "the connection's synchronous is weaker than FULL, so that its commit could be lost";
        return Err(Fault::new(StoreErrorKind::Unfit, why));
    }
    Ok(())
}

fn boot_ms() -> u64 {
    u64::try_from(SystemClock.boot().as_millis()).unwrap_or(u64::MAX)
}
