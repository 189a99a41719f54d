//! The transactional mode: record and business writes in one transaction of the caller's connection, or neither.
//!
//! A crash is a rollback, so there is nothing to take over.

use std::sync::Arc;
use std::time::Duration;

use onlyonce_batch::Tries;
use onlyonce_core::{
    CrashPoint, OnceOutcome, Operation, Pending, Reply, StoreError, StoredReply, TxClaim as Claimed,
    TxFailure, TxOptions, TxStep, crash_point,
};
use tokio_postgres::{Client, Transaction};

use crate::error::{Fault, is_conflict};
use crate::inside::{Inside, Right, Then, UNDO_WORK};
use crate::link::{Ending, Link};
use crate::store::PostgresStore;

/// What a claim inside a transaction of PostgreSQL is answered.
pub type TxClaim = onlyonce_core::TxClaim<TransactionClaim>;

/// An open transaction that an operation can be claimed in: `tokio_postgres::Transaction`, and with the feature `sqlx`
/// `sqlx::PgTransaction` and `sqlx::PgConnection`.
#[allow(private_bounds, reason = "nobody else implements it")]
pub trait InTransaction: Link {}

impl InTransaction for Transaction<'_> {}

/// The right to do the work in the transaction that it was claimed in.
///
/// Rolling back gives it up. Committing without [`TransactionClaim::complete`] leaves the outcome unknown: business
/// writes may be in the database, and no reply is.
#[must_use = "complete it, or roll the transaction back"]
#[derive(Debug)]
pub struct TransactionClaim {
    inside: Arc<Inside>,
    operation: Operation,
    right: Right,
    retention: Duration,
}

impl PostgresStore {
    /// Claims `operation` inside a transaction of the caller's own connection to the store's database.
    ///
    /// # Guarantees
    /// Record and business writes become visible together, at the caller's commit. A duplicate waits for the
    /// transaction, up to [`TxOptions::wait`]; of each process at most one waits at the server for each operation. It
    /// runs inside a savepoint, which is gone when this returns, and sets `lock_timeout` back. `synchronous_commit` is
    /// raised to `on` for this transaction where it is weaker. Correct under READ COMMITTED, REPEATABLE READ and
    /// SERIALIZABLE: what a snapshot is too old for is [`RetryTransaction`](TxClaim::RetryTransaction).
    ///
    /// Also where it is not acquired the transaction may keep the operation's lock to its end. End it before long: an owner
    /// of the leased mode cannot renew or complete meanwhile, and is told to come again.
    ///
    /// # Errors
    /// [`StoreErrorKind::Unfit`](onlyonce_core::StoreErrorKind::Unfit) when the connection is to another database than the store's, or its user may not use
    /// the tables. After any error, roll back.
    ///
    /// # Cancellation
    /// Dropped in the middle: roll back.
    ///
    /// # Cost
    /// One round trip for a new key, two for a replay; more when another transaction has the operation.
    pub async fn claim_in<T: InTransaction>(
        &self,
        tx: &mut T,
        operation: &Operation,
        options: &TxOptions,
    ) -> Result<TxClaim, StoreError> {
        let claimed = self.claim_inside(tx, operation, options, Then::Nothing).await;
        claimed.map_err(|fault| fault.into_error("claim"))
    }

    /// Runs `work` once, in one transaction with its record, on the caller's own connection, under the isolation that
    /// its session has.
    ///
    /// `work` gets the open transaction and must not end it. When another transaction went first (a serialization
    /// failure, a deadlock), everything is rolled back and `work` runs again, a few times.
    ///
    /// Where the future must be [`Send`] (a handler of axum, a task of its own) let `work` own what it uses, as an `async
    /// move` closure: of one that borrows the compiler cannot tell.
    ///
    /// # Errors
    /// [`StoreError`]; unless `may_have_applied()`, nothing happened. When it may have: ask again with the same
    /// operation, and its record tells. [`StoreErrorKind::Conflict`](onlyonce_core::StoreErrorKind::Conflict) when others went first each time.
    ///
    /// # Cancellation
    /// The transaction is rolled back before the connection is used again, unless its COMMIT was sent.
    ///
    /// # Cost
    /// One round trip beside those of the transaction itself and of the work.
    pub fn once<'a, W>(
        &'a self,
        client: &'a mut Client,
        operation: &Operation,
        work: W,
    ) -> impl Future<Output = Result<OnceOutcome, StoreError>> + use<'a, W>
    where
        W: AsyncFnMut(&mut Transaction<'_>) -> Result<Reply, TxFailure> + 'a,
    {
        self.once_with(client, operation, &TxOptions::default(), work)
    }

    /// [`PostgresStore::once`] with options.
    ///
    /// # Errors
    /// Those of [`PostgresStore::once`].
    pub fn once_with<'a, W>(
        &'a self,
        client: &'a mut Client,
        operation: &Operation,
        options: &TxOptions,
        mut work: W,
    ) -> impl Future<Output = Result<OnceOutcome, StoreError>> + use<'a, W>
    where
        W: AsyncFnMut(&mut Transaction<'_>) -> Result<Reply, TxFailure> + 'a,
    {
        // A future that borrowed them would not be known to be Send next to a closure that lends.
        let (operation, options) = (operation.clone(), *options);
        async move {
            let mut tries = Tries::default();
            while tries.next().await {
                let begun = client.transaction().await;
                let mut tx = begun.map_err(|error| not_begun(Fault::from(error)))?;
                let ended = match self.step(&mut tx, &operation, &options).await {
                    Ok(TxStep::Work(claim)) => {
                        crash_point(CrashPoint::TxClaimed);
                        let done = work(&mut tx).await;
                        crash_point(CrashPoint::TxWorked);
                        claim.end(tx, done).await
                    }
                    step => without_work(tx, step).await,
                };
                if let Some(outcome) = ended? {
                    return Ok(outcome);
                }
            }
            Err(Tries::used_up("once"))
        }
    }

    /// The claim of a closure form.
    pub(crate) async fn step<T: InTransaction>(
        &self,
        tx: &mut T,
        operation: &Operation,
        options: &TxOptions,
    ) -> Result<TxStep<TransactionClaim>, Fault> {
        self.claim_inside(tx, operation, options, Then::Work).await.map(TxStep::from)
    }

    async fn claim_inside<T: InTransaction>(
        &self,
        tx: &mut T,
        operation: &Operation,
        options: &TxOptions,
        then: Then,
    ) -> Result<TxClaim, Fault> {
        let (inside, patience) = (self.inside(), self.connections().patience);
        let claimed = inside.claim(tx, self.turns(), operation, options, patience, then).await?;
        Ok(match claimed {
            Claimed::Acquired(right) => TxClaim::Acquired(TransactionClaim {
                inside: Arc::clone(inside),
                operation: operation.clone(),
                right,
                retention: options.retention,
            }),
            Claimed::Completed(stored) => TxClaim::Completed(stored),
            Claimed::InProgress { lease_left, age, origin } => {
                TxClaim::InProgress { lease_left, age, origin }
            }
            Claimed::Mismatch { stored, origin } => TxClaim::Mismatch { stored, origin },
            Claimed::Unknown { since, origin } => TxClaim::Unknown { since, origin },
            Claimed::RetryTransaction => TxClaim::RetryTransaction,
        })
    }
}

impl TransactionClaim {
    /// 1 for the first run; more when a dead owner's record was taken over.
    pub fn attempt(&self) -> u32 {
        self.right.attempt
    }

    /// Stores the reply in the same transaction.
    ///
    /// # Errors
    /// [`StoreErrorKind::Conflict`](onlyonce_core::StoreErrorKind::Conflict) when `tx` is not the transaction of the claim any more: it was rolled back, or to a
    /// savepoint before the claim. After any error, roll back.
    ///
    /// # Cost
    /// One round trip.
    pub async fn complete<T: InTransaction>(
        self,
        tx: &mut T,
        reply: Reply,
    ) -> Result<Pending<StoredReply>, StoreError> {
        let completion = self.inside.completion(&self.right, &reply, self.retention);
        let rows = tx.ask("", completion.statement, &completion.values(), "").await;
        let completed = completion.answered(rows, &self.operation);
        completed.map(Pending::new).map_err(|fault| fault.into_error("complete"))
    }

    /// Ends a closure form after its work. What stands is in the savepoint of the work, as its own writes are. `None`:
    /// another transaction went first, and all is taken back.
    pub(crate) async fn end<T: Ending>(
        self,
        mut tx: T,
        done: Result<Reply, TxFailure>,
    ) -> Result<Option<OnceOutcome>, StoreError> {
        let reply = match done {
            Ok(reply) => reply,
            Err(TxFailure::Definitive(reply)) => {
                // Alone: were the transaction over, what is sent behind it would be done all the same.
                if let Err(fault) = tx.script(UNDO_WORK).await {
                    return without_work(tx, Err(fault)).await;
                }
                reply
            }
            Err(TxFailure::Transient(cause)) => {
                let again = is_conflict(&*cause);
                // Where there is nothing to take back to, the work ended the transaction, and what it committed is there.
                if !again
                    && let Err(fault) = tx.script(UNDO_WORK).await
                    && fault.is_over()
                {
                    return without_work(tx, Err(fault)).await;
                }
                tx.take_back().await;
                return Ok((!again).then_some(OnceOutcome::Transient(cause)));
            }
        };
        let completion = self.inside.completion(&self.right, &reply, self.retention);
        // It goes out together with the COMMIT.
        crash_point(CrashPoint::TxCommitBefore);
        let rows = tx.ask_and_commit(completion.statement, &completion.values()).await;
        match completion.answered(rows, &self.operation) {
            Ok(stored) => {
                crash_point(CrashPoint::TxCommitAfter);
                Ok(Some(OnceOutcome::Ran(stored)))
            }
            // The server said so: another transaction went first.
            Err(fault) if fault.is_conflict() && fault.code().is_some() => Ok(None),
            // The work ended the transaction: to run it again would do twice what it committed.
            Err(fault) if fault.is_conflict() => Err(fault.for_good().into_error("once")),
            Err(fault) => Err(fault.into_error("once")),
        }
    }
}

/// Ends a closure form that has no work to do.
pub(crate) async fn without_work<T: Ending>(
    tx: T,
    step: Result<TxStep<TransactionClaim>, Fault>,
) -> Result<Option<OnceOutcome>, StoreError> {
    tx.take_back().await;
    match step {
        Ok(TxStep::Answer(outcome)) => Ok(Some(outcome)),
        Ok(TxStep::Retry | TxStep::Work(_)) => Ok(None),
        Err(fault) if fault.is_conflict() => Ok(None),
        Err(fault) => Err(fault.into_error("once")),
    }
}

/// The error of a transaction that could not be begun.
pub(crate) fn not_begun(fault: Fault) -> StoreError {
    fault.before_sending().into_error("once")
}
