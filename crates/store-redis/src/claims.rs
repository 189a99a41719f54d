//! What a claim, a renewal, a completion, a release and a mark do to a record.

use std::time::Duration;

use bytes::Bytes;
use onlyonce_core::clock::from_unix_ms;
use onlyonce_core::{
    Acquire, ClaimOutcome, ClaimRequest, CompleteDecision, CompleteOutcome, Completion, Decision, Lease,
    LeaseToken, OnLeaseEnd, Operation, OperationId, Origin, Record, ReleaseDecision, ReleaseOutcome,
    RenewDecision, RenewOutcome, State, StoreErrorKind, StoredReply, decide, decide_complete, decide_release,
    decide_renew,
};
use redis::Value;

use crate::error::Fault;
use crate::link::Link;
use crate::names::Names;
use crate::open::Purpose;
use crate::request::{Claim, Ending, Request};
use crate::routes::{How, Routes};
use crate::row::{Moment, NewRow, Row, names, reply_tail, whole_ms};
use crate::scripts::{self, Text};

const WEEK_MS: i64 = 7 * 24 * 3600 * 1000;
/// How often a decision may be overtaken by somebody else's change before it is given up.
const OVERTAKEN_MAX: u32 = 100;

/// The calls of a store, on its servers.
#[derive(Clone, Copy)]
pub(crate) struct Calls<'a> {
    pub(crate) routes: &'a Routes,
    pub(crate) names: &'a Names,
    /// How long what waits for somebody is kept, where it is not a week.
    pub(crate) hold_retention: Option<Duration>,
}

/// A record as it was found.
pub(crate) struct Found {
    pub(crate) value: Bytes,
    pub(crate) row: Row,
    pub(crate) record: Record,
    pub(crate) at: Moment,
}

impl Calls<'_> {
    pub(crate) async fn claim(
        self,
        operation: &Operation,
        request: &ClaimRequest,
    ) -> Result<ClaimOutcome, Fault> {
        self.may_write()?;
        let name = self.names.record(operation.id());
        let ttl_ms = self.ttl_without_reply_ms(request);
        let value = new_row(operation, request, ttl_ms, 1).encode();
        let claim = Claim { name: name.clone(), value, ttl_ms };
        let how = self.of_claim(request.token);
        let (answers, link) = self.routes.ask(name.as_bytes(), &Request::claim(claim), how).await?;
        let (value, pttl_ms) = match answers.as_slice() {
            [Value::Nil, _] => {
                self.confirm_claim(&link, operation, request.token).await?;
                return Ok(acquired(request, 1));
            }
            [Value::BulkString(value), Value::Int(pttl_ms)] => (value.clone(), *pttl_ms),
            _ => return Err(Fault::strange("to SET NX GET")),
        };
        let row = read(&name, &value.into(), operation.id())?;
        // A lease that is over, an unknown outcome: told with the time of the server, which SET does not say.
        if row.needs_no_clock(pttl_ms) {
            let at = Moment { pttl_ms, now_ms: 0 };
            let record = row.record(at).map_err(|why| Fault::unreadable(&name, &why))?;
            if let Decision::Answer(answer) = decide(Some(&record), operation.fingerprint(), request) {
                return self.answer(&name, &link, answer).await;
            }
        }
        self.claim_found(&name, operation, request).await
    }

    /// A claim that may have to change what is there: decided on the record as it is, written if it still is that.
    async fn claim_found(
        self,
        name: &str,
        operation: &Operation,
        request: &ClaimRequest,
    ) -> Result<ClaimOutcome, Fault> {
        let mut request = request.clone();
        request.takeover_now =
            request.takeover_now && self.routes.unbroken_for(name.as_bytes(), request.lease).await;
        let (mut found, mut link) = self.look(name, operation.id()).await?;
        for _ in 0..OVERTAKEN_MAX {
            let record = found.as_ref().map(|found| &found.record);
            let (attempt, how) = match decide(record, operation.fingerprint(), &request) {
                Decision::Answer(answer) => return self.answer(name, &link, answer).await,
                Decision::Acquire { attempt, how } => (attempt, how),
            };
            let ttl_ms = self.ttl_without_reply_ms(&request);
            let mut new = new_row(operation, &request, ttl_ms, attempt);
            let mut pttl_max_ms = None;
            if let Some(Found { row, at, .. }) = &found {
                if how != Acquire::Fresh {
                    new.created_ms = row.created_ms + row.past_ms(*at);
                }
                if how == Acquire::Reentrant {
                    new.claimed_ms = row.claimed_ms + row.past_ms(*at);
                }
                pttl_max_ms = match how {
                    // Renewed in the meantime, it has more left than at the end of its lease.
                    Acquire::TakeOver => Some(row.pttl_at_lease_end_ms()),
                    Acquire::Fresh if row.is_expired(*at) => Some(0),
                    Acquire::Fresh | Acquire::Reentrant => None,
                };
            }
            let old = found.as_ref().map(|found| found.value.clone()).unwrap_or_default();
            let swapped = self.swap(name, operation.id(), &old, pttl_max_ms, &new, None, true).await?;
            match swapped {
                Ok(written_on) => {
                    self.confirm_claim(&written_on, operation, request.token).await?;
                    return Ok(acquired(&request, attempt));
                }
                Err((now, answered_on)) => (found, link) = (now, answered_on),
            }
        }
        Err(Fault::new(StoreErrorKind::Conflict, "the record changed again and again while it was claimed"))
    }

    pub(crate) async fn renew(
        self,
        operation: &Operation,
        token: LeaseToken,
        lease: Duration,
    ) -> Result<RenewOutcome, Fault> {
        let lease_ms = whole_ms(lease);
        let args = [lease_ms.to_string(), lease_ms.saturating_mul(2).to_string()];
        let owned = self.owned(&scripts::RENEW, operation, &token, &args, false).await?;
        let record = match owned {
            Owned::Done(_) => return Ok(RenewOutcome::Renewed),
            Owned::Refused(record) => record,
        };
        match decide_renew(record.as_deref(), &token) {
            RenewDecision::Ended => Ok(RenewOutcome::Ended),
            RenewDecision::Fenced => Ok(RenewOutcome::Fenced),
            RenewDecision::Gone => Ok(RenewOutcome::Gone),
            RenewDecision::Extend => Err(disagree()),
        }
    }

    pub(crate) async fn release(
        self,
        operation: &Operation,
        token: LeaseToken,
    ) -> Result<ReleaseOutcome, Fault> {
        let release = async || self.give_up(&scripts::RELEASE, operation, token, &[], false).await;
        let released = release().await?;
        let adrift = &self.routes.adrift;
        if !adrift.has(&token) {
            return Ok(released);
        }
        // A copy of the claim that arrives now would be nobody's.
        if !adrift.all_landed(&token, self.routes.options.timeout).await {
            let why = "a copy of the claim that is released may still arrive";
            return Err(Fault::new(StoreErrorKind::Unavailable, why).with_sent(true));
        }
        match (released, release().await?) {
            (ReleaseOutcome::Applied, _) => Ok(ReleaseOutcome::Applied),
            (_, last) => Ok(last),
        }
    }

    pub(crate) async fn mark_unknown(
        self,
        operation: &Operation,
        token: LeaseToken,
    ) -> Result<ReleaseOutcome, Fault> {
        let keep = [self.hold_ms().to_string()];
        self.give_up(&scripts::MARK, operation, token, &keep, true).await
    }

    async fn give_up(
        self,
        script: &'static Text,
        operation: &Operation,
        token: LeaseToken,
        args: &[String],
        replicated: bool,
    ) -> Result<ReleaseOutcome, Fault> {
        let record = match self.owned(script, operation, &token, args, replicated).await? {
            Owned::Done(_) => return Ok(ReleaseOutcome::Applied),
            Owned::Refused(record) => record,
        };
        match decide_release(record.as_deref(), &token) {
            ReleaseDecision::Fenced => Ok(ReleaseOutcome::Fenced),
            ReleaseDecision::Absent => Ok(ReleaseOutcome::Absent),
            ReleaseDecision::Apply => Err(disagree()),
        }
    }

    pub(crate) async fn complete(
        self,
        operation: &Operation,
        completion: &Completion,
    ) -> Result<CompleteOutcome, Fault> {
        match self.complete_own(operation, completion).await? {
            Some(at_ms) => {
                let origin = operation.origin().cloned();
                Ok(CompleteOutcome::Stored(stored(completion, at_ms, origin)))
            }
            // A first try of the other way may have been carried out, if its answer was lost.
            None => self.complete_any(operation, completion).await.map_err(|fault| {
                let sent = fault.sent || fault.is_passing();
                fault.with_sent(sent)
            }),
        }
    }

    /// The usual case, in one script with the completions of others: the record is as this owner's claim left it. On a
    /// cluster keys of other slots cannot be in the same script. None: it is not so, and nothing was done.
    pub(crate) async fn complete_own(
        self,
        operation: &Operation,
        completion: &Completion,
    ) -> Result<Option<i64>, Fault> {
        let retention_ms = whole_ms(completion.retention);
        if self.routes.is_cluster() || retention_ms == 0 {
            return Ok(None);
        }
        let name = self.names.record(operation.id());
        let [_, owner @ ..] = completed_row(operation, completion).owner();
        let (mut all_names, mut reply) = (Vec::new(), Vec::new());
        names(&mut all_names, operation.id(), operation.origin());
        reply_tail(&mut reply, &completion.reply);
        let status = completion.reply.status().to_be_bytes();
        let ending = Ending { name: name.clone(), owner, names: all_names, status, reply, retention_ms };
        let how = self.confirmed(true);
        let request = Request::completion(ending);
        let (answers, link) = self.routes.ask(name.as_bytes(), &request, how).await?;
        match answers.as_slice() {
            [Value::Int(at_ms)] => {
                if how.replicated {
                    confirm(&link, self.routes.options.min_replicas).await?;
                }
                Ok(Some(*at_ms))
            }
            [Value::Nil] => Ok(None),
            _ => Err(Fault::strange("to completions")),
        }
    }

    /// Whatever the record is.
    async fn complete_any(
        self,
        operation: &Operation,
        completion: &Completion,
    ) -> Result<CompleteOutcome, Fault> {
        let token = completion.token;
        let anew = completed_row(operation, completion);
        let (mut all_names, mut reply) = (Vec::new(), Vec::new());
        names(&mut all_names, operation.id(), operation.origin());
        reply_tail(&mut reply, &completion.reply);
        let retention = whole_ms(completion.retention).to_string();
        let status = completion.reply.status().to_be_bytes();
        let touch: &[u8] = if self.routes.options.min_replicas > 0 { b"1" } else { b"0" };
        let args: [&[u8]; 6] = [retention.as_bytes(), &anew.owner(), &all_names, &status, &reply, touch];
        let record = match self.owned(&scripts::COMPLETE, operation, &token, &args, true).await? {
            Owned::Done(answer) => {
                return match answer.as_slice() {
                    [Value::Int(1), Value::Int(at_ms), Value::BulkString(origin)] => {
                        Ok(CompleteOutcome::Stored(stored(completion, *at_ms, origin_of(origin)?)))
                    }
                    [Value::Int(2), Value::Int(at_ms)] => {
                        let origin = operation.origin().cloned();
                        Ok(CompleteOutcome::StoredAnew(stored(completion, *at_ms, origin)))
                    }
                    _ => Err(Fault::strange("to a completion")),
                };
            }
            Owned::Refused(record) => record.map(|record| *record),
        };
        match (decide_complete(record.as_ref(), operation.fingerprint(), &token), record) {
            (CompleteDecision::Fenced(reply), _) => Ok(CompleteOutcome::Fenced(reply)),
            (
                CompleteDecision::AlreadyStored,
                Some(Record { state: State::Completed { stored, .. }, .. }),
            ) => Ok(CompleteOutcome::AlreadyStored(stored)),
            _ => Err(disagree()),
        }
    }

    /// Runs a script of an owner. What it changed is confirmed by the replicas if `replicated`.
    async fn owned(
        self,
        script: &'static Text,
        operation: &Operation,
        token: &LeaseToken,
        args: &[impl AsRef<[u8]>],
        replicated: bool,
    ) -> Result<Owned, Fault> {
        let name = self.names.record(operation.id());
        let id = names_of(operation.id());
        let mut all: Vec<&[u8]> = vec![&id, token.as_bytes()];
        all.extend(args.iter().map(AsRef::as_ref));
        let request = Request::script(script, &[name.as_bytes()], &all);
        let how = self.confirmed(replicated);
        let (answers, link) = self.routes.ask(name.as_bytes(), &request, how).await?;
        let answer = one_array(answers)?;
        let refused = matches!(answer.first(), Some(Value::Int(0)));
        // A reply that was stored before may not have reached the replicas then.
        if how.replicated {
            confirm(&link, self.routes.options.min_replicas).await?;
        }
        if !refused {
            return Ok(Owned::Done(answer));
        }
        let found = found(&name, answer.into_iter().skip(1), operation.id())?;
        Ok(Owned::Refused(found.map(|found| Box::new(found.record))))
    }

    /// The record as it stands.
    pub(crate) async fn look(
        self,
        name: &str,
        id: &OperationId,
    ) -> Result<(Option<Found>, std::sync::Arc<Link>), Fault> {
        let request = Request::script(&scripts::LOOK, &[name.as_bytes()], &[]);
        let how = self.confirmed(true);
        let (answers, link) = self.routes.ask(name.as_bytes(), &request, how).await?;
        Ok((found(name, one_array(answers)?.into_iter(), id)?, link))
    }

    /// Writes the record if it is still `old`, and an audit entry with it. Else answers what it is now.
    #[allow(clippy::too_many_arguments, reason = "one call, and each is another matter")]
    pub(crate) async fn swap(
        self,
        name: &str,
        id: &OperationId,
        old: &[u8],
        pttl_max_ms: Option<i64>,
        new: &NewRow<'_>,
        audit: Option<(&str, &[u8], u32)>,
        repeatable: bool,
    ) -> Result<Result<std::sync::Arc<Link>, (Option<Found>, std::sync::Arc<Link>)>, Fault> {
        let pttl_max = pttl_max_ms.map(|ms| ms.to_string()).unwrap_or_default();
        let (value, ttl) = (new.encode(), new.ttl_ms.to_string());
        let mut keys = vec![name.as_bytes()];
        let mut args: Vec<&[u8]> = vec![old, pttl_max.as_bytes(), &value, ttl.as_bytes()];
        let keep = audit.map(|(_, _, keep)| keep.to_string());
        if let (Some((list, entry, _)), Some(keep)) = (audit, &keep) {
            keys.push(list.as_bytes());
            args.extend([entry, keep.as_bytes()]);
        }
        let request = Request::script(&scripts::SWAP, &keys, &args);
        // What is safe to be sent again is a claim.
        let how = if repeatable { self.of_claim(new.token) } else { self.confirmed(true) };
        let how = How { repeatable, ..how };
        let (answers, link) = self.routes.ask(name.as_bytes(), &request, how).await?;
        let answer = one_array(answers)?;
        if matches!(answer.first(), Some(Value::Int(1))) {
            return Ok(Ok(link));
        }
        Ok(Err((found(name, answer.into_iter().skip(1), id)?, link)))
    }

    /// A reply is only told when the replicas have it: told, it is acknowledged.
    pub(crate) async fn answer(
        self,
        name: &str,
        link: &Link,
        answer: ClaimOutcome,
    ) -> Result<ClaimOutcome, Fault> {
        if matches!(answer, ClaimOutcome::Completed(_)) {
            self.confirm_told(name, link).await.map_err(|fault| fault.with_sent(false))?;
        }
        Ok(answer)
    }

    /// Waits until the replicas have a record that somebody may have written on another connection.
    pub(crate) async fn confirm_told(self, name: &str, link: &Link) -> Result<(), Fault> {
        let replicas = self.routes.options.min_replicas;
        if replicas == 0 {
            return Ok(());
        }
        let touch = Request::script(&scripts::TOUCH, &[name.as_bytes()], &[]);
        let answers = link.ask(&touch, true, false).await?;
        if let Some(Value::ServerError(error)) = answers.first() {
            return Err(Fault::refused(error));
        }
        confirm(link, replicas).await
    }

    /// Without enough replicas a claim is taken back: nobody works on what a failover would forget.
    async fn confirm_claim(self, link: &Link, operation: &Operation, token: LeaseToken) -> Result<(), Fault> {
        let replicas = self.routes.options.min_replicas;
        if replicas == 0 {
            return Ok(());
        }
        let Err(fault) = confirm(link, replicas).await else { return Ok(()) };
        // Where a copy of it may still arrive this waits for it: else the caller goes on releasing.
        match self.release(operation, token).await {
            Ok(_) => Err(fault.with_sent(false)),
            Err(_) => Err(fault),
        }
    }

    pub(crate) fn may_write(self) -> Result<(), Fault> {
        match self.routes.options.purpose {
            Purpose::Look => Err(Fault::unfit("the store is open for looking alone")),
            Purpose::Work | Purpose::Operate => Ok(()),
        }
    }

    fn confirmed(self, replicated: bool) -> How {
        let replicated = replicated && self.routes.options.min_replicas > 0;
        How { replicated, repeatable: true, claim: None }
    }

    /// Behind a WAIT a copy of a claim can arrive late.
    fn of_claim(self, token: LeaseToken) -> How {
        let how = self.confirmed(true);
        How { claim: how.replicated.then_some(token), ..how }
    }

    /// How long a record without a reply lives. Where any retry may take it over nothing is lost with it; where it waits
    /// for somebody it must not go while he sleeps.
    fn ttl_without_reply_ms(self, request: &ClaimRequest) -> i64 {
        let lease_ms = whole_ms(request.lease);
        let hold_ms = match (self.hold_retention, request.on_lease_end) {
            (Some(hold), _) => whole_ms(hold),
            (None, OnLeaseEnd::Hold) => WEEK_MS,
            // Its owner must find it a little after its lease, too.
            (None, OnLeaseEnd::TakeOver) => lease_ms,
        };
        whole_ms(request.retention).max(hold_ms.saturating_add(lease_ms)).max(1)
    }

    pub(crate) fn hold_ms(self) -> i64 {
        self.hold_retention.map_or(WEEK_MS, whole_ms).max(1)
    }
}

/// What a script of an owner came to.
enum Owned {
    /// It did it; this is its answer.
    Done(Vec<Value>),
    /// It did nothing; this is the record, if there is one.
    Refused(Option<Box<Record>>),
}

pub(crate) async fn confirm(link: &Link, replicas: u32) -> Result<(), Fault> {
    let have = link.confirm().await.map_err(|fault| fault.with_sent(true))?;
    if have >= i64::from(replicas) {
        return Ok(());
    }
    let why = format!("{have} of {replicas} replicas confirmed it in time");
    Err(Fault::new(StoreErrorKind::Unavailable, why).with_sent(true))
}

fn new_row<'a>(operation: &'a Operation, request: &ClaimRequest, ttl_ms: i64, attempt: u32) -> NewRow<'a> {
    NewRow {
        state: b'P',
        on_lease_end: request.on_lease_end,
        attempt,
        token: request.token,
        fingerprint: *operation.fingerprint(),
        ttl_ms,
        lease_ms: whole_ms(request.lease),
        claimed_ms: 0,
        created_ms: 0,
        done: None,
        id: operation.id(),
        origin: operation.origin(),
    }
}

/// What a completion writes where its own record is gone.
fn completed_row<'a>(operation: &'a Operation, completion: &Completion) -> NewRow<'a> {
    NewRow {
        state: b'C',
        on_lease_end: OnLeaseEnd::Hold,
        attempt: completion.attempt,
        token: completion.token,
        fingerprint: *operation.fingerprint(),
        ttl_ms: 0,
        lease_ms: 0,
        claimed_ms: 0,
        created_ms: 0,
        done: None,
        id: operation.id(),
        origin: operation.origin(),
    }
}

fn stored(completion: &Completion, at_ms: i64, origin: Option<Origin>) -> StoredReply {
    StoredReply {
        reply: completion.reply.clone(),
        completed_at: from_unix_ms(at_ms),
        expires_at: from_unix_ms(at_ms.saturating_add(whole_ms(completion.retention))),
        remaining: completion.retention,
        origin,
    }
}

fn acquired(request: &ClaimRequest, attempt: u32) -> ClaimOutcome {
    ClaimOutcome::Acquired(Lease { token: request.token, attempt, duration: request.lease })
}

fn names_of(id: &OperationId) -> Vec<u8> {
    let parts = [id.scope.as_str(), id.key.as_str()];
    let lengths = parts.map(|part| u8::try_from(part.len()).expect("names are at most 255 bytes"));
    [&lengths, parts[0].as_bytes(), parts[1].as_bytes()].concat()
}

fn read(name: &str, value: &Bytes, id: &OperationId) -> Result<Row, Fault> {
    Row::decode(value).and_then(|row| row.of(id)).map_err(|why| Fault::unreadable(name, &why))
}

/// Reads value, time to live, and time.
pub(crate) fn found(
    name: &str,
    mut answer: impl Iterator<Item = Value>,
    id: &OperationId,
) -> Result<Option<Found>, Fault> {
    let (value, pttl_ms, now_ms) = match (answer.next(), answer.next(), answer.next()) {
        (Some(Value::Nil), ..) => return Ok(None),
        (Some(Value::BulkString(value)), Some(Value::Int(pttl_ms)), Some(Value::Int(now_ms))) => {
            (Bytes::from(value), pttl_ms, now_ms)
        }
        _ => return Err(Fault::strange("to a look at a record")),
    };
    let row = read(name, &value, id)?;
    if pttl_ms < 0 {
        return Err(Fault::unreadable(name, &crate::row::Unreadable::NoTtl));
    }
    let at = Moment { pttl_ms, now_ms };
    let record = row.record(at).map_err(|why| Fault::unreadable(name, &why))?;
    Ok(Some(Found { value, row, record, at }))
}

pub(crate) fn one_array(answers: Vec<Value>) -> Result<Vec<Value>, Fault> {
    match answers.into_iter().next() {
        Some(Value::Array(answer)) => Ok(answer),
        _ => Err(Fault::strange("to a script")),
    }
}

fn origin_of(text: &[u8]) -> Result<Option<Origin>, Fault> {
    let text = std::str::from_utf8(text).map_err(|_| Fault::strange("an origin that is no text"))?;
    match text {
        "" => Ok(None),
        text => Origin::new(text).map(Some).map_err(|_| Fault::strange("an origin that is none")),
    }
}

// The script and `decide` are two readings of one rule.
fn disagree() -> Fault {
    Fault::strange("a script refused what the state machine allows")
}
