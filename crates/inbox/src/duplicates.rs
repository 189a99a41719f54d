//! The report on duplicates: which messages came more than once, by which path, and whether they said the same.

use onlyonce_store_sqlite::rusqlite::{self, Connection, Row};
use serde::Serialize;

use crate::error::InboxError;
use crate::inbox::Inbox;
use crate::receive::Via;
use crate::table;

/// A message that came more than once.
#[derive(Clone, Debug, Serialize)]
pub struct DuplicateView {
    /// Its key.
    pub msg_id: String,
    /// How often it came, the first time included.
    pub times: u64,
    /// The paths of the repeated deliveries, with a comma between them.
    pub path: String,
    /// How many repeated deliveries came by each path.
    pub paths: Vec<PathCount>,
    /// When it came first: UTC.
    pub first_seen: String,
    /// When it came last: UTC.
    pub last_seen: String,
    /// `same`; `different` when any copy had another body than the first delivery; `unknown` when the first is not in the log.
    pub body: &'static str,
    /// How many copies had another body.
    pub conflicts: u64,
}

/// Repeated deliveries by one path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PathCount {
    /// The path.
    pub path: &'static str,
    /// How many.
    pub deliveries: u64,
}

/// All repeated deliveries by one path, those of purged messages included.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PathTotal {
    /// The path.
    pub path: String,
    /// Repeated deliveries.
    pub duplicates: u64,
    /// Those of them with another body.
    pub conflicts: u64,
    /// Deliveries that were new.
    pub applied: u64,
    /// When the first repeated one came: UTC.
    pub first_seen: Option<String>,
    /// When the last repeated one came: UTC.
    pub last_seen: Option<String>,
}

const AGAIN: &str = "verdict IN ('duplicate', 'conflict')";

impl Inbox {
    /// Calls `take` with each message that came more than once, ascending by the bytes of its key, until it fails.
    ///
    /// # Errors
    /// When the database cannot be read; `take`'s own.
    pub fn duplicates<E: From<InboxError>>(
        &self,
        mut take: impl FnMut(DuplicateView) -> Result<(), E>,
    ) -> Result<(), E> {
        let read = || self.at("cannot be read");
        if !self.has_log()? {
            return Ok(());
        }
        let by_path: String = Via::ALL
            .iter()
            .map(|via| format!(", (SELECT count(*) FROM main.inbox_deliveries WHERE msg_id = again.msg_id AND {AGAIN} AND path = '{via}')"))
            .collect();
        // The keys come from the small index on repeated deliveries; the rest is looked up key by key.
        let sql = format!(
            "SELECT again.msg_id,
                (SELECT count(*) FROM main.inbox_deliveries WHERE msg_id = again.msg_id),
                (SELECT min(received_at) FROM main.inbox_deliveries WHERE msg_id = again.msg_id),
                (SELECT max(received_at) FROM main.inbox_deliveries WHERE msg_id = again.msg_id),
                (SELECT count(*) FROM main.inbox_deliveries WHERE msg_id = again.msg_id AND verdict = 'conflict'),
                (SELECT count(*) FROM main.inbox_deliveries WHERE msg_id = again.msg_id AND verdict IN ('applied', 'failed')),
                (SELECT created_at FROM main.inbox_log WHERE msg_id = again.msg_id){by_path}
             FROM (SELECT DISTINCT msg_id FROM main.inbox_deliveries WHERE {AGAIN}) AS again ORDER BY again.msg_id"
        );
        let mut query = self.conn.prepare(&sql).map_err(read())?;
        let mut rows = query.query([]).map_err(read())?;
        while let Some(row) = rows.next().map_err(read())? {
            take(view(row).map_err(read())?)?;
        }
        Ok(())
    }

    /// Repeated deliveries by path, the most first.
    ///
    /// # Errors
    /// When the database cannot be read.
    pub fn duplicates_by_path(&self) -> Result<Vec<PathTotal>, InboxError> {
        if !self.has_log()? {
            return Ok(Vec::new());
        }
        totals(&self.conn).map_err(self.at("cannot be read"))
    }

    /// Length of the longest key among them, in characters: for whoever lays out a table.
    ///
    /// # Errors
    /// When the database cannot be read.
    pub fn duplicates_key_width(&self) -> Result<u64, InboxError> {
        if !self.has_log()? {
            return Ok(0);
        }
        let sql = format!("SELECT coalesce(max(length(msg_id)), 0) FROM main.inbox_deliveries WHERE {AGAIN}");
        table::number(&self.conn, &sql, []).map_err(self.at("cannot be read"))
    }

    fn has_log(&self) -> Result<bool, InboxError> {
        let found = table::object_type(&self.conn, "inbox_deliveries").map_err(self.at("cannot be read"))?;
        Ok(found.is_some())
    }
}

fn view(row: &Row<'_>) -> rusqlite::Result<DuplicateView> {
    let count = |column: usize| row.get::<_, i64>(column).map(i64::unsigned_abs);
    let mut paths = Vec::new();
    for (via, column) in Via::ALL.iter().zip(7..) {
        let deliveries = count(column)?;
        if deliveries > 0 {
            paths.push(PathCount { path: via.as_str(), deliveries });
        }
    }
    let (times, conflicts, firsts) = (count(1)?, count(4)?, count(5)?);
    let first_logged: String = row.get(2)?;
    // A first delivery that is not in the log was one all the same: a row that a hand made, or one of an older log.
    let (times, first_seen) = match firsts {
        0 => (times + 1, row.get::<_, Option<String>>(6).ok().flatten().unwrap_or(first_logged)),
        _ => (times, first_logged),
    };
    let body = match (conflicts, firsts) {
        (1.., _) => "different",
        (0, 0) => "unknown",
        (0, _) => "same",
    };
    let path = paths.iter().map(|count| count.path).collect::<Vec<_>>().join(",");
    Ok(DuplicateView {
        msg_id: row.get(0)?,
        times,
        path,
        paths,
        first_seen,
        last_seen: row.get(3)?,
        body,
        conflicts,
    })
}

fn totals(conn: &Connection) -> rusqlite::Result<Vec<PathTotal>> {
    let sql = "SELECT path,
            sum(n) FILTER (WHERE verdict IN ('duplicate', 'conflict')),
            sum(n) FILTER (WHERE verdict = 'conflict'),
            sum(n) FILTER (WHERE verdict IN ('applied', 'failed')),
            min(first_seen) FILTER (WHERE verdict IN ('duplicate', 'conflict')),
            max(last_seen) FILTER (WHERE verdict IN ('duplicate', 'conflict'))
         FROM (
            SELECT path, verdict, count(*) AS n, min(received_at) AS first_seen, max(received_at) AS last_seen
            FROM main.inbox_deliveries GROUP BY path, verdict
            UNION ALL SELECT path, verdict, deliveries, first_seen, last_seen FROM main.inbox_totals)
         GROUP BY path ORDER BY 2 DESC, path";
    let count = |row: &Row<'_>, column: usize| -> rusqlite::Result<u64> {
        Ok(row.get::<_, Option<i64>>(column)?.unwrap_or_default().unsigned_abs())
    };
    let found = |row: &Row<'_>| {
        Ok(PathTotal {
            path: row.get(0)?,
            duplicates: count(row, 1)?,
            conflicts: count(row, 2)?,
            applied: count(row, 3)?,
            first_seen: row.get(4)?,
            last_seen: row.get(5)?,
        })
    };
    conn.prepare(sql)?.query_map([], found)?.collect()
}
