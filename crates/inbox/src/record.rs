//! One message: what is on record about it, and how an operator makes its key new again.

use onlyonce_store_sqlite::file::BootTime;
use onlyonce_store_sqlite::rusqlite::{self, Connection, OptionalExtension, Row, params};
use serde::Serialize;

use crate::error::InboxError;
use crate::inbox::Inbox;
use crate::lease::{self, LeaseView};
use crate::table;

/// What is on record about one key.
#[derive(Clone, Debug, Serialize)]
pub struct RecordView {
    /// Its row, unless it has none (any more).
    pub row: Option<RowView>,
    /// The lease of a handler that works on it, or did when it was last seen.
    pub lease: Option<LeaseView>,
    /// Its deliveries, oldest first, as far as they are in the log.
    pub deliveries: Vec<DeliveryView>,
    /// How often it was delivered, the first time included, where it is in the log.
    pub times: u64,
    /// What operators did to it, oldest first.
    pub audit: Vec<AuditView>,
}

/// A row of `inbox_log`.
#[derive(Clone, Debug, Serialize)]
pub struct RowView {
    /// The key.
    pub msg_id: String,
    /// What it is about.
    pub biz_key: Option<String>,
    /// `done` or `failed`.
    pub status: Option<String>,
    /// What every copy is answered.
    pub response: Option<String>,
    /// When it was applied: UTC.
    pub created_at: Option<String>,
}

/// What an operator's reset found.
#[derive(Clone, Debug)]
pub enum Forgotten {
    /// The row as it was, and the lease if there was one whose time was over: both are gone.
    Removed {
        /// The row.
        row: Option<RowView>,
        /// The lease.
        lease: Option<LeaseView>,
    },
    /// A handler works on the message at this moment: nothing was changed.
    InProgress(LeaseView),
    /// There is nothing to forget.
    Absent,
}

/// A row of the delivery log.
#[derive(Clone, Debug, Serialize)]
pub struct DeliveryView {
    /// `applied`, `failed`, `duplicate` or `conflict`.
    pub verdict: String,
    /// By which path it came.
    pub path: String,
    /// The file that it was in.
    pub source: String,
    /// The digest of its body, in hexadecimal.
    pub digest: String,
    /// When: UTC.
    pub received_at: String,
}

/// What an operator did.
#[derive(Clone, Debug, Serialize)]
pub struct AuditView {
    /// When: UTC.
    pub at: String,
    /// Who.
    pub actor: String,
    /// What: `forget`.
    pub action: String,
    /// The row as it was, in JSON.
    pub before: String,
    /// Why.
    pub reason: String,
}

/// Deliveries that a view shows, at most: the last ones.
const DELIVERIES_MAX: u32 = 1000;

impl Inbox {
    /// What is on record about a key; `None` when there is nothing.
    ///
    /// # Errors
    /// When the database cannot be read.
    pub fn record_of(&self, key: &str) -> Result<Option<RecordView>, InboxError> {
        self.read(|conn| {
            let mut view = view(conn, key).map_err(self.at("cannot be read"))?;
            view.lease = self.lease_of(conn, key)?;
            let is_known = view.row.is_some()
                || view.lease.is_some()
                || !view.deliveries.is_empty()
                || !view.audit.is_empty();
            Ok(is_known.then_some(view))
        })
    }

    /// Removes the row of a key and a lease that is over, so that the message is new when it comes again, and writes who did
    /// so and why on `inbox_audit`.
    ///
    /// # Errors
    /// When the database cannot be written.
    pub fn forget(&self, key: &str, actor: &str, reason: &str) -> Result<Forgotten, InboxError> {
        self.write(|conn| {
            let lease = self.lease_of(conn, key)?;
            if let Some(lease) = lease.as_ref().filter(|lease| lease.left_ms > 0) {
                return Ok(Forgotten::InProgress(lease.clone()));
            }
            let row = row_of(conn, key).map_err(self.at("cannot be read"))?;
            let before = match (&row, &lease) {
                (Some(row), _) => serde_json::to_string(row),
                (None, Some(lease)) => serde_json::to_string(lease),
                (None, None) => return Ok(Forgotten::Absent),
            };
            let before = before.expect("text is JSON");
            let forget = || -> rusqlite::Result<()> {
                conn.execute("DELETE FROM main.inbox_log WHERE msg_id = ?1", [key])?;
                lease::remove(conn, key)?;
                conn.execute(
                    "INSERT INTO main.inbox_audit (at, actor, action, msg_id, before, reason)
                     VALUES (datetime('now'), ?1, 'forget', ?2, ?3, ?4)",
                    params![actor, key, before, reason],
                )?;
                Ok(())
            };
            forget().map_err(self.at("cannot be written"))?;
            Ok(Forgotten::Removed { row, lease })
        })
    }

    fn lease_of(&self, conn: &Connection, key: &str) -> Result<Option<LeaseView>, InboxError> {
        let lease = lease::find(conn, key).map_err(self.at("cannot be read"))?;
        lease.map(|lease| Ok(lease.view(key, &BootTime::now(self.path())?))).transpose()
    }
}

fn view(conn: &Connection, key: &str) -> rusqlite::Result<RecordView> {
    let row = row_of(conn, key)?;
    let (mut deliveries, mut audit, mut times) = (Vec::new(), Vec::new(), 0);
    if table::object_type(conn, "inbox_deliveries")?.is_some() {
        let sql = "SELECT * FROM (SELECT id, verdict, path, source, hex(digest), received_at FROM main.inbox_deliveries
            WHERE msg_id = ?1 ORDER BY id DESC LIMIT ?2) ORDER BY id";
        let found = |row: &Row<'_>| {
            Ok(DeliveryView {
                verdict: row.get(1)?,
                path: row.get(2)?,
                source: row.get(3)?,
                digest: row.get::<_, String>(4)?.to_lowercase(),
                received_at: row.get(5)?,
            })
        };
        deliveries =
            conn.prepare(sql)?.query_map(params![key, DELIVERIES_MAX], found)?.collect::<Result<_, _>>()?;
        times = table::number(conn, "SELECT count(*) FROM main.inbox_deliveries WHERE msg_id = ?1", [key])?;
    }
    if table::object_type(conn, "inbox_audit")?.is_some() {
        let sql =
            "SELECT at, actor, action, before, reason FROM main.inbox_audit WHERE msg_id = ?1 ORDER BY id";
        let found = |row: &Row<'_>| {
            Ok(AuditView {
                at: row.get(0)?,
                actor: row.get(1)?,
                action: row.get(2)?,
                before: row.get(3)?,
                reason: row.get(4)?,
            })
        };
        audit = conn.prepare(sql)?.query_map([key], found)?.collect::<Result<_, _>>()?;
    }
    Ok(RecordView { row, lease: None, deliveries, times, audit })
}

fn row_of(conn: &Connection, key: &str) -> rusqlite::Result<Option<RowView>> {
    let sql = "SELECT biz_key, status, response, created_at FROM main.inbox_log WHERE msg_id = ?1";
    conn.query_row(sql, [key], |row| {
        Ok(RowView {
            msg_id: key.into(),
            biz_key: text(row, 0)?,
            status: text(row, 1)?,
            response: text(row, 2)?,
            created_at: text(row, 3)?,
        })
    })
    .optional()
}

fn text(row: &Row<'_>, column: usize) -> rusqlite::Result<Option<String>> {
    Ok(table::bytes(row, column)?.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()))
}
