//! A claim and its completion inside a transaction of the caller's, whichever driver that is of.

use std::time::Duration;

use onlyonce_batch::Turns;
use onlyonce_core::{
    Acquire, Clock, Decision, LeaseToken, Operation, Origin, Reply, StoreErrorKind, StoredReply, SystemClock,
    TxClaim, TxOptions, decide,
};
use tokio::time::timeout;

use crate::error::Fault;
use crate::link::{Cells, Link, Value};
use crate::row::{Micros, PLAIN_COLUMNS, Row, lock_number, micros, stored};
use crate::schema::Place;
use crate::session::SYNCHRONOUS;

/// The statements of the transactional mode.
///
/// What they look for they find by its place (`ctid`), which a transaction's own row keeps, or by a unique index as it
/// inserts: under SERIALIZABLE a search would be a read of a whole page of keys, and each neighbour's insert a conflict.
#[derive(Debug)]
pub(crate) struct Inside {
    table: String,
    begin: String,
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
    Nothing,
    /// Begin what a definitive failure takes back.
    Work,
}

/// Takes back what was done since the claim, and with it the claim's own settings.
const UNDO: &str = "ROLLBACK TO SAVEPOINT onlyonce_claim; RELEASE SAVEPOINT onlyonce_claim";

/// Takes back what the work did.
pub(crate) const UNDO_WORK: &str = "ROLLBACK TO SAVEPOINT onlyonce_work";

const LOCK: &str = "SELECT pg_advisory_xact_lock($1)";

impl Then {
    // The settings stay for the rest of the transaction unless they are set back before the savepoint goes.
    fn end(self) -> &'static str {
        match self {
            Self::Nothing => {
                "SELECT set_config('lock_timeout', current_setting('onlyonce.lock_timeout'), true); \
                 RELEASE SAVEPOINT onlyonce_claim"
            }
            Self::Work => {
                "SELECT set_config('lock_timeout', current_setting('onlyonce.lock_timeout'), true); \
                 RELEASE SAVEPOINT onlyonce_claim; SAVEPOINT onlyonce_work"
            }
        }
    }
}

impl Inside {
    pub(crate) fn new(place: &Place, store_id: [u8; 16]) -> Self {
        let (table, meta) = (place.keys(), place.meta());
        let id: String = store_id.iter().map(|byte| format!("{byte:02x}")).collect();
        Self {
            // A database without this store's row fails by the division. One statement: each costs its parsing.
            begin: format!(
                "SAVEPOINT onlyonce_claim; \
                 SELECT 1 / (SELECT count(*) FROM {meta} WHERE store_id = '{id}'), \
                    set_config('synchronous_commit', {SYNCHRONOUS}, true), \
                    set_config('onlyonce.lock_timeout', current_setting('lock_timeout'), true), \
                    set_config('lock_timeout', '"
            ),
            claim: format!(
                "INSERT INTO {table} AS t (scope, key, request_hash, status, locked_until, created_at, claimed_at, token,
                    attempt, on_lease_end, origin)
                 SELECT $1, $2, $3, 'in_progress', clock_timestamp(), clock_timestamp(), clock_timestamp(),
                    encode($4, 'hex')::uuid, 1, 'hold', $5
                 WHERE pg_try_advisory_xact_lock($6) ON CONFLICT (scope, key) DO NOTHING RETURNING t.ctid::text"
            ),
            read: format!("SELECT {PLAIN_COLUMNS} FROM {table} AS t WHERE t.scope = $1 AND t.key = $2"),
            put: format!(
                "INSERT INTO {table} AS t (scope, key, request_hash, status, locked_until, created_at, claimed_at, token,
                    attempt, on_lease_end, origin)
                 VALUES ($1, $2, $3, 'in_progress', clock_timestamp(),
                    coalesce(timestamptz 'epoch' + $6 * interval '1 microsecond', clock_timestamp()), clock_timestamp(),
                    encode($4, 'hex')::uuid, $7, 'hold', $5)
                 ON CONFLICT (scope, key) DO UPDATE SET request_hash = excluded.request_hash, status = excluded.status,
                    response_code = NULL, response_headers = NULL, response_body = NULL,
                    locked_until = excluded.locked_until, created_at = excluded.created_at,
                    claimed_at = excluded.claimed_at, completed_at = NULL, expires_at = NULL, token = excluded.token,
                    attempt = excluded.attempt, on_lease_end = excluded.on_lease_end, origin = excluded.origin
                 RETURNING t.ctid::text"
            ),
            complete: format!(
                "UPDATE {table} AS t SET status = 'completed', response_code = $3::int4, response_headers = $4,
                    response_body = $5, completed_at = clock_timestamp(),
                    expires_at = clock_timestamp() + $6 * interval '1 microsecond'
                 WHERE t.ctid = $1::tid AND t.token = encode($2, 'hex')::uuid AND t.status IN ('in_progress', 'unknown')
                 RETURNING (extract(epoch FROM t.completed_at) * 1000000)::int8,
                    (extract(epoch FROM t.expires_at) * 1000000)::int8"
            ),
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
        let claimed = match timeout(limit, claim.run(link, turns, then)).await {
            Ok(claimed) => claimed,
            Err(_) => return Err(Fault::silence(limit).before_sending()),
        };
        let fault = match claimed {
            Ok(claimed) => return Ok(claimed),
            Err(fault) if fault.breaks_connection() => return Err(fault),
            Err(fault) => fault,
        };
        // Where the caller's transaction had failed before there is no savepoint: the first fault tells more.
        let _ = timeout(patience, link.script(UNDO)).await;
        match fault.code() {
            _ if fault.is_conflict() => Ok(TxClaim::RetryTransaction),
            _ if onlyonce_batch::Fault::is_lock_wait(&fault) => Ok(TxClaim::busy()),
            Some("22012" | "42P01" | "3F000" | "42703") => Err(Fault::new(
                StoreErrorKind::Unfit,
                "the connection is to another database than the store's",
            )),
            _ => Err(fault),
        }
    }

    /// Stores the reply; `before` is run first.
    pub(crate) async fn complete<L: Link>(
        &self,
        link: &mut L,
        before: &str,
        right: &Right,
        operation: &Operation,
        reply: &Reply,
        retention: Duration,
    ) -> Result<StoredReply, Fault> {
        if !before.is_empty() {
            // Alone: outside of a transaction what is sent behind a script that fails would be done all the same.
            link.script(before).await?;
        }
        let head = reply.encode_head();
        let values = [
            Value::Text(&right.place),
            Value::Bytes(right.token.as_bytes()),
            Value::Int(reply.status().into()),
            Value::Bytes(&head),
            Value::Bytes(reply.body()),
            Value::Int(micros(retention)),
        ];
        let rows = link.ask("", &self.complete, &values, "").await?;
        let time = |row: &L::Row, column| row.int(column).flatten().map(Micros);
        let times = rows.first().map(|row| time(row, 0).zip(time(row, 1)));
        match times {
            Some(Some((completed, expires))) => Ok(stored(reply, completed, expires, operation.origin())),
            Some(None) => Err(Fault::internal("a completion without its times")),
            None => Err(Fault::new(StoreErrorKind::Conflict, "the transaction of the claim was rolled back")),
        }
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
        if let Some(right) = self.insert(link, &self.begin(self.options.wait), token, then.end()).await? {
            return Ok(TxClaim::Acquired(right));
        }
        // A stored reply is given whoever holds the lock.
        let found = self.read(link).await?;
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
        let begin = self.begin(self.options.wait.saturating_sub(waited));
        link.ask(&begin, LOCK, &[Value::Int(self.lock)], "").await?;
        // From here on nobody changes the record. Each statement sees what was committed before it, or fails: under
        // REPEATABLE READ the insert meets what the snapshot is too old for.
        if let Some(right) = self.insert(link, "", token, "").await? {
            link.script(then.end()).await?;
            return Ok(TxClaim::Acquired(right));
        }
        let found = self.read(link).await?;
        let (attempt, how) = match self.decide(found.as_ref(), token) {
            Decision::Acquire { attempt, how } => (attempt, how),
            Decision::Answer(answer) => {
                link.script(then.end()).await?;
                let right = |_| Right { token, attempt: 0, place: String::new() };
                return Ok(TxClaim::of(answer, right));
            }
        };
        let created = found.filter(|_| how != Acquire::Fresh).map(|row| row.created.0);
        let place = self.put(link, token, attempt, created, then).await?;
        Ok(TxClaim::Acquired(Right { token, attempt, place }))
    }

    fn decide(&self, found: Option<&Row>, token: LeaseToken) -> Decision {
        let record = found.map(|row| &row.record);
        decide(record, self.operation.fingerprint(), &self.options.request(token))
    }

    fn begin(&self, wait: Duration) -> String {
        // Zero would be without end.
        format!("{}{}ms', true)", self.of.begin, wait.as_millis().clamp(1, i32::MAX as u128))
    }

    async fn insert<L: Link>(
        &self,
        link: &mut L,
        before: &str,
        token: LeaseToken,
        after: &str,
    ) -> Result<Option<Right>, Fault> {
        let hash = self.operation.fingerprint().to_string();
        let values = [
            Value::Text(self.operation.scope().as_str()),
            Value::Text(self.operation.key().as_str()),
            Value::Text(&hash),
            Value::Bytes(token.as_bytes()),
            Value::MaybeText(self.operation.origin().map(Origin::as_str)),
            Value::Int(self.lock),
        ];
        let rows = link.ask(before, &self.of.claim, &values, after).await?;
        rows.first().map(|row| Ok(Right { token, attempt: 1, place: place(row)? })).transpose()
    }

    async fn read<L: Link>(&self, link: &mut L) -> Result<Option<Row>, Fault> {
        let values =
            [Value::Text(self.operation.scope().as_str()), Value::Text(self.operation.key().as_str())];
        let rows = link.ask("", &self.of.read, &values, "").await?;
        rows.first().map(Row::read_plain).transpose()
    }

    async fn put<L: Link>(
        &self,
        link: &mut L,
        token: LeaseToken,
        attempt: u32,
        created: Option<i64>,
        then: Then,
    ) -> Result<String, Fault> {
        let hash = self.operation.fingerprint().to_string();
        let values = [
            Value::Text(self.operation.scope().as_str()),
            Value::Text(self.operation.key().as_str()),
            Value::Text(&hash),
            Value::Bytes(token.as_bytes()),
            Value::MaybeText(self.operation.origin().map(Origin::as_str)),
            Value::MaybeInt(created),
            Value::Int(attempt.into()),
        ];
        let rows = link.ask("", &self.of.put, &values, then.end()).await?;
        place(rows.first().ok_or_else(|| Fault::internal("a record that was just written is not there"))?)
    }
}

fn place(row: &impl Cells) -> Result<String, Fault> {
    row.text(0).flatten().map(str::to_owned).ok_or_else(|| Fault::internal("a row without its place"))
}

fn fresh_token() -> Result<LeaseToken, Fault> {
    let mut token = [0; 16];
    getrandom::fill(&mut token).map_err(|error| Fault::internal("no random bytes").with_source(error))?;
    Ok(LeaseToken::from_bytes(token))
}
