//! The operator's side. Look-ups run on the readers; changes on the writer, each with its audit entry in one synced
//! transaction.

use std::time::Duration;

use async_trait::async_trait;
use onlyonce_core::{
    AuditEntry, Key, LeaseToken, ListPage, ListQuery, OperationId, OperatorAction, OperatorDecision,
    OperatorOutcome, RecordView, Reply, Scope, StateName, StoreAdmin, StoreError, StoreErrorKind, StoreStats,
    decide_operator,
};
use rusqlite::types::ToSql;
use rusqlite::{Connection, params};
use tokio::sync::oneshot;

use crate::boot::Now;
use crate::error::Fault;
use crate::row::{COLUMNS_WITHOUT_REPLY, Done, NewRow, Row, text, wall};
use crate::store::SqliteStore;
use crate::writer::{Answer, Chore, Session};

#[async_trait]
impl StoreAdmin for SqliteStore {
    async fn show(&self, id: &OperationId) -> Result<Option<RecordView>, StoreError> {
        let id = id.clone();
        self.read("show", move |conn, now| Ok(Row::find(conn, now, &id)?.map(|row| row.view()))).await
    }

    async fn list(&self, query: &ListQuery) -> Result<ListPage, StoreError> {
        let query = query.clone();
        self.read("list", move |conn, now| list(conn, now, &query)).await
    }

    async fn resolve(
        &self,
        id: &OperationId,
        reply: &Reply,
        retention: Duration,
        action: &OperatorAction,
    ) -> Result<OperatorOutcome, StoreError> {
        let change = Change::Resolve { head: reply.encode_head(), reply: reply.clone(), retention };
        self.change("resolve", change, id, action).await
    }

    async fn free(&self, id: &OperationId, action: &OperatorAction) -> Result<OperatorOutcome, StoreError> {
        self.change("free", Change::Free, id, action).await
    }

    /// Reads the index of completed records and every other record. `bytes` is the size of the whole file without its
    /// free pages: business data in the same file is counted.
    async fn stats(&self) -> Result<StoreStats, StoreError> {
        self.read("stats", stats).await
    }

    /// Takes the lock for writing and writes a row as it is, synced: a lock that another program holds and a full disk show.
    async fn probe(&self) -> Result<(), StoreError> {
        let (answer, answered) = oneshot::channel();
        self.shared().queue.push_chore("probe", Box::new(Probe(Some(answer))))?;
        self.answered("probe", answered).await
    }

    async fn audit(&self, id: Option<&OperationId>, limit: u32) -> Result<Vec<AuditEntry>, StoreError> {
        let id = id.cloned();
        self.read("audit", move |conn, _| audit(conn, id.as_ref(), limit)).await
    }
}

impl SqliteStore {
    async fn change(
        &self,
        operation: &'static str,
        change: Change,
        id: &OperationId,
        action: &OperatorAction,
    ) -> Result<OperatorOutcome, StoreError> {
        let mut token = [0; 16];
        getrandom::fill(&mut token)
            .map_err(|error| StoreError::new(StoreErrorKind::Internal, operation).with_source(error))?;
        let token = LeaseToken::from_bytes(token);
        let (answer, answered) = oneshot::channel();
        let (id, action) = (id.clone(), action.clone());
        let chore = Operate { operation, id, action, change, token, answer: Some(answer) };
        self.shared().queue.push_chore(operation, Box::new(chore))?;
        self.answered(operation, answered).await
    }
}

/// An operator's change, waiting for the writer.
struct Operate {
    operation: &'static str,
    id: OperationId,
    action: OperatorAction,
    change: Change,
    // Belongs to nobody: a returning owner is fenced.
    token: LeaseToken,
    answer: Option<Answer<OperatorOutcome>>,
}

enum Change {
    Resolve { reply: Reply, head: Vec<u8>, retention: Duration },
    Free,
}

impl Chore for Operate {
    fn step(&mut self, session: &Session<'_>) -> bool {
        let done = session.transaction(true, |conn, now| self.apply(conn, now));
        let result = done.map_err(|fault| fault.into_error(self.operation, &session.shared.path));
        // An operator who is gone needs no answer.
        self.answer.take().map(|answer| answer.send(result));
        false
    }
}

/// A write that changes nothing, waiting for the writer.
struct Probe(Option<Answer<()>>);

impl Chore for Probe {
    fn step(&mut self, session: &Session<'_>) -> bool {
        // Who has given up waiting asks again.
        let Some(answer) = self.0.take().filter(|answer| !answer.is_closed()) else { return false };
        let done = session.transaction(true, |conn, _| {
            // There and back: SQLite does not write a page that stays as it is.
            conn.execute("UPDATE main.idempotency_meta SET opened_at = opened_at + 1 WHERE id = 1", [])?;
            conn.execute("UPDATE main.idempotency_meta SET opened_at = opened_at - 1 WHERE id = 1", [])?;
            Ok(())
        });
        // Neither does who gives up now.
        let _ = answer.send(done.map_err(|fault| fault.into_error("probe", &session.shared.path)));
        false
    }
}

impl Operate {
    fn apply(&self, conn: &Connection, now: &Now<'_>) -> Result<OperatorOutcome, Fault> {
        let row = Row::find(conn, now, &self.id)?;
        let decision = decide_operator(row.as_ref().map(|row| &row.record), self.action.target);
        let row = match (decision, row) {
            (OperatorDecision::LiveLease { left }, _) => return Ok(OperatorOutcome::LiveLease { left }),
            (OperatorDecision::Completed, _) => return Ok(OperatorOutcome::Completed),
            (OperatorDecision::NoReply, _) => return Ok(OperatorOutcome::NoReply),
            (OperatorDecision::Apply, Some(row)) => row,
            (OperatorDecision::Absent | OperatorDecision::Apply, _) => return Ok(OperatorOutcome::Absent),
        };
        let (status, done, name) = match &self.change {
            Change::Free => (StateName::Freed, None, self.action.freeing()),
            Change::Resolve { reply, head, retention } => {
                let (completed_ms, expires_ms) = (now.ms(), now.end(*retention));
                let done = Done { reply, head, completed_ms, expires_ms };
                (StateName::Completed, Some(done), "resolve")
            }
        };
        NewRow { token: self.token, locked_ms: now.ms(), done, ..row.again(status) }.put(conn, now)?;
        let Some(after) = Row::find(conn, now, &self.id)? else {
            return Err(Fault::new(StoreErrorKind::Internal, "a record that was just written is not there"));
        };
        let after = after.view();
        conn.prepare_cached(
            "INSERT INTO main.idempotency_audit
                (at, actor, action, scope, key, state_before, state_after, reason)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
        )?
        .execute(params![
            now.wall_ms(),
            self.action.actor,
            name,
            self.id.scope.as_str(),
            self.id.key.as_str(),
            row.view().summary(),
            after.summary(),
            self.action.reason,
        ])?;
        Ok(OperatorOutcome::Done(Box::new(after)))
    }
}

fn list(conn: &Connection, now: &Now<'_>, query: &ListQuery) -> Result<ListPage, Fault> {
    let mut sql = format!("SELECT {COLUMNS_WITHOUT_REPLY} FROM main.idempotency_keys");
    let mut values: Vec<&dyn ToSql> = Vec::new();
    let mut conditions: Vec<String> = Vec::new();
    // A record whose lease is over is unknown and stored as in progress: the last word is `state_name`'s. Records
    // without a reply are few, so they are read by their index and sorted; the rest comes in the order of the key.
    conditions.push(match query.state {
        None => "true".into(),
        Some(StateName::Completed) => "status = 'completed'".into(),
        Some(_) => {
            sql.push_str(" INDEXED BY idempotency_keys_lease");
            "status <> 'completed'".into()
        }
    });
    let scope = query.scope.as_ref().map(Scope::as_str);
    if let Some(scope) = &scope {
        values.push(scope);
        conditions.push(format!("scope = ?{}", values.len()));
    }
    let key = query.key.as_ref().map(Key::as_str);
    if let Some(key) = &key {
        values.push(key);
        conditions.push(format!("key = ?{}", values.len()));
    }
    let after = query.after.as_ref().map(|id| (id.scope.as_str(), id.key.as_str()));
    if let Some((scope, key)) = &after {
        values.push(scope);
        values.push(key);
        conditions.push(format!("(scope, key) > (?{}, ?{})", values.len() - 1, values.len()));
    }
    sql.push_str(&format!(" WHERE {} ORDER BY scope, key", conditions.join(" AND ")));

    let mut statement = conn.prepare(&sql)?;
    let mut rows = statement.query(&values[..])?;
    let limit = query.limit.max(1) as usize;
    let mut page = ListPage::default();
    while let Some(row) = rows.next()? {
        let row = Row::read(conn, now, row)?;
        let age = Duration::from_millis(u64::try_from(now.ms() - row.created_ms).unwrap_or(0));
        let wanted = query.state.is_none_or(|state| row.record.state_name() == state)
            && query.older_than.is_none_or(|least| age >= least);
        if !wanted {
            continue;
        }
        if page.records.len() == limit {
            page.next = page.records.last().map(|last: &RecordView| last.id.clone());
            break;
        }
        page.records.push(RecordView { reply: None, ..row.view() });
    }
    Ok(page)
}

fn stats(conn: &Connection, now: &Now<'_>) -> Result<StoreStats, Fault> {
    let mut stats = StoreStats::default();
    let count = |sql: &str, clock: i64, until: i64| -> Result<u64, Fault> {
        Ok(conn.prepare_cached(sql)?.query_row(params![clock, until], |row| row.get::<_, i64>(0))? as u64)
    };
    for scale in now.scales() {
        let until = now.ms_on(scale);
        stats.expired += count(
            "SELECT count(*) FROM main.idempotency_keys INDEXED BY idempotency_keys_expiry
             WHERE status = 'completed' AND clock = ?1 AND expires_at <= ?2",
            scale.id,
            until,
        )?;
        stats.completed += count(
            "SELECT count(*) FROM main.idempotency_keys INDEXED BY idempotency_keys_expiry
             WHERE status = 'completed' AND clock = ?1 AND expires_at > ?2",
            scale.id,
            until,
        )?;
    }
    let mut unfinished = conn.prepare(&format!(
        "SELECT {COLUMNS_WITHOUT_REPLY} FROM main.idempotency_keys INDEXED BY idempotency_keys_lease
         WHERE status <> 'completed'"
    ))?;
    let mut rows = unfinished.query([])?;
    while let Some(row) = rows.next()? {
        match Row::read(conn, now, row)?.record.state_name() {
            StateName::InProgress => stats.in_progress += 1,
            StateName::Unknown => stats.unknown += 1,
            StateName::Freed => stats.freed += 1,
            StateName::Completed => stats.completed += 1,
        }
    }
    let bytes: i64 = conn.query_row(
        "SELECT (page_count - freelist_count) * page_size
         FROM pragma_page_count(), pragma_freelist_count(), pragma_page_size()",
        [],
        |row| row.get(0),
    )?;
    stats.bytes = u64::try_from(bytes).ok();
    Ok(stats)
}

fn audit(conn: &Connection, id: Option<&OperationId>, limit: u32) -> Result<Vec<AuditEntry>, Fault> {
    let mut query = conn.prepare_cached(
        "SELECT at, actor, action, scope, key, state_before, state_after, reason FROM main.idempotency_audit
         WHERE ?1 IS NULL OR (scope = ?1 AND key = ?2) ORDER BY id DESC LIMIT ?3",
    )?;
    let (scope, key) = (id.map(|id| id.scope.as_str()), id.map(|id| id.key.as_str()));
    let mut rows = query.query(params![scope, key, limit])?;
    let mut entries = Vec::new();
    while let Some(row) = rows.next()? {
        let name = |_| Fault::unreadable("an entry of the audit table that this release cannot read");
        entries.push(AuditEntry {
            at: wall(row, 0)?,
            actor: text(row, 1)?.into(),
            action: text(row, 2)?.into(),
            id: OperationId {
                scope: Scope::new(text(row, 3)?).map_err(name)?,
                key: Key::new(text(row, 4)?).map_err(name)?,
            },
            before: text(row, 5)?.into(),
            after: text(row, 6)?.into(),
            reason: text(row, 7)?.into(),
        });
    }
    Ok(entries)
}
