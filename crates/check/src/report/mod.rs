//! The report: what held, what did not, and in which forms that can be read.

use std::time::Duration;

use serde::Serialize;

use crate::catalogue::Scenario;
use crate::options::Options;
use crate::profile::{Level, Profile};
use crate::story::Story;

mod html;
mod json;
mod junit;
mod text;

/// What a scenario came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub enum Verdict {
    /// The promise was seen to hold.
    #[serde(rename = "pass")]
    Pass,
    /// It was seen not to.
    #[serde(rename = "fail")]
    Fail,
    /// It was seen not to, and the profile only recommends it.
    #[serde(rename = "warn")]
    Warn,
    /// It may hold or not: nothing shows it.
    #[serde(rename = "not observable")]
    NotObservable,
    /// There is nothing that it could be about.
    #[serde(rename = "not applicable")]
    NotApplicable,
}

impl Verdict {
    /// All of them, the worst first.
    pub const ALL: [Self; 5] = [Self::Fail, Self::Warn, Self::NotObservable, Self::Pass, Self::NotApplicable];

    pub(crate) fn of(level: Level) -> Self {
        match level {
            Level::Must => Self::Fail,
            Level::Should => Self::Warn,
            Level::Off => Self::Pass,
        }
    }

    /// Its name.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pass => "pass",
            Self::Fail => "fail",
            Self::Warn => "warn",
            Self::NotObservable => "not observable",
            Self::NotApplicable => "not applicable",
        }
    }
}

/// A scenario with its verdict. The members of the JSON report are these.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Verified {
    /// The scenario's id.
    pub id: String,
    /// What is promised.
    pub promise: String,
    /// Where the promise comes from.
    pub source: String,
    /// What it came to.
    pub verdict: Verdict,
    /// The requests, a line each.
    pub sent: String,
    /// Why the verdict, unless it passed, and then the answers, a line each.
    pub got: String,
    /// What to do about it; empty when there is nothing to do.
    pub advice: String,
    /// The first line of `got` alone.
    #[serde(skip)]
    pub reason: String,
}

impl Verified {
    pub(crate) fn new(scenario: &Scenario, verdict: Verdict, reason: String, story: &Story) -> Self {
        let got = story.got();
        let got = match (reason.is_empty(), got.is_empty()) {
            (true, _) => got,
            (false, true) => reason.clone(),
            (false, false) => format!("{reason}\n{got}"),
        };
        let advice = match verdict {
            Verdict::Fail | Verdict::Warn => scenario.advice.clone(),
            _ => String::new(),
        };
        Self {
            id: scenario.id.clone(),
            promise: scenario.promise.clone(),
            source: scenario.source.clone(),
            verdict,
            sent: story.sent(),
            got,
            advice,
            reason,
        }
    }

    pub(crate) fn without_trial(scenario: &Scenario, verdict: Verdict, reason: String) -> Self {
        Self::new(scenario, verdict, reason, &Story::default())
    }
}

/// All verdicts of a run.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Report {
    /// The method and URL that were checked.
    pub target: String,
    /// What it was held to.
    pub profile: Profile,
    /// The scenarios, in the order in which they ran.
    pub results: Vec<Verified>,
    /// Requests that were sent.
    pub requests: u32,
    /// How long it took.
    pub elapsed: Duration,
    /// A limit of the run ended it early.
    pub is_cut_short: bool,
}

impl Report {
    pub(crate) fn new(
        options: &Options,
        results: Vec<Verified>,
        requests: u32,
        elapsed: Duration,
        is_cut_short: bool,
    ) -> Self {
        let target = format!("{} {}", options.method, options.url);
        Self { target, profile: options.profile, results, requests, elapsed, is_cut_short }
    }

    /// How many scenarios came to this.
    pub fn count(&self, verdict: Verdict) -> usize {
        self.of(verdict).count()
    }

    /// The scenarios that came to this.
    pub fn of(&self, verdict: Verdict) -> impl Iterator<Item = &Verified> {
        self.results.iter().filter(move |result| result.verdict == verdict)
    }

    /// Nothing failed, the run was not cut short, and something was shown: at the least that two keys are two
    /// operations.
    pub fn holds(&self) -> bool {
        let baseline = self.results.first().is_some_and(|result| result.verdict == Verdict::Pass);
        baseline && !self.is_cut_short && self.count(Verdict::Fail) == 0
    }
}
