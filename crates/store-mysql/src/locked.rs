//! What the operations of a batch do in every other case: their rows are locked, read, decided on and written.
//!
//! Nobody's lock is waited for. A row that somebody holds is found by looking three times: for what is committed, for what is
//! not, and for what can be locked.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use onlyonce_batch::{Answer, Ask, Job};
use onlyonce_core::{
    Acquire, ClaimOutcome, ClaimRequest, Clock, CompleteDecision, CompleteOutcome, Completion, Decision,
    Lease, LeaseToken, OperationId, ReleaseDecision, ReleaseOutcome, RenewDecision, RenewOutcome, State,
    StateName, SystemClock, decide, decide_complete, decide_release, decide_renew,
};

use crate::claims::{ANEW, by_id, delete, find, push_ids};
use crate::error::{Fault, code};
use crate::row::{ALL_COLUMNS, Done, NOW, NewRow, Row, cells, columns, us, us_of};
use crate::schema::Tables;
use crate::session::{Session, skip_locked};
use crate::sql::Sql;

/// The answers to all jobs, in order.
pub(crate) type All = Vec<Result<Answer, Fault>>;

/// How long a row that somebody holds is looked for again.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Patience {
    /// Not at all: it is [`Answer::Locked`].
    None,
    /// For so long.
    Until(Duration),
}

/// The pauses between two looks.
const PAUSE_MIN: Duration = Duration::from_millis(1);
const PAUSE_MAX: Duration = Duration::from_millis(20);

/// How often a batch meets others in the moment after its look before it is halved.
const COLLISIONS_MAX: u32 = 1;

/// Runs jobs of any kind, each on an operation of its own.
///
/// # Errors
/// The fault that hit them all; nothing was done, unless it says that it may have been.
pub(crate) async fn run(
    session: &mut Session<'_>,
    tables: &Tables,
    jobs: &[&Job],
    patience: Patience,
) -> Result<All, Fault> {
    let began = SystemClock.boot();
    let patient = || match patience {
        Patience::None => false,
        Patience::Until(time) => SystemClock.boot().saturating_sub(began) < time,
    };
    let mut answers: Vec<Option<Result<Answer, Fault>>> = jobs.iter().map(|_| None).collect();
    let (mut collisions, mut pause) = (0, PAUSE_MIN);
    loop {
        let left: Vec<usize> = (0..jobs.len()).filter(|n| answers[*n].is_none()).collect();
        let of_round: Vec<&Job> = left.iter().map(|n| jobs[*n]).collect();
        match one_round(session, tables, &of_round).await {
            Ok(done) => {
                for (n, answer) in left.into_iter().zip(done) {
                    let locked = matches!(&answer, Some(Ok(Answer::Locked)));
                    answers[n] = answer.filter(|_| !(locked && patient()));
                }
            }
            // Somebody came in between, after the look; or holds a gap between the rows, which no look shows.
            Err(fault) if fault.code() == code::DUPLICATE || fault.is_lock_wait() || fault.is_conflict() => {
                collisions += 1;
                if collisions > COLLISIONS_MAX && of_round.len() > 1 {
                    let (first, second) = of_round.split_at(of_round.len() / 2);
                    let mut halves = Box::pin(run(session, tables, first, patience)).await?;
                    halves.extend(Box::pin(run(session, tables, second, patience)).await?);
                    left.into_iter().zip(halves).for_each(|(n, answer)| answers[n] = Some(answer));
                } else if collisions > COLLISIONS_MAX && !patient() {
                    left.into_iter().for_each(|n| answers[n] = Some(Ok(Answer::Locked)));
                }
            }
            Err(fault) => return Err(fault),
        }
        if answers.iter().all(Option::is_some) {
            return Ok(answers.into_iter().flatten().collect());
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

/// What somebody's look at the rows found.
struct Look {
    /// Locked by us, until the transaction ends.
    held: HashMap<OperationId, Result<Row, Fault>>,
    /// There, for everybody to see.
    committed: HashSet<OperationId>,
    /// There, perhaps in somebody's open transaction.
    seen: HashSet<OperationId>,
    now_us: i64,
}

// None: to be looked at again.
async fn one_round(
    session: &mut Session<'_>,
    tables: &Tables,
    jobs: &[&Job],
) -> Result<Vec<Option<Result<Answer, Fault>>>, Fault> {
    let look = match look(session, tables, jobs).await {
        Ok(look) => look,
        Err(fault) => return Err(end(session, fault).await),
    };
    // A claim that would change nothing needs no lock.
    let is_peeked = |job: &Job| {
        matches!(job.ask(), Ask::Claim(_))
            && !look.held.contains_key(job.id())
            && look.committed.contains(job.id())
    };
    let peeked: Vec<&OperationId> = jobs.iter().filter(|job| is_peeked(job)).map(|job| job.id()).collect();
    let peeked = match peeked.is_empty() {
        true => HashMap::new(),
        false => match find(session, tables, peeked.into_iter()).await {
            Ok(rows) => rows,
            Err(fault) => return Err(end(session, fault).await),
        },
    };
    let mut writes = Writes::default();
    let answers = jobs
        .iter()
        .map(|job| match look.held.get(job.id()) {
            Some(Err(fault)) => Some(Err(fault.clone())),
            Some(Ok(row)) => Some(Ok(plan(job, Some(row), row.now_us, &mut writes))),
            None if is_peeked(job) => match peeked.get(job.id())? {
                Err(fault) => Some(Err(fault.clone())),
                Ok(row) => Some(Ok(answer_without_a_lock(job, row))),
            },
            None if look.committed.contains(job.id()) || look.seen.contains(job.id()) => {
                Some(Ok(Answer::Locked))
            }
            None => Some(Ok(plan(job, None, look.now_us, &mut writes))),
        })
        .collect();
    match session.script(&writes.into_statements(tables)).await {
        Ok(_) => {
            session.ended();
            Ok(answers)
        }
        Err(fault) => Err(end(session, fault).await),
    }
}

async fn end(session: &mut Session<'_>, fault: Fault) -> Fault {
    if !fault.breaks_connection() {
        session.roll_back().await;
    }
    fault
}

async fn look(session: &mut Session<'_>, tables: &Tables, jobs: &[&Job]) -> Result<Look, Fault> {
    let select = |what: &str| {
        let mut sql = Sql::new(format!("SELECT {what} FROM {} FORCE INDEX (PRIMARY) WHERE ", tables.keys));
        push_ids(&mut sql, jobs.iter().map(|job| job.id()));
        sql.inlined()
    };
    let names = |rows: Vec<mysql_async::Row>| -> Result<HashSet<OperationId>, Fault> {
        rows.into_iter().map(|row| cells(row).id()).collect()
    };
    let uncommitted = "SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED".to_owned();
    let seen = session.script(&[uncommitted, select("scope, `key`")]).await?;
    session.begun();
    let [wait, held, no_wait] = skip_locked(&select(&columns(NOW, true)));
    let committed = select("scope, `key`");
    let now = format!("SELECT {}", us_of(NOW));
    let sets = session.script(&["START TRANSACTION".into(), wait, held, no_wait, committed, now]).await?;
    let [_, _, held, _, committed, now] =
        <[_; 6]>::try_from(sets).map_err(|_| Fault::internal("a look has six parts"))?;
    let now = now.into_iter().next().ok_or_else(|| Fault::internal("a clock that shows nothing"))?;
    Ok(Look {
        held: held.into_iter().map(by_id).collect::<Result<_, _>>()?,
        committed: names(committed)?,
        seen: names(seen.into_iter().nth(1).unwrap_or_default())?,
        now_us: cells(now).int("the clock")?,
    })
}

fn answer_without_a_lock(job: &Job, row: &Row) -> Answer {
    let Ask::Claim(request) = job.ask() else { return Answer::Locked };
    match decide(Some(&row.record), job.operation().fingerprint(), request) {
        Decision::Answer(answer) => Answer::Claim(answer),
        Decision::Acquire { .. } => Answer::Locked,
    }
}

/// What a round writes.
#[derive(Default)]
struct Writes {
    /// Over rows that are held.
    puts: Rows,
    /// Where there is no row.
    inserts: Rows,
    deletes: Vec<OperationId>,
}

/// Rows of a VALUES.
#[derive(Default)]
struct Rows {
    sql: Sql,
    any: bool,
}

impl Rows {
    fn push(&mut self, row: &NewRow<'_>) {
        if std::mem::replace(&mut self.any, true) {
            self.sql.push(", ");
        }
        row.push_to(&mut self.sql);
    }

    fn into_insert(self, tables: &Tables) -> Option<String> {
        let rows = self.sql.inlined();
        self.any.then(|| format!("INSERT INTO {} ({ALL_COLUMNS}) VALUES {rows}", tables.keys))
    }
}

impl Writes {
    fn put(&mut self, row: &NewRow<'_>, held: bool) {
        if held { &mut self.puts } else { &mut self.inserts }.push(row);
    }

    fn into_statements(self, tables: &Tables) -> Vec<String> {
        let mut statements = Vec::new();
        if let Some(puts) = self.puts.into_insert(tables) {
            let over: Vec<String> = ALL_COLUMNS
                .split(", ")
                .skip(2)
                .map(|column| format!("{column} = VALUES({column})", column = column.trim()))
                .collect();
            statements.push(format!("{puts} ON DUPLICATE KEY UPDATE {}", over.join(", ")));
        }
        if !self.deletes.is_empty() {
            let deleted = self.deletes.iter().map(|id| (id, None));
            statements.push(delete(tables, deleted, "TRUE").inlined());
        }
        // A row that came in between is a duplicate: never written over.
        statements.extend(self.inserts.into_insert(tables));
        statements.push("COMMIT".into());
        statements
    }
}

// `held`: the row is locked; else there is none.
fn plan(job: &Job, held: Option<&Row>, now_us: i64, writes: &mut Writes) -> Answer {
    let record = held.map(|row| &row.record);
    match job.ask() {
        Ask::Claim(request) => plan_claim(job, request, held, now_us, writes),
        Ask::Renew { token, lease } => Answer::Renew(match (decide_renew(record, token), held) {
            (RenewDecision::Ended, _) => RenewOutcome::Ended,
            (RenewDecision::Fenced, _) => RenewOutcome::Fenced,
            (RenewDecision::Extend, Some(row)) => {
                let locked_us = now_us.saturating_add_unsigned(us(*lease));
                writes.put(&NewRow { locked_us, ..row.again(StateName::InProgress) }, true);
                RenewOutcome::Renewed
            }
            (RenewDecision::Gone | RenewDecision::Extend, _) => RenewOutcome::Gone,
        }),
        Ask::Complete { completion, head } => plan_complete(job, completion, head, held, now_us, writes),
        Ask::Release(token) => plan_release(token, held, |row| writes.deletes.push(row.id.clone())),
        Ask::MarkUnknown(token) => plan_release(token, held, |row| {
            let locked_us = row.locked_us.min(now_us);
            writes.put(&NewRow { locked_us, ..row.again(StateName::Unknown) }, true);
        }),
    }
}

fn plan_claim(
    job: &Job,
    request: &ClaimRequest,
    held: Option<&Row>,
    now_us: i64,
    writes: &mut Writes,
) -> Answer {
    let operation = job.operation();
    match decide(held.map(|row| &row.record), operation.fingerprint(), request) {
        Decision::Answer(answer) => Answer::Claim(answer),
        Decision::Acquire { attempt, how } => {
            let kept = held.filter(|_| how != Acquire::Fresh);
            let taken = NewRow {
                id: operation.id(),
                fingerprint: *operation.fingerprint(),
                status: StateName::InProgress,
                locked_us: now_us.saturating_add_unsigned(us(request.lease)),
                created_us: kept.map_or(now_us, |row| row.created_us),
                claimed_us: kept.filter(|_| how == Acquire::Reentrant).map_or(now_us, |row| row.claimed_us),
                token: request.token,
                attempt,
                on_lease_end: request.on_lease_end,
                origin: operation.origin(),
                done: None,
            };
            writes.put(&taken, held.is_some());
            let lease = Lease { token: request.token, attempt, duration: request.lease };
            Answer::Claim(ClaimOutcome::Acquired(lease))
        }
    }
}

fn plan_complete(
    job: &Job,
    completion: &Completion,
    head: &[u8],
    held: Option<&Row>,
    now_us: i64,
    writes: &mut Writes,
) -> Answer {
    let operation = job.operation();
    let done = Done {
        reply: &completion.reply,
        head,
        completed_us: now_us,
        expires_us: now_us.saturating_add_unsigned(us(completion.retention)),
    };
    let stored = |origin| done.stored(completion.retention, origin);
    let decision = decide_complete(held.map(|row| &row.record), operation.fingerprint(), &completion.token);
    Answer::Complete(match (decision, held) {
        (CompleteDecision::Fenced(reply), _) => CompleteOutcome::Fenced(reply),
        (CompleteDecision::Write, Some(row)) => {
            writes.put(&NewRow { done: Some(done), ..row.again(StateName::Completed) }, true);
            CompleteOutcome::Stored(stored(row.record.origin.as_ref()))
        }
        (CompleteDecision::AlreadyStored, Some(Row { record, .. }))
            if let State::Completed { stored, .. } = &record.state =>
        {
            CompleteOutcome::AlreadyStored(stored.clone())
        }
        (CompleteDecision::WriteAnew | CompleteDecision::Write | CompleteDecision::AlreadyStored, _) => {
            let anew = NewRow {
                id: operation.id(),
                fingerprint: *operation.fingerprint(),
                status: StateName::Completed,
                locked_us: now_us,
                created_us: now_us,
                claimed_us: now_us,
                token: completion.token,
                attempt: completion.attempt,
                on_lease_end: ANEW,
                origin: operation.origin(),
                done: Some(done),
            };
            writes.put(&anew, held.is_some());
            CompleteOutcome::StoredAnew(stored(operation.origin()))
        }
    })
}

fn plan_release(token: &LeaseToken, held: Option<&Row>, apply: impl FnOnce(&Row)) -> Answer {
    Answer::Release(match (decide_release(held.map(|row| &row.record), token), held) {
        (ReleaseDecision::Fenced, _) => ReleaseOutcome::Fenced,
        (ReleaseDecision::Apply, Some(row)) => {
            apply(row);
            ReleaseOutcome::Applied
        }
        (ReleaseDecision::Absent | ReleaseDecision::Apply, _) => ReleaseOutcome::Absent,
    })
}
