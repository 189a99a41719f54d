//! What was done, what was found, and the history of each operation at fault.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::time::Duration;

use serde::Serialize;

use crate::history::{Answer, Event, Execution, History};
use crate::judge::{Rule, Violation};
use crate::plan::Fault;
use crate::plot::svg;
use crate::series::Series;

/// Operations whose history is shown; of the rest only the number.
const SHOWN_MAX: usize = 3;

/// The outcome of a run.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The seed of the run.
    pub seed: u64,
    /// How long it took, in seconds.
    pub seconds: f64,
    /// How often all was healed and judged.
    pub rounds: usize,
    /// Operations that were begun.
    pub operations: usize,
    /// Requests that were sent.
    pub requests: usize,
    /// How often each answer came.
    pub answers: BTreeMap<String, usize>,
    /// Executions that the ledger wrote down.
    pub executions: Option<usize>,
    /// How often each fault was made.
    pub faults: BTreeMap<Fault, usize>,
    /// What does not hold. Empty: everything holds.
    pub violations: Vec<Violation>,
    /// Whether an inbox was put to the proof.
    pub inbox: bool,
    /// The whole history of the first operations at fault, the shortest first.
    pub histories: Vec<OperationHistory>,
    /// What the processes held and how long answers took, over time. `None` where nobody looked.
    pub series: Option<Series>,
}

/// What was sent and done, counted.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tally {
    rounds: usize,
    requests: usize,
    answers: BTreeMap<String, usize>,
    executions: Option<usize>,
}

impl Tally {
    pub(crate) fn add(&mut self, history: &History) {
        self.rounds += 1;
        self.requests += history.events.len();
        for event in &history.events {
            *self.answers.entry(name(&event.answer)).or_default() += 1;
        }
        if let Some(executions) = &history.executions {
            *self.executions.get_or_insert_default() += executions.len();
        }
    }
}

/// Everything about one operation.
#[derive(Clone, Debug, Serialize)]
pub struct OperationHistory {
    /// Its number.
    pub operation: usize,
    /// What clients sent and got.
    pub events: Vec<Event>,
    /// What the ledger wrote down.
    pub executions: Vec<Execution>,
}

impl Report {
    /// Of a run of this seed over so many operations, with the faults made in it.
    pub fn new(
        seed: u64,
        operations: usize,
        faults: BTreeMap<Fault, usize>,
        took: Duration,
        history: History,
        violations: Vec<Violation>,
    ) -> Self {
        let mut tally = Tally::default();
        tally.add(&history);
        Self::of(seed, operations, faults, took, tally, history, violations)
    }

    /// Of a run with so much in it, whose last round has this history.
    pub(crate) fn of(
        seed: u64,
        operations: usize,
        faults: BTreeMap<Fault, usize>,
        took: Duration,
        tally: Tally,
        history: History,
        violations: Vec<Violation>,
    ) -> Self {
        let at_fault: BTreeSet<_> = violations.iter().map(|violation| violation.operation).collect();
        let inbox = history.kept.is_some();
        let mut of: BTreeMap<usize, OperationHistory> = at_fault
            .into_iter()
            .map(|operation| (operation, OperationHistory { operation, events: vec![], executions: vec![] }))
            .collect();
        for event in history.events {
            if let Some(its) = of.get_mut(&event.operation) {
                its.events.push(event);
            }
        }
        for execution in history.executions.into_iter().flatten() {
            if let Some(its) = of.get_mut(&execution.operation) {
                its.executions.push(execution);
            }
        }
        let mut histories: Vec<_> = of.into_values().collect();
        histories.sort_by_key(|its| its.events.len() + its.executions.len());
        histories.truncate(SHOWN_MAX);
        for its in &mut histories {
            its.events.sort_by_key(|event| event.began);
        }
        let seconds = took.as_secs_f64();
        let Tally { rounds, requests, answers, executions } = tally;
        Self {
            seed,
            seconds,
            rounds,
            operations,
            requests,
            answers,
            executions,
            faults,
            violations,
            inbox,
            histories,
            series: None,
        }
    }

    /// Whether everything holds.
    pub fn holds(&self) -> bool {
        self.violations.is_empty()
    }

    /// For people.
    pub fn text(&self) -> String {
        let mut text = String::new();
        let _ = writeln!(text, "seed        {}", self.seed);
        let rounds = if self.rounds > 1 { format!(", in {} rounds", self.rounds) } else { String::new() };
        let _ = writeln!(text, "time        {:.1} s{rounds}", self.seconds);
        let _ = writeln!(text, "operations  {}, in {} requests", self.operations, self.requests);
        if let Some(executions) = self.executions {
            let _ = writeln!(text, "executions  {executions}");
        }
        let counted = |counts: Vec<(String, usize)>| {
            let parts: Vec<_> = counts.into_iter().map(|(name, count)| format!("{name} {count}")).collect();
            if parts.is_empty() { "none".to_owned() } else { parts.join(", ") }
        };
        let faults = self.faults.iter().map(|(fault, count)| (fault.to_string(), *count)).collect();
        let _ = writeln!(text, "faults      {}", counted(faults));
        let answers = self.answers.iter().map(|(name, count)| (name.clone(), *count)).collect();
        let _ = writeln!(text, "answers     {}\n", counted(answers));
        for rule in Rule::ALL.into_iter().filter(|rule| self.inbox || !rule.is_of_inbox()) {
            let broken = self.violations.iter().filter(|violation| violation.rule == rule).count();
            let verdict = if broken == 0 { "holds".to_owned() } else { format!("BROKEN {broken} times") };
            let _ = writeln!(text, "{verdict:<18}{}", rule.promise());
        }
        if let Some(series) = &self.series {
            let _ = write!(text, "\n{}", series.text());
        }
        for its in &self.histories {
            let _ = writeln!(text, "\noperation {}", its.operation);
            for violation in self.violations.iter().filter(|found| found.operation == its.operation) {
                let _ = writeln!(text, "  {}: {}", violation.rule, violation.what);
            }
            for execution in &its.executions {
                let at = execution.at.as_secs_f64();
                let _ = writeln!(text, "  {at:>9.3} s  ran: {:?} {}", execution.sent, execution.body);
            }
            for event in &its.events {
                let (began, ended) = (event.began.as_secs_f64(), event.ended.as_secs_f64());
                let to = match (self.inbox, event.gateway) {
                    (true, 0) => "in bulk".to_owned(),
                    (true, _) => "by itself".to_owned(),
                    (false, gateway) => format!("to gateway {gateway}"),
                };
                let _ = writeln!(
                    text,
                    "  {began:>9.3} s  {:?} {to}, {ended:.3} s: {:?}",
                    event.sent, event.answer
                );
            }
        }
        text
    }

    /// What the processes held and how long answers took, as a picture: a file of SVG. `None` where nobody looked.
    pub fn plot(&self, of: &str) -> Option<String> {
        let faults: Vec<_> = self.faults.iter().map(|(fault, count)| format!("{fault} {count}")).collect();
        let verdict = if self.holds() { "every promise held" } else { "a promise did not hold" };
        let subtitle = format!(
            "{} operations, {} requests; {}; {verdict}",
            self.operations,
            self.requests,
            if faults.is_empty() { "no faults".into() } else { faults.join(", ") }
        );
        let title = format!("{of}, seed {}, {:.0} s", self.seed, self.seconds);
        Some(svg(self.series.as_ref()?, &title, &subtitle))
    }

    /// For programs.
    pub fn json(&self) -> String {
        serde_json::to_string_pretty(self).unwrap_or_default() + "\n"
    }
}

fn name(answer: &Answer) -> String {
    match answer {
        Answer::Reply { unrecorded: true, .. } => "reply that was not recorded".into(),
        Answer::Reply { replayed: true, .. } => "replay".into(),
        Answer::Reply { .. } => "reply".into(),
        Answer::Refused { status, code } if code.is_empty() => status.to_string(),
        Answer::Refused { code, .. } => code.clone(),
        Answer::Lost(_) => "none".into(),
    }
}
