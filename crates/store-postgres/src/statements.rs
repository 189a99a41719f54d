//! The statements of a store, with the name of its table in them.

use std::borrow::Cow;

use tokio_postgres::types::Type;

use crate::row::COLUMNS;
use crate::session::Sql;

/// The statements of a store, with the name of its table in them.
#[derive(Debug)]
pub(crate) struct Statements {
    pub(crate) table: String,
    pub(crate) claim: Sql,
    pub(crate) renew: Sql,
    pub(crate) complete: Sql,
    pub(crate) release: Sql,
    pub(crate) mark_unknown: Sql,
    pub(crate) try_lock: Sql,
    pub(crate) lock: Sql,
    pub(crate) read: Sql,
    pub(crate) put: Sql,
    pub(crate) delete: Sql,
}

// What every owner's usual case looks for. The status is compared as an expression, for a condition on the column would
// let the server take the index of what is not completed, which is short until many operations are under way: each batch
// would read all of it.
const OWNED: &str = "pg_try_advisory_xact_lock(i.lock) AND t.scope = i.scope AND t.key = i.key
    AND t.token = i.token AND t.status || '' IN ('in_progress', 'unknown') RETURNING i.n";

impl Statements {
    /// `table` is quoted and names its schema.
    #[rustfmt::skip]
    pub(crate) fn new(table: &str) -> Self {
        let sql = |types, text: String| Sql { text: text.into(), types };
        Self {
            table: table.into(),
            // The moment is read for each row as it is written: `now()` stands still while a statement waits.
            claim: sql(
                &[
                    Type::TEXT_ARRAY, Type::TEXT_ARRAY, Type::INT8_ARRAY, Type::TEXT_ARRAY, Type::INT8_ARRAY,
                    Type::UUID_ARRAY, Type::TEXT_ARRAY, Type::TEXT_ARRAY,
                ],
                format!(
                    "INSERT INTO {table} (scope, key, request_hash, status, locked_until, created_at, claimed_at, token,
                        attempt, on_lease_end, origin)
                     SELECT i.scope, i.key, i.hash, 'in_progress', clock_timestamp() + i.lease * interval '1 microsecond',
                        clock_timestamp(), clock_timestamp(), i.token, 1, i.policy, i.origin
                     FROM unnest($1, $2, $3, $4, $5, $6, $7, $8) AS i (scope, key, lock, hash, lease, token, policy, origin)
                     WHERE pg_try_advisory_xact_lock(i.lock)
                     ON CONFLICT (scope, key) DO NOTHING RETURNING scope, key"
                ),
            ),
            renew: sql(
                &[Type::TEXT_ARRAY, Type::TEXT_ARRAY, Type::INT8_ARRAY, Type::UUID_ARRAY, Type::INT8_ARRAY],
                format!(
                    "UPDATE {table} AS t SET status = 'in_progress',
                        locked_until = clock_timestamp() + i.lease * interval '1 microsecond'
                     FROM unnest($1, $2, $3, $4, $5) WITH ORDINALITY AS i (scope, key, lock, token, lease, n)
                     WHERE {OWNED}"
                ),
            ),
            complete: sql(
                &[
                    Type::TEXT_ARRAY, Type::TEXT_ARRAY, Type::INT8_ARRAY, Type::UUID_ARRAY, Type::INT4_ARRAY,
                    Type::BYTEA_ARRAY, Type::BYTEA_ARRAY, Type::INT8_ARRAY,
                ],
                format!(
                    "UPDATE {table} AS t SET status = 'completed', response_code = i.code, response_headers = i.head,
                        response_body = i.body, completed_at = clock_timestamp(),
                        expires_at = clock_timestamp() + i.retention * interval '1 microsecond'
                     FROM unnest($1, $2, $3, $4, $5, $6, $7, $8) WITH ORDINALITY
                        AS i (scope, key, lock, token, code, head, body, retention, n)
                     WHERE {OWNED}, t.completed_at, t.expires_at"
                ),
            ),
            release: sql(
                &[Type::TEXT_ARRAY, Type::TEXT_ARRAY, Type::INT8_ARRAY, Type::UUID_ARRAY],
                format!(
                    "DELETE FROM {table} AS t
                     USING unnest($1, $2, $3, $4) WITH ORDINALITY AS i (scope, key, lock, token, n) WHERE {OWNED}"
                ),
            ),
            mark_unknown: sql(
                &[Type::TEXT_ARRAY, Type::TEXT_ARRAY, Type::INT8_ARRAY, Type::UUID_ARRAY],
                format!(
                    "UPDATE {table} AS t SET status = 'unknown', locked_until = least(t.locked_until, clock_timestamp())
                     FROM unnest($1, $2, $3, $4) WITH ORDINALITY AS i (scope, key, lock, token, n) WHERE {OWNED}"
                ),
            ),
            try_lock: sql(
                &[Type::INT8_ARRAY],
                "SELECT i.n FROM unnest($1) WITH ORDINALITY AS i (lock, n)
                 WHERE pg_try_advisory_xact_lock(i.lock)"
                    .into(),
            ),
            lock: sql(&[Type::INT8], "SELECT pg_advisory_xact_lock($1)".into()),
            read: sql(
                &[Type::TEXT_ARRAY, Type::TEXT_ARRAY],
                format!(
                    "SELECT i.n, {COLUMNS} FROM unnest($1, $2) WITH ORDINALITY AS i (scope, key, n)
                     JOIN {table} AS t ON t.scope = i.scope AND t.key = i.key"
                ),
            ),
            put: put(table),
            delete: sql(
                &[Type::TEXT_ARRAY, Type::TEXT_ARRAY],
                format!(
                    "DELETE FROM {table} AS t USING unnest($1, $2) AS i (scope, key)
                     WHERE t.scope = i.scope AND t.key = i.key"
                ),
            ),
        }
    }
}

#[rustfmt::skip]
fn put(table: &str) -> Sql {
    Sql {
        types: &[
            Type::TEXT_ARRAY, Type::TEXT_ARRAY, Type::TEXT_ARRAY, Type::TEXT_ARRAY, Type::INT4_ARRAY, Type::BYTEA_ARRAY,
            Type::BYTEA_ARRAY, Type::TIMESTAMPTZ_ARRAY, Type::TIMESTAMPTZ_ARRAY, Type::TIMESTAMPTZ_ARRAY,
            Type::TIMESTAMPTZ_ARRAY, Type::TIMESTAMPTZ_ARRAY, Type::UUID_ARRAY, Type::INT8_ARRAY, Type::TEXT_ARRAY,
            Type::TEXT_ARRAY,
        ],
        text: Cow::Owned(format!(
            "INSERT INTO {table} AS t (scope, key, request_hash, status, response_code, response_headers, response_body,
                locked_until, created_at, claimed_at, completed_at, expires_at, token, attempt, on_lease_end, origin)
             SELECT * FROM unnest($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16)
             ON CONFLICT (scope, key) DO UPDATE SET request_hash = excluded.request_hash, status = excluded.status,
                response_code = excluded.response_code, response_headers = excluded.response_headers,
                response_body = excluded.response_body, locked_until = excluded.locked_until,
                created_at = excluded.created_at, claimed_at = excluded.claimed_at,
                completed_at = excluded.completed_at, expires_at = excluded.expires_at, token = excluded.token,
                attempt = excluded.attempt, on_lease_end = excluded.on_lease_end, origin = excluded.origin"
        )),
    }
}

/// The server's clock.
pub(crate) static NOW: Sql = Sql { text: Cow::Borrowed("SELECT clock_timestamp()"), types: &[] };
