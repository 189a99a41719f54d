//! How a batch is run: each kind of operation by itself, the usual case first.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, join_all};
use onlyonce_batch::{Answer, Answers, Ask, Job};
use onlyonce_core::StoreErrorKind;

use crate::claims::{self, Usual};
use crate::error::Fault;
use crate::locked::{self, Patience};
use crate::schema::Tables;
use crate::session::{Pool, Session};

/// How long a job beside the batches looks for a row that somebody holds. An owner's answer matters more: its work is done.
const OWNER_PATIENCE: Duration = Duration::from_millis(1500);
const CLAIM_PATIENCE: Duration = Duration::from_millis(500);

/// Everything that runs batches.
#[derive(Debug)]
pub(crate) struct Backend {
    pub(crate) pool: Pool,
    pub(crate) tables: Arc<Tables>,
    /// Told by the tables themselves, so that a connection to another server is noticed.
    pub(crate) store_id: [u8; 16],
    /// Whether a statement fails at once where it would wait for a lock. Where the server knows no such thing, every
    /// batch looks before it writes.
    pub(crate) nowait: bool,
    /// What one packet may hold, in bytes.
    pub(crate) packet_max: usize,
}

/// The jobs of one statement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Claim,
    Complete,
    Renew(Duration),
    MarkUnknown,
    Release,
}

impl onlyonce_batch::Backend for Backend {
    type Fault = Fault;

    async fn run(&self, jobs: &[Job]) -> Result<Answers<Fault>, Fault> {
        let mut answers: Vec<Option<Result<Answer, Fault>>> =
            jobs.iter().map(|job| self.check_size(job).err().map(Err)).collect();
        let mut groups: Vec<(Kind, Vec<usize>)> = Vec::new();
        for (n, job) in jobs.iter().enumerate().filter(|(n, _)| answers[*n].is_none()) {
            let kind = Kind::of(job);
            match groups.iter_mut().find(|group| group.0 == kind) {
                Some(group) => group.1.push(n),
                None => groups.push((kind, vec![n])),
            }
        }
        // Rows are locked in the order of their keys, so that batches of several instances do not cross.
        for (_, places) in &mut groups {
            places.sort_by(|a, b| jobs[*a].id().cmp(jobs[*b].id()));
        }
        let done = join_all(groups.iter().map(|(kind, places)| {
            let of_kind: Vec<&Job> = places.iter().map(|n| &jobs[*n]).collect();
            self.run_kind(*kind, of_kind)
        }))
        .await;
        for ((_, places), done) in groups.iter().zip(done) {
            for (n, answer) in places.iter().zip(done) {
                answers[*n] = Some(answer);
            }
        }
        let missing = || Err(Fault::internal("a job without an answer"));
        Ok(answers.into_iter().map(|answer| answer.unwrap_or_else(missing)).collect())
    }

    async fn run_alone(&self, job: &Job) -> Result<Answer, Fault> {
        self.check_size(job)?;
        let patience = match job.ask() {
            Ask::Claim(_) => CLAIM_PATIENCE,
            _ => OWNER_PATIENCE,
        };
        let mut session = self.pool.lend().await?;
        let answers = locked::run(&mut session, &self.tables, &[job], Patience::Until(patience)).await?;
        answers.into_iter().next().unwrap_or(Ok(Answer::Locked))
    }
}

impl Kind {
    fn of(job: &Job) -> Self {
        match job.ask() {
            Ask::Claim(_) => Self::Claim,
            Ask::Complete { .. } => Self::Complete,
            Ask::Renew { lease, .. } => Self::Renew(*lease),
            Ask::MarkUnknown(_) => Self::MarkUnknown,
            Ask::Release(_) => Self::Release,
        }
    }
}

impl Backend {
    /// Runs jobs of one kind. A fault that may be of one job's making is met again by fewer and fewer of them.
    fn run_kind<'a>(&'a self, kind: Kind, jobs: Vec<&'a Job>) -> BoxFuture<'a, Vec<Result<Answer, Fault>>> {
        async move {
            let fault = match self.run_jobs(kind, &jobs).await {
                Ok(answers) => return answers,
                Err(fault) => fault,
            };
            if jobs.len() == 1 || !onlyonce_batch::Fault::splits(&fault) {
                return jobs.iter().map(|_| Err(fault.clone())).collect();
            }
            let mut first = jobs;
            let second = first.split_off(first.len() / 2);
            let mut answers = self.run_kind(kind, first).await;
            answers.extend(self.run_kind(kind, second).await);
            answers
        }
        .boxed()
    }

    async fn run_jobs(&self, kind: Kind, jobs: &[&Job]) -> Result<Vec<Result<Answer, Fault>>, Fault> {
        let mut session = self.pool.lend().await?;
        let usual = match self.nowait {
            true => self.usual(&mut session, kind, jobs).await,
            false => Ok(jobs.iter().map(|_| None).collect()),
        };
        let usual = match usual {
            Ok(usual) => usual,
            // The statement was taken back whole: somebody holds one of the rows, or another batch was met.
            Err(fault) if fault.is_lock_wait() || fault.is_conflict() => jobs.iter().map(|_| None).collect(),
            Err(fault) => return Err(fault),
        };
        let left: Vec<&Job> =
            jobs.iter().zip(&usual).filter(|(_, answer)| answer.is_none()).map(|(job, _)| *job).collect();
        if left.is_empty() {
            return Ok(usual.into_iter().flatten().collect());
        }
        let rest = locked::run(&mut session, &self.tables, &left, Patience::None).await;
        // Those that were answered keep their answers.
        let rest = rest.unwrap_or_else(|fault| left.iter().map(|_| Err(fault.clone())).collect());
        let mut rest = rest.into_iter();
        let missing = || Err(Fault::internal("a job without an answer"));
        Ok(usual.into_iter().map(|answer| answer.or_else(|| rest.next()).unwrap_or_else(missing)).collect())
    }

    async fn usual(&self, session: &mut Session<'_>, kind: Kind, jobs: &[&Job]) -> Result<Usual, Fault> {
        let (tables, prepare) = (&self.tables, self.pool.url().prepare);
        match kind {
            Kind::Claim => {
                let of_claims = jobs.iter().filter_map(|job| match job.ask() {
                    Ask::Claim(request) => Some((*job, request)),
                    _ => None,
                });
                claims::claim(session, tables, &of_claims.collect::<Vec<_>>(), prepare).await
            }
            Kind::Complete => {
                let completions = jobs.iter().filter_map(|job| match job.ask() {
                    Ask::Complete { completion, head } => Some((*job, completion, head)),
                    _ => None,
                });
                claims::complete(session, tables, &completions.collect::<Vec<_>>(), prepare).await
            }
            Kind::Renew(lease) => claims::renew(session, tables, jobs, lease).await,
            Kind::MarkUnknown => claims::mark_unknown(session, tables, jobs).await,
            Kind::Release => claims::release(session, tables, jobs).await,
        }
    }

    /// What is written into the text of a statement takes twice its room.
    fn check_size(&self, job: &Job) -> Result<(), Fault> {
        let Ask::Complete { completion, head } = job.ask() else { return Ok(()) };
        let bytes = completion.reply.body().len() + head.len();
        if crate::sql::hex_size(bytes) + 8192 <= self.packet_max {
            return Ok(());
        }
        Err(Fault::new(
            StoreErrorKind::Unfit,
            format!(
                "an answer of {bytes} bytes does not fit the server's max_allowed_packet of {}; raise it to more than twice the size",
                self.packet_max
            ),
        ))
    }
}
