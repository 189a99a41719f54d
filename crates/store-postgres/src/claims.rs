//! What an operation does to its record where the usual statement did not do: `decide…`, under the operation's lock.

use onlyonce_batch::{Answer, Ask, Job};
use onlyonce_core::{
    Acquire, ClaimOutcome, ClaimRequest, CompleteDecision, CompleteOutcome, Completion, Decision, Lease,
    OnLeaseEnd, Operation, OperationId, ReleaseDecision, ReleaseOutcome, RenewDecision, RenewOutcome, State,
    StateName, decide, decide_complete, decide_release, decide_renew,
};

use crate::error::Fault;
use crate::row::{Done, Micros, NewRow, Row, written_anew};

/// What is to be written.
#[derive(Debug)]
pub(crate) enum Change {
    None,
    Put(Box<NewRow>),
    Delete(OperationId),
}

impl Change {
    fn put(row: NewRow) -> Self {
        Self::Put(Box::new(row))
    }
}

/// Decides a job on its record, whose lock is held.
pub(crate) fn settle(job: &Job, row: Option<&Row>, now: Micros) -> Result<(Answer, Change), Fault> {
    let record = row.map(|row| &row.record);
    Ok(match job.ask() {
        Ask::Claim(request) => {
            let (outcome, change) = claim(job.operation(), request, request.on_lease_end, row, now);
            (Answer::Claim(outcome), change)
        }
        Ask::Renew { token, lease } => {
            let renewed = |row: &Row| {
                let locked = now.plus(*lease);
                Change::put(NewRow { locked, ..row.again(StateName::InProgress) })
            };
            let (outcome, change) = match decide_renew(record, token) {
                RenewDecision::Ended => (RenewOutcome::Ended, Change::None),
                RenewDecision::Fenced => (RenewOutcome::Fenced, Change::None),
                RenewDecision::Gone => (RenewOutcome::Gone, Change::None),
                RenewDecision::Extend => (RenewOutcome::Renewed, row.map_or(Change::None, renewed)),
            };
            (Answer::Renew(outcome), change)
        }
        Ask::Complete { completion, head } => {
            let (outcome, change) = complete(job.operation(), completion, head, row, now)?;
            (Answer::Complete(outcome), change)
        }
        Ask::Release(token) => {
            let (outcome, change) = match decide_release(record, token) {
                ReleaseDecision::Absent => (ReleaseOutcome::Absent, Change::None),
                ReleaseDecision::Fenced => (ReleaseOutcome::Fenced, Change::None),
                ReleaseDecision::Apply => (ReleaseOutcome::Applied, Change::Delete(job.id().clone())),
            };
            (Answer::Release(outcome), change)
        }
        Ask::MarkUnknown(token) => {
            let marked = |row: &Row| {
                let locked = row.locked.min(now);
                Change::put(NewRow { locked, ..row.again(StateName::Unknown) })
            };
            let (outcome, change) = match decide_release(record, token) {
                ReleaseDecision::Absent => (ReleaseOutcome::Absent, Change::None),
                ReleaseDecision::Fenced => (ReleaseOutcome::Fenced, Change::None),
                ReleaseDecision::Apply => (ReleaseOutcome::Applied, row.map_or(Change::None, marked)),
            };
            (Answer::Release(outcome), change)
        }
    })
}

/// Answers a job whose operation somebody else holds locked. A claim may be answered by what is there; whoever holds the
/// lock goes first in what it would have to write.
pub(crate) fn locked(job: &Job, row: Option<&Row>) -> Answer {
    let Ask::Claim(request) = job.ask() else { return Answer::Locked };
    let record = row.map(|row| &row.record);
    match decide(record, job.operation().fingerprint(), request) {
        Decision::Answer(outcome) => Answer::Claim(outcome),
        Decision::Acquire { .. } => Answer::Locked,
    }
}

/// Decides a claim. `kept` is the policy that goes into the record.
pub(crate) fn claim(
    operation: &Operation,
    request: &ClaimRequest,
    kept: OnLeaseEnd,
    row: Option<&Row>,
    now: Micros,
) -> (ClaimOutcome, Change) {
    let decision = decide(row.map(|row| &row.record), operation.fingerprint(), request);
    let (attempt, how) = match decision {
        Decision::Answer(answer) => return (answer, Change::None),
        Decision::Acquire { attempt, how } => (attempt, how),
    };
    let (created, claimed) = match (how, row) {
        (Acquire::Reentrant, Some(row)) => (row.created, row.claimed),
        (Acquire::TakeOver, Some(row)) => (row.created, now),
        (Acquire::Fresh | Acquire::Reentrant | Acquire::TakeOver, _) => (now, now),
    };
    let taken = NewRow {
        id: operation.id().clone(),
        hash: operation.fingerprint().to_string(),
        status: StateName::InProgress,
        locked: now.plus(request.lease),
        created,
        claimed,
        token: request.token,
        attempt,
        on_lease_end: kept,
        origin: operation.origin().cloned(),
        done: None,
    };
    let lease = Lease { token: request.token, attempt, duration: request.lease };
    (ClaimOutcome::Acquired(lease), Change::put(taken))
}

/// Decides a completion. `head` is [`onlyonce_core::Reply::encode_head`] of its reply.
pub(crate) fn complete(
    operation: &Operation,
    completion: &Completion,
    head: &[u8],
    row: Option<&Row>,
    now: Micros,
) -> Result<(CompleteOutcome, Change), Fault> {
    let record = row.map(|row| &row.record);
    let decision = decide_complete(record, operation.fingerprint(), &completion.token);
    let done = || Done::new(&completion.reply, head, now, completion.retention);
    Ok(match (decision, row) {
        (CompleteDecision::Fenced(reply), _) => (CompleteOutcome::Fenced(reply), Change::None),
        (CompleteDecision::AlreadyStored, Some(Row { record, .. })) => match &record.state {
            State::Completed { stored, .. } => (CompleteOutcome::AlreadyStored(stored.clone()), Change::None),
            _ => return Err(Fault::internal("stored already, and not completed")),
        },
        (CompleteDecision::Write, Some(row)) => {
            let done = done();
            let stored = done.stored(row.record.origin.as_ref());
            let written = NewRow { done: Some(done), ..row.again(StateName::Completed) };
            (CompleteOutcome::Stored(stored), Change::put(written))
        }
        (CompleteDecision::WriteAnew | CompleteDecision::Write | CompleteDecision::AlreadyStored, _) => {
            let done = done();
            let stored = done.stored(operation.origin());
            let (fingerprint, origin) = (operation.fingerprint(), operation.origin());
            let written = written_anew(operation.id(), fingerprint, origin, completion, done);
            (CompleteOutcome::StoredAnew(stored), Change::put(written))
        }
    })
}
