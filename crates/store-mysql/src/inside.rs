//! The statements of a claim inside a transaction of the caller's.

use std::time::Duration;

use onlyonce_core::{Acquire, LeaseToken, OnLeaseEnd, Operation, Origin};

use crate::backend::Backend;
use crate::claims::push_ids;
use crate::error::{Fault, code};
use crate::guard::Transaction;
use crate::row::{AT_US, NOW_ANYWHERE, Row, cells, columns, policy_text};
use crate::schema::Tables;
use crate::session::Changed;
use crate::sql::Sql;

/// What to do once the claim is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Then {
    Nothing,
    /// Begin what a failure takes back.
    Work,
    /// The same; but a new record that took longer than this was waited for, and is given up to be claimed anew. Who waits for
    /// a record that is then taken back has its lock left on the gap, which would keep other keys waiting for all of the work.
    WorkWithin(Duration),
}

pub(crate) const SAVE_WORK: &str = "SAVEPOINT onlyonce_work";
pub(crate) const UNDO_WORK: &str = "ROLLBACK TO SAVEPOINT onlyonce_work";

// The session's own patience for locks, while the claim's holds.
const PATIENT: &str =
    "SET @onlyonce_patience = @@session.innodb_lock_wait_timeout, SESSION innodb_lock_wait_timeout = ";
const AS_BEFORE: &str = "SET SESSION innodb_lock_wait_timeout = \
    IFNULL(@onlyonce_patience, @@session.innodb_lock_wait_timeout), @onlyonce_patience = NULL";

pub(crate) fn new_token() -> Result<LeaseToken, Fault> {
    let mut token = [0; 16];
    getrandom::fill(&mut token).map_err(|error| Fault::internal("no random bytes").with_source(error))?;
    Ok(LeaseToken::from_bytes(token))
}

// What the server waits for a lock, in its unit.
fn whole_seconds(wait: Duration) -> u64 {
    (wait.as_secs() + u64::from(wait.subsec_nanos() > 0)).min(3600)
}

// The record, up to its values.
fn insert(tables: &Tables) -> Sql {
    Sql::new(format!(
        "INSERT INTO {} (scope, `key`, request_hash, status, locked_until, created_at, claimed_at, token, attempt, \
         on_lease_end, origin) ",
        tables.keys
    ))
}

fn push_values(sql: &mut Sql, operation: &Operation, token: LeaseToken) {
    sql.value(operation.scope().as_str()).push(", ").value(operation.key().as_str()).push(", ");
    sql.value(operation.fingerprint().to_string());
    sql.push(&format!(", 'in_progress', {NOW_ANYWHERE}, {NOW_ANYWHERE}, {NOW_ANYWHERE}, "));
    sql.value(&token.as_bytes()[..]).push(", 1, '").push(policy_text(OnLeaseEnd::Hold)).push("', ");
    sql.value(operation.origin().map(Origin::as_str));
}

// The usual case by one statement: a new key, on a connection to the store's server. False where that is not the case, or the
// server cannot say so by one: then nothing is known yet, but a record that is there is locked.
pub(crate) async fn insert_new(
    tx: &mut Transaction<'_>,
    backend: &Backend,
    operation: &Operation,
    token: LeaseToken,
    wait: Duration,
    then: Then,
) -> Result<bool, Fault> {
    if !backend.set_statement {
        return Ok(false);
    }
    let mut sql = insert(&backend.tables);
    sql.push("SELECT ");
    push_values(&mut sql, operation, token);
    sql.push(" FROM ").push(&backend.tables.meta).push(" WHERE id = 1 AND store_id = ");
    sql.value(&backend.store_id[..]);
    // It changes nothing, and tells a 1 where there was a record: the number of rows would not, on a connection of the
    // caller's that counts the rows that were found (CLIENT_FOUND_ROWS).
    sql.push(" ON DUPLICATE KEY UPDATE attempt = attempt + 0 * LAST_INSERT_ID(1)");
    let wait = format!("SET STATEMENT innodb_lock_wait_timeout = {} FOR ", whole_seconds(wait));
    let sql = wait + &sql.inlined();
    let changed = match then {
        Then::Nothing => tx.change(&[&sql]).await,
        Then::Work | Then::WorkWithin(_) => tx.change(&[&sql, SAVE_WORK]).await,
    };
    let changed = changed.map_err(unless_another)?;
    Ok(changed == Changed { rows: 1, told: None })
}

fn another() -> Fault {
    Fault::unfit("the connection is to another server than the store's")
}

// Where the tables are not there, or not for this user.
fn unless_another(fault: Fault) -> Fault {
    match fault.code() {
        code::NO_TABLE | 1049 | 1044 => another().with_source(fault.into_error("claim")),
        // Which one the server's own words tell, below.
        code::NO_RIGHT => Fault::unfit(
            "the user of this connection lacks a right: grant SELECT, INSERT and UPDATE on the store's idempotency_keys and \
             SELECT on its idempotency_meta; or it is a connection to another server than the store's",
        )
        .with_source(fault.into_error("claim")),
        _ => fault,
    }
}

// Inserts the record, or locks the one that is there: all statements at once. Never a locking read of a row that may be
// missing: under REPEATABLE READ that would lock the gap, and with it other keys.
pub(crate) async fn take(
    tx: &mut Transaction<'_>,
    backend: &Backend,
    operation: &Operation,
    token: LeaseToken,
    wait: Duration,
    then: Then,
) -> Result<Row, Fault> {
    let Tables { keys, meta, .. } = &*backend.tables;
    let mut insert = insert(&backend.tables);
    insert.push("VALUES (");
    push_values(&mut insert, operation, token);
    insert.push(") ON DUPLICATE KEY UPDATE attempt = attempt");
    let mut select =
        Sql::new(format!("SELECT {} FROM {keys} FORCE INDEX (PRIMARY) WHERE ", columns(NOW_ANYWHERE, true)));
    push_ids(&mut select, std::iter::once(operation.id()));
    select.push(" FOR UPDATE");
    let mut statements = vec![
        format!("SELECT store_id FROM {meta} WHERE id = 1"),
        format!("{PATIENT}{}", whole_seconds(wait)),
        insert.inlined(),
        select.inlined(),
        AS_BEFORE.to_owned(),
    ];
    if then != Then::Nothing {
        statements.push(SAVE_WORK.to_owned());
    }
    let mut sets = match tx.script(&statements).await.map_err(unless_another) {
        Ok(sets) => sets.into_iter(),
        Err(fault) => {
            if !tx.is_broken() {
                tx.run_always(AS_BEFORE).await?;
            }
            return Err(fault);
        }
    };
    let named = sets.next().into_iter().flatten().next().ok_or_else(another)?;
    if cells(named).maybe_bytes("store_id")?.as_deref() != Some(&backend.store_id[..]) {
        return Err(another());
    }
    let found = sets.nth(2).into_iter().flatten().next();
    let row = found.ok_or_else(|| Fault::internal("a record that was just locked is not there"))?;
    Row::read(row)
}

// What makes a record that was there this claim's.
pub(crate) fn put(
    tables: &Tables,
    operation: &Operation,
    row: &Row,
    token: LeaseToken,
    attempt: u32,
    how: Acquire,
) -> String {
    // Not REPLACE: under REPEATABLE READ it locks the gap before the row too, and with it other keys.
    let mut sql = Sql::new(format!("UPDATE {} SET request_hash = ", tables.keys));
    sql.value(operation.fingerprint().to_string());
    sql.push(", status = 'in_progress', response_code = NULL, response_headers = NULL, response_body = NULL, origin = ");
    sql.value(operation.origin().map(Origin::as_str));
    sql.push(", token = ").value(&token.as_bytes()[..]).push(", attempt = ").value(attempt);
    sql.push(", on_lease_end = ").value(policy_text(OnLeaseEnd::Hold));
    let created_us = if how == Acquire::Fresh { row.now_us } else { row.created_us };
    for (column, at) in [("locked_until", row.now_us), ("created_at", created_us), ("claimed_at", row.now_us)]
    {
        sql.push(", ").push(column).push(" = ").push(AT_US).bind(at);
    }
    sql.push(", completed_at = NULL, expires_at = NULL WHERE ");
    push_ids(&mut sql, std::iter::once(operation.id()));
    sql.inlined()
}
