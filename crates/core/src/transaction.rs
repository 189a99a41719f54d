//! The transactional mode: record and business writes in one transaction of the caller, or neither.
//!
//! A crash is a rollback, so there is nothing to take over. These are the words that the stores share; each has its own
//! `claim_in` and `once`, with the transactions of its driver. See architecture.md, "Transactional".

use std::error::Error as StdError;
use std::fmt;
use std::time::{Duration, SystemTime};

use crate::{
    ClaimOutcome, ClaimRequest, Fingerprint, Lease, LeaseToken, OnLeaseEnd, Origin, Reply, StoredReply,
};

/// How a transactional claim behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TxOptions {
    /// How long the reply is kept. 24 hours by default.
    pub retention: Duration,
    /// How long a duplicate waits for the transaction that has the operation; then it is told that it is in progress. 2 s
    /// by default. SQLite has one writer for all keys: there the busy timeout holds instead.
    pub wait: Duration,
    /// Whether a record of the leased mode, left by a dead owner, may be taken over. It needs that record's leave too.
    pub on_lease_end: OnLeaseEnd,
    /// A takeover past this many attempts is not made. 5 by default.
    pub max_attempts: u32,
}

impl Default for TxOptions {
    fn default() -> Self {
        Self {
            retention: Duration::from_secs(24 * 3600),
            wait: Duration::from_secs(2),
            on_lease_end: OnLeaseEnd::TakeOver,
            max_attempts: 5,
        }
    }
}

impl TxOptions {
    /// The claim of a transaction, for a store's `decide`.
    ///
    /// Nobody sees the record before it is completed. Should the caller commit without that, its lease is over at once.
    pub fn request(&self, token: LeaseToken) -> ClaimRequest {
        ClaimRequest {
            token,
            lease: Duration::ZERO,
            retention: self.retention,
            on_lease_end: self.on_lease_end,
            takeover_now: true,
            max_attempts: self.max_attempts,
        }
    }
}

/// What a claim inside a transaction is answered; `C` is the store's right to do the work.
#[derive(Clone, Debug)]
pub enum TxClaim<C> {
    /// Do the work in this transaction, then complete the claim in it.
    Acquired(C),
    /// It is done: this is the answer.
    Completed(StoredReply),
    /// Somebody works on it: another transaction, or an owner in the leased mode.
    InProgress {
        /// What is left of an owner's lease. A transaction has none: zero.
        lease_left: Duration,
        /// Since it claimed.
        age: Duration,
        /// The owner's request. That of an open transaction cannot be seen.
        origin: Option<Origin>,
    },
    /// The key belongs to another request.
    Mismatch {
        /// The fingerprint of that request.
        stored: Fingerprint,
        /// That request.
        origin: Option<Origin>,
    },
    /// It may have happened, and nobody may run it again.
    Unknown {
        /// Since when, by the wall clock.
        since: SystemTime,
        /// The request that may have had its effect.
        origin: Option<Origin>,
    },
    /// Another transaction went first, or met this one in a deadlock: roll back and run it again from its start.
    RetryTransaction,
}

impl<C> TxClaim<C> {
    /// What a store decided, in these words.
    pub fn of(outcome: ClaimOutcome, acquired: impl FnOnce(Lease) -> C) -> Self {
        match outcome {
            ClaimOutcome::Acquired(lease) => Self::Acquired(acquired(lease)),
            ClaimOutcome::Completed(stored) => Self::Completed(stored),
            ClaimOutcome::InProgress { lease_left, age, origin } => {
                Self::InProgress { lease_left, age, origin }
            }
            ClaimOutcome::Mismatch { stored, origin } => Self::Mismatch { stored, origin },
            ClaimOutcome::Unknown { since, origin } => Self::Unknown { since, origin },
        }
    }

    /// Another transaction has the operation, and nothing more can be seen of it.
    pub fn busy() -> Self {
        Self::InProgress { lease_left: Duration::ZERO, age: Duration::ZERO, origin: None }
    }
}

/// What came of an operation that was to run once.
#[derive(Debug)]
pub enum OnceOutcome {
    /// The work ran, and is committed with this reply: a success or a definitive failure.
    Ran(StoredReply),
    /// It had run before: this is the reply.
    Replayed(StoredReply),
    /// The work failed for the moment; nothing happened.
    Transient(Box<dyn StdError + Send + Sync>),
    /// Somebody works on it: another transaction, or an owner in the leased mode.
    InProgress {
        /// What is left of an owner's lease. A transaction has none: zero.
        lease_left: Duration,
        /// Since it claimed.
        age: Duration,
        /// The owner's request. That of an open transaction cannot be seen.
        origin: Option<Origin>,
    },
    /// The key belongs to another request.
    Mismatch {
        /// The fingerprint of that request.
        stored: Fingerprint,
        /// That request.
        origin: Option<Origin>,
    },
    /// It may have happened, and nobody may run it again.
    Unknown {
        /// Since when, by the wall clock.
        since: SystemTime,
        /// The request that may have had its effect.
        origin: Option<Origin>,
    },
}

/// How a closure form goes on after its claim.
#[derive(Debug)]
pub enum TxStep<C> {
    /// Do the work.
    Work(C),
    /// Roll back: this is the outcome.
    Answer(OnceOutcome),
    /// Roll back and begin again.
    Retry,
}

impl<C> From<TxClaim<C>> for TxStep<C> {
    fn from(claim: TxClaim<C>) -> Self {
        Self::Answer(match claim {
            TxClaim::Acquired(claim) => return Self::Work(claim),
            TxClaim::RetryTransaction => return Self::Retry,
            TxClaim::Completed(stored) => OnceOutcome::Replayed(stored),
            TxClaim::InProgress { lease_left, age, origin } => {
                OnceOutcome::InProgress { lease_left, age, origin }
            }
            TxClaim::Mismatch { stored, origin } => OnceOutcome::Mismatch { stored, origin },
            TxClaim::Unknown { since, origin } => OnceOutcome::Unknown { since, origin },
        })
    }
}

/// Why work inside a transaction did not succeed.
///
/// Every error becomes a transient failure by `?`: nothing is stored and a retry runs again.
#[derive(Debug)]
pub enum TxFailure {
    /// A result like any other: the business writes are taken back, this reply is stored, and every retry gets it.
    Definitive(Reply),
    /// It may go better next time: everything is taken back and the key is free.
    Transient(Box<dyn StdError + Send + Sync>),
}

impl TxFailure {
    /// A failure that may go better next time.
    pub fn transient(cause: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        Self::Transient(cause.into())
    }
}

impl<E: StdError + Send + Sync + 'static> From<E> for TxFailure {
    fn from(error: E) -> Self {
        Self::Transient(Box::new(error))
    }
}

/// Something that is true once the transaction is committed, and never was if it is rolled back.
#[must_use = "commit the transaction, then take it out"]
#[derive(Clone, Copy)]
pub struct Pending<T>(T);

impl<T> Pending<T> {
    /// What a store wrote in an open transaction.
    pub fn new(written: T) -> Self {
        Self(written)
    }

    /// Takes it out, after the commit.
    pub fn after_commit(self) -> T {
        self.0
    }
}

// What is inside is not true yet, so it is not shown either.
impl<T> fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Pending")
    }
}
