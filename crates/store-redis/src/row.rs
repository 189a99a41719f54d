//! The value of a record: how it is written, and what it says at a moment of the server's clock.
//!
//! | bytes | what |
//! |---|---|
//! | 0..3 | `oo` and the version, 1 |
//! | 3 | the state: `P` in progress, `U` unknown, `C` completed, `F` freed |
//! | 4 | the owner's policy: `T` take over, `H` hold |
//! | 5..9 | attempt |
//! | 9..25 | token |
//! | 25..66 | fingerprint: 1 for SHA-256, definition, digest |
//! | 66..74 | the time to live that was given at the last write, in ms: less PTTL, it is the time since then |
//! | 74..82 | the end of the lease, in ms after the last write; negative: before it |
//! | 82..90, 90..98 | at the last write, ms since the owner claimed it, and since the record was made |
//! | 98..106 | completed ones: when, in Unix ms |
//! | 106..108 | completed ones: the status |
//! | 108..111 | lengths of scope, key and origin |
//! | 111.. | scope, key, origin; completed ones: length of the reply's head (4 bytes), head, body |
//!
//! Integers are big-endian. `lua/` knows these places too.

use std::time::Duration;

use bytes::Bytes;
use onlyonce_core::clock::from_unix_ms;
use onlyonce_core::{
    DefinitionId, Fingerprint, Key, LeaseToken, LeaseView, OnLeaseEnd, OperationId, Origin, Record,
    RecordView, Reply, Scope, State, StateName, StoredReply,
};

const MAGIC: &[u8] = b"oo\x01";
const SHA256: u8 = 1;
const NAMES_AT: usize = 111;
/// The longest part of a value before the reply: what a list needs of it.
pub(crate) const HEAD_BYTES_MAX: usize = NAMES_AT + 3 * 255;

/// Why a value cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Unreadable {
    /// Somebody else's.
    Foreign,
    /// A record, written by a release that this one does not know.
    Version(u8),
    /// A record that breaks off or makes no sense at this part.
    Broken(&'static str),
    /// The record of another operation.
    Another,
    /// Its time to live was taken away.
    NoTtl,
}

/// A value, taken apart.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) id: OperationId,
    pub(crate) token: LeaseToken,
    pub(crate) ttl_ms: i64,
    pub(crate) lease_ms: i64,
    pub(crate) claimed_ms: i64,
    pub(crate) created_ms: i64,
    state: u8,
    on_lease_end: OnLeaseEnd,
    attempt: u32,
    fingerprint: Fingerprint,
    origin: Option<Origin>,
    completed_ms: i64,
    status: u16,
    // Length of the head, head, body.
    reply: Bytes,
}

/// The moment at which a value was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Moment {
    /// What is left of its time to live, in ms.
    pub(crate) pttl_ms: i64,
    /// The server's wall clock, in Unix ms.
    pub(crate) now_ms: i64,
}

impl Row {
    /// Takes a value apart. One that was cut off after the names, for a list, has no reply.
    pub(crate) fn decode(value: &Bytes) -> Result<Self, Unreadable> {
        if value.len() < 3 || value[..2] != MAGIC[..2] {
            return Err(Unreadable::Foreign);
        }
        if value[2] != MAGIC[2] {
            return Err(Unreadable::Version(value[2]));
        }
        if value.len() < NAMES_AT {
            return Err(Unreadable::Broken("it is cut short"));
        }
        let on_lease_end = match value[4] {
            b'T' => OnLeaseEnd::TakeOver,
            b'H' => OnLeaseEnd::Hold,
            _ => return Err(Unreadable::Broken("the policy")),
        };
        if !b"PUCF".contains(&value[3]) {
            return Err(Unreadable::Broken("the state"));
        }
        if value[25] != SHA256 {
            return Err(Unreadable::Broken("the algorithm of the fingerprint"));
        }
        let [scope, key, origin] = [value[108], value[109], value[110]].map(usize::from);
        let reply_at = NAMES_AT + scope + key + origin;
        let names = value.get(NAMES_AT..reply_at).ok_or(Unreadable::Broken("the names"))?;
        let names = std::str::from_utf8(names).map_err(|_| Unreadable::Broken("the names"))?;
        let name = |range| names.get(range).ok_or(Unreadable::Broken("the names"));
        let id = OperationId {
            scope: Scope::new(name(0..scope)?).map_err(|_| Unreadable::Broken("the scope"))?,
            key: Key::new(name(scope..scope + key)?).map_err(|_| Unreadable::Broken("the key"))?,
        };
        let origin = match name(scope + key..names.len())? {
            "" => None,
            origin => Some(Origin::new(origin).map_err(|_| Unreadable::Broken("the origin"))?),
        };
        let definition = DefinitionId(u64::from_be_bytes(array(value, 26)));
        let row = Self {
            id,
            token: LeaseToken::from_bytes(array(value, 9)),
            ttl_ms: i64::from_be_bytes(array(value, 66)),
            lease_ms: i64::from_be_bytes(array(value, 74)),
            claimed_ms: i64::from_be_bytes(array(value, 82)),
            created_ms: i64::from_be_bytes(array(value, 90)),
            state: value[3],
            on_lease_end,
            attempt: u32::from_be_bytes(array(value, 5)),
            fingerprint: Fingerprint::from_digest(definition, array(value, 34)),
            origin,
            completed_ms: i64::from_be_bytes(array(value, 98)),
            status: u16::from_be_bytes(array(value, 106)),
            reply: value.slice(reply_at..),
        };
        let times = [row.ttl_ms, row.claimed_ms, row.created_ms, row.completed_ms];
        if times.iter().any(|ms| !(0..1 << 53).contains(ms)) || row.lease_ms.unsigned_abs() >= 1 << 53 {
            return Err(Unreadable::Broken("its times"));
        }
        Ok(row)
    }

    /// The same, if it is the record of this operation.
    pub(crate) fn of(self, id: &OperationId) -> Result<Self, Unreadable> {
        if self.id == *id { Ok(self) } else { Err(Unreadable::Another) }
    }

    /// What it says at this moment.
    pub(crate) fn record(&self, at: Moment) -> Result<Record, Unreadable> {
        let token = self.token;
        let state = match self.state {
            b'C' => State::Completed { token, stored: self.stored(at)? },
            b'F' => State::Freed { token },
            b'U' => State::Unknown { token, since: from_unix_ms(self.lease_end_ms(at)) },
            _ => State::InProgress {
                token,
                lease: match self.lease_left_ms(at) {
                    0 => LeaseView::Over { since: from_unix_ms(self.lease_end_ms(at)) },
                    left => LeaseView::Left(ms(left)),
                },
                age: ms(self.claimed_ms + self.past_ms(at)),
            },
        };
        Ok(Record {
            fingerprint: self.fingerprint,
            on_lease_end: self.on_lease_end,
            attempt: self.attempt,
            origin: self.origin.clone(),
            state,
        })
    }

    /// Whether an answer about it needs no more than the time to live: not the wall time of a lease that is over.
    pub(crate) fn needs_no_clock(&self, pttl_ms: i64) -> bool {
        let at = Moment { pttl_ms, now_ms: 0 };
        pttl_ms > 0 && (self.state == b'C' || (self.state == b'P' && self.lease_left_ms(at) > 0))
    }

    /// The record as operators see it. `with_reply`: the value was read whole.
    pub(crate) fn view(&self, at: Moment, with_reply: bool) -> Result<RecordView, Unreadable> {
        let bare = Self { state: if self.state == b'C' { b'F' } else { self.state }, ..self.clone() };
        let state = match self.state {
            b'C' => StateName::Completed,
            _ => bare.record(at)?.state_name(),
        };
        let left = self.lease_left_ms(at);
        let completed = self.state == b'C';
        Ok(RecordView {
            id: self.id.clone(),
            fingerprint: self.fingerprint,
            state,
            on_lease_end: self.on_lease_end,
            attempt: self.attempt,
            origin: self.origin.clone(),
            lease_left: (self.state == b'P' && left > 0).then(|| ms(left)),
            created_at: from_unix_ms(at.now_ms - self.created_ms - self.past_ms(at)),
            locked_until: from_unix_ms(self.lease_end_ms(at)),
            expires_at: completed.then(|| from_unix_ms(self.completed_ms + self.ttl_ms)),
            reply: if completed && with_reply { Some(self.reply()?) } else { None },
        })
    }

    /// Completed, and at the end of its time: Redis drops it a millisecond later.
    pub(crate) fn is_expired(&self, at: Moment) -> bool {
        self.state == b'C' && at.pttl_ms == 0
    }

    /// How much of its time to live was left when its lease ended or will end.
    pub(crate) fn pttl_at_lease_end_ms(&self) -> i64 {
        self.ttl_ms - self.lease_ms
    }

    /// The time since the last write. A clock that was stepped back does not make it negative.
    pub(crate) fn past_ms(&self, at: Moment) -> i64 {
        (self.ttl_ms - at.pttl_ms).max(0)
    }

    /// The same record, to be written again now.
    pub(crate) fn again(&self, at: Moment, state: u8, ttl_ms: i64) -> NewRow<'_> {
        let past = self.past_ms(at);
        NewRow {
            state,
            on_lease_end: self.on_lease_end,
            attempt: self.attempt,
            token: self.token,
            fingerprint: self.fingerprint,
            ttl_ms,
            lease_ms: self.lease_ms - past,
            claimed_ms: self.claimed_ms + past,
            created_ms: self.created_ms + past,
            done: None,
            id: &self.id,
            origin: self.origin.as_ref(),
        }
    }

    fn lease_left_ms(&self, at: Moment) -> i64 {
        (self.lease_ms - self.past_ms(at)).max(0)
    }

    fn lease_end_ms(&self, at: Moment) -> i64 {
        at.now_ms - self.past_ms(at) + self.lease_ms
    }

    fn stored(&self, at: Moment) -> Result<StoredReply, Unreadable> {
        Ok(StoredReply {
            reply: self.reply()?,
            completed_at: from_unix_ms(self.completed_ms),
            expires_at: from_unix_ms(self.completed_ms + self.ttl_ms),
            remaining: ms(at.pttl_ms),
            origin: self.origin.clone(),
        })
    }

    fn reply(&self) -> Result<Reply, Unreadable> {
        let broken = Unreadable::Broken("the reply");
        let length = self.reply.get(..4).ok_or(broken.clone())?;
        let length = u32::from_be_bytes(length.try_into().map_err(|_| broken.clone())?) as usize;
        let head = self.reply.get(4..4 + length).ok_or(broken.clone())?;
        Reply::decode(self.status, head, self.reply.slice(4 + length..)).map_err(|_| broken)
    }
}

/// A value to be written.
#[derive(Clone, Debug)]
pub(crate) struct NewRow<'a> {
    pub(crate) state: u8,
    pub(crate) on_lease_end: OnLeaseEnd,
    pub(crate) attempt: u32,
    pub(crate) token: LeaseToken,
    pub(crate) fingerprint: Fingerprint,
    pub(crate) ttl_ms: i64,
    pub(crate) lease_ms: i64,
    pub(crate) claimed_ms: i64,
    pub(crate) created_ms: i64,
    pub(crate) done: Option<Done<'a>>,
    pub(crate) id: &'a OperationId,
    pub(crate) origin: Option<&'a Origin>,
}

/// The end of a completed record.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Done<'a> {
    pub(crate) at_ms: i64,
    pub(crate) reply: &'a Reply,
}

impl NewRow<'_> {
    /// The value.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut value =
            Vec::with_capacity(NAMES_AT + 64 + self.done.map_or(0, |done| done.reply.weight_bytes()));
        value.extend_from_slice(MAGIC);
        value.push(self.state);
        value.extend_from_slice(&self.owner());
        for ms in [self.ttl_ms, self.lease_ms, self.claimed_ms, self.created_ms] {
            value.extend_from_slice(&ms.to_be_bytes());
        }
        value.extend_from_slice(&self.done.map_or(0, |done| done.at_ms).to_be_bytes());
        value.extend_from_slice(&self.done.map_or(0, |done| done.reply.status()).to_be_bytes());
        names(&mut value, self.id, self.origin);
        if let Some(done) = self.done {
            reply_tail(&mut value, done.reply);
        }
        value
    }

    /// Bytes 4..66: policy, attempt, token, fingerprint.
    pub(crate) fn owner(&self) -> [u8; 62] {
        let mut owner = [0; 62];
        owner[0] = match self.on_lease_end {
            OnLeaseEnd::TakeOver => b'T',
            OnLeaseEnd::Hold => b'H',
        };
        owner[1..5].copy_from_slice(&self.attempt.to_be_bytes());
        owner[5..21].copy_from_slice(self.token.as_bytes());
        owner[21] = SHA256;
        owner[22..30].copy_from_slice(&self.fingerprint.definition().0.to_be_bytes());
        owner[30..].copy_from_slice(self.fingerprint.digest());
        owner
    }
}

/// Lengths of scope, key and origin, and the three of them.
pub(crate) fn names(value: &mut Vec<u8>, id: &OperationId, origin: Option<&Origin>) {
    let parts = [id.scope.as_str(), id.key.as_str(), origin.map_or("", Origin::as_str)];
    value.extend(parts.map(|part| u8::try_from(part.len()).expect("names are at most 255 bytes")));
    parts.iter().for_each(|part| value.extend_from_slice(part.as_bytes()));
}

/// The reply as it ends a value: length of its head, head, body.
pub(crate) fn reply_tail(value: &mut Vec<u8>, reply: &Reply) {
    let head = reply.encode_head();
    let length = u32::try_from(head.len()).expect("the head of a reply is short");
    value.extend_from_slice(&length.to_be_bytes());
    value.extend_from_slice(&head);
    value.extend_from_slice(reply.body());
}

/// Whole milliseconds, rounded up, so that no time is cut short.
pub(crate) fn whole_ms(time: Duration) -> i64 {
    // Thousands of years: far below where milliseconds since 1970 stop being exact in a script.
    const MAX: u128 = 1 << 48;
    let ms = time.as_nanos().div_ceil(1_000_000).min(MAX);
    i64::try_from(ms).unwrap_or(i64::MAX)
}

fn ms(ms: i64) -> Duration {
    Duration::from_millis(u64::try_from(ms).unwrap_or(0))
}

fn array<const N: usize>(value: &[u8], at: usize) -> [u8; N] {
    let mut bytes = [0; N];
    bytes.copy_from_slice(&value[at..at + N]);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id() -> OperationId {
        OperationId { scope: Scope::new("merchant").unwrap(), key: Key::new("order-7").unwrap() }
    }

    fn new<'a>(id: &'a OperationId, done: Option<Done<'a>>) -> NewRow<'a> {
        NewRow {
            state: if done.is_some() { b'C' } else { b'P' },
            on_lease_end: OnLeaseEnd::Hold,
            attempt: 3,
            token: LeaseToken::from_bytes([7; 16]),
            fingerprint: Fingerprint::of("the request"),
            ttl_ms: 86_400_000,
            lease_ms: 30_000,
            claimed_ms: 1,
            created_ms: 2,
            done,
            id,
            origin: None,
        }
    }

    // Frozen: a changed byte here would make every stored record unreadable.
    #[test]
    fn the_form_is_frozen() {
        let (id, reply) = (id(), Reply::new(201, "body"));
        let value = new(&id, Some(Done { at_ms: 1_767_225_600_000, reply: &reply })).encode();
        let hex: String = value.iter().map(|byte| format!("{byte:02x}")).collect();
        let expected = concat!(
            "6f6f0143480000000307070707070707070707070707070707",
            "010000000000000000f365a28428fd1416c39826bb998d934ed33ca57e87a5be77d8cb324265e8163c",
            "0000000005265c00000000000000753000000000000000010000000000000002",
            "0000019b76daa80000c90807006d65726368616e746f726465722d37",
            "0000000c3a6f6e6c796f6e636520310a626f6479",
        );
        assert_eq!(hex, expected);
        let row = Row::decode(&value.into()).unwrap().of(&id).unwrap();
        let record = row.record(Moment { pttl_ms: 86_400_000 - 1000, now_ms: 1_767_225_601_000 }).unwrap();
        match record.state {
            State::Completed { stored, .. } => assert_eq!(stored.reply, reply),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_time_to_live_tells_the_time() {
        let id = id();
        let row = Row::decode(&new(&id, None).encode().into()).unwrap();
        let at = |past: i64| Moment { pttl_ms: 86_400_000 - past, now_ms: 1_000_000 + past };
        let lease = |past| match row.record(at(past)).unwrap().state {
            State::InProgress { lease, age, .. } => (lease, age.as_millis()),
            other => panic!("{other:?}"),
        };
        assert_eq!(lease(0), (LeaseView::Left(Duration::from_secs(30)), 1));
        assert_eq!(lease(29_999), (LeaseView::Left(Duration::from_millis(1)), 30_000));
        let over = LeaseView::Over { since: from_unix_ms(1_030_000) };
        assert_eq!(lease(30_000), (over, 30_001));
        assert_eq!(lease(40_000), (over, 40_001), "since its end, however late one asks");
        assert_eq!(
            lease(-5000),
            (LeaseView::Left(Duration::from_secs(30)), 1),
            "a clock that was stepped back"
        );
        assert!(row.needs_no_clock(86_400_000) && !row.needs_no_clock(86_400_000 - 30_000));
    }

    #[test]
    fn what_cannot_be_read_is_told_apart() {
        let (id, reply) = (id(), Reply::ok("x"));
        let good = new(&id, Some(Done { at_ms: 1, reply: &reply })).encode();
        let changed = |at: usize, byte: u8| {
            let mut value = good.clone();
            value[at] = byte;
            Row::decode(&value.into())
                .and_then(|row| row.record(Moment { pttl_ms: 1, now_ms: 1 }))
                .unwrap_err()
        };
        assert_eq!(changed(0, b'x'), Unreadable::Foreign);
        assert_eq!(changed(2, 2), Unreadable::Version(2));
        assert_eq!(changed(3, b'X'), Unreadable::Broken("the state"));
        assert_eq!(changed(4, b'X'), Unreadable::Broken("the policy"));
        assert_eq!(changed(25, 2), Unreadable::Broken("the algorithm of the fingerprint"));
        assert_eq!(changed(66, 0xff), Unreadable::Broken("its times"));
        assert_eq!(changed(111, 0xff), Unreadable::Broken("the names"));
        for length in 0..good.len() {
            let row = Row::decode(&Bytes::copy_from_slice(&good[..length]));
            let read = row.and_then(|row| row.record(Moment { pttl_ms: 1, now_ms: 1 }));
            // Its last bytes are the body's: any length of body is one.
            assert!(read.is_err() || length >= good.len() - 1, "{length} bytes");
        }
        let other = OperationId { key: Key::new("order-8").unwrap(), ..id };
        assert_eq!(Row::decode(&good.into()).unwrap().of(&other).unwrap_err(), Unreadable::Another);
    }

    #[test]
    fn times_are_rounded_up_and_bounded() {
        assert_eq!(whole_ms(Duration::ZERO), 0);
        assert_eq!(whole_ms(Duration::from_nanos(1)), 1);
        assert_eq!(whole_ms(Duration::from_micros(1001)), 2);
        assert_eq!(whole_ms(Duration::MAX), 1 << 48);
    }
}
