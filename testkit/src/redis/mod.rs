//! Private Redis servers: one, a cluster of six, one with replicas behind Sentinel.

mod cluster;
mod sentinel;
mod told;
mod told_cluster;

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use onlyonce_prove::quiet_port;
use tokio::task::spawn_blocking;

use crate::authority::{Authority, Identity};
use crate::service::{Home, Recipe, Service, program};

pub use cluster::RedisCluster;
pub use sentinel::RedisSentinels;
pub use told::ToldClock;
pub use told_cluster::ToldCluster;

/// A Redis server in a temporary folder, without persistence unless it is asked for.
#[derive(Clone, Debug)]
pub struct Redis(Arc<Service<RedisOptions>>);

/// How a private server is set up.
#[derive(Clone, Debug, Default)]
pub struct RedisOptions {
    settings: String,
    clock: Option<ToldClock>,
    tls: Option<(String, Identity)>,
    part: Part,
}

/// What the server is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Part {
    #[default]
    Server,
    // Of a cluster.
    Node,
    Sentinel,
}

impl Redis {
    /// A server for one test alone, that may be stopped and killed.
    ///
    /// # Panics
    /// With the reason when it cannot be started.
    pub async fn private() -> Self {
        Self::options().start().await
    }

    /// The options of a private server.
    pub fn options() -> RedisOptions {
        RedisOptions::default()
    }

    /// Its address.
    pub fn addr(&self) -> SocketAddr {
        self.0.home().addr()
    }

    /// Its port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.0.home().port()
    }

    /// Its URL, without a user.
    pub fn url(&self) -> String {
        format!("redis://{}", self.addr())
    }

    /// Its port for TLS.
    ///
    /// # Panics
    /// When it was not set up for TLS.
    pub fn tls_port(&self) -> u16 {
        self.noted_port("tls-port")
    }

    /// Where nodes of a cluster meet it.
    fn bus_port(&self) -> u16 {
        self.noted_port("bus-port")
    }

    fn noted_port(&self, name: &str) -> u16 {
        let noted = std::fs::read_to_string(self.0.home().path(name));
        noted.ok().and_then(|port| port.parse().ok()).unwrap_or_else(|| panic!("it has no {name}"))
    }

    /// What `redis-cli` prints for this command, without its last line end.
    ///
    /// # Panics
    /// When it cannot be run; an error of the server is in the answer.
    pub async fn cli<const N: usize>(&self, command: [&str; N]) -> String {
        self.cli_with(command.map(str::to_owned).into()).await
    }

    /// As [`cli`](Self::cli), for a command of any length.
    ///
    /// # Panics
    /// When it cannot be run.
    pub async fn cli_with(&self, command: Vec<String>) -> String {
        let service = Arc::clone(&self.0);
        blocking(move || run_cli(service.home(), service.home().port(), &command)).await
    }

    /// Stops it in order.
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

    /// Stops it in its tracks: connections stay, answers do not come.
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

    /// Whether it was started and not stopped or killed since.
    pub fn runs(&self) -> bool {
        self.0.pid().is_some()
    }

    /// What it wrote to its log.
    pub fn log(&self) -> String {
        self.0.log()
    }

    /// A program of its installation, such as `redis-benchmark`, as a command in its folder.
    ///
    /// # Errors
    /// When it is not installed.
    pub fn tool(&self, name: &str) -> Result<Command> {
        Ok(self.0.home().command(program(name, &[])?))
    }
}

impl RedisOptions {
    /// Adds a line to its configuration, such as `maxmemory 10mb`.
    #[must_use]
    pub fn setting(mut self, line: &str) -> Self {
        let _ = writeln!(self.settings, "{line}");
        self
    }

    /// Every write is synced to an append-only file before it is answered: nothing answered is lost by a crash.
    #[must_use]
    pub fn durable(self) -> Self {
        self.setting("appendonly yes").setting("appendfsync always")
    }

    /// Speaks TLS on a port of its own too, with a certificate for 127.0.0.1; certificates of clients are read if there are.
    #[must_use]
    pub fn tls(mut self, authority: &Authority) -> Self {
        self.tls = Some((authority.pem(), authority.identity("IP:127.0.0.1")));
        self
    }

    /// Runs it on this wall clock.
    #[must_use]
    pub fn clock(mut self, clock: &ToldClock) -> Self {
        self.clock = Some(clock.clone());
        self
    }

    /// Starts the server.
    ///
    /// # Panics
    /// With the reason when it cannot be started.
    pub async fn start(self) -> Redis {
        Redis(Arc::new(blocking(move || Service::private(self)).await))
    }
}

impl Recipe for RedisOptions {
    fn name(&self) -> &'static str {
        "redis"
    }

    fn prepare(&self, home: &Home) -> Result<()> {
        let settings = format!(
            "bind 127.0.0.1\nport {}\ndir {}\nsave \"\"\nappendonly no\nrepl-diskless-sync-delay 0\n",
            home.port(),
            home.folder().display(),
        );
        let more = match self.part {
            Part::Server => String::new(),
            Part::Sentinel => "sentinel resolve-hostnames no\n".into(),
            Part::Node => {
                let bus = quiet_port()?;
                home.write("bus-port", bus.to_string())?;
                format!(
                    "cluster-enabled yes\ncluster-port {bus}\ncluster-node-timeout 2000\n\
                     cluster-require-full-coverage no\ncluster-allow-replica-migration no\n"
                )
            }
        };
        let tls =
            self.tls.as_ref().map_or(Ok(String::new()), |(ca, identity)| tls_settings(home, ca, identity))?;
        // What a test says comes last, and holds.
        let settings = match self.part {
            Part::Sentinel => format!(
                "bind 127.0.0.1\nport {}\ndir {}\n{more}{}",
                home.port(),
                home.folder().display(),
                self.settings
            ),
            Part::Server | Part::Node => format!("{settings}{more}{tls}{}", self.settings),
        };
        home.write("redis.conf", settings)?;
        // So that a missing compiler is told here, with its reason.
        self.clock.as_ref().map_or(Ok(()), |clock| clock.apply(&mut Command::new("redis-server")))
    }

    fn command(&self, home: &Home) -> Command {
        let mut command =
            home.command(program("redis-server", &[]).unwrap_or_else(|_| "redis-server".into()));
        command.arg(home.path("redis.conf"));
        if self.part == Part::Sentinel {
            command.arg("--sentinel");
        }
        if let Some(clock) = &self.clock {
            let _ = clock.apply(&mut command);
        }
        command
    }

    // Not while it loads its file.
    fn is_ready(&self, home: &Home) -> bool {
        ping(home.addr()).is_ok_and(|answer| answer.starts_with("+PONG") || answer.starts_with("-NOAUTH"))
    }
}

fn tls_settings(home: &Home, ca: &str, identity: &Identity) -> Result<String> {
    let port = quiet_port()?;
    home.write("tls-port", port.to_string())?;
    let [ca, cert, key] = [("ca.pem", ca), ("cert.pem", &*identity.cert), ("key.pem", &*identity.key)]
        .map(|(name, content)| home.write(name, content).map(|path| path.display().to_string()));
    Ok(format!(
        "tls-port {port}\ntls-ca-cert-file {}\ntls-cert-file {}\ntls-key-file {}\ntls-auth-clients optional\n",
        ca?, cert?, key?
    ))
}

fn ping(addr: SocketAddr) -> Result<String> {
    let mut stream = TcpStream::connect(addr)?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    stream.write_all(b"PING\r\n")?;
    let mut answer = [0; 64];
    let read = stream.read(&mut answer)?;
    Ok(String::from_utf8_lossy(&answer[..read]).into_owned())
}

fn run_cli(home: &Home, port: u16, command: &[impl AsRef<OsStr>]) -> Result<String> {
    let mut cli = home.command(program("redis-cli", &[])?);
    cli.args(["-p", &port.to_string()]).args(command);
    let text = home.run(&mut cli)?;
    Ok(text.strip_suffix('\n').unwrap_or(&text).to_owned())
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> T {
    let done = spawn_blocking(work).await.context("it does not panic").and_then(|done| done);
    done.unwrap_or_else(|error| panic!("{error:#}"))
}
