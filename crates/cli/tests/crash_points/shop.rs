//! Shops whose orders and records are one transaction, as `onlyonce prove --door transaction` starts them.

use std::net::SocketAddr;

use onlyonce_core::CrashPoint;
use testkit::{Client, ClientResponse, Mariadb, Postgres, Process, free_addr, wait_for};

use crate::{Death, died, each, program};

#[tokio::test(flavor = "multi_thread")]
async fn sqlite() {
    each(CrashPoint::OF_TRANSACTIONS, |death| case(death, "sqlite:shop.db".into())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn postgres() {
    let server = Postgres::shared().await;
    let url = format!("postgres://postgres@{}/{}", server.addr(), server.database().await);
    each(CrashPoint::OF_TRANSACTIONS, |death| case(death, url.clone())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn mysql() {
    let server = Mariadb::shared().await;
    let url = server.url(&server.database().await);
    each(CrashPoint::OF_TRANSACTIONS, |death| case(death, url.clone())).await;
}

async fn case(death: Death, store: String) {
    let (name, folder) = (death.name(), tempfile::tempdir().unwrap());
    let ledger = format!("ledger_{}", name.replace(['-', '@'], "_"));
    let start = |death| shop(folder.path(), &store, &ledger, death);
    let key = |number: usize| format!("{name}-{number}");

    let (mut process, addr) = start(Some(death)).await;
    let mut answered = Vec::new();
    let unanswered = loop {
        let number = answered.len();
        assert!(number < 10, "{name}: never reached");
        match order(addr, &key(number), number).await {
            Ok(answer) => answered.push(answer),
            Err(_) => break number,
        }
    };
    died(&mut process, death).await;

    let (_process, addr) = start(None).await;
    for number in 0..=unanswered {
        // Now and then a work fails for the moment: "come again".
        let settled = wait_for("an answer", async || {
            let answer = order(addr, &key(number), number).await.unwrap();
            (answer.status == 201).then_some(answer)
        });
        let settled = settled.await;
        let was_replayed = settled.header("idempotency-replayed") == Some("true");
        if let Some(first) = answered.get(number).filter(|first| first.status == 201) {
            assert_eq!(settled.text(), first.text(), "{name}: what was answered stays");
            assert!(was_replayed, "{name}");
        }
        if number == unanswered {
            // Committed or not: the commit decides, and nothing else.
            assert_eq!(was_replayed, death.place == CrashPoint::TxCommitAfter, "{name}");
        }
    }
    let rows = Client::new(addr).get("/executions?after=0").send().await.unwrap().json();
    let mut operations: Vec<_> =
        rows.as_array().unwrap().iter().map(|row| row[1].as_u64().unwrap()).collect();
    operations.sort_unstable();
    assert_eq!(operations, (0..=unanswered as u64).collect::<Vec<_>>(), "{name}: every order, each once");
}

async fn shop(
    folder: &std::path::Path,
    store: &str,
    ledger: &str,
    death: Option<Death>,
) -> (Process, SocketAddr) {
    let addr = free_addr();
    let args = ["prove", "--shop", &addr.to_string(), "--ledger", ledger];
    let process = program(folder, &args, death, &[("ONLYONCE_PROVE_STORE", store)]);
    wait_for("the shop listens", async || tokio::net::TcpStream::connect(addr).await.ok()).await;
    (process, addr)
}

async fn order(addr: SocketAddr, key: &str, operation: usize) -> anyhow::Result<ClientResponse> {
    let order = serde_json::json!({ "operation": operation, "amount": 100 });
    Client::new(addr).post("/orders").key(key).json(&order).send().await
}
