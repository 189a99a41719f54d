//! H19 to H22: refusals, and a store in trouble.

use std::time::Duration;

use onlyonce_core::{OnLeaseEnd, PurgeRequest, StateName, StoreErrorKind};
use onlyonce_http::{DocsUrl, OnStoreFailure, Verdict};
use parking_lot::Mutex;
use std::sync::Arc;
use testkit::{PATIENCE, wait_for, wait_until};

use crate::harness::{
    Fault, Faults, Gate, Hit, Server, ServerOptions, TestStore, assert_problem, assert_replay_of,
    on_every_store, reply,
};

on_every_store! {
    h19_refusals_are_problem_details_with_a_link,
    h20_a_store_that_is_down_fails_closed,
    h20_a_store_that_is_slow_fails_closed,
    h20_open_runs_unguarded_and_says_so,
    h20_an_ambiguous_claim_is_asked_again_with_the_same_token,
    h20_a_record_that_cannot_be_read_is_never_run,
    h21_a_completion_is_asked_again_within_the_lease,
    h21_a_reply_that_cannot_be_recorded_is_given_and_the_lease_left,
    h22_a_stale_owner_answers_with_the_records_reply,
    h22_a_stale_owner_without_a_reply_is_told_so,
    h22_a_record_that_is_gone_is_written_anew,
    past_max_in_flight_requests_are_refused,
    after_shutdown_requests_are_refused,
    each_request_is_reported,
}

async fn h19_refusals_are_problem_details_with_a_link(store: TestStore) {
    let docs = DocsUrl::new("https://docs.example.com/{code}").unwrap();
    let server = Server::counting(&store, |layer| layer.docs_url(docs)).await;
    let refused = server.client().post("/pay").send().await.unwrap();
    assert_problem(&refused, 400, "key-missing");
    assert_eq!(refused.header("link"), Some("<https://docs.example.com/key-missing>; rel=\"describedby\""));
    server.pay("k", "1").await;
    let reused = server.pay("k", "2").await;
    assert_eq!(reused.header("link"), Some("<https://docs.example.com/key-reused>; rel=\"describedby\""));
    assert_eq!(reused.header("cache-control"), Some("no-store"));
    assert_eq!(server.pay("k", "1").await.header("link"), None);
}

async fn h20_a_store_that_is_down_fails_closed(store: TestStore) {
    let server = ServerOptions::new(&store)
        .limits(|limits| limits.store_timeout = Duration::from_millis(200))
        .start(|layer| layer, |hit: Hit| async move { reply(200, format!("run {}", hit.number)) })
        .await;
    for kind in [StoreErrorKind::Unavailable, StoreErrorKind::Full, StoreErrorKind::Internal] {
        Faults::set(&store.faults.claim, Fault::Refused(kind));
        let answer = server.pay("k", "1").await;
        assert_problem(&answer, 503, "store-unavailable");
        assert_eq!((&answer.json()["retryable"], answer.header("retry-after")), (&true.into(), Some("1")));
    }
    assert_eq!(server.runs(), 0);
    Faults::set(&store.faults.claim, Fault::None);
    assert_eq!(server.pay("k", "1").await.text(), "run 1");
}

async fn h20_a_store_that_is_slow_fails_closed(store: TestStore) {
    let server = ServerOptions::new(&store)
        .limits(|limits| limits.store_timeout = Duration::from_millis(200))
        .start(|layer| layer, |_: Hit| async { reply(200, "x") })
        .await;
    Faults::set(&store.faults.claim, Fault::Hangs);
    assert_problem(&server.pay("k", "1").await, 503, "store-unavailable");
    assert_eq!(server.runs(), 0);
}

async fn h20_open_runs_unguarded_and_says_so(store: TestStore) {
    let server = ServerOptions::new(&store)
        .limits(|limits| limits.store_timeout = Duration::from_millis(200))
        .start(
            |layer| layer.on_store_failure(OnStoreFailure::RunUnguarded),
            |hit: Hit| async move {
                assert!(hit.body != "panic", "broken on purpose");
                reply(201, format!("run {}", hit.number))
            },
        )
        .await;
    Faults::set(&store.faults.claim, Fault::Refused(StoreErrorKind::Unavailable));
    for run in 1..=2 {
        let answer = server.pay("k", "1").await;
        assert_eq!((answer.status, answer.text()), (201, &*format!("run {run}")));
        assert_eq!(answer.header("idempotency-status"), Some("degraded"));
    }
    let panicked = server.pay("k", "panic").await;
    assert_problem(&panicked, 500, "handler-panicked");
    assert_eq!(panicked.header("idempotency-status"), Some("degraded"));
    Faults::set(&store.faults.claim, Fault::None);
    let guarded = server.pay("k", "1").await;
    assert_eq!(guarded.header("idempotency-status"), None);
    assert_replay_of(&server.pay("k", "1").await, &guarded);
}

async fn h20_an_ambiguous_claim_is_asked_again_with_the_same_token(store: TestStore) {
    let server = Server::counting(&store, |layer| layer).await;
    Faults::set(&store.faults.claim, Fault::AnswerLostOnce);
    let first = server.pay("k", "1").await;
    assert_eq!((first.status, first.text()), (201, "run 1"));
    let claims = store.faults.claims.lock().clone();
    assert!(claims.len() == 2 && claims[0] == claims[1], "{claims:?}");
    assert_replay_of(&server.pay("k", "1").await, &first);
}

async fn h20_a_record_that_cannot_be_read_is_never_run(store: TestStore) {
    let server = Server::counting(&store, |layer| layer.on_store_failure(OnStoreFailure::RunUnguarded)).await;
    Faults::set(&store.faults.claim, Fault::Refused(StoreErrorKind::Unreadable));
    assert_problem(&server.pay("k", "1").await, 503, "record-unreadable");
    assert_eq!(server.runs(), 0);
}

async fn h21_a_completion_is_asked_again_within_the_lease(store: TestStore) {
    let server = Server::counting(&store, |layer| layer).await;
    Faults::set(&store.faults.complete, Fault::RefusedTimes(3));
    let first = server.pay("k", "1").await;
    assert_eq!((first.status, first.header("idempotency-status")), (201, None));
    Faults::set(&store.faults.complete, Fault::AnswerLostOnce);
    let lost = server.pay("k2", "1").await;
    assert_eq!((lost.status, lost.header("idempotency-status")), (201, None));
    assert_replay_of(&server.pay("k", "1").await, &first);
    assert_replay_of(&server.pay("k2", "1").await, &lost);
    assert_eq!(server.runs(), 2);
}

async fn h21_a_reply_that_cannot_be_recorded_is_given_and_the_lease_left(store: TestStore) {
    let options = ServerOptions::new(&store).hold().lease(Duration::from_secs(1));
    let server = options
        .start(|layer| layer, |hit: Hit| async move { reply(201, format!("run {}", hit.number)) })
        .await;
    Faults::set(&store.faults.complete, Fault::Refused(StoreErrorKind::Unavailable));
    Faults::set(&store.faults.renew, Fault::Refused(StoreErrorKind::Unavailable));
    let answer = server.pay("k", "1").await;
    assert_eq!((answer.status, answer.text()), (201, "run 1"));
    assert_eq!(answer.header("idempotency-status"), Some("not-recorded"));
    assert_eq!(server.idem.counts().not_recorded, 1);
    // Not released: nobody runs it again before somebody knows.
    let retry = server.pay("k", "1").await;
    assert_eq!(retry.status, 409, "{retry:?}");
    wait_for("the lease is over", async || {
        (server.pay("k", "1").await.code() == "outcome-unknown").then_some(())
    })
    .await;
    assert_eq!(server.runs(), 1);
}

/// An owner whose lease ends while it works, and another process that takes over.
struct Stale {
    owner: Server,
    other: Server,
    owner_gate: Gate,
    other_gate: Gate,
}

async fn stale(store: &TestStore) -> Stale {
    let (owner_gate, other_gate) = (Gate::closed(), Gate::closed());
    let at = |gate: &Gate, who: &'static str| {
        let gate = gate.clone();
        move |_: Hit| {
            let gate = gate.clone();
            async move {
                gate.pass().await;
                reply(200, who)
            }
        }
    };
    let options = || ServerOptions::new(store).lease(Duration::from_secs(1));
    let owner = options().start(|layer| layer, at(&owner_gate, "owner")).await;
    let other = options().sound(store).start(|layer| layer.wait(PATIENCE), at(&other_gate, "other")).await;
    // The owner cannot renew.
    Faults::set(&store.faults.renew, Fault::Refused(StoreErrorKind::Unavailable));
    Stale { owner, other, owner_gate, other_gate }
}

async fn h22_a_stale_owner_answers_with_the_records_reply(store: TestStore) {
    let Stale { owner, other, owner_gate, other_gate } = stale(&store).await;
    let from_owner = tokio::spawn(owner.client().post("/pay").key("k").body("1").send());
    wait_until("the owner works", || owner.runs() == 1).await;
    other_gate.open();
    let taken_over = other.pay("k", "1").await;
    assert_eq!((taken_over.text(), taken_over.header("idempotency-replayed")), ("other", None));
    owner_gate.open();
    assert_replay_of(&from_owner.await.unwrap().unwrap(), &taken_over);
    assert_replay_of(&owner.pay("k", "1").await, &taken_over);
    assert_eq!((owner.runs(), other.runs(), owner.idem.counts().fenced), (1, 1, 1));
}

async fn h22_a_stale_owner_without_a_reply_is_told_so(store: TestStore) {
    let Stale { owner, other, owner_gate, other_gate } = stale(&store).await;
    let from_owner = tokio::spawn(owner.client().post("/pay").key("k").body("1").send());
    wait_until("the owner works", || owner.runs() == 1).await;
    let from_other = tokio::spawn(other.client().post("/pay").key("k").body("1").send());
    wait_until("the other works", || other.runs() == 1).await;
    owner_gate.open();
    let told = from_owner.await.unwrap().unwrap();
    assert_problem(&told, 409, "superseded");
    assert_eq!((&told.json()["retryable"], told.header("retry-after")), (&true.into(), Some("1")));
    other_gate.open();
    let taken_over = from_other.await.unwrap().unwrap();
    assert_eq!(taken_over.text(), "other");
    assert_replay_of(&owner.pay("k", "1").await, &taken_over);
}

async fn h22_a_record_that_is_gone_is_written_anew(store: TestStore) {
    let Stale { owner, owner_gate, .. } = stale(&store).await;
    let from_owner = tokio::spawn(owner.client().post("/pay").key("k").body("1").send());
    wait_until("the owner works", || owner.runs() == 1).await;
    wait_for("the record is purged", async || {
        let request = PurgeRequest { limit: 10, hold_retention: Duration::ZERO };
        (store.admin.purge(&request).await.unwrap().removed == 1).then_some(())
    })
    .await;
    assert_eq!(store.records().await, 0);
    owner_gate.open();
    let first = from_owner.await.unwrap().unwrap();
    assert_eq!((first.text(), first.header("idempotency-status")), ("owner", None));
    let records = store.admin.list(&Default::default()).await.unwrap().records;
    assert_eq!((records.len(), records[0].state), (1, StateName::Completed));
    assert_replay_of(&owner.pay("k", "1").await, &first);
    assert_eq!((owner.runs(), owner.idem.counts().completed_anew), (1, 1));
}

async fn past_max_in_flight_requests_are_refused(store: TestStore) {
    let gate = Gate::closed();
    let at = gate.clone();
    let server = ServerOptions::new(&store)
        .limits(|limits| limits.max_in_flight = 1)
        .start(
            |layer| layer,
            move |_: Hit| {
                let at = at.clone();
                async move {
                    at.pass().await;
                    reply(200, "x")
                }
            },
        )
        .await;
    let first = tokio::spawn(server.client().post("/pay").key("a").body("1").send());
    wait_until("it runs", || server.runs() == 1).await;
    let refused = server.pay("b", "1").await;
    assert_problem(&refused, 503, "overloaded");
    assert_eq!(refused.header("retry-after"), Some("1"));
    gate.open();
    assert_eq!(first.await.unwrap().unwrap().status, 200);
    assert_eq!((server.runs(), store.records().await), (1, 1));
}

async fn after_shutdown_requests_are_refused(store: TestStore) {
    let server = Server::counting(&store, |layer| layer).await;
    assert_eq!(server.idem.shutdown(PATIENCE).await, 0);
    assert_problem(&server.pay("k", "1").await, 503, "shutting-down");
    assert_eq!(server.runs(), 0);
}

async fn each_request_is_reported(store: TestStore) {
    let reports = Arc::new(Mutex::new(Vec::new()));
    let log = reports.clone();
    let options = ServerOptions::new(&store).policy(|policy| policy.on_lease_end = OnLeaseEnd::Hold);
    let server = options
        .start(
            |layer| {
                layer.optional().report(move |report| {
                    log.lock().push((report.verdict, report.status, report.attempt, report.key_hash));
                })
            },
            |hit: Hit| async move { reply(hit.uri.path()[1..].parse().unwrap(), "x") },
        )
        .await;
    let send = |path: &'static str, key: &'static str| server.client().post(path).key(key).send();
    for (path, key) in
        [("/201", "a"), ("/201", "a"), ("/202", "a"), ("/503", "b"), ("/504", "c"), ("/200", "a,b")]
    {
        send(path, key).await.unwrap();
    }
    server.client().post("/200").send().await.unwrap();
    server.client().get("/200").send().await.unwrap();
    let reports = reports.lock().clone();
    let seen: Vec<_> = reports
        .iter()
        .map(|(verdict, status, attempt, _)| (verdict.to_string(), *status, *attempt))
        .collect();
    let expected = [
        ("ran", 201, Some(1)),
        ("replayed", 201, None),
        ("key-reused", 422, None),
        ("released", 503, Some(1)),
        ("unknown", 504, Some(1)),
        ("key-malformed", 400, None),
        ("ignored", 200, None),
    ];
    assert_eq!(seen, expected.map(|(verdict, status, attempt)| (verdict.to_owned(), status, attempt)));
    assert_eq!(reports[0].0, Verdict::Ran);
    assert!(reports[0].3.is_some() && reports[0].3 == reports[2].3 && reports[0].3 != reports[3].3);
}
