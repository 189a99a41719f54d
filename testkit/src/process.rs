//! A real process: started, watched, signalled, killed.

use std::ffi::OsStr;
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use parking_lot::Mutex;
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::{Child, Command};

use crate::{PATIENCE, wait_until};

/// A running program; killed by its own id when dropped.
#[derive(Debug)]
pub struct Process {
    child: Child,
    pid: Pid,
    stdout: Captured,
    stderr: Captured,
}

type Captured = Arc<Mutex<String>>;

impl Process {
    /// Starts a program in the folder `dir`, its output captured.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn spawn<A: AsRef<OsStr>>(
        program: impl AsRef<OsStr>,
        args: impl IntoIterator<Item = A>,
        dir: &Path,
    ) -> Result<Self> {
        let mut command = Command::new(program);
        command.args(args).current_dir(dir);
        Self::from_command(command)
    }

    /// Starts a prepared command, its output captured.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn from_command(mut command: Command) -> Result<Self> {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().with_context(|| format!("start {command:?}"))?;
        let pid = child.id().context("the process ended at once")?;
        let pid = Pid::from_raw(i32::try_from(pid)?).context("a process id")?;
        let stdout = capture(child.stdout.take().context("stdout is piped")?);
        let stderr = capture(child.stderr.take().context("stderr is piped")?);
        Ok(Self { child, pid, stdout, stderr })
    }

    /// Waits until `text` is in its output.
    ///
    /// # Errors
    /// When it ends before, or within [`PATIENCE`] nothing of the kind is written; the output is in the error.
    pub async fn wait_output(&mut self, text: &str) -> Result<()> {
        let start = tokio::time::Instant::now();
        loop {
            if self.stdout().contains(text) || self.stderr().contains(text) {
                return Ok(());
            }
            if let Some(status) = self.child.try_wait()? {
                // What it wrote last may still be on its way.
                tokio::time::sleep(std::time::Duration::from_millis(100)).await;
                if self.stdout().contains(text) || self.stderr().contains(text) {
                    return Ok(());
                }
                bail!("ended with {status} before {text:?}: {}{}", self.stdout(), self.stderr());
            }
            if start.elapsed() > PATIENCE {
                bail!("never wrote {text:?}: {}{}", self.stdout(), self.stderr());
            }
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.pid.as_raw_nonzero().get().unsigned_abs()
    }

    /// What it wrote to stdout so far.
    pub fn stdout(&self) -> String {
        self.stdout.lock().clone()
    }

    /// What it wrote to stderr so far.
    pub fn stderr(&self) -> String {
        self.stderr.lock().clone()
    }

    /// Kills it at once and waits until it is gone.
    ///
    /// # Errors
    /// When it is gone already.
    pub async fn kill_9(&mut self) -> Result<()> {
        self.signal(Signal::KILL)?;
        self.child.wait().await?;
        Ok(())
    }

    /// Asks it to end.
    ///
    /// # Errors
    /// When it is gone already.
    pub fn sigterm(&self) -> Result<()> {
        self.signal(Signal::TERM)
    }

    /// Sends Ctrl-C.
    ///
    /// # Errors
    /// When it is gone already.
    pub fn sigint(&self) -> Result<()> {
        self.signal(Signal::INT)
    }

    /// Stops it in its tracks and waits until the system says so.
    ///
    /// # Errors
    /// When it is gone already.
    pub async fn sigstop(&self) -> Result<()> {
        self.signal(Signal::STOP)?;
        wait_until("the process is stopped", || {
            self.status_field("State:").is_some_and(|s| s.starts_with('T'))
        })
        .await;
        Ok(())
    }

    /// Lets it run on.
    ///
    /// # Errors
    /// When it is gone already.
    pub fn sigcont(&self) -> Result<()> {
        self.signal(Signal::CONT)
    }

    /// Waits until it ends.
    ///
    /// # Errors
    /// When it does not within [`PATIENCE`].
    pub async fn wait_exit(&mut self) -> Result<ExitStatus> {
        Ok(tokio::time::timeout(PATIENCE, self.child.wait()).await.context("it did not end in time")??)
    }

    /// Memory it holds now, in bytes (`VmRSS`).
    pub fn rss_bytes(&self) -> u64 {
        self.memory("VmRSS:")
    }

    /// The most memory it held so far, in bytes (`VmHWM`).
    pub fn peak_rss_bytes(&self) -> u64 {
        self.memory("VmHWM:")
    }

    fn memory(&self, field: &str) -> u64 {
        let text = self.status_field(field).expect("the process runs");
        let kib: u64 = text.trim_end_matches("kB").trim().parse().expect("a number of kB");
        kib * 1024
    }

    fn status_field(&self, field: &str) -> Option<String> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).ok()?;
        status.lines().find_map(|line| Some(line.strip_prefix(field)?.trim().to_owned()))
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        // Reaped already: the id may belong to another process by now.
        if self.child.id().is_none() {
            bail!("the process has ended");
        }
        Ok(kill_process(self.pid, signal)?)
    }
}

fn capture(from: impl AsyncRead + Unpin + Send + 'static) -> Captured {
    let captured = Captured::default();
    let into = captured.clone();
    tokio::spawn(async move {
        let mut lines = BufReader::new(from);
        let mut line = Vec::new();
        while lines.read_until(b'\n', &mut line).await.is_ok_and(|n| n > 0) {
            into.lock().push_str(&String::from_utf8_lossy(&line));
            line.clear();
        }
    });
    captured
}
