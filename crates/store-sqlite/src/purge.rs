//! The purge: small transactions between the batches of the writer, so that claims never wait for long.

use std::time::Duration;

use onlyonce_core::{CrashPoint, Mutant, PurgeRequest, Purged, crash_point, mutant};
use rusqlite::{Connection, params};

use crate::boot::{Now, Parting};
use crate::error::Fault;
use crate::writer::{Answer, Chore, Session};

/// How many records one step removes: a millisecond or so.
const STEP_RECORDS: u32 = 100;

/// One call of [`purge`](onlyonce_core::Store::purge).
#[derive(Debug)]
pub(crate) struct Purge {
    request: PurgeRequest,
    removed: u64,
    answer: Option<Answer<Purged>>,
}

impl Purge {
    pub(crate) fn new(request: PurgeRequest, answer: Answer<Purged>) -> Self {
        Self { request, removed: 0, answer: Some(answer) }
    }

    // The answer, once there is nothing left to do.
    fn advance(&mut self, session: &Session<'_>) -> Result<Option<Purged>, Fault> {
        let timeline = &session.shared.timeline;
        session.read(|conn| timeline.refresh(conn))?;
        match timeline.parting() {
            Parting::Together => {}
            Parting::Parted => return Ok(Some(self.purged(true, true))),
            Parting::Stood => {
                tracing::warn!("the step of the wall clock has stood for an hour and is accepted");
                session.transaction(true, |conn, _| timeline.add_scale(conn))?;
                session.read(|conn| timeline.refresh(conn))?;
            }
        }
        let left = u64::from(self.request.limit.max(1)) - self.removed;
        let step = u32::try_from(left).unwrap_or(STEP_RECORDS).min(STEP_RECORDS);
        let hold = self.request.hold_retention;
        let removed = session.transaction(false, |conn, now| {
            let removed = remove_some(conn, now, hold, step)?;
            crash_point(CrashPoint::PurgeBefore);
            Ok(removed)
        })?;
        crash_point(CrashPoint::PurgeAfter);
        self.removed += removed;
        if removed < u64::from(step) {
            return Ok(Some(self.purged(false, false)));
        }
        if self.removed < u64::from(self.request.limit) {
            return Ok(None);
        }
        let more = session.read(|conn| any_over(conn, &timeline.now(), hold))?;
        Ok(Some(self.purged(more, false)))
    }

    fn purged(&self, more: bool, paused: bool) -> Purged {
        Purged { removed: self.removed, more: more && !paused, paused: paused && self.removed == 0 }
    }
}

impl Chore for Purge {
    fn step(&mut self, session: &Session<'_>) -> bool {
        if self.answer.as_ref().is_none_or(Answer::is_closed) {
            return false;
        }
        let result = match self.advance(session) {
            Ok(None) => return true,
            Ok(Some(purged)) => Ok(purged),
            Err(fault) => Err(fault.into_error("purge", &session.shared.path)),
        };
        // A caller that is gone needs no answer.
        self.answer.take().map(|answer| answer.send(result));
        false
    }
}

// Each statement walks its partial index from the oldest end: the cost is that of what it removes.
macro_rules! over {
    ($select:literal, $rest:literal) => {
        [
            concat!(
                $select,
                " FROM main.idempotency_keys INDEXED BY idempotency_keys_expiry
                 WHERE status = 'completed' AND clock = ?1 AND expires_at <= ?2 ",
                $rest
            ),
            concat!(
                $select,
                " FROM main.idempotency_keys INDEXED BY idempotency_keys_lease
                 WHERE status <> 'completed' AND clock = ?1 AND locked_until <= ?2 ",
                $rest
            ),
        ]
    };
}

fn remove_some(conn: &Connection, now: &Now<'_>, hold: Duration, limit: u32) -> Result<u64, Fault> {
    let [completed, unfinished] =
        over!("DELETE FROM main.idempotency_keys WHERE rowid IN (SELECT rowid", "LIMIT ?3)");
    let mut removed: u64 = 0;
    if mutant(Mutant::PurgeByAge) {
        let sql = "DELETE FROM main.idempotency_keys WHERE created_at <= ?1";
        return Ok(conn.execute(sql, params![now.ms() - 2000])? as u64);
    }
    for (clock, completed_until, unfinished_until) in ends(now, hold) {
        for (sql, until) in [(completed, completed_until), (unfinished, unfinished_until)] {
            let room = u64::from(limit).saturating_sub(removed);
            if room > 0 {
                removed += conn.prepare_cached(sql)?.execute(params![clock, until, room as i64])? as u64;
            }
        }
    }
    Ok(removed)
}

fn any_over(conn: &Connection, now: &Now<'_>, hold: Duration) -> Result<bool, Fault> {
    let [completed, unfinished] = over!("SELECT 1", "LIMIT 1");
    for (clock, completed_until, unfinished_until) in ends(now, hold) {
        for (sql, until) in [(completed, completed_until), (unfinished, unfinished_until)] {
            if conn.prepare_cached(sql)?.exists(params![clock, until])? {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

// For each scale: completed records that expired until then, and unfinished ones whose lease ended until then, are over.
fn ends(now: &Now<'_>, hold: Duration) -> impl Iterator<Item = (i64, i64, i64)> {
    let hold_ms = i64::try_from(hold.as_millis()).unwrap_or(i64::MAX);
    now.scales().iter().map(move |scale| {
        let until = now.ms_on(scale);
        (scale.id, until, until.saturating_sub(hold_ms))
    })
}
