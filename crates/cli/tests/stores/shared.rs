//! What several gateways on one store do, and what of it outlives their processes.

use std::time::Duration;

use testkit::{wait_for, wait_until};

use crate::Place;
use crate::common::pay;
use crate::requests::{numbered, slow};

pub(crate) async fn h8_a_copy_in_another_process_waits_for_the_answer(place: Place) {
    let upstream = slow(Duration::from_millis(700)).await;
    let owner = place.gateway(&upstream, &[]).await;
    let other = place.gateway(&upstream, &["--wait", "20s"]).await;
    let impatient = place.gateway(&upstream, &[]).await;
    let first = tokio::spawn(pay(owner.client(), "k"));
    wait_until("the upstream runs", || upstream.count() == 1).await;
    let copy = pay(impatient.client(), "k").await.unwrap();
    assert_eq!((copy.status, copy.code().as_str()), (409, "in-progress"));
    let copy = pay(other.client(), "k").await.unwrap();
    assert_eq!((copy.status, copy.text()), (201, "{\"run\":1}"));
    assert_eq!(copy.header("idempotency-replayed"), Some("true"));
    assert_eq!(first.await.unwrap().unwrap().text(), copy.text());
    assert_eq!(upstream.count(), 1);
}

pub(crate) async fn h10_an_answer_that_was_seen_outlives_kill_9(place: Place) {
    let upstream = numbered().await;
    for round in 1..=5 {
        let mut gateway = place.gateway(&upstream, &[]).await;
        let key = format!("k{round}");
        let first = pay(gateway.client(), &key).await.unwrap();
        gateway.process.kill_9().await.unwrap();
        let gateway = place.gateway(&upstream, &[]).await;
        let again = pay(gateway.client(), &key).await.unwrap();
        assert_eq!((again.status, again.text()), (201, first.text()));
        assert_eq!(again.header("idempotency-replayed"), Some("true"));
        assert_eq!(upstream.count(), round);
    }
}

pub(crate) async fn h22_a_stale_owner_is_fenced_and_answers_with_the_record(place: Place) {
    let upstream = slow(Duration::from_millis(1500)).await;
    let options = ["--lease", "2s", "--on-unknown", "retry"];
    let stale = place.gateway(&upstream, &options).await;
    let other = place.gateway(&upstream, &options).await;
    let first = tokio::spawn(pay(stale.client(), "k"));
    wait_until("the upstream runs", || upstream.count() == 1).await;
    stale.process.sigstop().await.unwrap();
    let taken_over = other.settled(async |client| pay(client, "k").await).await;
    assert_eq!((taken_over.status, taken_over.text()), (201, "{\"run\":2}"));
    stale.process.sigcont().unwrap();
    let first = first.await.unwrap().expect("the stale owner answers too");
    assert_eq!((first.status, first.text()), (201, "{\"run\":2}"), "the record's reply, not its own");
    assert_eq!(upstream.count(), 2);
}

pub(crate) async fn h24_a_takeover_tells_its_attempt(place: Place) {
    let upstream = slow(Duration::from_millis(1500)).await;
    let options = ["--lease", "2s", "--on-unknown", "retry"];
    let mut gateway = place.gateway(&upstream, &options).await;
    let first = tokio::spawn(pay(gateway.client(), "k"));
    wait_until("the upstream runs", || upstream.count() == 1).await;
    assert_eq!(upstream.last().header("idempotency-attempt"), Some("1"));
    gateway.process.kill_9().await.unwrap();
    assert!(first.await.unwrap().is_err());
    let gateway = place.gateway(&upstream, &options).await;
    let early = pay(gateway.client(), "k").await.unwrap();
    assert_eq!((early.status, early.code().as_str()), (409, "in-progress"), "not before the lease is over");
    let retry = gateway.settled(async |client| pay(client, "k").await).await;
    assert_eq!((retry.status, retry.text()), (201, "{\"run\":2}"));
    assert_eq!(upstream.last().header("idempotency-attempt"), Some("2"));
    assert_eq!(upstream.last().header("idempotency-key"), Some("k"));
}

pub(crate) async fn h25_held_after_kill_9_until_an_operator_resolves_it(place: Place) {
    let upstream = slow(Duration::from_secs(600)).await;
    let mut gateway = place.gateway(&upstream, &["--lease", "2s"]).await;
    let first = tokio::spawn(pay(gateway.client(), "k"));
    wait_until("the upstream runs", || upstream.count() == 1).await;
    gateway.process.kill_9().await.unwrap();
    assert!(first.await.unwrap().is_err());
    let gateway = place.gateway(&upstream, &["--lease", "2s"]).await;
    let retry = gateway.settled(async |client| pay(client, "k").await).await;
    assert_eq!((retry.status, retry.code().as_str()), (409, "outcome-unknown"), "{}", retry.text());

    let (ok, said) = place.keys(&["list", "--state", "unknown", "--json"]).await;
    assert!(ok && said.contains("\"k\""), "{said}");
    let resolve =
        ["resolve", "k", "--status", "201", "--body", "{\"run\": 1}", "--reason", "seen at the bank"];
    let (ok, said) = place.keys(&resolve).await;
    assert!(ok, "{said}");
    let retry = pay(gateway.client(), "k").await.unwrap();
    assert_eq!((retry.status, retry.text()), (201, "{\"run\": 1}"));
    assert_eq!(retry.header("idempotency-replayed"), Some("true"));
    let (ok, said) = place.keys(&["audit", "--json"]).await;
    assert!(ok && said.contains("seen at the bank"), "{said}");
    assert_eq!(upstream.count(), 1);
}

pub(crate) async fn an_operator_frees_a_key(place: Place) {
    let upstream = numbered().await;
    let gateway = place.gateway(&upstream, &["--cache-bytes", "0"]).await;
    assert_eq!(pay(gateway.client(), "k").await.unwrap().text(), "{\"run\":1}");
    let (ok, said) = place.keys(&["release", "k", "--reason", "charged back"]).await;
    assert!(!ok && said.contains("--force"), "{said}");
    let (ok, said) = place.keys(&["forget", "k", "--reason", "charged back"]).await;
    assert!(ok, "{said}");
    let (ok, said) = place.keys(&["forget", "k", "--reason", "charged back"]).await;
    assert!(!ok && said.contains("is free already, and nothing was changed"), "{said}");
    let (ok, said) = place.keys(&["audit", "k", "--json"]).await;
    assert!(ok && said.matches("\"forget\"").count() == 1, "{said}");
    let again = pay(gateway.client(), "k").await.unwrap();
    assert_eq!((again.text(), again.header("idempotency-replayed")), ("{\"run\":2}", None));
    assert_eq!(upstream.last().header("idempotency-attempt"), Some("2"));
    let (ok, said) = place.keys(&["show", "k", "--json"]).await;
    assert!(ok && said.contains("completed"), "{said}");
}

pub(crate) async fn a_record_expires_and_is_purged(place: Place) {
    let upstream = numbered().await;
    let options = ["--lease", "500ms", "--retention", "1s", "--cache-bytes", "0"];
    let gateway = place.gateway(&upstream, &options).await;
    assert_eq!(pay(gateway.client(), "k").await.unwrap().text(), "{\"run\":1}");
    assert_eq!(pay(gateway.client(), "kept").await.unwrap().text(), "{\"run\":2}");
    wait_for("the key is new again", async || {
        let answer = pay(gateway.client(), "k").await.unwrap();
        (answer.text() == "{\"run\":3}").then_some(())
    })
    .await;
    wait_for("what expired is purged", async || {
        let (ok, said) = place.keys(&["purge"]).await;
        assert!(ok, "{said}");
        let (ok, said) = place.keys(&["stats", "--json"]).await;
        assert!(ok, "{said}");
        let stats: serde_json::Value = serde_json::from_str(&said).unwrap();
        (stats["completed"] == 0 && stats["expired"] == 0).then_some(())
    })
    .await;
}
