//! The tables, their versions, and the proof that a table found in the file keeps records as it must.

use onlyonce_core::StoreErrorKind;
use onlyonce_core::operation::NAME_BYTES_MAX;
use rusqlite::{Connection, ErrorCode, OptionalExtension, params};

use crate::error::Fault;

/// The version that this release writes. Each release reads the neighbouring ones, so changes are additive.
const VERSION: i64 = 2;
/// The oldest release that may use a file of [`VERSION`].
const MIN_READER_VERSION: i64 = 1;

// The version lives in a table of ours, not in `user_version`: that belongs to the application in whose file we live.
const META: &str = "CREATE TABLE IF NOT EXISTS main.idempotency_meta (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    schema_version INTEGER NOT NULL,
    min_reader_version INTEGER NOT NULL,
    opened_at INTEGER NOT NULL
) STRICT;";

// A rowid table: an index entry is a tenth of a row, so that ten times the keys fit in the cache, and bodies are
// appended, not spread at random. Partial indexes: one serves the purge of completed rows, one the rest.
const V1: &str = "
CREATE TABLE IF NOT EXISTS main.idempotency_clocks (
    id INTEGER PRIMARY KEY,
    boot_id TEXT NOT NULL,
    wall_minus_boot_ms INTEGER NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS main.idempotency_keys (
    scope TEXT NOT NULL,
    key TEXT NOT NULL,
    request_hash TEXT NOT NULL,
    status TEXT NOT NULL,
    response_code INTEGER,
    response_headers BLOB,
    response_body BLOB,
    locked_until INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    claimed_at INTEGER NOT NULL,
    completed_at INTEGER,
    expires_at INTEGER,
    clock INTEGER NOT NULL,
    token BLOB NOT NULL,
    attempt INTEGER NOT NULL,
    on_lease_end TEXT NOT NULL,
    PRIMARY KEY (scope, key)
) STRICT;
CREATE INDEX IF NOT EXISTS main.idempotency_keys_expiry ON idempotency_keys (clock, expires_at)
    WHERE status = 'completed';
CREATE INDEX IF NOT EXISTS main.idempotency_keys_lease ON idempotency_keys (clock, locked_until)
    WHERE status <> 'completed';
CREATE TABLE IF NOT EXISTS main.idempotency_audit (
    id INTEGER PRIMARY KEY,
    at INTEGER NOT NULL,
    actor TEXT NOT NULL,
    action TEXT NOT NULL,
    scope TEXT NOT NULL,
    key TEXT NOT NULL,
    state_before TEXT NOT NULL,
    state_after TEXT NOT NULL,
    reason TEXT NOT NULL
) STRICT;";

// Records of version 1 have no origin, and a release of that version writes none.
const V2: &str = "ALTER TABLE main.idempotency_keys ADD COLUMN origin TEXT;";

// Name, type, NOT NULL.
const COLUMNS_OF_V1: usize = 16;
const COLUMNS: [(&str, &str, bool); 17] = [
    ("scope", "TEXT", true),
    ("key", "TEXT", true),
    ("request_hash", "TEXT", true),
    ("status", "TEXT", true),
    ("response_code", "INTEGER", false),
    ("response_headers", "BLOB", false),
    ("response_body", "BLOB", false),
    ("locked_until", "INTEGER", true),
    ("created_at", "INTEGER", true),
    ("claimed_at", "INTEGER", true),
    ("completed_at", "INTEGER", false),
    ("expires_at", "INTEGER", false),
    ("clock", "INTEGER", true),
    ("token", "BLOB", true),
    ("attempt", "INTEGER", true),
    ("on_lease_end", "TEXT", true),
    ("origin", "TEXT", false),
];

/// Brings the tables to [`VERSION`] and proves them. Inside a write transaction, so that any number of instances may
/// start at once; the caller rolls back on a fault, which leaves the file as it was.
///
/// Returns how many tables of others there are in the file, when ours were added to it just now.
///
/// # Errors
/// `Unfit` with the reason: a wrong table, or a file of a release that this one cannot read.
pub(crate) fn prepare(conn: &Connection, opened_ms: i64) -> Result<u64, Fault> {
    let found = version(conn)?;
    let from = found.map_or(0, |(version, _)| version);
    if let Some((version, min_reader)) = found
        && min_reader > VERSION
    {
        return Err(newer(version, min_reader));
    }
    let others = if found.is_none() && object_type(conn)?.is_none() { tables_of_others(conn)? } else { 0 };
    if object_type(conn)?.is_some() {
        // Before anything of ours is built on it.
        check_table(conn, from)?;
    }
    if from < VERSION {
        conn.execute_batch(META)?;
        conn.execute_batch(V1)?;
        // There already in a table that somebody made for us.
        if !has_origin(conn)? {
            conn.execute_batch(V2)?;
        }
        check_table(conn, VERSION)?;
    }
    probe(conn)?;
    // Also the proof that the file can be written: BEGIN IMMEDIATE succeeds on a read-only one.
    conn.execute(
        "INSERT INTO main.idempotency_meta VALUES (1, ?1, ?2, ?3) ON CONFLICT (id) DO UPDATE SET
            opened_at = ?3,
            schema_version = max(schema_version, ?1),
            min_reader_version = max(min_reader_version, ?2)",
        params![VERSION, MIN_READER_VERSION, opened_ms],
    )?;
    Ok(others)
}

/// Shows that this release can read the records, without writing.
///
/// # Errors
/// `Unfit` with the reason, as [`prepare`] has it; also for a file of an older release, which an opening for work would change.
pub(crate) fn check_readable(conn: &Connection) -> Result<(), Fault> {
    if !exists(conn)? {
        return Err(unfit("it holds no idempotency records".into()));
    }
    let (version, min_reader) = version(conn)?.unwrap_or((0, 0));
    if min_reader > VERSION {
        return Err(newer(version, min_reader));
    }
    if version < VERSION {
        return Err(unfit(format!(
            "written by an older release (schema {version}; this release has {VERSION}): a gateway of this release brings it up \
             to date when it starts"
        )));
    }
    check_table(conn, VERSION)
}

fn newer(version: i64, min_reader: i64) -> Fault {
    unfit(format!(
        "written by a newer release (schema {version}, readable from {min_reader} on; this release has {VERSION})"
    ))
}

fn tables_of_others(conn: &Connection) -> Result<u64, Fault> {
    let sql = "SELECT count(*) FROM main.sqlite_schema
        WHERE type = 'table' AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\' AND name NOT LIKE 'idempotency\\_%' ESCAPE '\\'";
    Ok(conn.query_row(sql, [], |row| row.get::<_, i64>(0))?.unsigned_abs())
}

/// Whether the file holds records, in whatever shape.
pub(crate) fn exists(conn: &Connection) -> Result<bool, Fault> {
    Ok(object_type(conn)?.is_some())
}

fn version(conn: &Connection) -> Result<Option<(i64, i64)>, Fault> {
    let has_meta: bool = conn.query_row(
        "SELECT EXISTS (SELECT 1 FROM main.sqlite_schema WHERE name = 'idempotency_meta')",
        [],
        |row| row.get(0),
    )?;
    if !has_meta {
        return Ok(None);
    }
    let sql = "SELECT schema_version, min_reader_version FROM main.idempotency_meta";
    let found = conn.query_row(sql, [], |row| Ok((row.get(0)?, row.get(1)?))).optional();
    found.map_err(|_| unfit("its table idempotency_meta is not ours".into()))
}

fn object_type(conn: &Connection) -> Result<Option<String>, Fault> {
    let sql = "SELECT type FROM main.sqlite_schema WHERE name = 'idempotency_keys'";
    Ok(conn.query_row(sql, [], |row| row.get(0)).optional()?)
}

fn has_origin(conn: &Connection) -> Result<bool, Fault> {
    let sql =
        "SELECT EXISTS (SELECT 1 FROM pragma_table_info('idempotency_keys', 'main') WHERE name = 'origin')";
    Ok(conn.query_row(sql, [], |row| row.get(0))?)
}

/// Names what is wrong with the shape of the table of this version.
fn check_table(conn: &Connection, version: i64) -> Result<(), Fault> {
    match object_type(conn)?.as_deref() {
        Some("table") => {}
        Some(other) => return Err(wrong(format!("it is a {other}"))),
        None => return Err(wrong("it is missing")),
    }
    let mut query = conn
        .prepare("SELECT name, type, \"notnull\", pk FROM pragma_table_info('idempotency_keys', 'main')")?;
    let found: Vec<(String, String, bool, i64)> = query
        .query_map([], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?)))?
        .collect::<Result<_, _>>()?;
    let columns = if version < 2 { &COLUMNS[..COLUMNS_OF_V1] } else { &COLUMNS };
    for (name, kind, not_null) in columns {
        let Some(column) = found.iter().find(|column| column.0 == *name) else {
            return Err(wrong(format!("column {name} is missing")));
        };
        if !column.1.eq_ignore_ascii_case(kind) {
            return Err(wrong(format!("column {name} is {:?}, not {kind}", column.1)));
        }
        if *not_null && !column.2 {
            return Err(wrong(format!("column {name} may be NULL")));
        }
    }
    let mut primary: Vec<_> = found.iter().filter(|column| column.3 > 0).collect();
    primary.sort_by_key(|column| column.3);
    if !primary.iter().map(|column| column.0.as_str()).eq(["scope", "key"]) {
        return Err(wrong("its primary key is not (scope, key)"));
    }
    check_indexes(conn)?;
    let strict: bool = conn.query_row(
        "SELECT strict FROM pragma_table_list('idempotency_keys') WHERE schema = 'main'",
        [],
        |row| row.get(0),
    )?;
    if !strict {
        return Err(wrong("it is not STRICT, so that values may change their type"));
    }
    let triggers: i64 = conn.query_row(
        "SELECT count(*) FROM main.sqlite_schema WHERE type = 'trigger' AND tbl_name = 'idempotency_keys'",
        [],
        |row| row.get(0),
    )?;
    if triggers > 0 {
        return Err(wrong("it has triggers"));
    }
    Ok(())
}

fn check_indexes(conn: &Connection) -> Result<(), Fault> {
    let mut query = conn.prepare(
        "SELECT list.name, list.origin, list.\"unique\", info.name, info.coll
         FROM pragma_index_list('idempotency_keys', 'main') AS list,
            pragma_index_xinfo(list.name, 'main') AS info
         WHERE info.key",
    )?;
    let mut rows = query.query([])?;
    while let Some(row) = rows.next()? {
        let (index, origin, unique): (String, String, bool) = (row.get(0)?, row.get(1)?, row.get(2)?);
        let (column, collation): (Option<String>, String) = (row.get(3)?, row.get(4)?);
        if unique && origin != "pk" {
            return Err(wrong(format!("its index {index} makes more unique than (scope, key)")));
        }
        if origin == "pk" && collation != "BINARY" {
            let column = column.unwrap_or_default();
            return Err(wrong(format!(
                "column {column} compares by {collation}, so that different keys are one"
            )));
        }
    }
    Ok(())
}

/// Shows on rows of its own, which are taken back, that names are kept byte for byte and are all that is unique.
fn probe(conn: &Connection) -> Result<(), Fault> {
    conn.execute_batch("SAVEPOINT idempotency_probe")?;
    let proof = probe_rows(conn);
    conn.execute_batch("ROLLBACK TO idempotency_probe; RELEASE idempotency_probe")?;
    proof
}

fn probe_rows(conn: &Connection) -> Result<(), Fault> {
    // No key can hold a control character, so these meet no record.
    let long = "\u{1}".repeat(NAME_BYTES_MAX);
    let names = ["\u{1}a", "\u{1}A", "\u{1}a ", "\u{1}é", "\u{1}e\u{301}", "\u{1}ß", "\u{1}ss", &long];
    let mut insert = conn.prepare(
        "INSERT INTO main.idempotency_keys
            (scope, key, request_hash, status, locked_until, created_at, claimed_at, clock, token, attempt, on_lease_end)
         VALUES (?1, ?2, '', '', 0, 0, 0, 0, x'', 0, '')",
    )?;
    for (scope, key) in names.iter().flat_map(|name| [(*name, "\u{1}k"), ("\u{1}s", *name)]) {
        insert.execute([scope, key]).map_err(|error| match error.sqlite_error_code() {
            Some(ErrorCode::ConstraintViolation) => {
                wrong(format!("it does not take the names {scope:?}, {key:?} ({error})"))
            }
            _ => error.into(),
        })?;
        let kept: i64 = conn.query_row(
            "SELECT count(*) FROM main.idempotency_keys WHERE scope = ?1 AND key = ?2
                AND CAST(scope AS BLOB) = CAST(?1 AS BLOB) AND CAST(key AS BLOB) = CAST(?2 AS BLOB)",
            [scope, key],
            |row| row.get(0),
        )?;
        if kept != 1 {
            return Err(wrong(format!("it does not keep the names {scope:?}, {key:?} as they are")));
        }
        if insert.execute([scope, key]).is_ok() {
            return Err(wrong("it takes the same scope and key twice"));
        }
    }
    if insert.execute(params![None::<&str>, "\u{1}k"]).is_ok()
        || insert.execute(params!["", None::<&str>]).is_ok()
    {
        return Err(wrong("it takes NULL for scope or key, and NULLs never collide"));
    }
    Ok(())
}

fn wrong(reason: impl AsRef<str>) -> Fault {
    unfit(format!("its table idempotency_keys is not fit for records: {}", reason.as_ref()))
}

fn unfit(reason: String) -> Fault {
    Fault::new(StoreErrorKind::Unfit, reason)
}
