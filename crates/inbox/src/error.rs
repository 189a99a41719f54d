//! What can go wrong, and whether it is worth trying again.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use onlyonce_core::{StoreError, StoreErrorKind};
use onlyonce_store_sqlite::rusqlite::{self, ErrorCode};

/// Why a message was not received, or a command not done. The database is as it was before.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InboxError {
    /// The message cannot be taken as it is.
    #[error(transparent)]
    BadData(#[from] BadData),
    /// The database's table or the file itself is not fit for an inbox.
    #[error("{}: {reason}", path.display())]
    Unfit {
        /// The database.
        path: PathBuf,
        /// What is wrong, and what to do.
        reason: String,
    },
    /// The table's own constraints do not take the message.
    #[error("{source_name}: the table inbox_log does not take it: {reason}")]
    Constraint {
        /// Where the message came from.
        source_name: String,
        /// What SQLite said.
        reason: String,
    },
    /// Another process held the database all the time. Safe to run again.
    #[error("{}: busy: another process held it for {}; nothing was changed, run it again", path.display(), waited(*patience))]
    Busy {
        /// The database.
        path: PathBuf,
        /// How long was waited.
        patience: Duration,
    },
    /// The file was being written whenever it was read. Safe to run again.
    #[error("{}: it is still being written: it changed during each of {tries} reads; run it again when it is complete", path.display())]
    Changing {
        /// The file.
        path: PathBuf,
        /// How often it was read.
        tries: u32,
    },
    /// Another process works on the same message, and did so all the time. Safe to run again.
    #[error("{source_name}: busy: another process has been working on the message {key:?} for longer than {}; run it again", waited(*patience))]
    Taken {
        /// Where the message came from.
        source_name: String,
        /// The key.
        key: String,
        /// How long was waited.
        patience: Duration,
    },
    /// The work of a message with the same key and another body was begun, and nobody saw its end.
    #[error(
        "{source_name}: conflict: the work of a message with the key {key:?} and another body was begun at {taken_at} UTC and not \
             seen to end: nothing was done; send that message again, or make the key new by `onlyonce inbox forget`"
    )]
    OtherBody {
        /// Where the message came from.
        source_name: String,
        /// The key.
        key: String,
        /// When the work was begun.
        taken_at: String,
    },
    /// The work was done, and that could not be recorded: it is done again when the message comes again.
    #[error("{source_name}: the work was done, but it could not be recorded")]
    NotRecorded {
        /// Where the message came from.
        source_name: String,
        /// Why not.
        source: Box<InboxError>,
    },
    /// Somebody asked to stop. Nothing of this message is recorded; safe to run again.
    #[error("{source_name}: interrupted; nothing is recorded, run it again")]
    Interrupted {
        /// Where the message came from.
        source_name: String,
    },
    /// The constraints of a table that a statement writes to do not take the message.
    #[error("{source_name}: {}: {reason}; nothing of the message is kept", path.display())]
    Refused {
        /// Where the message came from.
        source_name: String,
        /// The file with the statement.
        path: PathBuf,
        /// What SQLite said.
        reason: String,
    },
    /// A statement failed.
    #[error("{}: a statement failed", path.display())]
    Statement {
        /// The file with the statement.
        path: PathBuf,
        /// What SQLite said.
        source: rusqlite::Error,
    },
    /// The work did not come to an end that may be recorded. Safe to run again.
    #[error("{source_name}: {reason}")]
    Transient {
        /// Where the message came from.
        source_name: String,
        /// What happened.
        reason: String,
    },
    /// The database could not be read or written.
    #[error("{}: {doing}", path.display())]
    Database {
        /// The database.
        path: PathBuf,
        /// What was being done.
        doing: &'static str,
        /// What SQLite said.
        source: rusqlite::Error,
    },
    /// The database cannot be used where it is.
    #[error(transparent)]
    Place(#[from] StoreError),
    /// A file could not be read or written.
    #[error("{}: {doing}", path.display())]
    File {
        /// The file or folder.
        path: PathBuf,
        /// What was being done.
        doing: &'static str,
        /// What the system said.
        source: io::Error,
    },
}

/// What a caller can do about an [`InboxError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The data is wrong, and stays so: the message, the table, or the file that should be a database.
    Data,
    /// Input or output failed.
    Io,
    /// Nothing was changed, and the next try may succeed.
    Transient,
}

/// A message that cannot be taken: where in its file, and what was expected there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadData {
    /// The file, or `stdin`.
    pub source_name: String,
    /// The line, from 1.
    pub line: u64,
    /// The character in the line, from 1.
    pub column: u64,
    /// What was expected and what was found.
    pub reason: String,
}

impl fmt::Display for BadData {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}: {}", self.source_name, self.line, self.column, self.reason)
    }
}

impl std::error::Error for BadData {}

impl InboxError {
    /// What can be done about it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::BadData(_)
            | Self::Unfit { .. }
            | Self::Constraint { .. }
            | Self::Refused { .. }
            | Self::OtherBody { .. } => ErrorKind::Data,
            Self::Busy { .. }
            | Self::Taken { .. }
            | Self::Interrupted { .. }
            | Self::Changing { .. }
            | Self::Transient { .. } => ErrorKind::Transient,
            Self::NotRecorded { source, .. } => source.kind(),
            Self::Statement { source, .. } if is_busy(source) => ErrorKind::Transient,
            Self::Place(error) if error.kind() == StoreErrorKind::Timeout => ErrorKind::Transient,
            Self::Database { .. } | Self::Statement { .. } | Self::Place(_) | Self::File { .. } => {
                ErrorKind::Io
            }
        }
    }

    /// Whether it is of one message alone: others may be received.
    pub(crate) fn is_of_the_message(&self) -> bool {
        matches!(
            self,
            Self::BadData(_)
                | Self::Constraint { .. }
                | Self::Refused { .. }
                | Self::Transient { .. }
                | Self::Taken { .. }
                | Self::OtherBody { .. }
        )
    }

    /// Of a file or folder.
    pub(crate) fn file(path: &Path, doing: &'static str, source: io::Error) -> Self {
        Self::File { path: path.into(), doing, source }
    }

    /// Of the database, told apart by what SQLite says.
    pub(crate) fn database(
        path: &Path,
        patience: Duration,
        doing: &'static str,
        source: rusqlite::Error,
    ) -> Self {
        let path = path.to_owned();
        match source.sqlite_error_code() {
            Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => Self::Busy { path, patience },
            Some(ErrorCode::NotADatabase) => {
                Self::Unfit { path, reason: "it is not an SQLite database".into() }
            }
            // What a file in WAL mode says where nothing can be written beside it.
            Some(ErrorCode::CannotOpen | ErrorCode::ReadOnly) => {
                let doing = "cannot be written: it, its folder or the file system is read-only, or not yours; make both writable for this user, or name \
                             another file";
                Self::Database { path, doing, source }
            }
            _ => Self::Database { path, doing, source },
        }
    }
}

fn is_busy(error: &rusqlite::Error) -> bool {
    matches!(error.sqlite_error_code(), Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked))
}

fn waited(patience: Duration) -> String {
    match patience.subsec_millis() {
        0 => format!("{} s", patience.as_secs()),
        _ => format!("{} ms", patience.as_millis()),
    }
}
