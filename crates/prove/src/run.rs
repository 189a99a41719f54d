//! From a plan to a report.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{join_all, try_join_all};
use thiserror::Error;
use tokio::time::{Instant, timeout};

use crate::clients::{Callers, Pace};
use crate::door::OverTcp;
use crate::fleet::Fleet;
use crate::judge::judge;
use crate::ledger::Ledger;
use crate::nemesis::{Counts, Nemesis};
use crate::plan::{Gateways, OnUnknown, Plan, PlanError, Target};
use crate::random::Random;
use crate::report::Report;

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
            let seen = Run { plan, fleet, random, began, path, gateways: None, ledger: None };
            seen.carry_out().await
        }
        Target::Gateways(gateways) => {
            // Work that outlasts a lease is part of it: an owner renews.
            let ledger = Ledger::start(began, random.fork(1), gateways.lease * 3 / 2).await;
            let ledger = ledger.map_err(|error| ProveError::Start(error.to_string()))?;
            let fleet = Arc::new(Fleet::start(gateways, &ledger.url()).await?);
            let (gateways, ledger) = (Some(gateways), Some(&ledger));
            let run =
                Run { plan, fleet: Arc::clone(&fleet), random, began, path: "/orders", gateways, ledger };
            let report = run.carry_out().await;
            if let Ok(fleet) = Arc::try_unwrap(fleet) {
                fleet.end().await;
            }
            report
        }
    }
}

struct Run<'p> {
    plan: &'p Plan,
    fleet: Arc<Fleet>,
    random: Random,
    began: Instant,
    path: &'p str,
    gateways: Option<&'p Gateways>,
    ledger: Option<&'p Ledger>,
}

impl Run<'_> {
    async fn carry_out(self) -> Result<Report, ProveError> {
        let mut run = [0; 6];
        getrandom::fill(&mut run).map_err(|error| ProveError::Random(error.to_string()))?;
        let door = OverTcp { fleet: Arc::clone(&self.fleet), path: self.path.to_owned() };
        let run = run.iter().map(|byte| format!("{byte:02x}")).collect();
        let callers = Callers::new(door, self.began, run, self.ledger.is_some(), Pace::default());
        let counts = Counts::default();
        let at_store = Arc::new(tokio::sync::Mutex::new(()));
        let end = Instant::now() + self.plan.breaking;
        let working = (0..self.plan.callers).map(|n| callers.work(self.random.fork(100 + n as u64), end));
        let breaking = (0..AT_ONCE).map(|n| {
            let nemesis = Nemesis {
                fleet: Arc::clone(&self.fleet),
                faults: self.plan.faults.clone(),
                lease: self.gateways.map_or(Duration::ZERO, |gateways| gateways.lease),
                restart_store: self.gateways.and_then(|gateways| gateways.restart_store.clone()),
                random: self.random.fork(10 + n),
                counts: Arc::clone(&counts),
                at_store: Arc::clone(&at_store),
            };
            nemesis.run(end)
        });
        let (_, broken) = tokio::join!(join_all(working), try_join_all(breaking));
        broken?;
        self.fleet.heal().await?;
        let healed = callers.elapsed();
        let deadline = Instant::now() + self.plan.healing;
        let random = self.random.fork(2);
        let converging = callers.converge(&random, self.plan.callers * 4, deadline);
        // A request of that phase ends within half a minute.
        let _ = timeout(self.plan.healing * 2 + Duration::from_secs(60), converging).await;
        let retried = self.gateways.is_some_and(|gateways| gateways.on_unknown == OnUnknown::Retry);
        let history = callers.history(self.ledger.map(Ledger::executions), retried, healed);
        let violations = judge(&history);
        let counts = counts.lock().clone();
        Ok(Report::new(self.plan.seed, callers.begun(), counts, self.began.elapsed(), history, violations))
    }
}
