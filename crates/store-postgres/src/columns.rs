//! Jobs and rows as the columns that `unnest` takes.

use onlyonce_batch::{Answer, Ask, Job};
use onlyonce_core::{
    ClaimOutcome, CompleteOutcome, Lease, Operation, OperationId, Origin, ReleaseOutcome, RenewOutcome,
};

use crate::claims::Change;
use crate::error::Fault;
use crate::row::{Micros, NewRow, Token, micros, policy_text, stored};
use crate::session::{Call, Part, Session};
use crate::statements::Statements;

/// A job of a batch with its lock, by its place in the batch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Placed<'j> {
    pub(crate) place: usize,
    pub(crate) job: &'j Job,
    pub(crate) lock: i64,
}

/// The answers so far, by place.
#[derive(Debug)]
pub(crate) struct Collected(Vec<Option<Result<Answer, Fault>>>);

impl Collected {
    pub(crate) fn of(count: usize) -> Self {
        Self((0..count).map(|_| None).collect())
    }

    pub(crate) fn put(&mut self, placed: &Placed<'_>, answer: Result<Answer, Fault>) {
        self.0[placed.place] = Some(answer);
    }

    pub(crate) fn is_missing(&self, placed: &Placed<'_>) -> bool {
        self.0[placed.place].is_none()
    }

    pub(crate) fn finish(self) -> Vec<Result<Answer, Fault>> {
        let missing = || Err(Fault::internal("an operation was left without an answer"));
        self.0.into_iter().map(|answer| answer.unwrap_or_else(missing)).collect()
    }
}

/// Which statement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Renew,
    Complete,
    MarkUnknown,
    Release,
    Claim,
}

impl Kind {
    const ALL: [Self; 5] = [Self::Renew, Self::Complete, Self::MarkUnknown, Self::Release, Self::Claim];

    fn of(job: &Job) -> Self {
        match job.ask() {
            Ask::Claim(_) => Self::Claim,
            Ask::Renew { .. } => Self::Renew,
            Ask::Complete { .. } => Self::Complete,
            Ask::Release(_) => Self::Release,
            Ask::MarkUnknown(_) => Self::MarkUnknown,
        }
    }
}

/// The jobs of one kind. A column that the kind has no use for stays empty.
#[derive(Debug)]
pub(crate) struct Columns<'j> {
    kind: Kind,
    placed: Vec<Placed<'j>>,
    scopes: Vec<&'j str>,
    keys: Vec<&'j str>,
    locks: Vec<i64>,
    tokens: Vec<Token>,
    /// Leases or retentions, in microseconds.
    spans: Vec<i64>,
    hashes: Vec<String>,
    policies: Vec<&'static str>,
    origins: Vec<Option<&'j str>>,
    codes: Vec<i32>,
    heads: Vec<&'j [u8]>,
    bodies: Vec<&'j [u8]>,
}

impl<'j> Columns<'j> {
    /// The columns of each kind that is there.
    pub(crate) fn by_kind(placed: &[Placed<'j>]) -> Vec<Self> {
        let kinds = Kind::ALL.map(|kind| {
            let mut columns = Self::new(kind);
            placed.iter().filter(|placed| Kind::of(placed.job) == kind).for_each(|p| columns.push(*p));
            columns
        });
        kinds.into_iter().filter(|columns| !columns.placed.is_empty()).collect()
    }

    fn new(kind: Kind) -> Self {
        Self {
            kind,
            placed: Vec::new(),
            scopes: Vec::new(),
            keys: Vec::new(),
            locks: Vec::new(),
            tokens: Vec::new(),
            spans: Vec::new(),
            hashes: Vec::new(),
            policies: Vec::new(),
            origins: Vec::new(),
            codes: Vec::new(),
            heads: Vec::new(),
            bodies: Vec::new(),
        }
    }

    fn push(&mut self, placed: Placed<'j>) {
        let operation = placed.job.operation();
        self.placed.push(placed);
        self.scopes.push(operation.scope().as_str());
        self.keys.push(operation.key().as_str());
        self.locks.push(placed.lock);
        let token = match placed.job.ask() {
            Ask::Claim(request) => {
                self.spans.push(micros(request.lease));
                self.hashes.push(operation.fingerprint().to_string());
                self.policies.push(policy_text(request.on_lease_end));
                self.origins.push(operation.origin().map(Origin::as_str));
                request.token
            }
            Ask::Renew { token, lease } => {
                self.spans.push(micros(*lease));
                *token
            }
            Ask::Complete { completion, head } => {
                self.spans.push(micros(completion.retention));
                self.codes.push(completion.reply.status().into());
                self.heads.push(head);
                self.bodies.push(completion.reply.body());
                completion.token
            }
            Ask::Release(token) | Ask::MarkUnknown(token) => *token,
        };
        self.tokens.push(Token(token));
    }

    /// The statement of its kind with these columns.
    pub(crate) fn call<'a>(&'a self, statements: &'a Statements) -> Call<'a> {
        let Self {
            scopes, keys, locks, tokens, spans, hashes, policies, origins, codes, heads, bodies, ..
        } = self;
        match self.kind {
            Kind::Claim => Call::new(
                &statements.claim,
                vec![scopes, keys, locks, hashes, spans, tokens, policies, origins],
            ),
            Kind::Renew => Call::new(&statements.renew, vec![scopes, keys, locks, tokens, spans]),
            Kind::Complete => Call::new(
                &statements.complete,
                vec![scopes, keys, locks, tokens, codes, heads, bodies, spans],
            ),
            Kind::Release => Call::new(&statements.release, vec![scopes, keys, locks, tokens]),
            Kind::MarkUnknown => Call::new(&statements.mark_unknown, vec![scopes, keys, locks, tokens]),
        }
    }

    /// Answers the jobs that the statement did.
    pub(crate) fn answer(&self, rows: &[tokio_postgres::Row], answers: &mut Collected) -> Result<(), Fault> {
        if self.kind == Kind::Claim {
            return self.answer_claims(rows, answers);
        }
        for row in rows {
            let Some(placed) = numbered(row).and_then(|n| self.placed.get(n)) else { continue };
            let answer = match placed.job.ask() {
                Ask::Renew { .. } => Answer::Renew(RenewOutcome::Renewed),
                Ask::Release(_) | Ask::MarkUnknown(_) => Answer::Release(ReleaseOutcome::Applied),
                Ask::Complete { completion, .. } => {
                    let (completed, expires): (Micros, Micros) = (row.try_get(1)?, row.try_get(2)?);
                    // An owner completes the operation that it claimed, so its origin is the record's.
                    let origin = placed.job.operation().origin();
                    let stored = stored(&completion.reply, completed, expires, origin);
                    Answer::Complete(CompleteOutcome::Stored(stored))
                }
                Ask::Claim(_) => continue,
            };
            answers.put(placed, Ok(answer));
        }
        Ok(())
    }

    // RETURNING cannot tell the number of a row that was inserted; but the order is that of the columns.
    fn answer_claims(&self, rows: &[tokio_postgres::Row], answers: &mut Collected) -> Result<(), Fault> {
        let mut candidates = self.placed.iter();
        for row in rows {
            let (scope, key): (&str, &str) = (row.try_get(0)?, row.try_get(1)?);
            let placed = candidates.find(|placed| {
                let id = placed.job.id();
                id.scope.as_str() == scope && id.key.as_str() == key
            });
            let Some(placed) = placed else {
                return Err(Fault::internal("PostgreSQL inserted in another order than it was asked to"));
            };
            if let Ask::Claim(request) = placed.job.ask() {
                let lease = Lease { token: request.token, attempt: 1, duration: request.lease };
                answers.put(placed, Ok(Answer::Claim(ClaimOutcome::Acquired(lease))));
            }
        }
        Ok(())
    }
}

/// Scopes and keys.
#[derive(Debug, Default)]
pub(crate) struct Names<'a> {
    pub(crate) scopes: Vec<&'a str>,
    pub(crate) keys: Vec<&'a str>,
}

impl<'a> Names<'a> {
    pub(crate) fn of(ids: impl Iterator<Item = &'a OperationId>) -> Self {
        let (scopes, keys) = ids.map(|id| (id.scope.as_str(), id.key.as_str())).unzip();
        Self { scopes, keys }
    }
}

/// What is to be written at the end of a transaction.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    puts: Vec<NewRow>,
    deletes: Vec<OperationId>,
}

impl Changes {
    pub(crate) fn add(&mut self, change: Change) {
        match change {
            Change::None => {}
            Change::Put(row) => self.puts.push(*row),
            Change::Delete(id) => self.deletes.push(id),
        }
    }

    /// Writes them and commits.
    pub(crate) async fn commit(
        &self,
        statements: &Statements,
        session: &mut Session<'_>,
    ) -> Result<(), Fault> {
        self.write_as(Part::End, statements, session).await
    }

    /// Writes them and goes on.
    pub(crate) async fn write(
        &self,
        statements: &Statements,
        session: &mut Session<'_>,
    ) -> Result<(), Fault> {
        self.write_as(Part::Middle, statements, session).await
    }

    async fn write_as(
        &self,
        part: Part,
        statements: &Statements,
        session: &mut Session<'_>,
    ) -> Result<(), Fault> {
        let (rows, names) = (Rows::of(&self.puts), Names::of(self.deletes.iter()));
        let mut calls = Vec::new();
        if !self.puts.is_empty() {
            calls.push(rows.call(statements));
        }
        if !self.deletes.is_empty() {
            calls.push(Call::new(&statements.delete, vec![&names.scopes, &names.keys]));
        }
        session.run(&calls, part).await?;
        Ok(())
    }
}

/// Whole rows as columns.
#[derive(Debug)]
struct Rows<'a> {
    names: Names<'a>,
    hashes: Vec<&'a str>,
    statuses: Vec<&'static str>,
    codes: Vec<Option<i32>>,
    heads: Vec<Option<&'a [u8]>>,
    bodies: Vec<Option<&'a [u8]>>,
    locked: Vec<Micros>,
    created: Vec<Micros>,
    claimed: Vec<Micros>,
    completed: Vec<Option<Micros>>,
    expires: Vec<Option<Micros>>,
    tokens: Vec<Token>,
    attempts: Vec<i64>,
    policies: Vec<&'static str>,
    origins: Vec<Option<&'a str>>,
}

impl<'a> Rows<'a> {
    fn of(rows: &'a [NewRow]) -> Self {
        let done = || rows.iter().map(|row| row.done.as_ref());
        Self {
            names: Names::of(rows.iter().map(|row| &row.id)),
            hashes: rows.iter().map(|row| row.hash.as_str()).collect(),
            statuses: rows.iter().map(|row| row.status.as_str()).collect(),
            codes: done().map(|done| done.map(|done| done.reply.status().into())).collect(),
            heads: done().map(|done| done.map(|done| &done.head[..])).collect(),
            bodies: done().map(|done| done.map(|done| &done.reply.body()[..])).collect(),
            locked: rows.iter().map(|row| row.locked).collect(),
            created: rows.iter().map(|row| row.created).collect(),
            claimed: rows.iter().map(|row| row.claimed).collect(),
            completed: done().map(|done| done.map(|done| done.completed)).collect(),
            expires: done().map(|done| done.map(|done| done.expires)).collect(),
            tokens: rows.iter().map(|row| Token(row.token)).collect(),
            attempts: rows.iter().map(|row| row.attempt.into()).collect(),
            policies: rows.iter().map(|row| policy_text(row.on_lease_end)).collect(),
            origins: rows.iter().map(|row| row.origin.as_ref().map(Origin::as_str)).collect(),
        }
    }

    fn call(&'a self, statements: &'a Statements) -> Call<'a> {
        Call::new(
            &statements.put,
            vec![
                &self.names.scopes,
                &self.names.keys,
                &self.hashes,
                &self.statuses,
                &self.codes,
                &self.heads,
                &self.bodies,
                &self.locked,
                &self.created,
                &self.claimed,
                &self.completed,
                &self.expires,
                &self.tokens,
                &self.attempts,
                &self.policies,
                &self.origins,
            ],
        )
    }
}

/// The place that a row's first column tells: `WITH ORDINALITY` counts from 1.
pub(crate) fn numbered(row: &tokio_postgres::Row) -> Option<usize> {
    usize::try_from(row.try_get::<_, i64>(0).ok()?).ok()?.checked_sub(1)
}

/// The operations of jobs.
pub(crate) fn operations<'j>(placed: &'j [Placed<'j>]) -> impl Iterator<Item = &'j OperationId> {
    placed.iter().map(|placed| Operation::id(placed.job.operation()))
}
