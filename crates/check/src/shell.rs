//! The user's own commands: run by `sh`, and ended with all that they started when they take too long.

use std::io;
use std::process::{Output, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::process::{Child, Command};

/// Why there is no end of a command.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NoEnd {
    #[error("cannot be started: {0}")]
    NotStarted(#[source] io::Error),
    #[error("did not end within {0:?}")]
    Timeout(Duration),
    #[error("cannot be waited for: {0}")]
    Lost(#[source] io::Error),
}

/// Runs a command. Its output is kept where it `says` something; else it goes nowhere, so that a server which it leaves
/// in the background holds nothing open.
///
/// # Cancellation
/// The command and what it started is killed; what it left running when it ended by itself is not.
pub(crate) async fn run(command: &str, says: bool, limit: Duration) -> Result<Output, NoEnd> {
    let output = || if says { Stdio::piped() } else { Stdio::null() };
    let child = Command::new("sh")
        .args(["-c", command])
        .stdin(Stdio::null())
        .stdout(output())
        .stderr(output())
        .process_group(0)
        .kill_on_drop(true)
        .spawn()
        .map_err(NoEnd::NotStarted)?;
    let mut group = Group::of(&child);
    match tokio::time::timeout(limit, child.wait_with_output()).await {
        Err(_) => Err(NoEnd::Timeout(limit)),
        Ok(Err(error)) => Err(NoEnd::Lost(error)),
        Ok(Ok(output)) => {
            group.0 = None;
            Ok(output)
        }
    }
}

/// The processes of a command: the shell alone would leave its children behind.
struct Group(Option<Pid>);

impl Group {
    fn of(child: &Child) -> Self {
        Self(child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(leader) = self.0 {
            // Gone already is as good.
            let _ = kill_process_group(leader, Signal::KILL);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock;

    async fn ends(pid: Pid) -> bool {
        let start = clock::now();
        // A zombie whose parent is gone is reaped by whoever inherits it, in its own time.
        let state = || {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?;
            stat.rsplit_once(") ")?.1.chars().next()
        };
        while state().is_some_and(|state| state != 'Z') {
            if clock::now().saturating_duration_since(start) > Duration::from_secs(20) {
                return false;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        true
    }

    #[tokio::test]
    async fn a_command_that_takes_too_long_ends_with_its_children() {
        let folder = tempfile::tempdir().unwrap();
        let told = folder.path().join("pid");
        for says in [true, false] {
            let command = format!("sleep 300 & echo $! >{}; wait", told.display());
            let ended = run(&command, says, Duration::from_secs(1)).await;
            assert!(matches!(ended, Err(NoEnd::Timeout(_))), "{ended:?}");
            let child = std::fs::read_to_string(&told).unwrap().trim().parse().unwrap();
            assert!(ends(Pid::from_raw(child).unwrap()).await, "the child of the shell lives on");
        }
    }

    #[tokio::test]
    async fn what_a_command_leaves_in_the_background_lives_on() {
        let folder = tempfile::tempdir().unwrap();
        let told = folder.path().join("pid");
        let command = format!("sleep 300 & echo $! >{}", told.display());
        assert!(run(&command, false, Duration::from_secs(30)).await.unwrap().status.success());
        let child = std::fs::read_to_string(&told).unwrap().trim().parse().unwrap();
        let child = Pid::from_raw(child).unwrap();
        assert!(rustix::process::test_kill_process(child).is_ok());
        rustix::process::kill_process(child, Signal::KILL).unwrap();
    }
}
