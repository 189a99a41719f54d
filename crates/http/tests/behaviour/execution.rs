//! H9, H10 and H12: how a guarded request runs.

use std::time::Duration;

use onlyonce_core::{OperationId, PurgeRequest, StateName, StoreErrorKind};
use testkit::{PATIENCE, RawConnection, wait_until};

use crate::harness::{
    Fault, Faults, Gate, Hit, Server, ServerOptions, TestStore, assert_problem, on_every_store, reply,
};

on_every_store! {
    h9_a_body_that_breaks_off_runs_nothing,
    h9_a_body_that_does_not_come_is_given_up,
    h9_work_outlives_its_client,
    h10_a_reply_is_recorded_before_its_first_byte_leaves,
    h12_a_panic_is_a_500_and_its_outcome_unknown,
    h12_under_takeover_a_retry_runs_again_after_the_lease,
    the_last_attempt_asks_for_no_retry,
    work_past_its_time_is_unknown_and_its_late_end_resolves_it,
    the_handler_gets_attempt_and_downstream_keys,
}

async fn h9_a_body_that_breaks_off_runs_nothing(store: TestStore) {
    let server = Server::counting(&store, |layer| layer).await;
    let mut connection = RawConnection::open(server.addr()).await;
    connection
        .write("POST /pay HTTP/1.1\r\nhost: a\r\nidempotency-key: k\r\ncontent-length: 10\r\n\r\nhalf")
        .await;
    connection.shutdown().await;
    let _ = connection.read_to_end().await;
    assert_eq!((server.runs(), store.records().await), (0, 0));
    assert_eq!(server.pay("k", "other body").await.text(), "run 1");
}

async fn h9_a_body_that_does_not_come_is_given_up(store: TestStore) {
    let server = Server::counting(&store, |layer| layer.body_timeout(Duration::from_millis(100))).await;
    let (body, request) = server.client().post("/pay").key("k").stream();
    let answer = request.send().await.unwrap();
    assert_problem(&answer, 408, "body-timeout");
    drop(body);
    assert_eq!((server.runs(), store.records().await), (0, 0));
}

async fn h9_work_outlives_its_client(store: TestStore) {
    let gate = Gate::closed();
    let at = gate.clone();
    let server = Server::start(
        &store,
        |layer| layer,
        move |hit: Hit| {
            let at = at.clone();
            async move {
                at.pass().await;
                reply(200, format!("run {}", hit.number))
            }
        },
    )
    .await;
    let mut connection = RawConnection::open(server.addr()).await;
    connection
        .write("POST /pay HTTP/1.1\r\nhost: a\r\nidempotency-key: k\r\ncontent-length: 1\r\n\r\n1")
        .await;
    wait_until("it runs", || server.runs() == 1).await;
    connection.reset();
    // Time for the server to see it go.
    tokio::time::sleep(Duration::from_millis(100)).await;
    gate.open();
    wait_until("it is recorded", || server.idem.counts().completed == 1).await;
    let retry = server.pay("k", "1").await;
    assert_eq!((retry.text(), retry.header("idempotency-replayed")), ("run 1", Some("true")));
    assert_eq!(server.runs(), 1);
}

async fn h10_a_reply_is_recorded_before_its_first_byte_leaves(store: TestStore) {
    let server = Server::counting(&store, |layer| layer).await;
    Faults::set(&store.faults.complete, Fault::Refused(StoreErrorKind::Unavailable));
    let mut connection = RawConnection::open(server.addr()).await;
    connection
        .write("POST /pay HTTP/1.1\r\nhost: a\r\nidempotency-key: k\r\ncontent-length: 1\r\n\r\n1")
        .await;
    wait_until("it runs", || server.runs() == 1).await;
    let (early, closed) = connection.read_until_quiet(Duration::from_millis(300)).await;
    assert!(early.is_empty() && !closed, "{}", String::from_utf8_lossy(&early));
    Faults::set(&store.faults.complete, Fault::None);
    let head = String::from_utf8(connection.read_head().await.unwrap()).unwrap();
    assert!(head.starts_with("HTTP/1.1 201 ") && !head.contains("idempotency-status"), "{head}");
    let records = store.admin.list(&Default::default()).await.unwrap().records;
    assert_eq!(records[0].state, StateName::Completed);
}

async fn panics_first(hit: Hit) -> http::Response<axum::body::Body> {
    assert!(hit.number > 1, "broken on purpose");
    reply(200, format!("run {}, attempt {}", hit.number, hit.context.unwrap().attempt()))
}

async fn h12_a_panic_is_a_500_and_its_outcome_unknown(store: TestStore) {
    let server = ServerOptions::new(&store).hold().start(|layer| layer, panics_first).await;
    let answer = server.pay("k", "1").await;
    assert_problem(&answer, 500, "handler-panicked");
    assert_eq!(answer.json()["retryable"], false);
    for _ in 0..2 {
        let retry = server.pay("k", "1").await;
        assert_problem(&retry, 409, "outcome-unknown");
        assert_eq!((&retry.json()["retryable"], retry.header("retry-after")), (&false.into(), None));
    }
    // The server is up.
    assert_eq!(server.pay("other", "1").await.status, 200);
    assert_eq!(server.runs(), 2);
}

async fn h12_under_takeover_a_retry_runs_again_after_the_lease(store: TestStore) {
    let lease = Duration::from_secs(1);
    let server =
        ServerOptions::new(&store).lease(lease).start(|layer| layer.wait(PATIENCE), panics_first).await;
    let answer = server.pay("k", "1").await;
    assert_problem(&answer, 500, "handler-panicked");
    assert_eq!((&answer.json()["retryable"], answer.header("retry-after")), (&true.into(), Some("1")));
    let retry = server.pay("k", "1").await;
    assert_eq!((retry.status, retry.text()), (200, "run 2, attempt 2"));
}

async fn the_last_attempt_asks_for_no_retry(store: TestStore) {
    let options = ServerOptions::new(&store).lease(Duration::from_secs(1));
    let server = options.policy(|policy| policy.max_attempts = 1).start(|layer| layer, panics_first).await;
    let answer = server.pay("k", "1").await;
    assert_problem(&answer, 500, "handler-panicked");
    assert_eq!((&answer.json()["retryable"], answer.header("retry-after")), (&false.into(), None));
}

async fn work_past_its_time_is_unknown_and_its_late_end_resolves_it(store: TestStore) {
    let gate = Gate::closed();
    let at = gate.clone();
    let options = ServerOptions::new(&store).hold().lease(Duration::from_secs(1));
    let options = options.policy(|policy| policy.work_timeout = Duration::from_millis(200));
    let server = options
        .start(
            |layer| layer,
            move |hit: Hit| {
                let at = at.clone();
                async move {
                    at.pass().await;
                    reply(200, format!("run {}", hit.number))
                }
            },
        )
        .await;
    let answer = server.pay("k", "1").await;
    assert_problem(&answer, 504, "outcome-unknown");
    assert_eq!(answer.json()["retryable"], false);
    testkit::wait_for("the lease is over", async || {
        (server.pay("k", "1").await.code() == "outcome-unknown").then_some(())
    })
    .await;
    gate.open();
    let late = testkit::wait_for("the late end", async || {
        let retry = server.pay("k", "1").await;
        (retry.status == 200).then_some(retry)
    })
    .await;
    assert_eq!((late.text(), late.header("idempotency-replayed")), ("run 1", Some("true")));
    assert_eq!(server.runs(), 1);
}

async fn the_handler_gets_attempt_and_downstream_keys(store: TestStore) {
    let lease = Duration::from_secs(1);
    let server = ServerOptions::new(&store)
        .lease(lease)
        .start(
            |layer| layer.wait(PATIENCE),
            |hit: Hit| async move {
                let context = hit.context.unwrap();
                let status = if context.attempt() == 1 { 504 } else { 200 };
                reply(status, format!("{} {}", context.attempt(), context.downstream_key("charge")))
            },
        )
        .await;
    let first = server.pay("k", "1").await;
    let second = server.pay("k", "1").await;
    assert_eq!((first.status, second.status), (504, 200));
    let key = first.text().strip_prefix("1 ").unwrap();
    assert_eq!(second.text(), format!("2 {key}"));
    // A record that was purged in the middle is another matter: see the tests of the engine.
    let purged = store.admin.purge(&PurgeRequest { limit: 10, hold_retention: lease }).await.unwrap();
    assert_eq!(purged.removed, 0);
    let id: OperationId = server.hits()[0].context.as_ref().unwrap().operation().id().clone();
    assert_eq!(store.admin.show(&id).await.unwrap().unwrap().attempt, 2);
}
