//! Connections: made, lent, and given back only in a known state.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use mysql_async::prelude::Queryable;
use mysql_async::{Conn, DriverError, Error, Params, Row};
use onlyonce_core::{Clock, StoreErrorKind, SystemClock};
use parking_lot::Mutex;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::timeout;

use crate::error::Fault;
use crate::sql::Sql;
use crate::url::Url;

/// After this long without use a connection is asked whether it is still there.
const TRUST: Duration = Duration::from_secs(5);

/// Set on every connection of ours, so that a statement means the same on all of them. A wait for a lock fails at once
/// where the server knows such a thing (MariaDB), else after a second.
const SETTINGS: &str = "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED;
SET SESSION TRANSACTION READ WRITE;
SET SESSION time_zone = '+00:00', SESSION autocommit = 1, SESSION lock_wait_timeout = 2,
    SESSION sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION,ERROR_FOR_DIVISION_BY_ZERO',
    SESSION sql_safe_updates = 0, SESSION innodb_lock_wait_timeout = 0";

/// How long the session waits for a lock, in seconds. Where the server knows no 0 it is 1.
pub(crate) fn wait_for_locks(seconds: u32) -> String {
    format!("SET SESSION innodb_lock_wait_timeout = {seconds}")
}

/// The statements of a locking read that passes over what somebody holds. With a wait of 0, MariaDB fails it with error 1180
/// in place of passing over; what can be locked at once is never waited for.
pub(crate) fn skip_locked(select: &str) -> [String; 3] {
    [wait_for_locks(1), format!("{select} FOR UPDATE SKIP LOCKED"), wait_for_locks(0)]
}

/// The connections of a store, at most so many.
pub(crate) struct Pool {
    url: Url,
    places: Semaphore,
    idle: Mutex<Vec<Idle>>,
    // Grows when a connection breaks: what was opened before it is not trusted any more.
    generation: AtomicU64,
    connect_timeout: Duration,
    patience: Duration,
}

struct Idle {
    conn: Conn,
    generation: u64,
    since: Duration,
}

impl Pool {
    pub(crate) fn new(
        url: Url,
        connections_max: usize,
        connect_timeout: Duration,
        patience: Duration,
    ) -> Self {
        Self {
            url,
            places: Semaphore::new(connections_max.max(1)),
            idle: Mutex::default(),
            generation: AtomicU64::new(0),
            connect_timeout,
            patience,
        }
    }

    pub(crate) fn url(&self) -> &Url {
        &self.url
    }

    /// A connection to the database of the URL.
    ///
    /// # Errors
    /// `Unavailable` when there is none to be had, `Overloaded` when all are lent all the time. Nothing was sent.
    pub(crate) async fn lend(&self) -> Result<Session<'_>, Fault> {
        let place = match timeout(self.patience, self.places.acquire()).await {
            Ok(Ok(place)) => place,
            _ => {
                return Err(Fault::new(StoreErrorKind::Overloaded, "all connections were busy all the time"));
            }
        };
        loop {
            let Some(Idle { mut conn, generation, since }) = self.idle.lock().pop() else { break };
            if generation != self.generation.load(Ordering::Acquire) {
                continue;
            }
            let fresh = SystemClock.boot().saturating_sub(since) < TRUST;
            if fresh || matches!(timeout(self.patience, conn.ping()).await, Ok(Ok(()))) {
                return Ok(self.session(conn, generation, place));
            }
        }
        // Read before connecting: what breaks meanwhile may be this one too.
        let generation = self.generation.load(Ordering::Acquire);
        let conn = self.connect().await.map_err(Fault::before_sending)?;
        Ok(self.session(conn, generation, place))
    }

    /// Forgets the idle connections; those that are lent are closed when they are given back.
    pub(crate) fn forget_idle(&self) {
        self.generation.fetch_add(1, Ordering::AcqRel);
        let idle = std::mem::take(&mut *self.idle.lock());
        drop(idle);
    }

    fn session<'p>(&'p self, conn: Conn, generation: u64, place: SemaphorePermit<'p>) -> Session<'p> {
        Session { pool: self, conn: Some(conn), generation, sound: true, _place: place }
    }

    async fn connect(&self) -> Result<Conn, Fault> {
        let opened = async {
            let mut conn = match Conn::new(self.url.opts.clone()).await {
                Err(Error::Driver(DriverError::NoClientSslFlagFromServer)) if self.url.plain.is_some() => {
                    let plain = self.url.plain.clone().unwrap_or_default();
                    Conn::new(plain).await?
                }
                opened => opened?,
            };
            conn.query_drop(SETTINGS).await?;
            Ok::<Conn, Error>(conn)
        };
        match timeout(self.connect_timeout, opened).await {
            Ok(Ok(conn)) => Ok(conn),
            Ok(Err(error)) => {
                let fault = Fault::from(error);
                match fault.kind() {
                    StoreErrorKind::Unavailable => {
                        Err(unreachable().with_source(fault.into_error("connect")))
                    }
                    _ => Err(fault),
                }
            }
            Err(_) => {
                let why = format!("no connection to the database within {:?}", self.connect_timeout);
                Err(Fault::new(StoreErrorKind::Unavailable, why))
            }
        }
    }
}

fn unreachable() -> Fault {
    Fault::new(StoreErrorKind::Unavailable, "the database cannot be reached")
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("location", &self.url.location).finish_non_exhaustive()
    }
}

/// One connection, lent. Dropped in the middle of something, it is closed and not given back.
pub(crate) struct Session<'p> {
    pool: &'p Pool,
    conn: Option<Conn>,
    generation: u64,
    // False while something is under way, a transaction included.
    sound: bool,
    _place: SemaphorePermit<'p>,
}

/// What a statement that changes something did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Changed {
    pub(crate) rows: u64,
    /// What the statement gave to `LAST_INSERT_ID`.
    pub(crate) told: Option<u64>,
}

impl Session<'_> {
    /// Runs one statement that is a transaction of its own.
    pub(crate) async fn change(&mut self, sql: Sql) -> Result<Changed, Fault> {
        self.change_as(sql, self.pool.url.prepare).await
    }

    /// As [`Session::change`], never prepared: where the types of the values must be known when the statement is.
    pub(crate) async fn change_unprepared(&mut self, sql: Sql) -> Result<Changed, Fault> {
        self.change_as(sql, false).await
    }

    async fn change_as(&mut self, sql: Sql, prepare: bool) -> Result<Changed, Fault> {
        self.bounded(async move |conn| {
            if prepare {
                let (text, values) = sql.into_parts();
                conn.exec_iter(text, Params::Positional(values)).await?.drop_result().await?;
            } else {
                conn.query_drop(sql.inlined()).await?;
            }
            Ok(Changed { rows: conn.affected_rows(), told: conn.last_insert_id() })
        })
        .await
    }

    /// Reads the rows of one statement.
    pub(crate) async fn rows(&mut self, sql: &Sql) -> Result<Vec<Row>, Fault> {
        let text = sql.inlined();
        self.bounded(async move |conn| conn.query_iter(text).await?.collect_and_drop().await).await
    }

    /// As [`Session::rows`], of a statement that may take this much longer than others.
    pub(crate) async fn patient_rows(&mut self, text: &str, seconds: u32) -> Result<Vec<Row>, Fault> {
        let patience = self.pool.patience + Duration::from_secs(seconds.into());
        self.within(patience, async |conn| conn.query_iter(text).await?.collect_and_drop().await).await
    }

    /// Sends several statements at once and answers the rows of each. The first that fails ends it, and what came before
    /// it stays: the caller [ends](Self::roll_back) the transaction.
    pub(crate) async fn script(&mut self, statements: &[String]) -> Result<Vec<Vec<Row>>, Fault> {
        let (text, count) = (statements.join(";\n"), statements.len());
        self.bounded(async move |conn| {
            let mut result = conn.query_iter(text).await?;
            let mut sets = Vec::with_capacity(count);
            for _ in 0..count {
                sets.push(result.collect().await?);
            }
            result.drop_result().await?;
            Ok(sets)
        })
        .await
    }

    /// From here on the connection is given back only after [`Session::ended`].
    pub(crate) fn begun(&mut self) {
        self.sound = false;
    }

    /// The transaction is over.
    pub(crate) fn ended(&mut self) {
        self.sound = true;
    }

    /// Takes back what is open. When that fails, so does the connection, and the server takes it back.
    pub(crate) async fn roll_back(&mut self) {
        if self.script(&["ROLLBACK".into(), wait_for_locks(0)]).await.is_ok() {
            self.sound = true;
        }
    }

    /// Takes back what is open and closes the connection, whose settings may not be ours any more.
    pub(crate) async fn roll_back_and_close(&mut self) {
        self.roll_back().await;
        self.conn = None;
    }

    async fn bounded<T>(
        &mut self,
        work: impl AsyncFnOnce(&mut Conn) -> Result<T, Error>,
    ) -> Result<T, Fault> {
        self.within(self.pool.patience, work).await
    }

    async fn within<T>(
        &mut self,
        patience: Duration,
        work: impl AsyncFnOnce(&mut Conn) -> Result<T, Error>,
    ) -> Result<T, Fault> {
        let Some(conn) = self.conn.as_mut() else { return Err(closed()) };
        let done = match timeout(patience, work(conn)).await {
            Ok(done) => done.map_err(Fault::from),
            Err(_) => Err(Fault::silence(patience)),
        };
        if done.as_ref().is_err_and(Fault::breaks_connection) {
            self.conn = None;
            self.pool.forget_idle();
        }
        done
    }
}

fn closed() -> Fault {
    Fault::new(StoreErrorKind::Unavailable, "the connection to the database is closed")
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        let Some(conn) = self.conn.take() else { return };
        // The driver calls a connection disconnected while it waits for an answer.
        if self.sound && !conn.is_disconnected() {
            let since = SystemClock.boot();
            self.pool.idle.lock().push(Idle { conn, generation: self.generation, since });
        }
    }
}
