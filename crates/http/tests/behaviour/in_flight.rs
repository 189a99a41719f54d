//! H8: copies that meet the first one in flight.

use std::time::Duration;

use onlyonce_core::StateName;
use testkit::{PATIENCE, RawConnection, wait_until};

use crate::harness::{
    Gate, Hit, Server, ServerOptions, TestStore, assert_problem, assert_replay_of, on_every_store, reply,
};

on_every_store! {
    h8_a_copy_in_flight_is_told_when_to_come_back,
    h8_a_copy_can_wait_for_the_result,
    h8_a_copy_in_another_process_can_wait_too,
    h8_a_wait_that_is_over_is_a_409,
    h8_a_copy_that_is_refused_or_goes_away_changes_nothing,
    h8_after_a_transient_end_one_waiter_runs,
}

fn gated(
    gate: &Gate,
) -> impl Fn(Hit) -> std::pin::Pin<Box<dyn Future<Output = http::Response<axum::body::Body>> + Send>> + Clone + use<>
{
    let gate = gate.clone();
    move |hit| {
        let gate = gate.clone();
        Box::pin(async move {
            gate.pass().await;
            reply(200, format!("run {}", hit.number))
        })
    }
}

#[track_caller]
fn assert_in_progress(answer: &testkit::ClientResponse, most: u64) {
    assert_problem(answer, 409, "in-progress");
    assert_eq!(answer.json()["retryable"], true);
    let after: u64 = answer.header("retry-after").expect("a Retry-After").parse().expect("whole seconds");
    assert!((1..=most).contains(&after), "{after}");
}

async fn h8_a_copy_in_flight_is_told_when_to_come_back(store: TestStore) {
    let gate = Gate::closed();
    let server = Server::start(&store, |layer| layer, gated(&gate)).await;
    let short =
        ServerOptions::new(&store).lease(Duration::from_secs(3)).start(|layer| layer, gated(&gate)).await;
    let first = tokio::spawn(server.client().post("/pay").key("k").body("1").send());
    let brief = tokio::spawn(short.client().post("/pay").key("short").body("1").send());
    wait_until("both run", || server.runs() == 1 && short.runs() == 1).await;
    for _ in 0..5 {
        assert_in_progress(&server.pay("k", "1").await, 5);
        // Asked of another process, which knows the store's record alone: never later than the lease.
        assert_in_progress(&server.pay("short", "1").await, 3);
    }
    gate.open();
    let first = first.await.unwrap().unwrap();
    assert_replay_of(&server.pay("k", "1").await, &first);
    brief.await.unwrap().unwrap();
    assert_eq!(server.runs(), 1);
}

async fn h8_a_copy_can_wait_for_the_result(store: TestStore) {
    let gate = Gate::closed();
    let server = Server::start(&store, |layer| layer.wait(PATIENCE), gated(&gate)).await;
    let send = || tokio::spawn(server.client().post("/pay").key("k").body("1").send());
    let copies: Vec<_> = (0..20).map(|_| send()).collect();
    wait_until("one runs", || server.runs() == 1).await;
    gate.open();
    let mut first_answers = 0;
    for copy in copies {
        let answer = copy.await.unwrap().unwrap();
        assert_eq!((answer.status, answer.text()), (200, "run 1"));
        first_answers += usize::from(answer.header("idempotency-replayed").is_none());
    }
    assert_eq!((first_answers, server.runs()), (1, 1));
}

async fn h8_a_copy_in_another_process_can_wait_too(store: TestStore) {
    let gate = Gate::closed();
    let server = Server::start(&store, |layer| layer, gated(&gate)).await;
    let other = Server::start(&store, |layer| layer.wait(PATIENCE), gated(&gate)).await;
    let first = tokio::spawn(server.client().post("/pay").key("k").body("1").send());
    wait_until("it runs", || server.runs() == 1).await;
    let copy = tokio::spawn(other.client().post("/pay").key("k").body("1").send());
    wait_until("the other asks", || {
        other.idem.counts().acquired == 0 && store.faults.claims.lock().len() >= 3
    })
    .await;
    gate.open();
    let first = first.await.unwrap().unwrap();
    assert_replay_of(&copy.await.unwrap().unwrap(), &first);
    assert_eq!((server.runs(), other.runs()), (1, 0));
}

async fn h8_a_wait_that_is_over_is_a_409(store: TestStore) {
    let gate = Gate::closed();
    let server = Server::start(&store, |layer| layer.wait(Duration::from_millis(100)), gated(&gate)).await;
    let first = tokio::spawn(server.client().post("/pay").key("k").body("1").send());
    wait_until("it runs", || server.runs() == 1).await;
    assert_in_progress(&server.pay("k", "1").await, 5);
    gate.open();
    first.await.unwrap().unwrap();
    assert_eq!(server.runs(), 1);
}

async fn h8_a_copy_that_is_refused_or_goes_away_changes_nothing(store: TestStore) {
    let gate = Gate::closed();
    let server = Server::start(&store, |layer| layer.wait(PATIENCE), gated(&gate)).await;
    let other = Server::start(&store, |layer| layer, gated(&gate)).await;
    let first = tokio::spawn(server.client().post("/pay").key("k").body("1").send());
    wait_until("it runs", || server.runs() == 1).await;
    let mut gone = RawConnection::open(server.addr()).await;
    gone.write("POST /pay HTTP/1.1\r\nhost: a\r\nidempotency-key: k\r\ncontent-length: 1\r\n\r\n1").await;
    wait_until("a copy waits", || server.idem.waiting() == 1).await;
    gone.reset();
    assert_problem(&server.pay("k", "2").await, 422, "key-reused");
    assert_in_progress(&other.pay("k", "1").await, 5);
    assert_problem(&other.pay("k", "2").await, 422, "key-reused");
    let record = || async { store.admin.list(&Default::default()).await.unwrap().records.remove(0) };
    let before = record().await;
    assert_eq!((before.state, before.attempt), (StateName::InProgress, 1));
    gate.open();
    let first = first.await.unwrap().unwrap();
    assert_eq!((first.status, first.header("idempotency-status")), (200, None));
    assert_replay_of(&server.pay("k", "1").await, &first);
    assert_replay_of(&other.pay("k", "1").await, &first);
    assert_eq!((server.runs(), other.runs(), record().await.state), (1, 0, StateName::Completed));
}

async fn h8_after_a_transient_end_one_waiter_runs(store: TestStore) {
    let (first_gate, second_gate) = (Gate::closed(), Gate::closed());
    let gates = (first_gate.clone(), second_gate.clone());
    let server = Server::start(
        &store,
        |layer| layer.wait(PATIENCE),
        move |hit: Hit| {
            let (first, second) = gates.clone();
            async move {
                if hit.number == 1 {
                    first.pass().await;
                    return reply(503, "busy");
                }
                second.pass().await;
                reply(200, format!("run {}", hit.number))
            }
        },
    )
    .await;
    let send = || tokio::spawn(server.client().post("/pay").key("k").body("1").send());
    let first = send();
    wait_until("the first runs", || server.runs() == 1).await;
    let waiters: Vec<_> = (0..10).map(|_| send()).collect();
    // Each of them has a task of its own that reached the engine before the first one ends.
    wait_until("ten wait", || server.idem.waiting() == 10).await;
    first_gate.open();
    let first = first.await.unwrap().unwrap();
    assert_eq!((first.status, first.text()), (503, "busy"));
    wait_until("one more runs", || server.runs() == 2).await;
    second_gate.open();
    let (mut ran, mut told) = (0, 0);
    for waiter in waiters {
        let answer = waiter.await.unwrap().unwrap();
        match answer.status {
            200 => {
                assert_eq!(answer.text(), "run 2");
                ran += 1;
            }
            503 => {
                assert_eq!(answer.text(), "busy");
                let after: u64 = answer.header("retry-after").expect("a Retry-After").parse().unwrap();
                assert!((1..=5).contains(&after), "{after}");
                told += 1;
            }
            _ => panic!("{answer:?}"),
        }
    }
    assert_eq!((ran, told, server.runs()), (1, 9, 2));
}
