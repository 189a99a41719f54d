//! The operator's side. A record and its audit entry are written by one script, in one slot of a cluster; each slot keeps
//! the newest 10 000 entries.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use onlyonce_core::clock::{from_unix_ms, unix_ms};
use onlyonce_core::{
    AuditEntry, ClaimOutcome, ClaimRequest, Key, LeaseToken, ListPage, ListQuery, OnLeaseEnd, OperationId,
    OperatorAction, OperatorDecision, OperatorOutcome, RecordView, Reply, Scope, StateName, Store,
    StoreAdmin, StoreError, StoreErrorKind, StoreStats, Target, decide_operator, probe_operation,
};
use redis::{Cmd, Value};

use crate::claims::{Calls, Found};
use crate::error::Fault;
use crate::node::Node;
use crate::request::Request;
use crate::row::{Done, HEAD_BYTES_MAX, Moment, NewRow, Row, Unreadable, whole_ms};
use crate::store::RedisStore;

/// Names that one SCAN looks at.
const SCAN_COUNT: u32 = 1000;
const AUDIT_ENTRIES_MAX: u32 = 10_000;
/// Records that cannot be read, named in one warning.
const BAD_NAMED_MAX: usize = 10;
const PROBE_LEASE: Duration = Duration::from_secs(1);
/// How often an operator's change may be overtaken before it is given up.
const OVERTAKEN_MAX: u32 = 100;

#[async_trait]
impl StoreAdmin for RedisStore {
    async fn show(&self, id: &OperationId) -> Result<Option<RecordView>, StoreError> {
        let show = async {
            let name = self.names.record(id);
            let (found, _) = self.calls().look(&name, id).await?;
            let Some(Found { row, at, .. }) = found.filter(|found| !found.row.is_expired(found.at)) else {
                return Ok(None);
            };
            row.view(at, true).map(Some).map_err(|why| Fault::unreadable(&name, &why))
        };
        self.told("show", show.await)
    }

    /// Looks at every key of the prefix, on every master of a cluster.
    async fn list(&self, query: &ListQuery) -> Result<ListPage, StoreError> {
        self.told("list", self.list_all(query).await)
    }

    async fn resolve(
        &self,
        id: &OperationId,
        reply: &Reply,
        retention: Duration,
        action: &OperatorAction,
    ) -> Result<OperatorOutcome, StoreError> {
        let change = Change { state: b'C', ttl_ms: whole_ms(retention), reply: Some(reply) };
        let resolved = self.operate("resolve", id, action, change);
        self.told("resolve", resolved.await)
    }

    async fn free(&self, id: &OperationId, action: &OperatorAction) -> Result<OperatorOutcome, StoreError> {
        let change = Change { state: b'F', ttl_ms: self.calls().hold_ms(), reply: None };
        let freed = self.operate(action.freeing(), id, action, change);
        self.told("release", freed.await)
    }

    /// Looks at every key of the prefix, on every master of a cluster.
    async fn stats(&self) -> Result<StoreStats, StoreError> {
        let count = async {
            let mut stats = StoreStats { bytes: Some(0), ..StoreStats::default() };
            // A scan may come by a key twice, and a slot that moves is on two nodes.
            let mut seen = BTreeSet::new();
            self.scan(None, |found| {
                if !seen.insert(found.row.id.clone()) {
                    return Ok(());
                }
                let view = found.row.view(found.at, false)?;
                let count = match view.state {
                    StateName::InProgress => &mut stats.in_progress,
                    StateName::Completed => &mut stats.completed,
                    StateName::Unknown => &mut stats.unknown,
                    StateName::Freed => &mut stats.freed,
                };
                *count += 1;
                stats.bytes = stats.bytes.map(|bytes| bytes + found.bytes);
                Ok(())
            })
            .await?;
            Ok(stats)
        };
        self.told("stats", count.await)
    }

    /// Writes a record for a second, and removes it: a replica, and a server whose memory is full, show. On a cluster the one
    /// master with its slot is asked.
    async fn probe(&self) -> Result<(), StoreError> {
        let operation = probe_operation();
        let request = ClaimRequest {
            token: self.told("probe", nobodys_token())?,
            lease: PROBE_LEASE,
            retention: PROBE_LEASE,
            on_lease_end: OnLeaseEnd::TakeOver,
            takeover_now: true,
            max_attempts: u32::MAX,
        };
        // In progress is another gateway's, written just now.
        if let ClaimOutcome::Acquired(lease) = self.claim(&operation, &request).await? {
            self.release(&operation, lease.token).await?;
        }
        Ok(())
    }

    async fn audit(&self, id: Option<&OperationId>, limit: u32) -> Result<Vec<AuditEntry>, StoreError> {
        let read = async {
            let (mut entries, mut bad) = (Vec::new(), Vec::new());
            for node in self.inner.routes.masters().await? {
                for list in keys_of(&node, &self.names.audit_pattern()).await? {
                    let mut range = redis::cmd("LRANGE");
                    range.arg(&list).arg(0).arg(-1);
                    let Value::Array(stored) = one(&node, range).await? else {
                        return Err(Fault::strange("to LRANGE"));
                    };
                    for (age, entry) in stored.iter().enumerate() {
                        let Value::BulkString(entry) = entry else { return Err(Fault::strange("to LRANGE")) };
                        match decode_entry(entry) {
                            Some(entry) if id.is_none_or(|id| entry.id == *id) => entries.push((entry, age)),
                            Some(_) => {}
                            None => bad.push(format!("entry {age} of {:?}", lossy(&list))),
                        }
                    }
                }
            }
            // Newest first; those of one moment in the order of their list.
            entries.sort_by(|(a, a_age), (b, b_age)| b.at.cmp(&a.at).then(a_age.cmp(b_age)));
            entries.truncate(limit as usize);
            self.warn_of("audit entry", &bad);
            Ok(entries.into_iter().map(|(entry, _)| entry).collect())
        };
        self.told("audit", read.await)
    }
}

/// What an operator makes of a record: a completed one, or a tombstone. Its lease ends now.
#[derive(Clone, Copy)]
struct Change<'a> {
    state: u8,
    ttl_ms: i64,
    reply: Option<&'a Reply>,
}

impl Change<'_> {
    fn applied<'r>(&'r self, found: &'r Found, token: LeaseToken) -> NewRow<'r> {
        NewRow {
            token,
            lease_ms: 0,
            done: self.reply.map(|reply| Done { at_ms: found.at.now_ms, reply }),
            ..found.row.again(found.at, self.state, self.ttl_ms)
        }
    }
}

/// A record that a scan came by, its reply left out.
struct Scanned {
    row: Row,
    at: Moment,
    bytes: u64,
}

impl RedisStore {
    async fn operate(
        &self,
        action_name: &'static str,
        id: &OperationId,
        action: &OperatorAction,
        change: Change<'_>,
    ) -> Result<OperatorOutcome, Fault> {
        let calls: Calls<'_> = self.calls();
        calls.may_write()?;
        let name = self.names.record(id);
        let unreadable = |why| Fault::unreadable(&name, &why);
        let list = self.names.audit(name.as_bytes(), self.inner.routes.is_cluster());
        let token = nobodys_token()?;
        let (mut found, _) = calls.look(&name, id).await?;
        for _ in 0..OVERTAKEN_MAX {
            match decide_operator(found.as_ref().map(|found| &found.record), action.target) {
                OperatorDecision::Absent => return Ok(OperatorOutcome::Absent),
                OperatorDecision::LiveLease { left } => return Ok(OperatorOutcome::LiveLease { left }),
                OperatorDecision::Completed => return Ok(OperatorOutcome::Completed),
                OperatorDecision::NoReply => return Ok(OperatorOutcome::NoReply),
                OperatorDecision::Apply => {}
            }
            let Some(its) = &found else { return Ok(OperatorOutcome::Absent) };
            let new = change.applied(its, token);
            let at = Moment { pttl_ms: new.ttl_ms, now_ms: its.at.now_ms };
            let view =
                Row::decode(&new.encode().into()).and_then(|row| row.view(at, true)).map_err(unreadable)?;
            let entry = AuditEntry {
                at: from_unix_ms(its.at.now_ms),
                actor: action.actor.clone(),
                action: action_name.into(),
                id: id.clone(),
                before: its.row.view(its.at, true).map_err(unreadable)?.summary(),
                after: view.summary(),
                reason: action.reason.clone(),
            };
            // A lease that was over must not have been renewed; the value says so, and its time.
            let pttl_max_ms = (action.target != Target::Any).then_some(its.at.pttl_ms);
            let audit = Some((list.as_str(), &encode_entry(&entry)[..], AUDIT_ENTRIES_MAX));
            // Not sent again when its answer is lost: done, it would be refused the second time.
            match calls.swap(&name, id, &its.value, pttl_max_ms, &new, audit, false).await? {
                Ok(_) => return Ok(OperatorOutcome::Done(Box::new(view))),
                Err((now, _)) => found = now,
            }
        }
        Err(Fault::new(StoreErrorKind::Conflict, "the record changed again and again"))
    }

    async fn list_all(&self, query: &ListQuery) -> Result<ListPage, Fault> {
        let limit = query.limit.max(1) as usize;
        // The first `limit + 1` in order, whatever the number of records.
        let mut first = BTreeMap::new();
        self.scan(query.key.as_ref(), |found| {
            let id = &found.row.id;
            if query.after.as_ref().is_some_and(|after| id <= after)
                || query.scope.as_ref().is_some_and(|scope| id.scope != *scope)
                || query.key.as_ref().is_some_and(|key| id.key != *key)
            {
                return Ok(());
            }
            let view = found.row.view(found.at, false)?;
            let age_ms = found.at.now_ms - unix_ms(view.created_at);
            let old = query.older_than.is_none_or(|least| age_ms >= whole_ms(least) - 1);
            if old && query.state.is_none_or(|state| view.state == state) {
                first.insert(id.clone(), view);
                if first.len() > limit + 1 {
                    first.pop_last();
                }
            }
            Ok(())
        })
        .await?;
        let more = first.len() > limit;
        let records: Vec<_> = first.into_values().take(limit).collect();
        let next = records.last().filter(|_| more).map(|last| last.id.clone());
        Ok(ListPage { records, next })
    }

    /// Comes by every record that has not expired, on every master, some perhaps twice. Keys of others under our prefix
    /// are passed by, and records that cannot be read are named in a warning; where nothing with the key that was asked for
    /// can be read they are an error, for they are not absent.
    async fn scan(
        &self,
        key: Option<&Key>,
        mut each: impl FnMut(&Scanned) -> Result<(), Unreadable>,
    ) -> Result<(), Fault> {
        let patterns = match key {
            Some(key) => self.names.patterns_of(key.as_str()),
            None => self.names.patterns().to_vec(),
        };
        let (mut readable, mut bad) = (0_usize, BTreeMap::new());
        for node in self.inner.routes.masters().await? {
            for pattern in &patterns {
                let mut cursor = "0".to_owned();
                loop {
                    let (next, names) = scan_step(&node, &cursor, pattern).await?;
                    for (name, scanned) in read_all(&node, names).await? {
                        let known = scanned.and_then(|scanned| {
                            if self.names.is_name_of(&name, &scanned.row.id) {
                                each(&scanned)
                            } else {
                                Err(Unreadable::Another)
                            }
                        });
                        match known {
                            Ok(()) => readable += 1,
                            Err(Unreadable::Foreign) => {}
                            Err(why) => {
                                bad.insert(name, why);
                            }
                        }
                    }
                    cursor = next;
                    if cursor == "0" {
                        break;
                    }
                }
            }
        }
        let bad: Vec<_> = bad.iter().map(|(name, why)| Fault::unreadable(&lossy(name), why)).collect();
        if let Some(fault) = bad.first().filter(|_| key.is_some() && readable == 0) {
            return Err(fault.clone());
        }
        let bad: Vec<_> = bad.iter().map(|fault| fault.detail().to_owned()).collect();
        self.warn_of("record", &bad);
        Ok(())
    }

    /// The contract has no place for what was left out. Said once, and again when it is something else.
    fn warn_of(&self, what: &str, bad: &[String]) {
        if bad.is_empty() {
            return;
        }
        let named = &bad[..bad.len().min(BAD_NAMED_MAX)];
        let more = if bad.len() > named.len() { "; …" } else { "" };
        let (count, named) = (bad.len(), named.join("; "));
        let warning = format!("{what}: {count} cannot be read, left out here: {named}{more}");
        let mut warned = self.inner.warned.lock();
        if *warned != warning {
            tracing::warn!("{warning}");
            *warned = warning;
        }
    }
}

fn lossy(name: &[u8]) -> String {
    String::from_utf8_lossy(name).into_owned()
}

async fn keys_of(node: &Node, pattern: &str) -> Result<BTreeSet<Vec<u8>>, Fault> {
    let mut keys = BTreeSet::new();
    let mut cursor = "0".to_owned();
    loop {
        let (next, names) = scan_step(node, &cursor, pattern).await?;
        keys.extend(names);
        cursor = next;
        if cursor == "0" {
            return Ok(keys);
        }
    }
}

async fn scan_step(node: &Node, cursor: &str, pattern: &str) -> Result<(String, Vec<Vec<u8>>), Fault> {
    let mut scan = redis::cmd("SCAN");
    scan.arg(cursor).arg("MATCH").arg(pattern).arg("COUNT").arg(SCAN_COUNT);
    let strange = || Fault::strange("to SCAN");
    let Value::Array(answer) = one(node, scan).await? else { return Err(strange()) };
    let [Value::BulkString(next), Value::Array(names)] = answer.as_slice() else { return Err(strange()) };
    let names = names.iter().map(|name| match name {
        Value::BulkString(name) => Ok(name.clone()),
        _ => Err(strange()),
    });
    Ok((String::from_utf8(next.clone()).map_err(|_| strange())?, names.collect::<Result<_, _>>()?))
}

type Read = (Vec<u8>, Result<Scanned, Unreadable>);

/// Reads the heads of these records in one round trip; those that are gone are left out.
async fn read_all(node: &Node, names: Vec<Vec<u8>>) -> Result<Vec<Read>, Fault> {
    let mut commands = vec![redis::cmd("TIME")];
    for name in &names {
        let mut head = redis::cmd("GETRANGE");
        head.arg(name).arg(0).arg(HEAD_BYTES_MAX);
        let mut left = redis::cmd("PTTL");
        left.arg(name);
        let mut length = redis::cmd("STRLEN");
        length.arg(name);
        commands.extend([head, left, length]);
    }
    let (answers, _) = node.ask(&Request::of(commands), false, false).await?;
    let mut answers = answers.into_iter();
    let now_ms = answers.next().as_ref().and_then(time_ms).ok_or_else(|| Fault::strange("to TIME"))?;
    let mut read = Vec::new();
    for name in names {
        let (head, left, length) = match (answers.next(), answers.next(), answers.next()) {
            (Some(Value::BulkString(head)), Some(Value::Int(left)), Some(Value::Int(length))) => {
                (head, left, length)
            }
            // No text at all.
            (Some(Value::ServerError(error)), ..) if error.code() == "WRONGTYPE" => continue,
            (Some(Value::ServerError(error)), ..) => return Err(Fault::refused(&error)),
            _ => return Err(Fault::strange("to GETRANGE, PTTL and STRLEN")),
        };
        let at = Moment { pttl_ms: left, now_ms };
        let scanned = match Row::decode(&Bytes::from(head)) {
            // Gone between the scan and the look, or in its last millisecond.
            _ if left == -2 => continue,
            Ok(row) if row.is_expired(at) => continue,
            Ok(_) if left < 0 => Err(Unreadable::NoTtl),
            Ok(row) => {
                let bytes = u64::try_from(length).unwrap_or(0) + name.len() as u64;
                Ok(Scanned { row, at, bytes })
            }
            Err(why) => Err(why),
        };
        read.push((name, scanned));
    }
    Ok(read)
}

async fn one(node: &Node, command: Cmd) -> Result<Value, Fault> {
    let (answers, _) = node.ask(&Request::of([command]), false, false).await?;
    match answers.into_iter().next() {
        Some(Value::ServerError(error)) => Err(Fault::refused(&error)),
        Some(value) => Ok(value),
        None => Err(Fault::strange("no answer")),
    }
}

fn time_ms(answer: &Value) -> Option<i64> {
    let Value::Array(parts) = answer else { return None };
    let number = |part: &Value| match part {
        Value::BulkString(text) => std::str::from_utf8(text).ok()?.parse::<i64>().ok(),
        _ => None,
    };
    Some(number(parts.first()?)? * 1000 + number(parts.get(1)?)? / 1000)
}

/// An entry: version 1, the time, and seven texts, each with its length before it.
fn encode_entry(entry: &AuditEntry) -> Vec<u8> {
    let mut bytes = vec![1];
    bytes.extend_from_slice(&unix_ms(entry.at).to_be_bytes());
    let id = &entry.id;
    let texts = [
        &entry.actor,
        &entry.action,
        id.scope.as_str(),
        id.key.as_str(),
        &entry.before,
        &entry.after,
        &entry.reason,
    ];
    for text in texts {
        // Longer ones are cut by nobody but us, and nobody writes a reason of 4 GiB.
        let length = u32::try_from(text.len()).unwrap_or(u32::MAX);
        bytes.extend_from_slice(&length.to_be_bytes());
        bytes.extend_from_slice(&text.as_bytes()[..length as usize]);
    }
    bytes
}

/// `None`: somebody else's, or of a form that this release does not know.
fn decode_entry(bytes: &[u8]) -> Option<AuditEntry> {
    let mut rest = bytes.strip_prefix(&[1])?;
    let mut take = |length: usize| {
        let (taken, left) = rest.split_at_checked(length)?;
        rest = left;
        Some(taken)
    };
    let at_ms = i64::from_be_bytes(take(8)?.try_into().ok()?);
    let mut text = || {
        let length = u32::from_be_bytes(take(4)?.try_into().ok()?);
        String::from_utf8(take(length as usize)?.to_vec()).ok()
    };
    let (actor, action) = (text()?, text()?);
    let id = OperationId { scope: Scope::new(text()?).ok()?, key: Key::new(text()?).ok()? };
    let (before, after, reason) = (text()?, text()?, text()?);
    Some(AuditEntry { at: from_unix_ms(at_ms), actor, action, id, before, after, reason })
}

fn nobodys_token() -> Result<LeaseToken, Fault> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes)
        .map_err(|error| Fault::new(StoreErrorKind::Internal, format!("no random bytes: {error}")))?;
    Ok(LeaseToken::from_bytes(bytes))
}
