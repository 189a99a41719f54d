//! Every try is the same request, until there is a result.

#![allow(clippy::unwrap_used, reason = "a test fails by it")]

use std::time::Duration;

use client::{Operation, send};
use serde_json::json;
use testkit::{Answer, Upstream};

fn operation() -> Operation {
    Operation { key: "order-7".into(), body: r#"{"amount":100}"#.into() }
}

#[tokio::test]
async fn it_sends_the_same_key_and_body_until_there_is_a_result() {
    let upstream = Upstream::start(|seen| match seen.number {
        1 => Answer::reset(),
        2 => Answer::new(503, "busy").header("retry-after", "1"),
        3 => Answer::json(409, &json!({"code": "in-progress", "retryable": true})),
        _ => Answer::json(201, &json!({"charged": 100})),
    })
    .await;
    let url = format!("{}/pay?x=1", upstream.url()).parse().unwrap();
    let start = tokio::time::Instant::now();
    let (status, body) = send(&url, &operation(), Duration::from_secs(60)).await.unwrap();
    assert_eq!((status.as_u16(), &body[..]), (201, &br#"{"charged":100}"#[..]));
    assert!(start.elapsed() >= Duration::from_secs(1), "Retry-After is the least");
    let seen = upstream.seen();
    assert_eq!(seen.len(), 4);
    for request in seen {
        assert_eq!((request.path(), request.header("idempotency-key")), ("/pay?x=1", Some("\"order-7\"")));
        assert_eq!(&request.body[..], br#"{"amount":100}"#);
    }
}

#[tokio::test]
async fn a_refusal_that_will_stay_is_the_result() {
    for (status, body) in [
        (422, json!({"code": "key-reused", "retryable": false})),
        (504, json!({"code": "outcome-unknown", "retryable": false})),
        (402, json!({"error": "declined"})),
    ] {
        let answer = body.clone();
        let upstream = Upstream::start(move |_| Answer::json(status, &answer)).await;
        let (got, _) =
            send(&upstream.url().parse().unwrap(), &operation(), Duration::from_secs(60)).await.unwrap();
        assert_eq!((got.as_u16(), upstream.count()), (status, 1), "{body}");
    }
}

#[tokio::test]
async fn it_gives_up_with_the_key_to_go_on_with() {
    let upstream = Upstream::start(|_| Answer::new(503, "busy")).await;
    let given_up = send(&upstream.url().parse().unwrap(), &operation(), Duration::from_millis(300)).await;
    assert!(given_up.unwrap_err().to_string().contains("the same key order-7"));
    assert!(upstream.count() >= 1);
}
