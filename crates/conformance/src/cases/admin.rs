//! What an operator may do.

use std::time::Duration;

use onlyonce_core::{
    ClaimOutcome, CompleteOutcome, Fingerprint, Key, LeaseToken, ListQuery, OnLeaseEnd, Operation,
    OperationId, OperatorAction, OperatorOutcome, RecordView, Reply, Scope, StateName, StoreAdmin, Target,
};

use crate::harness::{answered, fresh_token, operation};
use crate::{Expiry, Harness};

/// A reply given by an operator answers every retry byte for byte, for as long as it was given for.
pub async fn resolving_answers_every_retry(h: &Harness) {
    let (operation, owner) = unknown(h, "k").await;
    let reply = Reply::json(201, &"by hand").expect("JSON");
    let view = done(h.admin().resolve(operation.id(), &reply, h.retention(), &gently()).await);
    assert_eq!((view.state, view.attempt), (StateName::Completed, 1));
    assert_eq!(view.reply.as_ref(), Some(&reply));
    let stored = h.replay(&operation).await;
    assert_eq!(stored.reply, reply);
    assert!(h.is_about(stored.remaining, h.retention()));
    h.assert_fenced(&operation, owner, Some(&reply)).await;
    let other = operation.with_fingerprint(Fingerprint::of("another request"));
    assert!(matches!(h.claim(&other, fresh_token()).await, ClaimOutcome::Mismatch { .. }));
    h.advance(h.retention()).await;
    assert_eq!(h.acquire(&operation, fresh_token()).await.attempt, 1, "then it expires like any other");
}

/// A freed operation runs on the next retry, as the next attempt, under that retry's own policy.
pub async fn freeing_lets_the_next_retry_run(h: &Harness) {
    let (operation, _) = unknown(h, "k").await;
    let view = done(h.admin().free(operation.id(), &gently()).await);
    assert_eq!((view.state, view.attempt, view.reply), (StateName::Freed, 1, None));
    // Freed twice is freed.
    done(h.admin().free(operation.id(), &gently()).await);
    let next = fresh_token();
    assert_eq!(h.acquire_as(&operation, &h.hold(next)).await.attempt, 2);
    assert!(h.is_about(h.lease_left(&operation).await, h.lease()));
    h.finish(&operation, next, Reply::ok("done")).await;
    assert_eq!(h.replay(&operation).await.reply, Reply::ok("done"));
}

/// The owner that comes back after its operation was freed is Fenced, not stored anew, before and after the next claim.
pub async fn a_returning_owner_is_fenced_by_a_tombstone(h: &Harness) {
    let (operation, owner) = unknown(h, "k").await;
    done(h.admin().free(operation.id(), &gently()).await);
    h.assert_fenced(&operation, owner, None).await;
    let next = fresh_token();
    h.acquire(&operation, next).await;
    h.assert_fenced(&operation, owner, None).await;
    h.finish(&operation, next, Reply::ok("by the next")).await;
    h.assert_fenced(&operation, owner, Some(&Reply::ok("by the next"))).await;
}

/// A freed key is free: another request may have it. The owner of the first, coming back, is fenced, and is not shown
/// the reply to a request that is not its own.
pub async fn a_freed_key_is_free_for_another_request(h: &Harness) {
    let (operation, owner) = unknown(h, "k").await;
    done(h.admin().free(operation.id(), &gently()).await);
    let (other, next) = (operation.with_fingerprint(Fingerprint::of("another request")), fresh_token());
    h.acquire(&other, next).await;
    assert!(matches!(h.claim(&operation, fresh_token()).await, ClaimOutcome::Mismatch { .. }));
    h.assert_fenced(&operation, owner, None).await;
    h.finish(&other, next, Reply::ok("to another request")).await;
    h.assert_fenced(&operation, owner, None).await;
}

/// A live lease is refused and left alone; with force it is ended, and its owner fenced.
pub async fn a_live_lease_yields_to_force_alone(h: &Harness) {
    let admin = h.admin();
    for (key, resolve) in [("resolved", true), ("freed", false)] {
        let (operation, owner) = (h.operation(key), fresh_token());
        h.acquire_as(&operation, &h.hold(owner)).await;
        h.advance(h.unit()).await;
        match operate(h, &admin, &operation, resolve, &gently()).await {
            OperatorOutcome::LiveLease { left } => assert!(h.is_about(left, h.unit() * 2)),
            other => panic!("expected LiveLease, got {other:?}"),
        }
        assert!(h.is_about(h.lease_left(&operation).await, h.unit() * 2), "a refusal changes nothing");
        assert_eq!(answered(admin.audit(Some(operation.id()), 10).await), []);
        assert!(matches!(
            operate(h, &admin, &operation, resolve, &by_force()).await,
            OperatorOutcome::Done(_)
        ));
        h.assert_fenced(&operation, owner, resolve.then(by_hand).as_ref()).await;
    }
    // Over its lease nothing is live any more, whatever the policy.
    let (late, held) = (h.operation("late"), h.operation("held"));
    h.acquire(&late, fresh_token()).await;
    h.acquire_as(&held, &h.hold(fresh_token())).await;
    h.advance(h.lease()).await;
    for operation in [late, held] {
        done(admin.free(operation.id(), &gently()).await);
    }
}

/// A stored reply is refused and left alone; with force it is replaced or freed.
pub async fn a_stored_reply_yields_to_force_alone(h: &Harness) {
    let admin = h.admin();
    for (key, resolve) in [("resolved", true), ("freed", false)] {
        let (operation, owner) = (h.operation(key), fresh_token());
        h.acquire(&operation, owner).await;
        h.finish(&operation, owner, Reply::ok("first")).await;
        let refused = operate(h, &admin, &operation, resolve, &gently()).await;
        assert_eq!(refused, OperatorOutcome::Completed);
        assert_eq!(h.replay(&operation).await.reply, Reply::ok("first"), "a refusal changes nothing");
        assert_eq!(answered(admin.audit(Some(operation.id()), 10).await), []);
        assert!(matches!(
            operate(h, &admin, &operation, resolve, &by_force()).await,
            OperatorOutcome::Done(_)
        ));
        h.assert_fenced(&operation, owner, resolve.then(by_hand).as_ref()).await;
        match resolve {
            true => assert_eq!(h.replay(&operation).await.reply, by_hand()),
            false => assert_eq!(h.acquire(&operation, fresh_token()).await.attempt, 2),
        }
    }
}

/// A reply alone is forgotten: what has none is refused and left alone, a live lease too; its owner is fenced.
pub async fn a_reply_alone_is_forgotten(h: &Harness) {
    let admin = h.admin();
    let forget = OperatorAction { target: Target::Completed, ..gently() };
    let [done_, live, unknown, never] = ["done", "live", "unknown", "never"].map(|key| h.operation(key));
    let owner = fresh_token();
    h.acquire(&done_, owner).await;
    h.finish(&done_, owner, Reply::new(201, "first")).await;
    for operation in [&live, &unknown] {
        h.acquire_as(operation, &h.hold(owner)).await;
    }
    h.mark_unknown(&unknown, owner).await;
    let free = async |operation: &Operation| answered(admin.free(operation.id(), &forget).await);
    assert!(matches!(free(&live).await, OperatorOutcome::LiveLease { .. }));
    assert_eq!(free(&unknown).await, OperatorOutcome::NoReply);
    assert_eq!(free(&never).await, OperatorOutcome::Absent);
    assert_eq!(answered(admin.audit(None, 10).await), [], "a refusal is not noted");
    h.finish(&live, owner, Reply::ok("a refusal changes nothing")).await;

    let OperatorOutcome::Done(view) = free(&done_).await else { panic!("a reply is forgotten") };
    assert_eq!((view.state, &view.reply), (StateName::Freed, &None));
    assert_eq!(free(&done_).await, OperatorOutcome::NoReply, "there is none any more");
    let audit = answered(admin.audit(None, 10).await);
    let [entry] = &audit[..] else { panic!("one entry, not {audit:?}") };
    assert_eq!(
        (entry.action.as_str(), entry.before.as_str(), entry.after.as_str()),
        ("forget", "completed 201", "freed")
    );
    h.assert_fenced(&done_, owner, None).await;
    let another = done_.with_fingerprint(Fingerprint::of("another request"));
    assert_eq!(h.acquire(&another, fresh_token()).await.attempt, 2);
}

/// What was never claimed, was released, or has expired is absent for operators too: nothing is made, nothing is noted.
pub async fn what_is_not_there_stays_absent(h: &Harness) {
    let admin = h.admin();
    let [never, released, expired] = ["never", "released", "expired"].map(|key| h.operation(key));
    let owner = fresh_token();
    h.acquire(&released, owner).await;
    h.release(&released, owner).await;
    h.acquire(&expired, owner).await;
    h.finish(&expired, owner, Reply::ok("old")).await;
    h.advance(h.retention()).await;
    for operation in [never, released, expired] {
        for resolve in [true, false] {
            let answer = operate(h, &admin, &operation, resolve, &by_force()).await;
            assert_eq!(answer, OperatorOutcome::Absent, "{:?}", operation.id());
        }
        assert_eq!(h.acquire(&operation, fresh_token()).await.attempt, 1);
    }
    assert_eq!(answered(admin.audit(None, 10).await), []);
}

/// Every change is noted with who, what, why, and the state before and after; newest first; of one operation or of all.
pub async fn every_change_is_on_the_audit_table(h: &Harness) {
    let admin = h.admin();
    let (first, _) = unknown(h, "first").await;
    let (second, _) = unknown(h, "second").await;
    done(admin.free(first.id(), &gently()).await);
    h.advance(h.unit()).await;
    done(admin.resolve(second.id(), &Reply::new(201, "x"), h.retention(), &gently()).await);
    h.advance(h.unit()).await;
    let by_force = OperatorAction {
        actor: "bob".into(),
        reason: "'; it was \u{e9} \"wrong\"".into(),
        target: Target::Any,
    };
    done(admin.resolve(second.id(), &Reply::new(500, "y"), h.retention(), &by_force).await);
    let now = h.wall().await;

    let all = answered(admin.audit(None, 10).await);
    let lines: Vec<_> = all
        .iter()
        .map(|e| {
            (e.id.key.as_str(), e.action.as_str(), e.before.as_str(), e.after.as_str(), e.actor.as_str())
        })
        .collect();
    assert_eq!(
        lines,
        [
            ("second", "resolve", "completed 201", "completed 500", "bob"),
            ("second", "resolve", "unknown", "completed 201", "alice"),
            ("first", "release", "unknown", "freed", "alice"),
        ]
    );
    assert_eq!(
        (all[0].reason.as_str(), all[1].reason.as_str()),
        (by_force.reason.as_str(), "the bank confirmed")
    );
    assert!(h.is_same_moment(all[0].at, now), "noted at {:?}, it is {now:?}", all[0].at);
    assert!(all[0].at > all[1].at && all[1].at > all[2].at);
    assert_eq!(answered(admin.audit(None, 2).await), all[..2]);
    assert_eq!(answered(admin.audit(Some(second.id()), 10).await), all[..2]);
    assert_eq!(answered(admin.audit(Some(second.id()), 1).await), all[..1]);
    assert_eq!(answered(admin.audit(Some(h.operation("third").id()), 10).await), []);
}

/// Every field of a record is shown as it stands at the moment.
pub async fn a_record_is_shown_as_it_stands(h: &Harness) {
    let admin = h.admin();
    let (operation, owner) = (operation("scope of \u{e9}", "key'"), fresh_token());
    let show = async || answered(admin.show(operation.id()).await);
    assert_eq!(show().await, None);

    let claimed = h.wall().await;
    h.acquire_as(&operation, &h.hold(owner)).await;
    h.advance(h.unit()).await;
    let view = show().await.expect("the record");
    assert_eq!((&view.id, view.fingerprint), (operation.id(), *operation.fingerprint()));
    assert_eq!((view.state, view.on_lease_end, view.attempt), (StateName::InProgress, OnLeaseEnd::Hold, 1));
    assert!(h.is_about(view.lease_left.expect("a live lease"), h.unit() * 2));
    assert!(h.is_same_moment(view.created_at, claimed));
    assert!(h.is_same_moment(view.locked_until, claimed + h.lease()));
    assert_eq!((view.expires_at, view.reply), (None, None));

    h.advance(h.unit() * 2).await;
    let view = show().await.expect("the record");
    assert_eq!((view.state, view.lease_left), (StateName::Unknown, None), "held, and its lease is over");

    let stored = h.finish(&operation, owner, Reply::new(201, "done")).await;
    let view = show().await.expect("the record");
    assert_eq!((view.state, view.lease_left), (StateName::Completed, None));
    assert_eq!(view.reply, Some(Reply::new(201, "done")));
    assert!(h.is_same_moment(view.expires_at.expect("it expires"), stored.expires_at));
    assert!(h.is_same_moment(view.created_at, claimed));

    let late = h.operation("late");
    h.acquire(&late, fresh_token()).await;
    h.advance(h.lease()).await;
    let view = answered(admin.show(late.id()).await).expect("the record");
    assert_eq!((view.state, view.lease_left), (StateName::Unknown, None), "until a retry takes it over");
    h.acquire(&late, fresh_token()).await;
    assert_eq!(answered(admin.show(late.id()).await).expect("the record").attempt, 2);
}

/// A record is as old as its first claim, whoever takes it over; where a claim finds it expired or freed, it is a new one.
pub async fn a_record_is_as_old_as_its_first_claim(h: &Harness) {
    let (admin, operation, owner, next) = (h.admin(), h.operation("k"), fresh_token(), fresh_token());
    let created = async || answered(admin.show(operation.id()).await).expect("a record").created_at;
    h.acquire(&operation, owner).await;
    let first = created().await;
    h.advance(h.unit()).await;
    h.acquire(&operation, owner).await;
    h.advance(h.lease()).await;
    assert_eq!(h.acquire(&operation, next).await.attempt, 2);
    assert!(h.is_same_moment(created().await, first));
    h.finish(&operation, next, Reply::ok("done")).await;
    assert!(h.is_same_moment(created().await, first));

    h.advance(h.retention()).await;
    assert_eq!(h.acquire(&operation, owner).await.attempt, 1);
    let second = created().await;
    assert!(second >= first + h.retention(), "expired: {second:?} after {first:?}");
    done(admin.free(operation.id(), &by_force()).await);
    h.advance(h.lease()).await;
    assert_eq!(h.acquire(&operation, next).await.attempt, 2);
    let third = created().await;
    assert!(third >= second + h.unit() * 2, "freed: {third:?} after {second:?}");
}

/// Pages of any size cover every record once, in the order of the bytes of scope and key.
pub async fn pages_cover_every_record_once(h: &Harness) {
    let admin = h.admin();
    let mut expected: Vec<OperationId> = Vec::new();
    for scope in ["", "a", "A", "ab", "\u{e9}", "a%"] {
        for key in ["b", "B", "b ", "bc", "_"] {
            let operation = operation(scope, key);
            h.acquire_as(&operation, &long(h, fresh_token())).await;
            expected.push(operation.id().clone());
        }
    }
    expected.sort();
    for limit in [1, 7, 15, 30, 31, 1000] {
        let mut seen = Vec::new();
        let mut after = None;
        loop {
            let query = ListQuery { after, limit, ..ListQuery::default() };
            let page = answered(admin.list(&query).await);
            assert!(page.records.len() <= limit as usize);
            assert!(page.next.is_none() || page.records.len() == limit as usize, "a short page is the last");
            assert!(
                page.next.is_none() || seen.len() + page.records.len() < expected.len(),
                "nothing follows"
            );
            seen.extend(page.records.into_iter().map(|view| view.id));
            after = page.next;
            if after.is_none() {
                break;
            }
        }
        assert_eq!(seen, expected, "pages of {limit}");
    }
}

/// A list is narrowed by state as it stands now, by scope, by key in every scope, and by age, all at once too.
pub async fn lists_are_filtered(h: &Harness) {
    let admin = h.admin();
    let ids = async |query: ListQuery| {
        let page = answered(admin.list(&query).await);
        assert!(page.records.iter().all(|view| view.reply.is_none()), "replies are left out");
        page.records.into_iter().map(|view| view.id.key.as_str().to_owned()).collect::<Vec<_>>()
    };
    h.acquire_as(&h.operation("held"), &h.hold(fresh_token())).await;
    h.acquire(&h.operation("late"), fresh_token()).await;
    unknown(h, "marked").await;
    h.advance(h.lease()).await;
    let long_lived = h.operation("young");
    h.acquire_as(&long_lived, &long(h, fresh_token())).await;
    h.acquire_as(&operation("another scope", "young"), &long(h, fresh_token())).await;
    let (done_operation, owner) = (h.operation("done"), fresh_token());
    h.acquire(&done_operation, owner).await;
    h.finish(&done_operation, owner, Reply::ok("done")).await;
    let (freed, _) = unknown(h, "freed").await;
    done(admin.free(freed.id(), &gently()).await);

    let state = |state| ListQuery { state: Some(state), ..ListQuery::default() };
    let key = |key: &str| ListQuery { key: Some(Key::new(key).expect("a key")), ..ListQuery::default() };
    assert_eq!(ids(state(StateName::Unknown)).await, ["held", "late", "marked"]);
    assert_eq!(ids(state(StateName::InProgress)).await, ["young", "young"]);
    assert_eq!(ids(state(StateName::Completed)).await, ["done"]);
    assert_eq!(ids(state(StateName::Freed)).await, ["freed"]);
    assert_eq!(ids(key("young")).await, ["young", "young"]);
    assert_eq!(ids(key("YOUNG")).await, Vec::<String>::new());
    assert_eq!(ids(key("%")).await, Vec::<String>::new());
    let old = ListQuery { older_than: Some(h.lease()), ..ListQuery::default() };
    assert_eq!(ids(old.clone()).await, ["held", "late", "marked"]);
    assert_eq!(ids(ListQuery { state: Some(StateName::Unknown), limit: 1, ..old.clone() }).await, ["held"]);
    let page = answered(admin.list(&ListQuery { state: Some(StateName::Unknown), limit: 1, ..old }).await);
    assert_eq!(page.next.map(|id| id.key.as_str().to_owned()), Some("held".into()));

    let own = ListQuery { scope: Some(long_lived.id().scope.clone()), ..ListQuery::default() };
    assert_eq!(ids(own.clone()).await, ["done", "freed", "held", "late", "marked", "young"]);
    assert_eq!(ids(ListQuery { key: key("young").key, ..own.clone() }).await, ["young"]);
    let nobodys = Some(Scope::new("ANOTHER SCOPE").expect("a scope"));
    assert_eq!(ids(ListQuery { scope: nobodys, ..ListQuery::default() }).await, Vec::<String>::new());
    let ancient = Some(Duration::from_secs(3600));
    assert_eq!(ids(ListQuery { older_than: ancient, ..own.clone() }).await, Vec::<String>::new());
    let unknown = ListQuery { state: Some(StateName::Unknown), ..own.clone() };
    assert_eq!(ids(unknown).await, ["held", "late", "marked"]);
    let page = answered(admin.list(&ListQuery { limit: 4, ..own.clone() }).await);
    assert_eq!(ids(ListQuery { after: page.next, ..own }).await, ["marked", "young"], "a page of one scope");
}

/// Records are counted by their state at the moment; expired ones apart, as long as they are there.
pub async fn records_are_counted_by_state(h: &Harness) {
    let admin = h.admin();
    let counts = async || {
        let s = answered(admin.stats().await);
        [s.in_progress, s.completed, s.unknown, s.freed, s.expired]
    };
    for _ in 0..2 {
        answered(admin.probe().await);
    }
    assert_eq!(counts().await, [0; 5], "a probe leaves nothing behind");
    h.acquire_as(&h.operation("held"), &h.hold(fresh_token())).await;
    h.acquire(&h.operation("late"), fresh_token()).await;
    unknown(h, "marked").await;
    let (freed, _) = unknown(h, "freed").await;
    done(admin.free(freed.id(), &gently()).await);
    let (ended, owner) = (h.operation("ended"), fresh_token());
    h.acquire(&ended, owner).await;
    h.finish(&ended, owner, Reply::ok("done")).await;
    assert_eq!(counts().await, [2, 1, 1, 1, 0]);
    h.advance(h.retention()).await;
    let expired = u64::from(h.expiry() == Expiry::ByPurge);
    assert_eq!(counts().await, [0, 0, 3, 1, expired]);
}

/// A tombstone fences until a purge comes `hold_retention` after the freeing, counted from the freeing itself.
pub async fn a_tombstone_is_purged_after_the_hold_retention(h: &Harness) {
    let admin = h.admin();
    let keep = h.unit() * 4;
    let (operation, owner) = unknown(h, "k").await;
    h.advance(h.unit() * 3).await;
    done(admin.free(operation.id(), &gently()).await);
    h.advance(h.unit() * 3).await;
    assert_eq!(h.purge(10, keep).await.removed, 0);
    h.assert_fenced(&operation, owner, None).await;
    h.advance(h.unit()).await;
    if h.expiry() == Expiry::ByStore {
        h.assert_fenced(&operation, owner, None).await;
        return;
    }
    assert_eq!(h.purge(10, keep).await.removed, 1);
    let late = h.complete(&operation, owner, Reply::ok("late")).await;
    assert!(matches!(late, CompleteOutcome::StoredAnew(_)), "{late:?}");
}

/// Resolved replies, tombstones and the audit table outlive a restart, where records do.
pub async fn operators_changes_outlive_a_restart(h: &Harness) {
    let (resolved, _) = unknown(h, "resolved").await;
    let (freed, owner) = unknown(h, "freed").await;
    let admin = h.admin();
    done(admin.resolve(resolved.id(), &by_hand(), h.retention(), &gently()).await);
    done(admin.free(freed.id(), &gently()).await);
    let audit = answered(admin.audit(None, 10).await);
    drop(admin);
    h.restart().await;
    if !h.survives_restart() {
        assert!(!h.store().capabilities().durable);
        assert_eq!(answered(h.admin().audit(None, 10).await), []);
        return;
    }
    assert_eq!(h.replay(&resolved).await.reply, by_hand());
    h.assert_fenced(&freed, owner, None).await;
    assert_eq!(answered(h.admin().audit(None, 10).await), audit);
    assert_eq!(h.acquire(&freed, fresh_token()).await.attempt, 2);
}

async fn unknown(h: &Harness, key: &str) -> (Operation, LeaseToken) {
    let (operation, owner) = (h.operation(key), fresh_token());
    h.acquire(&operation, owner).await;
    h.mark_unknown(&operation, owner).await;
    (operation, owner)
}

async fn operate(
    h: &Harness,
    admin: &std::sync::Arc<dyn StoreAdmin>,
    operation: &Operation,
    resolve: bool,
    action: &OperatorAction,
) -> OperatorOutcome {
    match resolve {
        true => answered(admin.resolve(operation.id(), &by_hand(), h.retention(), action).await),
        false => answered(admin.free(operation.id(), action).await),
    }
}

fn long(h: &Harness, token: LeaseToken) -> onlyonce_core::ClaimRequest {
    onlyonce_core::ClaimRequest { lease: Duration::from_secs(3600), ..h.request(token) }
}

fn by_hand() -> Reply {
    Reply::new(201, "by hand")
}

fn gently() -> OperatorAction {
    OperatorAction { actor: "alice".into(), reason: "the bank confirmed".into(), target: Target::Undecided }
}

fn by_force() -> OperatorAction {
    OperatorAction { target: Target::Any, ..gently() }
}

#[track_caller]
fn done(answer: Result<OperatorOutcome, onlyonce_core::StoreError>) -> RecordView {
    match answered(answer) {
        OperatorOutcome::Done(view) => *view,
        other => panic!("expected Done, got {other:?}"),
    }
}
