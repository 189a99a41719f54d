//! The tables, and the proof that a table `inbox_log` found in the file keeps messages as it must.

use onlyonce_store_sqlite::rusqlite::types::ValueRef;
use onlyonce_store_sqlite::rusqlite::{self, Connection, OptionalExtension, Params, Row};

/// `inbox_log` has exactly these columns, so that whoever knows the mission knows the table.
const COLUMNS: [&str; 5] = ["msg_id", "biz_key", "status", "response", "created_at"];

// Only what tells a duplicate is constrained: an operator's INSERT by hand may leave out the rest.
const INBOX_LOG: &str = "CREATE TABLE main.inbox_log (
    msg_id TEXT NOT NULL PRIMARY KEY,
    biz_key TEXT,
    status TEXT,
    response TEXT,
    created_at TEXT DEFAULT (datetime('now'))
)";

// Every delivery, the first too: the digest of a message is that of its last row here that was applied or failed. The
// index on repeated ones is small, and all that the report and the purge's warning read.
const OURS: &str = "
CREATE TABLE IF NOT EXISTS main.inbox_deliveries (
    id INTEGER PRIMARY KEY,
    msg_id TEXT NOT NULL,
    verdict TEXT NOT NULL,
    path TEXT NOT NULL,
    source TEXT NOT NULL,
    digest BLOB NOT NULL,
    received_at TEXT NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS main.inbox_deliveries_msg_id ON inbox_deliveries (msg_id);
CREATE INDEX IF NOT EXISTS main.inbox_deliveries_again ON inbox_deliveries (msg_id)
    WHERE verdict IN ('duplicate', 'conflict');
CREATE TABLE IF NOT EXISTS main.inbox_totals (
    path TEXT NOT NULL,
    verdict TEXT NOT NULL,
    deliveries INTEGER NOT NULL,
    first_seen TEXT NOT NULL,
    last_seen TEXT NOT NULL,
    longest_days REAL NOT NULL,
    PRIMARY KEY (path, verdict)
) STRICT;
CREATE TABLE IF NOT EXISTS main.inbox_leases (
    msg_id TEXT NOT NULL PRIMARY KEY,
    token BLOB NOT NULL,
    attempt INTEGER NOT NULL,
    digest BLOB NOT NULL,
    boot_id TEXT NOT NULL,
    until_boot_ms INTEGER NOT NULL,
    taken_at TEXT NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS main.inbox_audit (
    id INTEGER PRIMARY KEY,
    at TEXT NOT NULL,
    actor TEXT NOT NULL,
    action TEXT NOT NULL,
    msg_id TEXT NOT NULL,
    before TEXT NOT NULL,
    reason TEXT NOT NULL
) STRICT;";

const OUR_TABLES: [&str; 4] = ["inbox_deliveries", "inbox_totals", "inbox_leases", "inbox_audit"];

/// Why a table is no good, as the end of a sentence that names the file.
#[derive(Debug)]
pub(crate) enum Fault {
    Unfit(String),
    Sqlite(rusqlite::Error),
}

impl From<rusqlite::Error> for Fault {
    fn from(error: rusqlite::Error) -> Self {
        Self::Sqlite(error)
    }
}

/// What of the tables is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tables {
    pub(crate) log: bool,
    /// All of the others.
    pub(crate) ours: bool,
}

impl Tables {
    /// Looks, and proves what it finds.
    pub(crate) fn find(conn: &Connection) -> Result<Self, Fault> {
        let log = check_log(conn)?;
        let mut ours = true;
        for name in OUR_TABLES {
            ours &= object_type(conn, name)?.as_deref() == Some("table");
        }
        Ok(Self { log, ours })
    }

    /// Makes what is not there. Inside a write transaction.
    pub(crate) fn create(self, conn: &Connection) -> Result<(), Fault> {
        if !self.log {
            conn.execute_batch(INBOX_LOG)?;
        }
        if !self.ours {
            conn.execute_batch(OURS)?;
        }
        Ok(())
    }
}

/// Whether the rows of `inbox_log` are counted by rowid. A table made by hand may be WITHOUT ROWID.
pub(crate) fn has_rowid(conn: &Connection) -> rusqlite::Result<bool> {
    let sql = "SELECT NOT wr FROM pragma_table_list('inbox_log') WHERE schema = 'main'";
    conn.query_row(sql, [], |row| row.get(0))
}

/// Whether there is a table of that name.
pub(crate) fn object_type(conn: &Connection, name: &str) -> rusqlite::Result<Option<String>> {
    let sql = "SELECT type FROM main.sqlite_schema WHERE name = ?1 COLLATE NOCASE";
    conn.prepare_cached(sql)?.query_row([name], |row| row.get(0)).optional()
}

fn check_log(conn: &Connection) -> Result<bool, Fault> {
    match object_type(conn, "inbox_log")?.as_deref() {
        None => return Ok(false),
        Some("table") => {}
        Some(other) => return Err(unfit(format!("it is a {other}, not a table"))),
    }
    let declared = check_columns(conn)?;
    check_type(conn, &declared)?;
    let (_, collation, ..) = conn.column_metadata(Some("main"), "inbox_log", "msg_id")?;
    let collation = collation.map_or_else(|| "BINARY".into(), |name| name.to_string_lossy().into_owned());
    if !collation.eq_ignore_ascii_case("BINARY") {
        return Err(collates(&collation));
    }
    check_unique(conn)?;
    check_values(conn)?;
    Ok(true)
}

// Numbers and blobs equal no text, so that their messages would be new once more. By the index they stand at its two ends.
fn check_values(conn: &Connection) -> Result<(), Fault> {
    for order in ["ASC", "DESC"] {
        let sql = format!(
            "SELECT typeof(msg_id), quote(msg_id) FROM main.inbox_log WHERE msg_id IS NOT NULL
             ORDER BY msg_id {order} LIMIT 1"
        );
        let found: Option<(String, String)> =
            conn.query_row(&sql, [], |row| Ok((row.get(0)?, row.get(1)?))).optional()?;
        if let Some((kind, value)) = found.filter(|(kind, _)| kind != "text") {
            let value: String = value.chars().take(40).collect();
            return Err(unfit(format!(
                "it holds the msg_id {value}, of type {kind}, which no key equals; make it text: UPDATE inbox_log SET msg_id = \
                 CAST(msg_id AS TEXT)"
            )));
        }
    }
    Ok(())
}

// Answers the declared type of `msg_id`.
fn check_columns(conn: &Connection) -> Result<String, Fault> {
    let mut query = conn.prepare("SELECT name, type, hidden FROM pragma_table_xinfo('inbox_log', 'main')")?;
    let found: Vec<(String, String, i64)> =
        query.query_map([], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))?.collect::<Result<_, _>>()?;
    let must = format!("it must have exactly the columns {}", COLUMNS.join(", "));
    for name in COLUMNS {
        match found.iter().find(|column| column.0.eq_ignore_ascii_case(name)) {
            None => return Err(unfit(format!("it has no column {name}; {must}"))),
            Some(column) if column.2 != 0 => return Err(unfit(format!("its column {name} is generated"))),
            Some(_) => {}
        }
    }
    let is_known = |name: &str| COLUMNS.iter().any(|known| known.eq_ignore_ascii_case(name));
    if let Some(extra) = found.iter().find(|column| !is_known(&column.0)) {
        return Err(unfit(format!("it has a column {}; {must}", extra.0)));
    }
    let msg_id = found.into_iter().find(|column| column.0.eq_ignore_ascii_case("msg_id"));
    Ok(msg_id.map(|column| column.1).unwrap_or_default())
}

fn check_type(conn: &Connection, declared: &str) -> Result<(), Fault> {
    let strict: bool = conn.query_row(
        "SELECT strict FROM pragma_table_list('inbox_log') WHERE schema = 'main'",
        [],
        |row| row.get(0),
    )?;
    let affinity = if strict && declared.eq_ignore_ascii_case("ANY") { "BLOB" } else { affinity(declared) };
    // BLOB in a STRICT table takes no text.
    if affinity == "TEXT" || (affinity == "BLOB" && !(strict && declared.eq_ignore_ascii_case("BLOB"))) {
        return Ok(());
    }
    Err(unfit(format!(
        "msg_id is {declared}, of {affinity} affinity, so that different keys such as 007 and 7 would be one; make it TEXT"
    )))
}

/// The affinity of a declared type, as SQLite derives it (datatype3.html, 3.1).
fn affinity(declared: &str) -> &'static str {
    let upper = declared.to_ascii_uppercase();
    let has = |part: &str| upper.contains(part);
    match () {
        () if has("INT") => "INTEGER",
        () if has("CHAR") || has("CLOB") || has("TEXT") => "TEXT",
        () if has("BLOB") || upper.is_empty() => "BLOB",
        () if has("REAL") || has("FLOA") || has("DOUB") => "REAL",
        () => "NUMERIC",
    }
}

fn check_unique(conn: &Connection) -> Result<(), Fault> {
    let mut query = conn.prepare(
        "SELECT list.name, list.partial, max(info.name), max(info.coll)
         FROM pragma_index_list('inbox_log', 'main') AS list, pragma_index_xinfo(list.name, 'main') AS info
         WHERE list.\"unique\" AND info.key
         GROUP BY list.name HAVING count(*) = 1",
    )?;
    let mut found = false;
    let mut partial = None;
    let mut rows = query.query([])?;
    while let Some(row) = rows.next()? {
        let (index, is_partial): (String, bool) = (row.get(0)?, row.get(1)?);
        let (column, collation): (Option<String>, Option<String>) = (row.get(2)?, row.get(3)?);
        let collation = collation.unwrap_or_else(|| "BINARY".into());
        match column {
            Some(name) if !name.eq_ignore_ascii_case("msg_id") => {}
            Some(_) if !collation.eq_ignore_ascii_case("BINARY") => return Err(collates(&collation)),
            Some(_) if is_partial => partial = Some(index),
            Some(_) => found = true,
            None => {
                return Err(unfit(format!(
                    "its index {index} makes an expression unique, so that different messages would be one"
                )));
            }
        }
    }
    match (found, partial) {
        (true, _) => Ok(()),
        (false, Some(index)) => Err(unfit(format!(
            "its unique index {index} is partial, so that it does not keep every msg_id from coming twice"
        ))),
        (false, None) => Err(unfit(
            "nothing makes msg_id unique: the constraint is what tells a duplicate; make it TEXT NOT NULL PRIMARY KEY",
        )),
    }
}

fn collates(collation: &str) -> Fault {
    unfit(format!(
        "msg_id compares by {collation}, so that different keys such as A and a would be one; it must compare by BINARY"
    ))
}

fn unfit(reason: impl AsRef<str>) -> Fault {
    Fault::Unfit(format!("its table inbox_log is not fit for an inbox: {}", reason.as_ref()))
}

/// The bytes of a value, whatever type a hand gave it; `None` for NULL.
pub(crate) fn bytes(row: &Row<'_>, column: usize) -> rusqlite::Result<Option<Vec<u8>>> {
    Ok(match row.get_ref(column)? {
        ValueRef::Null => None,
        ValueRef::Integer(number) => Some(number.to_string().into_bytes()),
        ValueRef::Real(number) => Some(number.to_string().into_bytes()),
        ValueRef::Text(bytes) | ValueRef::Blob(bytes) => Some(bytes.to_vec()),
    })
}

/// Adds a delivery.
pub(crate) const INSERT_DELIVERY: &str = "INSERT INTO main.inbox_deliveries
    (msg_id, verdict, path, source, digest, received_at) VALUES (?1, ?2, ?3, ?4, ?5, ?6)";

/// The constraint on `msg_id` decides. Not OR IGNORE: that swallows what NOT NULL and CHECK refuse, too.
pub(crate) const INSERT_ROW: &str =
    "INSERT INTO main.inbox_log (msg_id, biz_key, status, response, created_at)
    VALUES (?1, ?2, ?3, ?4, ?5) ON CONFLICT (msg_id) DO NOTHING";

/// Now as the rows have it: text, UTC, to the second.
pub(crate) fn now(conn: &Connection) -> rusqlite::Result<String> {
    conn.prepare_cached("SELECT datetime('now')")?.query_row([], |row| row.get(0))
}

/// The number of rows of `inbox_log`.
pub(crate) fn count(conn: &Connection) -> rusqlite::Result<u64> {
    number(conn, "SELECT count(*) FROM main.inbox_log", [])
}

/// The number of rows with that key: 0 or 1, by the constraint.
pub(crate) fn count_of(conn: &Connection, key: &str) -> rusqlite::Result<u64> {
    number(conn, "SELECT count(*) FROM main.inbox_log WHERE msg_id = ?1", [key])
}

/// A count.
pub(crate) fn number(conn: &Connection, sql: &str, params: impl Params) -> rusqlite::Result<u64> {
    conn.query_row(sql, params, |row| row.get::<_, i64>(0)).map(i64::unsigned_abs)
}
