//! The status of a key, asked for by the client that sent it.

use std::time::Duration;

use onlyonce_core::{Key, ListQuery, OperationId, OperatorAction, Scope, StateName, Target};
use testkit::{ClientResponse, wait_until};

use crate::harness::{Gate, Hit, Server, ServerOptions, TestStore, assert_problem, on_every_store, reply};

on_every_store! {
    a_key_is_absent_in_progress_completed_or_unknown,
    out_of_attempts_it_is_unknown_for_everybody,
    a_look_up_stays_in_the_callers_scope_and_runs_nothing,
    keys_are_percent_encoded,
    without_the_option_the_path_is_the_services,
}

async fn look(server: &Server, key: &str) -> ClientResponse {
    server.client().get(&format!("/.well-known/idempotency/{key}")).send().await.unwrap()
}

fn is_time(value: &serde_json::Value) -> bool {
    value.as_str().is_some_and(|text| text.starts_with("20") && text.ends_with('Z') && text.len() == 20)
}

async fn a_key_is_absent_in_progress_completed_or_unknown(store: TestStore) {
    let gate = Gate::closed();
    let handler = {
        let gate = gate.clone();
        move |hit: Hit| {
            let gate = gate.clone();
            async move {
                gate.pass().await;
                reply(if hit.uri.path() == "/lost" { 504 } else { 201 }, "done")
            }
        }
    };
    let admin = store.admin.clone();
    let hold = ServerOptions::new(&store).hold();
    let server = hold.start(|layer| layer.status_lookup(admin), handler).await;
    let absent = look(&server, "k").await;
    assert_eq!((absent.status, absent.header("cache-control")), (200, Some("no-store")));
    assert_eq!(absent.header("content-type"), Some("application/json"));
    assert_eq!(absent.json(), serde_json::json!({"key": "k", "state": "absent"}));

    let send = |path: &str, key: &str| {
        let request = server.client().post(path).key(key).header("x-request-id", "req-1");
        tokio::spawn(request.body("1").send())
    };
    let (first, lost) = (send("/pay", "k"), send("/lost", "lost"));
    wait_until("both run", || server.runs() == 2).await;
    let at_work = look(&server, "k").await.json();
    assert_eq!((&at_work["state"], &at_work["attempt"]), (&"in-progress".into(), &1.into()));
    assert!(is_time(&at_work["since"]) && at_work["original_request"] == "req-1", "{at_work}");

    gate.open();
    first.await.unwrap().unwrap();
    lost.await.unwrap().unwrap();
    let done = look(&server, "k").await.json();
    assert_eq!((&done["state"], &done["status"]), (&"completed".into(), &201.into()));
    assert!(is_time(&done["expires"]), "{done}");
    let unknown = look(&server, "lost").await.json();
    assert!(unknown["state"] == "unknown" && is_time(&unknown["since"]), "{unknown}");
    assert_eq!(unknown["retryable"], false, "held");

    let id = OperationId { scope: Scope::anonymous(), key: Key::new("lost").unwrap() };
    let action =
        OperatorAction { actor: "me".into(), reason: "it did not happen".into(), target: Target::Undecided };
    store.admin.free(&id, &action).await.unwrap();
    assert_eq!(look(&server, "lost").await.json()["state"], "absent", "freed: a retry runs");
    assert_eq!(server.runs(), 2);
}

async fn out_of_attempts_it_is_unknown_for_everybody(store: TestStore) {
    let admin = store.admin.clone();
    let retry =
        ServerOptions::new(&store).lease(Duration::from_secs(1)).policy(|policy| policy.max_attempts = 2);
    let lost = |_: Hit| async { reply(504, "lost") };
    let server = retry.start(|layer| layer.status_lookup(admin), lost).await;
    for (attempt, runs_again) in [(1, true), (2, false)] {
        server.pay("k", "1").await;
        let state = testkit::wait_for("the lease is over", async || {
            let state = look(&server, "k").await.json();
            (state["state"] == "unknown").then_some(state)
        })
        .await;
        assert_eq!(
            (&state["attempt"], &state["retryable"]),
            (&attempt.into(), &runs_again.into()),
            "{state}"
        );
        let query = ListQuery { state: Some(StateName::Unknown), ..ListQuery::default() };
        assert_eq!(store.admin.list(&query).await.unwrap().records.len(), 1, "operators find it too");
        assert_eq!(store.admin.stats().await.unwrap().unknown, 1);
    }
    assert_problem(&server.pay("k", "1").await, 409, "outcome-unknown");
    assert_eq!(server.runs(), 2);
}

async fn a_look_up_stays_in_the_callers_scope_and_runs_nothing(store: TestStore) {
    let admin = store.admin.clone();
    let server = Server::counting(&store, |layer| layer.status_lookup(admin)).await;
    let alice = server.client().post("/pay").key("k").header("authorization", "Basic alice").body("1");
    alice.send().await.unwrap();
    let ask = |caller: &str| {
        let request = server.client().get("/.well-known/idempotency/k").header("authorization", caller);
        request.send()
    };
    assert_eq!(ask("Basic alice").await.unwrap().json()["state"], "completed");
    assert_eq!(ask("Basic bob").await.unwrap().json()["state"], "absent");
    assert_problem(&ask("DPoP x").await.unwrap(), 400, "scope-unstable");
    for _ in 0..3 {
        let head =
            server.client().request(http::Method::HEAD, "/.well-known/idempotency/k").send().await.unwrap();
        assert_eq!((head.status, head.body.len()), (200, 0));
    }
    assert_eq!((server.runs(), store.records().await), (1, 1), "nothing ran, nothing was claimed");
    // Other methods are the service's.
    let post =
        server.client().request(http::Method::DELETE, "/.well-known/idempotency/k").send().await.unwrap();
    assert_eq!((post.status, server.runs()), (201, 2));
}

async fn keys_are_percent_encoded(store: TestStore) {
    let admin = store.admin.clone();
    let server = Server::counting(&store, |layer| layer.status_lookup(admin)).await;
    server.pay("\"a/b %\"", "1").await;
    assert_eq!(look(&server, "a%2Fb%20%25").await.json()["state"], "completed");
    assert_eq!(look(&server, &"k".repeat(255)).await.json()["state"], "absent");
    for wrong in ["", "a/b", "%", "%zz", "%00", "%C3%A9", &"k".repeat(256)] {
        assert_problem(&look(&server, wrong).await, 400, "key-malformed");
    }
    assert_eq!(server.runs(), 1);
}

async fn without_the_option_the_path_is_the_services(store: TestStore) {
    let server = Server::counting(&store, |layer| layer).await;
    assert_eq!(look(&server, "k").await.text(), "run 1");
}
