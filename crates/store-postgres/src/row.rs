//! A row of `idempotency_keys`, read and written.

use std::time::{Duration, SystemTime};

use bytes::{BufMut, Bytes, BytesMut};
use onlyonce_core::{
    Completion, DefinitionId, Fingerprint, Key, LeaseToken, LeaseView, OnLeaseEnd, OperationId, Origin,
    Record, RecordView, Reply, Scope, State, StateName, StoredReply,
};
use tokio_postgres::types::{FromSql, IsNull, ToSql, Type, to_sql_checked};

use crate::error::Fault;
use crate::link::Cells;

/// The columns that [`Record`]s are read from, of a table `t`, with the moment at which they were read.
pub(crate) const COLUMNS: &str = "t.scope, t.key, t.request_hash, t.status, t.response_code, t.response_headers, \
    t.response_body, t.locked_until, t.created_at, t.claimed_at, t.completed_at, t.expires_at, t.token, t.attempt, \
    t.on_lease_end, t.origin, clock_timestamp()";

/// The same without the stored reply, which then is not read from disk. Its status stays.
pub(crate) const COLUMNS_WITHOUT_REPLY: &str = "t.scope, t.key, t.request_hash, t.status, t.response_code, \
    CASE WHEN t.status = 'completed' THEN convert_to(E':onlyonce 1\\n', 'UTF8') END, \
    CASE WHEN t.status = 'completed' THEN ''::bytea END, t.locked_until, t.created_at, t.claimed_at, \
    t.completed_at, t.expires_at, t.token, t.attempt, t.on_lease_end, t.origin, now()";

/// The same in types that every driver has: text, int8 (times in microseconds since the Unix epoch) and bytea.
pub(crate) const PLAIN_COLUMNS: &str = "t.scope, t.key, t.request_hash, t.status, t.response_code::int8, \
    t.response_headers, t.response_body, \
    (extract(epoch FROM t.locked_until) * 1000000)::int8, (extract(epoch FROM t.created_at) * 1000000)::int8, \
    (extract(epoch FROM t.claimed_at) * 1000000)::int8, (extract(epoch FROM t.completed_at) * 1000000)::int8, \
    (extract(epoch FROM t.expires_at) * 1000000)::int8, uuid_send(t.token), t.attempt, t.on_lease_end, t.origin, \
    (extract(epoch FROM clock_timestamp()) * 1000000)::int8";

/// A record with what a rewrite keeps.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) id: OperationId,
    pub(crate) record: Record,
    pub(crate) created: Micros,
    pub(crate) claimed: Micros,
    pub(crate) locked: Micros,
    /// The server's clock when it was read.
    pub(crate) now: Micros,
}

impl Row {
    /// Reads the columns above, from the column `first` on. What this release cannot read is a fault, never no record.
    pub(crate) fn read(row: &tokio_postgres::Row, first: usize) -> Result<Self, Fault> {
        let from = Reader { row, first };
        Raw {
            scope: from.text(0, "scope")?,
            key: from.text(1, "key")?,
            hash: from.text(2, "request_hash")?,
            status: from.text(3, "status")?,
            code: from.get::<Option<i32>>(4, "response_code")?.map(i64::from),
            head: from.get(5, "response_headers")?,
            body: from.get(6, "response_body")?,
            locked: from.get(7, "locked_until")?,
            created: from.get(8, "created_at")?,
            claimed: from.get(9, "claimed_at")?,
            completed: from.get(10, "completed_at")?,
            expires: from.get(11, "expires_at")?,
            token: from.get::<Token>(12, "token")?.0,
            attempt: from.get(13, "attempt")?,
            policy: from.text(14, "on_lease_end")?,
            origin: from.get(15, "origin")?,
            now: from.get(16, "clock")?,
        }
        .row()
    }

    /// Reads [`PLAIN_COLUMNS`].
    pub(crate) fn read_plain(row: &impl Cells) -> Result<Self, Fault> {
        let unreadable = |column: &'static str| move || Fault::unreadable(column);
        let text = |n, name| row.text(n).flatten().ok_or_else(unreadable(name));
        let time = |n, name| row.int(n).flatten().map(Micros).ok_or_else(unreadable(name));
        let later = |n, name| row.int(n).map(|time| time.map(Micros)).ok_or_else(unreadable(name));
        let token = row.bytes(12).flatten().and_then(|bytes| bytes.try_into().ok());
        Raw {
            scope: text(0, "scope")?,
            key: text(1, "key")?,
            hash: text(2, "request_hash")?,
            status: text(3, "status")?,
            code: row.int(4).ok_or_else(unreadable("response_code"))?,
            head: row.bytes(5).ok_or_else(unreadable("response_headers"))?,
            body: row.bytes(6).ok_or_else(unreadable("response_body"))?,
            locked: time(7, "locked_until")?,
            created: time(8, "created_at")?,
            claimed: time(9, "claimed_at")?,
            completed: later(10, "completed_at")?,
            expires: later(11, "expires_at")?,
            token: LeaseToken::from_bytes(token.ok_or_else(unreadable("token"))?),
            attempt: row.int(13).flatten().ok_or_else(unreadable("attempt"))?,
            policy: text(14, "on_lease_end")?,
            origin: row.text(15).ok_or_else(unreadable("origin"))?,
            now: time(16, "clock")?,
        }
        .row()
    }

    /// The same row in another state, without a reply.
    pub(crate) fn again(&self, status: StateName) -> NewRow {
        NewRow {
            id: self.id.clone(),
            hash: self.record.fingerprint.to_string(),
            status,
            locked: self.locked,
            created: self.created,
            claimed: self.claimed,
            token: *self.record.state.token(),
            attempt: self.record.attempt,
            on_lease_end: self.record.on_lease_end,
            origin: self.record.origin.clone(),
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
            created_at: self.created.wall(),
            locked_until: self.locked.wall(),
            expires_at,
            reply,
        }
    }
}

/// A whole row to write.
#[derive(Debug)]
pub(crate) struct NewRow {
    pub(crate) id: OperationId,
    pub(crate) hash: String,
    pub(crate) status: StateName,
    pub(crate) locked: Micros,
    pub(crate) created: Micros,
    pub(crate) claimed: Micros,
    pub(crate) token: LeaseToken,
    pub(crate) attempt: u32,
    pub(crate) on_lease_end: OnLeaseEnd,
    pub(crate) origin: Option<Origin>,
    pub(crate) done: Option<Done>,
}

/// The reply of a completed row with its times.
#[derive(Clone, Debug)]
pub(crate) struct Done {
    pub(crate) reply: Reply,
    /// [`Reply::encode_head`].
    pub(crate) head: Vec<u8>,
    pub(crate) completed: Micros,
    pub(crate) expires: Micros,
}

impl Done {
    pub(crate) fn new(reply: &Reply, head: &[u8], now: Micros, retention: Duration) -> Self {
        Self { reply: reply.clone(), head: head.to_vec(), completed: now, expires: now.plus(retention) }
    }

    pub(crate) fn stored(&self, origin: Option<&Origin>) -> StoredReply {
        stored(&self.reply, self.completed, self.expires, origin)
    }
}

/// What a completion is answered with.
pub(crate) fn stored(
    reply: &Reply,
    completed: Micros,
    expires: Micros,
    origin: Option<&Origin>,
) -> StoredReply {
    StoredReply {
        reply: reply.clone(),
        completed_at: completed.wall(),
        expires_at: expires.wall(),
        remaining: completed.until(expires),
        origin: origin.cloned(),
    }
}

/// The row of a completion whose record is gone.
pub(crate) fn written_anew(
    id: &OperationId,
    fingerprint: &Fingerprint,
    origin: Option<&Origin>,
    completion: &Completion,
    done: Done,
) -> NewRow {
    NewRow {
        id: id.clone(),
        hash: fingerprint.to_string(),
        status: StateName::Completed,
        locked: done.completed,
        created: done.completed,
        claimed: done.completed,
        token: completion.token,
        attempt: completion.attempt,
        on_lease_end: OnLeaseEnd::Hold,
        origin: origin.cloned(),
        done: Some(done),
    }
}

/// The stored form of a policy.
pub(crate) fn policy_text(policy: OnLeaseEnd) -> &'static str {
    match policy {
        OnLeaseEnd::TakeOver => "take_over",
        OnLeaseEnd::Hold => "hold",
    }
}

/// The advisory lock of one operation in one table. Whoever changes a record holds it until its transaction ends, so that
/// nobody has to wait on a row. The number is the same in every process and release.
pub(crate) fn lock_number(table: &str, id: &OperationId) -> i64 {
    const LOCK: DefinitionId = DefinitionId(u64::MAX);
    let parts = Fingerprint::builder(LOCK).part(table).part(id.scope.as_str()).part(id.key.as_str());
    let [a, b, c, d, e, f, g, h, ..] = *parts.finish().digest();
    i64::from_be_bytes([a, b, c, d, e, f, g, h])
}

struct Reader<'r> {
    row: &'r tokio_postgres::Row,
    first: usize,
}

impl<'r> Reader<'r> {
    fn get<T: FromSql<'r>>(&self, index: usize, column: &str) -> Result<T, Fault> {
        self.row.try_get(self.first + index).map_err(|_| Fault::unreadable(column))
    }

    fn text(&self, index: usize, column: &str) -> Result<&'r str, Fault> {
        self.get(index, column)
    }
}

/// A row as it was found.
struct Raw<'r> {
    scope: &'r str,
    key: &'r str,
    hash: &'r str,
    status: &'r str,
    code: Option<i64>,
    head: Option<&'r [u8]>,
    body: Option<&'r [u8]>,
    locked: Micros,
    created: Micros,
    claimed: Micros,
    completed: Option<Micros>,
    expires: Option<Micros>,
    token: LeaseToken,
    attempt: i64,
    policy: &'r str,
    origin: Option<&'r str>,
    now: Micros,
}

impl Raw<'_> {
    fn row(&self) -> Result<Row, Fault> {
        let id = OperationId {
            scope: Scope::new(self.scope).map_err(|_| Fault::unreadable("scope"))?,
            key: Key::new(self.key).map_err(|_| Fault::unreadable("key"))?,
        };
        let origin = match self.origin {
            Some(text) => Some(Origin::new(text).map_err(|_| Fault::unreadable("origin"))?),
            None => None,
        };
        let record = Record {
            state: self.state(origin.as_ref())?,
            fingerprint: self.hash.parse().map_err(|_| Fault::unreadable("request_hash"))?,
            on_lease_end: match self.policy {
                "take_over" => OnLeaseEnd::TakeOver,
                "hold" => OnLeaseEnd::Hold,
                _ => return Err(Fault::unreadable("on_lease_end")),
            },
            attempt: u32::try_from(self.attempt).map_err(|_| Fault::unreadable("attempt"))?,
            origin,
        };
        let Self { created, claimed, locked, now, .. } = *self;
        Ok(Row { id, record, created, claimed, locked, now })
    }

    fn state(&self, origin: Option<&Origin>) -> Result<State, Fault> {
        let Self { token, locked, now, .. } = *self;
        Ok(match self.status {
            "in_progress" => State::InProgress {
                token,
                lease: match now.until(locked) {
                    Duration::ZERO => LeaseView::Over { since: locked.wall() },
                    left => LeaseView::Left(left),
                },
                age: self.claimed.until(now),
            },
            "completed" => {
                let completed = self.completed.ok_or_else(|| Fault::unreadable("completed_at"))?;
                let expires = self.expires.ok_or_else(|| Fault::unreadable("expires_at"))?;
                State::Completed {
                    token,
                    stored: StoredReply {
                        reply: self.reply()?,
                        completed_at: completed.wall(),
                        expires_at: expires.wall(),
                        remaining: now.until(expires),
                        origin: origin.cloned(),
                    },
                }
            }
            "unknown" => State::Unknown { token, since: locked.wall() },
            "freed" => State::Freed { token },
            _ => return Err(Fault::unreadable("status")),
        })
    }

    fn reply(&self) -> Result<Reply, Fault> {
        let status = self.code.and_then(|code| u16::try_from(code).ok());
        let status = status.ok_or_else(|| Fault::unreadable("response_code"))?;
        let head = self.head.ok_or_else(|| Fault::unreadable("response_headers"))?;
        let body = self.body.ok_or_else(|| Fault::unreadable("response_body"))?;
        Reply::decode(status, head, Bytes::copy_from_slice(body))
            .map_err(|error| Fault::unreadable("reply").with_source(error))
    }
}

/// A moment in microseconds since the Unix epoch, as `timestamptz` keeps it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Micros(pub(crate) i64);

/// PostgreSQL counts from 2000-01-01.
const EPOCH_MICROS: i64 = 946_684_800_000_000;

impl Micros {
    pub(crate) fn plus(self, time: Duration) -> Self {
        Self(self.0.saturating_add(micros(time)))
    }

    /// From here to there; zero when that is past.
    pub(crate) fn until(self, there: Self) -> Duration {
        Duration::from_micros(u64::try_from(there.0.saturating_sub(self.0)).unwrap_or(0))
    }

    pub(crate) fn wall(self) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_micros(u64::try_from(self.0).unwrap_or(0))
    }
}

/// A thousand years: the server adds it to its clock, which has an end.
const SPAN_MICROS_MAX: i64 = 1000 * 365 * 24 * 3600 * 1_000_000;

/// In microseconds, as the server computes with, bounded.
pub(crate) fn micros(time: Duration) -> i64 {
    i64::try_from(time.as_micros()).unwrap_or(i64::MAX).min(SPAN_MICROS_MAX)
}

type Unfit = Box<dyn std::error::Error + Sync + Send>;

impl ToSql for Micros {
    fn to_sql(&self, _: &Type, out: &mut BytesMut) -> Result<IsNull, Unfit> {
        out.put_i64(self.0.saturating_sub(EPOCH_MICROS));
        Ok(IsNull::No)
    }

    fn accepts(ty: &Type) -> bool {
        *ty == Type::TIMESTAMPTZ
    }

    to_sql_checked!();
}

impl<'a> FromSql<'a> for Micros {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Self, Unfit> {
        Ok(Self(i64::from_be_bytes(raw.try_into()?).saturating_add(EPOCH_MICROS)))
    }

    fn accepts(ty: &Type) -> bool {
        *ty == Type::TIMESTAMPTZ
    }
}

/// A lease token as a `uuid`: 16 bytes that people can read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Token(pub(crate) LeaseToken);

impl ToSql for Token {
    fn to_sql(&self, _: &Type, out: &mut BytesMut) -> Result<IsNull, Unfit> {
        out.put_slice(self.0.as_bytes());
        Ok(IsNull::No)
    }

    fn accepts(ty: &Type) -> bool {
        *ty == Type::UUID
    }

    to_sql_checked!();
}

impl<'a> FromSql<'a> for Token {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Self, Unfit> {
        Ok(Self(LeaseToken::from_bytes(raw.try_into()?)))
    }

    fn accepts(ty: &Type) -> bool {
        *ty == Type::UUID
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Frozen: two releases that lock by different numbers do not exclude each other.
    #[test]
    fn the_lock_number_is_frozen() {
        let id = |scope: &str, key: &str| OperationId {
            scope: Scope::new(scope).unwrap(),
            key: Key::new(key).unwrap(),
        };
        let table = "\"public\".idempotency_keys";
        assert_eq!(lock_number(table, &id("merchant-1", "order-7")), LOCK_NUMBER);
        assert_ne!(lock_number(table, &id("ab", "c")), lock_number(table, &id("a", "bc")));
        assert_ne!(lock_number(table, &id("a", "b")), lock_number("other", &id("a", "b")));
    }
    const LOCK_NUMBER: i64 = -1_186_552_313_194_976_167;

    #[test]
    fn moments_come_back_and_do_not_overflow() {
        let mut raw = BytesMut::new();
        for moment in [0, 1, EPOCH_MICROS, 4_102_444_800_000_000, -1] {
            raw.clear();
            Micros(moment).to_sql(&Type::TIMESTAMPTZ, &mut raw).unwrap();
            assert_eq!(Micros::from_sql(&Type::TIMESTAMPTZ, &raw).unwrap(), Micros(moment));
        }
        let end = Micros(i64::MAX - 5).plus(Duration::from_secs(10));
        assert_eq!(end, Micros(i64::MAX));
        assert_eq!(Micros(7).until(Micros(5)), Duration::ZERO);
        assert_eq!(Micros(-3).wall(), SystemTime::UNIX_EPOCH);
    }
}
