//! The gateway as a process of its own, so that it can be killed for real.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::time::timeout;

/// What the gateway prints when it is ready, before its address.
pub(crate) const READY: &str = "listening on http://";

#[derive(Debug)]
pub(crate) struct Gateway {
    process: Child,
    pub(crate) address: SocketAddr,
}

/// What differs from one start to the next.
#[derive(Clone, Debug)]
pub(crate) struct GatewayOptions<'a> {
    pub(crate) listen: SocketAddr,
    pub(crate) upstream: SocketAddr,
    pub(crate) store: &'a Path,
    pub(crate) unguarded: bool,
    pub(crate) lease_s: u64,
}

impl Gateway {
    pub(crate) async fn start(options: &GatewayOptions<'_>) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe().context("where is this program?")?);
        command
            .arg("serve")
            .args(["--listen", &options.listen.to_string()])
            .args(["--upstream", &format!("http://{}", options.upstream)])
            .arg("--store")
            .arg(format!("sqlite:{}", options.store.display()))
            .args(["--wait", "10s", "--lease", &format!("{}s", options.lease_s), "--log", "text"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        if options.unguarded {
            command.arg("--unguarded");
        }
        let mut process = command.spawn().context("the gateway does not start")?;
        let stderr = process.stderr.take().context("the gateway has a standard error")?;
        let mut lines = BufReader::new(stderr).lines();
        let mut said = Vec::new();
        let ready = async {
            while let Some(line) = lines.next_line().await? {
                if let Some((_, address)) = line.split_once(READY) {
                    let address =
                        address.trim().parse().with_context(|| format!("not an address: {line}"))?;
                    return Ok(address);
                }
                said.push(line);
            }
            bail!("the gateway ended before it was ready:\n{}", said.join("\n"))
        };
        let address = timeout(Duration::from_secs(30), ready)
            .await
            .context("the gateway is not ready after 30 s")??;
        // Its log must go somewhere, or it would stop writing and wait.
        tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
        Ok(Self { process, address })
    }

    /// SIGKILL: no shutdown, no clean-up.
    pub(crate) async fn kill(mut self) -> Result<()> {
        self.process.start_kill()?;
        self.process.wait().await?;
        Ok(())
    }

    /// SIGTERM, and wait for the end.
    pub(crate) async fn stop(mut self) -> Result<()> {
        if let Some(pid) = self.process.id().and_then(|pid| rustix::process::Pid::from_raw(pid.cast_signed()))
        {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        match timeout(Duration::from_secs(10), self.process.wait()).await {
            Ok(status) => drop(status?),
            Err(_) => self.kill().await?,
        }
        Ok(())
    }
}
