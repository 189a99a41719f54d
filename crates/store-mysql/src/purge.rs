//! The purge: short transactions on rows that nobody holds.

use std::time::Duration;

use onlyonce_core::{CrashPoint, PurgeRequest, Purged, crash_point};

use crate::backend::Backend;
use crate::claims::delete;
use crate::error::Fault;
use crate::row::{NOW, cells, us};
use crate::session::{Session, skip_locked};
use crate::sql::Sql;

/// How many records one transaction removes: a few milliseconds of locks on rows that are over.
const STEP_RECORDS: u64 = 250;

pub(crate) async fn purge(backend: &Backend, request: &PurgeRequest) -> Result<Purged, Fault> {
    let limit = u64::from(request.limit.max(1));
    let mut session = backend.pool.lend().await?;
    let mut removed = 0;
    for over in [completed(), unfinished(request.hold_retention)] {
        while removed < limit {
            let step = STEP_RECORDS.min(limit - removed);
            let of_step = remove_some(&mut session, backend, &over, step).await?;
            removed += of_step;
            if of_step < step {
                break;
            }
        }
    }
    let mut more = false;
    if removed >= limit {
        for over in [completed(), unfinished(request.hold_retention)] {
            let sql = format!("SELECT 1 FROM {} {over} LIMIT 1", backend.tables.keys);
            more |= !session.rows(&Sql::new(sql)).await?.is_empty();
        }
    }
    Ok(Purged { removed, more, paused: false })
}

// Each walks the index from its oldest end, so the cost is that of what is removed.
const BY_END: &str = "FORCE INDEX (idempotency_keys_over) WHERE";

fn completed() -> String {
    format!("{BY_END} expires_at <= {NOW}")
}

fn unfinished(hold: Duration) -> String {
    let hold_us = us(hold);
    format!("{BY_END} expires_at IS NULL AND locked_until <= {NOW} - INTERVAL {hold_us} MICROSECOND")
}

async fn remove_some(
    session: &mut Session<'_>,
    backend: &Backend,
    over: &str,
    limit: u64,
) -> Result<u64, Fault> {
    session.begun();
    let done = remove_locked(session, backend, over, limit).await;
    match done {
        Ok(removed) => {
            session.ended();
            Ok(removed)
        }
        Err(fault) => {
            session.roll_back().await;
            Err(fault)
        }
    }
}

async fn remove_locked(
    session: &mut Session<'_>,
    backend: &Backend,
    over: &str,
    limit: u64,
) -> Result<u64, Fault> {
    let keys = &backend.tables.keys;
    let [wait, select, no_wait] =
        skip_locked(&format!("SELECT scope, `key` FROM {keys} {over} LIMIT {limit}"));
    let found =
        session.script(&["START TRANSACTION".into(), wait, select, no_wait]).await?.into_iter().nth(2);
    let found: Vec<_> =
        found.unwrap_or_default().into_iter().map(|row| cells(row).id()).collect::<Result<_, _>>()?;
    let mut statements = Vec::new();
    if !found.is_empty() {
        statements.push(delete(&backend.tables, found.iter().map(|id| (id, None)), "TRUE").inlined());
    }
    statements.push("COMMIT".into());
    crash_point(CrashPoint::PurgeBefore);
    session.script(&statements).await?;
    crash_point(CrashPoint::PurgeAfter);
    Ok(found.len() as u64)
}
