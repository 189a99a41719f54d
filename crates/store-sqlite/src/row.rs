//! A row of `idempotency_keys`, read and written.

use std::fmt::Write;
use std::str;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use onlyonce_core::clock::from_unix_ms;
use onlyonce_core::{
    Fingerprint, Key, LeaseToken, LeaseView, OnLeaseEnd, OperationId, Origin, Record, RecordView, Reply,
    Scope, State, StateName, StoredReply,
};
use rusqlite::types::ValueRef;
use rusqlite::{Connection, params};

use crate::boot::Now;
use crate::error::Fault;

/// The columns that [`Row::read`] expects, in its order.
macro_rules! columns {
    ($headers:literal, $body:literal) => {
        concat!(
            "scope, key, request_hash, status, response_code, ",
            $headers,
            ", ",
            $body,
            ", locked_until, created_at, claimed_at, completed_at, expires_at, clock, token, attempt, on_lease_end, origin"
        )
    };
}

/// The columns with an empty reply in place of the stored one, which then is not read from disk.
pub(crate) const COLUMNS_WITHOUT_REPLY: &str =
    columns!("CAST(':onlyonce 1' || char(10) AS BLOB)", "CAST('' AS BLOB)");

const FIND: &str = concat!(
    "SELECT ",
    columns!("response_headers", "response_body"),
    " FROM main.idempotency_keys WHERE scope = ?1 AND key = ?2"
);

/// A record with what a rewrite keeps. All times are on the current scale.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) id: OperationId,
    pub(crate) record: Record,
    pub(crate) created_ms: i64,
    pub(crate) claimed_ms: i64,
    pub(crate) locked_ms: i64,
}

impl Row {
    pub(crate) fn find(conn: &Connection, now: &Now<'_>, id: &OperationId) -> Result<Option<Self>, Fault> {
        let mut query = conn.prepare_cached(FIND)?;
        let mut rows = query.query(params![id.scope.as_str(), id.key.as_str()])?;
        rows.next()?.map(|row| Self::read(conn, now, row)).transpose()
    }

    /// Reads a row with the columns above. What this release cannot read is a fault, never no record.
    pub(crate) fn read(conn: &Connection, now: &Now<'_>, row: &rusqlite::Row<'_>) -> Result<Self, Fault> {
        let id = OperationId {
            scope: Scope::new(text(row, 0)?).map_err(|_| unreadable(row, "scope"))?,
            key: Key::new(text(row, 1)?).map_err(|_| unreadable(row, "key"))?,
        };
        let scale = now.scale(conn, int(row, 12)?)?;
        let now_ms = now.ms();
        let here = |ms: i64| ms.saturating_add(now_ms - now.ms_on(&scale));
        let (created_ms, claimed_ms) = (here(int(row, 8)?), here(int(row, 9)?));
        let mut locked_ms = here(int(row, 7)?);
        if !scale.this_boot {
            // Its owner died with that boot.
            locked_ms = locked_ms.min(now_ms);
        }
        let origin = origin(row)?;
        let token = blob(row, 13)?.try_into().map_err(|_| unreadable(row, "token"))?;
        let token = LeaseToken::from_bytes(token);
        let state = match text(row, 3)? {
            "in_progress" => State::InProgress {
                token,
                lease: match span(now_ms, locked_ms) {
                    Duration::ZERO => LeaseView::Over { since: from_unix_ms(locked_ms) },
                    left => LeaseView::Left(left),
                },
                age: span(claimed_ms, now_ms),
            },
            "completed" => {
                let expires_ms = here(int(row, 11)?);
                State::Completed {
                    token,
                    stored: StoredReply {
                        reply: read_reply(row)?,
                        completed_at: from_unix_ms(here(int(row, 10)?)),
                        expires_at: from_unix_ms(expires_ms),
                        remaining: span(now_ms, expires_ms),
                        origin: origin.clone(),
                    },
                }
            }
            "unknown" => State::Unknown { token, since: from_unix_ms(locked_ms) },
            "freed" => State::Freed { token },
            _ => return Err(unreadable(row, "status")),
        };
        let record = Record {
            fingerprint: text(row, 2)?.parse().map_err(|_| unreadable(row, "request_hash"))?,
            on_lease_end: match text(row, 15)? {
                "take_over" => OnLeaseEnd::TakeOver,
                "hold" => OnLeaseEnd::Hold,
                _ => return Err(unreadable(row, "on_lease_end")),
            },
            attempt: u32::try_from(int(row, 14)?).map_err(|_| unreadable(row, "attempt"))?,
            origin,
            state,
        };
        Ok(Self { id, record, created_ms, claimed_ms, locked_ms })
    }

    /// The same row in another state, on the current scale, without a reply.
    pub(crate) fn again(&self, status: StateName) -> NewRow<'_> {
        NewRow {
            id: &self.id,
            hash: HashText::of(&self.record.fingerprint),
            status,
            locked_ms: self.locked_ms,
            created_ms: self.created_ms,
            claimed_ms: self.claimed_ms,
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
            created_at: from_unix_ms(self.created_ms),
            locked_until: from_unix_ms(self.locked_ms),
            expires_at,
            reply,
        }
    }
}

/// A whole row to write, on the current scale.
#[derive(Debug)]
pub(crate) struct NewRow<'a> {
    pub(crate) id: &'a OperationId,
    pub(crate) hash: HashText,
    pub(crate) status: StateName,
    pub(crate) locked_ms: i64,
    pub(crate) created_ms: i64,
    pub(crate) claimed_ms: i64,
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
    pub(crate) completed_ms: i64,
    pub(crate) expires_ms: i64,
}

impl NewRow<'_> {
    /// Writes it over whatever is there.
    pub(crate) fn put(&self, conn: &Connection, now: &Now<'_>) -> Result<(), Fault> {
        let mut upsert = conn.prepare_cached(
            "INSERT INTO main.idempotency_keys (scope, key, request_hash, status, response_code, response_headers,
                response_body, locked_until, created_at, claimed_at, completed_at, expires_at, clock, token, attempt,
                on_lease_end, origin)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17)
             ON CONFLICT (scope, key) DO UPDATE SET request_hash = excluded.request_hash, status = excluded.status,
                response_code = excluded.response_code, response_headers = excluded.response_headers,
                response_body = excluded.response_body, locked_until = excluded.locked_until,
                created_at = excluded.created_at, claimed_at = excluded.claimed_at,
                completed_at = excluded.completed_at, expires_at = excluded.expires_at, clock = excluded.clock,
                token = excluded.token, attempt = excluded.attempt, on_lease_end = excluded.on_lease_end,
                origin = excluded.origin",
        )?;
        upsert.execute(params![
            self.id.scope.as_str(),
            self.id.key.as_str(),
            self.hash.as_str(),
            self.status.as_str(),
            self.done.map(|done| done.reply.status()),
            self.done.map(|done| done.head),
            self.done.map(|done| &done.reply.body()[..]),
            self.locked_ms,
            self.created_ms,
            self.claimed_ms,
            self.done.map(|done| done.completed_ms),
            self.done.map(|done| done.expires_ms),
            now.clock(),
            self.token.as_bytes(),
            self.attempt,
            policy_text(self.on_lease_end),
            self.origin.map(Origin::as_str),
        ])?;
        Ok(())
    }
}

impl Done<'_> {
    pub(crate) fn stored(&self, retention: Duration, origin: Option<&Origin>) -> StoredReply {
        StoredReply {
            reply: self.reply.clone(),
            completed_at: from_unix_ms(self.completed_ms),
            expires_at: from_unix_ms(self.expires_ms),
            remaining: retention,
            origin: origin.cloned(),
        }
    }
}

/// The stored form of a fingerprint, made without an allocation.
#[derive(Clone, Copy)]
pub(crate) struct HashText {
    bytes: [u8; 96],
    len: usize,
}

impl HashText {
    pub(crate) fn of(fingerprint: &Fingerprint) -> Self {
        let mut text = Self { bytes: [0; 96], len: 0 };
        let definition = fingerprint.definition().0;
        write!(text, "sha256:{definition:016x}:").expect("24 bytes fit in 96");
        for byte in fingerprint.digest() {
            const HEX: &[u8; 16] = b"0123456789abcdef";
            text.bytes[text.len] = HEX[usize::from(byte >> 4)];
            text.bytes[text.len + 1] = HEX[usize::from(byte & 15)];
            text.len += 2;
        }
        text
    }

    pub(crate) fn as_str(&self) -> &str {
        str::from_utf8(&self.bytes[..self.len]).expect("written as ASCII")
    }
}

impl Write for HashText {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        let end = self.len + text.len();
        self.bytes.get_mut(self.len..end).ok_or(std::fmt::Error)?.copy_from_slice(text.as_bytes());
        self.len = end;
        Ok(())
    }
}

impl std::fmt::Debug for HashText {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The stored form of a policy.
pub(crate) fn policy_text(policy: OnLeaseEnd) -> &'static str {
    match policy {
        OnLeaseEnd::TakeOver => "take_over",
        OnLeaseEnd::Hold => "hold",
    }
}

/// Wall time of a stored instant that has no scale, such as an entry of the audit table.
pub(crate) fn wall(row: &rusqlite::Row<'_>, index: usize) -> Result<SystemTime, Fault> {
    Ok(from_unix_ms(int(row, index)?))
}

pub(crate) fn int(row: &rusqlite::Row<'_>, index: usize) -> Result<i64, Fault> {
    match row.get_ref(index)? {
        ValueRef::Integer(value) => Ok(value),
        _ => Err(unreadable_at(row, index)),
    }
}

pub(crate) fn text<'r>(row: &'r rusqlite::Row<'_>, index: usize) -> Result<&'r str, Fault> {
    match row.get_ref(index)? {
        ValueRef::Text(value) => str::from_utf8(value).map_err(|_| unreadable_at(row, index)),
        _ => Err(unreadable_at(row, index)),
    }
}

fn blob<'r>(row: &'r rusqlite::Row<'_>, index: usize) -> Result<&'r [u8], Fault> {
    match row.get_ref(index)? {
        ValueRef::Blob(value) => Ok(value),
        _ => Err(unreadable_at(row, index)),
    }
}

fn origin(row: &rusqlite::Row<'_>) -> Result<Option<Origin>, Fault> {
    match row.get_ref(16)? {
        ValueRef::Null => Ok(None),
        _ => Ok(Some(Origin::new(text(row, 16)?).map_err(|_| unreadable(row, "origin"))?)),
    }
}

fn read_reply(row: &rusqlite::Row<'_>) -> Result<Reply, Fault> {
    let status = u16::try_from(int(row, 4)?).map_err(|_| unreadable(row, "response_code"))?;
    let body = Bytes::copy_from_slice(blob(row, 6)?);
    Reply::decode(status, blob(row, 5)?, body).map_err(|error| unreadable(row, &format!("reply ({error})")))
}

fn span(from_ms: i64, to_ms: i64) -> Duration {
    Duration::from_millis(u64::try_from(to_ms.saturating_sub(from_ms)).unwrap_or(0))
}

fn unreadable_at(row: &rusqlite::Row<'_>, index: usize) -> Fault {
    let name = row.as_ref().column_name(index).unwrap_or("?").to_owned();
    unreadable(row, &name)
}

// Neither scope nor key: they may be personal. The row's place is enough for an operator with the file.
fn unreadable(_row: &rusqlite::Row<'_>, column: &str) -> Fault {
    Fault::unreadable(format!("a record whose {column} this release cannot read"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use onlyonce_core::DefinitionId;

    #[test]
    fn the_hash_text_is_the_stored_form() {
        for definition in [0, 1, u64::MAX] {
            let print = Fingerprint::builder(DefinitionId(definition)).part("x").finish();
            assert_eq!(HashText::of(&print).as_str(), print.to_string());
        }
    }
}
