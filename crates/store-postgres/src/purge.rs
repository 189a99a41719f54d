//! The purge: small transactions on a connection of their own, each walking an index from its oldest end.

use onlyonce_core::{CrashPoint, PurgeRequest, Purged, crash_point};
use parking_lot::Mutex;
use tokio_postgres::types::Type;

use crate::error::Fault;
use crate::row::{Micros, micros};
use crate::schema::Place;
use crate::session::{Call, Connections, Part, Session, Sql};

/// How many records one transaction removes: a few milliseconds.
const STEP_RECORDS: i64 = 500;

/// The statements of a purge, and how far it came.
#[derive(Debug)]
pub(crate) struct Purge {
    lanes: [Lane; 2],
    // One purge at a time in a process: two would only skip each other's rows.
    turn: tokio::sync::Mutex<()>,
}

/// Completed records by their expiry, or the others by their lease.
#[derive(Debug)]
struct Lane {
    remove: Sql,
    any: Sql,
    /// The moment of the last record that was removed. Until the vacuum comes the index still holds those before it:
    /// walking over them again at each step would make a long purge ever slower.
    from: Mutex<Option<Micros>>,
}

impl Purge {
    pub(crate) fn new(place: &Place) -> Self {
        let keys = place.keys();
        // `now()`, which is that of the statement here: a moment that changes cannot be looked up in an index.
        let over = "now() - $2 * interval '1 microsecond'";
        let lane = |status: &str, column: &str| {
            let which = format!(
                "status {status} AND {column} <= {over} AND {column} >= coalesce($1, '-infinity'::timestamptz)"
            );
            Lane {
                remove: Sql {
                    types: &[Type::TIMESTAMPTZ, Type::INT8, Type::INT8],
                    text: format!(
                        "WITH gone AS (DELETE FROM {keys} WHERE ctid = ANY (ARRAY(
                            SELECT ctid FROM {keys} WHERE {which} ORDER BY {column} LIMIT $3 FOR UPDATE SKIP LOCKED))
                            RETURNING {column} AS moment)
                         SELECT count(*), max(moment) FROM gone"
                    )
                    .into(),
                },
                any: Sql {
                    types: &[Type::TIMESTAMPTZ, Type::INT8],
                    text: format!("SELECT EXISTS (SELECT 1 FROM {keys} WHERE {which})").into(),
                },
                from: Mutex::new(None),
            }
        };
        let lanes = [lane("= 'completed'", "expires_at"), lane("<> 'completed'", "locked_until")];
        Self { lanes, turn: tokio::sync::Mutex::new(()) }
    }

    pub(crate) async fn run(
        &self,
        connections: &Connections,
        request: &PurgeRequest,
    ) -> Result<Purged, Fault> {
        let _turn = self.turn.lock().await;
        let mut session = connections.lend().await?;
        let spans = [0, micros(request.hold_retention)];
        let limit = u64::from(request.limit.max(1));
        let mut removed = 0;
        for (lane, span) in self.lanes.iter().zip(spans) {
            while removed < limit {
                let step = STEP_RECORDS.min(i64::try_from(limit - removed).unwrap_or(STEP_RECORDS));
                let count = lane.remove(&mut session, span, step).await?;
                removed += count;
                if count < step.unsigned_abs() && lane.start_over().is_none() {
                    break;
                }
            }
        }
        let mut more = false;
        for (lane, span) in self.lanes.iter().zip(spans) {
            more = more || (removed >= limit && lane.any(&mut session, span).await?);
        }
        Ok(Purged { removed, more, paused: false })
    }
}

impl Lane {
    async fn remove(&self, session: &mut Session<'_>, span: i64, step: i64) -> Result<u64, Fault> {
        let from = *self.from.lock();
        let call = Call::new(&self.remove, vec![&from, &span, &step]);
        crash_point(CrashPoint::PurgeBefore);
        let results = session.run(&[call], Part::Whole).await?;
        crash_point(CrashPoint::PurgeAfter);
        let row = results
            .first()
            .and_then(|rows| rows.first())
            .ok_or_else(|| Fault::internal("a purge without an answer"))?;
        if let Some(last) = row.try_get(1)? {
            *self.from.lock() = Some(last);
        }
        Ok(u64::try_from(row.try_get::<_, i64>(0)?).unwrap_or(0))
    }

    async fn any(&self, session: &mut Session<'_>, span: i64) -> Result<bool, Fault> {
        let from = *self.from.lock();
        for from in [from, None] {
            let results = session.run(&[Call::new(&self.any, vec![&from, &span])], Part::Whole).await?;
            let row = results.first().and_then(|rows| rows.first());
            if row.map(|row| row.try_get(0)).transpose()?.unwrap_or(false) {
                return Ok(true);
            }
            if from.is_none() {
                break;
            }
        }
        Ok(false)
    }

    /// At the end of the walk: what came in before its place, or was skipped, is found by the next one.
    fn start_over(&self) -> Option<Micros> {
        self.from.lock().take()
    }
}
