//! H6 and H7: what tells a retry from another request.

use axum::Router;
use axum::routing::post;
use http::{HeaderName, Method};
use onlyonce_core::fingerprint::Definition;
use onlyonce_http::IdempotencyLayer;
use testkit::Client;

use crate::harness::{
    Gate, Hit, Server, ServerOptions, TestStore, assert_problem, assert_replay_of, on_every_store, reply,
    serve,
};

on_every_store! {
    h6_method_path_query_and_body_join,
    h6_every_byte_of_a_long_body_joins,
    h6_nested_routers_join_with_their_whole_path,
    h6_canonical_json_by_option,
    h6_selected_members_and_headers_by_option,
    h6_a_record_is_compared_by_its_own_definition,
    h7_another_request_is_refused_and_the_reply_stays,
    h7_another_request_is_refused_while_the_first_is_in_flight,
}

async fn h6_method_path_query_and_body_join(store: TestStore) {
    let server = Server::counting(&store, |layer| layer).await;
    let send = |method, target: &'static str, body: &'static str| {
        server.client().request(method, target).key("k").body(body).send()
    };
    let first = send(Method::POST, "/pay?currency=eur", "100").await.unwrap();
    for (method, target, body) in [
        (Method::PATCH, "/pay?currency=eur", "100"),
        (Method::POST, "/pay2?currency=eur", "100"),
        (Method::POST, "/pay?currency=usd", "100"),
        (Method::POST, "/pay", "100"),
        (Method::POST, "/pay?currency=eur", "101"),
        (Method::POST, "/pay?currency=eur", ""),
        // As received, never decoded.
        (Method::POST, "/p%61y?currency=eur", "100"),
    ] {
        assert_problem(&send(method, target, body).await.unwrap(), 422, "key-reused");
    }
    assert_replay_of(&send(Method::POST, "/pay?currency=eur", "100").await.unwrap(), &first);
    assert_eq!(server.runs(), 1);
}

async fn h6_every_byte_of_a_long_body_joins(store: TestStore) {
    let server = Server::counting(&store, |layer| layer).await;
    let body = vec![b'x'; 1 << 20];
    let send = |body: Vec<u8>| server.client().post("/pay").key("k").body(body).send();
    let first = send(body.clone()).await.unwrap();
    for at in [0, 30_000, body.len() / 2, body.len() - 1] {
        let mut other = body.clone();
        other[at] = b'y';
        assert_problem(&send(other).await.unwrap(), 422, "key-reused");
    }
    assert_problem(&send(body[1..].to_vec()).await.unwrap(), 422, "key-reused");
    assert_replay_of(&send(body).await.unwrap(), &first);
    assert_eq!(server.runs(), 1);
}

async fn h6_nested_routers_join_with_their_whole_path(store: TestStore) {
    let idem = ServerOptions::new(&store).idem();
    let charge =
        || Router::new().route("/charge", post(async || "charged").layer(IdempotencyLayer::new(&idem)));
    let (addr, task) = serve(Router::new().nest("/eu", charge()).nest("/us", charge())).await;
    let send = |path| Client::new(addr).post(path).key("k").body("1").send();
    let first = send("/eu/charge").await.unwrap();
    assert_eq!(first.text(), "charged");
    assert_problem(&send("/us/charge").await.unwrap(), 422, "key-reused");
    assert_replay_of(&send("/eu/charge").await.unwrap(), &first);
    task.abort();
}

async fn h6_canonical_json_by_option(store: TestStore) {
    let server = Server::counting(&store, |layer| layer.fingerprint(Definition::canonical_json())).await;
    let send = |content_type: &'static str, body: &'static str| {
        server.client().post("/pay").key("k").header("content-type", content_type).body(body).send()
    };
    let json = "application/json";
    let first = send(json, r#"{"to": "a", "amount": 653247040368672768}"#).await.unwrap();
    let reordered = send(json, "{\"amount\":653247040368672768,\n\"to\":\"a\"}").await.unwrap();
    assert_replay_of(&reordered, &first);
    let rounded = send(json, r#"{"to":"a","amount":653247040368672800}"#).await.unwrap();
    assert_problem(&rounded, 422, "key-reused");
    let twice = send(json, r#"{"to":"a","to":"a"}"#).await.unwrap();
    assert_problem(&twice, 400, "body-malformed");
    assert!(twice.text().contains("byte 10"), "{}", twice.text());
    // Not said to be JSON: the bytes as they are.
    let text = send("text/plain", r#"{"to": "a", "amount": 653247040368672768}"#).await.unwrap();
    assert_problem(&text, 422, "key-reused");
    let broken = server.client().post("/pay").key("k2").header("content-type", "text/plain").body("{");
    assert_eq!(broken.send().await.unwrap().status, 201);
    let packed = server.client().post("/pay").key("k3").header("content-type", json);
    assert_eq!(packed.header("content-encoding", "gzip").body("\x1f\u{1}").send().await.unwrap().status, 201);
    assert_eq!(server.runs(), 3);
}

async fn h6_selected_members_and_headers_by_option(store: TestStore) {
    let members = Definition::members(["/amount", "/to"]).unwrap();
    let members = members.with_headers([HeaderName::from_static("x-api-version")]).unwrap();
    let selected = Server::counting(&store, |layer| layer.fingerprint(members)).await;
    let send = |version: &'static str, body: &'static str| {
        let request = selected.client().post("/pay").key("k").header("x-api-version", version);
        request.header("content-type", "application/json").body(body).send()
    };
    let first = send("1", r#"{"amount":1,"to":"a","sent_at":1}"#).await.unwrap();
    assert_replay_of(&send("1", r#"{"to":"a","amount":1.0,"sent_at":2}"#).await.unwrap(), &first);
    assert_problem(&send("2", r#"{"amount":1,"to":"a","sent_at":1}"#).await.unwrap(), 422, "key-reused");
    assert_problem(&send("1", r#"{"amount":2,"to":"a","sent_at":1}"#).await.unwrap(), 422, "key-reused");

    let except = Definition::all_except(["/sent_at"]).unwrap();
    let rest = Server::counting(&store, |layer| layer.fingerprint(except)).await;
    let send = |body: &'static str| {
        rest.client().post("/pay").key("k2").header("content-type", "application/json").body(body).send()
    };
    let first = send(r#"{"amount":1,"sent_at":1}"#).await.unwrap();
    assert_replay_of(&send(r#"{"sent_at":2,"amount":1}"#).await.unwrap(), &first);
    assert_problem(&send(r#"{"sent_at":2,"amount":1,"to":"b"}"#).await.unwrap(), 422, "key-reused");
    assert_eq!((selected.runs(), rest.runs()), (1, 1));
}

async fn h6_a_record_is_compared_by_its_own_definition(store: TestStore) {
    let old = || Definition::members(["/amount"]).unwrap();
    let before = Server::counting(&store, |layer| layer.fingerprint(old())).await;
    let raw = Server::counting(&store, |layer| layer).await;
    let send = |server: &Server, key: &str, body: &'static str| {
        server.client().post("/pay").key(key).header("content-type", "application/json").body(body).send()
    };
    let selected = send(&before, "selected", r#"{"amount":1,"at":1}"#).await.unwrap();
    let bytes = send(&raw, "raw", r#"{"amount":1,"at":1}"#).await.unwrap();

    let after = Server::counting(&store, |layer| {
        layer.fingerprint(Definition::canonical_json()).known_fingerprint(old())
    })
    .await;
    // Twice: from the store, then from memory.
    for _ in 0..2 {
        assert_replay_of(&send(&after, "selected", r#"{"at":2,"amount":1}"#).await.unwrap(), &selected);
        assert_replay_of(&send(&after, "raw", r#"{"amount":1,"at":1}"#).await.unwrap(), &bytes);
        assert_problem(&send(&after, "raw", r#"{"at":1,"amount":1}"#).await.unwrap(), 422, "key-reused");
        assert_problem(&send(&after, "selected", r#"{"amount":2}"#).await.unwrap(), 422, "key-reused");
    }
    let forgetful = Server::counting(&store, |layer| layer).await;
    for _ in 0..2 {
        let answer = send(&forgetful, "selected", r#"{"amount":1,"at":1}"#).await.unwrap();
        assert_problem(&answer, 409, "fingerprint-unknown");
    }
    assert_eq!((after.runs(), forgetful.runs()), (0, 0));
}

async fn h7_another_request_is_refused_and_the_reply_stays(store: TestStore) {
    let server = Server::counting(&store, |layer| layer).await;
    let first = server.pay("k", "100").await;
    for _ in 0..2 {
        assert_problem(&server.pay("k", "200").await, 422, "key-reused");
        assert_replay_of(&server.pay("k", "100").await, &first);
    }
    // Another process, whose memory is empty.
    let other = Server::counting(&store, |layer| layer).await;
    assert_problem(&other.pay("k", "200").await, 422, "key-reused");
    assert_replay_of(&other.pay("k", "100").await, &first);
    assert_eq!((server.runs(), other.runs()), (1, 0));
}

async fn h7_another_request_is_refused_while_the_first_is_in_flight(store: TestStore) {
    let gate = Gate::closed();
    let at = gate.clone();
    let server = Server::start(
        &store,
        |layer| layer.wait(testkit::PATIENCE),
        move |_: Hit| {
            let at = at.clone();
            async move {
                at.pass().await;
                reply(200, "done")
            }
        },
    )
    .await;
    let first = tokio::spawn(server.client().post("/pay").key("k").body("100").send());
    testkit::wait_until("the first runs", || server.runs() == 1).await;
    assert_problem(&server.pay("k", "200").await, 422, "key-reused");
    let other = Server::counting(&store, |layer| layer).await;
    assert_problem(&other.pay("k", "200").await, 422, "key-reused");
    gate.open();
    assert_eq!(first.await.unwrap().unwrap().text(), "done");
    assert_eq!((server.runs(), other.runs()), (1, 0));
}
