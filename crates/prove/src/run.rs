//! From a plan to a report.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{join_all, try_join_all};
use thiserror::Error;
use tokio::time::{Instant, timeout};

use crate::clients::{Callers, Pace};
use crate::door::{Door, OverTcp};
use crate::fleet::Fleet;
use crate::history::History;
use crate::inbox::Receivers;
use crate::judge::judge;
use crate::ledger::Ledger;
use crate::nemesis::{Counts, Nemesis};
use crate::plan::{Gateways, OnUnknown, Plan, PlanError, Target, Work};
use crate::random::Random;
use crate::report::Report;
use crate::subject::Subject;

/// Faults that overlap.
const AT_ONCE: u64 = 2;

/// Why there is no report.
#[derive(Debug, Error)]
pub enum ProveError {
    /// The plan cannot be carried out.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// Nobody answers where something must be.
    #[error("{0} cannot be reached: {1}")]
    Unreachable(String, String),
    /// A gateway does not start.
    #[error("a gateway does not start: {0}")]
    Start(String),
    /// A gateway ended by itself.
    #[error("gateway {number} ended by itself: {log}")]
    Ended {
        /// Which.
        number: usize,
        /// The end of its log.
        log: String,
    },
    /// The store was not restarted.
    #[error("the command that restarts the store failed: {0}")]
    Restart(String),
    /// The files of an inbox cannot be written, or not be read at the end.
    #[error("the inbox of the run: {0}")]
    Inbox(String),
    /// No random bytes for the keys of the run.
    #[error("no random bytes: {0}")]
    Random(String),
}

/// Carries out a plan: breaks, heals, lets everything converge, and judges. What it started is ended.
///
/// # Errors
/// [`ProveError`] when it could not be carried out; what it found is in the report, never an error.
///
/// # Cost
/// The time of the plan, and up to [`Plan::healing`] more.
pub async fn prove(plan: &Plan) -> Result<Report, ProveError> {
    plan.check()?;
    let began = Instant::now();
    let random = Random::new(plan.seed);
    match &plan.target {
        Target::Server { authority, path } => {
            let fleet = Arc::new(Fleet::there(authority).await?);
            let door = OverTcp { fleet: Arc::clone(&fleet), path: path.clone() };
            let subject = Subject::Servers(fleet);
            Run { plan, subject, random, began, gateways: None, ledger: None }.carry_out(door).await
        }
        Target::Inbox(inbox) => {
            let receivers = Arc::new(Receivers::create(inbox)?);
            let subject = Subject::Inbox(Arc::clone(&receivers));
            Run { plan, subject, random, began, gateways: None, ledger: None }.carry_out(receivers).await
        }
        Target::Gateways(gateways) => {
            // Work that outlasts a lease is part of it: an owner renews.
            let ledger = Ledger::start(began, random.fork(1), gateways.lease * 3 / 2).await;
            let ledger = ledger.map_err(|error| ProveError::Start(error.to_string()))?;
            let fleet = Arc::new(Fleet::start(gateways, &ledger.url()).await?);
            let door = OverTcp { fleet: Arc::clone(&fleet), path: "/orders".into() };
            let subject = Subject::Servers(Arc::clone(&fleet));
            let (gateways, ledger) = (Some(gateways), Some(&ledger));
            let report = Run { plan, subject, random, began, gateways, ledger }.carry_out(door).await;
            if let Ok(fleet) = Arc::try_unwrap(fleet) {
                fleet.end().await;
            }
            report
        }
    }
}

struct Run<'p> {
    plan: &'p Plan,
    subject: Subject,
    random: Random,
    began: Instant,
    gateways: Option<&'p Gateways>,
    ledger: Option<&'p Ledger>,
}

impl Run<'_> {
    async fn carry_out(self, door: impl Door) -> Result<Report, ProveError> {
        let mut run = [0; 6];
        getrandom::fill(&mut run).map_err(|error| ProveError::Random(error.to_string()))?;
        let run = run.iter().map(|byte| format!("{byte:02x}")).collect();
        // A server that is there may use other words than ours.
        let ours = !matches!(self.plan.target, Target::Server { .. });
        let callers = Callers::new(door, self.began, run, ours, Pace::default());
        let counts = Counts::default();
        let at_store = Arc::new(tokio::sync::Mutex::new(()));
        let end = Instant::now() + self.plan.breaking;
        let working = (0..self.plan.callers).map(|n| callers.work(self.random.fork(100 + n as u64), end));
        let breaking = (0..AT_ONCE).map(|n| {
            let nemesis = Nemesis {
                subject: self.subject.clone(),
                faults: self.plan.faults.clone(),
                lease: self.lease(),
                restart_store: self.gateways.and_then(|gateways| gateways.restart_store.clone()),
                random: self.random.fork(10 + n),
                counts: Arc::clone(&counts),
                at_store: Arc::clone(&at_store),
            };
            nemesis.run(end)
        });
        let (_, broken) = tokio::join!(join_all(working), try_join_all(breaking));
        broken?;
        self.subject.heal().await?;
        let healed = callers.elapsed();
        let deadline = Instant::now() + self.plan.healing;
        let random = self.random.fork(2);
        let converging = callers.converge(&random, self.plan.callers * 4, deadline);
        // A request of that phase ends within half a minute.
        let _ = timeout(self.plan.healing * 2 + Duration::from_secs(60), converging).await;
        let (executions, kept) = match &self.subject {
            Subject::Servers(_) => (self.ledger.map(Ledger::executions), None),
            Subject::Inbox(receivers) => (Some(receivers.executions()?), Some(receivers.kept()?)),
        };
        let history = History { kept, ..callers.history(executions, self.retries(), healed) };
        let violations = judge(&history);
        let counts = counts.lock().clone();
        Ok(Report::new(self.plan.seed, callers.begun(), counts, self.began.elapsed(), history, violations))
    }

    fn lease(&self) -> Duration {
        match &self.plan.target {
            Target::Gateways(gateways) => gateways.lease,
            Target::Inbox(inbox) => inbox.lease,
            Target::Server { .. } => Duration::ZERO,
        }
    }

    /// Whether work whose end nobody saw is done again on purpose.
    fn retries(&self) -> bool {
        match &self.plan.target {
            Target::Gateways(gateways) => gateways.on_unknown == OnUnknown::Retry,
            Target::Inbox(inbox) => inbox.work == Work::Exec,
            Target::Server { .. } => false,
        }
    }
}
