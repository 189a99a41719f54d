//! A command of the shell.

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use onlyonce_core::{Clock, SystemClock};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, WaitIdStatus, kill_process_group, waitid};

use super::response::{self, RESPONSE_BYTES_MAX};
use crate::error::InboxError;
use crate::work::{Call, Ending, Handler};

/// Exit code of a handler that failed for good, as of `sysexits.h`: EX_DATAERR.
const FAILED_FOR_GOOD: i32 = 65;
/// Between being asked to end and being ended.
const GRACE: Duration = Duration::from_secs(2);
/// For the rest of the output, when a process that left the group keeps the pipe open.
const OUTPUT_GRACE: Duration = Duration::from_secs(1);
const NAP_MIN: Duration = Duration::from_micros(200);
const NAP_MAX: Duration = Duration::from_millis(10);

/// Runs a command by `sh -c`: the message on its standard input, its key in `ONLYONCE_KEY`, and `ONLYONCE_ATTEMPT`. What it
/// says on standard output is the response; its standard error is ours.
///
/// Exit code 0 is done, 65 a failure for good; every other end, by a signal or by the timeout too, leaves no record. It
/// runs in a process group of its own, which is ended with it.
#[derive(Clone, Debug)]
pub struct Exec {
    command: String,
    timeout: Duration,
}

impl Exec {
    /// With a timeout of 30 s.
    pub fn new(command: impl Into<String>) -> Self {
        Self { command: command.into(), timeout: Duration::from_secs(30) }
    }

    /// How long the command may run.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    fn start(&self, call: &Call<'_>) -> Result<Running, InboxError> {
        let message = whole(call.message.body)
            .map_err(|error| InboxError::file(&std::env::temp_dir(), "a message cannot be written", error))?;
        let mut child = Command::new("sh")
            .args(["-c", &self.command])
            .env("ONLYONCE_KEY", call.message.envelope.key.as_str())
            .env("ONLYONCE_ATTEMPT", call.attempt.to_string())
            .stdin(message)
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .map_err(|error| InboxError::file(std::path::Path::new("sh"), "cannot be started", error))?;
        let mut stdout = child.stdout.take().expect("it is piped");
        let output = Output::default();
        let (kept, (give, at_end)) = (Arc::clone(&output.kept), channel());
        thread::spawn(move || {
            // Past the limit it is read and dropped: a full pipe would stop the command.
            let mut piece = [0; 8192];
            while let Ok(read @ 1..) = stdout.read(&mut piece) {
                let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
                let room = (RESPONSE_BYTES_MAX + 1).saturating_sub(kept.len());
                kept.extend_from_slice(&piece[..read.min(room)]);
            }
            drop::<Sender<()>>(give);
        });
        let output = Output { at_end: Some(at_end), ..output };
        Ok(Running { child, output })
    }

    // The reason, or how it ended.
    fn wait(&self, running: &Running, call: &Call<'_>) -> Result<Result<WaitIdStatus, String>, InboxError> {
        let started = SystemClock.boot();
        let mut nap = NAP_MIN;
        loop {
            if let Some(status) = running.ended()? {
                return Ok(Ok(status));
            }
            if let Some(reason) = call.stop.reason() {
                return Ok(Err(format!("the command was ended: {reason}")));
            }
            if SystemClock.boot().saturating_sub(started) >= self.timeout {
                let after = self.timeout.as_secs_f64();
                return Ok(Err(format!("the command was ended: it did not end by itself within {after} s")));
            }
            thread::sleep(nap);
            nap = (nap * 2).min(NAP_MAX);
        }
    }
}

impl Handler for Exec {
    fn handle(&self, call: &Call<'_>) -> Result<Ending, InboxError> {
        let mut running = self.start(call)?;
        let ended = self.wait(&running, call);
        if !matches!(ended, Ok(Ok(_))) {
            running.ask_to_end()?;
        }
        let output = running.end();
        let status = match ended? {
            Ok(status) => status,
            Err(reason) => return Ok(Ending::Transient(reason)),
        };
        let for_good = match status.exit_status() {
            Some(0) => false,
            Some(FAILED_FOR_GOOD) => true,
            Some(code) => {
                return Ok(Ending::Transient(format!(
                    "the command ended with exit code {code}; nothing is recorded"
                )));
            }
            None => {
                let signal = status.terminating_signal().unwrap_or_default();
                return Ok(Ending::Transient(format!(
                    "the command was ended by signal {signal}; nothing is recorded"
                )));
            }
        };
        let response = match output.len() > RESPONSE_BYTES_MAX {
            true => response::omitted(call.message.envelope),
            false => response::line(&output),
        };
        Ok(if for_good { Ending::Failed(response) } else { Ending::Done(response) })
    }
}

/// A file without a name. A pipe would end in the middle of the message when this process is killed while it writes,
/// and the command, which goes on, could not tell.
fn whole(message: &[u8]) -> io::Result<File> {
    let mut file = tempfile::tempfile()?;
    file.write_all(message)?;
    file.rewind()?;
    Ok(file)
}

struct Running {
    child: Child,
    output: Output,
}

/// What a command has said so far.
#[derive(Default)]
struct Output {
    kept: Arc<Mutex<Vec<u8>>>,
    // Says no more when the pipe is at its end.
    at_end: Option<Receiver<()>>,
}

impl Running {
    fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    // Left as a zombie, so that its number stays that of the group until the group is ended.
    fn ended(&self) -> Result<Option<WaitIdStatus>, InboxError> {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
        match waitid(WaitId::Pid(self.pid()), options) {
            Ok(status) => Ok(status),
            Err(rustix::io::Errno::INTR) => Ok(None),
            Err(error) => {
                Err(InboxError::file(std::path::Path::new("sh"), "cannot be waited for", error.into()))
            }
        }
    }

    fn ask_to_end(&self) -> Result<(), InboxError> {
        // Fails for a group that has ended, and that is what is wanted.
        let _ = kill_process_group(self.pid(), Signal::TERM);
        let started = SystemClock.boot();
        while self.ended()?.is_none() && SystemClock.boot().saturating_sub(started) < GRACE {
            thread::sleep(NAP_MAX);
        }
        Ok(())
    }

    // Whatever the command left behind in its group ends here, and with it the other ends of the pipes.
    fn end(&mut self) -> Vec<u8> {
        let _ = kill_process_group(self.pid(), Signal::KILL);
        let _ = self.child.wait();
        if let Some(at_end) = &self.output.at_end {
            let _ = at_end.recv_timeout(OUTPUT_GRACE);
        }
        std::mem::take(&mut *self.output.kept.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
