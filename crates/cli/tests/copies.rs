//! Many copies of one request at once, through one gateway and through two on one file.

#![allow(clippy::unwrap_used, reason = "a test program")]

mod common;

use std::time::Duration;

use common::{Gateway, pay};
use futures_util::future::join_all;
use testkit::{Answer, Client, ClientResponse, Upstream};

const COPIES: usize = 50;

/// A disk that stands still for longer than the gateway waits for its store is a 503 that says so; a client asks again.
async fn pay_at_last(client: Client, key: &str) -> ClientResponse {
    for _ in 0..100 {
        let answer = pay(client, key).await.expect("an answer");
        if answer.status != 503 || answer.code() != "store-unavailable" {
            return answer;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    panic!("{key}: the store is not there for ten seconds and more")
}

/// Sends the copies of each round round-robin to the gateways; every round runs once and has one answer.
async fn rounds(gateways: &[Client], upstream: &Upstream, rounds: usize) -> usize {
    let mut replays = 0;
    for round in 0..rounds {
        let before = upstream.count();
        let key = format!("round-{round}");
        let copies = (0..COPIES).map(|copy| pay_at_last(gateways[copy % gateways.len()], &key));
        let answers = join_all(copies).await;
        assert_eq!(upstream.count(), before + 1, "round {round} ran once: {:?}", answers[0]);
        for answer in &answers {
            assert_eq!((answer.status, &answer.body), (answers[0].status, &answers[0].body), "round {round}");
        }
        let replayed = answers.iter().filter(|a| a.header("idempotency-replayed") == Some("true")).count();
        assert_eq!(replayed, COPIES - 1, "round {round}: the first answer alone carries no marker");
        replays += replayed;
    }
    replays
}

async fn upstream() -> Upstream {
    let runs = std::sync::atomic::AtomicUsize::new(0);
    Upstream::start(move |_| Answer::ok(runs.fetch_add(1, std::sync::atomic::Ordering::SeqCst).to_string()))
        .await
}

#[tokio::test(flavor = "multi_thread")]
async fn fifty_copies_two_hundred_rounds_on_sqlite() {
    let (folder, upstream) = (tempfile::tempdir().unwrap(), upstream().await);
    let gateway = Gateway::start(&upstream.url(), folder.path(), &["--wait", "30s"]).await;
    let replays = rounds(&[gateway.client()], &upstream, 200).await;
    println!(
        "store=sqlite rounds=200 copies={COPIES} runs={} replays={replays} kills=0 faults=0",
        upstream.count()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn fifty_copies_two_hundred_rounds_in_memory() {
    let (folder, upstream) = (tempfile::tempdir().unwrap(), upstream().await);
    let gateway =
        Gateway::start(&upstream.url(), folder.path(), &["--wait", "30s", "--store", "memory:"]).await;
    let replays = rounds(&[gateway.client()], &upstream, 200).await;
    println!(
        "store=memory rounds=200 copies={COPIES} runs={} replays={replays} kills=0 faults=0",
        upstream.count()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn two_gateways_on_one_file_still_run_it_once() {
    let (folder, upstream) = (tempfile::tempdir().unwrap(), upstream().await);
    let one = Gateway::start(&upstream.url(), folder.path(), &["--wait", "30s"]).await;
    let two = Gateway::start(&upstream.url(), folder.path(), &["--wait", "30s"]).await;
    let replays = rounds(&[one.client(), two.client()], &upstream, 40).await;
    println!(
        "store=sqlite processes=2 rounds=40 copies={COPIES} runs={} replays={replays}",
        upstream.count()
    );
}
