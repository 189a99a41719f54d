//! A private MariaDB.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result};
use tokio::sync::OnceCell;
use tokio::task::spawn_blocking;

use crate::service::{Home, Recipe, Service, blocking, program};

/// The superuser, without a password from this machine.
pub const MARIADB_USER: &str = "root";

/// A MariaDB server in a temporary folder, every commit synced.
#[derive(Clone, Debug)]
pub struct Mariadb(Arc<Service<MariadbOptions>>);

/// How a private server is set up.
#[derive(Clone, Debug, Default)]
pub struct MariadbOptions {
    settings: Vec<String>,
    files: Vec<(String, String)>,
}

impl Mariadb {
    /// The server that all tests of this run share: make a [`database`](Self::database) of your own, and never stop it.
    ///
    /// # Panics
    /// With the reason when it cannot be started.
    pub async fn shared() -> Self {
        static SHARED: OnceCell<Mariadb> = OnceCell::const_new();
        let start = || Service::shared(MariadbOptions::default());
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
    pub fn options() -> MariadbOptions {
        MariadbOptions::default()
    }

    /// Its address.
    pub fn addr(&self) -> SocketAddr {
        self.0.home().addr()
    }

    /// Its Unix socket.
    pub fn socket(&self) -> PathBuf {
        self.0.home().path(SOCKET)
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
        self.sql("mysql", &format!("create database {name}")).await;
        name
    }

    /// Runs SQL by the `mariadb` shell and answers its rows, a tab between columns.
    ///
    /// # Panics
    /// When it fails, with what it said.
    pub async fn sql(&self, database: &str, sql: &str) -> String {
        self.try_sql(database, sql).await.unwrap_or_else(|error| panic!("{error:#}"))
    }

    /// As [`sql`](Self::sql), for SQL that may fail.
    ///
    /// # Errors
    /// With what the shell said.
    pub async fn try_sql(&self, database: &str, sql: &str) -> Result<String> {
        let (service, database, sql) = (Arc::clone(&self.0), database.to_owned(), sql.to_owned());
        let run = move || shell(service.home(), &database, &sql);
        spawn_blocking(run).await.context("the shell ran to its end")?
    }

    /// Stops it in order, cutting its clients off.
    ///
    /// # Panics
    /// When it does not end.
    pub async fn stop(&self) {
        let service = Arc::clone(&self.0);
        blocking(move || service.stop()).await;
    }

    /// Kills it at once.
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

    /// Stops its process in its tracks: connections stay, answers do not come.
    ///
    /// # Panics
    /// When it does not run.
    pub fn pause(&self) {
        self.0.pause().unwrap_or_else(|error| panic!("{error:#}"));
    }

    /// Lets it run on.
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
}

impl MariadbOptions {
    /// Adds a setting of the server, such as `max_connections=20`.
    #[must_use]
    pub fn setting(mut self, setting: &str) -> Self {
        self.settings.push(format!("--{setting}"));
        self
    }

    /// Puts a file beside the data, readable for the server alone, which finds it by its bare name: certificates and keys.
    #[must_use]
    pub fn file(mut self, name: &str, content: &str) -> Self {
        self.files.push((name.into(), content.into()));
        self
    }

    /// Starts the server.
    ///
    /// # Panics
    /// With the reason when it cannot be started.
    pub async fn start(self) -> Mariadb {
        Mariadb(Arc::new(blocking(move || Service::private(self)).await))
    }
}

const SOCKET: &str = "socket";

impl Recipe for MariadbOptions {
    fn name(&self) -> &'static str {
        "mariadb"
    }

    fn user_for_root(&self) -> Option<&'static str> {
        Some("mysql")
    }

    fn prepare(&self, home: &Home) -> Result<()> {
        let mut install = home.command(program("mariadb-install-db", &[])?);
        install.args(["--no-defaults", "--skip-test-db", "--auth-root-authentication-method=normal"]);
        install.arg(format!("--datadir={}", home.path("data").display()));
        // Two that are installed at once take each other's temporary tables away in a common folder.
        install.env("TMPDIR", home.folder());
        home.run(&mut install)?;
        for (name, content) in &self.files {
            home.write(&format!("data/{name}"), content)?;
        }
        Ok(())
    }

    fn command(&self, home: &Home) -> Command {
        let mut command = home.command(program("mariadbd", &[]).unwrap_or_else(|_| "mariadbd".into()));
        command.arg("--no-defaults");
        command.arg(format!("--datadir={}", home.path("data").display()));
        command.arg(format!("--socket={}", home.path(SOCKET).display()));
        command.arg(format!("--tmpdir={}", home.folder().display()));
        command.arg(format!("--pid-file={}", home.path("mariadbd.pid").display()));
        command.args(["--bind-address=127.0.0.1", "--skip-name-resolve", "--max-connections=300"]);
        command.arg(format!("--port={}", home.port()));
        command.args(&self.settings);
        command
    }

    fn is_ready(&self, home: &Home) -> bool {
        shell(home, "mysql", "select 1").is_ok()
    }
}

fn url_at(addr: SocketAddr, database: &str) -> String {
    format!("mysql://{MARIADB_USER}@{addr}/{database}")
}

fn shell(home: &Home, database: &str, sql: &str) -> Result<String> {
    let mut shell = home.command(program("mariadb", &[])?);
    shell.args(["--no-defaults", "--protocol=tcp", "--host=127.0.0.1", "--user", MARIADB_USER]);
    shell.arg(format!("--port={}", home.port()));
    shell.args(["--batch", "--skip-column-names", "--database", database, "--execute", sql]);
    Ok(home.run(&mut shell)?.trim_end().to_owned())
}
