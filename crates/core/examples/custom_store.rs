//! A store of your own, complete: a map behind a mutex.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use onlyonce_core::*;

/// `decide` and its sisters know the state machine. A store loads the record as it stands now, asks them, and writes what
/// they answer, all in one step that nobody can come between: here under the mutex, elsewhere in one transaction.
#[derive(Debug)]
pub struct MapStore {
    rows: Mutex<HashMap<OperationId, Row>>,
    clock: Arc<dyn Clock>,
}

// Moments are on the boot clock, which never steps.
#[derive(Clone, Debug)]
struct Row {
    fingerprint: Fingerprint,
    on_lease_end: OnLeaseEnd,
    attempt: u32,
    origin: Option<Origin>,
    token: LeaseToken,
    claimed: Duration,
    lease_end: Duration,
    kept: Kept,
}

#[derive(Clone, Debug)]
enum Kept {
    InProgress,
    Unknown,
    Completed { reply: Reply, completed_at: SystemTime, expires: Duration },
}

impl MapStore {
    /// An empty store.
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        Self { rows: Mutex::default(), clock }
    }

    // Runs one step on a row: what it is now, and the place to write it.
    fn step<T>(&self, operation: &Operation, step: impl FnOnce(Option<&Record>, &mut Option<Row>) -> T) -> T {
        let mut rows = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
        let mut row = rows.remove(operation.id());
        let record = row.as_ref().map(|row| self.record(row));
        let answer = step(record.as_ref(), &mut row);
        if let Some(row) = row {
            rows.insert(operation.id().clone(), row);
        }
        answer
    }

    fn record(&self, row: &Row) -> Record {
        let (token, now) = (row.token, self.clock.boot());
        let lease_left = row.lease_end.saturating_sub(now);
        let since = self.clock.wall() - now.saturating_sub(row.lease_end);
        let state = match &row.kept {
            Kept::Completed { reply, completed_at, expires } => State::Completed {
                token,
                stored: self.stored(reply, *completed_at, *expires, row.origin.clone()),
            },
            Kept::Unknown => State::Unknown { token, since },
            Kept::InProgress => {
                // Nothing left is over.
                let over = lease_left.is_zero();
                let lease = if over { LeaseView::Over { since } } else { LeaseView::Left(lease_left) };
                State::InProgress { token, lease, age: now - row.claimed }
            }
        };
        let Row { fingerprint, on_lease_end, attempt, .. } = *row;
        Record { fingerprint, on_lease_end, attempt, origin: row.origin.clone(), state }
    }

    fn stored(
        &self,
        reply: &Reply,
        completed_at: SystemTime,
        expires: Duration,
        origin: Option<Origin>,
    ) -> StoredReply {
        let remaining = expires.saturating_sub(self.clock.boot());
        let expires_at = self.clock.wall() + remaining;
        StoredReply { reply: reply.clone(), completed_at, expires_at, remaining, origin }
    }
}

#[async_trait::async_trait]
impl Store for MapStore {
    async fn claim(&self, operation: &Operation, request: &ClaimRequest) -> Result<ClaimOutcome, StoreError> {
        let now = self.clock.boot();
        Ok(self.step(operation, |record, row| match decide(record, operation.fingerprint(), request) {
            Decision::Answer(answer) => answer,
            Decision::Acquire { attempt, how } => {
                let claimed =
                    row.as_ref().filter(|_| how == Acquire::Reentrant).map_or(now, |row| row.claimed);
                *row = Some(Row {
                    fingerprint: *operation.fingerprint(),
                    on_lease_end: request.on_lease_end,
                    attempt,
                    origin: operation.origin().cloned(),
                    token: request.token,
                    claimed,
                    lease_end: now + request.lease,
                    kept: Kept::InProgress,
                });
                ClaimOutcome::Acquired(Lease { token: request.token, attempt, duration: request.lease })
            }
        }))
    }

    async fn renew(
        &self,
        operation: &Operation,
        token: LeaseToken,
        lease: Duration,
    ) -> Result<RenewOutcome, StoreError> {
        Ok(self.step(operation, |record, row| match decide_renew(record, &token) {
            RenewDecision::Ended => RenewOutcome::Ended,
            RenewDecision::Fenced => RenewOutcome::Fenced,
            RenewDecision::Gone => RenewOutcome::Gone,
            RenewDecision::Extend => {
                let lease_end = self.clock.boot() + lease;
                *row = row.take().map(|row| Row { lease_end, kept: Kept::InProgress, ..row });
                RenewOutcome::Renewed
            }
        }))
    }

    async fn complete(
        &self,
        operation: &Operation,
        completion: &Completion,
    ) -> Result<CompleteOutcome, StoreError> {
        let (now, completed_at) = (self.clock.boot(), self.clock.wall());
        let (reply, expires) = (completion.reply.clone(), now + completion.retention);
        let stored = |origin| self.stored(&reply, completed_at, expires, origin);
        let kept = Kept::Completed { reply: reply.clone(), completed_at, expires };
        Ok(self.step(operation, |record, row| {
            match decide_complete(record, operation.fingerprint(), &completion.token) {
                CompleteDecision::Fenced(reply) => CompleteOutcome::Fenced(reply),
                CompleteDecision::AlreadyStored => match record.map(|record| &record.state) {
                    Some(State::Completed { stored: first, .. }) => {
                        CompleteOutcome::AlreadyStored(first.clone())
                    }
                    _ => unreachable!("already stored, so completed"),
                },
                // The state alone changes: fingerprint, origin and attempt are those of the claim.
                CompleteDecision::Write => {
                    *row = row.take().map(|row| Row { kept, ..row });
                    CompleteOutcome::Stored(stored(record.and_then(|record| record.origin.clone())))
                }
                CompleteDecision::WriteAnew => {
                    *row = Some(Row {
                        fingerprint: *operation.fingerprint(),
                        on_lease_end: OnLeaseEnd::Hold,
                        attempt: completion.attempt,
                        origin: operation.origin().cloned(),
                        token: completion.token,
                        claimed: now,
                        lease_end: now,
                        kept,
                    });
                    CompleteOutcome::StoredAnew(stored(operation.origin().cloned()))
                }
            }
        }))
    }

    async fn release(&self, operation: &Operation, token: LeaseToken) -> Result<ReleaseOutcome, StoreError> {
        Ok(self.step(operation, |record, row| match decide_release(record, &token) {
            ReleaseDecision::Fenced => ReleaseOutcome::Fenced,
            ReleaseDecision::Absent => ReleaseOutcome::Absent,
            ReleaseDecision::Apply => {
                *row = None;
                ReleaseOutcome::Applied
            }
        }))
    }

    async fn mark_unknown(
        &self,
        operation: &Operation,
        token: LeaseToken,
    ) -> Result<ReleaseOutcome, StoreError> {
        let now = self.clock.boot();
        Ok(self.step(operation, |record, row| match decide_release(record, &token) {
            ReleaseDecision::Fenced => ReleaseOutcome::Fenced,
            ReleaseDecision::Absent => ReleaseOutcome::Absent,
            ReleaseDecision::Apply => {
                let unknown =
                    |row: Row| Row { lease_end: row.lease_end.min(now), kept: Kept::Unknown, ..row };
                *row = row.take().map(unknown);
                ReleaseOutcome::Applied
            }
        }))
    }

    async fn purge(&self, request: &PurgeRequest) -> Result<Purged, StoreError> {
        let now = self.clock.boot();
        let is_over = |row: &Row| match row.kept {
            Kept::Completed { expires, .. } => expires <= now,
            Kept::InProgress | Kept::Unknown => row.lease_end + request.hold_retention <= now,
        };
        let mut rows = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
        let mut over: Vec<_> =
            rows.iter().filter(|(_, row)| is_over(row)).map(|(id, _)| id.clone()).collect();
        let more = over.len() > request.limit as usize;
        over.truncate(request.limit as usize);
        over.iter().for_each(|id| drop(rows.remove(id)));
        Ok(Purged { removed: over.len() as u64, more, paused: false })
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            name: "map",
            location: "this process".into(),
            network: false,
            durable: false,
            hazard: Some("the records are gone with the process".into()),
        }
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let store = MapStore::new(Arc::new(SystemClock));
    let operation =
        Operation::new(Scope::new("shop 1")?, Key::new("order 42")?, Fingerprint::of("a request"));
    let request = |owner: u8| ClaimRequest {
        token: LeaseToken::from_bytes([owner; 16]), // at random, of course
        lease: Duration::from_secs(30),
        retention: Duration::from_secs(24 * 3600),
        on_lease_end: OnLeaseEnd::TakeOver,
        takeover_now: true,
        max_attempts: 5,
    };
    let ClaimOutcome::Acquired(lease) = store.claim(&operation, &request(1)).await? else { panic!("new") };
    let reply = Reply::ok("charged");
    let (token, attempt, retention) = (lease.token, lease.attempt, request(1).retention);
    store.complete(&operation, &Completion { token, attempt, reply: reply.clone(), retention }).await?;
    match store.claim(&operation, &request(2)).await? {
        ClaimOutcome::Completed(stored) => assert_eq!(stored.reply, reply),
        other => panic!("a retry is answered with the stored reply, not {other:?}"),
    }
    Ok(())
}
