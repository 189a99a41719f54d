//! How a batch is run: each kind of operation by itself, the usual case first.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, join_all};
use onlyonce_batch::{Answer, Answers, Ask, Job};
use onlyonce_core::{ClaimOutcome, CompleteOutcome, StoreErrorKind, StoredReply};

use crate::claims::{self, Usual};
use crate::error::Fault;
use crate::locked::{self, Patience};
use crate::schema::Tables;
use crate::session::{Pool, Session};

/// How long a job beside the batches looks for a row that somebody holds. An owner's answer matters more: its work is done.
const OWNER_PATIENCE: Duration = Duration::from_millis(1500);
const CLAIM_PATIENCE: Duration = Duration::from_millis(500);

/// A reply that is older than this is on disk: the server writes its log every second.
const SETTLED: Duration = Duration::from_secs(60);

/// Everything that runs batches.
#[derive(Debug)]
pub(crate) struct Backend {
    pub(crate) pool: Pool,
    pub(crate) tables: Arc<Tables>,
    /// Told by the tables themselves, so that a connection to another server is noticed.
    pub(crate) store_id: [u8; 16],
    /// Whether a statement fails at once where it would wait for a lock, and tells the number of rows it changed. Where the
    /// server does not, every batch looks before it writes.
    pub(crate) nowait: bool,
    /// Whether a statement can have a setting of its own, as MariaDB's can: `SET STATEMENT … FOR …`.
    pub(crate) set_statement: bool,
    /// What one packet may hold, in bytes.
    pub(crate) packet_max: usize,
    /// Whether others see a commit before it is on disk: InnoDB ends a transaction in memory and then writes its log, unless a
    /// binary log that is synced comes first.
    pub(crate) seen_before_synced: bool,
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
        let mut answers: Vec<_> = answers.into_iter().take(1).collect();
        self.settle(&mut session, &mut answers).await;
        answers.pop().unwrap_or(Ok(Answer::Locked))
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
            let mut answers: Vec<_> = usual.into_iter().flatten().collect();
            self.settle(&mut session, &mut answers).await;
            return Ok(answers);
        }
        let rest = locked::run(&mut session, &self.tables, &left, Patience::None).await;
        // Those that were answered keep their answers.
        let rest = rest.unwrap_or_else(|fault| left.iter().map(|_| Err(fault.clone())).collect());
        let mut rest = rest.into_iter();
        let missing = || Err(Fault::internal("a job without an answer"));
        let all = usual.into_iter().map(|answer| answer.or_else(|| rest.next()).unwrap_or_else(missing));
        let mut answers: Vec<_> = all.collect();
        self.settle(&mut session, &mut answers).await;
        Ok(answers)
    }

    // Replies that another transaction stored a moment ago are told when they are on disk, and not at all when that fails.
    async fn settle(&self, session: &mut Session<'_>, answers: &mut [Result<Answer, Fault>]) {
        let unsettled = |answer: &Result<Answer, Fault>| match answer {
            Ok(Answer::Claim(ClaimOutcome::Completed(stored)))
            | Ok(Answer::Complete(
                CompleteOutcome::AlreadyStored(stored) | CompleteOutcome::Fenced(Some(stored)),
            )) => self.is_unsettled(stored),
            _ => false,
        };
        if !answers.iter().any(unsettled) {
            return;
        }
        if let Err(fault) = claims::write_log(session, &self.tables).await {
            for answer in answers.iter_mut().filter(|answer| unsettled(answer)) {
                *answer = Err(fault.clone());
            }
        }
    }

    /// Returns when what a transaction of a caller's saw is on disk. On a connection of the store's: the caller's transaction may
    /// yet be rolled back.
    pub(crate) async fn settle_seen(&self) -> Result<(), Fault> {
        let write = async || claims::write_log(&mut self.pool.lend().await?, &self.tables).await;
        match write().await {
            // It may have lain idle while the server went away; the next one is new.
            Err(fault) if fault.breaks_connection() => write().await,
            written => written,
        }
    }

    /// Whether a crash of the server may yet take this reply back, although it is seen.
    pub(crate) fn is_unsettled(&self, stored: &StoredReply) -> bool {
        let retention = stored.expires_at.duration_since(stored.completed_at).unwrap_or_default();
        self.seen_before_synced && retention.saturating_sub(stored.remaining) < SETTLED
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
        fits(completion.reply.body().len() + head.len(), self.packet_max)
    }
}

/// Whether an answer of this size, written as text, can be sent at all: the server closes the connection over more.
pub(crate) fn fits(bytes: usize, packet_max: usize) -> Result<(), Fault> {
    if crate::sql::hex_size(bytes) + 8192 <= packet_max {
        return Ok(());
    }
    Err(Fault::new(
        StoreErrorKind::Unfit,
        format!(
            "an answer of {bytes} bytes does not fit the server's max_allowed_packet of {packet_max}; raise it to more than twice the size"
        ),
    ))
}
