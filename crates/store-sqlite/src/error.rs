//! From what SQLite says to what a caller needs to know.

use std::error::Error as StdError;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use onlyonce_core::{StoreError, StoreErrorKind};
use rusqlite::ErrorCode;
use rusqlite::ffi;

/// What went wrong inside the store, before it is known which operations it hits.
#[derive(Debug)]
pub(crate) struct Fault {
    kind: StoreErrorKind,
    detail: Option<String>,
    source: Option<rusqlite::Error>,
    in_commit: bool,
}

impl Fault {
    pub(crate) fn new(kind: StoreErrorKind, detail: impl Into<String>) -> Self {
        Self { kind, detail: Some(detail.into()), source: None, in_commit: false }
    }

    pub(crate) fn unreadable(detail: impl Into<String>) -> Self {
        Self::new(StoreErrorKind::Unreadable, detail)
    }

    /// The failure of a COMMIT: unless it says that nothing was written, the change may have been made.
    pub(crate) fn in_commit(mut self) -> Self {
        self.in_commit = true;
        self
    }

    pub(crate) fn kind(&self) -> StoreErrorKind {
        self.kind
    }

    /// Whether SQLite was kept from a file that it needs. At start that is for good.
    pub(crate) fn cannot_open(&self) -> bool {
        matches!(self.code(), Some(ErrorCode::CannotOpen | ErrorCode::ReadOnly))
    }

    /// Whether it is about one operation alone: the transaction around it is sound and goes on.
    pub(crate) fn is_of_one_operation(&self) -> bool {
        match self.code() {
            None => matches!(self.kind, StoreErrorKind::Unreadable | StoreErrorKind::Internal),
            Some(code) => {
                matches!(code, ErrorCode::ConstraintViolation | ErrorCode::TooBig | ErrorCode::TypeMismatch)
            }
        }
    }

    /// Whether a fresh connection is the safer way on.
    pub(crate) fn breaks_connection(&self) -> bool {
        match self.code() {
            None => false,
            Some(code) => !matches!(
                code,
                ErrorCode::ConstraintViolation
                    | ErrorCode::TooBig
                    | ErrorCode::TypeMismatch
                    | ErrorCode::DatabaseBusy
                    | ErrorCode::DatabaseLocked
                    | ErrorCode::DiskFull
                    | ErrorCode::OperationInterrupted
            ),
        }
    }

    /// The error of one operation. Several operations hit by one fault share it.
    pub(crate) fn of(self: &Arc<Self>, operation: &'static str, path: &Path) -> StoreError {
        let mut error = StoreError::new(self.kind, operation);
        error = match &self.detail {
            Some(detail) => error.with_detail(format!("{}: {detail}", path.display())),
            None => error.with_detail(path.display().to_string()),
        };
        let nothing_written = matches!(self.kind, StoreErrorKind::Full | StoreErrorKind::Timeout);
        if self.in_commit && !nothing_written {
            error = error.ambiguous();
        }
        match self.source {
            Some(_) => error.with_source(Shared(Arc::clone(self))),
            None => error,
        }
    }

    pub(crate) fn into_error(self, operation: &'static str, path: &Path) -> StoreError {
        Arc::new(self).of(operation, path)
    }

    fn code(&self) -> Option<ErrorCode> {
        self.source.as_ref().and_then(rusqlite::Error::sqlite_error_code)
    }
}

impl From<rusqlite::Error> for Fault {
    fn from(error: rusqlite::Error) -> Self {
        use StoreErrorKind::*;
        let extended = error.sqlite_error().map_or(0, |e| e.extended_code);
        let (kind, detail) = match error.sqlite_error_code() {
            Some(ErrorCode::DatabaseBusy) if extended == ffi::SQLITE_BUSY_SNAPSHOT => {
                (Conflict, "another writer went first")
            }
            Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => {
                (Timeout, "another writer held the database all the time")
            }
            Some(ErrorCode::DiskFull) => (Full, "no room left"),
            Some(ErrorCode::SystemIoFailure) if extended == ffi::SQLITE_IOERR_SHMSIZE => {
                (Full, "no room left for the shared memory file beside it")
            }
            Some(ErrorCode::ReadOnly) => (Unfit, "it cannot be written to"),
            Some(ErrorCode::NotADatabase) => (Unfit, "it is not an SQLite database"),
            Some(ErrorCode::DatabaseCorrupt) => {
                (Unfit, "the database is damaged; recover it from a copy, or with `sqlite3 FILE .recover`")
            }
            Some(ErrorCode::CannotOpen) => (Unavailable, "the file or its -wal cannot be opened"),
            Some(ErrorCode::PermissionDenied) => (Unfit, "permission denied"),
            Some(ErrorCode::SystemIoFailure) => (Unavailable, "input or output failed"),
            Some(ErrorCode::OperationInterrupted) => (Timeout, "interrupted at its deadline"),
            _ => (Internal, "SQLite failed"),
        };
        Self { kind, detail: Some(detail.into()), source: Some(error), in_commit: false }
    }
}

/// One cause, kept whole by each of the operations that it hit.
#[derive(Debug)]
struct Shared(Arc<Fault>);

impl fmt::Display for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0.source {
            Some(source) => source.fmt(f),
            None => f.write_str("no cause"),
        }
    }
}

impl StdError for Shared {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source.as_ref().and_then(StdError::source)
    }
}
