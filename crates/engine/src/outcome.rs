//! What the engine answers.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use onlyonce_core::{Fingerprint, Origin, Reply, StoreError, StoredReply};

use crate::execution::Execution;

/// Any cause, kept whole.
pub(crate) type Cause = Box<dyn StdError + Send + Sync>;

/// What [`Idempotency::begin`](crate::Idempotency::begin) answers.
#[derive(Debug)]
pub enum Begin {
    /// It is yours: do the work and end the execution.
    Acquired(Execution),
    /// It is done: this is the answer.
    Completed(StoredReply),
    /// Somebody else works on it, or just ended without a result.
    InProgress {
        /// When to ask again: whole seconds, at least one.
        retry_after: Duration,
        /// What the last attempt was answered, when it ended transiently while this caller waited for it.
        last: Option<Reply>,
        /// The request that is worked on, where it said.
        origin: Option<Origin>,
    },
    /// The key belongs to another request.
    Mismatch {
        /// The fingerprint of that request.
        stored: Fingerprint,
        /// That request, where it said.
        origin: Option<Origin>,
    },
    /// It may have happened, and nobody may run it again.
    Unknown {
        /// Since when.
        since: SystemTime,
        /// The request that may have had its effect, where it said.
        origin: Option<Origin>,
    },
}

/// What [`Idempotency::run`](crate::Idempotency::run) answers.
#[derive(Debug)]
pub enum Outcome {
    /// The work ran now; its reply, success or definitive failure, is recorded.
    Ran(Reply),
    /// It ran before: the recorded reply.
    Replayed(StoredReply),
    /// Somebody else works on it, or just ended without a result.
    InProgress {
        /// When to ask again: whole seconds, at least one.
        retry_after: Duration,
        /// What the last attempt was answered, when it ended transiently while this caller waited for it.
        last: Option<Reply>,
    },
    /// The key belongs to another request.
    Mismatch {
        /// The fingerprint of that request.
        stored: Fingerprint,
    },
    /// It may have happened, and nobody knows. What a retry does is the policy's.
    Unknown {
        /// Since when.
        since: SystemTime,
        /// Why, when it was this very call that ended so.
        cause: Option<Cause>,
    },
    /// The work failed transiently: nothing happened, the key is free.
    Released(Cause),
    /// The work ran and the store could not record it: the real reply, and the trouble. The lease is left to end.
    NotRecorded {
        /// What the work answered.
        reply: Reply,
        /// Why it is not recorded.
        error: EngineError,
    },
}

/// How work can fail.
#[derive(Debug)]
pub enum Failure {
    /// It failed and always will (declined, insufficient funds): the reply is stored and replayed.
    Definitive(Reply),
    /// It failed before anything happened (refused, overloaded): the key is released.
    Transient(Cause),
    /// It may have happened (a timeout): the policy decides.
    Unknown(Cause),
}

impl Failure {
    /// A failure that is stored and replayed.
    pub fn definitive(reply: Reply) -> Self {
        Self::Definitive(reply)
    }

    /// A failure that releases the key: surely nothing happened.
    pub fn transient(cause: impl Into<Cause>) -> Self {
        Self::Transient(cause.into())
    }

    /// A failure after which nobody knows whether it happened.
    pub fn unknown(cause: impl Into<Cause>) -> Self {
        Self::Unknown(cause.into())
    }
}

/// Infrastructure trouble: the engine could not say. Nothing ran.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum EngineError {
    /// The store failed; shared by all duplicates that asked at once.
    Store(Arc<StoreError>),
    /// As many operations are in flight as may be.
    Overloaded,
    /// The engine is shutting down.
    ShuttingDown,
}

impl fmt::Display for EngineError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Store(error) => error.fmt(f),
            Self::Overloaded => f.write_str("too many operations in flight"),
            Self::ShuttingDown => f.write_str("shutting down"),
        }
    }
}

impl StdError for EngineError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Self::Store(error) => error.source(),
            Self::Overloaded | Self::ShuttingDown => None,
        }
    }
}

impl From<StoreError> for EngineError {
    fn from(error: StoreError) -> Self {
        Self::Store(Arc::new(error))
    }
}
