//! What the operations of a batch do in the usual case: one statement for all of a kind, a transaction of its own.
//!
//! Whatever is not usual (a takeover, an expired record, somebody's lock) is left for [`locked`](crate::locked), where the
//! rows are locked, read, decided on and written.

use std::collections::HashMap;
use std::time::Duration;

use mysql_async::Value;
use onlyonce_batch::{Answer, Ask, Job};
use onlyonce_core::{
    Acquire, ClaimOutcome, ClaimRequest, Clock, CompleteOutcome, Completion, Decision, Lease, LeaseToken,
    LeaseView, OnLeaseEnd, Operation, OperationId, Origin, Record, ReleaseOutcome, RenewOutcome, State,
    StoredReply, SystemClock, decide,
};

use crate::error::Fault;
use crate::row::{Row, columns, policy_text, us, wall};
use crate::schema::Tables;
use crate::session::{Changed, Session};
use crate::sql::Sql;

/// The answer to each job of a kind; `None` where it is not the usual case and nothing was done.
pub(crate) type Usual = Vec<Option<Result<Answer, Fault>>>;

/// Prepared statements have one of these numbers of rows: a statement for each number would be too many to keep.
const SIZES: [usize; 16] = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256];

/// Fresh claims are inserted. What was there already is read and decided on.
pub(crate) async fn claim(
    session: &mut Session<'_>,
    tables: &Tables,
    jobs: &[(&Job, &ClaimRequest)],
    prepare: bool,
) -> Result<Usual, Fault> {
    let sent_at = SystemClock.boot();
    // An INSERT IGNORE would ignore more than duplicates. `attempt = attempt` changes nothing, and is not counted.
    let mut sql = Sql::new(format!(
        "INSERT INTO {} (scope, `key`, request_hash, status, locked_until, created_at, claimed_at, token, attempt, \
         on_lease_end, origin) VALUES ",
        tables.keys
    ));
    for (n, (job, request)) in padded(jobs, prepare).enumerate() {
        let operation = job.operation();
        sql.push(if n == 0 { "(" } else { ", (" });
        sql.value(operation.scope().as_str()).push(", ").value(operation.key().as_str()).push(", ");
        sql.value(operation.fingerprint().to_string()).push(", 'in_progress', SYSDATE(6) + INTERVAL ");
        sql.value(us(request.lease)).push(" MICROSECOND, SYSDATE(6), SYSDATE(6), ");
        sql.value(&request.token.as_bytes()[..]).push(", 1, ");
        sql.value(policy_text(request.on_lease_end)).push(", ");
        sql.value(operation.origin().map(Origin::as_str)).push(")");
    }
    sql.push(" ON DUPLICATE KEY UPDATE attempt = attempt");
    if session.change(sql).await?.rows == jobs.len() as u64 {
        return Ok(jobs.iter().map(|(_, request)| Some(Ok(acquired(request, 1)))).collect());
    }
    let found = find(session, tables, jobs.iter().map(|(job, _)| job.id())).await?;
    let since_sent = SystemClock.boot().saturating_sub(sent_at);
    Ok(jobs
        .iter()
        .map(|(job, request)| match found.get(job.id())? {
            Err(fault) => Some(Err(fault.clone())),
            Ok(row) => match decide(Some(&row.record), job.operation().fingerprint(), request) {
                Decision::Answer(answer) => Some(Ok(Answer::Claim(answer))),
                Decision::Acquire { attempt, how: Acquire::Reentrant }
                    if is_as_asked(&row.record, job.operation(), request, since_sent) =>
                {
                    Some(Ok(acquired(request, attempt)))
                }
                Decision::Acquire { .. } => None,
            },
        })
        .collect())
}

/// Owned records are completed, and lost ones written anew, by one statement. It tells the time that it wrote.
pub(crate) async fn complete(
    session: &mut Session<'_>,
    tables: &Tables,
    jobs: &[(&Job, &Completion, &Vec<u8>)],
    prepare: bool,
) -> Result<Usual, Fault> {
    let mut sql = Sql::new(format!(
        "INSERT INTO {} (scope, `key`, request_hash, status, response_code, response_headers, response_body, origin, \
         token, attempt, on_lease_end, locked_until, created_at, claimed_at, completed_at, expires_at) VALUES ",
        tables.keys
    ));
    // Unlike SYSDATE it is one time for all rows of the statement, which is told back with its answer. It stands still
    // while the statement waits, but nothing here is waited for.
    const NOW: &str = "UTC_TIMESTAMP(6)";
    for (n, (job, completion, head)) in padded(jobs, prepare).enumerate() {
        let operation = job.operation();
        sql.push(if n == 0 { "(" } else { ", (" });
        sql.value(operation.scope().as_str()).push(", ").value(operation.key().as_str()).push(", ");
        sql.value(operation.fingerprint().to_string()).push(", 'completed', ");
        sql.value(completion.reply.status()).push(", ").value(head.as_slice()).push(", ");
        sql.value(&completion.reply.body()[..]).push(", ");
        sql.value(operation.origin().map(Origin::as_str)).push(", ");
        sql.value(&completion.token.as_bytes()[..]).push(", ").value(completion.attempt).push(", 'hold', ");
        sql.push(match n {
            0 => {
                "TIMESTAMPADD(MICROSECOND, LAST_INSERT_ID(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))), \
                 '1970-01-01')"
            }
            _ => NOW,
        });
        for _ in 0..3 {
            sql.push(", ").push(NOW);
        }
        sql.push(", ").push(NOW).push(" + INTERVAL ").value(us(completion.retention)).push(" MICROSECOND)");
    }
    sql.push(" ON DUPLICATE KEY UPDATE ");
    // From left to right, each seeing what came before: the status last.
    for (n, column) in
        ["response_code", "response_headers", "response_body", "completed_at", "expires_at", "status"]
            .iter()
            .enumerate()
    {
        sql.push(if n == 0 { "" } else { ", " });
        sql.push(&format!(
            "{column} = IF(token = VALUES(token) AND status IN ('in_progress', 'unknown'), VALUES({column}), {column})"
        ));
    }
    let changed = session.change(sql).await?;
    let at_us = changed.told.and_then(|us| i64::try_from(us).ok()).unwrap_or(0);
    let stored = |job: &Job, completion: &Completion| StoredReply {
        reply: completion.reply.clone(),
        completed_at: wall(at_us),
        expires_at: wall(at_us.saturating_add_unsigned(us(completion.retention))),
        remaining: completion.retention,
        // An owner completes the operation that it claimed, so its origin is the record's.
        origin: job.operation().origin().cloned(),
    };
    // A changed row counts two, an inserted one counts one, any other none.
    if at_us > 0 && changed.rows == 2 * jobs.len() as u64 {
        let all = jobs.iter().map(|(job, completion, _)| CompleteOutcome::Stored(stored(job, completion)));
        return Ok(all.map(|outcome| Some(Ok(Answer::Complete(outcome)))).collect());
    }
    let found = find(session, tables, jobs.iter().map(|(job, ..)| job.id())).await?;
    Ok(jobs
        .iter()
        .map(|(job, completion, _)| match found.get(job.id())? {
            Err(fault) => Some(Err(fault.clone())),
            Ok(row) => match &row.record.state {
                // Ours, of this moment: what was stored before has an earlier time.
                State::Completed { token, stored: found } if *token == completion.token => {
                    let outcome = match found.completed_at == wall(at_us) {
                        false => CompleteOutcome::AlreadyStored(found.clone()),
                        true if row.created_us == at_us => {
                            CompleteOutcome::StoredAnew(stored(job, completion))
                        }
                        true => CompleteOutcome::Stored(stored(job, completion)),
                    };
                    (!row.record.is_expired()).then_some(Ok(Answer::Complete(outcome)))
                }
                _ => None,
            },
        })
        .collect())
}

/// Leases of one length start anew.
pub(crate) async fn renew(
    session: &mut Session<'_>,
    tables: &Tables,
    jobs: &[&Job],
    lease: Duration,
) -> Result<Usual, Fault> {
    let mut sql = Sql::new(format!(
        "UPDATE {} FORCE INDEX (PRIMARY) SET status = 'in_progress', locked_until = SYSDATE(6) + INTERVAL ",
        tables.keys
    ));
    sql.value(us(lease)).push(" MICROSECOND WHERE ");
    push_owned(&mut sql, jobs);
    Ok(all_or_none(session.change(sql).await?, jobs, &Answer::Renew(RenewOutcome::Renewed)))
}

/// Leases end now, and nobody may run the operations again.
pub(crate) async fn mark_unknown(
    session: &mut Session<'_>,
    tables: &Tables,
    jobs: &[&Job],
) -> Result<Usual, Fault> {
    let mut sql = Sql::new(format!(
        "UPDATE {} FORCE INDEX (PRIMARY) SET status = 'unknown', locked_until = LEAST(locked_until, SYSDATE(6)) WHERE ",
        tables.keys
    ));
    push_owned(&mut sql, jobs);
    Ok(all_or_none(session.change(sql).await?, jobs, &Answer::Release(ReleaseOutcome::Applied)))
}

/// Owned records go.
pub(crate) async fn release(
    session: &mut Session<'_>,
    tables: &Tables,
    jobs: &[&Job],
) -> Result<Usual, Fault> {
    let owned = jobs.iter().filter_map(|job| Some((job.id(), Some(token_of(job)?))));
    let changed = session.change_unprepared(delete(tables, owned, NOT_COMPLETED)).await?;
    Ok(all_or_none(changed, jobs, &Answer::Release(ReleaseOutcome::Applied)))
}

/// Returns when all that was committed before is on disk: the log is written up to a commit of its own, of a row that comes
/// and goes in one transaction. No key holds a control character, so it meets no record.
pub(crate) async fn write_log(session: &mut Session<'_>, tables: &Tables) -> Result<(), Fault> {
    let mut nonce = [0; 16];
    getrandom::fill(&mut nonce).map_err(|error| Fault::internal("no random bytes").with_source(error))?;
    let mut insert = Sql::new(format!(
        "INSERT INTO {} (scope, `key`, request_hash, status, locked_until, created_at, claimed_at, token, attempt, \
         on_lease_end) VALUES ('\u{1}', ",
        tables.keys
    ));
    insert.value(&nonce[..]).push(", '', '', SYSDATE(6), SYSDATE(6), SYSDATE(6), ");
    insert.value(&nonce[..]).push(", 0, '')");
    let mut delete = Sql::new(format!("DELETE FROM {} WHERE scope = '\u{1}' AND `key` = ", tables.keys));
    delete.value(&nonce[..]);
    let statements = ["START TRANSACTION".into(), insert.inlined(), delete.inlined(), "COMMIT".into()];
    session.begun();
    let written = session.script(&statements).await;
    match written {
        Ok(_) => session.ended(),
        Err(_) => session.roll_back().await,
    }
    written.map(drop)
}

// When all were changed, each was. Else it is not known which; to do it once more changes nothing.
fn all_or_none(changed: Changed, jobs: &[&Job], answer: &Answer) -> Usual {
    let all = changed.rows == jobs.len() as u64;
    jobs.iter().map(|_| all.then(|| Ok(answer.clone()))).collect()
}

/// Reads the records of these operations, without locks.
pub(crate) async fn find<'j>(
    session: &mut Session<'_>,
    tables: &Tables,
    ids: impl Iterator<Item = &'j OperationId>,
) -> Result<HashMap<OperationId, Result<Row, Fault>>, Fault> {
    let mut sql = Sql::new(format!(
        "SELECT {} FROM {} FORCE INDEX (PRIMARY) WHERE ",
        columns(crate::row::NOW, true),
        tables.keys
    ));
    push_ids(&mut sql, ids);
    session.rows(&sql).await?.into_iter().map(by_id).collect()
}

/// A row by the operation it is of, whether it can be read or not.
pub(crate) fn by_id(row: mysql_async::Row) -> Result<(OperationId, Result<Row, Fault>), Fault> {
    let cells: Vec<Option<Value>> = (0..2).map(|n| row.as_ref(n).cloned()).collect();
    let id = crate::row::Cells(cells.into_iter()).id()?;
    Ok((id, Row::read(row)))
}

/// The condition that a row is of one of these operations.
pub(crate) fn push_ids<'j>(sql: &mut Sql, ids: impl Iterator<Item = &'j OperationId>) {
    for (n, id) in ids.enumerate() {
        sql.push(if n == 0 { "((scope = " } else { " OR (scope = " }).value(id.scope.as_str());
        sql.push(" AND `key` = ").value(id.key.as_str()).push(")");
    }
    sql.push(")");
}

/// Removes the records of these operations, with this token where one is given.
///
/// From a list of names to one row each: a condition alone makes the server read all rows of a scope, and lock them.
pub(crate) fn delete<'j>(
    tables: &Tables,
    rows: impl Iterator<Item = (&'j OperationId, Option<LeaseToken>)>,
    condition: &str,
) -> Sql {
    let mut sql = Sql::new("DELETE k FROM (");
    for (n, (id, token)) in rows.enumerate() {
        sql.push(if n == 0 { "SELECT " } else { " UNION ALL SELECT " }).value(id.scope.as_str());
        sql.push(if n == 0 { " AS scope, " } else { ", " }).value(id.key.as_str());
        sql.push(if n == 0 { " AS `key`, " } else { ", " })
            .value(token.map(|token| token.as_bytes().to_vec()));
        sql.push(if n == 0 { " AS token" } else { "" });
    }
    sql.push(&format!(
        ") AS named STRAIGHT_JOIN {} AS k ON k.scope = named.scope AND k.`key` = named.`key` \
         WHERE (named.token IS NULL OR k.token = named.token) AND {condition}",
        tables.keys
    ));
    sql
}

// The usual case of every owner's operation: its token, and not completed.
fn push_owned(sql: &mut Sql, jobs: &[&Job]) {
    for (n, job) in jobs.iter().enumerate() {
        let Some(token) = token_of(job) else { continue };
        sql.push(if n == 0 { "((scope = " } else { " OR (scope = " }).value(job.id().scope.as_str());
        sql.push(" AND `key` = ").value(job.id().key.as_str());
        sql.push(" AND token = ").value(&token.as_bytes()[..]).push(")");
    }
    sql.push(") AND ").push(NOT_COMPLETED);
}

/// The condition that a record has no reply, and was not freed.
pub(crate) const NOT_COMPLETED: &str = "status IN ('in_progress', 'unknown')";

fn token_of(job: &Job) -> Option<LeaseToken> {
    match job.ask() {
        Ask::Renew { token, .. } | Ask::Release(token) | Ask::MarkUnknown(token) => Some(*token),
        Ask::Claim(_) | Ask::Complete { .. } => None,
    }
}

// The last one again and again, up to one of the sizes: the second time it changes nothing, and is not counted.
fn padded<T: Copy>(jobs: &[T], pad: bool) -> impl Iterator<Item = T> {
    let size = match pad {
        true => SIZES.iter().copied().find(|size| *size >= jobs.len()).unwrap_or(jobs.len()),
        false => jobs.len(),
    };
    let last = jobs.last().copied();
    (0..size).filter_map(move |n| jobs.get(n).copied().or(last))
}

fn acquired(request: &ClaimRequest, attempt: u32) -> Answer {
    Answer::Claim(ClaimOutcome::Acquired(Lease { token: request.token, attempt, duration: request.lease }))
}

/// Whether the owner's record is what this claim would write: written by its own statement, or by an earlier try a moment
/// ago. It lasts as long as it must, counted from before the statement was sent, and no longer than was asked for: a lease
/// that the owner had for longer is still to be shortened.
fn is_as_asked(record: &Record, operation: &Operation, request: &ClaimRequest, since_sent: Duration) -> bool {
    let State::InProgress { lease: LeaseView::Left(left), .. } = record.state else { return false };
    left <= request.lease
        && left + since_sent >= request.lease
        && record.on_lease_end == request.on_lease_end
        && record.origin.as_ref() == operation.origin()
}

/// The policy of a record that was written anew: whoever lost it may not be there any more.
pub(crate) const ANEW: OnLeaseEnd = OnLeaseEnd::Hold;
