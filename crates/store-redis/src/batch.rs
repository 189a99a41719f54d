//! One batch: which commands it is, and whose the answers are.

use std::vec::IntoIter;

use redis::{Pipeline, ServerErrorKind, Value};

use crate::error::Fault;
use crate::lanes::Job;
use crate::request::{Ending, What, complete_all};

/// The jobs of one batch, in the order of their commands: completions first, then the others as they came.
#[derive(Debug)]
pub(crate) struct Batch {
    endings: Vec<Group>,
    others: Vec<Job>,
}

/// Completions of one script.
#[derive(Debug)]
struct Group {
    retention_ms: i64,
    jobs: Vec<Job>,
}

impl Batch {
    pub(crate) fn new(jobs: Vec<Job>) -> Self {
        let mut batch = Self { endings: Vec::new(), others: Vec::with_capacity(jobs.len()) };
        for job in jobs {
            let Some(retention_ms) = ending(&job).map(|ending| ending.retention_ms) else {
                batch.others.push(job);
                continue;
            };
            match batch.endings.iter_mut().find(|group| group.retention_ms == retention_ms) {
                Some(group) => group.jobs.push(job),
                None => batch.endings.push(Group { retention_ms, jobs: vec![job] }),
            }
        }
        batch
    }

    /// All its commands, and how many answers there will be.
    pub(crate) fn pipeline(&self) -> (Pipeline, usize) {
        let mut pipeline = Pipeline::with_capacity(self.endings.len() + 2 * self.others.len());
        let mut count = self.endings.len();
        for group in &self.endings {
            pipeline.add_command(complete_all(group.retention_ms, group.jobs.iter().filter_map(ending)));
        }
        for job in &self.others {
            let mut add = |command| {
                if job.asking {
                    pipeline.cmd("ASKING");
                }
                pipeline.add_command(command);
            };
            match &*job.what {
                What::Claim(claim) => claim.commands().into_iter().for_each(&mut add),
                What::Commands(commands) => commands.iter().cloned().for_each(&mut add),
                What::Completion(_) => {}
            }
            count += answers_to(job);
        }
        (pipeline, count)
    }

    /// Tells each caller what the server says to his commands.
    pub(crate) fn tell(self, values: Vec<Value>) {
        let mut values = values.into_iter();
        for group in self.endings {
            group.tell(values.next().unwrap_or(Value::Nil));
        }
        for job in self.others {
            let its = values.by_ref().take(answers_to(&job));
            let its = if job.asking { after_asking(its) } else { its.collect() };
            job.tell(Ok(its));
        }
    }

    /// Tells everybody that it failed.
    pub(crate) fn fail(self, fault: &Fault) {
        let endings = self.endings.into_iter().flat_map(|group| group.jobs);
        endings.chain(self.others).for_each(|job| job.tell(Err(fault.clone())));
    }
}

impl Group {
    fn tell(self, answer: Value) {
        let (at, left_out) = match answer {
            Value::Int(_) => (answer, Vec::new().into_iter()),
            Value::Array(parts) => {
                let mut parts: IntoIter<Value> = parts.into_iter();
                (parts.next().unwrap_or(Value::Nil), parts)
            }
            // The caller loads it.
            Value::ServerError(error) if error.kind() == Some(ServerErrorKind::NoScript) => {
                (Value::ServerError(error), Vec::new().into_iter())
            }
            // Each goes on alone, and hears what is wrong with his own.
            _ => (Value::Nil, Vec::new().into_iter()),
        };
        let left_out: Vec<Value> = left_out.collect();
        for (job, number) in self.jobs.into_iter().zip(1..) {
            let stored = left_out.is_empty() || !left_out.contains(&Value::Int(number));
            job.tell(Ok(vec![if stored { at.clone() } else { Value::Nil }]));
        }
    }
}

/// Every second one is the answer to ASKING. Where that was refused, it is why the next one was not served.
fn after_asking(answers: impl Iterator<Item = Value>) -> Vec<Value> {
    let answers: Vec<_> = answers.collect();
    let pairs = answers.chunks_exact(2);
    pairs
        .map(|pair| if matches!(pair[0], Value::ServerError(_)) { &pair[0] } else { &pair[1] })
        .cloned()
        .collect()
}

fn ending(job: &Job) -> Option<&Ending> {
    match &*job.what {
        What::Completion(ending) => Some(ending),
        What::Claim(_) | What::Commands(_) => None,
    }
}

fn answers_to(job: &Job) -> usize {
    let answers = job.what.answers();
    if job.asking { 2 * answers } else { answers }
}
