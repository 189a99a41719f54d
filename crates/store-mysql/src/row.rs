//! A row of `idempotency_keys`, read and written. Times are microseconds since the Unix epoch, by the server's clock.

use std::time::{Duration, SystemTime};

use bytes::Bytes;
use mysql_async::Value;
use onlyonce_core::{
    Fingerprint, Key, LeaseToken, LeaseView, OnLeaseEnd, OperationId, Origin, Record, RecordView, Reply,
    Scope, State, StateName, StoredReply,
};

use crate::error::Fault;
use crate::sql::Sql;

/// The server's clock while a statement runs, on a connection of the store's own.
pub(crate) const NOW: &str = "SYSDATE(6)";

/// The same whatever the time zone of the session: what its clock is away from UTC was so at the statement's start too.
pub(crate) const NOW_ANYWHERE: &str =
    "TIMESTAMPADD(SECOND, TIMESTAMPDIFF(SECOND, NOW(), UTC_TIMESTAMP()), SYSDATE(6))";

/// A longer time would leave what a DATETIME can say.
const SPAN_US_MAX: u64 = 1000 * 366 * 24 * 3600 * 1_000_000;

/// An instant of the table as a number.
pub(crate) fn us_of(expression: &str) -> String {
    format!("TIMESTAMPDIFF(MICROSECOND, '1970-01-01', {expression})")
}

/// A number as an instant of the table; the place is for a `?`.
pub(crate) const AT_US: &str = "TIMESTAMPADD(MICROSECOND, ?, '1970-01-01')";

/// A duration in the unit of the table, bounded.
pub(crate) fn us(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX).min(SPAN_US_MAX)
}

/// The time of a stored instant.
pub(crate) fn wall(us: i64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_micros(u64::try_from(us).unwrap_or(0))
}

/// The columns that [`Row::read`] expects, in its order; without a reply the empty one is in its place, and is not read
/// from disk.
pub(crate) fn columns(now: &str, reply: bool) -> String {
    let reply = if reply { "response_headers, response_body" } else { "':onlyonce 1\\n', ''" };
    let [locked, created, claimed, completed, expires, now] =
        ["locked_until", "created_at", "claimed_at", "completed_at", "expires_at", now].map(us_of);
    format!(
        "scope, `key`, request_hash, status, response_code, {reply}, origin, token, attempt, on_lease_end, {locked}, \
         {created}, {claimed}, {completed}, {expires}, {now}"
    )
}

/// A record with what a rewrite keeps.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) id: OperationId,
    pub(crate) record: Record,
    pub(crate) created_us: i64,
    pub(crate) claimed_us: i64,
    pub(crate) locked_us: i64,
    /// When it was read.
    pub(crate) now_us: i64,
}

impl Row {
    /// Reads a row with the columns above. What this release cannot read is a fault, never no record.
    pub(crate) fn read(row: mysql_async::Row) -> Result<Self, Fault> {
        let mut cells = Cells(row.unwrap_raw().into_iter());
        let id = cells.id()?;
        let fingerprint: Fingerprint =
            cells.text("request_hash")?.parse().map_err(|_| Fault::unreadable("request_hash"))?;
        let status = cells.text("status")?;
        let code = cells.maybe_int("response_code")?;
        let (head, body) = (cells.maybe_bytes("response_headers")?, cells.maybe_bytes("response_body")?);
        let origin = match cells.maybe_bytes("origin")? {
            None => None,
            Some(bytes) => Some(
                String::from_utf8(bytes)
                    .ok()
                    .and_then(|text| Origin::new(text).ok())
                    .ok_or_else(|| Fault::unreadable("origin"))?,
            ),
        };
        let token = cells.bytes("token")?.try_into().map_err(|_| Fault::unreadable("token"))?;
        let token = LeaseToken::from_bytes(token);
        let attempt = u32::try_from(cells.int("attempt")?).map_err(|_| Fault::unreadable("attempt"))?;
        let on_lease_end = match cells.text("on_lease_end")?.as_str() {
            "take_over" => OnLeaseEnd::TakeOver,
            "hold" => OnLeaseEnd::Hold,
            _ => return Err(Fault::unreadable("on_lease_end")),
        };
        let [locked_us, created_us, claimed_us] =
            [cells.int("locked_until")?, cells.int("created_at")?, cells.int("claimed_at")?];
        let (completed, expires) = (cells.maybe_int("completed_at")?, cells.maybe_int("expires_at")?);
        let now_us = cells.int("the clock")?;
        let state = match status.as_str() {
            "in_progress" => State::InProgress {
                token,
                lease: match span(now_us, locked_us) {
                    Duration::ZERO => LeaseView::Over { since: wall(locked_us) },
                    left => LeaseView::Left(left),
                },
                age: span(claimed_us, now_us),
            },
            "completed" => {
                let expires_us = expires.ok_or_else(|| Fault::unreadable("expires_at"))?;
                let completed_us = completed.ok_or_else(|| Fault::unreadable("completed_at"))?;
                let reply = read_reply(code, head, body)?;
                let remaining = span(now_us, expires_us);
                let (completed_at, expires_at) = (wall(completed_us), wall(expires_us));
                State::Completed {
                    token,
                    stored: StoredReply {
                        reply,
                        completed_at,
                        expires_at,
                        remaining,
                        origin: origin.clone(),
                    },
                }
            }
            "unknown" => State::Unknown { token, since: wall(locked_us) },
            "freed" => State::Freed { token },
            _ => return Err(Fault::unreadable("status")),
        };
        let record = Record { fingerprint, on_lease_end, attempt, origin, state };
        Ok(Self { id, record, created_us, claimed_us, locked_us, now_us })
    }

    /// The same row in another state, without a reply.
    pub(crate) fn again(&self, status: StateName) -> NewRow<'_> {
        NewRow {
            id: &self.id,
            fingerprint: self.record.fingerprint,
            status,
            locked_us: self.locked_us,
            created_us: self.created_us,
            claimed_us: self.claimed_us,
            token: *self.record.state.token(),
            attempt: self.record.attempt,
            on_lease_end: self.record.on_lease_end,
            origin: self.record.origin.as_ref(),
            done: None,
        }
    }

    /// As operators see it.
    pub(crate) fn view(&self) -> RecordView {
        let record = &self.record;
        let (lease_left, expires_at, reply) = match &record.state {
            State::InProgress { lease: LeaseView::Left(left), .. } => (Some(*left), None, None),
            State::Completed { stored, .. } => (None, Some(stored.expires_at), Some(stored.reply.clone())),
            State::InProgress { .. } | State::Unknown { .. } | State::Freed { .. } => (None, None, None),
        };
        RecordView {
            id: self.id.clone(),
            fingerprint: record.fingerprint,
            state: record.state_name(),
            on_lease_end: record.on_lease_end,
            attempt: record.attempt,
            origin: record.origin.clone(),
            lease_left,
            created_at: wall(self.created_us),
            locked_until: wall(self.locked_us),
            expires_at,
            reply,
        }
    }
}

/// A whole row to write.
#[derive(Debug)]
pub(crate) struct NewRow<'a> {
    pub(crate) id: &'a OperationId,
    pub(crate) fingerprint: Fingerprint,
    pub(crate) status: StateName,
    pub(crate) locked_us: i64,
    pub(crate) created_us: i64,
    pub(crate) claimed_us: i64,
    pub(crate) token: LeaseToken,
    pub(crate) attempt: u32,
    pub(crate) on_lease_end: OnLeaseEnd,
    pub(crate) origin: Option<&'a Origin>,
    pub(crate) done: Option<Done<'a>>,
}

/// The reply of a completed row with its times.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Done<'a> {
    pub(crate) reply: &'a Reply,
    /// [`Reply::encode_head`].
    pub(crate) head: &'a [u8],
    pub(crate) completed_us: i64,
    pub(crate) expires_us: i64,
}

/// The columns of a whole row, in the order of [`NewRow::push_to`].
pub(crate) const ALL_COLUMNS: &str = "scope, `key`, request_hash, status, response_code, response_headers, \
     response_body, origin, token, attempt, on_lease_end, locked_until, created_at, claimed_at, completed_at, expires_at";

impl NewRow<'_> {
    /// Adds it to the rows of a VALUES.
    pub(crate) fn push_to(&self, sql: &mut Sql) {
        sql.push("(").value(self.id.scope.as_str()).push(", ").value(self.id.key.as_str());
        sql.push(", ").value(self.fingerprint.to_string());
        sql.push(", '").push(self.status.as_str()).push("', ");
        let done = self.done;
        sql.value(done.map(|done| done.reply.status())).push(", ");
        sql.value(done.map(|done| done.head)).push(", ");
        sql.value(done.map(|done| &done.reply.body()[..])).push(", ");
        sql.value(self.origin.map(Origin::as_str)).push(", ");
        sql.value(&self.token.as_bytes()[..]).push(", ").value(self.attempt);
        sql.push(", '").push(policy_text(self.on_lease_end)).push("'");
        for at in [Some(self.locked_us), Some(self.created_us), Some(self.claimed_us)] {
            sql.push(", ").push(AT_US).bind(at);
        }
        for at in [done.map(|done| done.completed_us), done.map(|done| done.expires_us)] {
            sql.push(", ").push(AT_US).bind(at);
        }
        sql.push(")");
    }
}

impl Done<'_> {
    pub(crate) fn stored(&self, remaining: Duration, origin: Option<&Origin>) -> StoredReply {
        StoredReply {
            reply: self.reply.clone(),
            completed_at: wall(self.completed_us),
            expires_at: wall(self.expires_us),
            remaining,
            origin: origin.cloned(),
        }
    }
}

/// The stored form of a policy.
pub(crate) fn policy_text(policy: OnLeaseEnd) -> &'static str {
    match policy {
        OnLeaseEnd::TakeOver => "take_over",
        OnLeaseEnd::Hold => "hold",
    }
}

/// The cells of a row, from left to right. Numbers come as text from a statement that was not prepared.
pub(crate) struct Cells<I>(pub(crate) I);

impl<I: Iterator<Item = Option<Value>>> Cells<I> {
    fn next(&mut self, column: &str) -> Result<Value, Fault> {
        self.0.next().flatten().ok_or_else(|| Fault::unreadable(column))
    }

    pub(crate) fn maybe_bytes(&mut self, column: &str) -> Result<Option<Vec<u8>>, Fault> {
        match self.next(column)? {
            Value::NULL => Ok(None),
            Value::Bytes(bytes) => Ok(Some(bytes)),
            _ => Err(Fault::unreadable(column)),
        }
    }

    pub(crate) fn bytes(&mut self, column: &str) -> Result<Vec<u8>, Fault> {
        self.maybe_bytes(column)?.ok_or_else(|| Fault::unreadable(column))
    }

    pub(crate) fn text(&mut self, column: &str) -> Result<String, Fault> {
        String::from_utf8(self.bytes(column)?).map_err(|_| Fault::unreadable(column))
    }

    pub(crate) fn maybe_int(&mut self, column: &str) -> Result<Option<i64>, Fault> {
        match self.next(column)? {
            Value::NULL => Ok(None),
            value => mysql_async::from_value_opt(value).map(Some).map_err(|_| Fault::unreadable(column)),
        }
    }

    pub(crate) fn int(&mut self, column: &str) -> Result<i64, Fault> {
        self.maybe_int(column)?.ok_or_else(|| Fault::unreadable(column))
    }

    pub(crate) fn id(&mut self) -> Result<OperationId, Fault> {
        Ok(OperationId {
            scope: Scope::new(self.text("scope")?).map_err(|_| Fault::unreadable("scope"))?,
            key: Key::new(self.text("key")?).map_err(|_| Fault::unreadable("key"))?,
        })
    }
}

/// The cells of a row.
pub(crate) fn cells(row: mysql_async::Row) -> Cells<impl Iterator<Item = Option<Value>>> {
    Cells(row.unwrap_raw().into_iter())
}

fn read_reply(code: Option<i64>, head: Option<Vec<u8>>, body: Option<Vec<u8>>) -> Result<Reply, Fault> {
    let status = code.and_then(|code| u16::try_from(code).ok());
    let status = status.ok_or_else(|| Fault::unreadable("response_code"))?;
    let head = head.ok_or_else(|| Fault::unreadable("response_headers"))?;
    let body = body.ok_or_else(|| Fault::unreadable("response_body"))?;
    Reply::decode(status, &head, Bytes::from(body))
        .map_err(|error| Fault::unreadable(&format!("reply ({error})")))
}

/// From one instant to a later one.
pub(crate) fn span(from_us: i64, to_us: i64) -> Duration {
    Duration::from_micros(u64::try_from(to_us.saturating_sub(from_us)).unwrap_or(0))
}
