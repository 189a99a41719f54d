//! The operator's side. Each change is made with its audit entry in one transaction, under the lock of its operation.

use std::time::Duration;

use async_trait::async_trait;
use onlyonce_core::{
    AuditEntry, Key, LeaseToken, ListPage, ListQuery, OperationId, OperatorAction, OperatorDecision,
    OperatorOutcome, RecordView, Reply, Scope, StateName, StoreAdmin, StoreError, StoreErrorKind, StoreStats,
    decide_operator,
};
use tokio_postgres::types::Type;

use crate::claims::Change;
use crate::columns::{Changes, numbered};
use crate::error::Fault;
use crate::row::{COLUMNS_WITHOUT_REPLY, Done, Micros, NewRow, Row, lock_number, micros};
use crate::session::{Call, Part, Session, Sql};
use crate::store::PostgresStore;

/// How long a look over many records may take.
const LOOK_PATIENCE: Duration = Duration::from_secs(120);

#[async_trait]
impl StoreAdmin for PostgresStore {
    async fn show(&self, id: &OperationId) -> Result<Option<RecordView>, StoreError> {
        let shown = async {
            let mut session = self.connections().lend().await?;
            Ok(self.find(&mut session, id, Part::Whole).await?.map(|row| row.view()))
        };
        shown.await.map_err(|fault: Fault| fault.into_error("show"))
    }

    async fn list(&self, query: &ListQuery) -> Result<ListPage, StoreError> {
        self.page(query).await.map_err(|fault| fault.into_error("list"))
    }

    async fn resolve(
        &self,
        id: &OperationId,
        reply: &Reply,
        retention: Duration,
        action: &OperatorAction,
    ) -> Result<OperatorOutcome, StoreError> {
        let resolved = |row: &Row, now: Micros| {
            let done = Done::new(reply, &reply.encode_head(), now, retention);
            NewRow { done: Some(done), ..row.again(StateName::Completed) }
        };
        self.change(id, action, "resolve", resolved).await.map_err(|fault| fault.into_error("resolve"))
    }

    async fn free(&self, id: &OperationId, action: &OperatorAction) -> Result<OperatorOutcome, StoreError> {
        let freed = |row: &Row, _| row.again(StateName::Freed);
        self.change(id, action, action.freeing(), freed).await.map_err(|fault| fault.into_error("free"))
    }

    /// Reads the whole table once. `bytes` is the size of the table with its indexes.
    async fn stats(&self) -> Result<StoreStats, StoreError> {
        self.counts().await.map_err(|fault| fault.into_error("stats"))
    }

    async fn audit(&self, id: Option<&OperationId>, limit: u32) -> Result<Vec<AuditEntry>, StoreError> {
        self.entries(id, limit).await.map_err(|fault| fault.into_error("audit"))
    }
}

impl PostgresStore {
    async fn find(
        &self,
        session: &mut Session<'_>,
        id: &OperationId,
        part: Part,
    ) -> Result<Option<Row>, Fault> {
        let (scopes, keys) = (vec![id.scope.as_str()], vec![id.key.as_str()]);
        let read = Call::new(&self.statements().read, vec![&scopes, &keys]);
        let rows = session.run(&[read], part).await?.pop().unwrap_or_default();
        rows.iter().find(|row| numbered(row) == Some(0)).map(|row| Row::read(row, 1)).transpose()
    }

    async fn change(
        &self,
        id: &OperationId,
        action: &OperatorAction,
        name: &'static str,
        changed: impl FnOnce(&Row, Micros) -> NewRow,
    ) -> Result<OperatorOutcome, Fault> {
        let token = fresh_token()?;
        let mut session = self.connections().lend().await?;
        session.begin_waiting(self.connections().patience / 2).await?;
        let lock = lock_number(&self.statements().table, id);
        session.run(&[Call::new(&self.statements().lock, vec![&lock])], Part::Middle).await?;
        let row = self.find(&mut session, id, Part::Middle).await?;
        let decision = decide_operator(row.as_ref().map(|row| &row.record), action.target);
        let row = match (decision, row) {
            (OperatorDecision::Apply, Some(row)) => row,
            (refused, _) => {
                session.roll_back().await?;
                return Ok(match refused {
                    OperatorDecision::LiveLease { left } => OperatorOutcome::LiveLease { left },
                    OperatorDecision::Completed => OperatorOutcome::Completed,
                    OperatorDecision::NoReply => OperatorOutcome::NoReply,
                    OperatorDecision::Absent | OperatorDecision::Apply => OperatorOutcome::Absent,
                });
            }
        };
        // A fresh token that nobody holds: a returning owner is fenced.
        let new = NewRow { token, locked: row.now, ..changed(&row, row.now) };
        let mut changes = Changes::default();
        changes.add(Change::Put(Box::new(new)));
        changes.write(self.statements(), &mut session).await?;
        let Some(after) = self.find(&mut session, id, Part::Middle).await? else {
            return Err(Fault::internal("a record that was just written is not there"));
        };
        let after = after.view();
        let entry = Sql {
            types: &[Type::TEXT, Type::TEXT, Type::TEXT, Type::TEXT, Type::TEXT, Type::TEXT, Type::TEXT],
            text: format!(
                "INSERT INTO {} (at, actor, action, scope, key, state_before, state_after, reason)
                 VALUES (clock_timestamp(), $1, $2, $3, $4, $5, $6, $7)",
                self.place().audit()
            )
            .into(),
        };
        let (scope, key) = (id.scope.as_str(), id.key.as_str());
        let (before, then) = (row.view().summary(), after.summary());
        let entry =
            Call::new(&entry, vec![&action.actor, &name, &scope, &key, &before, &then, &action.reason]);
        session.run(&[entry], Part::End).await?;
        Ok(OperatorOutcome::Done(Box::new(after)))
    }

    async fn page(&self, query: &ListQuery) -> Result<ListPage, Fault> {
        // A record whose lease is over is unknown and stored as in progress; `now()` is also what the rows are
        // judged by when they are read.
        let state = match query.state {
            None => "true",
            Some(StateName::Completed) => "t.status = 'completed'",
            Some(StateName::InProgress) => {
                "t.status <> 'completed' AND t.status = 'in_progress'
                 AND t.locked_until > now()"
            }
            Some(StateName::Unknown) => {
                "t.status <> 'completed' AND (t.status = 'unknown' OR t.status = 'in_progress'
                 AND t.locked_until <= now())"
            }
            Some(StateName::Freed) => "t.status <> 'completed' AND t.status = 'freed'",
        };
        let sql = Sql {
            types: &[Type::TEXT, Type::TEXT, Type::TEXT, Type::INT8, Type::INT8, Type::TEXT],
            text: format!(
                "SELECT {COLUMNS_WITHOUT_REPLY} FROM {} AS t
                 WHERE (t.scope, t.key) > ($1, $2) AND {state} AND ($3::text IS NULL OR t.key = $3)
                    AND ($4::int8 IS NULL OR t.created_at <= now() - $4 * interval '1 microsecond')
                    AND ($6::text IS NULL OR t.scope = $6)
                 ORDER BY t.scope, t.key LIMIT $5",
                self.place().keys()
            )
            .into(),
        };
        // Every record comes after the empty scope with the empty key, which nobody has.
        let after = query.after.as_ref();
        let (scope, key) = after.map_or(("", ""), |id| (id.scope.as_str(), id.key.as_str()));
        let (wanted, age) = (query.key.as_ref().map(Key::as_str), query.older_than.map(micros));
        let limit = i64::from(query.limit.max(1));
        let one_more = limit + 1;
        let whose = query.scope.as_ref().map(Scope::as_str);
        let call = Call::new(&sql, vec![&scope, &key, &wanted, &age, &one_more, &whose]);
        let rows = self.look(call).await?;
        let mut page = ListPage::default();
        for row in &rows {
            if page.records.len() as i64 == limit {
                page.next = page.records.last().map(|last: &RecordView| last.id.clone());
                break;
            }
            page.records.push(RecordView { reply: None, ..Row::read(row, 0)?.view() });
        }
        Ok(page)
    }

    async fn counts(&self) -> Result<StoreStats, Fault> {
        let keys = self.place().keys();
        let sql = Sql {
            types: &[],
            text: format!(
                "SELECT count(*) FILTER (WHERE status = 'in_progress' AND locked_until > now()),
                    count(*) FILTER (WHERE status = 'completed' AND expires_at > now()),
                    count(*) FILTER (WHERE status = 'unknown'
                        OR status = 'in_progress' AND locked_until <= now()),
                    count(*) FILTER (WHERE status = 'freed'),
                    count(*) FILTER (WHERE status = 'completed' AND expires_at <= now()),
                    pg_total_relation_size('{}')
                 FROM {keys}",
                keys.replace('\'', "''")
            )
            .into(),
        };
        let rows = self.look(Call::new(&sql, Vec::new())).await?;
        let row = rows.first().ok_or_else(|| Fault::internal("a count without an answer"))?;
        let count = |n: usize| row.try_get::<_, i64>(n).map(i64::unsigned_abs);
        Ok(StoreStats {
            in_progress: count(0)?,
            completed: count(1)?,
            unknown: count(2)?,
            freed: count(3)?,
            expired: count(4)?,
            bytes: Some(count(5)?),
        })
    }

    async fn entries(&self, id: Option<&OperationId>, limit: u32) -> Result<Vec<AuditEntry>, Fault> {
        let sql = Sql {
            types: &[Type::TEXT, Type::TEXT, Type::INT8],
            text: format!(
                "SELECT at, actor, action, scope, key, state_before, state_after, reason FROM {}
                 WHERE $1::text IS NULL OR (scope = $1 AND key = $2) ORDER BY id DESC LIMIT $3",
                self.place().audit()
            )
            .into(),
        };
        let (scope, key) = (id.map(|id| id.scope.as_str()), id.map(|id| id.key.as_str()));
        let limit = i64::from(limit);
        let rows = self.look(Call::new(&sql, vec![&scope, &key, &limit])).await?;
        rows.iter().map(entry).collect()
    }

    /// Runs a statement that may read many rows.
    async fn look(&self, call: Call<'_>) -> Result<Vec<tokio_postgres::Row>, Fault> {
        let mut session = self.connections().lend().await?;
        session.begin_long(LOOK_PATIENCE).await?;
        session.execute("SET LOCAL enable_seqscan = on").await?;
        Ok(session.run(&[call], Part::End).await?.pop().unwrap_or_default())
    }
}

fn entry(row: &tokio_postgres::Row) -> Result<AuditEntry, Fault> {
    let text =
        |n: usize| row.try_get::<_, &str>(n).map_err(|_| Fault::unreadable("entry on the audit table"));
    Ok(AuditEntry {
        at: row.try_get::<_, Micros>(0)?.wall(),
        actor: text(1)?.into(),
        action: text(2)?.into(),
        id: OperationId {
            scope: Scope::new(text(3)?).map_err(|_| Fault::unreadable("scope"))?,
            key: Key::new(text(4)?).map_err(|_| Fault::unreadable("key"))?,
        },
        before: text(5)?.into(),
        after: text(6)?.into(),
        reason: text(7)?.into(),
    })
}

fn fresh_token() -> Result<LeaseToken, Fault> {
    let mut token = [0; 16];
    getrandom::fill(&mut token).map_err(|error| {
        Fault::new(StoreErrorKind::Internal, "the system has no random bytes").with_source(error)
    })?;
    Ok(LeaseToken::from_bytes(token))
}
