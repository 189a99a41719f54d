//! Sorted sets that may be larger than memory: private tables of SQLite in a temporary file of its own making.

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::Path;

use onlyonce_store_sqlite::rusqlite::{self, Connection, params};

use crate::error::InboxError;

/// A private database that is gone when it is dropped, or when the process dies. 8 MiB of it are in memory.
#[derive(Debug)]
pub(crate) struct Scratch {
    conn: Connection,
}

impl Scratch {
    pub(crate) fn new(table: &str) -> Result<Self, InboxError> {
        let open = || -> rusqlite::Result<Connection> {
            // The empty name is a temporary file of SQLite's own.
            let conn = Connection::open("")?;
            conn.execute_batch(
                "PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -8192; BEGIN",
            )?;
            conn.execute_batch(table)?;
            Ok(conn)
        };
        open().map(|conn| Self { conn }).map_err(failed)
    }

    pub(crate) fn run(&self, sql: &str, params: impl rusqlite::Params) -> Result<(), InboxError> {
        self.conn.prepare_cached(sql).and_then(|mut s| s.execute(params)).map(|_| ()).map_err(failed)
    }

    pub(crate) fn conn(&self) -> &Connection {
        &self.conn
    }
}

/// The keys that were ignored in one run, each once.
#[derive(Debug)]
pub(crate) struct IgnoredKeys(Scratch);

impl IgnoredKeys {
    pub(crate) fn new() -> Result<Self, InboxError> {
        Scratch::new("CREATE TABLE ignored (msg_id TEXT PRIMARY KEY) WITHOUT ROWID").map(Self)
    }

    pub(crate) fn add(&self, key: &str) -> Result<(), InboxError> {
        self.0.run("INSERT INTO ignored VALUES (?1) ON CONFLICT DO NOTHING", params![key])
    }

    /// A line each, ascending by bytes.
    pub(crate) fn write(&self, path: &Path, out: &mut impl Write) -> Result<(), InboxError> {
        let mut query =
            self.0.conn().prepare("SELECT msg_id FROM ignored ORDER BY msg_id").map_err(failed)?;
        let mut rows = query.query([]).map_err(failed)?;
        let written = |error| InboxError::file(path, "cannot be written", error);
        while let Some(row) = rows.next().map_err(failed)? {
            let key: String = row.get(0).map_err(failed)?;
            writeln!(out, "{key}").map_err(written)?;
        }
        out.flush().map_err(written)
    }
}

/// The names of files, in their order.
#[derive(Debug)]
pub(crate) struct Names(Scratch);

impl Names {
    pub(crate) fn new() -> Result<Self, InboxError> {
        let table = "CREATE TABLE names (part INTEGER, name BLOB, kind INTEGER, PRIMARY KEY (part, name)) WITHOUT ROWID";
        Scratch::new(table).map(Self)
    }

    /// Adds a name to the part of that number; `kind` comes back with it.
    pub(crate) fn add(&self, part: usize, name: &Path, kind: u8) -> Result<(), InboxError> {
        let sql = "INSERT INTO names VALUES (?1, ?2, ?3) ON CONFLICT DO NOTHING";
        self.0.run(sql, params![part as i64, name.as_os_str().as_encoded_bytes(), kind])
    }

    pub(crate) fn count(&self) -> Result<u64, InboxError> {
        crate::table::number(self.0.conn(), "SELECT count(*) FROM names", []).map_err(failed)
    }

    /// Calls `take` with each name, part by part and then by bytes, until it answers false.
    pub(crate) fn each(&self, mut take: impl FnMut(OsString, u8) -> bool) -> Result<(), InboxError> {
        let sql = "SELECT name, kind FROM names ORDER BY part, name";
        let mut query = self.0.conn().prepare(sql).map_err(failed)?;
        let mut rows = query.query([]).map_err(failed)?;
        while let Some(row) = rows.next().map_err(failed)? {
            let (name, kind): (Vec<u8>, u8) =
                row.get(0).and_then(|name| Ok((name, row.get(1)?))).map_err(failed)?;
            if !take(os_string(name), kind) {
                break;
            }
        }
        Ok(())
    }
}

#[cfg(unix)]
fn os_string(bytes: Vec<u8>) -> OsString {
    std::os::unix::ffi::OsStringExt::from_vec(bytes)
}

#[cfg(not(unix))]
fn os_string(bytes: Vec<u8>) -> OsString {
    String::from_utf8_lossy(&bytes).into_owned().into()
}

fn failed(error: rusqlite::Error) -> InboxError {
    InboxError::file(&std::env::temp_dir(), "a temporary file failed", io::Error::other(error))
}
