//! What was done, what was found, and the history of each operation at fault.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::time::Duration;

use serde::Serialize;

use crate::history::{Answer, Event, Execution, History};
use crate::judge::{Rule, Violation};
use crate::plan::Fault;

/// Operations whose history is shown; of the rest only the number.
const SHOWN_MAX: usize = 3;

/// The outcome of a run.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The seed of the run.
    pub seed: u64,
    /// How long it took, in seconds.
    pub seconds: f64,
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
        let mut answers: BTreeMap<String, usize> = BTreeMap::new();
        for event in &history.events {
            *answers.entry(name(&event.answer)).or_default() += 1;
        }
        let at_fault: BTreeSet<_> = violations.iter().map(|violation| violation.operation).collect();
        let executions = history.executions.as_ref().map(Vec::len);
        let requests = history.events.len();
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
        Self {
            seed,
            seconds,
            operations,
            requests,
            answers,
            executions,
            faults,
            violations,
            inbox,
            histories,
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
        let _ = writeln!(text, "time        {:.1} s", self.seconds);
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
