//! Where it is read what was done: a ledger of our own, or the table that servers wrote into beside their records.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::Request;
use http_body_util::Full;
use parking_lot::Mutex;
use tokio::time::timeout;

use crate::door::send;
use crate::fleet::Fleet;
use crate::history::Execution;
use crate::ledger::{Ledger, Order};
use crate::plan::LEDGER_PAGE;
use crate::run::ProveError;

/// All is healed when it is asked.
const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) enum Book {
    Ledger(Ledger),
    Table(Table),
}

impl Book {
    /// What was done since the last time that this was asked.
    pub(crate) async fn take_executions(&self) -> Result<Vec<Execution>, ProveError> {
        match self {
            Self::Ledger(ledger) => Ok(ledger.take_executions()),
            Self::Table(table) => table.take_executions().await,
        }
    }

    /// Nobody reads in it any more.
    pub(crate) async fn close(&self) -> Result<(), ProveError> {
        match self {
            Self::Ledger(_) => Ok(()),
            Self::Table(table) => table.ask("DELETE", "/executions").await.map(drop),
        }
    }
}

/// Rows in the database of the store, read through any of the servers.
pub(crate) struct Table {
    fleet: Arc<Fleet>,
    read: Mutex<Read>,
}

/// Rows do not become visible in the order of their numbers: each time those of the time before are read once more.
#[derive(Default)]
struct Read {
    before: i64,
    last: i64,
    known: HashSet<i64>,
}

/// Number, operation, amount.
type Row = (i64, usize, u64);

impl Table {
    pub(crate) fn new(fleet: Arc<Fleet>) -> Self {
        Self { fleet, read: Mutex::default() }
    }

    async fn take_executions(&self) -> Result<Vec<Execution>, ProveError> {
        let mut after = self.read.lock().before;
        let mut rows: Vec<Row> = Vec::new();
        loop {
            let page = self.ask("GET", &format!("/executions?after={after}")).await?;
            let page: Vec<Row> =
                serde_json::from_slice(&page).map_err(|error| ProveError::Table(error.to_string()))?;
            let ends = page.len() < LEDGER_PAGE;
            after = page.last().map_or(after, |(id, ..)| *id);
            rows.extend(page);
            if ends {
                return Ok(self.read.lock().news(rows));
            }
        }
    }

    async fn ask(&self, method: &str, path: &str) -> Result<Bytes, ProveError> {
        let failed = |why: String| ProveError::Table(why);
        let request = Request::builder().method(method).uri(path).body(Full::default());
        let sent = send(self.fleet.addr(0), request.map_err(|error| failed(error.to_string()))?);
        let answer =
            timeout(PATIENCE, sent).await.map_err(|_| failed("no answer".into()))?.map_err(failed)?;
        if answer.status().is_success() {
            return Ok(answer.into_body());
        }
        Err(failed(String::from_utf8_lossy(answer.body()).into_owned()))
    }
}

impl Read {
    fn news(&mut self, rows: Vec<Row>) -> Vec<Execution> {
        let ids: HashSet<_> = rows.iter().map(|(id, ..)| *id).collect();
        let news =
            rows.into_iter().filter(|(id, ..)| !self.known.contains(id)).map(|(id, operation, amount)| {
                let body = format!("{{\"operation\":{operation},\"execution\":{id}}}");
                let sent = Order { operation, amount }.sent();
                // When it began is not known: a row keeps no time.
                Execution {
                    operation,
                    number: id.try_into().unwrap_or_default(),
                    sent,
                    at: Duration::ZERO,
                    body,
                }
            });
        let news = news.collect();
        self.before = self.last;
        self.last = ids.iter().copied().max().unwrap_or(self.last);
        self.known = ids.into_iter().filter(|id| *id > self.before).collect();
        news
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_that_became_visible_late_is_read_once() {
        let mut read = Read::default();
        let mut news = |ids: &[i64]| -> Vec<usize> {
            let rows = ids.iter().copied().filter(|id| *id > read.before).map(|id| (id, 7, Order::AMOUNT));
            let rows = rows.collect();
            read.news(rows).into_iter().map(|execution| execution.number).collect()
        };
        assert_eq!(news(&[1, 2, 5]), [1, 2, 5]);
        assert_eq!(news(&[1, 2, 3, 5, 6]), [3, 6]);
        assert!(news(&[1, 2, 3, 4, 5, 6]).is_empty());
        assert_eq!(news(&[1, 2, 3, 4, 5, 6, 7]), [7]);
    }
}
