//! The reference store: [`decide`] behind a mutex, bounded, gone with the process.

mod admin;

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::future::poll_fn;
use std::hash::BuildHasher;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use foldhash::quality::RandomState;
use parking_lot::Mutex;

use crate::admin::AuditEntry;
use crate::clock::{Clock, SystemClock};
use crate::decide::{
    Acquire, CompleteDecision, Decision, LeaseView, Record, ReleaseDecision, RenewDecision, State, decide,
    decide_complete, decide_release, decide_renew,
};
use crate::error::{StoreError, StoreErrorKind};
use crate::fingerprint::Fingerprint;
use crate::lease::{Lease, LeaseToken, OnLeaseEnd};
use crate::mutant::{Mutant, mutant};
use crate::operation::{Operation, OperationId, Origin};
use crate::reply::{Reply, StoredReply};
use crate::store::{
    Capabilities, ClaimOutcome, ClaimRequest, CompleteOutcome, Completion, PurgeRequest, Purged,
    ReleaseOutcome, RenewOutcome, Store,
};

const SHARDS: usize = 32;

/// A store in memory: for tests, for demos, and for one process whose keys need not outlive it.
///
/// Bounded by a number of records (1 million by default): past it, claims of new keys fail with
/// [`StoreErrorKind::Full`] until records expire and are purged. All time is the boot clock. Clones are handles on
/// the same records.
#[derive(Clone, Debug)]
pub struct MemoryStore {
    shards: Arc<[Mutex<Shard>]>,
    hasher: RandomState,
    clock: Arc<dyn Clock>,
    records_max_per_shard: usize,
    // The newest last; taken after a shard's lock, never before.
    audit: Arc<Mutex<VecDeque<AuditEntry>>>,
}

type Ends = BTreeSet<(Duration, OperationId)>;

#[derive(Debug, Default)]
struct Shard {
    rows: HashMap<OperationId, Row, RandomState>,
    // By end, completed rows apart from leases, so that `purge` never scans and held rows never stand in the way.
    completed_ends: Ends,
    lease_ends: Ends,
}

#[derive(Clone, Debug)]
struct Row {
    fingerprint: Fingerprint,
    on_lease_end: OnLeaseEnd,
    attempt: u32,
    origin: Option<Origin>,
    token: LeaseToken,
    // All on the boot clock; `created` is the first claim of the record, `claimed` this owner's.
    created: Duration,
    claimed: Duration,
    lease_end: Duration,
    state: RowState,
}

#[derive(Clone, Debug)]
enum RowState {
    InProgress,
    Unknown,
    Freed,
    Completed { reply: Reply, completed_at: SystemTime, expires: Duration },
}

impl Row {
    fn is_completed(&self) -> bool {
        matches!(self.state, RowState::Completed { .. })
    }

    // What the purge goes by.
    fn end(&self) -> Duration {
        match self.state {
            RowState::Completed { expires, .. } => expires,
            RowState::InProgress | RowState::Unknown | RowState::Freed => self.lease_end,
        }
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl MemoryStore {
    /// An empty store on the system clock.
    pub fn new() -> Self {
        Self::with_clock(Arc::new(SystemClock))
    }

    /// An empty store on this clock.
    pub fn with_clock(clock: Arc<dyn Clock>) -> Self {
        let shards = (0..SHARDS).map(|_| Mutex::new(Shard::default())).collect();
        Self {
            shards,
            hasher: RandomState::default(),
            clock,
            records_max_per_shard: 0,
            audit: Arc::default(),
        }
        .records_max(1_000_000)
    }

    /// Bounds the number of records, rounded up to a multiple of 32.
    #[must_use]
    pub fn records_max(mut self, records: usize) -> Self {
        self.records_max_per_shard = records.div_ceil(SHARDS).max(1);
        self
    }

    /// How many records there are, expired ones included until they are purged.
    pub fn len(&self) -> usize {
        self.shards.iter().map(|shard| shard.lock().rows.len()).sum()
    }

    /// Whether there is no record.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What an owner's release and its mark of an unknown outcome share: `rest` is what stays of the row.
    fn give_up(
        &self,
        operation: &Operation,
        token: LeaseToken,
        rest: impl FnOnce(Row) -> Option<Row>,
    ) -> ReleaseOutcome {
        let id = operation.id();
        let mut shard = self.shard(id).lock();
        let record = shard.rows.get(id).map(|row| self.record(row));
        match decide_release(record.as_ref(), &token) {
            ReleaseDecision::Fenced => ReleaseOutcome::Fenced,
            ReleaseDecision::Absent => ReleaseOutcome::Absent,
            ReleaseDecision::Apply => {
                if let Some(row) = shard.remove(id).and_then(rest) {
                    shard.put(id, row);
                }
                ReleaseOutcome::Applied
            }
        }
    }

    // Of a mutant.
    async fn look_and_dawdle(&self, id: &OperationId) -> Option<Record> {
        let seen = self.shard(id).lock().rows.get(id).map(|row| self.record(row));
        let mut dawdles = true;
        poll_fn(|context| match std::mem::take(&mut dawdles) {
            true => {
                context.waker().wake_by_ref();
                Poll::Pending
            }
            false => Poll::Ready(()),
        })
        .await;
        seen
    }

    fn shard(&self, id: &OperationId) -> &Mutex<Shard> {
        &self.shards[self.hasher.hash_one(id) as usize % SHARDS]
    }

    fn record(&self, row: &Row) -> Record {
        let left = row.lease_end.saturating_sub(self.clock.boot());
        let token = row.token;
        let state = match &row.state {
            RowState::Completed { reply, completed_at, expires } => {
                let origin = row.origin.clone();
                State::Completed { token, stored: self.stored(reply, *completed_at, *expires, origin) }
            }
            RowState::Unknown => State::Unknown { token, since: self.wall_at(row.lease_end) },
            RowState::Freed => State::Freed { token },
            RowState::InProgress => State::InProgress {
                token,
                lease: match left.is_zero() {
                    true => LeaseView::Over { since: self.wall_at(row.lease_end) },
                    false => LeaseView::Left(left),
                },
                age: self.clock.boot().saturating_sub(row.claimed),
            },
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
        StoredReply {
            reply: reply.clone(),
            completed_at,
            expires_at: self.wall_at(expires),
            remaining: expires.saturating_sub(self.clock.boot()),
            origin,
        }
    }

    // For people: what the wall clock shows, or will show, at this instant of the boot clock.
    fn wall_at(&self, boot: Duration) -> SystemTime {
        let (now, wall) = (self.clock.boot(), self.clock.wall());
        let at = match boot.checked_sub(now) {
            Some(ahead) => wall.checked_add(ahead),
            None => wall.checked_sub(now - boot),
        };
        at.unwrap_or(wall)
    }
}

impl Shard {
    fn put(&mut self, id: &OperationId, row: Row) {
        self.ends(&row.state).insert((row.end(), id.clone()));
        let end = (row.end(), row.is_completed());
        let old = match self.rows.entry(id.clone()) {
            Entry::Vacant(place) => {
                place.insert(row);
                return;
            }
            Entry::Occupied(mut place) => place.insert(row),
        };
        if (old.end(), old.is_completed()) != end {
            self.ends(&old.state).remove(&(old.end(), id.clone()));
        }
    }

    fn remove(&mut self, id: &OperationId) -> Option<Row> {
        let row = self.rows.remove(id)?;
        self.ends(&row.state).remove(&(row.end(), id.clone()));
        Some(row)
    }

    fn ends(&mut self, state: &RowState) -> &mut Ends {
        match state {
            RowState::Completed { .. } => &mut self.completed_ends,
            RowState::InProgress | RowState::Unknown | RowState::Freed => &mut self.lease_ends,
        }
    }
}

#[async_trait]
impl Store for MemoryStore {
    async fn claim(&self, operation: &Operation, request: &ClaimRequest) -> Result<ClaimOutcome, StoreError> {
        let id = operation.id();
        let seen = match mutant(Mutant::CheckThenInsert) {
            true => Some(self.look_and_dawdle(id).await),
            false => None,
        };
        let mut shard = self.shard(id).lock();
        let record = seen.unwrap_or_else(|| shard.rows.get(id).map(|row| self.record(row)));
        let record = record.filter(|_| !mutant(Mutant::UniqueDropped));
        let (attempt, how) = match decide(record.as_ref(), operation.fingerprint(), request) {
            Decision::Answer(answer) => return Ok(answer),
            Decision::Acquire { attempt, how } => (attempt, how),
        };
        if record.is_none() && shard.rows.len() >= self.records_max_per_shard {
            return Err(StoreError::new(StoreErrorKind::Full, "claim").with_detail(
                "the memory store holds as many records as it may; raise records_max or shorten retention",
            ));
        }
        let now = self.clock.boot();
        let old = shard.rows.get(id);
        let row = Row {
            fingerprint: *operation.fingerprint(),
            on_lease_end: request.on_lease_end,
            attempt,
            origin: operation.origin().cloned(),
            token: request.token,
            created: old.filter(|_| how != Acquire::Fresh).map_or(now, |row| row.created),
            claimed: old.filter(|_| how == Acquire::Reentrant).map_or(now, |row| row.claimed),
            lease_end: now.saturating_add(request.lease),
            state: RowState::InProgress,
        };
        shard.put(id, row);
        Ok(ClaimOutcome::Acquired(Lease { token: request.token, attempt, duration: request.lease }))
    }

    async fn renew(
        &self,
        operation: &Operation,
        token: LeaseToken,
        lease: Duration,
    ) -> Result<RenewOutcome, StoreError> {
        let id = operation.id();
        let mut shard = self.shard(id).lock();
        let record = shard.rows.get(id).map(|row| self.record(row));
        Ok(match decide_renew(record.as_ref(), &token) {
            RenewDecision::Ended => RenewOutcome::Ended,
            RenewDecision::Fenced => RenewOutcome::Fenced,
            RenewDecision::Gone => RenewOutcome::Gone,
            RenewDecision::Extend => {
                if let Some(row) = shard.remove(id) {
                    let lease_end = self.clock.boot().saturating_add(lease);
                    shard.put(id, Row { lease_end, state: RowState::InProgress, ..row });
                }
                RenewOutcome::Renewed
            }
        })
    }

    async fn complete(
        &self,
        operation: &Operation,
        completion: &Completion,
    ) -> Result<CompleteOutcome, StoreError> {
        let id = operation.id();
        let mut shard = self.shard(id).lock();
        let record = shard.rows.get(id).map(|row| self.record(row));
        let decision = decide_complete(record.as_ref(), operation.fingerprint(), &completion.token);
        match (&decision, record) {
            (CompleteDecision::Fenced(reply), _) => return Ok(CompleteOutcome::Fenced(reply.clone())),
            (
                CompleteDecision::AlreadyStored,
                Some(Record { state: State::Completed { stored, .. }, .. }),
            ) => return Ok(CompleteOutcome::AlreadyStored(stored)),
            _ => {}
        }
        let anew = decision == CompleteDecision::WriteAnew;
        let (now, completed_at) = (self.clock.boot(), self.clock.wall());
        let expires = now.saturating_add(completion.retention);
        let old = shard.rows.get(id).filter(|_| !anew);
        let origin = old.map_or_else(|| operation.origin().cloned(), |row| row.origin.clone());
        let stored = self.stored(&completion.reply, completed_at, expires, origin.clone());
        let state = RowState::Completed { reply: completion.reply.clone(), completed_at, expires };
        let row = match old {
            // The state alone changes: fingerprint, origin and attempt are those of the claim.
            Some(row) => Row { state, ..row.clone() },
            None => Row {
                fingerprint: *operation.fingerprint(),
                on_lease_end: OnLeaseEnd::Hold,
                attempt: completion.attempt,
                origin,
                token: completion.token,
                created: now,
                claimed: now,
                lease_end: now,
                state,
            },
        };
        shard.put(id, row);
        Ok(if anew { CompleteOutcome::StoredAnew(stored) } else { CompleteOutcome::Stored(stored) })
    }

    async fn release(&self, operation: &Operation, token: LeaseToken) -> Result<ReleaseOutcome, StoreError> {
        Ok(self.give_up(operation, token, |_| None))
    }

    async fn mark_unknown(
        &self,
        operation: &Operation,
        token: LeaseToken,
    ) -> Result<ReleaseOutcome, StoreError> {
        Ok(self.give_up(operation, token, |row| {
            let lease_end = row.lease_end.min(self.clock.boot());
            Some(Row { lease_end, state: RowState::Unknown, ..row })
        }))
    }

    async fn purge(&self, request: &PurgeRequest) -> Result<Purged, StoreError> {
        let now = self.clock.boot();
        let mut purged = Purged::default();
        let limit = request.limit.max(1) as usize;
        for shard in self.shards.iter() {
            let mut shard = shard.lock();
            let room = limit - purged.removed as usize;
            let kept = if mutant(Mutant::PurgeByAge) { Duration::ZERO } else { request.hold_retention };
            let held_until = now.checked_sub(kept);
            let ended = shard.completed_ends.iter().take_while(|(end, _)| *end <= now);
            let held =
                shard.lease_ends.iter().take_while(|(end, _)| held_until.is_some_and(|until| *end <= until));
            let mut over: Vec<_> = ended.chain(held).take(room + 1).map(|(_, id)| id.clone()).collect();
            purged.more |= over.len() > room;
            over.truncate(room);
            purged.removed += over.len() as u64;
            over.iter().for_each(|id| {
                shard.remove(id);
            });
        }
        Ok(purged)
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            name: "memory",
            location: "this process".into(),
            network: false,
            durable: false,
            hazard: Some("the records are gone with the process: after a restart a retry runs again".into()),
        }
    }
}
