//! An effect in Redis and its record, in one script.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use onlyonce_core::clock::from_unix_ms;
use onlyonce_core::{
    Acquire, ClaimOutcome, ClaimRequest, Decision, LeaseToken, OnLeaseEnd, OnceOutcome, Operation, Reply,
    State, StoreError, StoreErrorKind, StoredReply, decide,
};
use redis::{Script, Value};

use crate::claims::{Calls, Found, confirm, found, one_array};
use crate::error::Fault;
use crate::link::Link;
use crate::names::slot;
use crate::request::Request;
use crate::routes::How;
use crate::row::{NewRow, names, reply_tail, whole_ms};
use crate::store::RedisStore;

/// How often an effect may be overtaken by somebody else's change of its record before it is given up.
const OVERTAKEN_MAX: u32 = 100;

/// The caller's part of an effect, in Lua: a plan that reads and decides, and names the writes.
///
/// Redis does not roll a script back, so a script that fails half-way leaves what it wrote. A plan writes nothing: it is the
/// body of a function of `KEYS` and `ARGV` (the caller's own) whose `redis.call` only reads. It checks all that its writes
/// depend on (types, limits), and returns a table:
///
/// * `{status = …, body = …, writes = {{command, key, …}, …}}`: the effect and the reply, a success or a definitive
///   failure (then without writes, as a rule). Each write is to one of `KEYS`.
/// * `{transient = why}`: nothing happens and nothing is recorded; a retry runs.
///
/// The writes are then made one after the other, and the record with them. A plan that fails (an error of Lua, a key of
/// another type) changes nothing. A write that fails all the same leaves the outcome unknown on record, never free.
///
/// Numbers in Lua are exact up to 2^53.
///
/// ```
/// use onlyonce_store_redis::Plan;
///
/// let charge = Plan::new(r#"
///     local amount = tonumber(ARGV[1])
///     local balance = tonumber(redis.call('GET', KEYS[1]) or '0')
///     if not balance then return {transient = 'the balance is no number'} end
///     if balance < amount then return {status = 402, body = '{"error":"insufficient balance"}'} end
///     return {
///         status = 200,
///         body = string.format('{"charged":%d,"balance":%d}', amount, balance - amount),
///         writes = {{'DECRBY', KEYS[1], ARGV[1]}},
///     }
/// "#);
/// let effect = charge.effect().key("balance").arg("100");
/// ```
#[derive(Clone, Debug)]
pub struct Plan(Arc<Ready>);

#[derive(Debug)]
struct Ready {
    code: String,
    hash: String,
}

/// A plan with its keys and arguments, ready to run.
#[derive(Clone, Debug)]
pub struct Effect {
    plan: Plan,
    keys: Vec<Vec<u8>>,
    args: Vec<Vec<u8>>,
    head: Reply,
}

/// The options of [`RedisStore::once_with`].
#[derive(Clone, Copy, Debug)]
pub struct OnceOptions {
    /// How long the reply is kept. 24 hours by default.
    pub retention: Duration,
    /// Whether a record of the leased mode, left by a dead owner, may be taken over. It needs that record's leave too.
    pub on_lease_end: OnLeaseEnd,
    /// A takeover past this many attempts is not made. 5 by default.
    pub max_attempts: u32,
}

impl Plan {
    /// Takes a plan as it is; Redis compiles it when it first runs.
    pub fn new(lua: &str) -> Self {
        let code = [include_str!("lua/effect_head.lua"), lua, include_str!("lua/effect_tail.lua")].concat();
        let hash = Script::new(&code).get_hash().to_owned();
        Self(Arc::new(Ready { code, hash }))
    }

    /// Begins an effect of this plan.
    pub fn effect(&self) -> Effect {
        Effect { plan: self.clone(), keys: Vec::new(), args: Vec::new(), head: Reply::ok("") }
    }
}

impl Effect {
    /// Adds a key that the plan reads or writes, as `KEYS[1]` and so on.
    #[must_use]
    pub fn key(mut self, key: impl AsRef<[u8]>) -> Self {
        self.keys.push(key.as_ref().into());
        self
    }

    /// Adds an argument, as `ARGV[1]` and so on.
    #[must_use]
    pub fn arg(mut self, arg: impl AsRef<[u8]>) -> Self {
        self.args.push(arg.as_ref().into());
        self
    }

    /// The headers of the reply, whatever its status. The status and body given here are not used.
    #[must_use]
    pub fn headers_of(mut self, reply: &Reply) -> Self {
        self.head = Reply::ok("").with_headers(reply.headers().clone());
        self
    }
}

impl Default for OnceOptions {
    fn default() -> Self {
        Self {
            retention: Duration::from_secs(24 * 3600),
            on_lease_end: OnLeaseEnd::TakeOver,
            max_attempts: 5,
        }
    }
}

impl RedisStore {
    /// Has the effect of a plan once, in one script with its record.
    ///
    /// # Guarantees
    /// Effect and record are one step for everybody else, and in Redis's append-only file and replication too: a crash
    /// leaves both or neither. Of any number of calls one runs.
    ///
    /// # Errors
    /// [`StoreError`]; unless `may_have_applied()`, nothing happened; else ask again for the same operation: it is not run
    /// twice. [`StoreErrorKind::Unfit`] on a cluster when the keys are not in the slot of the record; see
    /// [`RedisStore::with_hash_tag`].
    ///
    /// # Cancellation
    /// It may have happened: ask again for the same operation.
    ///
    /// # Cost
    /// One round trip; the server does nothing else while the script runs.
    pub async fn once(&self, operation: &Operation, effect: &Effect) -> Result<OnceOutcome, StoreError> {
        self.once_with(operation, &OnceOptions::default(), effect).await
    }

    /// [`RedisStore::once`] with options.
    ///
    /// # Errors
    /// Those of [`RedisStore::once`].
    pub async fn once_with(
        &self,
        operation: &Operation,
        options: &OnceOptions,
        effect: &Effect,
    ) -> Result<OnceOutcome, StoreError> {
        let run = async {
            let name = self.names.record(operation.id());
            self.check_keys(&name, effect)?;
            let once = Once { calls: self.calls(), name, operation, options, effect, token: fresh_token()? };
            once.run().await
        };
        self.told("once", run.await)
    }

    /// On a cluster a script has the keys of one slot.
    fn check_keys(&self, name: &str, effect: &Effect) -> Result<(), Fault> {
        if effect.keys.iter().any(|key| key == name.as_bytes()) {
            return Err(Fault::unfit(format!("{name:?} is the name of the record itself")));
        }
        if !self.inner.routes.is_cluster() {
            return Ok(());
        }
        let its = slot(name.as_bytes());
        let Some(stray) = effect.keys.iter().find(|key| slot(key) != its) else { return Ok(()) };
        let key = String::from_utf8_lossy(stray);
        Err(Fault::unfit(format!(
            "on a cluster an effect and its record are one script only in one slot: {key:?} is in slot {}, its \
             record {name:?} in slot {its}. Ask the handle of `with_hash_tag` with the hash tag of the key, the part \
             between its braces",
            slot(stray)
        )))
    }
}

/// One call of `once`.
struct Once<'a> {
    calls: Calls<'a>,
    name: String,
    operation: &'a Operation,
    options: &'a OnceOptions,
    effect: &'a Effect,
    token: LeaseToken,
}

/// What the script came to.
enum Came {
    Ran(StoredReply),
    Nothing(String),
    Unknown(SystemTime),
    // The record is not what it was thought to be.
    Found(Option<Box<Found>>),
}

impl Once<'_> {
    async fn run(&self) -> Result<OnceOutcome, Fault> {
        // Most operations are new: the first try expects no record.
        let (mut found, mut answered_on): (Option<Box<Found>>, Option<Arc<Link>>) = (None, None);
        for _ in 0..OVERTAKEN_MAX {
            let takeover_now = match &found {
                Some(found) => {
                    let lease = Duration::from_millis(u64::try_from(found.row.lease_ms).unwrap_or(0));
                    self.calls.routes.unbroken_for(self.name.as_bytes(), lease).await
                }
                None => true,
            };
            let request = ClaimRequest {
                token: self.token,
                lease: Duration::ZERO,
                retention: self.options.retention,
                on_lease_end: self.options.on_lease_end,
                takeover_now,
                max_attempts: self.options.max_attempts,
            };
            if let (Some(its), Some(link)) = (&found, &answered_on)
                && its.row.token == self.token
            {
                self.calls.confirm_told(&self.name, link).await?;
                return Ok(self.own_end(its));
            }
            let record = found.as_ref().map(|found| &found.record);
            let (attempt, how) = match decide(record, self.operation.fingerprint(), &request) {
                Decision::Answer(answer) => return self.answered(answer, answered_on.as_deref()).await,
                Decision::Acquire { attempt, how } => (attempt, how),
            };
            let (came, link) = self.send(found.as_deref(), attempt, how).await?;
            match came {
                Came::Ran(stored) => {
                    confirm(&link, self.calls.routes.options.min_replicas).await?;
                    return Ok(OnceOutcome::Ran(stored));
                }
                Came::Nothing(why) => return Ok(OnceOutcome::Transient(why.into())),
                Came::Unknown(since) => {
                    let origin = self.operation.origin().cloned();
                    return Ok(OnceOutcome::Unknown { since, origin });
                }
                Came::Found(now) => (found, answered_on) = (now, Some(link)),
            }
        }
        Err(Fault::new(StoreErrorKind::Conflict, "the record changed again and again"))
    }

    async fn send(
        &self,
        found: Option<&Found>,
        attempt: u32,
        how: Acquire,
    ) -> Result<(Came, Arc<Link>), Fault> {
        let old = found.map(|found| found.value.clone()).unwrap_or_default();
        let pttl_max = match (how, found) {
            (Acquire::TakeOver, Some(found)) => found.row.pttl_at_lease_end_ms().to_string(),
            (Acquire::Fresh, Some(found)) if found.row.is_expired(found.at) => "0".into(),
            _ => String::new(),
        };
        let created_ms = match (how, found) {
            (Acquire::TakeOver, Some(found)) => found.row.created_ms + found.row.past_ms(found.at),
            _ => 0,
        };
        let new = NewRow {
            state: b'U',
            on_lease_end: self.options.on_lease_end,
            attempt,
            token: self.token,
            fingerprint: *self.operation.fingerprint(),
            ttl_ms: 0,
            lease_ms: 0,
            claimed_ms: 0,
            created_ms,
            done: None,
            id: self.operation.id(),
            origin: self.operation.origin(),
        };
        let (mut all_names, mut head) = (Vec::new(), Vec::new());
        names(&mut all_names, self.operation.id(), self.operation.origin());
        reply_tail(&mut head, &self.effect.head);
        let retention_ms = whole_ms(self.options.retention).max(1);
        let hold_ms = self.calls.hold_ms().max(retention_ms);
        let (retention, hold, created) =
            (retention_ms.to_string(), hold_ms.to_string(), created_ms.to_string());
        let owner = new.owner();
        let mut args: Vec<&[u8]> = vec![
            &old,
            pttl_max.as_bytes(),
            &owner,
            &all_names,
            &head,
            retention.as_bytes(),
            hold.as_bytes(),
            created.as_bytes(),
        ];
        args.extend(self.effect.args.iter().map(Vec::as_slice));
        let mut keys: Vec<&[u8]> = vec![self.name.as_bytes()];
        keys.extend(self.effect.keys.iter().map(Vec::as_slice));
        let Ready { code, hash } = &*self.effect.plan.0;
        let request = Request::code(hash, code, &keys, &args);
        // Sent again after a lost answer it finds its own record.
        let replicated = self.calls.routes.options.min_replicas > 0;
        let how = How { replicated, repeatable: true, claim: None };
        let (answers, link) = self.calls.routes.ask(self.name.as_bytes(), &request, how).await?;
        Ok((self.came(one_array(answers)?, retention_ms)?, link))
    }

    fn came(&self, answer: Vec<Value>, retention_ms: i64) -> Result<Came, Fault> {
        Ok(match answer.as_slice() {
            [Value::Int(1), Value::Int(at_ms), Value::Int(status), Value::BulkString(body)] => {
                let status = u16::try_from(*status).map_err(|_| Fault::strange("a status out of range"))?;
                Came::Ran(StoredReply {
                    reply: Reply::new(status, body.clone()).with_headers(self.effect.head.headers().clone()),
                    completed_at: from_unix_ms(*at_ms),
                    expires_at: from_unix_ms(at_ms.saturating_add(retention_ms)),
                    remaining: self.options.retention,
                    origin: self.operation.origin().cloned(),
                })
            }
            [Value::Int(2), why] => Came::Nothing(text(why)),
            [Value::Int(3), why, Value::Int(at_ms)] => {
                tracing::error!(
                    why = text(why),
                    record = self.name,
                    "a write of an effect failed half-way; its outcome is unknown, and somebody must look"
                );
                Came::Unknown(from_unix_ms(*at_ms))
            }
            [Value::Int(0), ..] => {
                let found = found(&self.name, answer.into_iter().skip(1), self.operation.id())?;
                Came::Found(found.map(Box::new))
            }
            _ => return Err(Fault::strange("to an effect")),
        })
    }

    /// The record is this very call's: its first answer was lost.
    fn own_end(&self, found: &Found) -> OnceOutcome {
        match &found.record.state {
            State::Completed { stored, .. } => OnceOutcome::Ran(stored.clone()),
            State::Unknown { since, .. } => {
                OnceOutcome::Unknown { since: *since, origin: found.record.origin.clone() }
            }
            State::InProgress { .. } | State::Freed { .. } => {
                OnceOutcome::Unknown { since: from_unix_ms(found.at.now_ms), origin: None }
            }
        }
    }

    async fn answered(&self, answer: ClaimOutcome, link: Option<&Link>) -> Result<OnceOutcome, Fault> {
        let answer = match link {
            Some(link) => self.calls.answer(&self.name, link, answer).await?,
            None => answer,
        };
        Ok(match answer {
            ClaimOutcome::Completed(stored) => OnceOutcome::Replayed(stored),
            ClaimOutcome::InProgress { lease_left, age, origin } => {
                OnceOutcome::InProgress { lease_left, age, origin }
            }
            ClaimOutcome::Mismatch { stored, origin } => OnceOutcome::Mismatch { stored, origin },
            ClaimOutcome::Unknown { since, origin } => OnceOutcome::Unknown { since, origin },
            ClaimOutcome::Acquired(_) => return Err(Fault::strange("a decision that is no answer")),
        })
    }
}

fn text(value: &Value) -> String {
    match value {
        Value::BulkString(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        _ => "no reason given".into(),
    }
}

fn fresh_token() -> Result<LeaseToken, Fault> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes)
        .map_err(|error| Fault::new(StoreErrorKind::Internal, format!("no random bytes: {error}")))?;
    Ok(LeaseToken::from_bytes(bytes))
}
