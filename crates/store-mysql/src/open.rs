//! Opening a store: the options, and every check that is better made at start than met later.

use std::sync::Arc;
use std::time::Duration;

use onlyonce_batch::{Batcher, Limits};
use onlyonce_core::{StoreError, StoreErrorKind};

use crate::backend::Backend;
use crate::error::Fault;
use crate::row::cells;
use crate::schema::{self, Tables};
use crate::session::{Pool, Session};
use crate::sql::Sql;
use crate::store::MysqlStore;
use crate::url::Url;

/// A packet must hold an answer of the usual largest size, 1 MiB, written as text.
const PACKET_BYTES_MIN: usize = 4 << 20;

/// How to open a store. [`Options::open`] makes missing tables; never a database.
#[derive(Clone)]
pub struct Options {
    url: Url,
    create: bool,
    connections_max: Option<usize>,
    connect_timeout: Duration,
    statement_timeout: Duration,
    limits: Limits,
    look_first: bool,
}

impl Options {
    /// The defaults: 10 connections, 5 s to connect, 5 s for a statement, 4096 queued, 256 a batch, 2 batches at once.
    ///
    /// # Errors
    /// [`StoreErrorKind::Unfit`] with what is wrong with the URL, which is not repeated: it may hold a password.
    pub fn new(url: &str) -> Result<Self, StoreError> {
        Ok(Self {
            url: Url::parse(url).map_err(|fault| fault.into_error("open"))?,
            create: true,
            connections_max: None,
            connect_timeout: Duration::from_secs(5),
            statement_timeout: Duration::from_secs(5),
            limits: Limits::default(),
            look_first: false,
        })
    }

    /// How many connections at most; goes before the `connections` of the URL.
    #[must_use]
    pub fn connections_max(mut self, connections: usize) -> Self {
        self.connections_max = Some(connections.max(1));
        self
    }

    /// How long a new connection may take before [`StoreErrorKind::Unavailable`].
    #[must_use]
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// How long a statement may take before [`StoreErrorKind::Timeout`].
    #[must_use]
    pub fn statement_timeout(mut self, timeout: Duration) -> Self {
        self.statement_timeout = timeout;
        self
    }

    /// How many claims may wait, and how many operations of owners. Past it: [`StoreErrorKind::Overloaded`].
    #[must_use]
    pub fn queue_max(mut self, operations: usize) -> Self {
        self.limits.queue_max = operations.max(1);
        self
    }

    /// How many operations one statement takes at most.
    #[must_use]
    pub fn batch_max(mut self, operations: usize) -> Self {
        self.limits.batch_max = operations.clamp(1, 256);
        self
    }

    /// How many batches are under way at once.
    #[must_use]
    pub fn lanes(mut self, lanes: usize) -> Self {
        self.limits.lanes = lanes.max(1);
        self
    }

    /// Does as it does by itself with MySQL: looks at its rows before it writes them, for that server cannot refuse to wait for
    /// a lock, and sets the wait of a transaction's claim by statements of their own.
    /// Slower; for tests.
    #[doc(hidden)]
    #[must_use]
    pub fn look_first(mut self) -> Self {
        self.look_first = true;
        self
    }

    /// Has the server count the rows that a statement found in place of those it changed, as a proxy may; for tests.
    #[doc(hidden)]
    #[must_use]
    pub fn count_found_rows(mut self) -> Self {
        self.url.count_found_rows();
        self
    }

    /// Refuses a database that holds no records, in place of making the tables.
    #[must_use]
    pub fn existing(mut self) -> Self {
        self.create = false;
        self
    }

    /// Opens the store. Needs a tokio runtime with its timer.
    ///
    /// # Errors
    /// [`StoreErrorKind::Unfit`] with a sentence that names the reason, in which case nothing was changed but tables that
    /// were missing: a server that is too old or read-only, a wrong user, a missing database, a wrong table,
    /// a newer release's schema. Other kinds: worth trying again.
    ///
    /// # Cost
    /// Less than two dozen round trips; independent of the number of records.
    pub async fn open(self) -> Result<MysqlStore, StoreError> {
        let location = self.url.location.clone();
        self.open_checked().await.map_err(|fault| fault.at(&location).into_error("open"))
    }

    async fn open_checked(self) -> Result<MysqlStore, Fault> {
        let url = self.url;
        // One provider for the process; a program that chose its own keeps it.
        if rustls::crypto::CryptoProvider::get_default().is_none() {
            let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        }
        let connections = self.connections_max.or(url.connections).unwrap_or(10);
        let (location, tables) = (url.location.clone(), Tables::of(&url.database));
        let pool = Pool::new(url, connections, self.connect_timeout, self.statement_timeout);
        let mut session = pool.lend().await?;
        let server = Server::ask(&mut session).await?;
        server.check()?;
        let store_id = schema::prepare(&mut session, &tables, self.create).await?;
        // A batch tells by the count of its rows who was there before.
        let counts_changes = schema::counts_changes(&mut session, &tables).await?;
        drop(session);
        let nowait = server.nowait && counts_changes && !self.look_first;
        let packet_max = server.packet_max;
        let mut limits = self.limits;
        limits.batch_bytes_max = limits.batch_bytes_max.min(packet_max / 4);
        let seen_before_synced = server.seen_before_synced();
        let backend = Backend {
            pool,
            tables: Arc::new(tables),
            store_id,
            nowait,
            set_statement: server.is_mariadb() && !self.look_first,
            packet_max,
            seen_before_synced,
        };
        let batcher = Batcher::start(backend, limits);
        Ok(MysqlStore::new(Arc::new(batcher), location, server.hazard()))
    }
}

impl std::fmt::Debug for Options {
    // Without the URL, which may hold a password.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Options").field("limits", &self.limits).finish_non_exhaustive()
    }
}

/// What the server says of itself.
#[derive(Debug)]
struct Server {
    version: String,
    nowait: bool,
    packet_max: usize,
    read_only: bool,
    flush_at_commit: i64,
    flush_method: String,
    binlog: bool,
    sync_binlog: i64,
}

impl Server {
    async fn ask(session: &mut Session<'_>) -> Result<Self, Fault> {
        let sql = Sql::new(
            "SELECT VERSION(), @@innodb_lock_wait_timeout, @@max_allowed_packet, @@global.read_only, \
             @@innodb_flush_log_at_trx_commit, COALESCE(@@innodb_flush_method, ''), @@log_bin, @@sync_binlog",
        );
        let Some(row) = session.rows(&sql).await?.into_iter().next() else {
            return Err(Fault::internal("the server says nothing of itself"));
        };
        let mut row = cells(row);
        Ok(Self {
            version: row.text("version")?,
            nowait: row.int("innodb_lock_wait_timeout")? == 0,
            packet_max: usize::try_from(row.int("max_allowed_packet")?).unwrap_or(0),
            read_only: row.int("read_only")? != 0,
            flush_at_commit: row.int("innodb_flush_log_at_trx_commit")?,
            flush_method: row.text("innodb_flush_method")?,
            binlog: row.int("log_bin")? != 0,
            sync_binlog: row.int("sync_binlog")?,
        })
    }

    fn is_mariadb(&self) -> bool {
        self.version.contains("MariaDB")
    }

    fn check(&self) -> Result<(), Fault> {
        let mut numbers = self.version.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
        let found = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
        let mariadb = self.is_mariadb();
        let least = if mariadb { (10, 6) } else { (8, 0) };
        if found < least {
            let name = if mariadb { "MariaDB" } else { "MySQL" };
            let (version, (major, minor)) = (&self.version, least);
            return Err(Fault::unfit(format!(
                "the server is {version}; {name} {major}.{minor} or later is needed"
            )));
        }
        if self.packet_max < PACKET_BYTES_MIN {
            let (has, needs) = (self.packet_max, PACKET_BYTES_MIN);
            return Err(Fault::unfit(format!("the server's max_allowed_packet is {has}; {needs} is needed")));
        }
        if self.read_only {
            return Err(Fault::new(
                StoreErrorKind::Unfit,
                "the server is read-only; name the primary in the URL",
            ));
        }
        Ok(())
    }

    // Where nothing is synced at a commit there is nothing to wait for.
    fn seen_before_synced(&self) -> bool {
        self.flush_at_commit == 1 && !(self.binlog && self.sync_binlog == 1)
    }

    /// What a power cut may lose.
    fn hazard(&self) -> Option<String> {
        let lost = "a power cut loses acknowledged completions, and their operations run again";
        if self.flush_at_commit != 1 {
            return Some(format!("innodb_flush_log_at_trx_commit={}: {lost}", self.flush_at_commit));
        }
        if self.flush_method.eq_ignore_ascii_case("nosync") {
            return Some(format!("innodb_flush_method=nosync: {lost}"));
        }
        // What is in the log of InnoDB and not in the binary log is rolled back by the recovery.
        (self.binlog && self.sync_binlog != 1)
            .then(|| format!("log_bin with sync_binlog={}: {lost}", self.sync_binlog))
    }
}
