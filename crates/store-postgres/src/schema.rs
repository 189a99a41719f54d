//! The tables, their versions, and the proof that a table found in the database keeps records as it must.

use std::time::Duration;

use onlyonce_core::StoreErrorKind;
use onlyonce_core::operation::NAME_BYTES_MAX;
use tokio_postgres::types::Type;

use crate::error::Fault;
use crate::functions;
use crate::row::lock_number;
use crate::session::{Call, Part, Session, Sql};

/// The version that this release writes. Each release reads the neighbouring ones, so changes are additive.
const VERSION: i64 = 3;
/// The oldest release that may use tables of [`VERSION`].
const MIN_READER_VERSION: i64 = 1;

/// How long an instance waits for others that prepare the tables, and a change of the tables for those who use them.
const PATIENCE: Duration = Duration::from_secs(60);

const META: &str = "CREATE TABLE IF NOT EXISTS {schema}.idempotency_meta (
    id integer PRIMARY KEY CHECK (id = 1),
    schema_version bigint NOT NULL,
    min_reader_version bigint NOT NULL,
    opened_at timestamptz NOT NULL
);";

// Names are text that people can read, under the collation that compares bytes. Bodies are kept as they came: pressing
// them costs more than it saves. Partial indexes: one serves the purge of completed rows, one the rest.
const V1: &str = "
CREATE TABLE IF NOT EXISTS {schema}.idempotency_keys (
    scope text COLLATE \"C\" NOT NULL,
    key text COLLATE \"C\" NOT NULL,
    request_hash text COLLATE \"C\" NOT NULL,
    status text COLLATE \"C\" NOT NULL,
    response_code integer,
    response_headers bytea,
    response_body bytea,
    locked_until timestamptz NOT NULL,
    created_at timestamptz NOT NULL,
    claimed_at timestamptz NOT NULL,
    completed_at timestamptz,
    expires_at timestamptz,
    token uuid NOT NULL,
    attempt bigint NOT NULL,
    on_lease_end text COLLATE \"C\" NOT NULL,
    origin text COLLATE \"C\",
    PRIMARY KEY (scope, key)
) WITH (autovacuum_vacuum_scale_factor = 0.05);
ALTER TABLE {schema}.idempotency_keys ALTER COLUMN response_body SET STORAGE EXTERNAL;
CREATE INDEX IF NOT EXISTS idempotency_keys_expiry ON {schema}.idempotency_keys (expires_at)
    WHERE status = 'completed';
CREATE INDEX IF NOT EXISTS idempotency_keys_lease ON {schema}.idempotency_keys (locked_until)
    WHERE status <> 'completed';
CREATE TABLE IF NOT EXISTS {schema}.idempotency_audit (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at timestamptz NOT NULL,
    actor text NOT NULL,
    action text NOT NULL,
    scope text COLLATE \"C\" NOT NULL,
    key text COLLATE \"C\" NOT NULL,
    state_before text NOT NULL,
    state_after text NOT NULL,
    reason text NOT NULL
);
CREATE INDEX IF NOT EXISTS idempotency_audit_key ON {schema}.idempotency_audit (scope, key);";

// Tells one store from another, so that a transaction on another database is noticed.
const V2: &str = "
ALTER TABLE {schema}.idempotency_meta ADD COLUMN IF NOT EXISTS store_id uuid NOT NULL DEFAULT gen_random_uuid();";

// Name, type, NOT NULL.
const COLUMNS: [(&str, &str, bool); 16] = [
    ("scope", "text", true),
    ("key", "text", true),
    ("request_hash", "text", true),
    ("status", "text", true),
    ("response_code", "integer", false),
    ("response_headers", "bytea", false),
    ("response_body", "bytea", false),
    ("locked_until", "timestamp with time zone", true),
    ("created_at", "timestamp with time zone", true),
    ("claimed_at", "timestamp with time zone", true),
    ("completed_at", "timestamp with time zone", false),
    ("expires_at", "timestamp with time zone", false),
    ("token", "uuid", true),
    ("attempt", "bigint", true),
    ("on_lease_end", "text", true),
    ("origin", "text", false),
];

/// Where the tables are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// The schema, as it is named.
    pub(crate) schema: String,
}

impl Place {
    /// The schema, quoted.
    pub(crate) fn quoted(&self) -> String {
        format!("\"{}\"", self.schema.replace('"', "\"\""))
    }

    /// The table of records, with its schema.
    pub(crate) fn keys(&self) -> String {
        format!("{}.idempotency_keys", self.quoted())
    }

    /// The table that tells of the others, with its schema.
    pub(crate) fn meta(&self) -> String {
        format!("{}.idempotency_meta", self.quoted())
    }

    /// The audit table, with its schema.
    pub(crate) fn audit(&self) -> String {
        format!("{}.idempotency_audit", self.quoted())
    }
}

/// Whether the database holds records there, in whatever shape.
pub(crate) async fn exists(session: &mut Session<'_>, place: &Place) -> Result<bool, Fault> {
    let sql = sql(&[Type::TEXT], "SELECT to_regclass($1) IS NOT NULL");
    let rows = session.run(&[Call::new(&sql, vec![&place.keys()])], Part::Whole).await?;
    first(&rows)?.try_get(0).map_err(Fault::from)
}

/// Brings the tables to [`VERSION`] and proves them, in one transaction under a lock, so that any number of instances may
/// start at once; a fault leaves the database as it was.
///
/// # Errors
/// `Unfit` with the reason: a wrong table, or tables of a release that this one cannot read.
pub(crate) async fn prepare(mut session: Session<'_>, place: &Place) -> Result<[u8; 16], Fault> {
    session.begin_long(PATIENCE).await?;
    let lock = sql(&[Type::INT8], "SELECT pg_advisory_xact_lock($1)");
    let number = migration_lock(place);
    session.run(&[Call::new(&lock, vec![&number])], Part::Middle).await?;
    let found = version(&mut session, place).await?;
    let from = found.map_or(0, |(version, _)| version);
    if let Some((version, min_reader)) = found
        && min_reader > VERSION
    {
        return Err(unfit(format!(
            "its tables were written by a newer release (schema {version}, readable from {min_reader} on; this release \
             has {VERSION})"
        )));
    }
    if table_of(&mut session, &place.keys()).await?.is_some() {
        // Before anything of ours is built on it.
        check_table(&mut session, place).await?;
    }
    if from < VERSION {
        let schema = place.quoted();
        session
            .execute(
                &format!("SET LOCAL client_min_messages = warning; {META}{V1}{V2}")
                    .replace("{schema}", &schema),
            )
            .await
            .map_err(|fault| may_not_create(fault, &schema))?;
        check_table(&mut session, place).await?;
    }
    probe(&mut session, place).await?;
    // Also the proof that this user may write.
    let opened = sql(
        &[Type::INT8, Type::INT8],
        &format!(
            "INSERT INTO {} AS m (id, schema_version, min_reader_version, opened_at) VALUES (1, $1, $2, now()) ON CONFLICT (id) DO UPDATE SET
                opened_at = now(),
                schema_version = greatest(m.schema_version, excluded.schema_version),
                min_reader_version = greatest(m.min_reader_version, excluded.min_reader_version)
             RETURNING uuid_send(store_id)",
            place.meta()
        ),
    );
    let rows = session.run(&[Call::new(&opened, vec![&VERSION, &MIN_READER_VERSION])], Part::Middle).await?;
    let id: &[u8] = first(&rows)?.try_get(0)?;
    let id = id.try_into().map_err(|_| Fault::internal("the name of a store is not 16 bytes"))?;
    // Version 3: the tables are those of 2.
    let made = functions::prepare(&mut session, place, id, from <= VERSION).await;
    made.map_err(|fault| may_not_create(fault, &place.quoted()))?;
    session.run(&[], Part::End).await?;
    Ok(id)
}

fn migration_lock(place: &Place) -> i64 {
    use onlyonce_core::{Key, OperationId, Scope};
    let key = Key::new("migrations").expect("a valid key");
    lock_number(&place.quoted(), &OperationId { scope: Scope::anonymous(), key })
}

fn may_not_create(fault: Fault, schema: &str) -> Fault {
    match fault.kind() {
        StoreErrorKind::Unfit => Fault::new(
            StoreErrorKind::Unfit,
            format!(
                "the tables cannot be made: {}. Let a user who may create tables and functions in the schema {schema} start it once",
                fault.detail()
            ),
        )
        .with_source(fault.into_error("open")),
        _ => fault,
    }
}

async fn version(session: &mut Session<'_>, place: &Place) -> Result<Option<(i64, i64)>, Fault> {
    let meta = place.meta();
    if table_of(session, &meta).await?.is_none() {
        return Ok(None);
    }
    let sql = sql(&[], &format!("SELECT schema_version, min_reader_version FROM {meta}"));
    let rows = session.run(&[Call::new(&sql, Vec::new())], Part::Middle).await?;
    let Some(row) = rows.first().and_then(|rows| rows.first()) else { return Ok(None) };
    match (row.try_get(0), row.try_get(1)) {
        (Ok(version), Ok(min_reader)) => Ok(Some((version, min_reader))),
        _ => Err(unfit("its table idempotency_meta is not ours".into())),
    }
}

async fn table_of(session: &mut Session<'_>, name: &str) -> Result<Option<()>, Fault> {
    let sql = sql(&[Type::TEXT], "SELECT to_regclass($1) IS NOT NULL");
    let rows = session.run(&[Call::new(&sql, vec![&name])], Part::Middle).await?;
    Ok(first(&rows)?.try_get::<_, bool>(0)?.then_some(()))
}

/// Names what is wrong with the shape of the table.
async fn check_table(session: &mut Session<'_>, place: &Place) -> Result<(), Fault> {
    let keys = place.keys();
    let shape = sql(
        &[Type::TEXT],
        "SELECT c.relkind::text, c.relpersistence::text, c.relrowsecurity,
            EXISTS (SELECT 1 FROM pg_catalog.pg_trigger WHERE tgrelid = c.oid AND NOT tgisinternal),
            EXISTS (SELECT 1 FROM pg_catalog.pg_rewrite WHERE ev_class = c.oid)
         FROM pg_catalog.pg_class AS c WHERE c.oid = to_regclass($1)",
    );
    let columns = sql(
        &[Type::TEXT],
        "SELECT a.attname::text, pg_catalog.format_type(a.atttypid, a.atttypmod), a.attnotnull, co.collname::text,
            co.collisdeterministic
         FROM pg_catalog.pg_attribute AS a LEFT JOIN pg_catalog.pg_collation AS co ON co.oid = a.attcollation
         WHERE a.attrelid = to_regclass($1) AND a.attnum > 0 AND NOT a.attisdropped",
    );
    let indexes = sql(
        &[Type::TEXT],
        "SELECT i.indisprimary, i.indimmediate, x.relname::text,
            ARRAY(SELECT a.attname::text FROM unnest(i.indkey::int2[]) WITH ORDINALITY AS k (attnum, n)
                LEFT JOIN pg_catalog.pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = k.attnum ORDER BY k.n)
         FROM pg_catalog.pg_index AS i JOIN pg_catalog.pg_class AS x ON x.oid = i.indexrelid
         WHERE i.indrelid = to_regclass($1) AND i.indisunique",
    );
    let calls = [&shape, &columns, &indexes].map(|sql| Call::new(sql, vec![&keys]));
    let results = session.run(&calls, Part::Middle).await?;
    let [shape, columns, indexes] = &results[..] else { return Err(Fault::internal("three answers")) };
    check_shape(shape.first().ok_or_else(|| wrong("it is missing"))?)?;
    check_columns(columns)?;
    check_indexes(indexes)
}

fn check_shape(row: &tokio_postgres::Row) -> Result<(), Fault> {
    match row.try_get(0)? {
        "r" => {}
        "p" => return Err(wrong("it is partitioned, so that its key is unique in each partition alone")),
        "v" | "m" => return Err(wrong("it is a view")),
        _ => return Err(wrong("it is not a table")),
    }
    match row.try_get(1)? {
        "p" => {}
        "u" => return Err(wrong("it is UNLOGGED: a crash of the server empties it")),
        _ => return Err(wrong("it is a temporary table")),
    }
    if row.try_get(2)? {
        return Err(wrong("it has row level security, so that records may be hidden"));
    }
    if row.try_get(3)? {
        return Err(wrong("it has triggers"));
    }
    if row.try_get(4)? {
        return Err(wrong("it has rules"));
    }
    Ok(())
}

fn check_columns(rows: &[tokio_postgres::Row]) -> Result<(), Fault> {
    for (name, kind, not_null) in COLUMNS {
        let Some(row) = rows.iter().find(|row| row.try_get::<_, &str>(0).is_ok_and(|found| found == name))
        else {
            return Err(wrong(format!("column {name} is missing")));
        };
        let (found, is_not_null): (&str, bool) = (row.try_get(1)?, row.try_get(2)?);
        let varying = found.strip_prefix("character varying(").and_then(|rest| rest.strip_suffix(')'));
        match varying.map(|length| length.parse::<usize>().unwrap_or(0)) {
            Some(length) if kind == "text" && length < NAME_BYTES_MAX => {
                return Err(wrong(format!(
                    "column {name} holds {length} characters, and {NAME_BYTES_MAX} are needed: make it text"
                )));
            }
            Some(_) if kind == "text" => {}
            _ if found == kind || (kind == "text" && found == "character varying") => {}
            _ => return Err(wrong(format!("column {name} is {found}, not {kind}"))),
        }
        if not_null && !is_not_null {
            return Err(wrong(format!("column {name} may be NULL: make it NOT NULL")));
        }
        if matches!(name, "scope" | "key") {
            check_collation(name, row.try_get(3)?, row.try_get(4)?)?;
        }
    }
    Ok(())
}

fn check_collation(column: &str, name: Option<&str>, deterministic: Option<bool>) -> Result<(), Fault> {
    let name = name.unwrap_or("none");
    if deterministic == Some(false) {
        return Err(wrong(format!(
            "column {column} compares by the nondeterministic collation {name}, so that different keys are one: make it \
             COLLATE \"C\""
        )));
    }
    if !matches!(name, "C" | "POSIX" | "ucs_basic") {
        return Err(wrong(format!(
            "column {column} has the collation {name}, which does not go by bytes: make it COLLATE \"C\""
        )));
    }
    Ok(())
}

fn check_indexes(rows: &[tokio_postgres::Row]) -> Result<(), Fault> {
    let mut has_key = false;
    for row in rows {
        let (primary, immediate, name): (bool, bool, &str) =
            (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
        let columns: Vec<Option<String>> = row.try_get(3)?;
        let of_key = columns.iter().map(Option::as_deref).eq([Some("scope"), Some("key")]);
        match (primary, of_key) {
            (true, true) if !immediate => return Err(wrong("its primary key is DEFERRABLE")),
            (true, true) => has_key = true,
            (true, false) => return Err(wrong("its primary key is not (scope, key)")),
            (false, true) => {}
            (false, false) => {
                return Err(wrong(format!("its index {name} makes more unique than (scope, key)")));
            }
        }
    }
    if has_key { Ok(()) } else { Err(wrong("it has no primary key: make it (scope, key)")) }
}

/// Shows on rows of its own, which are taken back, that names are kept byte for byte and are all that is unique.
async fn probe(session: &mut Session<'_>, place: &Place) -> Result<(), Fault> {
    // No key can hold a control character, so these meet no record.
    let long = "\u{1}".repeat(NAME_BYTES_MAX);
    let names = ["\u{1}a", "\u{1}A", "\u{1}a ", "\u{1}é", "\u{1}e\u{301}", "\u{1}ß", "\u{1}ss", &long];
    let (scopes, keys): (Vec<&str>, Vec<&str>) =
        names.iter().flat_map(|name| [(*name, "\u{1}k"), ("\u{1}s", *name)]).unzip();
    let table = place.keys();
    let insert = sql(
        &[Type::TEXT_ARRAY, Type::TEXT_ARRAY],
        &format!(
            "INSERT INTO {table} (scope, key, request_hash, status, locked_until, created_at, claimed_at, token, attempt,
                on_lease_end)
             SELECT scope, key, '', '', now(), now(), now(), '00000000-0000-0000-0000-000000000000', 0, ''
             FROM unnest($1, $2) AS i (scope, key)"
        ),
    );
    let kept = sql(
        &[Type::TEXT_ARRAY, Type::TEXT_ARRAY],
        &format!(
            "SELECT count(*) FROM unnest($1, $2) AS i (scope, key) JOIN {table} AS t
                ON t.scope = i.scope AND t.key = i.key
                AND convert_to(t.scope, 'UTF8') = convert_to(i.scope, 'UTF8')
                AND convert_to(t.key, 'UTF8') = convert_to(i.key, 'UTF8')"
        ),
    );
    session.execute("SAVEPOINT idempotency_probe").await?;
    let inserted = session.run(&[Call::new(&insert, vec![&scopes, &keys])], Part::Middle).await;
    inserted.map_err(|fault| match fault.kind() {
        StoreErrorKind::Internal => {
            wrong("it does not take every name").with_source(fault.into_error("open"))
        }
        _ => fault,
    })?;
    let rows = session.run(&[Call::new(&kept, vec![&scopes, &keys])], Part::Middle).await?;
    if first(&rows)?.try_get::<_, i64>(0)? != scopes.len() as i64 {
        return Err(wrong("it does not keep names as they are"));
    }
    session.execute("SAVEPOINT idempotency_probe_again").await?;
    let again = session.run(&[Call::new(&insert, vec![&&scopes[..1], &&keys[..1]])], Part::Middle).await;
    match again {
        Ok(_) => return Err(wrong("it takes the same scope and key twice")),
        Err(fault) if fault.breaks_connection() => return Err(fault),
        Err(_) => {}
    }
    session.execute("ROLLBACK TO idempotency_probe; RELEASE idempotency_probe").await
}

fn sql(types: &'static [Type], text: &str) -> Sql {
    Sql { text: text.to_owned().into(), types }
}

fn first(results: &[Vec<tokio_postgres::Row>]) -> Result<&tokio_postgres::Row, Fault> {
    results
        .first()
        .and_then(|rows| rows.first())
        .ok_or_else(|| Fault::internal("a question without an answer"))
}

fn wrong(reason: impl AsRef<str>) -> Fault {
    unfit(format!("its table idempotency_keys is not fit for records: {}", reason.as_ref()))
}

fn unfit(reason: String) -> Fault {
    Fault::new(StoreErrorKind::Unfit, reason)
}
