//! Rounds: every subject once in each, in turn, so that a noisy neighbour meets all of them alike.

use std::time::Duration;

use anyhow::{Context, Result};
use onlyonce_core::{Clock, SystemClock};
use serde::Serialize;

use crate::Plan;
use crate::report::Report;

/// Time since boot.
pub(crate) fn now() -> Duration {
    SystemClock.boot()
}

/// What one subject did in one round.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Sample {
    /// Operations a second.
    pub(crate) rate: f64,
    /// The time of one operation, as its caller saw it: half of them took less.
    pub(crate) p50_us: f64,
    /// All but one in a hundred took less.
    pub(crate) p99_us: f64,
    /// CPU time of this program for one operation: the load generator, and what runs in its process with it.
    pub(crate) cpu_us: f64,
}

/// A stretch of time in which operations are done.
pub(crate) struct Stretch {
    started: Duration,
    cpu_started: Duration,
}

impl Stretch {
    pub(crate) fn start() -> Self {
        Self { started: now(), cpu_started: cpu() }
    }

    pub(crate) fn elapsed(&self) -> Duration {
        now() - self.started
    }
}

fn cpu() -> Duration {
    let used = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::try_from(used).unwrap_or_default()
}

impl Sample {
    /// From the time of each operation, in any order.
    ///
    /// # Errors
    /// When nothing was done.
    pub(crate) fn new(mut times: Vec<Duration>, stretch: &Stretch) -> Result<Self> {
        let (elapsed, cpu_used) = (stretch.elapsed(), cpu() - stretch.cpu_started);
        anyhow::ensure!(!times.is_empty(), "nothing was done in {elapsed:?}");
        times.sort_unstable();
        let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize].as_secs_f64() * 1e6;
        let count = times.len() as f64;
        Ok(Self {
            rate: count / elapsed.as_secs_f64(),
            p50_us: at(0.5),
            p99_us: at(0.99),
            cpu_us: cpu_used.as_secs_f64() * 1e6 / count,
        })
    }
}

/// Something that can be run for a while.
pub(crate) struct Subject<'a> {
    pub(crate) name: String,
    run: Box<dyn FnMut(Duration) -> Result<Sample> + 'a>,
}

impl<'a> Subject<'a> {
    pub(crate) fn new(name: impl Into<String>, run: impl FnMut(Duration) -> Result<Sample> + 'a) -> Self {
        Self { name: name.into(), run: Box::new(run) }
    }

    /// Runs it for a while.
    pub(crate) fn run(&mut self, time: Duration) -> Result<Sample> {
        (self.run)(time)
    }
}

/// What a ratio is taken of, and what it should be.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Target {
    /// Of the rates: at least the first, the second being the aim.
    Rate(f64, f64),
    /// Of the p50 times: at most the first, the second being the aim.
    Time(f64, f64),
    /// Of the p99 times: at most the first, the second being the aim.
    Tail(f64, f64),
    /// Of the rates, for the reader: what somebody else makes of the same work.
    None,
}

/// One subject against another.
#[derive(Clone, Debug)]
pub(crate) struct Comparison {
    pub(crate) subject: String,
    pub(crate) against: String,
    pub(crate) target: Target,
}

impl Comparison {
    pub(crate) fn new(subject: impl Into<String>, against: impl Into<String>, target: Target) -> Self {
        Self { subject: subject.into(), against: against.into(), target }
    }
}

/// Runs the subjects in turn, a warm-up and then `plan.rounds()` times, and adds what came out to `report`.
pub(crate) fn series(
    plan: &Plan,
    report: &mut Report,
    title: &str,
    mut subjects: Vec<Subject<'_>>,
    comparisons: &[Comparison],
) -> Result<()> {
    if let Some(only) = &plan.only {
        subjects.retain(|subject| subject.name.contains(only));
    }
    let time = plan.time(subjects.len());
    let mut samples = vec![Vec::new(); subjects.len()];
    for round in 0..=plan.rounds() {
        eprintln!("{title}: {}", if round == 0 { "warm-up".into() } else { format!("round {round}") });
        for (subject, samples) in subjects.iter_mut().zip(&mut samples) {
            let sample = (subject.run)(time).with_context(|| subject.name.clone())?;
            if round > 0 {
                samples.push(sample);
            }
        }
    }
    let names = subjects.into_iter().map(|subject| subject.name);
    report.add(title, names.zip(samples).collect(), comparisons);
    Ok(())
}
