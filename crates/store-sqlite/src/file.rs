//! What everything of ours that lives in a file of SQLite needs: the checks of the place, and patience with other writers.

use std::path::Path;
use std::time::Duration;

use onlyonce_core::{Clock, StoreError, SystemClock};
use rusqlite::{Connection, ErrorCode};

use crate::{boot, open};

/// How long is slept between two looks at a lock that another process holds.
const NAP_MIN: Duration = Duration::from_micros(100);
const NAP_MAX: Duration = Duration::from_millis(1);

/// Says what can be said before SQLite touches anything: whether the path leads, or may lead, to a regular file on a local
/// file system. Makes a missing file, empty and with mode 0600, where `create` says so; never a folder.
///
/// # Errors
/// `Unfit` or `Full`, with the path and the reason.
pub fn check_place(path: &Path, create: bool) -> Result<(), StoreError> {
    open::check_place(path, create).map_err(|fault| fault.into_error("open", path))
}

/// Turns the database to WAL mode, if it is not.
///
/// # Errors
/// `Timeout` when other connections keep it busy for all of `patience`; what SQLite says otherwise.
pub fn use_wal(conn: &Connection, path: &Path, patience: Duration) -> Result<(), StoreError> {
    open::use_wal(conn, patience).map_err(|fault| fault.into_error("open", path))
}

/// A reading of the boot clock that every process of the machine can compare with its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BootTime {
    /// Names the boot; times of another boot are over.
    pub boot_id: String,
    /// Since the machine started, suspended time included and time namespaces left out.
    pub ms: i64,
}

impl BootTime {
    /// Now. `path` is for errors.
    ///
    /// # Errors
    /// When the system does not tell which boot this is.
    pub fn now(path: &Path) -> Result<Self, StoreError> {
        let boot_id = boot::system_boot_id().map_err(|fault| fault.into_error("open", path))?;
        let ms = i64::try_from(SystemClock.boot().as_millis()).unwrap_or(i64::MAX);
        Ok(Self { boot_id, ms: ms.saturating_sub(boot::system_namespace_ms()) })
    }
}

/// Begins a write transaction, waiting for other writers for as long as `patience`.
///
/// SQLite's own patience doubles its naps up to a tenth of a second, and a lock that another process takes again and
/// again is hardly ever free at the end of one. Short naps meet it.
///
/// # Errors
/// What SQLite says: `SQLITE_BUSY` when the patience is over.
pub fn begin_immediate(conn: &Connection, patience: Duration) -> rusqlite::Result<()> {
    let mut begin = conn.prepare_cached("BEGIN IMMEDIATE")?;
    conn.busy_timeout(Duration::ZERO)?;
    let (mut waited, mut nap) = (Duration::ZERO, NAP_MIN);
    let begun = loop {
        match begin.execute([]) {
            Err(error) if error.sqlite_error_code() == Some(ErrorCode::DatabaseBusy) && waited < patience => {
                std::thread::sleep(nap);
                waited += nap;
                nap = (nap * 2).min(NAP_MAX);
            }
            begun => break begun,
        }
    };
    conn.busy_timeout(patience)?;
    begun.map(|_| ())
}
