//! What happens while the store cannot be reached, and afterwards.

use std::time::Duration;

use testkit::{wait_for, wait_until};

use crate::Place;
use crate::common::pay;
use crate::requests::{numbered, slow};

pub(crate) async fn h20_without_its_store_nothing_runs_and_afterwards_it_does(place: Place) {
    let upstream = numbered().await;
    let gateway = place.gateway(&upstream, &["--cache-bytes", "0"]).await;
    assert_eq!(pay(gateway.client(), "before").await.unwrap().text(), "{\"run\":1}");
    place.network().refuse(true);
    place.network().cut();
    for key in ["new", "before"] {
        let refused = pay(gateway.client(), key).await.unwrap();
        assert_eq!(
            (refused.status, refused.code().as_str()),
            (503, "store-unavailable"),
            "{}",
            refused.text()
        );
        assert!(refused.header("retry-after").is_some());
    }
    assert_eq!(upstream.count(), 1, "nothing runs unguarded");
    let open = place.network();
    open.refuse(false);
    let answer = wait_for("the store is back", async || {
        let answer = pay(gateway.client(), "new").await.unwrap();
        (answer.status == 201).then_some(answer)
    })
    .await;
    assert_eq!(answer.text(), "{\"run\":2}");
    assert_eq!(pay(gateway.client(), "before").await.unwrap().text(), "{\"run\":1}");
    assert_eq!(upstream.count(), 2);
}

pub(crate) async fn h20_a_claim_whose_answer_was_lost_runs_once(place: Place) {
    let upstream = numbered().await;
    let gateway = place.gateway(&upstream, &["--wait", "20s"]).await;
    // The key reaches the store in the claim first.
    place.network().lose_reply_to("order-lost");
    let answer = pay(gateway.client(), "order-lost").await.unwrap();
    assert_eq!((answer.status, answer.text()), (201, "{\"run\":1}"));
    assert_eq!(place.network().lost_replies(), 1);
    let again = pay(gateway.client(), "order-lost").await.unwrap();
    assert_eq!((again.text(), again.header("idempotency-replayed")), ("{\"run\":1}", Some("true")));
    assert_eq!(upstream.count(), 1);
}

pub(crate) async fn h21_a_reply_that_cannot_be_recorded_is_given_and_said(place: Place) {
    let upstream = slow(Duration::from_millis(500)).await;
    let gateway = place.gateway(&upstream, &["--lease", "2s"]).await;
    let first = tokio::spawn(pay(gateway.client(), "k"));
    wait_until("the upstream runs", || upstream.count() == 1).await;
    place.network().refuse(true);
    place.network().cut();
    let answer = first.await.unwrap().unwrap();
    assert_eq!((answer.status, answer.text()), (201, "{\"run\":1}"), "the client gets the real reply");
    assert_eq!(answer.header("idempotency-status"), Some("not-recorded"));
    place.network().refuse(false);
    // It is recorded after all, once the store is back.
    let again = gateway
        .settled(async |client| {
            loop {
                let answer = pay(client, "k").await?;
                match answer.code().as_str() {
                    "store-unavailable" | "outcome-unknown" => {
                        tokio::time::sleep(Duration::from_millis(100)).await;
                    }
                    _ => return Ok(answer),
                }
            }
        })
        .await;
    assert_eq!((again.status, again.text()), (201, "{\"run\":1}"));
    assert_eq!(again.header("idempotency-replayed"), Some("true"));
    assert_eq!(upstream.count(), 1);
}

pub(crate) async fn h21_a_store_that_is_back_within_the_lease_gets_the_reply(place: Place) {
    let upstream = slow(Duration::from_millis(500)).await;
    let gateway = place.gateway(&upstream, &["--lease", "60s"]).await;
    let first = tokio::spawn(pay(gateway.client(), "k"));
    wait_until("the upstream runs", || upstream.count() == 1).await;
    place.network().refuse(true);
    place.network().cut();
    wait_until("the upstream has answered", || upstream.answered() == 1).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!first.is_finished(), "recorded before its first byte");
    place.network().refuse(false);
    let answer = first.await.unwrap().unwrap();
    assert_eq!((answer.status, answer.header("idempotency-status")), (201, None));
    let again = pay(gateway.client(), "k").await.unwrap();
    assert_eq!((again.text(), again.header("idempotency-replayed")), ("{\"run\":1}", Some("true")));
}

pub(crate) async fn an_owner_that_was_cut_off_longer_than_its_lease_is_not_taken_over(place: Place) {
    let upstream = slow(Duration::from_secs(8)).await;
    let options = ["--lease", "2s", "--on-unknown", "retry"];
    let owner = place.gateway(&upstream, &options).await;
    let other = place.gateway(&upstream, &options).await;
    let first = tokio::spawn(pay(owner.client(), "k"));
    wait_until("the upstream runs", || upstream.count() == 1).await;
    // Nobody reaches the store for longer than the lease, then all do.
    place.network().refuse(true);
    place.network().cut();
    tokio::time::sleep(Duration::from_secs(4)).await;
    place.network().refuse(false);
    wait_for("the owner is done", async || {
        let answer = pay(other.client(), "k").await.unwrap();
        let code = if answer.status == 201 { String::new() } else { answer.code() };
        assert!(answer.status == 201 || code == "in-progress" || code == "store-unavailable", "{code}");
        (answer.status == 201).then_some(())
    })
    .await;
    assert_eq!(first.await.unwrap().unwrap().text(), "{\"run\":1}");
    assert_eq!(upstream.count(), 1, "the living owner was not taken over");
}
