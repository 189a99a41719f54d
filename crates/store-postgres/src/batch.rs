//! Batches of operations: the usual case of each kind is one statement for all of them.
//!
//! Whoever changes a record takes the advisory lock of its operation, by a try and never by waiting, for the length of
//! its transaction. So a row is hardly ever waited for: an open transaction on one operation keeps nobody else from
//! theirs. What the usual statement did not do is looked at, and settled in a second transaction by `decide…`.

use std::time::Duration;

use onlyonce_batch::{Answer, Answers, Ask, Backend, Fault as _, Job};
use onlyonce_core::{Decision, decide};

use crate::claims::{self, Change};
use crate::columns::{Changes, Collected, Columns, Names, Placed, numbered, operations};
use crate::error::Fault;
use crate::row::{Micros, Row, lock_number};
use crate::session::{Call, Connections, LOCK_PATIENCE, Part, Session};
use crate::statements::{NOW, Statements};

/// Records that are read at once: their replies can be long.
const READ_MAX: usize = 32;

/// The batches of one store, on the server.
#[derive(Debug)]
pub(crate) struct Batches {
    pub(crate) connections: Connections,
    pub(crate) statements: Statements,
}

impl Backend for Batches {
    type Fault = Fault;

    async fn run(&self, jobs: &[Job]) -> Result<Answers<Fault>, Fault> {
        let mut session = self.connections.lend().await?;
        let mut answers = Collected::of(jobs.len());
        let place = |(place, job)| self.placed(place, job);
        let mut left: Vec<Placed<'_>> = jobs.iter().enumerate().map(place).collect();
        // In the order of the key, so that whoever locks rows does so in one order.
        left.sort_unstable_by(|a, b| a.job.id().cmp(b.job.id()));
        self.usual(&mut session, &left, &mut answers).await?;
        left.retain(|placed| answers.is_missing(placed));
        // From here on some of the batch is done, so a fault is that of the rest.
        if let Err(fault) = self.rest(&mut session, &left, &mut answers).await {
            for placed in left.iter().filter(|placed| answers.is_missing(placed)).collect::<Vec<_>>() {
                let apart = fault.splits() || fault.is_lock_wait();
                answers.put(placed, if apart { Ok(Answer::Locked) } else { Err(fault.clone()) });
            }
        }
        Ok(answers.finish())
    }

    async fn run_alone(&self, job: &Job) -> Result<Answer, Fault> {
        let mut session = self.connections.lend().await?;
        let mut answers = Collected::of(1);
        let placed = [self.placed(0, job)];
        let is_claim = matches!(job.ask(), Ask::Claim(_));
        if is_claim {
            // A stored reply is nobody's to lock.
            self.look(&mut session, &placed, &mut answers).await?;
            if !answers.is_missing(&placed[0]) {
                return answers.finish().pop().unwrap_or(Ok(Answer::Locked));
            }
        }
        // A batch of another process is done in no time; who waits longer for a claim meets an open transaction.
        let wait = if is_claim { LOCK_PATIENCE * 2 } else { self.connections.patience / 2 };
        match self.settle(&mut session, &placed, &mut answers, Some(wait)).await {
            Err(fault) if fault.is_lock_wait() && is_claim => return Ok(Answer::Locked),
            done => done?,
        }
        answers.finish().pop().unwrap_or_else(|| Err(Fault::internal("no answer")))
    }
}

impl Batches {
    fn placed<'j>(&self, place: usize, job: &'j Job) -> Placed<'j> {
        Placed { place, job, lock: lock_number(&self.statements.table, job.id()) }
    }

    /// The usual case: one statement for each kind, all in one transaction and one exchange.
    async fn usual(
        &self,
        session: &mut Session<'_>,
        placed: &[Placed<'_>],
        answers: &mut Collected,
    ) -> Result<(), Fault> {
        let kinds = Columns::by_kind(placed);
        let calls: Vec<_> = kinds.iter().map(|columns| columns.call(&self.statements)).collect();
        let results = session.run(&calls, Part::Whole).await?;
        kinds.iter().zip(results).try_for_each(|(columns, rows)| columns.answer(&rows, answers))
    }

    async fn rest(
        &self,
        session: &mut Session<'_>,
        placed: &[Placed<'_>],
        answers: &mut Collected,
    ) -> Result<(), Fault> {
        let claims = placed.iter().copied().filter(|placed| matches!(placed.job.ask(), Ask::Claim(_)));
        for some in claims.collect::<Vec<_>>().chunks(READ_MAX) {
            self.look(session, some, answers).await?;
        }
        let left = placed.iter().copied().filter(|placed| answers.is_missing(placed));
        for some in left.collect::<Vec<_>>().chunks(READ_MAX) {
            self.settle(session, some, answers, None).await?;
        }
        Ok(())
    }

    /// Reads the records of claims that were not inserted. Most are answered by what is there.
    async fn look(
        &self,
        session: &mut Session<'_>,
        placed: &[Placed<'_>],
        answers: &mut Collected,
    ) -> Result<(), Fault> {
        let names = Names::of(operations(placed));
        let read = Call::new(&self.statements.read, vec![&names.scopes, &names.keys]);
        let rows = session.run(&[read], Part::Whole).await?.pop().unwrap_or_default();
        for row in &rows {
            let Some(placed) = numbered(row).and_then(|n| placed.get(n)) else { continue };
            let Ask::Claim(request) = placed.job.ask() else { continue };
            let fingerprint = placed.job.operation().fingerprint();
            match Row::read(row, 1).map(|found| decide(Some(&found.record), fingerprint, request)) {
                Ok(Decision::Answer(outcome)) => answers.put(placed, Ok(Answer::Claim(outcome))),
                Ok(Decision::Acquire { .. }) => {}
                Err(fault) => answers.put(placed, Err(fault)),
            }
        }
        Ok(())
    }

    /// Decides jobs under the locks of their operations. `wait`, for one job alone, waits for its lock.
    async fn settle(
        &self,
        session: &mut Session<'_>,
        placed: &[Placed<'_>],
        answers: &mut Collected,
        wait: Option<Duration>,
    ) -> Result<(), Fault> {
        let locks: Vec<i64> = placed.iter().map(|placed| placed.lock).collect();
        let names = Names::of(operations(placed));
        let lock = match wait {
            Some(_) => Call::new(&self.statements.lock, vec![&locks[0]]),
            None => Call::new(&self.statements.try_lock, vec![&locks]),
        };
        // Read by a statement of its own: the one that locks sees what was before it waited.
        let read = Call::new(&self.statements.read, vec![&names.scopes, &names.keys]);
        let part = match wait {
            None => Part::Begin,
            Some(patience) => {
                session.begin_waiting(patience).await?;
                Part::Middle
            }
        };
        let results = session.run(&[lock, read, Call::new(&NOW, Vec::new())], part).await?;
        let [locked, found, clock] = &results[..] else {
            return Err(Fault::internal("three answers were asked for"));
        };
        let now: Micros = match clock.first() {
            Some(row) => row.try_get(0)?,
            None => return Err(Fault::internal("the server has no clock")),
        };
        let mut rows: Vec<Option<Result<Row, Fault>>> = placed.iter().map(|_| None).collect();
        for row in found {
            if let Some(n) = numbered(row) {
                rows[n] = Some(Row::read(row, 1));
            }
        }
        let mut changes = Changes::default();
        let mut settled = Vec::with_capacity(placed.len());
        for (n, (placed, row)) in placed.iter().zip(rows).enumerate() {
            let held = wait.is_some() || locked.iter().any(|row| numbered(row) == Some(n));
            let decided = row.transpose().and_then(|row| match held {
                true => claims::settle(placed.job, row.as_ref(), now),
                false => Ok((claims::locked(placed.job, row.as_ref()), Change::None)),
            });
            let answer = decided.map(|(answer, change)| {
                changes.add(change);
                answer
            });
            settled.push((placed, answer));
        }
        changes.commit(&self.statements, session).await?;
        settled.into_iter().for_each(|(placed, answer)| answers.put(placed, answer));
        Ok(())
    }
}
