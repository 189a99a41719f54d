//! From a plan to a report.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{join_all, try_join_all};
use thiserror::Error;
use tokio::time::{Instant, timeout};

use crate::book::{Book, Table};
use crate::clients::{Callers, Pace};
use crate::door::{Door, OverTcp};
use crate::fleet::Fleet;
use crate::history::History;
use crate::inbox::Receivers;
use crate::ledger::Ledger;
use crate::nemesis::{Counts, Nemesis};
use crate::plan::{Gateways, OnUnknown, Plan, PlanError, Target, Work, WorkAt};
use crate::random::Random;
use crate::report::{Report, Tally};
use crate::rounds::Rounds;
use crate::subject::Subject;
use crate::watch::Watch;

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
    /// The table that servers write into beside their records cannot be read.
    #[error("the table of what was done: {0}")]
    Table(String),
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
    let run = name_of_run()?;
    match &plan.target {
        Target::Server { authority, path } => {
            let fleet = Arc::new(Fleet::there(authority).await?);
            let door = OverTcp { fleet: Arc::clone(&fleet), path: path.clone() };
            let subject = Subject::Servers(fleet);
            Run { plan, run, subject, random, began, gateways: None, book: None }.carry_out(door).await
        }
        Target::Inbox(inbox) => {
            let receivers = Arc::new(Receivers::create(inbox)?);
            let subject = Subject::Inbox(Arc::clone(&receivers));
            Run { plan, run, subject, random, began, gateways: None, book: None }.carry_out(receivers).await
        }
        Target::Gateways(gateways) => {
            let (fleet, book) = match gateways.work_at {
                WorkAt::Upstream => {
                    // Work that outlasts a lease is part of it: an owner renews.
                    let ledger = Ledger::start(began, random.fork(1), gateways.lease * 3 / 2).await;
                    let ledger = ledger.map_err(|error| ProveError::Start(error.to_string()))?;
                    (Arc::new(Fleet::start(gateways, &ledger.url()).await?), Book::Ledger(ledger))
                }
                WorkAt::Transaction => {
                    let table = format!("onlyonce_prove_{run}");
                    let fleet = Arc::new(Fleet::start(gateways, &table).await?);
                    (Arc::clone(&fleet), Book::Table(Table::new(fleet)))
                }
            };
            let door = OverTcp { fleet: Arc::clone(&fleet), path: "/orders".into() };
            let subject = Subject::Servers(Arc::clone(&fleet));
            let (gateways, its) = (Some(gateways), Some(&book));
            let report = Run { plan, run, subject, random, began, gateways, book: its }.carry_out(door).await;
            // Where the run failed, this may fail for the same reason, which is told.
            let closed = book.close().await;
            drop(book);
            if let Ok(fleet) = Arc::try_unwrap(fleet) {
                fleet.end().await;
            }
            report.and_then(|report| closed.map(|()| report))
        }
    }
}

/// Part of every key, and of the name of the table: two runs on one store do not meet.
fn name_of_run() -> Result<String, ProveError> {
    let mut run = [0; 6];
    getrandom::fill(&mut run).map_err(|error| ProveError::Random(error.to_string()))?;
    Ok(run.iter().map(|byte| format!("{byte:02x}")).collect())
}

struct Run<'p> {
    plan: &'p Plan,
    run: String,
    subject: Subject,
    random: Random,
    began: Instant,
    gateways: Option<&'p Gateways>,
    book: Option<&'p Book>,
}

impl Run<'_> {
    async fn carry_out(self, door: impl Door) -> Result<Report, ProveError> {
        // A server that is there may use other words than ours.
        let ours = !matches!(self.plan.target, Target::Server { .. });
        let between = self.plan.rate.map_or(Duration::ZERO, |rate| Duration::from_secs(1) / rate.get());
        let callers =
            Callers::new(door, self.began, self.run.clone(), ours, Pace { between, ..Pace::default() });
        let watch = Watch::new(self.began, self.plan.breaking);
        let report = tokio::select! {
            never = watch.run(&self.subject, &callers) => match never {},
            report = self.all_rounds(&callers) => report?,
        };
        Ok(Report { series: Some(watch.finish()), ..report })
    }

    /// Round after round, until the time is over or something is found.
    async fn all_rounds(&self, callers: &Callers<impl Door>) -> Result<Report, ProveError> {
        let end = Instant::now() + self.plan.breaking;
        let counts = Counts::default();
        let (mut rounds, mut tally) = (Rounds::default(), Tally::default());
        let mut random = self.random.clone();
        loop {
            // No scrap of a round at the end.
            let left = end.saturating_duration_since(Instant::now());
            let last = left < self.plan.round * 3 / 2;
            let until = if last { end } else { Instant::now() + self.plan.round };
            let healed = self.break_and_heal(callers, &random, &counts, until).await?;
            // What was answered first: the ledger has it by then.
            let events = callers.take_events();
            let (executions, kept) = match &self.subject {
                Subject::Servers(_) => match self.book {
                    Some(book) => (Some(book.take_executions().await?), None),
                    None => (None, None),
                },
                Subject::Inbox(receivers) => {
                    let executions = receivers.take_executions()?;
                    (Some(executions), Some(receivers.kept(|operation| rounds.knows(operation))?))
                }
            };
            let (retried, exactly_once) = (self.retries(), self.is_exactly_once());
            let seen = History { events, executions, retried, exactly_once, healed, kept };
            tally.add(&seen);
            let (history, violations) = rounds.judge(seen);
            if last || !violations.is_empty() {
                let (begun, took) = (callers.begun(), self.began.elapsed());
                let faults = counts.lock().clone();
                return Ok(Report::of(self.plan.seed, begun, faults, took, tally, history, violations));
            }
            rounds.next(history, callers.begun(), &mut random.fork(3));
            callers.forget_all_but(rounds.elders());
            random = random.fork(4);
        }
    }

    /// Breaks until then, heals, and lets everything converge. Says when it was healed.
    async fn break_and_heal(
        &self,
        callers: &Callers<impl Door>,
        random: &Random,
        counts: &Counts,
        until: Instant,
    ) -> Result<Duration, ProveError> {
        let at_store = Arc::new(tokio::sync::Mutex::new(()));
        let working = (0..self.plan.callers).map(|n| callers.work(random.fork(100 + n as u64), until));
        let breaking = (0..AT_ONCE).map(|n| {
            let nemesis = Nemesis {
                subject: self.subject.clone(),
                faults: self.plan.faults.clone(),
                lease: self.lease(),
                restart_store: self.gateways.and_then(|gateways| gateways.restart_store.clone()),
                random: random.fork(10 + n),
                counts: Arc::clone(counts),
                at_store: Arc::clone(&at_store),
            };
            nemesis.run(until)
        });
        let (_, broken) = tokio::join!(join_all(working), try_join_all(breaking));
        broken?;
        self.subject.heal().await?;
        let healed = callers.elapsed();
        let deadline = Instant::now() + self.plan.healing;
        let random = random.fork(2);
        let converging = callers.converge(&random, self.plan.callers * 4, deadline);
        // A request of that phase ends within half a minute.
        let _ = timeout(self.plan.healing * 2 + Duration::from_secs(60), converging).await;
        Ok(healed)
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
            Target::Gateways(gateways) => {
                gateways.work_at == WorkAt::Upstream && gateways.on_unknown == OnUnknown::Retry
            }
            Target::Inbox(inbox) => inbox.work == Work::Exec,
            Target::Server { .. } => false,
        }
    }
    /// Whether effect and record are one transaction.
    fn is_exactly_once(&self) -> bool {
        match &self.plan.target {
            Target::Gateways(gateways) => gateways.work_at == WorkAt::Transaction,
            Target::Inbox(inbox) => inbox.work == Work::Sql,
            Target::Server { .. } => false,
        }
    }
}
