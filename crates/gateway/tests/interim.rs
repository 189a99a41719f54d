//! H23: what the upstream says before its answer goes on: RFC 9110 §15.2.

#![allow(clippy::unwrap_used, reason = "a failing test says where")]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{Gateway, QUIET};
use onlyonce_core::MemoryStore;
use testkit::{RawConnection, RawUpstream, send_raw};

const HINTS: &str = "HTTP/1.1 103 Early Hints\r\nLink: </a.css>; rel=preload\r\nLink: </b.js>; rel=preload\r\n\
                     Connection: x-hop\r\nX-Hop: 1\r\nIdempotency-Replayed: true\r\n\r\n";
const ANSWER: &str = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";

#[tokio::test]
async fn early_hints_reach_the_client_before_the_answer_is_there() {
    let upstream = RawUpstream::start(|_, mut connection| async move {
        connection.read_head().await;
        connection.write(HINTS).await;
        // The answer only after the client has seen the hints.
        connection.read_head().await;
    })
    .await;
    let gateway = Gateway::start(&upstream.url()).await;
    let mut client = RawConnection::open(gateway.addr).await;
    client.write("GET / HTTP/1.1\r\nHost: h\r\n\r\n").await;
    let hints = String::from_utf8(client.read_head().await.unwrap()).unwrap();
    assert!(hints.starts_with("HTTP/1.1 103 Early Hints\r\n"), "{hints}");
    assert!(hints.contains("link: </a.css>; rel=preload\r\nlink: </b.js>; rel=preload\r\n"), "{hints}");
    assert!(hints.contains("via: 1.1 onlyonce\r\n"), "{hints}");
    assert!(!hints.to_lowercase().contains("hop") && !hints.contains("idempotency"), "{hints}");
}

#[tokio::test]
async fn several_interim_answers_come_in_their_order_and_continue_is_not_among_them() {
    let processing = "HTTP/1.1 102 Processing\r\n\r\n";
    let answer = format!("HTTP/1.1 100 Continue\r\n\r\n{processing}{HINTS}{processing}{ANSWER}");
    let upstream = RawUpstream::answering(answer).await;
    let gateway = Gateway::start(&upstream.url()).await;
    let get = "GET / HTTP/1.1\r\nHost: h\r\n\r\n";
    // Twice on one connection, and a pipeline.
    let back = send_raw(gateway.addr, format!("{get}{get}"), QUIET).await;
    let back = String::from_utf8(back).unwrap();
    let statuses: Vec<&str> =
        back.split("HTTP/1.1 ").skip(1).map(|rest| rest.get(..3).unwrap_or_default()).collect();
    assert_eq!(statuses, ["102", "103", "102", "200", "102", "103", "102", "200"], "{back}");
}

#[tokio::test]
async fn who_cannot_have_them_is_spared_them() {
    let upstream = RawUpstream::answering(format!("{HINTS}{ANSWER}")).await;
    let store = Arc::new(MemoryStore::new());
    let gateway = Gateway::guarded(&upstream.url(), store, |_| {}, |builder| builder).await;
    for request in [
        // A client of HTTP/1.0 does not know them.
        "GET / HTTP/1.0\r\n\r\n",
        // Nothing of a guarded reply leaves before it is recorded.
        "POST / HTTP/1.1\r\nHost: h\r\nConnection: close\r\nIdempotency-Key: k\r\nContent-Length: 0\r\n\r\n",
    ] {
        let back = String::from_utf8(send_raw(gateway.addr, request, Duration::from_secs(20)).await).unwrap();
        assert!(back[8..].starts_with(" 200") && back.ends_with("\r\n\r\nok"), "{request}: {back}");
    }
    let response = gateway.h2c().get("/").send().await.unwrap();
    assert_eq!((response.status, response.text()), (200, "ok"));
}
