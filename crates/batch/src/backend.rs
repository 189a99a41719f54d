//! What a store does for its batcher.

use std::fmt::Debug;
use std::future::Future;
use std::sync::Arc;

use onlyonce_core::{ClaimOutcome, CompleteOutcome, ReleaseOutcome, RenewOutcome, StoreError};

use crate::Job;

/// Runs batches.
pub trait Backend: Debug + Send + Sync + 'static {
    /// What can go wrong.
    type Fault: Fault;

    /// Runs a batch and answers each job, in order.
    ///
    /// # Errors
    /// A fault that hit them all: nothing was done, unless the fault says that it may have been.
    fn run(&self, jobs: &[Job]) -> impl Future<Output = Result<Answers<Self::Fault>, Self::Fault>> + Send;

    /// Runs one job beside the lanes. An owner's waits for whoever holds its operation locked, for a bounded time; a claim
    /// need not. Still locked, a claim is answered that it is in progress, and an owner's job fails as a time-out.
    ///
    /// # Errors
    /// The fault.
    fn run_alone(&self, job: &Job) -> impl Future<Output = Result<Answer, Self::Fault>> + Send;
}

/// The answers to a batch, one for each job in its order.
pub type Answers<F> = Vec<Result<Answer, F>>;

/// What came of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Of a claim.
    Claim(ClaimOutcome),
    /// Of a renewal.
    Renew(RenewOutcome),
    /// Of a completion.
    Complete(CompleteOutcome),
    /// Of a release or a mark of unknown outcome.
    Release(ReleaseOutcome),
    /// Somebody holds the operation locked; nothing was done.
    Locked,
}

/// A failure that may hit many jobs.
pub trait Fault: Debug + Send + Sync + 'static {
    /// The error of one job. `operation` is the store method that was called.
    fn error(self: &Arc<Self>, operation: &'static str) -> StoreError;

    /// Whether it may be of one job's making, so that the others are tried again without it. False for a broken
    /// connection, and for whatever may have been applied.
    fn splits(&self) -> bool;

    /// Whether somebody's lock was waited for in vain.
    fn is_lock_wait(&self) -> bool;
}
