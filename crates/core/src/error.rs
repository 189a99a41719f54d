//! What can go wrong with a store. Domain answers (in progress, mismatch, …) are not errors.

use std::error::Error as StdError;
use std::fmt;

/// An infrastructure failure of a store.
///
/// It says what was being done, whether it is worth trying again, and whether the change may have been made
/// all the same; the source is kept whole.
#[derive(Debug)]
pub struct StoreError {
    kind: StoreErrorKind,
    operation: &'static str,
    detail: Option<Box<str>>,
    source: Option<Box<dyn StdError + Send + Sync>>,
    may_have_applied: bool,
}

/// The kinds of store failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StoreErrorKind {
    /// The store cannot be reached, or its connection broke.
    Unavailable,
    /// No answer in time.
    Timeout,
    /// A bounded queue, pool or table is full: nothing was sent.
    Overloaded,
    /// No room left on disk or in a quota: nothing was written.
    Full,
    /// The caller's transaction lost a conflict (serialization failure, deadlock): run it again from the start.
    Conflict,
    /// A record this release cannot read. Never treated as absent.
    Unreadable,
    /// The store is not fit for use: wrong table, wrong file, no write permission, not durable as required.
    Unfit,
    /// A failure inside the store that fits no other kind.
    Internal,
}

impl StoreError {
    /// An error of this kind, met while doing `operation` (a method name such as `claim`).
    pub fn new(kind: StoreErrorKind, operation: &'static str) -> Self {
        Self { kind, operation, detail: None, source: None, may_have_applied: false }
    }

    /// Adds a sentence for people: what was found, and what to do.
    #[must_use]
    pub fn with_detail(mut self, detail: impl Into<String>) -> Self {
        self.detail = Some(detail.into().into_boxed_str());
        self
    }

    /// Keeps the cause.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// Marks a change that was sent and whose answer was lost.
    #[must_use]
    pub fn ambiguous(mut self) -> Self {
        self.may_have_applied = true;
        self
    }

    /// What kind of failure it is.
    pub fn kind(&self) -> StoreErrorKind {
        self.kind
    }

    /// The store method that failed.
    pub fn operation(&self) -> &'static str {
        self.operation
    }

    /// Whether the same call may succeed later without anybody changing anything.
    pub fn retryable(&self) -> bool {
        use StoreErrorKind::*;
        matches!(self.kind, Unavailable | Timeout | Overloaded | Full | Conflict)
    }

    /// Whether the change may be in the store all the same. Ask again with the same token.
    pub fn may_have_applied(&self) -> bool {
        self.may_have_applied
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.kind {
            StoreErrorKind::Unavailable => "the store is unavailable",
            StoreErrorKind::Timeout => "the store did not answer in time",
            StoreErrorKind::Overloaded => "the store is overloaded",
            StoreErrorKind::Full => "the store is full",
            StoreErrorKind::Conflict => "the transaction must be run again",
            StoreErrorKind::Unreadable => "a record cannot be read by this release",
            StoreErrorKind::Unfit => "the store is not fit for use",
            StoreErrorKind::Internal => "the store failed",
        };
        write!(f, "{what} ({})", self.operation)?;
        match &self.detail {
            Some(detail) => write!(f, ": {detail}"),
            None => Ok(()),
        }
    }
}

impl StdError for StoreError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.source.as_deref().map(|source| source as &(dyn StdError + 'static))
    }
}
