//! What commands print: tables for people, JSON for programs. The JSON forms are stable: members are added, never
//! renamed or removed.

use std::io::{self, Write};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use comfy_table::Table;
use http::HeaderMap;
use onlyonce_core::{
    AuditEntry, Clock, OnLeaseEnd, OperationId, RecordView, Reply, StateName, StoreStats, SystemClock,
};
use onlyonce_http::RequestOrigin;
use serde::Serialize;

pub(crate) use crate::visible::visible;

/// Writes one JSON document and a line break.
pub(crate) fn json(out: &mut impl Write, value: &impl Serialize) -> io::Result<()> {
    serde_json::to_writer_pretty(&mut *out, value).map_err(io::Error::from)?;
    writeln!(out)
}

/// A table without lines, so that it can be cut and searched.
pub(crate) fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::NOTHING).set_header(header.iter().copied());
    table
}

/// Writes a table without spaces at the ends of its lines.
pub(crate) fn print_table(out: &mut impl Write, table: &mut Table) -> io::Result<()> {
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    table.lines().try_for_each(|line| writeln!(out, "{}", line.trim_end()))
}

/// A scope, for people.
pub(crate) fn scope(id: &OperationId) -> String {
    match id.scope.as_str() {
        "" => "(anonymous)".into(),
        scope => visible(scope),
    }
}

/// UTC, to the second: `2026-01-01T00:00:00Z`.
pub(crate) fn time(at: SystemTime) -> String {
    humantime::format_rfc3339_seconds(printable(at)).to_string()
}

fn time_ms(at: SystemTime) -> String {
    humantime::format_rfc3339_millis(printable(at)).to_string()
}

// The formatter knows the years 1970 to 9999 alone.
fn printable(at: SystemTime) -> SystemTime {
    const YEAR_9999: Duration = Duration::from_secs(253_370_764_800);
    at.clamp(UNIX_EPOCH, UNIX_EPOCH + YEAR_9999)
}

/// A duration to the second, such as `3m 20s`; under a second to the millisecond.
pub(crate) fn duration(span: Duration) -> String {
    let rounded = if span < Duration::from_secs(1) {
        Duration::from_millis(u64::try_from(span.as_millis()).expect("under a second"))
    } else {
        Duration::from_secs(span.as_secs())
    };
    humantime::format_duration(rounded).to_string()
}

/// The state for people: a completed record past its end says so.
pub(crate) fn state(record: &RecordView) -> &'static str {
    let is_over = record.expires_at.is_some_and(|end| end <= SystemClock.wall());
    match record.state {
        StateName::Completed if is_over => "expired",
        state => state.as_str(),
    }
}

/// What happens when the lease ends: `takeover` or `hold`.
pub(crate) fn policy(policy: OnLeaseEnd) -> &'static str {
    match policy {
        OnLeaseEnd::TakeOver => "takeover",
        OnLeaseEnd::Hold => "hold",
    }
}

/// A record as JSON.
#[derive(Debug, Serialize)]
pub(crate) struct RecordJson {
    scope: String,
    key: String,
    state: &'static str,
    attempt: u32,
    on_lease_end: &'static str,
    lease_left_ms: Option<u64>,
    fingerprint: String,
    /// Of the request that ran, as it was sent by HTTP.
    request_id: Option<String>,
    traceparent: Option<String>,
    /// As stored, whatever door it came by.
    origin: Option<String>,
    created_at: String,
    locked_until: String,
    expires_at: Option<String>,
    reply: Option<ReplyJson>,
}

#[derive(Debug, Serialize)]
struct ReplyJson {
    status: u16,
    headers: Vec<(String, String)>,
    body: String,
    /// `utf-8`, or `base64` where the body is not UTF-8.
    body_encoding: &'static str,
    trailers: Vec<(String, String)>,
    body_omitted: bool,
}

impl From<&RecordView> for RecordJson {
    fn from(record: &RecordView) -> Self {
        let request = record.origin.as_ref().and_then(RequestOrigin::decode).unwrap_or_default();
        Self {
            scope: record.id.scope.as_str().into(),
            key: record.id.key.as_str().into(),
            state: record.state.as_str(),
            attempt: record.attempt,
            on_lease_end: policy(record.on_lease_end),
            lease_left_ms: record.lease_left.map(|left| u64::try_from(left.as_millis()).unwrap_or(u64::MAX)),
            fingerprint: record.fingerprint.to_string(),
            request_id: request.request_id().map(str::to_owned),
            traceparent: request.trace().map(ToString::to_string),
            origin: record.origin.as_ref().map(ToString::to_string),
            created_at: time_ms(record.created_at),
            locked_until: time_ms(record.locked_until),
            expires_at: record.expires_at.map(time_ms),
            reply: record.reply.as_ref().map(ReplyJson::from),
        }
    }
}

impl From<&Reply> for ReplyJson {
    fn from(reply: &Reply) -> Self {
        let (body, body_encoding) = body_text(reply.body());
        Self {
            status: reply.status(),
            headers: fields(reply.headers()),
            body,
            body_encoding,
            trailers: fields(reply.trailers()),
            body_omitted: reply.is_omitted(),
        }
    }
}

fn body_text(body: &Bytes) -> (String, &'static str) {
    match std::str::from_utf8(body) {
        Ok(text) => (text.into(), "utf-8"),
        Err(_) => (BASE64.encode(body), "base64"),
    }
}

/// Header lines; a value that is not UTF-8 has its other bytes as `\xNN`.
pub(crate) fn fields(map: &HeaderMap) -> Vec<(String, String)> {
    map.iter()
        .map(|(name, value)| {
            let text = match std::str::from_utf8(value.as_bytes()) {
                Ok(text) => text.to_owned(),
                Err(_) => value.as_bytes().escape_ascii().to_string(),
            };
            (name.to_string(), text)
        })
        .collect()
}

/// An audit entry as JSON.
#[derive(Debug, Serialize)]
pub(crate) struct AuditJson<'a> {
    at: String,
    actor: &'a str,
    action: &'a str,
    scope: &'a str,
    key: &'a str,
    before: &'a str,
    after: &'a str,
    reason: &'a str,
}

impl<'a> From<&'a AuditEntry> for AuditJson<'a> {
    fn from(entry: &'a AuditEntry) -> Self {
        Self {
            at: time_ms(entry.at),
            actor: &entry.actor,
            action: &entry.action,
            scope: entry.id.scope.as_str(),
            key: entry.id.key.as_str(),
            before: &entry.before,
            after: &entry.after,
            reason: &entry.reason,
        }
    }
}

/// Counts as JSON.
#[derive(Debug, Serialize)]
pub(crate) struct StatsJson {
    in_progress: u64,
    completed: u64,
    unknown: u64,
    freed: u64,
    expired: u64,
    bytes: Option<u64>,
}

impl From<&StoreStats> for StatsJson {
    fn from(stats: &StoreStats) -> Self {
        let StoreStats { in_progress, completed, unknown, freed, expired, bytes } = *stats;
        Self { in_progress, completed, unknown, freed, expired, bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_outside_the_calendar_do_not_panic() {
        assert_eq!(time(UNIX_EPOCH - Duration::from_secs(5)), "1970-01-01T00:00:00Z");
        assert!(time(UNIX_EPOCH + Duration::from_secs(u64::from(u32::MAX) * 1000)).starts_with("9999-"));
        assert_eq!(duration(Duration::from_micros(1_234_567)), "1s");
        assert_eq!(duration(Duration::from_micros(234_567)), "234ms");
    }
}
