//! The operator's side of the memory store. Its audit table keeps the newest 10 000 entries.

use std::collections::BTreeMap;
use std::time::Duration;

use async_trait::async_trait;

use super::{MemoryStore, Row, RowState, Shard};
use crate::admin::{
    AuditEntry, ListPage, ListQuery, OperatorAction, OperatorOutcome, RecordView, StateName, StoreAdmin,
    StoreStats,
};
use crate::decide::{OperatorDecision, decide_operator};
use crate::error::{StoreError, StoreErrorKind};
use crate::lease::LeaseToken;
use crate::operation::OperationId;
use crate::reply::Reply;

const AUDIT_ENTRIES_MAX: usize = 10_000;

#[async_trait]
impl StoreAdmin for MemoryStore {
    async fn show(&self, id: &OperationId) -> Result<Option<RecordView>, StoreError> {
        Ok(self.shard(id).lock().rows.get(id).map(|row| self.view(id, row)))
    }

    async fn list(&self, query: &ListQuery) -> Result<ListPage, StoreError> {
        let limit = query.limit.max(1) as usize;
        // The first `limit + 1` in order, whatever the number of records.
        let mut first = BTreeMap::new();
        for shard in self.shards.iter() {
            for (id, row) in &shard.lock().rows {
                if self.is_asked_for(query, id, row) {
                    first.insert(id.clone(), row.clone());
                    if first.len() > limit + 1 {
                        first.pop_last();
                    }
                }
            }
        }
        let more = first.len() > limit;
        let records: Vec<_> = first
            .iter()
            .take(limit)
            .map(|(id, row)| RecordView { reply: None, ..self.view(id, row) })
            .collect();
        let next = records.last().filter(|_| more).map(|last| last.id.clone());
        Ok(ListPage { records, next })
    }

    async fn resolve(
        &self,
        id: &OperationId,
        reply: &Reply,
        retention: Duration,
        action: &OperatorAction,
    ) -> Result<OperatorOutcome, StoreError> {
        self.operate("resolve", id, action, |row| RowState::Completed {
            reply: reply.clone(),
            completed_at: self.clock.wall(),
            expires: row.lease_end.saturating_add(retention),
        })
    }

    async fn free(&self, id: &OperationId, action: &OperatorAction) -> Result<OperatorOutcome, StoreError> {
        self.operate(action.freeing(), id, action, |_| RowState::Freed)
    }

    async fn stats(&self) -> Result<StoreStats, StoreError> {
        let mut stats = StoreStats::default();
        let mut bytes = 0;
        for shard in self.shards.iter() {
            for (id, row) in &shard.lock().rows {
                let record = self.record(row);
                let count = match record.state_name() {
                    StateName::InProgress => &mut stats.in_progress,
                    StateName::Completed if record.is_expired() => &mut stats.expired,
                    StateName::Completed => &mut stats.completed,
                    StateName::Unknown => &mut stats.unknown,
                    StateName::Freed => &mut stats.freed,
                };
                *count += 1;
                bytes += size_of::<Row>() + id.scope.as_str().len() + id.key.as_str().len();
                if let RowState::Completed { reply, .. } = &row.state {
                    bytes += reply.weight_bytes();
                }
            }
        }
        stats.bytes = Some(bytes as u64);
        Ok(stats)
    }

    async fn audit(&self, id: Option<&OperationId>, limit: u32) -> Result<Vec<AuditEntry>, StoreError> {
        let audit = self.audit.lock();
        let wanted = audit.iter().rev().filter(|entry| id.is_none_or(|id| entry.id == *id));
        Ok(wanted.take(limit as usize).cloned().collect())
    }
}

impl MemoryStore {
    fn operate(
        &self,
        name: &'static str,
        id: &OperationId,
        action: &OperatorAction,
        state: impl FnOnce(&Row) -> RowState,
    ) -> Result<OperatorOutcome, StoreError> {
        let token = nobodys_token(name)?;
        let mut shard = self.shard(id).lock();
        let record = shard.rows.get(id).map(|row| self.record(row));
        match decide_operator(record.as_ref(), action.target) {
            OperatorDecision::Absent => return Ok(OperatorOutcome::Absent),
            OperatorDecision::LiveLease { left } => return Ok(OperatorOutcome::LiveLease { left }),
            OperatorDecision::Completed => return Ok(OperatorOutcome::Completed),
            OperatorDecision::NoReply => return Ok(OperatorOutcome::NoReply),
            OperatorDecision::Apply => {}
        }
        Ok(self.rewrite(&mut shard, name, id, action, |row| {
            let row = Row { token, lease_end: self.clock.boot(), ..row.clone() };
            Row { state: state(&row), ..row }
        }))
    }

    fn rewrite(
        &self,
        shard: &mut Shard,
        name: &'static str,
        id: &OperationId,
        action: &OperatorAction,
        change: impl FnOnce(&Row) -> Row,
    ) -> OperatorOutcome {
        let Some(row) = shard.rows.get(id) else { return OperatorOutcome::Absent };
        let before = self.view(id, row).summary();
        let row = change(row);
        let view = self.view(id, &row);
        shard.put(id, row);
        let mut audit = self.audit.lock();
        if audit.len() >= AUDIT_ENTRIES_MAX {
            audit.pop_front();
        }
        audit.push_back(AuditEntry {
            at: self.clock.wall(),
            actor: action.actor.clone(),
            action: name.into(),
            id: id.clone(),
            before,
            after: view.summary(),
            reason: action.reason.clone(),
        });
        OperatorOutcome::Done(Box::new(view))
    }

    fn is_asked_for(&self, query: &ListQuery, id: &OperationId, row: &Row) -> bool {
        let age = self.clock.boot().saturating_sub(row.created);
        query.after.as_ref().is_none_or(|after| id > after)
            && query.scope.as_ref().is_none_or(|scope| id.scope == *scope)
            && query.key.as_ref().is_none_or(|key| id.key == *key)
            && query.older_than.is_none_or(|least| age >= least)
            && query.state.is_none_or(|state| self.record(row).state_name() == state)
    }

    fn view(&self, id: &OperationId, row: &Row) -> RecordView {
        let state = self.record(row).state_name();
        let lease_left = row.lease_end.checked_sub(self.clock.boot()).filter(|left| !left.is_zero());
        let (expires_at, reply) = match &row.state {
            RowState::Completed { reply, expires, .. } => (Some(self.wall_at(*expires)), Some(reply.clone())),
            RowState::InProgress | RowState::Unknown | RowState::Freed => (None, None),
        };
        RecordView {
            id: id.clone(),
            fingerprint: row.fingerprint,
            state,
            on_lease_end: row.on_lease_end,
            attempt: row.attempt,
            origin: row.origin.clone(),
            lease_left: lease_left.filter(|_| matches!(row.state, RowState::InProgress)),
            created_at: self.wall_at(row.created),
            locked_until: self.wall_at(row.lease_end),
            expires_at,
            reply,
        }
    }
}

fn nobodys_token(name: &'static str) -> Result<LeaseToken, StoreError> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes)
        .map_err(|error| StoreError::new(StoreErrorKind::Internal, name).with_source(error))?;
    Ok(LeaseToken::from_bytes(bytes))
}
