//! The gateway killed, stopped and resumed in the middle of a request; the upstream counts what really ran.

#![allow(clippy::unwrap_used, reason = "a test program")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use common::{Gateway, pay};
use testkit::{Answer, Upstream, wait_until};

/// Answers the number of the run; the first takes `slow`, the others nothing.
async fn numbered(slow: Duration) -> Upstream {
    let runs = AtomicUsize::new(0);
    Upstream::start(move |_| {
        let run = runs.fetch_add(1, Ordering::SeqCst) + 1;
        let answer = Answer::json(201, &serde_json::json!({ "run": run }));
        if run == 1 { answer.delay(slow) } else { answer }
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_under_hold_the_outcome_is_unknown_and_it_ran_once() {
    let (folder, upstream) = (tempfile::tempdir().unwrap(), numbered(Duration::from_secs(600)).await);
    let mut gateway = Gateway::start(&upstream.url(), folder.path(), &["--lease", "2s"]).await;
    let first = tokio::spawn(pay(gateway.client(), "k"));
    wait_until("the upstream runs", || upstream.count() == 1).await;
    gateway.process.kill_9().await.unwrap();
    assert!(first.await.unwrap().is_err(), "the first client gets no answer");

    let gateway = Gateway::start(&upstream.url(), folder.path(), &["--lease", "2s"]).await;
    let retry = gateway.settled(async |client| pay(client, "k").await).await;
    assert_eq!((retry.status, retry.code().as_str()), (409, "outcome-unknown"), "{}", retry.text());
    assert_eq!(retry.json()["retryable"], false);
    let other = gateway.client().post("/pay").key("k").body("{\"amount\":200}").send().await.unwrap();
    assert_eq!((other.status, other.code().as_str()), (422, "key-reused"), "mismatch goes first");
    assert_eq!(upstream.count(), 1, "it ran once");

    // The operator says what it was; the retry gets exactly these bytes.
    let resolve =
        ["resolve", "k", "--status", "201", "--body", "{\"run\": 1}", "--reason", "seen at the bank"];
    let (ok, said) = gateway.keys(&resolve).await;
    assert!(ok, "{said}");
    let retry = pay(gateway.client(), "k").await.unwrap();
    assert_eq!((retry.status, retry.text()), (201, "{\"run\": 1}"));
    assert_eq!(retry.header("idempotency-replayed"), Some("true"));
    assert_eq!(upstream.count(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_under_retry_a_retry_runs_after_the_lease() {
    let (folder, upstream) = (tempfile::tempdir().unwrap(), numbered(Duration::from_secs(600)).await);
    let options = ["--lease", "2s", "--on-unknown", "retry"];
    let mut gateway = Gateway::start(&upstream.url(), folder.path(), &options).await;
    let first = tokio::spawn(pay(gateway.client(), "k"));
    wait_until("the upstream runs", || upstream.count() == 1).await;
    gateway.process.kill_9().await.unwrap();
    assert!(first.await.unwrap().is_err());

    let gateway = Gateway::start(&upstream.url(), folder.path(), &options).await;
    let early = pay(gateway.client(), "k").await.unwrap();
    assert_eq!((early.status, early.code().as_str()), (409, "in-progress"), "not before the lease is over");
    let retry = gateway.settled(async |client| pay(client, "k").await).await;
    assert_eq!((retry.status, retry.text()), (201, "{\"run\":2}"));
    assert_eq!(upstream.count(), 2);
    assert_eq!(upstream.last().header("idempotency-attempt"), Some("2"));
    assert_eq!(upstream.last().header("idempotency-key"), Some("k"));
}

#[tokio::test(flavor = "multi_thread")]
async fn stopped_past_the_lease_under_retry_the_stale_owner_is_fenced_and_both_answer_the_same() {
    let (folder, upstream) = (tempfile::tempdir().unwrap(), numbered(Duration::from_millis(1500)).await);
    let options = ["--lease", "2s", "--on-unknown", "retry"];
    let stale = Gateway::start(&upstream.url(), folder.path(), &options).await;
    let other = Gateway::start(&upstream.url(), folder.path(), &options).await;
    let first = tokio::spawn(pay(stale.client(), "k"));
    wait_until("the upstream runs", || upstream.count() == 1).await;
    stale.process.sigstop().await.unwrap();

    let taken_over = other.settled(async |client| pay(client, "k").await).await;
    assert_eq!((taken_over.status, taken_over.text()), (201, "{\"run\":2}"));
    stale.process.sigcont().unwrap();
    let first = first.await.unwrap().expect("the stale owner answers too");
    assert_eq!((first.status, first.text()), (201, "{\"run\":2}"), "the record's reply, not its own");
    for gateway in [&stale, &other] {
        assert_eq!(pay(gateway.client(), "k").await.unwrap().text(), "{\"run\":2}");
    }
    assert_eq!(upstream.count(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn stopped_past_the_lease_under_hold_the_late_owner_resolves_it() {
    let (folder, upstream) = (tempfile::tempdir().unwrap(), numbered(Duration::from_millis(1500)).await);
    let late = Gateway::start(&upstream.url(), folder.path(), &["--lease", "2s"]).await;
    let other = Gateway::start(&upstream.url(), folder.path(), &["--lease", "2s"]).await;
    let first = tokio::spawn(pay(late.client(), "k"));
    wait_until("the upstream runs", || upstream.count() == 1).await;
    late.process.sigstop().await.unwrap();

    let held = other.settled(async |client| pay(client, "k").await).await;
    assert_eq!((held.status, held.code().as_str()), (409, "outcome-unknown"));
    late.process.sigcont().unwrap();
    let first = first.await.unwrap().expect("the late owner answers");
    assert_eq!((first.status, first.text()), (201, "{\"run\":1}"));
    let replay = pay(other.client(), "k").await.unwrap();
    assert_eq!((replay.status, replay.text()), (201, "{\"run\":1}"));
    assert_eq!(replay.header("idempotency-replayed"), Some("true"));
    assert_eq!(upstream.count(), 1, "it ran once");
}

#[tokio::test(flavor = "multi_thread")]
async fn stopped_past_the_upstream_timeout_the_answer_that_came_meanwhile_is_recorded() {
    let (folder, upstream) = (tempfile::tempdir().unwrap(), numbered(Duration::from_millis(500)).await);
    let options = ["--lease", "10s", "--upstream-timeout", "1s"];
    let gateway = Gateway::start(&upstream.url(), folder.path(), &options).await;
    let first = tokio::spawn(pay(gateway.client(), "k"));
    wait_until("the upstream runs", || upstream.count() == 1).await;
    gateway.process.sigstop().await.unwrap();
    tokio::time::sleep(Duration::from_secs(2)).await;
    gateway.process.sigcont().unwrap();
    let first = first.await.unwrap().expect("an answer");
    assert!(matches!(first.status, 201 | 504), "{first:?}");
    let replay = testkit::wait_for("the answer is recorded", async || {
        pay(gateway.client(), "k").await.ok().filter(|answer| answer.status == 201)
    })
    .await;
    assert_eq!(replay.text(), "{\"run\":1}");
    assert_eq!(upstream.count(), 1, "it ran once");
}

/// Random kills under load: nothing runs twice, and what was acknowledged stays the answer.
#[tokio::test(flavor = "multi_thread")]
async fn thirty_kills_under_load_run_nothing_twice_and_lose_no_answer() {
    const KILLS: usize = 30;
    const CLIENTS: usize = 8;
    let folder = tempfile::tempdir().unwrap();
    let upstream = Upstream::start(|seen| {
        let key = seen.header("idempotency-key").unwrap_or("none").to_owned();
        Answer::ok(key).delay(Duration::from_millis(3))
    })
    .await;
    let port = testkit::free_addr().to_string();
    let acknowledged = Arc::new(parking_lot::Mutex::new(Vec::<String>::new()));
    let mut asked = Vec::new();
    for round in 0..KILLS {
        let mut gateway = Gateway::start_on(&port, &upstream.url(), folder.path(), &["--lease", "1s"])
            .await
            .expect("it starts again");
        let clients: Vec<_> = (0..CLIENTS)
            .map(|client| {
                let (to, acknowledged) = (gateway.client(), acknowledged.clone());
                tokio::spawn(async move {
                    for n in 0.. {
                        let key = format!("{round}-{client}-{n}");
                        match pay(to, &key).await {
                            Ok(answer) if answer.status == 200 => acknowledged.lock().push(key),
                            _ => return n,
                        }
                    }
                    0
                })
            })
            .collect();
        // Not at a fixed point of the work: the pause grows by an odd number of microseconds.
        tokio::time::sleep(Duration::from_micros(40_000 + 7_919 * round as u64)).await;
        gateway.process.kill_9().await.unwrap();
        for (client, handle) in clients.into_iter().enumerate() {
            asked.push(format!("{round}-{client}-{}", handle.await.unwrap()));
        }
    }
    let gateway = Gateway::start_on(&port, &upstream.url(), folder.path(), &["--lease", "1s"]).await.unwrap();
    let acknowledged = acknowledged.lock().clone();
    let mut unknown = 0;
    for key in asked.iter().chain(acknowledged.iter()) {
        let retry = gateway.settled(async |client| pay(client, key).await).await;
        match retry.status {
            200 => assert_eq!(retry.text(), key),
            409 => {
                assert_eq!(retry.code(), "outcome-unknown");
                assert!(!acknowledged.contains(key), "{key} was acknowledged and is lost");
                unknown += 1;
            }
            other => panic!("{key}: {other} {}", retry.text()),
        }
    }
    let mut runs = std::collections::HashMap::<String, usize>::new();
    for seen in upstream.seen() {
        *runs.entry(seen.header("idempotency-key").expect("a key").to_owned()).or_default() += 1;
    }
    let twice: Vec<_> = runs.iter().filter(|(_, runs)| **runs > 1).collect();
    assert!(twice.is_empty(), "ran twice: {twice:?}");
    for key in &acknowledged {
        assert_eq!(runs.get(key), Some(&1), "{key} was acknowledged and never ran");
    }
    assert!(acknowledged.len() > KILLS, "there was load: {}", acknowledged.len());
    println!(
        "kills={KILLS} acknowledged={} interrupted={} unknown={unknown} ran_twice=0 lost=0",
        acknowledged.len(),
        asked.len()
    );
}
