//! What a careful programmer writes by hand for SQLite: one connection, prepared statements, WAL, `synchronous=FULL`.

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};
use rusqlite::{Connection, params};

use crate::keys::Keys;
use crate::measure::{Sample, Stretch, now};
use crate::store::{REPLY_BODY, SCOPE};

/// Which indexes the table has beside its primary key.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Indexes {
    /// None: nothing is ever purged without reading the whole table.
    None,
    /// The store's own two, by which it purges.
    AsTheStore,
}

// The store's columns.
const TABLE: &str = "CREATE TABLE by_hand (
    scope TEXT NOT NULL, key TEXT NOT NULL, request_hash TEXT NOT NULL, status TEXT NOT NULL,
    response_code INTEGER, response_headers BLOB, response_body BLOB,
    locked_until INTEGER NOT NULL, created_at INTEGER NOT NULL, claimed_at INTEGER NOT NULL,
    completed_at INTEGER, expires_at INTEGER, clock INTEGER NOT NULL,
    token BLOB NOT NULL, attempt INTEGER NOT NULL, on_lease_end TEXT NOT NULL,
    PRIMARY KEY (scope, key)
) STRICT;";
const INDEXES: &str = "
    CREATE INDEX by_expiry ON by_hand (clock, expires_at) WHERE status = 'completed';
    CREATE INDEX by_lease ON by_hand (clock, locked_until) WHERE status <> 'completed';";
const CLAIM: &str =
    "INSERT INTO by_hand (scope, key, request_hash, status, locked_until, created_at, claimed_at,
        clock, token, attempt, on_lease_end)
    VALUES (?1, ?2, ?3, 'in_progress', ?4, ?5, ?5, 1, ?6, 1, 'takeover') ON CONFLICT (scope, key) DO NOTHING";
const COMPLETE: &str = "UPDATE by_hand SET status = 'completed', response_code = ?4, response_headers = ?5,
        response_body = ?6, completed_at = ?7, expires_at = ?8
    WHERE scope = ?1 AND key = ?2 AND token = ?3 AND status = 'in_progress'";
const HASH: &str = "1:raw:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08";
const HEADERS: &[u8] = b":onlyonce 1\ncontent-type: application/json\n";
const TOKEN: [u8; 16] = [7; 16];

/// The loop, on a new file.
pub(crate) struct ByHand {
    conn: Connection,
    keys: Keys,
}

impl ByHand {
    pub(crate) fn create(file: &Path, indexes: Indexes) -> Result<Self> {
        let conn = Connection::open(file)?;
        let mode: String = conn.query_row("PRAGMA journal_mode = WAL", [], |row| row.get(0))?;
        ensure!(mode == "wal", "journal mode {mode}");
        conn.execute_batch("PRAGMA synchronous = FULL")?;
        conn.execute_batch(TABLE)?;
        if let Indexes::AsTheStore = indexes {
            conn.execute_batch(INDEXES)?;
        }
        Ok(Self { conn, keys: Keys::unique() })
    }

    /// As a store must: `batch` claims in one transaction, then their completions in another.
    pub(crate) fn pairs(&self, batch: usize, time: Duration) -> Result<Sample> {
        let (mut claim, mut complete) = (self.conn.prepare(CLAIM)?, self.conn.prepare(COMPLETE)?);
        let stretch = Stretch::start();
        let mut times = Vec::new();
        while stretch.elapsed() < time {
            let begun = now();
            let keys: Vec<String> = (0..batch).map(|_| self.keys.next()).collect();
            self.in_transaction(|| {
                for key in &keys {
                    let at = now().as_millis() as i64;
                    ensure!(
                        claim.execute(params![SCOPE, key, HASH, at + 30_000, at, TOKEN])? == 1,
                        "claimed"
                    );
                }
                Ok(())
            })?;
            self.in_transaction(|| {
                for key in &keys {
                    let at = now().as_millis() as i64;
                    let reply = (201, HEADERS, REPLY_BODY.as_bytes());
                    let row = params![SCOPE, key, TOKEN, reply.0, reply.1, reply.2, at, at + 86_400_000];
                    ensure!(complete.execute(row)? == 1, "completed");
                }
                Ok(())
            })?;
            let took = now() - begun;
            times.extend(std::iter::repeat_n(took, batch));
        }
        Sample::new(times, &stretch)
    }

    /// One transaction with one insert: the least that makes anything durable.
    pub(crate) fn one_durable_insert(&self, time: Duration) -> Result<Sample> {
        let mut claim = self.conn.prepare(CLAIM)?;
        let stretch = Stretch::start();
        let mut times = Vec::new();
        while stretch.elapsed() < time {
            let begun = now();
            let key = self.keys.next();
            self.in_transaction(|| {
                let at = now().as_millis() as i64;
                ensure!(claim.execute(params![SCOPE, key, HASH, at + 30_000, at, TOKEN])? == 1, "claimed");
                Ok(())
            })?;
            times.push(now() - begun);
        }
        Sample::new(times, &stretch)
    }

    fn in_transaction(&self, work: impl FnOnce() -> Result<()>) -> Result<()> {
        self.conn.prepare_cached("BEGIN IMMEDIATE")?.execute([])?;
        work()?;
        self.conn.prepare_cached("COMMIT")?.execute([])?;
        Ok(())
    }
}
