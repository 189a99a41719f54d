//! What an operator may ask of a store: look, resolve, release, count. Each change is on the audit table.

use std::time::{Duration, SystemTime};

use async_trait::async_trait;

use crate::error::StoreError;
use crate::fingerprint::Fingerprint;
use crate::lease::{LeaseToken, OnLeaseEnd};
use crate::operation::{Key, Operation, OperationId, Origin, Scope};
use crate::reply::Reply;
use crate::store::Store;

/// The operator's side of a store.
#[async_trait]
pub trait StoreAdmin: Store {
    /// One record, expired ones that no purge has removed too, or nothing.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn show(&self, id: &OperationId) -> Result<Option<RecordView>, StoreError>;

    /// Records in the order of (scope, key) by bytes, a page at a time; expired ones too.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn list(&self, query: &ListQuery) -> Result<ListPage, StoreError>;

    /// Stores a reply for an operation whose outcome is unknown: the next retry gets exactly these bytes. The token is
    /// rotated, so that a returning owner is fenced. Written with its audit entry in one transaction.
    ///
    /// Decided by [`decide_operator`](crate::decide::decide_operator): refused with [`OperatorOutcome::LiveLease`],
    /// [`OperatorOutcome::Completed`] or [`OperatorOutcome::NoReply`] where `action.target` does not reach; an expired
    /// record is absent. A refusal changes nothing and is not on the audit table.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn resolve(
        &self,
        id: &OperationId,
        reply: &Reply,
        retention: Duration,
        action: &OperatorAction,
    ) -> Result<OperatorOutcome, StoreError>;

    /// Frees an operation: the next retry runs, as attempt + 1. The record stays behind as a tombstone with a fresh
    /// token, so that a returning owner is fenced, until a purge comes `hold_retention` after this moment. Written
    /// with its audit entry in one transaction. Decided and refused like [`StoreAdmin::resolve`].
    ///
    /// # Errors
    /// [`StoreError`].
    async fn free(&self, id: &OperationId, action: &OperatorAction) -> Result<OperatorOutcome, StoreError>;

    /// Counts by state, and the size.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn stats(&self) -> Result<StoreStats, StoreError>;

    /// Whether a claim could be written now, for readiness: the place of a write is asked for and nothing is changed for anybody.
    /// By default a release of what nobody has, which a database that can only be read refuses; a store that can show more
    /// with little, such as that there is room, does.
    ///
    /// # Errors
    /// [`StoreError`], as a claim would get it.
    ///
    /// # Cost
    /// One round trip or two.
    async fn probe(&self) -> Result<(), StoreError> {
        self.release(&probe_operation(), LeaseToken::from_bytes([0; 16])).await.map(|_| ())
    }

    /// The audit table, newest first, at most `limit` entries; of one operation when `id` is given.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn audit(&self, id: Option<&OperationId>, limit: u32) -> Result<Vec<AuditEntry>, StoreError>;
}

/// The operation of [`StoreAdmin::probe`], which no request has: its key is no key of HTTP.
pub fn probe_operation() -> Operation {
    let key = Key::new("onlyonce readiness probe").expect("a valid key");
    Operation::new(Scope::anonymous(), key, Fingerprint::of("probe"))
}

/// The state of a record, as operators see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StateName {
    /// A live lease.
    InProgress,
    /// The reply is stored.
    Completed,
    /// Nobody is at work on it and there is no reply: it waits for an operator, for its late owner, or, under
    /// [`OnLeaseEnd::TakeOver`] and short of the attempts that a caller allows, for a retry.
    Unknown,
    /// Freed by an operator.
    Freed,
}

impl StateName {
    /// As stored and shown: `in_progress`, `completed`, `unknown`, `freed`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::InProgress => "in_progress",
            Self::Completed => "completed",
            Self::Unknown => "unknown",
            Self::Freed => "freed",
        }
    }
}

/// One record, for people. Times are wall time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordView {
    /// Scope and key.
    pub id: OperationId,
    /// Of the first request.
    pub fingerprint: Fingerprint,
    /// Where it stands now: one whose lease is over is `Unknown`.
    pub state: StateName,
    /// The owner's policy.
    pub on_lease_end: OnLeaseEnd,
    /// Runs started.
    pub attempt: u32,
    /// The request of the last run.
    pub origin: Option<Origin>,
    /// What is left of a live lease.
    pub lease_left: Option<Duration>,
    /// When it was first claimed.
    pub created_at: SystemTime,
    /// When the lease ends or ended.
    pub locked_until: SystemTime,
    /// When it is over, for completed ones.
    pub expires_at: Option<SystemTime>,
    /// The stored reply, for completed ones.
    pub reply: Option<Reply>,
}

impl RecordView {
    /// The state with the status of a reply, as the audit table shows it: `unknown`, `completed 201`.
    pub fn summary(&self) -> String {
        match &self.reply {
            Some(reply) => format!("{} {}", self.state.as_str(), reply.status()),
            None => self.state.as_str().into(),
        }
    }
}

/// What to list.
#[derive(Clone, Debug)]
pub struct ListQuery {
    /// Only this state.
    pub state: Option<StateName>,
    /// Only this scope.
    pub scope: Option<Scope>,
    /// Only this key, in every scope or in the one that is asked for.
    pub key: Option<Key>,
    /// Only records created at least this long ago.
    pub older_than: Option<Duration>,
    /// Start after this one: `next` of the last page.
    pub after: Option<OperationId>,
    /// At most this many on a page.
    pub limit: u32,
}

impl Default for ListQuery {
    fn default() -> Self {
        Self { state: None, scope: None, key: None, older_than: None, after: None, limit: 100 }
    }
}

/// A page of records.
#[derive(Clone, Debug, Default)]
pub struct ListPage {
    /// The records, replies left out.
    pub records: Vec<RecordView>,
    /// Where the next page starts; `None` at the end.
    pub next: Option<OperationId>,
}

/// Who does something, and why.
#[derive(Clone, Debug)]
pub struct OperatorAction {
    /// Who: a user name.
    pub actor: String,
    /// Why, in the operator's words.
    pub reason: String,
    /// On which records; the others stay as they are.
    pub target: Target,
}

impl OperatorAction {
    /// What [`StoreAdmin::free`] is called on the audit table: `release`, or `forget` when it is for replies alone.
    pub fn freeing(&self) -> &'static str {
        match self.target {
            Target::Completed => "forget",
            Target::Undecided | Target::Any => "release",
        }
    }
}

/// Which records an operator's change is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Target {
    /// Those with neither an owner at work nor a reply: unknown, freed, or past their lease.
    #[default]
    Undecided,
    /// Those with a reply alone: to give it up.
    Completed,
    /// Any, by force.
    Any,
}

/// What an operator's change is answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OperatorOutcome {
    /// Done; this is the record now.
    Done(Box<RecordView>),
    /// No such record.
    Absent,
    /// Its owner is at work, for at least this much longer; nothing changed.
    LiveLease {
        /// What is left of the lease.
        left: Duration,
    },
    /// It has a reply already; nothing changed.
    Completed,
    /// It has no reply that could be given up; nothing changed.
    NoReply,
}

/// One line of the audit table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditEntry {
    /// When.
    pub at: SystemTime,
    /// Who.
    pub actor: String,
    /// What: `resolve`, `release` or `forget`.
    pub action: String,
    /// On which operation.
    pub id: OperationId,
    /// State before, with status where there was a reply.
    pub before: String,
    /// State after.
    pub after: String,
    /// Why.
    pub reason: String,
}

/// Counts of a store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreStats {
    /// With a live lease.
    pub in_progress: u64,
    /// With a reply, not yet expired.
    pub completed: u64,
    /// With neither a live lease nor a reply: waiting for an operator, or for a retry that may take over.
    pub unknown: u64,
    /// Freed by an operator.
    pub freed: u64,
    /// Past `expires_at`, waiting for the purge.
    pub expired: u64,
    /// Size of the records in bytes, where the store can tell.
    pub bytes: Option<u64>,
}
