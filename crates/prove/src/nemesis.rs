//! What breaks things, one after the other and several at once.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::process::Command;
use tokio::time::{Instant, sleep, timeout};

use crate::plan::Fault;
use crate::random::Random;
use crate::run::ProveError;
use crate::subject::Subject;

/// How often each fault was made.
pub(crate) type Counts = Arc<Mutex<BTreeMap<Fault, usize>>>;

pub(crate) struct Nemesis {
    pub(crate) subject: Subject,
    pub(crate) faults: Vec<Fault>,
    pub(crate) lease: Duration,
    pub(crate) restart_store: Option<String>,
    pub(crate) random: Random,
    pub(crate) counts: Counts,
    /// The store is restarted by one at a time.
    pub(crate) at_store: Arc<tokio::sync::Mutex<()>>,
}

impl Nemesis {
    /// Breaks until `end`. What a fault left broken is mended by [`Subject::heal`].
    pub(crate) async fn run(mut self, end: Instant) -> Result<(), ProveError> {
        while !self.faults.is_empty() {
            let pause = self.random.between(Duration::from_millis(50), Duration::from_millis(900));
            if Instant::now() + pause >= end {
                break;
            }
            sleep(pause).await;
            let fault = *self.random.pick(&self.faults);
            let number = self.random.below(self.subject.count());
            self.make(fault, number, end).await?;
            *self.counts.lock().entry(fault).or_default() += 1;
        }
        tokio::time::sleep_until(end).await;
        Ok(())
    }

    async fn make(&mut self, fault: Fault, number: usize, end: Instant) -> Result<(), ProveError> {
        // Longer than a lease, so that others may take what it holds; never past the end.
        let long = self
            .random
            .between(self.lease, self.lease * 2)
            .min(end.saturating_duration_since(Instant::now()));
        let short = self.random.between(Duration::from_millis(20), Duration::from_millis(300));
        match fault {
            Fault::Kill => self.subject.kill(number).await?,
            Fault::Pause => self.subject.pause(number, long).await,
            Fault::RestartStore => self.restart_store().await?,
            Fault::Cut => {
                let Some(network) = self.subject.network(number) else { return Ok(()) };
                match self.random.below(3) {
                    0 => network.cut(),
                    1 => {
                        network.refuse(true);
                        network.cut();
                        sleep(long).await;
                        network.refuse(false);
                    }
                    _ => {
                        network.silence(true);
                        sleep(long).await;
                        network.silence(false);
                    }
                }
            }
            Fault::LoseReply => {
                let Some(network) = self.subject.network(number) else { return Ok(()) };
                let Some(needle) = self.random.pick_if_any(self.subject.needles()) else { return Ok(()) };
                network.lose_replies_to(*needle, 1 + self.random.below(3));
            }
            Fault::Slow => {
                let Some(network) = self.subject.network(number) else { return Ok(()) };
                if self.random.percent(50) {
                    network.delay(short);
                } else {
                    network.hold_replies(short);
                }
                sleep(long).await;
                network.delay(Duration::ZERO);
                network.hold_replies(Duration::ZERO);
            }
        }
        Ok(())
    }

    async fn restart_store(&self) -> Result<(), ProveError> {
        let Some(line) = &self.restart_store else { return Ok(()) };
        let _alone = self.at_store.lock().await;
        let mut command = Command::new("sh");
        command.args(["-c", line]).stdin(std::process::Stdio::null()).kill_on_drop(true);
        match timeout(Duration::from_secs(120), command.output()).await {
            Ok(Ok(output)) if output.status.success() => Ok(()),
            Ok(Ok(output)) => {
                Err(ProveError::Restart(String::from_utf8_lossy(&output.stderr).trim().to_owned()))
            }
            Ok(Err(error)) => Err(ProveError::Restart(error.to_string())),
            Err(_) => Err(ProveError::Restart("it does not end within two minutes".into())),
        }
    }
}
