//! The transactional mode: record and business writes in one transaction of the caller's connection, or neither.
//!
//! A crash is a rollback, so there is nothing to take over.

use std::sync::Arc;
use std::time::Duration;

use onlyonce_core::{
    OnceOutcome, Operation, Pending, Reply, StoreError, StoreErrorKind, StoredReply, TxClaim as Claimed,
    TxFailure, TxOptions, TxStep,
};
use tokio_postgres::{Client, Transaction};

use crate::error::{Fault, is_conflict};
use crate::inside::{Inside, Right, Then, UNDO_WORK};
use crate::link::Link;
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

/// How often a transaction that others went before is run.
pub(crate) const TRIES: u32 = 10;

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
    /// # Errors
    /// [`StoreErrorKind::Unfit`] when the connection is to another database than the store's, or its user may not use
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
    /// operation, and its record tells. [`StoreErrorKind::Conflict`] when others went first each time.
    ///
    /// # Cancellation
    /// The transaction is rolled back before the connection is used again, unless its COMMIT was sent.
    ///
    /// # Cost
    /// Two round trips beside those of the transaction itself and of the work.
    pub async fn once(
        &self,
        client: &mut Client,
        operation: &Operation,
        work: impl AsyncFnMut(&mut Transaction<'_>) -> Result<Reply, TxFailure>,
    ) -> Result<OnceOutcome, StoreError> {
        self.once_with(client, operation, &TxOptions::default(), work).await
    }

    /// [`PostgresStore::once`] with options.
    ///
    /// # Errors
    /// Those of [`PostgresStore::once`].
    pub async fn once_with(
        &self,
        client: &mut Client,
        operation: &Operation,
        options: &TxOptions,
        mut work: impl AsyncFnMut(&mut Transaction<'_>) -> Result<Reply, TxFailure>,
    ) -> Result<OnceOutcome, StoreError> {
        let mut pause = Pause::default();
        for _ in 0..TRIES {
            let begun = client.transaction().await;
            let mut tx = begun.map_err(|error| Fault::from(error).before_sending().into_error("once"))?;
            let finished = match self.try_once(&mut tx, operation, options, &mut work).await {
                Ok(Tried::Ran(pending)) => match tx.commit().await {
                    Ok(()) => return Ok(OnceOutcome::Ran(pending.after_commit())),
                    Err(error) => Err(Fault::from(error).in_commit()),
                },
                other => {
                    // Where even that fails the connection is gone, and the server takes it back.
                    let _ = tx.rollback().await;
                    other
                }
            };
            match finished {
                Ok(Tried::Answered(outcome)) => return Ok(outcome),
                Err(fault) if !fault.is_conflict() => return Err(fault.into_error("once")),
                Ok(Tried::Ran(_) | Tried::Again) | Err(_) => pause.wait().await,
            }
        }
        Err(went_first())
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
        let done = work(tx).await;
        claim.end(tx, done).await
    }

    pub(crate) async fn claim_inside<T: InTransaction>(
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
    /// [`StoreErrorKind::Conflict`] when `tx` is not the transaction of the claim any more: it was rolled back, or to a
    /// savepoint before the claim. After any error, roll back.
    ///
    /// # Cost
    /// One round trip.
    pub async fn complete<T: InTransaction>(
        self,
        tx: &mut T,
        reply: Reply,
    ) -> Result<Pending<StoredReply>, StoreError> {
        let completed = self.complete_inside(tx, "", &reply).await;
        completed.map(Pending::new).map_err(|fault| fault.into_error("complete"))
    }

    /// Ends a closure form after its work. What stands is in the savepoint of the work, as its own writes are.
    pub(crate) async fn end<T: InTransaction>(
        self,
        tx: &mut T,
        done: Result<Reply, TxFailure>,
    ) -> Result<Tried, Fault> {
        let (before, reply) = match done {
            Ok(reply) => ("", reply),
            Err(TxFailure::Definitive(reply)) => (UNDO_WORK, reply),
            Err(TxFailure::Transient(cause)) if is_conflict(&*cause) => return Ok(Tried::Again),
            Err(TxFailure::Transient(cause)) => return Ok(Tried::Answered(OnceOutcome::Transient(cause))),
        };
        match self.complete_inside(tx, before, &reply).await {
            Ok(stored) => Ok(Tried::Ran(Pending::new(stored))),
            // The server said so: another transaction went first.
            Err(fault) if fault.code().is_some() => Err(fault),
            // The work ended the transaction: to run it again would do twice what it committed.
            Err(fault) if fault.is_conflict() => Err(fault.for_good()),
            Err(fault) => Err(fault),
        }
    }

    async fn complete_inside<T: InTransaction>(
        &self,
        tx: &mut T,
        before: &str,
        reply: &Reply,
    ) -> Result<StoredReply, Fault> {
        self.inside.complete(tx, before, &self.right, &self.operation, reply, self.retention).await
    }
}

/// How far one try came.
pub(crate) enum Tried {
    Ran(Pending<StoredReply>),
    Answered(OnceOutcome),
    Again,
}

/// Between two tries.
#[derive(Debug)]
pub(crate) struct Pause(Duration);

impl Default for Pause {
    fn default() -> Self {
        Self(Duration::from_millis(2))
    }
}

impl Pause {
    // Those that met once do not meet again at the same moment.
    pub(crate) async fn wait(&mut self) {
        let mut part = [0];
        let _ = getrandom::fill(&mut part);
        tokio::time::sleep(self.0.mul_f64(f64::from(part[0]) / 255.0 + 0.5)).await;
        self.0 = (self.0 * 2).min(Duration::from_millis(200));
    }
}

/// The error of a closure form whose tries are used up.
pub(crate) fn went_first() -> StoreError {
    StoreError::new(StoreErrorKind::Conflict, "once")
        .with_detail(format!("other transactions went first {TRIES} times"))
}
