//! `onlyonce serve` against nginx, and its guarded requests against its own pass-through.
//!
//! Both proxies are processes with two workers, before the same upstream. `PUT` passes through the gateway unguarded.

use std::fs::{self, File};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::Plan;
use crate::keys::Keys;
use crate::load::{self, CONNECTIONS, Request};
use crate::measure::{Comparison, Subject, Target, now, series};
use crate::report::Report;
use crate::runtime::WORKERS;
use crate::upstream;

/// The programs to measure.
#[derive(Clone, Debug, Args)]
pub(crate) struct Programs {
    /// The gateway, as a release build. Default: `onlyonce` beside this program.
    #[arg(long)]
    pub(crate) onlyonce: Option<PathBuf>,
    /// nginx.
    #[arg(long, default_value = "nginx")]
    nginx: PathBuf,
}

/// How many keys are replayed over and over.
const REPLAYED_KEYS: u64 = 1000;

pub(crate) fn run(plan: &Plan, programs: &Programs, report: &mut Report) -> Result<()> {
    let folder = plan.folder()?;
    let upstream = upstream::start()?;
    let nginx = Server::start(nginx(&programs.nginx, folder.path(), upstream)?)?;
    let gateway = Server::start(gateway(programs.onlyonce.as_deref(), folder.path(), upstream)?)?;

    let (put, post) = (Request::new("PUT"), Request::new("POST"));
    load::fill(gateway.addr, &post, REPLAYED_KEYS, "idempotency-replayed: true")?;
    let subject = |name, server: &Server, request: &Request, keys| {
        let (addr, request, keys) = (server.addr, request.clone(), Arc::new(keys));
        Subject::new(name, move |time| load::run(addr, &request, &keys, time))
    };
    let [bare, pass, new, replay] =
        ["nginx", "gateway, pass-through", "gateway, new key, sqlite, hold", "gateway, replay"];
    let subjects = vec![
        subject(bare, &nginx, &put, Keys::unique()),
        subject(pass, &gateway, &put, Keys::unique()),
        subject(new, &gateway, &post, Keys::unique()),
        subject(replay, &gateway, &post, Keys::cycle(REPLAYED_KEYS)),
    ];
    let comparisons = [
        Comparison::new(pass, bare, Target::Rate(0.7, 1.0)),
        Comparison::new(new, pass, Target::Rate(0.6, 0.75)),
        Comparison::new(replay, pass, Target::Rate(1.3, 2.0)),
    ];
    series(plan, report, "gateway", subjects, &comparisons)
}

/// A proxy: a process that is killed, by its own id, when dropped.
pub(crate) struct Server {
    pub(crate) addr: SocketAddr,
    child: Child,
}

pub(crate) struct Start {
    pub(crate) command: Command,
    addr: SocketAddr,
    log: PathBuf,
}

impl Server {
    pub(crate) fn start(Start { mut command, addr, log }: Start) -> Result<Self> {
        // To a file, as an operator has it; this program has no time to read along.
        let output = File::create(&log)?;
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        let child = command.spawn().with_context(|| format!("start {command:?}"))?;
        let mut server = Self { addr, child };
        let give_up = now() + testkit::PATIENCE;
        while TcpStream::connect(addr).is_err() {
            let ended = server.child.try_wait()?;
            if ended.is_some() || now() > give_up {
                bail!("{command:?} does not listen: {}", fs::read_to_string(&log)?);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(server)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Asked first: the master of nginx takes its workers with it.
        let pid = i32::try_from(self.child.id()).ok().and_then(rustix::process::Pid::from_raw);
        if let Some(pid) = pid {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        let give_up = now() + Duration::from_secs(5);
        while matches!(self.child.try_wait(), Ok(None)) {
            if now() > give_up {
                let _ = self.child.kill();
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Its records are in `gateway.db` of the folder.
pub(crate) fn gateway(program: Option<&Path>, folder: &Path, upstream: SocketAddr) -> Result<Start> {
    let program = match program {
        Some(program) => program.to_owned(),
        None => std::env::current_exe()?.with_file_name("onlyonce"),
    };
    anyhow::ensure!(
        program.is_file(),
        "no {}: cargo build --release -p onlyonce-cli, or --onlyonce",
        program.display()
    );
    let addr = testkit::free_addr();
    let mut command = Command::new(program);
    command
        .current_dir(folder)
        .args(["serve", "--listen", &addr.to_string(), "--upstream", &format!("http://{upstream}")])
        .args(["--store", "sqlite:gateway.db"]);
    Ok(Start { command, addr, log: folder.join("gateway.log") })
}

fn nginx(program: &Path, folder: &Path, upstream: SocketAddr) -> Result<Start> {
    let addr = testkit::free_addr();
    let folder = folder.join("nginx");
    fs::create_dir(&folder)?;
    let temp_paths: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|kind| format!("    {kind}_temp_path {kind};\n"))
        .concat();
    let config = format!(
        "daemon off;
worker_processes {WORKERS};
pid nginx.pid;
error_log stderr;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    server_tokens off;
{temp_paths}
    upstream service {{
        server {upstream};
        keepalive {CONNECTIONS};
        keepalive_requests 1000000000;
    }}
    server {{
        listen {addr};
        keepalive_requests 1000000000;
        location / {{
            proxy_pass http://service;
            proxy_http_version 1.1;
            proxy_set_header Connection \"\";
            proxy_set_header Host $host;
            proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
            proxy_set_header X-Forwarded-Proto $scheme;
            proxy_set_header X-Forwarded-Host $host;
        }}
    }}
}}
"
    );
    fs::write(folder.join("nginx.conf"), config)?;
    // Debian keeps it where not every user looks.
    let sbin = Path::new("/usr/sbin").join(program);
    let mut command = Command::new(if sbin.is_file() { &sbin } else { program });
    command.arg("-p").arg(&folder).args(["-c", "nginx.conf", "-e", "stderr"]);
    Ok(Start { command, addr, log: folder.join("log") })
}
