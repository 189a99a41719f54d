//! The gateways: processes that are killed, stopped and replaced.

use std::net::SocketAddr;
use std::process::Stdio;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::process::{Pid, Signal, kill_process};
use tokio::net::{TcpStream, lookup_host};
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep};

use crate::fault::FaultProxy;
use crate::plan::{Gateways, WorkAt, store_address};
use crate::port::quiet_port;
use crate::run::ProveError;

/// How long a gateway may take to listen.
const START_PATIENCE: Duration = Duration::from_secs(30);

/// What listens where clients ask.
pub(crate) struct Fleet {
    members: Vec<Member>,
    work_at: WorkAt,
}

struct Member {
    addr: SocketAddr,
    /// Between it and the store, where there is a network.
    network: Option<FaultProxy>,
    process: Option<Process>,
}

struct Process {
    command: Box<dyn Fn() -> Command + Send + Sync>,
    child: tokio::sync::Mutex<Option<Running>>,
    log: std::path::PathBuf,
    stopped: Mutex<bool>,
}

struct Running {
    child: Child,
    since: Instant,
}

impl Fleet {
    /// A server that is there.
    pub(crate) async fn there(authority: &str) -> Result<Self, ProveError> {
        let unreachable = |why: String| ProveError::Unreachable(authority.to_owned(), why);
        let found = lookup_host(authority).await.map_err(|error| unreachable(error.to_string()))?;
        let addr = found.into_iter().next().ok_or_else(|| unreachable("it has no address".into()))?;
        TcpStream::connect(addr).await.map_err(|error| unreachable(error.to_string()))?;
        let members = vec![Member { addr, network: None, process: None }];
        Ok(Self { members, work_at: WorkAt::Upstream })
    }

    /// Starts them all, each with a network of its own to the store. `work` is the URL of the upstream, or the name of the
    /// table.
    pub(crate) async fn start(gateways: &Gateways, work: &str) -> Result<Self, ProveError> {
        let mut members = Vec::new();
        for number in 0..gateways.count {
            let (store, network) = match store_address(&gateways.store) {
                None => (gateways.store.clone(), None),
                Some((place, address)) => {
                    let unreachable = |why: String| ProveError::Unreachable(address.clone(), why);
                    let target =
                        lookup_host(&address).await.map_err(|error| unreachable(error.to_string()))?;
                    let target = target.into_iter().next().ok_or_else(|| unreachable("no address".into()))?;
                    let network = FaultProxy::start(target).await;
                    let mut url = gateways.store.clone();
                    url.replace_range(place, &network.addr().to_string());
                    (url, Some(network))
                }
            };
            // The same port over restarts: a client keeps its instance.
            let port = quiet_port().map_err(|error| ProveError::Start(error.to_string()))?;
            let addr = SocketAddr::from(([127, 0, 0, 1], port));
            let log = gateways.folder.join(format!("gateway-{number}.log"));
            let command = command(gateways, addr, &store, work, &log);
            let process = Process {
                command: Box::new(command),
                child: tokio::sync::Mutex::new(None),
                log,
                stopped: Mutex::new(false),
            };
            let member = Member { addr, network, process: Some(process) };
            // What cannot start at all is not waited for.
            member.start(Duration::ZERO).await?;
            members.push(member);
        }
        Ok(Self { members, work_at: gateways.work_at })
    }

    pub(crate) fn count(&self) -> usize {
        self.members.len()
    }

    pub(crate) fn addr(&self, number: usize) -> SocketAddr {
        self.members[number].addr
    }

    /// What is in a statement whose answer is worth losing.
    pub(crate) fn needles(&self) -> &'static [&'static str] {
        match self.work_at {
            // Part of every key: whatever names an operation.
            WorkAt::Upstream => &["prove-"],
            WorkAt::Transaction => &["prove-", "COMMIT"],
        }
    }

    pub(crate) fn network(&self, number: usize) -> Option<&FaultProxy> {
        self.members[number].network.as_ref()
    }

    /// `kill -9`, and a new one.
    pub(crate) async fn restart(&self, number: usize) -> Result<(), ProveError> {
        let member = &self.members[number];
        let Some(process) = &member.process else { return Ok(()) };
        if let Some(mut running) = process.child.lock().await.take() {
            *process.stopped.lock() = false;
            let _ = running.child.kill().await;
        }
        member.start(START_PATIENCE).await
    }

    /// Stops it in its tracks.
    pub(crate) async fn stop(&self, number: usize) {
        self.signal(number, Signal::STOP).await;
    }

    /// Lets it go on.
    pub(crate) async fn go_on(&self, number: usize) {
        self.signal(number, Signal::CONT).await;
    }

    async fn signal(&self, number: usize, signal: Signal) {
        let Some(process) = &self.members[number].process else { return };
        // Held, so that the id is still this child's.
        let running = process.child.lock().await;
        let id = running
            .as_ref()
            .and_then(|running| running.child.id())
            .and_then(|id| i32::try_from(id).ok())
            .and_then(Pid::from_raw);
        if let Some(id) = id {
            *process.stopped.lock() = signal == Signal::STOP;
            let _ = kill_process(id, signal);
        }
    }

    /// The processes that run now, and since when. One that is just being started is left out.
    pub(crate) fn processes(&self) -> Vec<(String, u32, Instant)> {
        let running = |(number, member): (usize, &Member)| {
            let held = member.process.as_ref()?.child.try_lock().ok()?;
            let running = held.as_ref()?;
            Some((format!("{} {number}", self.work_at.of()), running.child.id()?, running.since))
        };
        self.members.iter().enumerate().filter_map(running).collect()
    }

    /// Everything runs, and nothing is in the way.
    pub(crate) async fn heal(&self) -> Result<(), ProveError> {
        for (number, member) in self.members.iter().enumerate() {
            if let Some(network) = &member.network {
                network.refuse(false);
                network.silence(false);
                network.delay(Duration::ZERO);
                network.hold_replies(Duration::ZERO);
            }
            self.go_on(number).await;
            let Some(process) = &member.process else { continue };
            let ended = match process.child.lock().await.as_mut() {
                None => true,
                Some(running) => matches!(running.child.try_wait(), Ok(Some(_))),
            };
            if ended {
                return Err(ProveError::Ended { number, log: tail(&process.log) });
            }
        }
        Ok(())
    }

    /// Ends what was started.
    pub(crate) async fn end(self) {
        for member in &self.members {
            let Some(process) = &member.process else { continue };
            if let Some(mut running) = process.child.lock().await.take() {
                let _ = running.child.kill().await;
            }
        }
    }
}

impl Member {
    // One that ends at its start is tried again for as long as `patience`.
    async fn start(&self, patience: Duration) -> Result<(), ProveError> {
        let Some(process) = &self.process else { return Ok(()) };
        let mut held = process.child.lock().await;
        let began = Instant::now();
        loop {
            let mut child =
                (process.command)().spawn().map_err(|error| ProveError::Start(error.to_string()))?;
            let ended = loop {
                if TcpStream::connect(self.addr).await.is_ok() {
                    *held = Some(Running { child, since: Instant::now() });
                    return Ok(());
                }
                if matches!(child.try_wait(), Ok(Some(_))) {
                    break true;
                }
                if began.elapsed() > START_PATIENCE {
                    break false;
                }
                sleep(Duration::from_millis(10)).await;
            };
            // Its store may be away just now, or its old port still busy.
            if !ended || began.elapsed() >= patience {
                return Err(ProveError::Start(tail(&process.log)));
            }
            sleep(Duration::from_millis(200)).await;
        }
    }
}

fn command(
    gateways: &Gateways,
    addr: SocketAddr,
    store: &str,
    work: &str,
    log: &std::path::Path,
) -> impl Fn() -> Command + Send + Sync + use<> {
    let (program, folder, store) = (gateways.program.clone(), gateways.folder.clone(), store.to_owned());
    let lease = format!("{}ms", gateways.lease.as_millis());
    let (work_at, work, log) = (gateways.work_at, work.to_owned(), log.to_owned());
    let (on_unknown, environment) = (gateways.on_unknown.name(), gateways.environment.clone());
    move || {
        let mut command = Command::new(&program);
        let listen = addr.to_string();
        match work_at {
            WorkAt::Upstream => {
                command.args(["serve", "--listen", &listen, "--upstream", &work, "--lease", &lease]);
                command.args(["--wait", "1s", "--on-unknown", on_unknown, "--log", "quiet", "--scope-none"])
            }
            WorkAt::Transaction => command.args(["prove", "--shop", &listen, "--ledger", &work]),
        };
        command.envs(environment.iter().cloned());
        // The URL may hold a password: not where `ps` shows it.
        command
            .env("ONLYONCE_STORE", &store)
            .env("ONLYONCE_PROVE_STORE", &store)
            .current_dir(&folder)
            .stdin(Stdio::null())
            .kill_on_drop(true);
        let output = std::fs::OpenOptions::new().create(true).append(true).open(&log);
        match output.and_then(|file| Ok((file.try_clone()?, file))) {
            Ok((out, err)) => command.stdout(out).stderr(err),
            Err(_) => command.stdout(Stdio::null()).stderr(Stdio::null()),
        };
        command
    }
}

fn tail(log: &std::path::Path) -> String {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<_> = text.lines().rev().take(10).collect();
    lines.into_iter().rev().collect::<Vec<_>>().join("\n")
}
