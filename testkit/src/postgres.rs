//! A private PostgreSQL, and PgBouncer in front of it.

use std::fmt::Write;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result};
use rustix::process::Signal;
use tokio::sync::OnceCell;
use tokio::task::spawn_blocking;

use crate::service::{Home, Recipe, Service, blocking, program};

/// The superuser; every connection from this machine is trusted, but see [`PostgresOptions::hba`].
pub const POSTGRES_USER: &str = "postgres";

/// A PostgreSQL server in a temporary folder, with `fsync` on and texts sorted by a language, not by bytes.
#[derive(Clone, Debug)]
pub struct Postgres(Arc<Service<PostgresOptions>>);

/// How a private server is set up.
#[derive(Clone, Debug, Default)]
pub struct PostgresOptions {
    settings: String,
    hba: String,
    files: Vec<(String, String)>,
}

impl Postgres {
    /// The server that all tests of this run share: make a [`database`](Self::database) of your own, and never stop it.
    ///
    /// # Panics
    /// With the reason when it cannot be started.
    pub async fn shared() -> Self {
        static SHARED: OnceCell<Postgres> = OnceCell::const_new();
        let start = || Service::shared(PostgresOptions::default());
        SHARED.get_or_init(|| async { Self(Arc::new(blocking(start).await)) }).await.clone()
    }

    /// A server for one test alone, that may be stopped and killed.
    ///
    /// # Panics
    /// With the reason when it cannot be started.
    pub async fn private() -> Self {
        Self::options().start().await
    }

    /// The options of a private server.
    pub fn options() -> PostgresOptions {
        PostgresOptions::default()
    }

    /// Its address.
    pub fn addr(&self) -> SocketAddr {
        self.0.home().addr()
    }

    /// The URL of a database, as the superuser.
    pub fn url(&self, database: &str) -> String {
        url_at(self.addr(), database)
    }

    /// Makes a new, empty database and answers its name.
    ///
    /// # Panics
    /// When it cannot be made.
    pub async fn database(&self) -> String {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("t{}_{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        self.psql("postgres", &format!("create database {name}")).await;
        name
    }

    /// Runs SQL by the `psql` shell and answers its rows, `|` between columns.
    ///
    /// # Panics
    /// When it fails, with what it said.
    pub async fn psql(&self, database: &str, sql: &str) -> String {
        self.try_psql(database, sql).await.unwrap_or_else(|error| panic!("{error:#}"))
    }

    /// As [`psql`](Self::psql), for SQL that may fail.
    ///
    /// # Errors
    /// With what psql said.
    pub async fn try_psql(&self, database: &str, sql: &str) -> Result<String> {
        let (service, url, sql) = (Arc::clone(&self.0), self.url(database), sql.to_owned());
        let run = move || psql(service.home(), &url, &sql);
        spawn_blocking(run).await.context("psql ran to its end")?
    }

    /// Stops it in order, cutting its clients off.
    ///
    /// # Panics
    /// When it does not end.
    pub async fn stop(&self) {
        let service = Arc::clone(&self.0);
        blocking(move || service.stop()).await;
    }

    /// Kills the server and all its processes at once.
    ///
    /// # Panics
    /// When it does not run.
    pub async fn kill_9(&self) {
        let service = Arc::clone(&self.0);
        blocking(move || service.kill_9()).await;
    }

    /// Starts it again on the same folder and port.
    ///
    /// # Panics
    /// With its log, when it does not start.
    pub async fn start(&self) {
        let service = Arc::clone(&self.0);
        blocking(move || service.start()).await;
    }

    /// Stops its processes in their tracks: connections stay, answers do not come.
    ///
    /// # Panics
    /// When it does not run.
    pub fn pause(&self) {
        self.0.pause().unwrap_or_else(|error| panic!("{error:#}"));
    }

    /// Lets them run on.
    ///
    /// # Panics
    /// When it does not run.
    pub fn resume(&self) {
        self.0.resume().unwrap_or_else(|error| panic!("{error:#}"));
    }

    /// What the server wrote to its log.
    pub fn log(&self) -> String {
        self.0.log()
    }

    /// The folder of its data.
    pub fn data(&self) -> PathBuf {
        self.0.home().path("data")
    }

    /// A program of its installation, such as `pgbench`, as a command.
    ///
    /// # Errors
    /// When it is not installed.
    pub fn tool(&self, name: &str) -> Result<Command> {
        Ok(self.0.home().command(postgres_program(name)?))
    }
}

impl PostgresOptions {
    /// Adds a line to `postgresql.conf`, such as `max_connections = 20`.
    #[must_use]
    pub fn setting(mut self, line: &str) -> Self {
        let _ = writeln!(self.settings, "{line}");
        self
    }

    /// Adds a line to `pg_hba.conf`, before the one that trusts everybody.
    #[must_use]
    pub fn hba(mut self, line: &str) -> Self {
        let _ = writeln!(self.hba, "{line}");
        self
    }

    /// Puts a file into the data folder, readable for the server alone: certificates and keys.
    #[must_use]
    pub fn file(mut self, name: &str, content: &str) -> Self {
        self.files.push((name.into(), content.into()));
        self
    }

    /// Starts the server.
    ///
    /// # Panics
    /// With the reason when it cannot be started.
    pub async fn start(self) -> Postgres {
        Postgres(Arc::new(blocking(move || Service::private(self)).await))
    }
}

impl Recipe for PostgresOptions {
    fn name(&self) -> &'static str {
        "postgres"
    }

    fn user_for_root(&self) -> Option<&'static str> {
        Some("postgres")
    }

    fn prepare(&self, home: &Home) -> Result<()> {
        let mut initdb = home.command(postgres_program("initdb")?);
        initdb.args(["--no-sync", "--auth=trust", "--encoding=UTF8", "--username", POSTGRES_USER]);
        initdb.args(["--locale=C.UTF-8", "--locale-provider=icu", "--icu-locale=en-US", "-D"]);
        home.run(initdb.arg(home.path("data")))?;
        let settings = format!(
            "listen_addresses = '127.0.0.1'\nport = {}\nunix_socket_directories = ''\nmax_connections = 200\n\
             max_prepared_transactions = 10\nlog_min_messages = warning\nlog_line_prefix = '%m %a '\n{}",
            home.port(),
            self.settings
        );
        home.write("data/postgresql.auto.conf", settings)?;
        let trust = "host all all 127.0.0.1/32 trust\n";
        home.write("data/pg_hba.conf", format!("{}{trust}", self.hba))?;
        for (name, content) in &self.files {
            home.write(&format!("data/{name}"), content)?;
        }
        Ok(())
    }

    fn command(&self, home: &Home) -> Command {
        let mut command = home.command(postgres_program("postgres").unwrap_or_else(|_| "postgres".into()));
        command.arg("-D").arg(home.path("data"));
        command
    }

    fn is_ready(&self, home: &Home) -> bool {
        psql(home, &url_at(home.addr(), "postgres"), "select 1").is_ok()
    }

    // "Fast": clients are cut off.
    fn stop_signal(&self) -> Signal {
        Signal::INT
    }

    // "Immediate": as a crash, but its shared memory is freed.
    fn end_signal(&self) -> Signal {
        Signal::QUIT
    }
}

/// How PgBouncer lends its connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolMode {
    /// For as long as a client is connected.
    Session,
    /// For one transaction: what a session keeps (prepared statements, settings, locks) is another client's next.
    Transaction,
}

/// A PgBouncer in front of a [`Postgres`].
#[derive(Debug)]
pub struct PgBouncer(Service<BouncerRecipe>);

#[derive(Debug)]
struct BouncerRecipe {
    target: SocketAddr,
    mode: PoolMode,
}

impl PgBouncer {
    /// Starts one with few connections, so that they are really shared.
    ///
    /// # Panics
    /// With the reason when it cannot be started.
    pub async fn start(postgres: &Postgres, mode: PoolMode) -> Self {
        let target = postgres.addr();
        Self(blocking(move || Service::private(BouncerRecipe { target, mode })).await)
    }

    /// Its address.
    pub fn addr(&self) -> SocketAddr {
        self.0.home().addr()
    }

    /// The URL of a database behind it, as the superuser.
    pub fn url(&self, database: &str) -> String {
        url_at(self.addr(), database)
    }

    /// What it wrote to its log.
    pub fn log(&self) -> String {
        self.0.log()
    }
}

impl Recipe for BouncerRecipe {
    fn name(&self) -> &'static str {
        "pgbouncer"
    }

    fn user_for_root(&self) -> Option<&'static str> {
        Some("postgres")
    }

    fn prepare(&self, home: &Home) -> Result<()> {
        let mode = match self.mode {
            PoolMode::Session => "session",
            PoolMode::Transaction => "transaction",
        };
        home.write("users.txt", format!("\"{POSTGRES_USER}\" \"\"\n"))?;
        let settings = format!(
            "[databases]\n* = host={} port={}\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {}\n\
             unix_socket_dir =\nauth_type = trust\nauth_file = {}\npool_mode = {mode}\ndefault_pool_size = 3\n\
             server_round_robin = 1\n",
            self.target.ip(),
            self.target.port(),
            home.port(),
            home.path("users.txt").display(),
        );
        home.write("pgbouncer.ini", settings)?;
        Ok(())
    }

    fn command(&self, home: &Home) -> Command {
        let mut command = home.command(program("pgbouncer", &[]).unwrap_or_else(|_| "pgbouncer".into()));
        command.arg(home.path("pgbouncer.ini"));
        command
    }
}

fn postgres_program(name: &str) -> Result<PathBuf> {
    // Debian keeps each version in a folder of its own.
    let versions = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let mut versions: Vec<_> = versions.map(|entry| entry.path().join("bin")).collect();
    versions.sort();
    let folders: Vec<&str> = versions.iter().rev().filter_map(|folder| folder.to_str()).collect();
    program(name, &folders)
}

fn url_at(addr: SocketAddr, database: &str) -> String {
    format!("postgres://{POSTGRES_USER}@{addr}/{database}")
}

fn psql(home: &Home, url: &str, sql: &str) -> Result<String> {
    let mut psql = home.command(postgres_program("psql")?);
    psql.args(["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-d", url, "-c", sql]);
    Ok(home.run(&mut psql)?.trim_end().to_owned())
}
