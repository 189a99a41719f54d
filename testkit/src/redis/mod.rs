//! Private Redis servers: one, a cluster of six, one with replicas behind Sentinel.

mod told;

use std::fmt::Write as _;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::task::spawn_blocking;

use crate::service::{Home, Recipe, Service, program};

pub use told::ToldClock;

/// A Redis server in a temporary folder, without persistence unless it is asked for.
#[derive(Clone, Debug)]
pub struct Redis(Arc<Service<RedisOptions>>);

/// How a private server is set up.
#[derive(Clone, Debug, Default)]
pub struct RedisOptions {
    settings: String,
    clock: Option<ToldClock>,
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

    /// What `redis-cli` prints for this command, without its last line end.
    ///
    /// # Panics
    /// When it cannot be run; an error of the server is in the answer.
    pub async fn cli<const N: usize>(&self, command: [&str; N]) -> String {
        let (service, command) = (Arc::clone(&self.0), command.map(str::to_owned));
        blocking(move || cli(service.home(), &command)).await
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
            "bind 127.0.0.1\nport {}\ndir {}\nsave \"\"\nappendonly no\nrepl-diskless-sync-delay 0\n{}",
            home.port(),
            home.folder().display(),
            self.settings
        );
        home.write("redis.conf", settings)?;
        // So that a missing compiler is told here, with its reason.
        self.clock.as_ref().map_or(Ok(()), |clock| clock.apply(&mut Command::new("redis-server")))
    }

    fn command(&self, home: &Home) -> Command {
        let mut command =
            home.command(program("redis-server", &[]).unwrap_or_else(|_| "redis-server".into()));
        command.arg(home.path("redis.conf"));
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

fn ping(addr: SocketAddr) -> Result<String> {
    let mut stream = TcpStream::connect(addr)?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    stream.write_all(b"PING\r\n")?;
    let mut answer = [0; 64];
    let read = stream.read(&mut answer)?;
    Ok(String::from_utf8_lossy(&answer[..read]).into_owned())
}

fn cli(home: &Home, command: &[String]) -> Result<String> {
    let mut cli = home.command(program("redis-cli", &[])?);
    cli.args(["-p", &home.port().to_string()]).args(command);
    let text = home.run(&mut cli)?;
    Ok(text.strip_suffix('\n').unwrap_or(&text).to_owned())
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> T {
    let done = spawn_blocking(work).await.context("it does not panic").and_then(|done| done);
    done.unwrap_or_else(|error| panic!("{error:#}"))
}
