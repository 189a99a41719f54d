//! What each operation does to its record, inside a transaction that somebody else began and will commit.
//!
//! The usual case is one statement; when it changed nothing, the record is read and `decide…` says what to do. Each
//! operation makes at most one change, so a failed one leaves nothing half done.

use std::time::Duration;

use onlyonce_core::{
    Acquire, ClaimOutcome, ClaimRequest, CompleteDecision, CompleteOutcome, Completion, Decision, Lease,
    LeaseToken, Mutant, OnLeaseEnd, Operation, Origin, ReleaseDecision, ReleaseOutcome, RenewDecision,
    RenewOutcome, State, StateName, StoreErrorKind, decide, decide_complete, decide_release, decide_renew,
    mutant,
};
use rusqlite::{Connection, params};

use crate::boot::Now;
use crate::error::Fault;
use crate::row::{Done, HashText, NewRow, Row, policy_text};

// The usual case of every owner's operation: its token, its own boot, not completed.
macro_rules! owned {
    ($before:literal) => {
        concat!(
            $before,
            " WHERE scope = ?1 AND key = ?2 AND token = ?3 AND clock = ?4 AND status IN ('in_progress', 'unknown')"
        )
    };
}

/// `kept` is the policy that goes into the record.
pub(crate) fn claim(
    conn: &Connection,
    now: &Now<'_>,
    operation: &Operation,
    hash: HashText,
    request: &ClaimRequest,
    kept: OnLeaseEnd,
) -> Result<ClaimOutcome, Fault> {
    let locked_ms = now.end(request.lease);
    let acquired =
        |attempt| ClaimOutcome::Acquired(Lease { token: request.token, attempt, duration: request.lease });
    let mut insert = conn.prepare_cached(
        "INSERT INTO main.idempotency_keys (scope, key, request_hash, status, locked_until, created_at, claimed_at,
            clock, token, attempt, on_lease_end, origin)
         VALUES (?1, ?2, ?3, 'in_progress', ?4, ?5, ?5, ?6, ?7, 1, ?8, ?9) ON CONFLICT (scope, key) DO NOTHING",
    )?;
    let inserted = insert.execute(params![
        operation.scope().as_str(),
        operation.key().as_str(),
        hash.as_str(),
        locked_ms,
        now.ms(),
        now.clock(),
        request.token.as_bytes(),
        policy_text(kept),
        operation.origin().map(Origin::as_str),
    ])?;
    if inserted == 1 {
        return Ok(acquired(1));
    }
    let row = Row::find(conn, now, operation.id())?.ok_or_else(|| {
        Fault::new(StoreErrorKind::Internal, "a record is in the index of the table and not in the table")
    })?;
    let mutated = mutant(Mutant::UniqueDropped)
        || mutant(Mutant::CheckThenInsert)
            && matches!(row.record.state, State::InProgress { age, .. } if age < Duration::from_millis(50));
    let (attempt, how) = if mutated {
        (1, Acquire::Fresh)
    } else {
        match decide(Some(&row.record), operation.fingerprint(), request) {
            Decision::Answer(answer) => return Ok(answer),
            Decision::Acquire { attempt, how } => (attempt, how),
        }
    };
    let taken = NewRow {
        id: operation.id(),
        hash,
        status: StateName::InProgress,
        locked_ms,
        created_ms: if how == Acquire::Fresh { now.ms() } else { row.created_ms },
        claimed_ms: if how == Acquire::Reentrant { row.claimed_ms } else { now.ms() },
        token: request.token,
        attempt,
        on_lease_end: kept,
        origin: operation.origin(),
        done: None,
    };
    taken.put(conn, now)?;
    Ok(acquired(attempt))
}

pub(crate) fn renew(
    conn: &Connection,
    now: &Now<'_>,
    operation: &Operation,
    token: LeaseToken,
    lease: Duration,
) -> Result<RenewOutcome, Fault> {
    let locked_ms = now.end(lease);
    let mut update = conn.prepare_cached(owned!(
        "UPDATE main.idempotency_keys SET status = 'in_progress', locked_until = ?5"
    ))?;
    let (scope, key) = (operation.scope().as_str(), operation.key().as_str());
    if update.execute(params![scope, key, token.as_bytes(), now.clock(), locked_ms])? == 1 {
        return Ok(RenewOutcome::Renewed);
    }
    let row = Row::find(conn, now, operation.id())?;
    Ok(match decide_renew(row.as_ref().map(|row| &row.record), &token) {
        RenewDecision::Ended => RenewOutcome::Ended,
        RenewDecision::Fenced => RenewOutcome::Fenced,
        RenewDecision::Gone => RenewOutcome::Gone,
        RenewDecision::Extend => {
            if let Some(row) = &row {
                NewRow { locked_ms, ..row.again(StateName::InProgress) }.put(conn, now)?;
            }
            RenewOutcome::Renewed
        }
    })
}

/// `head` is [`onlyonce_core::Reply::encode_head`] of the reply.
pub(crate) fn complete(
    conn: &Connection,
    now: &Now<'_>,
    operation: &Operation,
    head: &[u8],
    completion: &Completion,
) -> Result<CompleteOutcome, Fault> {
    let done = Done {
        reply: &completion.reply,
        head,
        completed_ms: now.ms(),
        expires_ms: now.end(completion.retention),
    };
    let mut update = conn.prepare_cached(owned!(
        "UPDATE main.idempotency_keys SET status = 'completed', response_code = ?5, response_headers = ?6,
            response_body = ?7, completed_at = ?8, expires_at = ?9"
    ))?;
    let updated = update.execute(params![
        operation.scope().as_str(),
        operation.key().as_str(),
        completion.token.as_bytes(),
        now.clock(),
        done.reply.status(),
        head,
        &done.reply.body()[..],
        done.completed_ms,
        done.expires_ms,
    ])?;
    let stored = |origin| done.stored(completion.retention, origin);
    if updated == 1 {
        // An owner completes the operation that it claimed, so its origin is the record's.
        return Ok(CompleteOutcome::Stored(stored(operation.origin())));
    }
    let row = Row::find(conn, now, operation.id())?;
    let decision =
        decide_complete(row.as_ref().map(|row| &row.record), operation.fingerprint(), &completion.token);
    match (decision, row) {
        (CompleteDecision::Fenced(reply), _) => Ok(CompleteOutcome::Fenced(reply)),
        (CompleteDecision::AlreadyStored, Some(Row { record, .. })) => match record.state {
            State::Completed { stored, .. } => Ok(CompleteOutcome::AlreadyStored(stored)),
            _ => Err(Fault::new(StoreErrorKind::Internal, "stored already, and not completed")),
        },
        (CompleteDecision::Write, Some(row)) => {
            NewRow { done: Some(done), ..row.again(StateName::Completed) }.put(conn, now)?;
            Ok(CompleteOutcome::Stored(stored(row.record.origin.as_ref())))
        }
        (CompleteDecision::WriteAnew | CompleteDecision::Write | CompleteDecision::AlreadyStored, _) => {
            let anew = NewRow {
                id: operation.id(),
                hash: HashText::of(operation.fingerprint()),
                status: StateName::Completed,
                locked_ms: now.ms(),
                created_ms: now.ms(),
                claimed_ms: now.ms(),
                token: completion.token,
                attempt: completion.attempt,
                on_lease_end: OnLeaseEnd::Hold,
                origin: operation.origin(),
                done: Some(done),
            };
            anew.put(conn, now)?;
            Ok(CompleteOutcome::StoredAnew(stored(operation.origin())))
        }
    }
}

pub(crate) fn release(
    conn: &Connection,
    now: &Now<'_>,
    operation: &Operation,
    token: LeaseToken,
) -> Result<ReleaseOutcome, Fault> {
    // A release may come from the owner's former boot: the clock does not matter here.
    let mut delete = conn.prepare_cached(
        "DELETE FROM main.idempotency_keys
         WHERE scope = ?1 AND key = ?2 AND token = ?3 AND status IN ('in_progress', 'unknown')",
    )?;
    let (scope, key) = (operation.scope().as_str(), operation.key().as_str());
    if delete.execute(params![scope, key, token.as_bytes()])? == 1 {
        return Ok(ReleaseOutcome::Applied);
    }
    let row = Row::find(conn, now, operation.id())?;
    Ok(match decide_release(row.as_ref().map(|row| &row.record), &token) {
        ReleaseDecision::Absent => ReleaseOutcome::Absent,
        ReleaseDecision::Fenced => ReleaseOutcome::Fenced,
        ReleaseDecision::Apply => {
            return Err(Fault::new(StoreErrorKind::Internal, "a record that its owner may release stayed"));
        }
    })
}

pub(crate) fn mark_unknown(
    conn: &Connection,
    now: &Now<'_>,
    operation: &Operation,
    token: LeaseToken,
) -> Result<ReleaseOutcome, Fault> {
    let mut update = conn.prepare_cached(owned!(
        "UPDATE main.idempotency_keys SET status = 'unknown', locked_until = min(locked_until, ?5)"
    ))?;
    let (scope, key) = (operation.scope().as_str(), operation.key().as_str());
    if update.execute(params![scope, key, token.as_bytes(), now.clock(), now.ms()])? == 1 {
        return Ok(ReleaseOutcome::Applied);
    }
    let row = Row::find(conn, now, operation.id())?;
    Ok(match decide_release(row.as_ref().map(|row| &row.record), &token) {
        ReleaseDecision::Absent => ReleaseOutcome::Absent,
        ReleaseDecision::Fenced => ReleaseOutcome::Fenced,
        ReleaseDecision::Apply => {
            if let Some(row) = &row {
                let locked_ms = row.locked_ms.min(now.ms());
                NewRow { locked_ms, ..row.again(StateName::Unknown) }.put(conn, now)?;
            }
            ReleaseOutcome::Applied
        }
    })
}
