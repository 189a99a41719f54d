//! The tables, their versions, and the proof that a table found in the database keeps records as it must.

use onlyonce_core::StoreErrorKind;
use onlyonce_core::operation::NAME_BYTES_MAX;

use crate::error::{Fault, code};
use crate::row::cells;
use crate::session::Session;
use crate::sql::Sql;

/// The version that this release writes. Each release reads the neighbouring ones, so changes are additive.
const VERSION: i64 = 1;
/// The oldest release that may use tables of [`VERSION`].
const MIN_READER_VERSION: i64 = 1;

/// How long an instance waits for another one that makes the tables, in seconds.
const MIGRATION_PATIENCE_S: u32 = 30;

/// The tables of a store by their full names: a caller's connection may be on another database.
#[derive(Clone, Debug)]
pub(crate) struct Tables {
    pub(crate) database: String,
    pub(crate) keys: String,
    pub(crate) audit: String,
    pub(crate) meta: String,
}

impl Tables {
    pub(crate) fn of(database: &str) -> Self {
        let quoted = database.replace('`', "``");
        let full = |name: &str| format!("`{quoted}`.{name}");
        Self {
            database: database.into(),
            keys: full("idempotency_keys"),
            audit: full("idempotency_audit"),
            meta: full("idempotency_meta"),
        }
    }
}

// Names are bytes: a text would be compared by a collation, which takes different keys for one, and MySQL's own binary
// ones ignore spaces at the end. The index serves the purge: what is completed by its end, what is not by its lease.
fn tables_of_v1(tables: &Tables) -> Vec<String> {
    let Tables { keys, audit, meta, .. } = tables;
    vec![
        format!(
            "CREATE TABLE IF NOT EXISTS {meta} (
                id TINYINT UNSIGNED NOT NULL PRIMARY KEY,
                schema_version INT NOT NULL,
                min_reader_version INT NOT NULL,
                store_id BINARY(16) NOT NULL
            ) ENGINE=InnoDB"
        ),
        format!(
            "CREATE TABLE IF NOT EXISTS {keys} (
                scope VARBINARY(255) NOT NULL,
                `key` VARBINARY(255) NOT NULL,
                request_hash VARCHAR(96) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
                status VARCHAR(16) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
                response_code SMALLINT UNSIGNED NULL,
                response_headers LONGBLOB NULL,
                response_body LONGBLOB NULL,
                locked_until DATETIME(6) NOT NULL,
                created_at DATETIME(6) NOT NULL,
                claimed_at DATETIME(6) NOT NULL,
                completed_at DATETIME(6) NULL,
                expires_at DATETIME(6) NULL,
                token BINARY(16) NOT NULL,
                attempt INT UNSIGNED NOT NULL,
                on_lease_end VARCHAR(16) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
                origin VARBINARY(255) NULL,
                PRIMARY KEY (scope, `key`),
                KEY idempotency_keys_over (expires_at, locked_until)
            ) ENGINE=InnoDB"
        ),
        format!(
            "CREATE TABLE IF NOT EXISTS {audit} (
                id BIGINT UNSIGNED NOT NULL AUTO_INCREMENT PRIMARY KEY,
                at DATETIME(6) NOT NULL,
                actor TEXT CHARACTER SET utf8mb4 NOT NULL,
                action VARCHAR(16) CHARACTER SET ascii NOT NULL,
                scope VARBINARY(255) NOT NULL,
                `key` VARBINARY(255) NOT NULL,
                state_before VARCHAR(64) CHARACTER SET ascii NOT NULL,
                state_after VARCHAR(64) CHARACTER SET ascii NOT NULL,
                reason TEXT CHARACTER SET utf8mb4 NOT NULL,
                KEY idempotency_audit_id (scope, `key`)
            ) ENGINE=InnoDB"
        ),
    ]
}

// Name, types that serve, the least length in bytes, NOT NULL.
const COLUMNS: [(&str, &[&str], u64, bool); 16] = [
    ("scope", &["varbinary"], NAME_BYTES_MAX as u64, true),
    ("key", &["varbinary"], NAME_BYTES_MAX as u64, true),
    ("request_hash", &["varchar", "varbinary"], 89, true),
    ("status", &["varchar", "varbinary"], 11, true),
    ("response_code", &["smallint", "mediumint", "int", "bigint"], 0, false),
    ("response_headers", &["longblob"], 0, false),
    ("response_body", &["longblob"], 0, false),
    ("locked_until", &["datetime"], 6, true),
    ("created_at", &["datetime"], 6, true),
    ("claimed_at", &["datetime"], 6, true),
    ("completed_at", &["datetime"], 6, false),
    ("expires_at", &["datetime"], 6, false),
    ("token", &["binary"], 16, true),
    ("attempt", &["int", "bigint"], 0, true),
    ("on_lease_end", &["varchar", "varbinary"], 9, true),
    ("origin", &["varbinary"], NAME_BYTES_MAX as u64, false),
];

/// Brings the tables to [`VERSION`], proves them, and answers the identity of the store.
///
/// Where there is something to make, one instance makes it and the others wait: DDL of this server is in no transaction.
///
/// # Errors
/// `Unfit` with the reason: a wrong table, or tables of a release that this one cannot read.
pub(crate) async fn prepare(
    session: &mut Session<'_>,
    tables: &Tables,
    create: bool,
) -> Result<[u8; 16], Fault> {
    if let Some(found) = Meta::read(session, tables).await? {
        found.check()?;
        if found.version >= VERSION {
            check_table(session, tables).await?;
            probe(session, tables).await?;
            return Ok(found.store_id);
        }
    }
    if !create && !exists(session, tables, "idempotency_keys").await? {
        return Err(Fault::unfit("the database holds no idempotency records"));
    }
    migrate(session, tables).await?;
    check_table(session, tables).await?;
    probe(session, tables).await?;
    let found = Meta::read(session, tables).await?;
    found.map(|meta| meta.store_id).ok_or_else(|| Fault::unfit("its table idempotency_meta is empty"))
}

struct Meta {
    version: i64,
    min_reader: i64,
    store_id: [u8; 16],
}

impl Meta {
    async fn read(session: &mut Session<'_>, tables: &Tables) -> Result<Option<Self>, Fault> {
        let sql =
            format!("SELECT schema_version, min_reader_version, store_id FROM {} WHERE id = 1", tables.meta);
        let not_ours = || Fault::unfit("its table idempotency_meta is not ours");
        let rows = match session.rows(&Sql::new(sql)).await {
            Ok(rows) => rows,
            Err(fault) if fault.code() == code::NO_TABLE => return Ok(None),
            Err(fault) if fault.code() == 1054 => return Err(not_ours()),
            Err(fault) => return Err(fault),
        };
        let Some(row) = rows.into_iter().next() else { return Ok(None) };
        let mut cells = cells(row);
        let mut read = || -> Result<Self, Fault> {
            let (version, min_reader) = (cells.int("schema_version")?, cells.int("min_reader_version")?);
            let store_id = cells.bytes("store_id")?.try_into().map_err(|_| not_ours())?;
            Ok(Self { version, min_reader, store_id })
        };
        read().map(Some).map_err(|_| not_ours())
    }

    fn check(&self) -> Result<(), Fault> {
        if self.min_reader <= VERSION {
            return Ok(());
        }
        let Self { version, min_reader, .. } = self;
        Err(Fault::unfit(format!(
            "its tables were written by a newer release (schema {version}, readable from {min_reader} on; this release has {VERSION})"
        )))
    }
}

async fn migrate(session: &mut Session<'_>, tables: &Tables) -> Result<(), Fault> {
    // Of the server, not of the database; at most 64 characters.
    let mut lock = Sql::new("CONCAT('onlyonce ', MD5(");
    lock.value(tables.database.as_str()).push("))");
    let lock = lock.inlined();
    // Behind a proxy the lock is this connection's, which closes where it cannot be freed.
    session.begun();
    let got = format!("SELECT GET_LOCK({lock}, {MIGRATION_PATIENCE_S})");
    let got = session.patient_rows(&got, MIGRATION_PATIENCE_S).await?;
    let got = got.into_iter().next().map(cells).map(|mut row| row.maybe_int("lock")).transpose()?.flatten();
    if got != Some(1) {
        let why = "another instance is making the tables and does not finish; try again";
        return Err(Fault::new(StoreErrorKind::Unavailable, why));
    }
    let made = make(session, tables).await;
    if session.rows(&Sql::new(format!("SELECT RELEASE_LOCK({lock})"))).await.is_ok() {
        session.ended();
    }
    made
}

async fn make(session: &mut Session<'_>, tables: &Tables) -> Result<(), Fault> {
    if let Some(found) = Meta::read(session, tables).await? {
        found.check()?;
        if found.version >= VERSION {
            return Ok(());
        }
    }
    if exists(session, tables, "idempotency_keys").await? {
        // Before anything of ours is built on it.
        check_table(session, tables).await?;
    }
    for (name, ddl) in
        ["idempotency_meta", "idempotency_keys", "idempotency_audit"].into_iter().zip(tables_of_v1(tables))
    {
        // A user that may not create tables can use those that somebody made for it.
        if !exists(session, tables, name).await? {
            session.script(&[ddl]).await.map_err(|fault| match fault.code() {
                1142 | 1044 => Fault::unfit(format!(
                    "there is no table {name}, and the user of the URL may not create it; grant CREATE for the first start"
                ))
                .with_source(fault.into_error("open")),
                _ => fault,
            })?;
        }
    }
    // Last: until then every instance comes by here.
    let mut store_id = [0; 16];
    getrandom::fill(&mut store_id).map_err(|error| Fault::internal("no random bytes").with_source(error))?;
    let mut sql = Sql::new(format!(
        "INSERT INTO {} (id, schema_version, min_reader_version, store_id) VALUES (1, {VERSION}, {MIN_READER_VERSION}, ",
        tables.meta
    ));
    sql.value(&store_id[..]).push(") ON DUPLICATE KEY UPDATE ");
    sql.push("schema_version = GREATEST(schema_version, VALUES(schema_version)), ");
    sql.push("min_reader_version = GREATEST(min_reader_version, VALUES(min_reader_version))");
    session.change(sql).await?;
    Ok(())
}

async fn exists(session: &mut Session<'_>, tables: &Tables, name: &str) -> Result<bool, Fault> {
    let mut sql = Sql::new("SELECT 1 FROM information_schema.TABLES WHERE TABLE_SCHEMA = ");
    sql.value(tables.database.as_str()).push(" AND TABLE_NAME = ").value(name);
    Ok(!session.rows(&sql).await?.is_empty())
}

/// Names what is wrong with the shape of the table.
async fn check_table(session: &mut Session<'_>, tables: &Tables) -> Result<(), Fault> {
    let of_keys = |select: &str, from: &str, schema: &str, name: &str| {
        let mut sql = Sql::new(format!("SELECT {select} FROM information_schema.{from} WHERE {schema} = "));
        sql.value(tables.database.as_str()).push(" AND ").push(name).push(" = 'idempotency_keys'");
        sql
    };
    let kind = of_keys("TABLE_TYPE, ENGINE", "TABLES", "TABLE_SCHEMA", "TABLE_NAME");
    let Some(row) = session.rows(&kind).await?.into_iter().next() else {
        return Err(wrong("it is missing"));
    };
    let mut row = cells(row);
    let kind = row.text("TABLE_TYPE")?;
    if kind != "BASE TABLE" {
        return Err(wrong(format!("it is a {}", kind.to_ascii_lowercase())));
    }
    let engine = row.maybe_bytes("ENGINE")?.map(|name| String::from_utf8_lossy(&name).into_owned());
    if !engine.as_deref().is_some_and(|name| name.eq_ignore_ascii_case("InnoDB")) {
        let engine = engine.unwrap_or_default();
        return Err(wrong(format!("its engine is {engine}, which has no transactions; use InnoDB")));
    }
    let columns = of_keys(
        "COLUMN_NAME, DATA_TYPE, COLLATION_NAME, IS_NULLABLE, CHARACTER_MAXIMUM_LENGTH, DATETIME_PRECISION",
        "COLUMNS",
        "TABLE_SCHEMA",
        "TABLE_NAME",
    );
    check_columns(session.rows(&columns).await?)?;
    let indexes =
        of_keys("INDEX_NAME, NON_UNIQUE, COLUMN_NAME, SUB_PART", "STATISTICS", "TABLE_SCHEMA", "TABLE_NAME");
    let mut indexes = indexes;
    indexes.push(" ORDER BY INDEX_NAME, SEQ_IN_INDEX");
    check_indexes(session.rows(&indexes).await?)?;
    let triggers = of_keys("1", "TRIGGERS", "EVENT_OBJECT_SCHEMA", "EVENT_OBJECT_TABLE");
    if !session.rows(&triggers).await?.is_empty() {
        return Err(wrong("it has triggers"));
    }
    Ok(())
}

fn check_columns(rows: Vec<mysql_async::Row>) -> Result<(), Fault> {
    struct Found {
        name: String,
        kind: String,
        collation: Option<String>,
        nullable: bool,
        length: u64,
        digits: u64,
    }
    let mut found = Vec::new();
    for row in rows {
        let mut row = cells(row);
        let number = |value: Option<i64>| value.and_then(|value| u64::try_from(value).ok()).unwrap_or(0);
        found.push(Found {
            name: row.text("COLUMN_NAME")?,
            kind: row.text("DATA_TYPE")?.to_ascii_lowercase(),
            collation: row
                .maybe_bytes("COLLATION_NAME")?
                .map(|name| String::from_utf8_lossy(&name).into_owned()),
            nullable: row.text("IS_NULLABLE")? != "NO",
            length: number(row.maybe_int("CHARACTER_MAXIMUM_LENGTH")?),
            digits: number(row.maybe_int("DATETIME_PRECISION")?),
        });
    }
    for (name, kinds, least, not_null) in COLUMNS {
        let Some(column) = found.iter().find(|column| column.name == name) else {
            return Err(wrong(format!("column {name} is missing")));
        };
        let is_name = kinds == ["varbinary"] && not_null;
        // The length first: a VARCHAR(64) is told that it is too short, and by its collation once it is not.
        let length = if kinds == ["datetime"] { column.digits } else { column.length };
        if (is_name || kinds.contains(&column.kind.as_str())) && length < least {
            let unit = if kinds == ["datetime"] { "digits of a second" } else { "characters or bytes" };
            return Err(wrong(format!("column {name} holds {length} {unit}, and needs {least}")));
        }
        if !kinds.contains(&column.kind.as_str()) {
            return Err(wrong(match (&column.collation, is_name) {
                (Some(collation), true) => format!(
                    "column {name} is {} compared by {collation}, so that different keys are one; make it VARBINARY({NAME_BYTES_MAX})",
                    column.kind
                ),
                _ => format!("column {name} is {}, not {}", column.kind, kinds[0]),
            }));
        }
        if not_null && column.nullable {
            return Err(wrong(format!("column {name} may be NULL")));
        }
    }
    Ok(())
}

fn check_indexes(rows: Vec<mysql_async::Row>) -> Result<(), Fault> {
    let mut primary = Vec::new();
    let mut serves_purge = Vec::new();
    for row in rows {
        let mut row = cells(row);
        let (index, non_unique) = (row.text("INDEX_NAME")?, row.int("NON_UNIQUE")? != 0);
        let (column, part) = (row.maybe_bytes("COLUMN_NAME")?, row.maybe_int("SUB_PART")?);
        let column = String::from_utf8_lossy(&column.unwrap_or_default()).into_owned();
        match index.as_str() {
            "PRIMARY" if part.is_some() => {
                return Err(wrong(format!("its primary key holds a part of {column} alone")));
            }
            "PRIMARY" => primary.push(column),
            _ if !non_unique => {
                return Err(wrong(format!("its index {index} makes more unique than (scope, key)")));
            }
            "idempotency_keys_over" => serves_purge.push(column),
            _ => {}
        }
    }
    if primary != ["scope", "key"] {
        return Err(wrong("its primary key is not (scope, key)"));
    }
    if serves_purge != ["expires_at", "locked_until"] {
        return Err(wrong("its index idempotency_keys_over on (expires_at, locked_until) is missing"));
    }
    Ok(())
}

/// Shows on rows of its own, which are taken back, that names are kept byte for byte and are all that is unique.
async fn probe(session: &mut Session<'_>, tables: &Tables) -> Result<(), Fault> {
    session.begun();
    let proof = match session.script(&["START TRANSACTION".into()]).await {
        Ok(_) => probe_rows(session, tables).await,
        Err(fault) => Err(fault),
    };
    session.roll_back().await;
    proof
}

async fn probe_rows(session: &mut Session<'_>, tables: &Tables) -> Result<(), Fault> {
    let mut id = [0; 8];
    getrandom::fill(&mut id).map_err(|error| Fault::internal("no random bytes").with_source(error))?;
    // No key can hold a control character, so these meet no record; nor those of another instance that starts now.
    let own = format!("\u{1}{:016x}", u64::from_le_bytes(id));
    let mut names: Vec<String> = ["a", "A", "a ", "é", "e\u{301}", "ß", "ss", "😀", "😁"]
        .iter()
        .map(|tail| format!("{own}{tail}"))
        .collect();
    names.push(own.chars().chain(std::iter::repeat('x')).take(NAME_BYTES_MAX).collect());
    let pairs: Vec<(&str, &str)> = names
        .iter()
        .flat_map(|name| [(name.as_str(), own.as_str()), (own.as_str(), name.as_str())])
        .collect();
    let insert = |pairs: &[(Option<&str>, Option<&str>)]| {
        let mut sql = Sql::new(format!(
            "INSERT INTO {} (scope, `key`, request_hash, status, locked_until, created_at, claimed_at, token, attempt, \
             on_lease_end) VALUES ",
            tables.keys
        ));
        for (n, (scope, key)) in pairs.iter().enumerate() {
            sql.push(if n == 0 { "(" } else { ", (" }).value(*scope).push(", ").value(*key);
            sql.push(", '', '', NOW(), NOW(), NOW(), x'00000000000000000000000000000000', 0, '')");
        }
        sql
    };
    let some: Vec<_> = pairs.iter().map(|(scope, key)| (Some(*scope), Some(*key))).collect();
    session.change(insert(&some)).await.map_err(|fault| match fault.code() {
        code::DUPLICATE => wrong("it takes different names for one"),
        1406 => wrong(format!("it does not take names of {NAME_BYTES_MAX} bytes")),
        _ => fault,
    })?;
    let mut kept = Sql::new(format!("SELECT scope, `key` FROM {} WHERE (", tables.keys));
    for (n, (scope, key)) in pairs.iter().enumerate() {
        kept.push(if n == 0 { "(scope = " } else { " OR (scope = " }).value(*scope);
        kept.push(" AND `key` = ").value(*key).push(")");
    }
    kept.push(")");
    let mut found = Vec::new();
    for row in session.rows(&kept).await? {
        let mut row = cells(row);
        found.push((row.bytes("scope")?, row.bytes("key")?));
    }
    found.sort();
    let mut wanted: Vec<_> =
        pairs.iter().map(|(scope, key)| (scope.as_bytes().to_vec(), key.as_bytes().to_vec())).collect();
    wanted.sort();
    if found != wanted {
        return Err(wrong("it does not keep names as they are"));
    }
    match session.change(insert(&some[..1])).await {
        Err(fault) if fault.code() == code::DUPLICATE => {}
        Err(fault) => return Err(fault),
        Ok(_) => return Err(wrong("it takes the same scope and key twice")),
    }
    for pair in [(None, Some("\u{1}k")), (Some("\u{1}s"), None)] {
        match session.change(insert(&[pair])).await {
            Err(fault) if fault.code() == 1048 || fault.code() == 1364 => {}
            Err(fault) => return Err(fault),
            Ok(_) => return Err(wrong("it takes NULL for scope or key, and NULLs never collide")),
        }
    }
    Ok(())
}

/// Whether the server counts the rows that a statement changed, and not those it found: a proxy may ask it for the latter, as
/// ProxySQL does unless told otherwise. Shown on a row of its own, which is taken back.
pub(crate) async fn counts_changes(session: &mut Session<'_>, tables: &Tables) -> Result<bool, Fault> {
    let mut id = [0; 16];
    getrandom::fill(&mut id).map_err(|error| Fault::internal("no random bytes").with_source(error))?;
    let twice = || {
        let mut sql = Sql::new(format!(
            "INSERT INTO {} (scope, `key`, request_hash, status, locked_until, created_at, claimed_at, token, attempt, \
             on_lease_end) VALUES ('\u{1}', ",
            tables.keys
        ));
        sql.value(&id[..]).push(", '', '', NOW(), NOW(), NOW(), ").value(&id[..]);
        sql.push(", 0, '') ON DUPLICATE KEY UPDATE attempt = attempt");
        sql
    };
    session.begun();
    let counted = async {
        session.script(&["START TRANSACTION".into()]).await?;
        session.change_unprepared(twice()).await?;
        Ok(session.change_unprepared(twice()).await?.rows == 0)
    };
    let counted = counted.await;
    session.roll_back().await;
    counted
}

fn wrong(reason: impl AsRef<str>) -> Fault {
    Fault::unfit(format!("its table idempotency_keys is not fit for records: {}", reason.as_ref()))
}
