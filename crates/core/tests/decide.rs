//! Every row of the state machine, as a table: what a claim, a renewal, a completion, a release and an operator meet.

use std::time::{Duration, SystemTime};

use onlyonce_core::{
    Acquire, ClaimOutcome, ClaimRequest, CompleteDecision, Decision, Fingerprint, LeaseToken, LeaseView,
    OnLeaseEnd, OperatorDecision, Origin, Record, ReleaseDecision, RenewDecision, Reply, State, StateName,
    StoredReply, Target, decide, decide_complete, decide_operator, decide_release, decide_renew,
};

const MINE: LeaseToken = LeaseToken::from_bytes([1; 16]);
const THEIRS: LeaseToken = LeaseToken::from_bytes([2; 16]);
const LEFT: Duration = Duration::from_secs(20);
const AGE: Duration = Duration::from_secs(10);
const ENDED: SystemTime = SystemTime::UNIX_EPOCH;

#[test]
fn a_claim_meets_every_state() {
    let acquired = |attempt, how| Decision::Acquire { attempt, how };
    let in_progress =
        |lease_left| Decision::Answer(ClaimOutcome::InProgress { lease_left, age: AGE, origin: origin() });
    for (state, expected) in [
        (live(THEIRS), in_progress(LEFT)),
        (live(MINE), acquired(3, Acquire::Reentrant)),
        (late(THEIRS), acquired(4, Acquire::TakeOver)),
        (late(MINE), acquired(3, Acquire::Reentrant)),
        (nothing_left(THEIRS), acquired(4, Acquire::TakeOver)),
        (unknown(THEIRS), Decision::Answer(ClaimOutcome::Unknown { since: ENDED, origin: origin() })),
        (unknown(MINE), acquired(3, Acquire::Reentrant)),
        (done(THEIRS), Decision::Answer(ClaimOutcome::Completed(stored(LEFT)))),
        (done(MINE), Decision::Answer(ClaimOutcome::Completed(stored(LEFT)))),
        (expired(THEIRS), acquired(1, Acquire::Fresh)),
        (expired(MINE), acquired(1, Acquire::Fresh)),
        (freed(THEIRS), acquired(4, Acquire::Fresh)),
    ] {
        let record = record(state);
        assert_eq!(decide(Some(&record), &Fingerprint::of("a"), &request()), expected, "{record:?}");
        // Another request under the key: expired and freed records are out of its way, every other is a mismatch.
        let other = decide(Some(&record), &Fingerprint::of("b"), &request());
        match expected {
            Decision::Acquire { how: Acquire::Fresh, .. } => assert_eq!(other, expected, "{record:?}"),
            _ => {
                let stored = record.fingerprint;
                assert_eq!(
                    other,
                    Decision::Answer(ClaimOutcome::Mismatch { stored, origin: origin() }),
                    "{record:?}"
                );
            }
        }
    }
    assert_eq!(decide(None, &Fingerprint::of("a"), &request()), acquired(1, Acquire::Fresh));
}

#[test]
fn a_takeover_needs_every_leave() {
    let hold = OnLeaseEnd::Hold;
    let held = Record { on_lease_end: hold, ..record(late(THEIRS)) };
    let free = record(late(THEIRS));
    let unknown = Decision::Answer(ClaimOutcome::Unknown { since: ENDED, origin: origin() });
    let waits = ClaimOutcome::InProgress { lease_left: Duration::ZERO, age: AGE, origin: origin() };
    for (record, request, expected) in [
        (&held, request(), unknown.clone()),
        (&free, ClaimRequest { on_lease_end: hold, ..request() }, unknown.clone()),
        (&free, ClaimRequest { max_attempts: 3, ..request() }, unknown),
        (&free, ClaimRequest { takeover_now: false, ..request() }, Decision::Answer(waits)),
        (
            &free,
            ClaimRequest { max_attempts: 4, ..request() },
            Decision::Acquire { attempt: 4, how: Acquire::TakeOver },
        ),
    ] {
        assert_eq!(decide(Some(record), &Fingerprint::of("a"), &request), expected, "{request:?}");
    }
}

#[test]
fn owners_meet_every_state() {
    use CompleteDecision as C;
    use ReleaseDecision as D;
    use RenewDecision as R;
    for (state, renewal, completion, release) in [
        (live(MINE), R::Extend, C::Write, D::Apply),
        (late(MINE), R::Extend, C::Write, D::Apply),
        (unknown(MINE), R::Extend, C::Write, D::Apply),
        (done(MINE), R::Ended, C::AlreadyStored, D::Fenced),
        (expired(MINE), R::Gone, C::WriteAnew, D::Absent),
        (live(THEIRS), R::Fenced, C::Fenced(None), D::Fenced),
        (late(THEIRS), R::Fenced, C::Fenced(None), D::Fenced),
        (unknown(THEIRS), R::Fenced, C::Fenced(None), D::Fenced),
        (done(THEIRS), R::Fenced, C::Fenced(Some(stored(LEFT))), D::Fenced),
        (expired(THEIRS), R::Gone, C::WriteAnew, D::Absent),
        (freed(THEIRS), R::Fenced, C::Fenced(None), D::Fenced),
        // Nobody holds a tombstone's token; should the bytes ever meet, they are worth nothing.
        (freed(MINE), R::Fenced, C::Fenced(None), D::Fenced),
    ] {
        let record = record(state);
        assert_eq!(decide_renew(Some(&record), &MINE), renewal, "{record:?}");
        assert_eq!(decide_complete(Some(&record), &Fingerprint::of("a"), &MINE), completion, "{record:?}");
        assert_eq!(decide_release(Some(&record), &MINE), release, "{record:?}");
    }
    assert_eq!(decide_renew(None, &MINE), R::Gone);
    assert_eq!(decide_complete(None, &Fingerprint::of("a"), &MINE), C::WriteAnew);
    // The reply to another request, after an operator freed the key, is none of a returning owner's.
    let taken = record(done(THEIRS));
    assert_eq!(decide_complete(Some(&taken), &Fingerprint::of("b"), &MINE), C::Fenced(None));
    assert_eq!(decide_release(None, &MINE), D::Absent);
}

#[test]
fn operators_meet_every_state() {
    use OperatorDecision as O;
    for (state, name, gently, by_force, forget) in [
        (
            live(THEIRS),
            StateName::InProgress,
            O::LiveLease { left: LEFT },
            O::Apply,
            O::LiveLease { left: LEFT },
        ),
        (late(THEIRS), StateName::Unknown, O::Apply, O::Apply, O::NoReply),
        (nothing_left(THEIRS), StateName::Unknown, O::Apply, O::Apply, O::NoReply),
        (unknown(THEIRS), StateName::Unknown, O::Apply, O::Apply, O::NoReply),
        (done(THEIRS), StateName::Completed, O::Completed, O::Apply, O::Apply),
        (expired(THEIRS), StateName::Completed, O::Absent, O::Absent, O::Absent),
        (freed(THEIRS), StateName::Freed, O::Apply, O::Apply, O::NoReply),
    ] {
        let record = record(state);
        assert_eq!(record.state_name(), name, "{record:?}");
        for (target, decision) in
            [(Target::Undecided, gently), (Target::Any, by_force), (Target::Completed, forget)]
        {
            assert_eq!(decide_operator(Some(&record), target), decision, "{target:?} {record:?}");
        }
    }
    assert_eq!(decide_operator(None, Target::Any), O::Absent);
    for (state, name) in [
        (late(THEIRS), StateName::Unknown),
        (nothing_left(THEIRS), StateName::Unknown),
        (live(THEIRS), StateName::InProgress),
    ] {
        let held = Record { on_lease_end: OnLeaseEnd::Hold, ..record(state) };
        assert_eq!(held.state_name(), name, "{held:?}");
    }
}

// The record is at its third attempt, and its owner lets others take over.
fn record(state: State) -> Record {
    let (fingerprint, on_lease_end) = (Fingerprint::of("a"), OnLeaseEnd::TakeOver);
    Record { fingerprint, on_lease_end, attempt: 3, origin: origin(), state }
}

fn origin() -> Option<Origin> {
    Some(Origin::new("the owner's request").expect("a valid origin"))
}

fn request() -> ClaimRequest {
    ClaimRequest {
        token: MINE,
        lease: LEFT,
        retention: LEFT * 2,
        on_lease_end: OnLeaseEnd::TakeOver,
        takeover_now: true,
        max_attempts: 5,
    }
}

fn live(token: LeaseToken) -> State {
    State::InProgress { token, lease: LeaseView::Left(LEFT), age: AGE }
}

// As a store says it that does not look whether nothing is left.
fn nothing_left(token: LeaseToken) -> State {
    State::InProgress { token, lease: LeaseView::Left(Duration::ZERO), age: AGE }
}

fn late(token: LeaseToken) -> State {
    State::InProgress { token, lease: LeaseView::Over { since: ENDED }, age: AGE }
}

fn done(token: LeaseToken) -> State {
    State::Completed { token, stored: stored(LEFT) }
}

fn expired(token: LeaseToken) -> State {
    State::Completed { token, stored: stored(Duration::ZERO) }
}

fn unknown(token: LeaseToken) -> State {
    State::Unknown { token, since: ENDED }
}

fn freed(token: LeaseToken) -> State {
    State::Freed { token }
}

fn stored(remaining: Duration) -> StoredReply {
    let expires_at = ENDED + remaining;
    StoredReply { reply: Reply::ok("done"), completed_at: ENDED, expires_at, remaining, origin: origin() }
}
