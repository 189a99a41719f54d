//! H1 to H4: which requests are guarded, and their keys.

use std::time::Duration;

use axum::Router;
use axum::routing::post;
use http::{Method, StatusCode};
use onlyonce_core::OnLeaseEnd;
use onlyonce_engine::Policy;
use onlyonce_http::{Guarded, IdempotencyLayer, KeyRule, Preset};
use testkit::{Client, RawConnection, send_raw};

use crate::harness::{
    Server, ServerOptions, TestStore, assert_problem, assert_replay_of, on_every_store, serve,
};

on_every_store! {
    h1_only_guarded_methods_look_at_the_key,
    h1_the_guard_is_configurable_by_method_and_path,
    h1_each_route_has_its_own_policy,
    h2_quoted_and_bare_are_one_key,
    h2_quoted_only_by_option,
    h3_a_missing_key_is_refused_or_ignored,
    h4_malformed_keys_are_refused_with_the_reason,
    h4_keys_are_case_sensitive_and_never_trimmed,
    a_refused_request_is_never_asked_for_its_body,
}

async fn h1_only_guarded_methods_look_at_the_key(store: TestStore) {
    let server = Server::counting(&store, |layer| layer).await;
    for (runs, method) in [Method::GET, Method::PUT, Method::DELETE, Method::OPTIONS].into_iter().enumerate()
    {
        for copy in 1..=2 {
            // Even a malformed key is nobody's business here.
            let answer = server.client().request(method.clone(), "/x").key("a,b").send().await.unwrap();
            assert_eq!((answer.status, server.runs()), (201, runs * 2 + copy), "{method}");
            assert_eq!(answer.header("idempotency-status"), None);
        }
    }
    assert!(server.hits().iter().all(|hit| hit.context.is_none()));
    assert_eq!(store.records().await, 0);
    for (records, method) in [Method::POST, Method::PATCH].into_iter().enumerate() {
        let send = || server.client().request(method.clone(), "/x").key(method.as_str()).send();
        let (first, again) = (send().await.unwrap(), send().await.unwrap());
        assert_replay_of(&again, &first);
        assert_eq!(store.records().await, records + 1);
    }
    assert_eq!(server.runs(), 10);
    assert_eq!(server.hits()[9].context.as_ref().unwrap().attempt(), 1);
}

async fn h1_the_guard_is_configurable_by_method_and_path(store: TestStore) {
    let puts = Server::counting(&store, |layer| layer.methods([Method::PUT])).await;
    let send = |method| puts.client().request(method, "/x").key("put").send();
    let first = send(Method::PUT).await.unwrap();
    assert_replay_of(&send(Method::PUT).await.unwrap(), &first);
    send(Method::POST).await.unwrap();
    send(Method::POST).await.unwrap();
    assert_eq!(puts.runs(), 3);

    let paths = Server::counting(&store, |layer| {
        layer.guard(|method, path| match (method, path) {
            (&Method::POST, "/pay") => Guarded::Required,
            (&Method::POST, _) => Guarded::Optional,
            _ => Guarded::No,
        })
    })
    .await;
    assert_problem(&paths.client().post("/pay").send().await.unwrap(), 400, "key-missing");
    assert_problem(&paths.client().post("/pay?a=1").send().await.unwrap(), 400, "key-missing");
    let other = paths.client().post("/other").send().await.unwrap();
    assert_eq!((other.status, other.header("idempotency-status")), (201, Some("ignored")));
    assert_eq!(paths.runs(), 1);
}

async fn h1_each_route_has_its_own_policy(store: TestStore) {
    let idem = ServerOptions::new(&store).idem();
    let held = idem.with_policy(Policy { on_lease_end: OnLeaseEnd::Hold, ..idem.policy().clone() }).unwrap();
    let answer = |status| post(async move || (StatusCode::from_u16(status).unwrap(), "answer"));
    let route = |status, layer: IdempotencyLayer| answer(status).layer(layer);
    let (addr, task) = serve(
        Router::new()
            .route("/optional", route(201, IdempotencyLayer::new(&idem).optional()))
            .route("/stripe", route(500, IdempotencyLayer::new(&idem).preset(Preset::Stripe)))
            .route("/held", route(504, IdempotencyLayer::new(&held)))
            .route("/plain", answer(201)),
    )
    .await;
    let send = |path, key: &str| Client::new(addr).post(path).key(key).send();
    let without = Client::new(addr).post("/optional").send().await.unwrap();
    assert_eq!((without.status, without.header("idempotency-status")), (201, Some("ignored")));
    assert_problem(&Client::new(addr).post("/stripe").send().await.unwrap(), 400, "key-missing");
    assert_eq!(send("/stripe", "a").await.unwrap().header("idempotent-replayed"), None);
    assert_eq!(send("/stripe", "a").await.unwrap().header("idempotent-replayed"), Some("true"));
    assert_eq!(send("/held", "b").await.unwrap().status, 504);
    assert_problem(&send("/held", "b").await.unwrap(), 409, "outcome-unknown");
    // One store: a key of one route is not another's.
    assert_problem(&send("/optional", "a").await.unwrap(), 422, "key-reused");
    for _ in 0..2 {
        let plain = send("/plain", "not,a,key").await.unwrap();
        assert_eq!((plain.status, plain.header("idempotency-replayed")), (201, None));
    }
    task.abort();
}

async fn h2_quoted_and_bare_are_one_key(store: TestStore) {
    let server = Server::counting(&store, |layer| layer).await;
    let first = server.pay("8e03978e", "1").await;
    for same in ["\"8e03978e\"", "\"8e03978e\";v=1", "\"8e03978e\"; a; b=\"c\"", " 8e03978e "] {
        assert_replay_of(&server.pay(same, "1").await, &first);
    }
    // The longest key, counted after unescaping.
    let longest = server.pay(&format!("\"{}\"", "\\\\".repeat(255)), "1").await;
    assert_eq!((longest.status, server.runs()), (201, 2));
    assert_eq!(server.hits()[1].context.as_ref().unwrap().operation().key().as_str(), "\\".repeat(255));
    assert_problem(&server.pay(&"k".repeat(256), "1").await, 400, "key-malformed");
}

async fn h2_quoted_only_by_option(store: TestStore) {
    let server = Server::counting(&store, |layer| layer.key(KeyRule::default().quoted_only())).await;
    assert_problem(&server.pay("abc", "1").await, 400, "key-malformed");
    assert_eq!(server.pay("\"abc\"", "1").await.status, 201);
    assert_eq!(server.runs(), 1);
}

async fn h3_a_missing_key_is_refused_or_ignored(store: TestStore) {
    let required = Server::counting(&store, |layer| layer).await;
    assert_problem(&required.client().post("/pay").body("1").send().await.unwrap(), 400, "key-missing");
    assert_eq!(required.runs(), 0);

    let optional = Server::counting(&store, |layer| layer.optional()).await;
    for run in 1..=2 {
        let answer = optional.client().post("/pay").body("1").send().await.unwrap();
        assert_eq!((answer.status, answer.text()), (201, &*format!("run {run}")));
        assert_eq!(answer.header("idempotency-status"), Some("ignored"));
    }
    assert_eq!(store.records().await, 0);
    let first = optional.pay("k", "1").await;
    assert_eq!(first.header("idempotency-status"), None);
    assert_replay_of(&optional.pay("k", "1").await, &first);
    assert_problem(&optional.pay("", "1").await, 400, "key-malformed");
    assert_eq!(optional.runs(), 3);
}

async fn h4_malformed_keys_are_refused_with_the_reason(store: TestStore) {
    let server = Server::counting(&store, |layer| layer).await;
    for (line, reason) in [
        ("", "empty"),
        ("\"\"", "empty"),
        ("\"abc", "not closed"),
        ("a, b", "list"),
        ("\"a\", \"b\"", "list"),
        ("a;b", "inside a quoted string"),
        ("a b", "inside a quoted string"),
        ("\"a\\n\"", "backslash"),
        ("\"a\" x", "only parameters"),
        ("a\tb", "0x09"),
        ("\u{e9}", "0xc3"),
        (&"k".repeat(256), "256 characters"),
    ] {
        let answer = server.pay(line, "1").await;
        assert_problem(&answer, 400, "key-malformed");
        let detail = answer.json()["detail"].as_str().unwrap().to_owned();
        assert!(detail.contains(reason), "{line:?}: {detail}");
    }
    let two_lines = server.client().post("/pay").key("a").key("a").send().await.unwrap();
    assert_problem(&two_lines, 400, "key-malformed");
    assert!(two_lines.text().contains("2 header lines"));
    assert_eq!((server.runs(), store.records().await), (0, 0));
}

async fn h4_keys_are_case_sensitive_and_never_trimmed(store: TestStore) {
    let server = Server::counting(&store, |layer| layer).await;
    for (runs, key) in ["abc", "ABC", "\" abc\"", "\"abc \"", "abc."].into_iter().enumerate() {
        assert_eq!(server.pay(key, "1").await.text(), format!("run {}", runs + 1), "{key:?}");
    }
}

/// A client that waits for 100 (Continue) is refused without it, and asked for its body when its head is fine.
async fn a_refused_request_is_never_asked_for_its_body(store: TestStore) {
    let server = Server::counting(&store, |layer| layer).await;
    let head = "POST /pay HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 3\r\n";
    let refused = send_raw(server.addr(), format!("{head}\r\n"), Duration::from_millis(300)).await;
    let refused = String::from_utf8(refused).unwrap();
    assert!(refused.starts_with("HTTP/1.1 400 ") && refused.contains("key-missing"), "{refused}");

    let mut connection = RawConnection::open(server.addr()).await;
    connection.write(format!("{head}idempotency-key: k\r\n\r\n")).await;
    let interim = String::from_utf8(connection.read_head().await.unwrap()).unwrap();
    assert!(interim.starts_with("HTTP/1.1 100 "), "{interim}");
    connection.write("abc").await;
    let answer = String::from_utf8(connection.read_head().await.unwrap()).unwrap();
    assert!(answer.starts_with("HTTP/1.1 201 "), "{answer}");
    assert_eq!(server.runs(), 1);
}
