//! H23: a client that ends its side after its request gets its answer; one that is gone costs nothing for long.

#![allow(clippy::unwrap_used, reason = "a failing test says where")]

mod common;

use std::time::Duration;

use bytes::Bytes;
use common::Gateway;
use parking_lot::Mutex;
use testkit::{Answer, RawConnection, Upstream, wait_until};

/// Sends a request, ends the client's side, and reads until the gateway closes.
async fn ask(gateway: &Gateway, request: &str) -> String {
    let mut client = RawConnection::open(gateway.addr).await;
    client.write(request).await;
    client.shutdown().await;
    String::from_utf8(client.read_to_end().await).unwrap()
}

#[tokio::test]
async fn a_client_that_ends_its_side_gets_its_answer() {
    let upstream = Upstream::start(|seen| match seen.path() {
        "/slow" => Answer::ok("done").delay(Duration::from_secs(2)),
        _ => Answer::ok("done"),
    })
    .await;
    let gateway = Gateway::start(&upstream.url()).await;
    for path in ["/", "/slow"] {
        for body in ["GET", "PUT"] {
            let framing = if body == "PUT" { "Content-Length: 3\r\n\r\nabc" } else { "\r\n" };
            for version in ["1.1", "1.0"] {
                let request = format!("{body} {path} HTTP/{version}\r\nHost: h\r\n{framing}");
                let back = ask(&gateway, &request).await;
                // What a client skips while it waits.
                let back = back.trim_start_matches("HTTP/1.1 100 Continue\r\n\r\n");
                assert!(back.starts_with(&format!("HTTP/{version} 200")), "{request}: {back}");
                assert!(back.ends_with("\r\n\r\ndone"), "{request}: {back}");
            }
        }
    }
    assert_eq!(upstream.count(), 8);
}

/// A beginning of HTTP/2, or of a POST: nobody waits for the rest of it.
#[tokio::test]
async fn what_is_left_of_a_preface_is_answered_when_its_client_ends_its_side() {
    let upstream = Upstream::start(|_| Answer::ok("done")).await;
    let gateway = Gateway::start(&upstream.url()).await;
    for beginning in ["P", "PRI * HTTP/2.0\r\n\r\nS"] {
        let back = ask(&gateway, beginning).await;
        assert!(back.starts_with("HTTP/1.1 400"), "{beginning:?}: {back:?}");
    }
    assert_eq!(upstream.count(), 0);
}

#[tokio::test]
async fn every_request_of_a_pipeline_that_ends_is_answered() {
    let upstream = Upstream::start(|seen| Answer::ok(seen.path().to_owned())).await;
    let gateway = Gateway::start(&upstream.url()).await;
    let one = |n| format!("GET /{n} HTTP/1.1\r\nHost: h\r\n\r\n");
    let back = ask(&gateway, &(one(1) + &one(2) + &one(3))).await;
    for n in 1..=3 {
        assert!(back.contains(&format!("\r\n\r\n/{n}")), "{back}");
    }
}

#[tokio::test]
async fn a_long_answer_to_a_client_that_ended_its_side_comes_whole() {
    let upstream = Upstream::start(|_| Answer::chunks(vec!["x"; 12], Duration::from_millis(200))).await;
    let gateway = Gateway::start(&upstream.url()).await;
    let back = ask(&gateway, "GET / HTTP/1.1\r\nHost: h\r\n\r\n").await;
    assert_eq!(back.matches("1\r\nx\r\n").count(), 12, "{back}");
    assert!(back.ends_with("0\r\n\r\n"), "{back}");
}

#[tokio::test]
async fn a_client_that_is_gone_cancels_its_call_before_the_answer_begins() {
    let upstream = Upstream::start(|_| Answer::hang()).await;
    let gateway = Gateway::start(&upstream.url()).await;
    for reset in [false, true] {
        let before = upstream.count();
        let mut client = RawConnection::open(gateway.addr).await;
        client.write("GET / HTTP/1.1\r\nHost: h\r\n\r\n").await;
        wait_until("the request runs", || upstream.count() == before + 1).await;
        if reset {
            client.reset()
        } else {
            drop(client)
        }
        wait_until("the upstream connection is closed", || upstream.open_connections() == 0).await;
    }
}

#[tokio::test]
async fn a_client_that_is_gone_from_a_silent_stream_frees_the_upstream() {
    let (events, answer) = Answer::channel();
    let answer = Mutex::new(Some(answer));
    let upstream = Upstream::start(move |_| answer.lock().take().unwrap()).await;
    let gateway = Gateway::start(&upstream.url()).await;
    events.send(Bytes::from_static(b"x")).unwrap();
    let mut response = gateway.client().get("/").send_streaming().await.unwrap();
    response.chunk().await.unwrap();
    drop(response);
    // The upstream says nothing more, so that nothing is written to the client.
    wait_until("the upstream connection is closed", || events.is_closed()).await;
}
