//! The examples do what they say, through real sockets.
#![allow(clippy::unwrap_used, reason = "a test fails by it")]
#![allow(missing_docs, dead_code, reason = "an example's main is not run here")]

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use onlyonce::{Idempotency, SqliteStore};
use serde_json::json;
use testkit::Client;
use tokio::net::TcpListener;

#[path = "../examples/axum.rs"]
mod on_axum;
#[path = "../examples/hyper.rs"]
mod on_hyper;

#[tokio::test(flavor = "multi_thread")]
async fn the_axum_example_charges_once() {
    let folder = tempfile::tempdir().unwrap();
    let store = SqliteStore::open(folder.path().join("pay.db")).await.unwrap();
    let router = on_axum::router(&Idempotency::builder(store).build(), on_axum::Account::new(10_000));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let client = Client::new(listener.local_addr().unwrap());
    let server = tokio::spawn(async move { axum::serve(listener, router).await });

    let pay = |merchant: &str, amount: i64| {
        client
            .post("/charges")
            .key("\"order-42\"")
            .header("x-merchant", merchant)
            .json(&json!({"amount": amount}))
    };
    let copies = (0..20).map(|_| tokio::spawn(pay("m1", 100).send()));
    for copy in copies.collect::<Vec<_>>() {
        let answer = copy.await.unwrap().unwrap();
        assert_eq!((answer.status, &answer.json()["balance"]), (201, &json!(9900)));
    }
    assert_eq!(pay("m2", 100).send().await.unwrap().json()["balance"], json!(9800));
    assert_eq!(pay("m1", 200).send().await.unwrap().code(), "key-reused");
    assert_eq!(
        client.post("/charges").header("x-merchant", "m1").send().await.unwrap().code(),
        "key-missing"
    );
    assert_eq!(client.post("/charges").key("k").send().await.unwrap().code(), "scope-missing");
    let declined = client.post("/charges").key("zero").header("x-merchant", "m1").json(&json!({"amount": 0}));
    assert_eq!(declined.send().await.unwrap().status, 422);
    assert_eq!(client.get("/balance").send().await.unwrap().text(), "9800");
    server.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_hyper_example_charges_once() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let balance = Arc::new(AtomicI64::new(10_000));
    let account = balance.clone();
    let server =
        tokio::spawn(async move { on_hyper::serve(listener, &Idempotency::in_memory(), account).await });

    for client in [Client::new(addr), Client::h2c(addr), Client::new(addr)] {
        let answer = client.post("/charges").key("order-42").body("100").send().await.unwrap();
        assert_eq!((answer.status, answer.text()), (201, "charged 100, 9900 left\n"));
    }
    assert_eq!(balance.load(Ordering::SeqCst), 9900);
    server.abort();
}
