//! The operator's side. Changes are transactions of their own, each with its audit entry.

use std::time::Duration;

use async_trait::async_trait;
use onlyonce_core::{
    AuditEntry, LeaseToken, ListPage, ListQuery, OperationId, OperatorAction, OperatorDecision,
    OperatorOutcome, RecordView, Reply, StateName, StoreAdmin, StoreError, StoreStats, decide_operator,
};

use crate::backend::Backend;
use crate::claims::{find, push_ids};
use crate::error::Fault;
use crate::row::{ALL_COLUMNS, Done, NOW, NewRow, Row, cells, columns, us, us_of, wall};
use crate::session::{Session, wait_for_locks};
use crate::sql::Sql;
use crate::store::MysqlStore;

/// How long an operator's change waits for whoever holds the row, in seconds.
const OPERATOR_PATIENCE_S: u32 = 3;

/// How many records a list reads at once.
const LIST_CHUNK: u32 = 500;

#[async_trait]
impl StoreAdmin for MysqlStore {
    async fn show(&self, id: &OperationId) -> Result<Option<RecordView>, StoreError> {
        show(self.backend(), id).await.map_err(|fault| fault.into_error("show"))
    }

    async fn list(&self, query: &ListQuery) -> Result<ListPage, StoreError> {
        list(self.backend(), query).await.map_err(|fault| fault.into_error("list"))
    }

    async fn resolve(
        &self,
        id: &OperationId,
        reply: &Reply,
        retention: Duration,
        action: &OperatorAction,
    ) -> Result<OperatorOutcome, StoreError> {
        let change = Change::Resolve { reply, head: reply.encode_head(), retention };
        operate(self.backend(), id, &change, action).await.map_err(|fault| fault.into_error("resolve"))
    }

    async fn free(&self, id: &OperationId, action: &OperatorAction) -> Result<OperatorOutcome, StoreError> {
        operate(self.backend(), id, &Change::Free, action).await.map_err(|fault| fault.into_error("free"))
    }

    /// Reads the whole index of ends. `bytes` is the server's own estimate.
    async fn stats(&self) -> Result<StoreStats, StoreError> {
        stats(self.backend()).await.map_err(|fault| fault.into_error("stats"))
    }

    async fn audit(&self, id: Option<&OperationId>, limit: u32) -> Result<Vec<AuditEntry>, StoreError> {
        audit(self.backend(), id, limit).await.map_err(|fault| fault.into_error("audit"))
    }
}

async fn show(backend: &Backend, id: &OperationId) -> Result<Option<RecordView>, Fault> {
    let mut session = backend.pool.lend().await?;
    let row = find(&mut session, &backend.tables, std::iter::once(id)).await?.remove(id);
    Ok(row.transpose()?.map(|row| row.view()))
}

enum Change<'a> {
    Resolve { reply: &'a Reply, head: Vec<u8>, retention: Duration },
    Free,
}

async fn operate(
    backend: &Backend,
    id: &OperationId,
    change: &Change<'_>,
    action: &OperatorAction,
) -> Result<OperatorOutcome, Fault> {
    // Belongs to nobody: a returning owner is fenced.
    let mut token = [0; 16];
    getrandom::fill(&mut token).map_err(|error| Fault::internal("no random bytes").with_source(error))?;
    let mut session = backend.pool.lend().await?;
    session.begun();
    let done = operate_in(&mut session, backend, id, change, action, LeaseToken::from_bytes(token)).await;
    match &done {
        // The patience for locks is the connection's own again.
        Ok(_) if session.script(&[wait_for_locks(0)]).await.is_ok() => session.ended(),
        _ => session.roll_back_and_close().await,
    }
    done
}

async fn operate_in(
    session: &mut Session<'_>,
    backend: &Backend,
    id: &OperationId,
    change: &Change<'_>,
    action: &OperatorAction,
    token: LeaseToken,
) -> Result<OperatorOutcome, Fault> {
    session.script(&[wait_for_locks(OPERATOR_PATIENCE_S), "START TRANSACTION".into()]).await?;
    let row = read(session, backend, id, " FOR UPDATE").await?;
    let decision = decide_operator(row.as_ref().map(|row| &row.record), action.target);
    let refused = match (decision, row) {
        (OperatorDecision::Apply, Some(row)) => {
            let after = write(session, backend, &row, change, token).await?;
            note(session, backend, &row.view(), &after, change, action).await?;
            session.script(&["COMMIT".into()]).await?;
            return Ok(OperatorOutcome::Done(Box::new(after)));
        }
        (OperatorDecision::LiveLease { left }, _) => OperatorOutcome::LiveLease { left },
        (OperatorDecision::Completed, _) => OperatorOutcome::Completed,
        (OperatorDecision::NoReply, _) => OperatorOutcome::NoReply,
        (OperatorDecision::Absent | OperatorDecision::Apply, _) => OperatorOutcome::Absent,
    };
    session.script(&["ROLLBACK".into()]).await?;
    Ok(refused)
}

async fn read(
    session: &mut Session<'_>,
    backend: &Backend,
    id: &OperationId,
    how: &str,
) -> Result<Option<Row>, Fault> {
    let (columns, keys) = (columns(NOW, true), &backend.tables.keys);
    let mut sql = Sql::new(format!("SELECT {columns} FROM {keys} FORCE INDEX (PRIMARY) WHERE "));
    push_ids(&mut sql, std::iter::once(id));
    sql.push(how);
    session.rows(&sql).await?.into_iter().next().map(Row::read).transpose()
}

async fn write(
    session: &mut Session<'_>,
    backend: &Backend,
    row: &Row,
    change: &Change<'_>,
    token: LeaseToken,
) -> Result<RecordView, Fault> {
    let now_us = row.now_us;
    let (status, done) = match change {
        Change::Free => (StateName::Freed, None),
        Change::Resolve { reply, head, retention } => {
            let expires_us = now_us.saturating_add_unsigned(us(*retention));
            (StateName::Completed, Some(Done { reply, head, completed_us: now_us, expires_us }))
        }
    };
    let new = NewRow { token, locked_us: now_us, done, ..row.again(status) };
    let mut sql = Sql::new(format!("REPLACE INTO {} ({ALL_COLUMNS}) VALUES ", backend.tables.keys));
    new.push_to(&mut sql);
    session.script(&[sql.inlined()]).await?;
    match read(session, backend, &row.id, "").await? {
        Some(after) => Ok(after.view()),
        None => Err(Fault::internal("a record that was just written is not there")),
    }
}

async fn note(
    session: &mut Session<'_>,
    backend: &Backend,
    before: &RecordView,
    after: &RecordView,
    change: &Change<'_>,
    action: &OperatorAction,
) -> Result<(), Fault> {
    let name = match change {
        Change::Free => action.freeing(),
        Change::Resolve { .. } => "resolve",
    };
    let mut sql = Sql::new(format!(
        "INSERT INTO {} (at, actor, action, scope, `key`, state_before, state_after, reason) VALUES ({NOW}",
        backend.tables.audit
    ));
    let (before_text, after_text) = (before.summary(), after.summary());
    let values = [
        &action.actor,
        name,
        before.id.scope.as_str(),
        before.id.key.as_str(),
        &before_text,
        &after_text,
        &action.reason,
    ];
    for value in values {
        sql.push(", ").value(value);
    }
    sql.push(")");
    session.script(&[sql.inlined()]).await?;
    Ok(())
}

async fn list(backend: &Backend, query: &ListQuery) -> Result<ListPage, Fault> {
    let mut session = backend.pool.lend().await?;
    let limit = query.limit.max(1) as usize;
    let mut page = ListPage::default();
    let mut after = query.after.clone();
    loop {
        let chunk = list_chunk(&mut session, backend, query, after.as_ref()).await?;
        let is_last = chunk.len() < LIST_CHUNK as usize;
        after = chunk.last().map(|row| row.id.clone());
        for row in chunk {
            // A record whose lease is over is unknown and stored as in progress.
            if query.state.is_some_and(|state| row.record.state_name() != state) {
                continue;
            }
            if page.records.len() == limit {
                page.next = page.records.last().map(|last: &RecordView| last.id.clone());
                return Ok(page);
            }
            page.records.push(RecordView { reply: None, ..row.view() });
        }
        if is_last {
            return Ok(page);
        }
    }
}

async fn list_chunk(
    session: &mut Session<'_>,
    backend: &Backend,
    query: &ListQuery,
    after: Option<&OperationId>,
) -> Result<Vec<Row>, Fault> {
    // Records without a reply are few, so they are read by their index and sorted; the rest comes in the order of the key.
    let (index, state) = match query.state {
        None => ("PRIMARY", "TRUE"),
        Some(StateName::Completed) => ("PRIMARY", "status = 'completed'"),
        Some(_) => ("idempotency_keys_over", "expires_at IS NULL"),
    };
    let (columns, keys) = (columns(NOW, false), &backend.tables.keys);
    let mut sql = Sql::new(format!("SELECT {columns} FROM {keys} FORCE INDEX ({index}) WHERE {state}"));
    if let Some(scope) = &query.scope {
        sql.push(" AND scope = ").value(scope.as_str());
    }
    if let Some(key) = &query.key {
        sql.push(" AND `key` = ").value(key.as_str());
    }
    if let Some(age) = query.older_than {
        sql.push(&format!(" AND created_at <= {NOW} - INTERVAL ")).value(us(age)).push(" MICROSECOND");
    }
    if let Some(after) = after {
        sql.push(" AND (scope > ").value(after.scope.as_str());
        sql.push(" OR (scope = ").value(after.scope.as_str());
        sql.push(" AND `key` > ").value(after.key.as_str()).push("))");
    }
    sql.push(&format!(" ORDER BY scope, `key` LIMIT {LIST_CHUNK}"));
    session.rows(&sql).await?.into_iter().map(Row::read).collect()
}

async fn stats(backend: &Backend) -> Result<StoreStats, Fault> {
    let mut session = backend.pool.lend().await?;
    let mut stats = StoreStats::default();
    let keys = &backend.tables.keys;
    let sql = format!(
        "SELECT expires_at <= {NOW}, status, locked_until > {NOW}, COUNT(*) \
         FROM {keys} WHERE expires_at IS NULL GROUP BY 1, 2, 3 \
         UNION ALL SELECT expires_at <= {NOW}, 'completed', FALSE, COUNT(*) \
         FROM {keys} FORCE INDEX (idempotency_keys_over) WHERE expires_at IS NOT NULL GROUP BY 1"
    );
    for row in session.patient_rows(&sql, STATS_PATIENCE_S).await? {
        let mut row = cells(row);
        let over = row.maybe_int("expires_at")?;
        let status = row.text("status")?;
        let live = row.int("locked_until")? != 0;
        let count = u64::try_from(row.int("the count")?).unwrap_or(0);
        match (status.as_str(), over) {
            ("completed", Some(1)) => stats.expired += count,
            ("completed", _) => stats.completed += count,
            ("in_progress", _) if live => stats.in_progress += count,
            ("freed", _) => stats.freed += count,
            ("in_progress" | "unknown", _) => stats.unknown += count,
            _ => return Err(Fault::unreadable("status")),
        }
    }
    let mut sql =
        Sql::new("SELECT DATA_LENGTH + INDEX_LENGTH FROM information_schema.TABLES WHERE TABLE_SCHEMA = ");
    sql.value(backend.tables.database.as_str()).push(" AND TABLE_NAME = 'idempotency_keys'");
    if let Some(row) = session.rows(&sql).await?.into_iter().next() {
        stats.bytes = cells(row).maybe_int("the size")?.and_then(|bytes| u64::try_from(bytes).ok());
    }
    Ok(stats)
}

/// Counting millions of records takes its time.
const STATS_PATIENCE_S: u32 = 300;

async fn audit(backend: &Backend, id: Option<&OperationId>, limit: u32) -> Result<Vec<AuditEntry>, Fault> {
    let mut session = backend.pool.lend().await?;
    let mut sql = Sql::new(format!(
        "SELECT {}, actor, action, scope, `key`, state_before, state_after, reason FROM {}",
        us_of("at"),
        backend.tables.audit
    ));
    if let Some(id) = id {
        sql.push(" WHERE ");
        push_ids(&mut sql, std::iter::once(id));
    }
    sql.push(&format!(" ORDER BY id DESC LIMIT {limit}"));
    let rows = session.rows(&sql).await?.into_iter().map(|row| {
        let mut row = cells(row);
        Ok(AuditEntry {
            at: wall(row.int("at")?),
            actor: row.text("actor")?,
            action: row.text("action")?,
            id: row.id()?,
            before: row.text("state_before")?,
            after: row.text("state_after")?,
            reason: row.text("reason")?,
        })
    });
    rows.collect()
}
