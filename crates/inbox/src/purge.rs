//! Removing what is older than a period: never "the oldest N", which on a surge would be recent messages.

use std::thread;
use std::time::Duration;

use onlyonce_store_sqlite::file::BootTime;
use onlyonce_store_sqlite::rusqlite::types::Value;
use onlyonce_store_sqlite::rusqlite::{self, Connection, OptionalExtension, params};

use crate::error::InboxError;
use crate::inbox::Inbox;
use crate::table;

/// Rows looked at in one transaction.
const BATCH_ROWS: u32 = 2000;
/// Between two transactions: longer than the naps of those who wait for the database, so that they get their turn.
const REST: Duration = Duration::from_millis(2);
/// Keys of rows with unreadable dates that are named.
const UNREADABLE_NAMED: usize = 10;

// NULL where it cannot be read. A text must start with a year: SQLite reads `12:30` as a time in the year 2000, and a
// number in a text as a Julian day.
const CREATED: &str =
    "CASE WHEN typeof(created_at) = 'text' AND created_at NOT GLOB '[0-9][0-9][0-9][0-9]-*' THEN NULL
    ELSE julianday(created_at) END";

/// What a purge did, or would do.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PurgeReport {
    /// Rows older than the period: removed, or with [`PurgeOptions::dry_run`] those that would be.
    pub deleted: u64,
    /// Rows left.
    pub remain: u64,
    /// Rows whose date cannot be read: kept.
    pub unreadable: u64,
    /// Some of their keys.
    pub unreadable_keys: Vec<String>,
    /// Leases as old, of work that was begun and not seen to end: forgotten, or with a dry run those that would be. One that
    /// still holds is never touched.
    pub leases: u64,
    /// The longest time between the first delivery of a message and a later one that the log knows of, in days.
    pub longest_retry_days: Option<f64>,
}

/// How to purge.
#[derive(Clone, Copy, Debug)]
pub struct PurgeOptions {
    days: f64,
    /// Counts, and changes nothing.
    pub dry_run: bool,
}

/// A period that is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a number of days is needed, 0 or more, such as 30 or 0.5")]
pub struct InvalidPeriod;

impl PurgeOptions {
    /// Everything that is older than so many days.
    ///
    /// # Errors
    /// For a number that is negative or none.
    pub fn older_than_days(days: f64) -> Result<Self, InvalidPeriod> {
        match days.is_finite() && days >= 0.0 {
            true => Ok(Self { days, dry_run: false }),
            false => Err(InvalidPeriod),
        }
    }

    /// The period.
    pub fn days(&self) -> f64 {
        self.days
    }
}

impl Inbox {
    /// Removes the rows of `inbox_log` that are older than a period, in small transactions.
    ///
    /// What is in progress has no row yet and is not touched. Rows of the delivery log that are as old and whose message is
    /// gone are added up by path and verdict, so that the totals stay what they were. `observe` is told how many rows were
    /// removed so far.
    ///
    /// # Errors
    /// [`InboxError`]; what was removed before stays removed.
    pub fn purge(
        &self,
        options: PurgeOptions,
        mut observe: impl FnMut(u64),
    ) -> Result<PurgeReport, InboxError> {
        let read = || self.at("cannot be read");
        let mut report = PurgeReport {
            longest_retry_days: self.longest_retry_days().map_err(read())?,
            ..PurgeReport::default()
        };
        let cutoff: f64 = self
            .conn
            .query_row("SELECT julianday('now') - ?1", [options.days], |row| row.get(0))
            .map_err(read())?;
        let by = if table::has_rowid(&self.conn).map_err(read())? { "rowid" } else { "msg_id" };
        let sweep = Sweep { by, cutoff, dry_run: options.dry_run };
        let mut from = None;
        loop {
            let step = |conn: &Connection| {
                sweep.step(conn, &mut from, &mut report).map_err(self.at("cannot be purged"))
            };
            let more = if options.dry_run { self.read(step)? } else { self.write(step)? };
            observe(report.deleted);
            if !more {
                break;
            }
            thread::sleep(REST);
        }
        report.leases = self.purge_leases(cutoff, options.dry_run)?;
        if !options.dry_run {
            self.roll_up(cutoff)?;
        }
        report.remain = self.rows()?;
        if options.dry_run {
            report.remain = report.remain.saturating_sub(report.deleted);
        }
        Ok(report)
    }

    /// The longest time between the first delivery of a message and a later one that the log knows of, in days.
    fn longest_retry_days(&self) -> rusqlite::Result<Option<f64>> {
        if table::object_type(&self.conn, "inbox_deliveries")?.is_none() {
            return Ok(None);
        }
        self.conn.query_row(
            "SELECT max(days) FROM (
                SELECT julianday(again.received_at) - (
                    SELECT min(julianday(first.received_at)) FROM main.inbox_deliveries AS first
                    WHERE first.msg_id = again.msg_id) AS days
                FROM main.inbox_deliveries AS again WHERE again.verdict IN ('duplicate', 'conflict')
                UNION ALL SELECT longest_days FROM main.inbox_totals)",
            [],
            |row| row.get(0),
        )
    }

    // There are as many as crashes that no delivery followed: few.
    fn purge_leases(&self, cutoff: f64, dry_run: bool) -> Result<u64, InboxError> {
        const OLD: &str = "FROM main.inbox_leases WHERE julianday(taken_at) < ?1 AND (boot_id <> ?2 OR until_boot_ms <= ?3)";
        if table::object_type(&self.conn, "inbox_leases").map_err(self.at("cannot be read"))?.is_none() {
            return Ok(0);
        }
        let boot = BootTime::now(self.path())?;
        let old = params![cutoff, boot.boot_id, boot.ms];
        let count = format!("SELECT count(*) {OLD}");
        let found = table::number(&self.conn, &count, old).map_err(self.at("cannot be read"))?;
        if found > 0 && !dry_run {
            self.write(|conn| {
                conn.execute(&format!("DELETE {OLD}"), old).map_err(self.at("cannot be purged"))
            })?;
        }
        Ok(found)
    }

    // Deliveries as old as the rows that went, of messages that have no row.
    fn roll_up(&self, cutoff: f64) -> Result<(), InboxError> {
        let mut from = 0;
        loop {
            let last =
                self.write(|conn| roll_up_step(conn, cutoff, from).map_err(self.at("cannot be purged")))?;
            match last {
                Some(last) => from = last,
                None => return Ok(()),
            }
            thread::sleep(REST);
        }
    }
}

struct Sweep {
    // The column that rows are walked by.
    by: &'static str,
    cutoff: f64,
    dry_run: bool,
}

impl Sweep {
    // Looks at the rows after `from`, and answers whether there are more.
    fn step(
        &self,
        conn: &Connection,
        from: &mut Option<Value>,
        report: &mut PurgeReport,
    ) -> rusqlite::Result<bool> {
        let by = self.by;
        let after = if from.is_some() { format!("WHERE {by} > ?1") } else { "WHERE ?1 IS NULL".into() };
        let sql = format!(
            "SELECT {by}, msg_id, {CREATED} FROM main.inbox_log {after} ORDER BY {by} LIMIT {BATCH_ROWS}"
        );
        let mut query = conn.prepare_cached(&sql)?;
        let mut rows = query.query(params![&*from])?;
        let mut delete = conn.prepare_cached(&format!("DELETE FROM main.inbox_log WHERE {by} = ?1"))?;
        let (mut seen, mut old) = (0, Vec::new());
        while let Some(row) = rows.next()? {
            let place: Value = row.get(0)?;
            match row.get::<_, Option<f64>>(2)? {
                None => {
                    report.unreadable += 1;
                    if report.unreadable_keys.len() < UNREADABLE_NAMED {
                        report.unreadable_keys.push(text_of(row.get(1)?));
                    }
                }
                Some(created) if created < self.cutoff => old.push(place.clone()),
                Some(_) => {}
            }
            seen += 1;
            *from = Some(place);
        }
        report.deleted += old.len() as u64;
        if !self.dry_run {
            for place in old {
                delete.execute([place])?;
            }
        }
        Ok(seen == BATCH_ROWS)
    }
}

fn text_of(value: Value) -> String {
    match value {
        Value::Text(text) => text,
        Value::Integer(number) => number.to_string(),
        other => format!("{other:?}"),
    }
}

// Answers the last row looked at, or `None` at the end.
fn roll_up_step(conn: &Connection, cutoff: f64, from: i64) -> rusqlite::Result<Option<i64>> {
    let last: Option<i64> = conn
        .query_row(
            "SELECT max(id) FROM (SELECT id FROM main.inbox_deliveries WHERE id > ?1 ORDER BY id LIMIT ?2)",
            params![from, BATCH_ROWS],
            |row| row.get(0),
        )
        .optional()?
        .flatten();
    let Some(last) = last else { return Ok(None) };
    const OLD: &str =
        "FROM main.inbox_deliveries AS d WHERE d.id > ?1 AND d.id <= ?2 AND julianday(d.received_at) < ?3
        AND NOT EXISTS (SELECT 1 FROM main.inbox_log WHERE msg_id = d.msg_id)";
    let added = format!(
        "INSERT INTO main.inbox_totals (path, verdict, deliveries, first_seen, last_seen, longest_days)
         SELECT path, verdict, count(*), min(received_at), max(received_at), max(coalesce(
            julianday(received_at) - (SELECT min(julianday(first.received_at)) FROM main.inbox_deliveries AS first
                WHERE first.msg_id = d.msg_id), 0.0)) {OLD} GROUP BY path, verdict
         ON CONFLICT (path, verdict) DO UPDATE SET
            deliveries = deliveries + excluded.deliveries,
            first_seen = min(first_seen, excluded.first_seen),
            last_seen = max(last_seen, excluded.last_seen),
            longest_days = max(longest_days, excluded.longest_days)"
    );
    conn.prepare_cached(&added)?.execute(params![from, last, cutoff])?;
    conn.prepare_cached(&format!("DELETE {OLD}"))?.execute(params![from, last, cutoff])?;
    Ok(Some(last))
}
