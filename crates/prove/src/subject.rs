//! What is broken: servers, or the deliveries of an inbox.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::fault::FaultProxy;
use crate::fleet::Fleet;
use crate::inbox::Receivers;
use crate::run::ProveError;

#[derive(Clone)]
pub(crate) enum Subject {
    Servers(Arc<Fleet>),
    Inbox(Arc<Receivers>),
}

impl Subject {
    /// What may be broken, by number.
    pub(crate) fn count(&self) -> usize {
        match self {
            Self::Servers(fleet) => fleet.count(),
            Self::Inbox(_) => Receivers::WAYS,
        }
    }

    /// What is in a statement whose answer is worth losing.
    pub(crate) fn needles(&self) -> &'static [&'static str] {
        match self {
            Self::Servers(fleet) => fleet.needles(),
            Self::Inbox(_) => &[],
        }
    }

    pub(crate) fn network(&self, number: usize) -> Option<&FaultProxy> {
        match self {
            Self::Servers(fleet) => fleet.network(number),
            Self::Inbox(_) => None,
        }
    }

    /// The processes that stay, by name, with their begin.
    pub(crate) fn processes(&self) -> Vec<(String, u32, Instant)> {
        match self {
            Self::Servers(fleet) => fleet.processes(),
            Self::Inbox(_) => Vec::new(),
        }
    }

    /// `kill -9`. A server is started again; a delivery is its caller's business.
    pub(crate) async fn kill(&self, number: usize) -> Result<(), ProveError> {
        match self {
            Self::Servers(fleet) => fleet.restart(number).await,
            Self::Inbox(receivers) => {
                receivers.kill(number).await;
                Ok(())
            }
        }
    }

    /// Stops a process for `time`.
    pub(crate) async fn pause(&self, number: usize, time: Duration) {
        match self {
            Self::Servers(fleet) => {
                fleet.stop(number).await;
                sleep(time).await;
                fleet.go_on(number).await;
            }
            Self::Inbox(receivers) => receivers.pause(number, time).await,
        }
    }

    /// Everything runs, and nothing is in the way.
    pub(crate) async fn heal(&self) -> Result<(), ProveError> {
        match self {
            Self::Servers(fleet) => fleet.heal().await,
            // Each pause ended in the nemesis that made it.
            Self::Inbox(_) => Ok(()),
        }
    }
}
