//! An open inbox: a file of SQLite with its tables, and transactions on it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use onlyonce_core::{CrashPoint, crash_point};
use onlyonce_store_sqlite::file;
use onlyonce_store_sqlite::rusqlite::{self, Connection, OpenFlags};

use crate::error::InboxError;
use crate::table::{self, Fault, Tables};

/// How to open an [`Inbox`].
#[derive(Clone, Debug)]
pub struct InboxOptions {
    create: bool,
    busy_timeout: Duration,
    cache_kib: u32,
}

impl Default for InboxOptions {
    fn default() -> Self {
        Self { create: true, busy_timeout: Duration::from_secs(5), cache_kib: 8 * 1024 }
    }
}

impl InboxOptions {
    /// Refuses a file that is missing or holds no table `inbox_log`, in place of making them. Nothing is written to open it.
    #[must_use]
    pub fn existing(mut self) -> Self {
        self.create = false;
        self
    }

    /// How long to wait while another process holds the database. 5 s by default, an hour at most.
    #[must_use]
    pub fn busy_timeout(mut self, timeout: Duration) -> Self {
        self.busy_timeout = timeout.min(Duration::from_secs(3600));
        self
    }

    /// How much of the database is kept in memory. 8 MiB by default.
    #[must_use]
    pub fn cache_kib(mut self, kib: u32) -> Self {
        self.cache_kib = kib;
        self
    }

    /// Opens the inbox. A new file is in WAL mode; an existing one keeps its mode, for it may be somebody else's.
    ///
    /// # Errors
    /// [`InboxError::Unfit`] for a table or file that is not fit, with the reason; [`InboxError::Place`] for a path that cannot
    /// be used; [`InboxError::Busy`].
    pub fn open(self, path: impl Into<PathBuf>) -> Result<Inbox, InboxError> {
        let path = path.into();
        file::check_place(&path, self.create)?;
        let patience = self.busy_timeout;
        let at = |doing: &'static str| {
            let path = path.clone();
            move |error| InboxError::database(&path, patience, doing, error)
        };
        let conn = self.connect(&path).map_err(at("cannot be opened"))?;
        let is_empty: bool = conn
            .query_row("SELECT page_count = 0 FROM pragma_page_count", [], |row| row.get(0))
            .map_err(at("cannot be read"))?;
        if self.create && is_empty {
            file::use_wal(&conn, &path, patience)?;
        }
        let inbox = Inbox { conn, path, patience };
        inbox.prepare(self.create)?;
        Ok(inbox)
    }

    fn connect(&self, path: &Path) -> rusqlite::Result<Connection> {
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let conn = Connection::open_with_flags(path, flags)?;
        conn.busy_timeout(self.busy_timeout)?;
        conn.set_prepared_statement_cache_capacity(64);
        conn.execute_batch(&format!(
            "PRAGMA synchronous = FULL;
             PRAGMA cache_size = -{};
             PRAGMA journal_size_limit = 67108864;",
            self.cache_kib
        ))?;
        Ok(conn)
    }
}

/// A receiver of at-least-once messages on a file of SQLite. Any number of processes may have the same file open.
#[derive(Debug)]
pub struct Inbox {
    pub(crate) conn: Connection,
    path: PathBuf,
    patience: Duration,
}

impl Inbox {
    /// Opens a file, or makes it: [`InboxOptions::open`] with the defaults.
    ///
    /// # Errors
    /// As for [`InboxOptions::open`].
    pub fn open(path: impl Into<PathBuf>) -> Result<Self, InboxError> {
        InboxOptions::default().open(path)
    }

    /// The database.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How long is waited for other processes.
    pub fn busy_timeout(&self) -> Duration {
        self.patience
    }

    /// The number of messages in `inbox_log`.
    ///
    /// # Errors
    /// When the database cannot be read.
    pub fn rows(&self) -> Result<u64, InboxError> {
        table::count(&self.conn).map_err(self.at("cannot be read"))
    }

    /// The number of rows with that key: 0 or 1.
    ///
    /// # Errors
    /// When the database cannot be read.
    pub fn rows_of(&self, key: &str) -> Result<u64, InboxError> {
        table::count_of(&self.conn, key).map_err(self.at("cannot be read"))
    }

    // Almost always everything is there, and then no lock is taken.
    fn prepare(&self, create: bool) -> Result<(), InboxError> {
        let tables = self.read(|conn| Tables::find(conn).map_err(|fault| self.unfit(fault)))?;
        if !create {
            let reason = "it holds no table inbox_log; `onlyonce inbox apply` or `load` makes it";
            return match tables.log {
                true => Ok(()),
                false => Err(InboxError::Unfit { path: self.path.clone(), reason: reason.into() }),
            };
        }
        if tables.log && tables.ours {
            return Ok(());
        }
        // Looked at again under the lock: others start at the same moment.
        self.write(|conn| {
            Tables::find(conn).and_then(|tables| tables.create(conn)).map_err(|fault| self.unfit(fault))
        })
    }

    fn unfit(&self, fault: Fault) -> InboxError {
        match fault {
            Fault::Unfit(reason) => InboxError::Unfit { path: self.path.clone(), reason },
            Fault::Sqlite(error) => self.error("its tables cannot be read", error),
        }
    }

    /// One transaction that sees one state of the database.
    pub(crate) fn read<T>(
        &self,
        read: impl FnOnce(&Connection) -> Result<T, InboxError>,
    ) -> Result<T, InboxError> {
        self.conn.execute_batch("BEGIN").map_err(self.at("cannot be read"))?;
        let found = read(&self.conn);
        // SQLite itself has rolled back after some errors, and what is told is that error.
        if !self.conn.is_autocommit() {
            self.conn.execute_batch("ROLLBACK").map_err(self.at("cannot be read"))?;
        }
        found
    }

    /// One transaction that is synced when this returns, or that never was.
    pub(crate) fn write<T>(
        &self,
        write: impl FnOnce(&Connection) -> Result<T, InboxError>,
    ) -> Result<T, InboxError> {
        file::begin_immediate(&self.conn, self.patience).map_err(self.at("cannot be written"))?;
        let done = write(&self.conn).and_then(|done| {
            crash_point(CrashPoint::InboxCommitBefore);
            self.conn.execute_batch("COMMIT").map_err(self.at("cannot be written"))?;
            crash_point(CrashPoint::InboxCommitAfter);
            Ok(done)
        });
        if !self.conn.is_autocommit() {
            // A rollback that fails leaves a transaction that the end of the connection rolls back.
            let _ = self.conn.execute_batch("ROLLBACK");
        }
        done
    }

    pub(crate) fn error(&self, doing: &'static str, error: rusqlite::Error) -> InboxError {
        InboxError::database(&self.path, self.patience, doing, error)
    }

    /// For `map_err`.
    pub(crate) fn at(&self, doing: &'static str) -> impl FnOnce(rusqlite::Error) -> InboxError + use<'_> {
        move |error| self.error(doing, error)
    }
}
