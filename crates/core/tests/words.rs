//! What the words of the contract say and show: names, errors, times, the answers inside a transaction.
#![allow(clippy::unwrap_used, reason = "test code")]

use std::error::Error;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};
use onlyonce_core::clock::{from_unix_ms, unix_ms};
use onlyonce_core::{
    ClaimOutcome, Clock, Fingerprint, Key, Lease, LeaseToken, OnLeaseEnd, OnceOutcome, Operation,
    OperationId, OperatorAction, Origin, Pending, RecordView, Reply, Scope, StateName, StoreError,
    StoreErrorKind, StoredReply, SystemClock, Target, TestClock, TxClaim, TxFailure, TxOptions, TxStep,
};

const TOKEN: LeaseToken = LeaseToken::from_bytes([0xa5; 16]);
const SECOND: Duration = Duration::from_secs(1);

#[test]
fn operators_read_states_by_the_names_of_the_table() {
    let names = [StateName::InProgress, StateName::Completed, StateName::Unknown, StateName::Freed];
    assert_eq!(names.map(StateName::as_str), ["in_progress", "completed", "unknown", "freed"]);
    let record = RecordView {
        id: OperationId { scope: Scope::anonymous(), key: Key::new("k").unwrap() },
        fingerprint: Fingerprint::of("a"),
        state: StateName::Unknown,
        on_lease_end: OnLeaseEnd::Hold,
        attempt: 1,
        origin: None,
        lease_left: None,
        created_at: SystemTime::UNIX_EPOCH,
        locked_until: SystemTime::UNIX_EPOCH,
        expires_at: None,
        reply: None,
    };
    assert_eq!(record.summary(), "unknown");
    let completed = RecordView { state: StateName::Completed, reply: Some(Reply::new(201, "")), ..record };
    assert_eq!(completed.summary(), "completed 201");
    let freeing = |target| OperatorAction { actor: "a".into(), reason: "r".into(), target }.freeing();
    assert_eq!(
        [Target::Completed, Target::Undecided, Target::Any].map(freeing),
        ["forget", "release", "release"]
    );
}

#[test]
fn the_system_clock_runs_as_the_machine_does() {
    let uptime = std::fs::read_to_string("/proc/uptime").ok();
    let (boot, wall) = (SystemClock.boot(), SystemClock.wall());
    if let Some(uptime) = uptime {
        let uptime: f64 = uptime.split(' ').next().unwrap().parse().unwrap();
        let apart = boot.as_secs_f64() - uptime;
        assert!((-1.0..60.0).contains(&apart), "{boot:?} after {uptime} s");
    }
    assert!(wall > TestClock::new().wall(), "2026 or later");
    std::thread::sleep(Duration::from_millis(2));
    assert!(SystemClock.boot() >= boot + Duration::from_millis(2));
}

#[test]
fn a_told_clock_is_where_it_was_told_to_be() {
    let clock = TestClock::default();
    let (boot, wall) = (clock.boot(), clock.wall());
    clock.clone().advance(5 * SECOND);
    assert_eq!((clock.boot(), clock.wall()), (boot + 5 * SECOND, wall + 5 * SECOND));
    clock.step_wall_back(3 * SECOND);
    assert_eq!((clock.boot(), clock.wall()), (boot + 5 * SECOND, wall + 2 * SECOND));
    clock.step_wall_forward(SECOND);
    assert_eq!((clock.boot(), clock.wall()), (boot + 5 * SECOND, wall + 3 * SECOND));
}

#[test]
fn milliseconds_of_the_wall_clock_come_back() {
    let at = SystemTime::UNIX_EPOCH + Duration::from_micros(1_767_225_600_123_987);
    assert_eq!(unix_ms(at), 1_767_225_600_123);
    assert_eq!(from_unix_ms(unix_ms(at)), SystemTime::UNIX_EPOCH + Duration::from_millis(1_767_225_600_123));
    // What no clock shows is the epoch.
    assert_eq!(unix_ms(SystemTime::UNIX_EPOCH - SECOND), 0);
    assert_eq!(from_unix_ms(-1), SystemTime::UNIX_EPOCH);
}

#[test]
fn an_error_says_what_where_and_why_and_whether_to_ask_again() {
    use StoreErrorKind::{Conflict, Full, Internal, Overloaded, Timeout, Unavailable, Unfit, Unreadable};
    for (kind, retryable, said) in [
        (Unavailable, true, "the store is unavailable (claim)"),
        (Timeout, true, "the store did not answer in time (claim)"),
        (Overloaded, true, "the store is overloaded (claim)"),
        (Full, true, "the store is full (claim)"),
        (Conflict, true, "the transaction must be run again (claim)"),
        (Unreadable, false, "a record cannot be read by this release (claim)"),
        (Unfit, false, "the store is not fit for use (claim)"),
        (Internal, false, "the store failed (claim)"),
    ] {
        let error = StoreError::new(kind, "claim");
        assert_eq!((error.kind(), error.operation(), error.retryable()), (kind, "claim", retryable));
        assert_eq!(error.to_string(), said);
        assert!(!error.may_have_applied() && error.source().is_none(), "{kind:?}");
    }
    let error =
        StoreError::new(Timeout, "complete").with_detail("after 5 s").with_source("no route").ambiguous();
    assert_eq!(error.to_string(), "the store did not answer in time (complete): after 5 s");
    assert_eq!(error.source().unwrap().to_string(), "no route");
    assert!(error.may_have_applied());
}

#[test]
fn names_are_shown_as_they_are_and_tokens_are_not() {
    let operation =
        Operation::new(Scope::new("shop").unwrap(), Key::new("k \"1\"").unwrap(), Fingerprint::of("a"))
            .with_origin(Some(Origin::new("req-7").unwrap()));
    let (scope, key, origin) = (operation.scope(), operation.key(), operation.origin().unwrap());
    assert_eq!([scope.as_str(), key.as_str(), origin.as_str()], ["shop", "k \"1\"", "req-7"]);
    assert_eq!([scope.to_string(), key.to_string(), origin.to_string()], ["shop", "k \"1\"", "req-7"]);
    assert_eq!(format!("{scope:?} {key:?} {origin:?}"), r#"Scope("shop") Key("k \"1\"") Origin("req-7")"#);
    assert_eq!(operation.id(), &OperationId { scope: scope.clone(), key: key.clone() });
    let other = operation.with_fingerprint(Fingerprint::of("b"));
    assert_eq!(other.fingerprint(), &Fingerprint::of("b"));
    assert_eq!((other.id(), other.origin()), (operation.id(), operation.origin()));
    assert!(Origin::new("").is_err() && Origin::new("a\nb").is_err());

    assert_eq!(format!("{TOKEN:?}"), "LeaseToken(a5a5a5a5…)");
    assert_eq!(TOKEN.as_bytes(), &[0xa5; 16]);
}

#[test]
fn a_reply_tells_its_parts_and_weighs_what_it_holds() {
    let plain = Reply::ok("");
    assert_eq!((plain.status(), plain.is_success(), plain.is_omitted()), (200, true, false));
    let statuses = [(100, true), (399, true), (400, false), (999, false)];
    assert_eq!(statuses.map(|(status, _)| Reply::new(status, "").is_success()), statuses.map(|(_, is)| is));
    assert_eq!((Reply::failed("no").status(), &Reply::failed("no").body()[..]), (422, &b"no"[..]));

    let (name, value) = (HeaderName::from_static("x-a"), HeaderValue::try_from("v".repeat(500)).unwrap());
    let fields = HeaderMap::from_iter([(name.clone(), value.clone())]);
    let weight = |reply: &Reply| reply.weight_bytes() - plain.weight_bytes();
    assert!(plain.weight_bytes() >= 2 * size_of::<HeaderMap>());
    assert_eq!(weight(&Reply::ok("1234567")), 7);
    let field_bytes = "x-a".len() + 500;
    for reply in [
        plain.clone().with_header(name, value),
        plain.clone().with_headers(fields.clone()),
        plain.clone().with_trailers(fields.clone()),
    ] {
        assert!((field_bytes + 64..=field_bytes + 128).contains(&weight(&reply)), "{}", weight(&reply));
    }
    let both = Reply::ok("1234567").with_headers(fields.clone()).with_trailers(fields.clone());
    let one = Reply::ok("").with_headers(fields.clone());
    assert_eq!(weight(&both), 2 * weight(&one) + 7);
    assert_eq!((both.headers(), both.trailers()), (&fields, &fields));
    let omitted = both.omitting_body();
    assert!(omitted.is_omitted() && omitted.body().is_empty() && omitted.trailers().is_empty());
    assert_eq!(weight(&omitted), weight(&one));
    for status in [100, 999] {
        assert_eq!(Reply::decode(status, b":onlyonce 1\n", Bytes::new()).unwrap().status(), status);
    }
    assert!(Reply::decode(1000, b":onlyonce 1\n", Bytes::new()).is_err());
}

#[test]
fn a_long_body_stays_where_it_is() {
    let long = Bytes::from(vec![b'a'; (64 << 10) + 1]);
    assert_eq!(Reply::ok(long.clone()).detached().body().as_ptr(), long.as_ptr());
    let short = Bytes::from(vec![b'a'; 64 << 10]);
    assert_ne!(Reply::ok(short.clone()).detached().body().as_ptr(), short.as_ptr());
}

#[test]
fn a_transaction_answers_what_its_claim_was_answered() {
    let options = TxOptions { retention: 9 * SECOND, max_attempts: 3, ..TxOptions::default() };
    let request = options.request(TOKEN);
    assert_eq!((request.token, request.lease, request.retention), (TOKEN, Duration::ZERO, 9 * SECOND));
    assert_eq!((request.on_lease_end, request.max_attempts), (OnLeaseEnd::TakeOver, 3));
    assert!(request.takeover_now);

    let (stored, origin) = (stored(), Origin::new("req-7").ok());
    let lease = Lease { token: TOKEN, attempt: 3, duration: SECOND };
    let step = |outcome| TxStep::from(TxClaim::of(outcome, |lease| lease.attempt));
    assert!(matches!(step(ClaimOutcome::Acquired(lease)), TxStep::Work(3)));
    let answer = |outcome| match step(outcome) {
        TxStep::Answer(answer) => format!("{answer:?}"),
        other => panic!("{other:?}"),
    };
    let in_progress =
        ClaimOutcome::InProgress { lease_left: SECOND, age: 2 * SECOND, origin: origin.clone() };
    let expected = OnceOutcome::InProgress { lease_left: SECOND, age: 2 * SECOND, origin: origin.clone() };
    assert_eq!(answer(in_progress), format!("{expected:?}"));
    assert_eq!(
        answer(ClaimOutcome::Completed(stored.clone())),
        format!("{:?}", OnceOutcome::Replayed(stored))
    );
    let mismatch = ClaimOutcome::Mismatch { stored: Fingerprint::of("a"), origin: origin.clone() };
    let expected = OnceOutcome::Mismatch { stored: Fingerprint::of("a"), origin: origin.clone() };
    assert_eq!(answer(mismatch), format!("{expected:?}"));
    let since = SystemTime::UNIX_EPOCH;
    let expected = OnceOutcome::Unknown { since, origin: origin.clone() };
    assert_eq!(answer(ClaimOutcome::Unknown { since, origin }), format!("{expected:?}"));
    assert!(matches!(TxStep::from(TxClaim::<()>::RetryTransaction), TxStep::Retry));
    let busy = TxStep::from(TxClaim::<()>::busy());
    let zero = Duration::ZERO;
    assert!(
        matches!(busy, TxStep::Answer(OnceOutcome::InProgress { lease_left, age, origin: None }) if lease_left == zero && age == zero)
    );
}

#[test]
fn what_is_not_committed_is_not_shown() {
    let pending = Pending::new("secret");
    assert_eq!(format!("{pending:?}"), "Pending");
    assert_eq!(pending.after_commit(), "secret");
}

#[test]
fn a_failure_without_a_reply_keeps_its_cause() {
    let cause = |failure| match failure {
        TxFailure::Transient(cause) => cause.to_string(),
        TxFailure::Definitive(reply) => panic!("{reply:?}"),
    };
    assert_eq!(cause(TxFailure::transient("no route")), "no route");
    assert_eq!(cause(TxFailure::from(std::fmt::Error)), std::fmt::Error.to_string());
}

fn stored() -> StoredReply {
    StoredReply {
        reply: Reply::ok("done"),
        completed_at: SystemTime::UNIX_EPOCH,
        expires_at: SystemTime::UNIX_EPOCH + SECOND,
        remaining: SECOND,
        origin: None,
    }
}
