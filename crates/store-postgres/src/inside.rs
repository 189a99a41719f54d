//! A claim and its completion inside a transaction of the caller's, whichever driver that is of.

use std::time::Duration;

use onlyonce_batch::Turns;
use onlyonce_core::{
    Acquire, Clock, Decision, LeaseToken, Operation, Origin, Reply, StoreErrorKind, StoredReply, SystemClock,
    TxClaim, TxOptions, decide,
};
use tokio::time::timeout;

use crate::error::Fault;
use crate::functions::{self, ANOTHER_STORE, CLAIM_GONE};
use crate::link::{Cells, Link, Value};
use crate::row::{Micros, PLAIN_COLUMNS, Row, lock_number, micros, stored};
use crate::schema::Place;

/// The statements of the transactional mode.
///
/// What they look for they find by its place (`ctid`), which a transaction's own row keeps, or by a unique index as it
/// inserts: under SERIALIZABLE a search would be a read of a whole page of keys, and each neighbour's insert a conflict.
/// The usual ones are [`functions`]; the others are parsed and planned each time.
#[derive(Debug)]
pub(crate) struct Inside {
    table: String,
    store_id: String,
    claim: String,
    read: String,
    put: String,
    complete: String,
}

/// The right to do the work, as a record holds it.
#[derive(Debug)]
pub(crate) struct Right {
    pub(crate) token: LeaseToken,
    pub(crate) attempt: u32,
    /// Where the row is.
    place: String,
}

/// What to do once the claim is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Then {
    /// Leave the transaction as it was, whatever was answered: it is the caller's to go on with.
    Nothing,
    /// Begin what a definitive failure takes back. Where there is no work to do the transaction is taken back whole.
    Work,
}

/// Before and after what may fail in a transaction that is to go on.
const SAVE: &str = "SAVEPOINT onlyonce_claim";
const RELEASE: &str = "RELEASE SAVEPOINT onlyonce_claim";

/// Takes back what was done since the claim, and with it the claim's own settings.
const UNDO: &str = "ROLLBACK TO SAVEPOINT onlyonce_claim; RELEASE SAVEPOINT onlyonce_claim";

const SAVE_WORK: &str = "SAVEPOINT onlyonce_work";

/// Takes back what the work did.
pub(crate) const UNDO_WORK: &str = "ROLLBACK TO SAVEPOINT onlyonce_work";

const LOCK: &str = "SELECT pg_advisory_xact_lock($1)";

impl Then {
    // Around the usual claim, which waits for nobody and sets its settings back by itself.
    fn around(self) -> (&'static str, &'static str) {
        match self {
            Self::Nothing => (SAVE, RELEASE),
            Self::Work => ("", SAVE_WORK),
        }
    }

    // Before what waits. Zero would be without end.
    fn begin_waiting(wait: Duration) -> String {
        format!(
            "{SAVE}; SELECT set_config('onlyonce.lock_timeout', current_setting('lock_timeout'), true), \
             set_config('lock_timeout', '{}ms', true)",
            milliseconds(wait)
        )
    }

    // The settings stay for the rest of the transaction unless they are set back before the savepoint goes.
    fn end_waiting(self) -> String {
        let end = format!(
            "SELECT set_config('lock_timeout', current_setting('onlyonce.lock_timeout'), true); {RELEASE}"
        );
        match self {
            Self::Nothing => end,
            Self::Work => format!("{end}; {SAVE_WORK}"),
        }
    }
}

impl Inside {
    pub(crate) fn new(place: &Place, store_id: [u8; 16]) -> Self {
        let table = place.keys();
        Self {
            store_id: hex(&store_id),
            claim: functions::call_claim(place),
            read: format!("SELECT {PLAIN_COLUMNS} FROM {table} AS t WHERE t.scope = $1 AND t.key = $2"),
            put: format!(
                "INSERT INTO {table} AS t (scope, key, request_hash, status, locked_until, created_at, claimed_at, token,
                    attempt, on_lease_end, origin)
                 VALUES ($1, $2, $3, 'in_progress', clock_timestamp(),
                    coalesce(timestamptz 'epoch' + $6 * interval '1 microsecond', clock_timestamp()), clock_timestamp(),
                    $4::uuid, $7, 'hold', $5)
                 ON CONFLICT (scope, key) DO UPDATE SET request_hash = excluded.request_hash, status = excluded.status,
                    response_code = NULL, response_headers = NULL, response_body = NULL,
                    locked_until = excluded.locked_until, created_at = excluded.created_at,
                    claimed_at = excluded.claimed_at, completed_at = NULL, expires_at = NULL, token = excluded.token,
                    attempt = excluded.attempt, on_lease_end = excluded.on_lease_end, origin = excluded.origin
                 RETURNING t.ctid::text"
            ),
            complete: functions::call_complete(place),
            table,
        }
    }

    /// Claims in `link`, with what the claim needs undone or set back when it is answered. `patience` bounds each
    /// exchange beside the waiting.
    pub(crate) async fn claim<L: Link>(
        &self,
        link: &mut L,
        turns: &Turns<i64>,
        operation: &Operation,
        options: &TxOptions,
        patience: Duration,
        then: Then,
    ) -> Result<TxClaim<Right>, Fault> {
        let limit = options.wait.saturating_mul(2).saturating_add(patience.saturating_mul(3));
        let claim = Claim { of: self, operation, options, lock: lock_number(&self.table, operation.id()) };
        let fault = match timeout(limit, claim.run(link, turns, then)).await {
            Ok(Ok(claimed)) => return Ok(claimed),
            Ok(Err(fault)) => fault,
            Err(_) => return Err(Fault::silence(limit).before_sending()),
        };
        if then == Then::Nothing {
            // Where the connection broke, or the caller's transaction had failed before, there is no savepoint: the first
            // fault tells more.
            let _ = timeout(patience, link.script(UNDO)).await;
        }
        match fault.code() {
            _ if fault.is_conflict() => Ok(TxClaim::RetryTransaction),
            _ if onlyonce_batch::Fault::is_lock_wait(&fault) => Ok(TxClaim::busy()),
            Some(ANOTHER_STORE | "42883" | "42P01" | "3F000" | "42703") => Err(Fault::new(
                StoreErrorKind::Unfit,
                "the connection is to another database than the store's",
            )),
            _ => Err(fault),
        }
    }

    /// What stores the reply.
    pub(crate) fn completion<'a>(
        &'a self,
        right: &'a Right,
        reply: &'a Reply,
        retention: Duration,
    ) -> Completion<'a> {
        let (head, token) = (reply.encode_head(), hex(right.token.as_bytes()));
        Completion { statement: &self.complete, right, reply, retention, head, token }
    }
}

/// One completion: a statement and its values.
#[derive(Debug)]
pub(crate) struct Completion<'a> {
    pub(crate) statement: &'a str,
    right: &'a Right,
    reply: &'a Reply,
    retention: Duration,
    head: Vec<u8>,
    token: String,
}

impl Completion<'_> {
    pub(crate) fn values(&self) -> [Value<'_>; 6] {
        [
            Value::Text(&self.right.place),
            Value::Text(&self.token),
            Value::Int(self.reply.status().into()),
            Value::Bytes(&self.head),
            Value::Bytes(self.reply.body()),
            Value::Int(micros(self.retention)),
        ]
    }

    /// What its answer says.
    pub(crate) fn answered<R: Cells>(
        &self,
        rows: Result<Vec<R>, Fault>,
        operation: &Operation,
    ) -> Result<StoredReply, Fault> {
        let rows = match rows {
            Err(fault) if fault.code() == Some(CLAIM_GONE) => {
                return Err(Fault::new(
                    StoreErrorKind::Conflict,
                    "the transaction of the claim was rolled back",
                ));
            }
            rows => rows?,
        };
        let moment = rows.first().and_then(|row| row.int(0)).flatten().map(Micros);
        let completed = moment.ok_or_else(|| Fault::internal("a completion without its time"))?;
        Ok(stored(self.reply, completed, completed.plus(self.retention), operation.origin()))
    }
}

/// One claim.
struct Claim<'a> {
    of: &'a Inside,
    operation: &'a Operation,
    options: &'a TxOptions,
    lock: i64,
}

impl Claim<'_> {
    async fn run<L: Link>(
        &self,
        link: &mut L,
        turns: &Turns<i64>,
        then: Then,
    ) -> Result<TxClaim<Right>, Fault> {
        let started = SystemClock.boot();
        let token = fresh_token()?;
        // The usual case: a new key, which nobody has. Waits for nobody.
        if let Some(right) = self.insert(link, token, self.options.wait, then.around()).await? {
            return Ok(TxClaim::Acquired(right));
        }
        // A stored reply is given whoever holds the lock.
        let around = if then == Then::Nothing { (SAVE, RELEASE) } else { ("", "") };
        let found = self.read(link, around).await?;
        if let Decision::Answer(answer) = self.decide(found.as_ref(), token) {
            return Ok(TxClaim::of(answer, |lease| Right {
                token,
                attempt: lease.attempt,
                place: String::new(),
            }));
        }
        // Whoever waits at the server for this process waits for all of it.
        let Some(_turn) = turns.take(self.lock, self.options.wait).await else { return Ok(TxClaim::busy()) };
        let waited = SystemClock.boot().saturating_sub(started);
        let left = self.options.wait.saturating_sub(waited);
        let (begin, end) = (Then::begin_waiting(left), then.end_waiting());
        link.ask(&begin, LOCK, &[Value::Int(self.lock)], "").await?;
        // From here on nobody changes the record. Each statement sees what was committed before it, or fails: under
        // REPEATABLE READ the insert meets what the snapshot is too old for.
        if let Some(right) = self.insert(link, token, left, ("", "")).await? {
            link.script(&end).await?;
            return Ok(TxClaim::Acquired(right));
        }
        let found = self.read(link, ("", "")).await?;
        let (attempt, how) = match self.decide(found.as_ref(), token) {
            Decision::Acquire { attempt, how } => (attempt, how),
            Decision::Answer(answer) => {
                link.script(&end).await?;
                let right = |_| Right { token, attempt: 0, place: String::new() };
                return Ok(TxClaim::of(answer, right));
            }
        };
        let created = found.filter(|_| how != Acquire::Fresh).map(|row| row.created.0);
        let place = self.put(link, token, attempt, created, &end).await?;
        Ok(TxClaim::Acquired(Right { token, attempt, place }))
    }

    fn decide(&self, found: Option<&Row>, token: LeaseToken) -> Decision {
        let record = found.map(|row| &row.record);
        decide(record, self.operation.fingerprint(), &self.options.request(token))
    }

    async fn insert<L: Link>(
        &self,
        link: &mut L,
        token: LeaseToken,
        wait: Duration,
        (before, after): (&str, &str),
    ) -> Result<Option<Right>, Fault> {
        let (hash, token_hex) = (self.operation.fingerprint().to_string(), hex(token.as_bytes()));
        let values = [
            Value::Text(&self.of.store_id),
            Value::Int(milliseconds(wait)),
            Value::Int(self.lock),
            Value::Text(self.operation.scope().as_str()),
            Value::Text(self.operation.key().as_str()),
            Value::Text(&hash),
            Value::Text(&token_hex),
            Value::MaybeText(self.operation.origin().map(Origin::as_str)),
        ];
        let rows = link.ask(before, &self.of.claim, &values, after).await?;
        let place = rows.first().and_then(|row| row.text(0)).ok_or_else(no_place)?;
        Ok(place.map(|place| Right { token, attempt: 1, place: place.to_owned() }))
    }

    async fn read<L: Link>(&self, link: &mut L, (before, after): (&str, &str)) -> Result<Option<Row>, Fault> {
        let values =
            [Value::Text(self.operation.scope().as_str()), Value::Text(self.operation.key().as_str())];
        let rows = link.ask(before, &self.of.read, &values, after).await?;
        rows.first().map(Row::read_plain).transpose()
    }

    async fn put<L: Link>(
        &self,
        link: &mut L,
        token: LeaseToken,
        attempt: u32,
        created: Option<i64>,
        after: &str,
    ) -> Result<String, Fault> {
        let (hash, token) = (self.operation.fingerprint().to_string(), hex(token.as_bytes()));
        let values = [
            Value::Text(self.operation.scope().as_str()),
            Value::Text(self.operation.key().as_str()),
            Value::Text(&hash),
            Value::Text(&token),
            Value::MaybeText(self.operation.origin().map(Origin::as_str)),
            Value::MaybeInt(created),
            Value::Int(attempt.into()),
        ];
        let rows = link.ask("", &self.of.put, &values, after).await?;
        rows.first().and_then(|row| row.text(0)).flatten().map(str::to_owned).ok_or_else(no_place)
    }
}

fn no_place() -> Fault {
    Fault::internal("a row without its place")
}

// Zero would be without end.
fn milliseconds(wait: Duration) -> i64 {
    wait.as_millis().clamp(1, i32::MAX as u128) as i64
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn fresh_token() -> Result<LeaseToken, Fault> {
    let mut token = [0; 16];
    getrandom::fill(&mut token).map_err(|error| Fault::internal("no random bytes").with_source(error))?;
    Ok(LeaseToken::from_bytes(token))
}
